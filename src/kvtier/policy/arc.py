"""Adaptive replacement cache.

Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003. As there, a ghost hit enters
T2 (vLLM's ARC puts it in T1). Two things differ from the paper, because blocks come in batches that are read and
written by engines: victims are chosen before the batch they make room for is inserted, and each ghost list is
bounded by the capacity alone, so that a batch as large as the cache still leaves its victims remembered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain, filterfalse, islice, repeat

from kvtier.interfaces import CachePolicy
from kvtier.keys import OffloadKey
from kvtier.policy.ordering import consume, evictable


class ARCCachePolicy(CachePolicy):
    """T1: used once. T2: used again. B1, B2: keys (only) that left T1, T2. All least recent first.

    `target_t1_size` (0..cache_capacity) grows when a key in B1 returns and shrinks when one in B2 does.
    About 100 bytes a resident key and as much a ghost, of which there are at most twice the capacity.
    """

    name = "arc"

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.target_t1_size = 0.0
        self.t1: OrderedDict[OffloadKey, None] = OrderedDict()
        self.t2: OrderedDict[OffloadKey, None] = OrderedDict()
        self.b1: OrderedDict[OffloadKey, None] = OrderedDict()
        self.b2: OrderedDict[OffloadKey, None] = OrderedDict()

    def insert(self, keys: Sequence[OffloadKey]) -> None:
        b1, b2 = self.b1, self.b2
        if b1.keys().isdisjoint(keys) and b2.keys().isdisjoint(keys):
            consume(map(self.t1.__setitem__, keys, repeat(None)))
            return
        for key in keys:
            ghosts = b1 if key in b1 else b2 if key in b2 else None
            if ghosts is None:
                self.t1[key] = None
            else:
                self._adapt(key)
                del ghosts[key]
                self.t2[key] = None

    def touch(self, keys: Iterable[OffloadKey], first_use: Container[OffloadKey] = ()) -> None:
        keys = list(keys)
        self.settle(keys, first_use)
        for key in keys:
            if key not in self and key not in first_use:
                self._adapt(key)

    def settle(self, keys: Iterable[OffloadKey], first_use: Container[OffloadKey]) -> None:
        t1, t2 = self.t1, self.t2
        in_t1 = []
        for key in keys:
            if key in t1:
                in_t1.append(key)
            elif key in t2:
                t2.move_to_end(key)
        consume(map(t1.move_to_end, filter(first_use.__contains__, in_t1)))
        for key in filterfalse(first_use.__contains__, in_t1):
            del t1[key]
            t2[key] = None

    def evict(self, count: int, protected: Sequence[Container[OffloadKey]] = ()) -> list[OffloadKey] | None:
        # REPLACE of the paper for a whole batch: T1 gives while it is above its target, then T2; and where one of
        # them has no evictable key left, the other gives the rest.
        wanted_from_t1 = min(count, max(0, len(self.t1) - int(self.target_t1_size)))
        t1 = evictable(self.t1, protected)
        t2 = evictable(self.t2, protected)
        from_t1 = list(islice(t1, wanted_from_t1))
        from_t2 = list(islice(t2, count - len(from_t1)))
        from_t1 += islice(t1, count - len(from_t1) - len(from_t2))
        if len(from_t1) + len(from_t2) < count:
            return None
        self._retire(self.t1, self.b1, from_t1)
        self._retire(self.t2, self.b2, from_t2)
        return from_t1 + from_t2

    def remove(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            del (self.t1 if key in self.t1 else self.t2)[key]

    def clear(self) -> None:
        for order in (self.t1, self.t2, self.b1, self.b2):
            order.clear()
        self.target_t1_size = 0.0

    def __contains__(self, key: object) -> bool:
        return key in self.t1 or key in self.t2

    def __len__(self) -> int:
        return len(self.t1) + len(self.t2)

    def __iter__(self) -> Iterator[OffloadKey]:
        return chain(self.t1, self.t2)

    def _adapt(self, key: OffloadKey) -> None:
        b1, b2 = self.b1, self.b2
        if key in b1:
            step = max(1.0, len(b2) / len(b1))
            self.target_t1_size = min(self.target_t1_size + step, float(self.cache_capacity))
            b1.move_to_end(key)
        elif key in b2:
            step = max(1.0, len(b1) / len(b2))
            self.target_t1_size = max(self.target_t1_size - step, 0.0)
            b2.move_to_end(key)

    def _retire(
        self,
        residents: OrderedDict[OffloadKey, None],
        ghosts: OrderedDict[OffloadKey, None],
        victims: list[OffloadKey],
    ) -> None:
        consume(map(residents.__delitem__, victims))
        consume(map(ghosts.__setitem__, victims, repeat(None)))
        for _ in range(len(ghosts) - self.cache_capacity):
            ghosts.popitem(last=False)
