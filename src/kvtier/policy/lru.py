"""Least recently used, with a request's prefix outliving its suffix (the manager settles deepest first)."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence

from kvtier.interfaces import CachePolicy
from kvtier.keys import OffloadKey
from kvtier.policy.recency import RecencyQueue, append, consume, discard, least_recent, pop_first


class LRUCachePolicy(CachePolicy):
    """One queue from least to most recently used. About 200 bytes a resident key."""

    name = "lru"

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._queue = RecencyQueue()

    def insert(self, keys: Sequence[OffloadKey]) -> None:
        append(self._queue, keys)

    def touch(self, keys: Iterable[OffloadKey], first_use: Container[OffloadKey] = ()) -> None:
        self.settle(keys, first_use)

    def settle(self, keys: Iterable[OffloadKey], first_use: Container[OffloadKey]) -> None:
        queue = self._queue
        keys = list(keys)
        try:
            consume(map(queue.move_to_end, keys))
        except KeyError:  # some have left: once more, without them
            consume(map(queue.move_to_end, filter(queue.__contains__, keys)))

    def evict(self, count: int, protected: Sequence[Container[OffloadKey]] = ()) -> list[OffloadKey] | None:
        victims = pop_first(self._queue, count, protected)
        if victims is not None:
            return victims
        victims = least_recent(self._queue, count, protected)
        if len(victims) < count:
            return None
        consume(map(self._queue.pop, victims))
        return victims

    def remove(self, keys: Iterable[OffloadKey]) -> None:
        discard(self._queue, keys)

    def clear(self) -> None:
        self._queue.clear()

    def __contains__(self, key: object) -> bool:
        return key in self._queue

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self._queue)
