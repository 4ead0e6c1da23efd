"""Adaptive replacement cache.

Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003. As there, a ghost hit enters
T2 (vLLM's ARC puts it in T1). Two things differ from the paper, because blocks come in batches that are read and
written by engines: victims are chosen before the batch they make room for is inserted, and each ghost list is
bounded by the capacity alone, so that a batch as large as the cache still leaves its victims remembered.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain, filterfalse

from kvtier.interfaces import CachePolicy
from kvtier.keys import OffloadKey
from kvtier.policy.recency import RecencyQueue


class ARCCachePolicy(CachePolicy):
    """T1: used once. T2: used again. B1, B2: keys (only) that left T1, T2. All least recent first.

    `target_t1_size` (0..cache_capacity) grows when a key in B1 returns and shrinks when one in B2 does.
    About 130 bytes a resident key and as much a ghost, of which there are at most twice the capacity.
    """

    name = "arc"

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.target_t1_size = 0.0
        self.t1 = RecencyQueue()
        self.t2 = RecencyQueue()
        self.b1 = RecencyQueue()
        self.b2 = RecencyQueue()

    def insert(self, keys: Sequence[OffloadKey]) -> None:
        if self.b1.isdisjoint(keys) and self.b2.isdisjoint(keys):
            self.t1.append(keys)
            return
        returning = [key for key in keys if key in self.b1 or key in self.b2]
        for key in returning:
            self._learn_from_ghost(key)
            (self.b1 if key in self.b1 else self.b2).discard((key,))
        self.t2.append(returning)
        self.t1.append(filterfalse(set(returning).__contains__, keys))

    def touch(self, keys: Iterable[OffloadKey], first_use: Container[OffloadKey] = ()) -> None:
        keys = list(keys)
        self.settle(keys, first_use)
        for key in keys:
            if key not in self and key not in first_use:
                self._learn_from_ghost(key)

    def settle(self, keys: Iterable[OffloadKey], first_use: Container[OffloadKey]) -> None:
        keys = list(keys)
        moving = list(filter(first_use.__contains__, keys))
        self.t2.refresh(self.t1.refresh(moving))
        if len(moving) == len(keys):
            return
        used = list(filterfalse(first_use.__contains__, keys)) if moving else keys
        gone = self.t2.discard(self.t1.discard(used))
        self.t2.append(filterfalse(set(gone).__contains__, used) if gone else used)

    def evict(self, count: int, protected: Sequence[Container[OffloadKey]] = ()) -> list[OffloadKey] | None:
        # REPLACE of the paper for a whole batch: T1 gives while it is above its target, then T2; and where one of
        # them has no evictable key left, the other gives the rest.
        above_target = len(self.t1) - int(self.target_t1_size)
        from_t1 = self.t1.take(min(count, max(0, above_target)), protected)
        from_t2 = self.t2.take(count - len(from_t1), protected)
        missing = count - len(from_t1) - len(from_t2)
        if missing:
            self.t1.put_back(from_t1)
            from_t1 = self.t1.take(len(from_t1) + missing, protected)
            if len(from_t1) + len(from_t2) < count:
                self.t1.put_back(from_t1)
                self.t2.put_back(from_t2)
                return None
        for ghosts, victims in ((self.b1, from_t1), (self.b2, from_t2)):
            ghosts.append(victims)
            ghosts.take(len(ghosts) - self.cache_capacity)
        return from_t1 + from_t2

    def remove(self, keys: Iterable[OffloadKey]) -> None:
        keys = list(keys)
        self.t1.discard(keys)
        self.t2.discard(keys)

    def clear(self) -> None:
        for queue in (self.t1, self.t2, self.b1, self.b2):
            queue.clear()
        self.target_t1_size = 0.0

    def __contains__(self, key: object) -> bool:
        return key in self.t1 or key in self.t2

    def __len__(self) -> int:
        return len(self.t1) + len(self.t2)

    def __iter__(self) -> Iterator[OffloadKey]:
        return chain(self.t1, self.t2)

    def _learn_from_ghost(self, key: OffloadKey) -> None:
        b1, b2 = self.b1, self.b2
        if key in b1:
            step = max(1.0, len(b2) / len(b1))
            self.target_t1_size = min(self.target_t1_size + step, float(self.cache_capacity))
            b1.refresh((key,))
        elif key in b2:
            step = max(1.0, len(b1) / len(b2))
            self.target_t1_size = max(self.target_t1_size - step, 0.0)
            b2.refresh((key,))
