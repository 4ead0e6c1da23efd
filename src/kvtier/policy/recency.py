"""A queue of keys by recency on plain dictionaries: what LRU lists are made of here.

An `OrderedDict` pays for a linked list on every insertion, move and deletion. A plain dictionary keeps insertion
order too, but taking from its front walks over everything that was deleted there. So there are two: keys enter the
*young* one; victims leave through a snapshot of the *old* one's order; and when that is used up, young becomes old.
Every key of the old one is less recent than any of the young one, so the order is exactly that of one list.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import chain, filterfalse, islice, repeat
from typing import Any

from kvtier.keys import OffloadKey

consume: Callable[[Iterable[Any]], None] = deque[Any](maxlen=0).extend
"""Runs an iterator for its effects, without a Python frame."""


class RecencyQueue:
    """Distinct keys from least to most recently placed. About 120 bytes a key, and 8 more in the snapshot.

    Batches cost O(keys) at C speed, amortised: each key is copied once when its dictionary turns old.
    """

    __slots__ = ("_examined", "_head", "_old", "_tail", "_young")

    def __init__(self) -> None:
        self._young: dict[OffloadKey, bool] = {}
        self._old: dict[OffloadKey, bool] = {}
        self._head: deque[OffloadKey] = deque()
        """Keys of `_old` that were passed over by `take`, or put back: the least recent ones."""
        self._tail: Iterator[OffloadKey] = iter(())
        """The rest of the snapshot of `_old`'s order; keys that have left `_old` since are skipped."""
        self._examined: list[OffloadKey] = []

    def append(self, keys: Iterable[OffloadKey]) -> None:
        """New keys, the last one most recent. The caller guarantees that none is in the queue."""
        self._young.update(dict.fromkeys(keys, True))

    def refresh(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Moves those of `keys` that are in the queue to its end, in the order given. Returns the others."""
        missing = self.discard(keys)
        if missing:
            absent = set(missing)
            keys = [key for key in keys if key not in absent]
        self._young.update(dict.fromkeys(keys, True))
        return missing

    def discard(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Removes those of `keys` that are in the queue. Returns the others."""
        found = list(map(self._young.pop, keys, repeat(False)))
        if False not in found:
            return []
        missing = [key for key, here in zip(keys, found, strict=True) if not here]
        if self._old:
            found = list(map(self._old.pop, missing, repeat(False)))
            if True in found:
                missing = [key for key, here in zip(missing, found, strict=True) if not here]
        return missing

    def isdisjoint(self, keys: Iterable[OffloadKey]) -> bool:
        """Whether none of `keys` is in the queue."""
        return self._young.keys().isdisjoint(keys) and self._old.keys().isdisjoint(keys)

    def take(self, count: int, protected: Sequence[Container[OffloadKey]] = ()) -> list[OffloadKey]:
        """Removes and returns the least recent `count` keys that are in none of `protected`, or all there are.

        O(taken + passed over). `put_back` undoes it, if it is the very next call.
        """
        self._examined = examined = list[OffloadKey]()
        taken: list[OffloadKey] = []
        while len(taken) < count:
            wanted = count - len(taken)
            if self._head:
                seen = [self._head.popleft() for _ in range(min(wanted, len(self._head)))]
                seen = list(filter(self._old.__contains__, seen))
            else:
                seen = list(islice(filter(self._old.__contains__, self._tail), wanted))
                if not seen:
                    if not self._young:
                        break
                    self._turn(examined)
                    continue
            free = seen
            for container in protected:
                free = list(filterfalse(container.__contains__, free))
            consume(map(self._old.pop, free))
            examined += seen
            taken += free
        if len(taken) < len(examined):
            self._head.extendleft(filter(self._old.__contains__, reversed(examined)))
        return taken

    def put_back(self, taken: Sequence[OffloadKey]) -> None:
        """Undoes the last `take`, order included."""
        passed_over = len(self._examined) - len(taken)
        for _ in range(passed_over):
            self._head.popleft()
        self._old.update(dict.fromkeys(taken, True))
        self._head.extendleft(reversed(self._examined))

    def clear(self) -> None:
        """Removes every key."""
        self.__init__()  # type: ignore[misc]

    def _turn(self, passed_over: Sequence[OffloadKey]) -> None:
        # what is left of the old dictionary was passed over in this very call, and stays older than all the rest
        self._tail = iter(list(self._young))
        if self._old:
            kept = dict.fromkeys(filter(self._old.__contains__, passed_over), True)
            kept.update(self._young)
            self._young = kept
        self._old, self._young = self._young, {}

    def __contains__(self, key: object) -> bool:
        return key in self._young or key in self._old

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def __iter__(self) -> Iterator[OffloadKey]:
        """From least to most recent."""
        if not self._old:
            return iter(self._young)
        # the snapshot can be read only once: the order in front is rebuilt from it
        snapshot = list(filter(self._old.__contains__, chain(self._head, self._tail)))
        self._head = deque()
        self._tail = iter(snapshot)
        return chain(snapshot, self._young)
