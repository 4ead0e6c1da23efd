"""Least recently used, with a request's prefix outliving its suffix (the manager touches deepest first)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import islice, repeat

from kvtier.interfaces import CachePolicy
from kvtier.keys import OffloadKey
from kvtier.policy.ordering import consume, evictable


class LRUCachePolicy(CachePolicy):
    """One list from least to most recently used. About 100 bytes a resident key."""

    name = "lru"

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._order: OrderedDict[OffloadKey, None] = OrderedDict()

    def insert(self, keys: Sequence[OffloadKey]) -> None:
        consume(map(self._order.__setitem__, keys, repeat(None)))

    def touch(self, keys: Iterable[OffloadKey], first_use: Container[OffloadKey] = ()) -> None:
        order = self._order
        consume(map(order.move_to_end, filter(order.__contains__, keys)))

    def settle(self, keys: Iterable[OffloadKey], first_use: Container[OffloadKey]) -> None:
        self.touch(keys)

    def evict(self, count: int, protected: Sequence[Container[OffloadKey]] = ()) -> list[OffloadKey] | None:
        victims = list(islice(evictable(self._order, protected), count))
        if len(victims) < count:
            return None
        consume(map(self._order.__delitem__, victims))
        return victims

    def remove(self, keys: Iterable[OffloadKey]) -> None:
        consume(map(self._order.__delitem__, keys))

    def clear(self) -> None:
        self._order.clear()

    def __contains__(self, key: object) -> bool:
        return key in self._order

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self._order)
