"""Reference eviction policies on plain lists: slow, short, and meant to be checked by reading.

Every list runs from the next victim to the most recent key.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence

from kvtier.interfaces import CachePolicy
from kvtier.keys import OffloadKey

_Lists = Sequence[Container[OffloadKey]]


def _first_free(keys: Iterable[OffloadKey], protected: _Lists) -> OffloadKey | None:
    return next((key for key in keys if not any(key in group for group in protected)), None)


class ReferenceLRU(CachePolicy):
    """Least recently used: one list."""

    name = "lru"

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.order: list[OffloadKey] = []

    def insert(self, keys: Sequence[OffloadKey]) -> None:
        self.order += keys

    def touch(self, keys: Iterable[OffloadKey], first_use: Container[OffloadKey] = ()) -> None:
        for key in keys:
            if key in self.order:
                self.order.remove(key)
                self.order.append(key)

    def settle(self, keys: Iterable[OffloadKey], first_use: Container[OffloadKey]) -> None:
        self.touch([key for key in keys if key in self], first_use)

    def evict(self, count: int, protected: _Lists = ()) -> list[OffloadKey] | None:
        victims: list[OffloadKey] = []
        for _ in range(count):
            victim = _first_free(self.order, [*protected, victims])
            if victim is None:
                return None
            victims.append(victim)
        self.remove(victims)
        return victims

    def remove(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            if key in self.order:
                self.order.remove(key)

    def clear(self) -> None:
        self.order = []

    def __contains__(self, key: object) -> bool:
        return key in self.order

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self.order)


class ReferenceARC(CachePolicy):
    """Adaptive replacement: seen once (`t1`), seen again (`t2`), and the evicted of each (`b1`, `b2`).

    Of several victims those from `t1` are named first.
    """

    name = "arc"

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.t1: list[OffloadKey] = []
        self.t2: list[OffloadKey] = []
        self.b1: list[OffloadKey] = []
        self.b2: list[OffloadKey] = []
        self.target_t1_size = 0.0

    def insert(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            if key in self.b1 or key in self.b2:
                self._adapt(key)
                self._forget_ghost(key)
                self.t2.append(key)
            else:
                self.t1.append(key)

    def touch(self, keys: Iterable[OffloadKey], first_use: Container[OffloadKey] = ()) -> None:
        for key in keys:
            if key in self.t1:
                self.t1.remove(key)
                (self.t1 if key in first_use else self.t2).append(key)
            elif key in self.t2:
                self.t2.remove(key)
                self.t2.append(key)
            elif key not in first_use and (key in self.b1 or key in self.b2):
                self._adapt(key)
                ghosts = self.b1 if key in self.b1 else self.b2
                ghosts.remove(key)
                ghosts.append(key)

    def settle(self, keys: Iterable[OffloadKey], first_use: Container[OffloadKey]) -> None:
        self.touch([key for key in keys if key in self], first_use)

    def evict(self, count: int, protected: _Lists = ()) -> list[OffloadKey] | None:
        t1, t2 = list(self.t1), list(self.t2)
        victims: list[OffloadKey] = []
        for _ in range(count):
            first, second = (t1, t2) if len(t1) > self.target_t1_size else (t2, t1)
            victim = _first_free(first, protected) or _first_free(second, protected)
            if victim is None:
                return None
            (t1 if victim in t1 else t2).remove(victim)
            victims.append(victim)
        from_t1 = [victim for victim in victims if victim in self.t1]
        from_t2 = [victim for victim in victims if victim in self.t2]
        self.t1, self.t2 = t1, t2
        self.b1 = (self.b1 + from_t1)[-self.cache_capacity :]
        self.b2 = (self.b2 + from_t2)[-self.cache_capacity :]
        return from_t1 + from_t2

    def remove(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            for resident in (self.t1, self.t2):
                if key in resident:
                    resident.remove(key)

    def clear(self) -> None:
        self.t1, self.t2, self.b1, self.b2 = [], [], [], []
        self.target_t1_size = 0.0

    def _adapt(self, key: OffloadKey) -> None:
        """A ghost was asked for: the list that it was evicted from deserved more room."""
        if key in self.b1:
            wanted = self.target_t1_size + max(1.0, len(self.b2) / len(self.b1))
        else:
            wanted = self.target_t1_size - max(1.0, len(self.b1) / len(self.b2))
        self.target_t1_size = min(max(wanted, 0.0), float(self.cache_capacity))

    def _forget_ghost(self, key: OffloadKey) -> None:
        for ghosts in (self.b1, self.b2):
            if key in ghosts:
                ghosts.remove(key)

    def __contains__(self, key: object) -> bool:
        return key in self.t1 or key in self.t2

    def __len__(self) -> int:
        return len(self.t1) + len(self.t2)

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter([*self.t1, *self.t2])
