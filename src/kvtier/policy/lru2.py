"""The block whose last use but one is longest ago goes first.

O'Neil, O'Neil and Weikum, "The LRU-K Page Replacement Algorithm for Database Disk Buffering", SIGMOD 1993, with K = 2.
What was used only once goes before all others, by its one use. The uses that one request makes of a block it has
inserted itself are correlated in the sense of the paper, and count once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain

from kvtier.interfaces import CachePolicy
from kvtier.keys import OffloadKey
from kvtier.policy.recency import has_evictable, least_recent

_HISTORY_PER_BLOCK = 2
_MIN_STALE = 64


class LRU2CachePolicy(CachePolicy):
    """Time is counted in uses. O(log keys) a use.

    About 400 bytes a resident key, and 200 for each key in the history: those evicted last, twice the capacity.
    """

    name = "lru2"

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._start()

    def _start(self) -> None:
        self._now = 0
        self._once: OrderedDict[OffloadKey, int] = OrderedDict()
        """Resident keys used once -> when, least recent first."""
        self._again: dict[OffloadKey, tuple[int, int]] = {}
        """Resident keys used again -> their last use but one, their last use."""
        self._order: list[tuple[int, OffloadKey]] = []
        """A heap of the keys in `_again` by their last use but one, among entries that have been overtaken."""
        self._history: OrderedDict[OffloadKey, int] = OrderedDict()
        """Evicted keys -> their last use, the first to be forgotten first."""

    def insert(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            self._now += 1
            last = self._history.pop(key, None)
            if last is None:
                self._once[key] = self._now
            else:
                self._use_again(key, last)
        while len(self._history) > _HISTORY_PER_BLOCK * self.cache_capacity:
            self._history.popitem(last=False)

    def _use_again(self, key: OffloadKey, last: int) -> None:
        """Now, and before that at `last`."""
        self._again[key] = (last, self._now)
        heappush(self._order, (last, key))
        if len(self._order) > 2 * len(self._again) + _MIN_STALE:
            self._order = [(last_but_one, key) for key, (last_but_one, _) in self._again.items()]
            heapify(self._order)

    def touch(self, keys: Iterable[OffloadKey], first_use: Container[OffloadKey] = ()) -> None:
        once, again = self._once, self._again
        for key in keys:
            self._now += 1
            if key in again:
                last_but_one, last = again[key]
                if key in first_use:
                    again[key] = (last_but_one, self._now)
                else:
                    self._use_again(key, last)
            elif key in once:
                if key in first_use:
                    once[key] = self._now
                    once.move_to_end(key)
                else:
                    self._use_again(key, once.pop(key))

    def settle(self, keys: Iterable[OffloadKey], first_use: Container[OffloadKey]) -> None:
        self.touch(keys, first_use)

    def evict(self, count: int, protected: Sequence[Container[OffloadKey]] = ()) -> list[OffloadKey] | None:
        if not has_evictable(self, count, protected):
            return None
        victims = least_recent(self._once, count, protected)
        self._history.update((victim, self._once.pop(victim)) for victim in victims)
        passed_over = []
        while len(victims) < count:
            entry = heappop(self._order)
            last_but_one, key = entry
            if key not in self._again or self._again[key][0] != last_but_one:
                continue  # overtaken
            if any(key in container for container in protected):
                passed_over.append(entry)
            else:
                self._history[key] = self._again.pop(key)[1]
                victims.append(key)
        for entry in passed_over:
            heappush(self._order, entry)
        return victims

    def remove(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            self._once.pop(key, None)
            self._again.pop(key, None)

    def clear(self) -> None:
        self._start()

    def __contains__(self, key: object) -> bool:
        return key in self._once or key in self._again

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __iter__(self) -> Iterator[OffloadKey]:
        return chain(self._once, self._again)
