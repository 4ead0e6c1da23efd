"""Three first-in-first-out queues: what is not used again soon leaves quickly.

Yang, Zhang, Qiu, Yue and Rashmi, "FIFO Queues are All You Need for Cache Eviction", SOSP 2023, as libCacheSim has it:
until something is evicted, what no longer fits the small queue goes to the main one. Two things differ, because blocks
come in batches that are read and written by engines: victims are chosen before the batch they make room for is
inserted, and the blocks that a request inserted line up anew when it ends, the deepest first.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import chain

from kvtier.interfaces import CachePolicy
from kvtier.keys import OffloadKey
from kvtier.policy.recency import RecencyQueue, append, consume, discard, has_evictable, put_back

_SMALL_SHARE = 0.1
_MAX_USES = 3
_USES_TO_STAY = 2
"""A key that was used so often again while it was in the small queue moves to the main one."""


class S3FIFOCachePolicy(CachePolicy):
    """`small`: new keys. `main`: used again, or returned soon. `ghosts`: keys (only) that left `small`. Oldest first.

    Uses are counted and move nothing. About 250 bytes a resident key and 200 a ghost; there are as many ghosts as
    `main` has places, and until the next insertion those that it makes room for.
    """

    name = "s3fifo"

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.main_capacity = cache_capacity - max(1, int(cache_capacity * _SMALL_SHARE))
        self.small = RecencyQueue()
        self.main = RecencyQueue()
        self.ghosts = RecencyQueue()
        self._uses: dict[OffloadKey, int] = {}
        """1 to 3 further uses of a resident key; without any it is not in here."""
        self._has_evicted = False

    def insert(self, keys: Sequence[OffloadKey]) -> None:
        new: Sequence[OffloadKey] = keys
        if not self.ghosts.keys().isdisjoint(keys):
            append(self.main, filter(self.ghosts.__contains__, keys))
            new = [key for key in keys if key not in self.ghosts]
            discard(self.ghosts, keys)
        room = len(new)
        if not self._has_evicted:
            room = max(0, self.cache_capacity - self.main_capacity - len(self.small))
        append(self.small, new[:room])
        append(self.main, new[room:])
        while len(self.ghosts) > self.main_capacity:
            self.ghosts.popitem(last=False)

    def touch(self, keys: Iterable[OffloadKey], first_use: Container[OffloadKey] = ()) -> None:
        small, main, uses = self.small, self.main, self._uses
        for key in keys:
            if key not in small and key not in main:
                continue
            if key in first_use:
                (small if key in small else main).move_to_end(key)
            else:
                uses[key] = min(uses.get(key, 0) + 1, _MAX_USES)

    def settle(self, keys: Iterable[OffloadKey], first_use: Container[OffloadKey]) -> None:
        self.touch(keys, first_use)

    def evict(self, count: int, protected: Sequence[Container[OffloadKey]] = ()) -> list[OffloadKey] | None:
        if not has_evictable(self, count, protected):
            return None
        victims: list[OffloadKey] = []
        passed_small: list[OffloadKey] = []
        passed_main: list[OffloadKey] = []

        def is_protected(key: OffloadKey) -> bool:
            return any(key in container for container in protected)

        while len(victims) < count:
            main_is_over = len(self.main) + len(passed_main) > self.main_capacity
            if self.main and (main_is_over or not self.small):
                victims += self._evict_from_main(is_protected, passed_main)
            else:
                victims += self._evict_from_small(is_protected, passed_small)
        put_back(self.small, passed_small)
        put_back(self.main, passed_main)
        self._has_evicted = self._has_evicted or count > 0
        return victims

    def _evict_from_small(
        self, is_protected: Callable[[OffloadKey], bool], passed_over: list[OffloadKey]
    ) -> list[OffloadKey]:
        """At most one victim, now a ghost. What was used often enough moves, what is protected to `passed_over`."""
        while self.small:
            key, _ = self.small.popitem(last=False)
            if is_protected(key):
                passed_over.append(key)
            elif self._uses.pop(key, 0) >= _USES_TO_STAY:
                self.main[key] = None
            else:
                self.ghosts[key] = None
                return [key]
        return []

    def _evict_from_main(
        self, is_protected: Callable[[OffloadKey], bool], passed_over: list[OffloadKey]
    ) -> list[OffloadKey]:
        """At most one victim. What was used has another turn, with a use less, and is passed over if protected."""
        while self.main:
            key, _ = self.main.popitem(last=False)
            if is_protected(key):
                passed_over.append(key)
                continue
            uses = self._uses.pop(key, 0)
            if not uses:
                return [key]
            self.main[key] = None
            if uses > 1:
                self._uses[key] = uses - 1
        return []

    def remove(self, keys: Iterable[OffloadKey]) -> None:
        keys = list(keys)
        discard(self.small, keys)
        discard(self.main, keys)
        consume(map(self._uses.pop, filter(self._uses.__contains__, keys)))

    def clear(self) -> None:
        for queue in (self.small, self.main, self.ghosts):
            queue.clear()
        self._uses.clear()
        self._has_evicted = False

    def __contains__(self, key: object) -> bool:
        return key in self.small or key in self.main

    def __len__(self) -> int:
        return len(self.small) + len(self.main)

    def __iter__(self) -> Iterator[OffloadKey]:
        return chain(self.small, self.main)
