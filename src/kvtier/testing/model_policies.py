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

    Of several victims those from `t1` are named first. Each ghost list is as long as the cache. As long as keys come
    one by one and no request is settled, what an insertion leaves of them is bounded as in the paper as well, but for
    one ghost.
    """

    name = "arc"

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.t1: list[OffloadKey] = []
        self.t2: list[OffloadKey] = []
        self.b1: list[OffloadKey] = []
        self.b2: list[OffloadKey] = []
        self.target_t1_size = 0.0
        self.one_by_one = True

    def insert(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            if key in self.b1 or key in self.b2:
                self._adapt(key)
                self._forget_ghost(key)
                self.t2.append(key)
            else:
                self.t1.append(key)
        self.one_by_one = self.one_by_one and len(keys) <= 1
        if self.one_by_one:
            while len(self.b1) > 1 and len(self.t1) + len(self.b1) > self.cache_capacity:
                self.b1.pop(0)
            while len(self.b2) > 1 and len(self) + len(self.b1) + len(self.b2) > 2 * self.cache_capacity:
                self.b2.pop(0)

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
        self.one_by_one = False

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
        self.one_by_one = True

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


class ReferenceLRU2(CachePolicy):
    """Used once goes first, by that use; then by the last use but one. Uses are numbered in the order they come in."""

    name = "lru2"
    now: int
    uses: dict[OffloadKey, list[int]]
    history: dict[OffloadKey, list[int]]

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.clear()

    def insert(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            self.uses[key] = [*self.history.pop(key, [])[-1:], self._next()]
        self.history = dict(list(self.history.items())[-2 * self.cache_capacity :])

    def touch(self, keys: Iterable[OffloadKey], first_use: Container[OffloadKey] = ()) -> None:
        for key in keys:
            now = self._next()
            if key in self.uses and key in first_use:
                self.uses[key][-1] = now
            elif key in self.uses:
                self.uses[key].append(now)

    def settle(self, keys: Iterable[OffloadKey], first_use: Container[OffloadKey]) -> None:
        self.touch(keys, first_use)

    def evict(self, count: int, protected: _Lists = ()) -> list[OffloadKey] | None:
        order = sorted(self.uses, key=lambda key: (len(self.uses[key]) > 1, self.uses[key][-2:][0]))
        victims = [key for key in order if _first_free([key], protected)][:count]
        if len(victims) < count:
            return None
        for key in victims:
            self.history[key] = self.uses.pop(key)
        return victims

    def remove(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            self.uses.pop(key, None)

    def clear(self) -> None:
        self.now = 0
        self.uses = {}
        self.history = {}

    def _next(self) -> int:
        self.now += 1
        return self.now

    def __contains__(self, key: object) -> bool:
        return key in self.uses

    def __len__(self) -> int:
        return len(self.uses)

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(list(self.uses))


class ReferenceS3FIFO(CachePolicy):
    """New keys in `small`, what was used twice more or came back in `main`, and those that left `small` in `ghosts`."""

    name = "s3fifo"
    small: list[OffloadKey]
    main: list[OffloadKey]
    ghosts: list[OffloadKey]
    uses: dict[OffloadKey, int]
    has_evicted: bool

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.small_capacity = max(1, cache_capacity // 10)
        self.clear()

    def insert(self, keys: Sequence[OffloadKey]) -> None:
        returned = [key for key in keys if key in self.ghosts]
        self.main += returned
        self.ghosts = [key for key in self.ghosts if key not in returned]
        for key in keys:
            if key not in returned:
                is_full = len(self.small) >= self.small_capacity and not self.has_evicted
                (self.main if is_full else self.small).append(key)
        self.ghosts = self.ghosts[max(0, len(self.ghosts) - self.cache_capacity + self.small_capacity) :]

    def touch(self, keys: Iterable[OffloadKey], first_use: Container[OffloadKey] = ()) -> None:
        for key in keys:
            if key in self and key in first_use:
                queue = self.small if key in self.small else self.main
                queue.remove(key)
                queue.append(key)
            elif key in self:
                self.uses[key] = min(3, self.uses.get(key, 0) + 1)

    def settle(self, keys: Iterable[OffloadKey], first_use: Container[OffloadKey]) -> None:
        self.touch(keys, first_use)

    def evict(self, count: int, protected: _Lists = ()) -> list[OffloadKey] | None:
        if sum(_first_free([key], protected) is not None for key in self) < count:
            return None
        victims: list[OffloadKey] = []
        while len(victims) < count:
            from_small = _first_free(self.small, protected)
            from_main = _first_free(self.main, protected)
            if from_main and (len(self.main) > self.cache_capacity - self.small_capacity or not from_small):
                victims += self._leave_main(protected)
            else:
                victims += self._leave_small(protected)
        self.has_evicted = self.has_evicted or count > 0
        return victims

    def _leave_main(self, protected: _Lists) -> list[OffloadKey]:
        while key := _first_free(self.main, protected):
            self.main.remove(key)
            uses = self.uses.pop(key, 0)
            if not uses:
                return [key]
            self.main.append(key)
            self.uses[key] = uses - 1
        return []

    def _leave_small(self, protected: _Lists) -> list[OffloadKey]:
        while key := _first_free(self.small, protected):
            self.small.remove(key)
            if self.uses.pop(key, 0) < 2:
                self.ghosts.append(key)
                return [key]
            self.main.append(key)
        return []

    def remove(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            self.uses.pop(key, None)
            for queue in (self.small, self.main):
                if key in queue:
                    queue.remove(key)

    def clear(self) -> None:
        self.small, self.main, self.ghosts = [], [], []
        self.uses = {}
        self.has_evicted = False

    def __contains__(self, key: object) -> bool:
        return key in self.small or key in self.main

    def __len__(self) -> int:
        return len(self.small) + len(self.main)

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter([*self.small, *self.main])


REFERENCE_POLICIES: dict[str, type[CachePolicy]] = {
    policy.name: policy for policy in (ReferenceARC, ReferenceLRU, ReferenceLRU2, ReferenceS3FIFO)
}
