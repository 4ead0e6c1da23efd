"""Adaptive replacement cache.

Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003. As there, a ghost hit enters
T2 (vLLM's ARC puts it in T1). Two things differ from the paper, because blocks come in batches that are read and
written by engines: victims are chosen before the batch they make room for is inserted, and each ghost list is bounded
by the capacity alone: the paper's directory, which has no room for B1 while T1 fills the cache, forgets a batch's
victims at once (on the conversation trace that costs a sixth of the hits at 1 %). As long as it is driven by single
keys, without requests, the bounds are the paper's too.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain, repeat, starmap, takewhile

from kvtier.interfaces import CachePolicy
from kvtier.keys import OffloadKey
from kvtier.policy.recency import RecencyQueue, append, consume, discard, least_recent, pop_first, put_back


class ARCCachePolicy(CachePolicy):
    """T1: used once. T2: used again. B1, B2: keys (only) that left T1, T2. All least recent first.

    `target_t1_size` (0..cache_capacity) grows when a key in B1 returns and shrinks when one in B2 does.
    About 200 bytes a resident key and as much a ghost, of which there are at most twice the capacity.
    """

    name = "arc"

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.target_t1_size = 0.0
        self.t1 = RecencyQueue()
        self.t2 = RecencyQueue()
        self.b1 = RecencyQueue()
        self.b2 = RecencyQueue()
        self._is_driven_by_single_keys = True

    def insert(self, keys: Sequence[OffloadKey]) -> None:
        t1, t2, b1, b2 = self.t1, self.t2, self.b1, self.b2
        if b1.keys().isdisjoint(keys) and b2.keys().isdisjoint(keys):
            append(t1, keys)
        else:
            for key in keys:
                if key in b1:
                    self._raise_target()
                    del b1[key]
                    t2[key] = None
                elif key in b2:
                    self._lower_target()
                    del b2[key]
                    t2[key] = None
                else:
                    t1[key] = None
        if self._is_driven_by_single_keys:
            self._trim_as_in_the_paper(len(keys))

    def touch(self, keys: Iterable[OffloadKey], first_use: Container[OffloadKey] = ()) -> None:
        keys = list(keys)
        self._use(keys, first_use)
        for key in keys:
            if key in self.b1 and key not in first_use:
                self._raise_target()
                self.b1.move_to_end(key)
            elif key in self.b2 and key not in first_use:
                self._lower_target()
                self.b2.move_to_end(key)

    def settle(self, keys: Iterable[OffloadKey], first_use: Container[OffloadKey]) -> None:
        self._is_driven_by_single_keys = False
        self._use(list(keys), first_use)

    def _use(self, keys: list[OffloadKey], first_use: Container[OffloadKey]) -> None:
        """One use of the resident ones of `keys`."""
        t1, t2 = self.t1, self.t2
        # what the request inserted is nearly always its deepest blocks, and in T1
        own = list(takewhile(first_use.__contains__, keys))
        try:
            consume(map(t1.move_to_end, own))
            keys = keys[len(own) :]
        except KeyError:  # some have left, or are in T2, where they and the others are in one order
            pass
        for key in keys:
            if key in t2:
                t2.move_to_end(key)
            elif key in t1:
                if key in first_use:
                    t1.move_to_end(key)
                else:
                    del t1[key]
                    t2[key] = None

    def evict(self, count: int, protected: Sequence[Container[OffloadKey]] = ()) -> list[OffloadKey] | None:
        # REPLACE of the paper for a whole batch: T1 gives while it is above its target, then T2; and where one of
        # them has no evictable key left, the other gives the rest.
        num_t1 = max(0, min(count, len(self.t1) - int(self.target_t1_size)))
        from_t1 = pop_first(self.t1, num_t1, protected)
        if from_t1 is None:
            return self._evict_around(count, num_t1, protected)
        if num_t1 < count:
            from_t2 = pop_first(self.t2, count - num_t1, protected)
            if from_t2 is None:
                put_back(self.t1, from_t1)
                return self._evict_around(count, num_t1, protected)
            self._remember(self.b2, from_t2)
            if not from_t1:
                return from_t2
        else:
            from_t2 = []
        self._remember(self.b1, from_t1)
        return from_t1 + from_t2

    def _evict_around(
        self, count: int, num_t1: int, protected: Sequence[Container[OffloadKey]]
    ) -> list[OffloadKey] | None:
        """As `evict`, where the first keys will not do."""
        from_t1 = least_recent(self.t1, num_t1, protected)
        from_t2 = least_recent(self.t2, count - len(from_t1), protected)
        if len(from_t1) + len(from_t2) < count:
            from_t1 = least_recent(self.t1, count - len(from_t2), protected)
            if len(from_t1) + len(from_t2) < count:
                return None
        consume(map(self.t1.pop, from_t1))
        consume(map(self.t2.pop, from_t2))
        self._remember(self.b1, from_t1)
        self._remember(self.b2, from_t2)
        return from_t1 + from_t2

    def _remember(self, ghosts: RecencyQueue, victims: Sequence[OffloadKey]) -> None:
        append(ghosts, victims)
        _trim(ghosts, self.cache_capacity)

    def _trim_as_in_the_paper(self, num_inserted: int) -> None:
        """Case IV: T1 and B1 within the capacity, all four lists within twice that. The latest ghost stays."""
        if num_inserted > 1:
            self._is_driven_by_single_keys = False
        else:
            _trim(self.b1, max(1, self.cache_capacity - len(self.t1)))
            _trim(self.b2, max(1, 2 * self.cache_capacity - len(self) - len(self.b1)))

    def remove(self, keys: Iterable[OffloadKey]) -> None:
        keys = list(keys)
        discard(self.t1, keys)
        discard(self.t2, keys)

    def clear(self) -> None:
        for queue in (self.t1, self.t2, self.b1, self.b2):
            queue.clear()
        self.target_t1_size = 0.0
        self._is_driven_by_single_keys = True

    def __contains__(self, key: object) -> bool:
        return key in self.t1 or key in self.t2

    def __len__(self) -> int:
        return len(self.t1) + len(self.t2)

    def __iter__(self) -> Iterator[OffloadKey]:
        return chain(self.t1, self.t2)

    def _raise_target(self) -> None:
        """A ghost of B1, which still counts, has returned."""
        step = max(1.0, len(self.b2) / len(self.b1))
        self.target_t1_size = min(self.target_t1_size + step, float(self.cache_capacity))

    def _lower_target(self) -> None:
        """A ghost of B2, which still counts, has returned."""
        step = max(1.0, len(self.b1) / len(self.b2))
        self.target_t1_size = max(self.target_t1_size - step, 0.0)


def _trim(ghosts: RecencyQueue, limit: int) -> None:
    """Forgets the least recent beyond `limit` keys."""
    if len(ghosts) > limit:
        consume(starmap(ghosts.popitem, repeat((False,), len(ghosts) - limit)))
