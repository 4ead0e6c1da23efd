"""Which blocks go down to lower tiers, when, and how much of RAM that may hold meanwhile.

Sans-I/O. Blocks wait here by key alone: RAM is pinned for what a tier has accepted, and for nothing that waits.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from itertools import filterfalse, islice

from kvtier.errors import ConfigurationError
from kvtier.keys import OffloadKey, is_private

STEP_BLOCKS = 256
"""Looked at in one step at most, so that a step stays short however much has been stored."""


class CascadeWhen(enum.Enum):
    """When a block in RAM is also written to the tiers below."""

    STORED = "stored"
    """As soon as it is in RAM."""
    REUSED = "reused"
    """When it is loaded from RAM for the first time."""
    EVICTED = "evicted"
    """When it is about to be evicted: a few slots are kept free for that, and hold what the first tier is reading."""

    @classmethod
    def parse(cls, name: str) -> CascadeWhen:
        """By name. Raises ConfigurationError for an unknown one."""
        try:
            return cls(name)
        except ValueError:
            allowed = ", ".join(when.value for when in cls)
            raise ConfigurationError(f"cascade_when is {name!r}; allowed: {allowed}") from None


class CascadeQueue:
    """Keys that should go down to one tier, oldest first. Bounded: of more than `max_keys` the oldest are forgotten.

    A block that leaves RAM while it waits here is shed; nothing else is done about it.
    """

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._keys: dict[OffloadKey, None] = {}
        self.num_shed = 0

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: Iterable[OffloadKey]) -> None:
        """These should go down, after those that wait already; the private ones among them never do."""
        self._keys.update(dict.fromkeys(filterfalse(is_private, keys)))
        excess = len(self._keys) - self._max_keys
        if excess > 0:
            self._forget(list(islice(self._keys, excess)))

    def take(self, count: int, is_in_ram: Callable[[OffloadKey], bool]) -> list[OffloadKey]:
        """At most `count` keys, and no longer waiting: give back what is not accepted. O(STEP_BLOCKS)."""
        taken: list[OffloadKey] = []
        for key in list(islice(self._keys, STEP_BLOCKS)):
            if len(taken) == count:
                break
            if is_in_ram(key):
                del self._keys[key]
                taken.append(key)
            else:
                self._forget((key,))
        return taken

    def give_back(self, keys: Iterable[OffloadKey]) -> None:
        """These were not accepted: they wait again, before all others."""
        returned = dict.fromkeys(keys)
        if returned:
            returned.update(self._keys)
            self._keys = returned

    def clear(self) -> None:
        """Nothing waits any more."""
        self._keys.clear()

    def _forget(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            del self._keys[key]
            self.num_shed += 1
