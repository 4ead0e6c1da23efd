"""What a manager remembers of one request: its accesses, its open loads and its deadline."""

from __future__ import annotations

import math
from collections.abc import Collection

from kvtier.interfaces import CPULoadStoreSpec
from kvtier.keys import OffloadKey

MIN_LOAD_BEGIN_S = 1.0
"""A load may always wait this long to begin, however short the deadline: the engine's own step comes first."""


class RequestState:
    """One request in one manager. Dies with the request's context."""

    __slots__ = (
        "accessed",
        "crowded",
        "deadline_at_s",
        "deferred",
        "expired",
        "inserted",
        "introduced",
        "loads",
        "shed",
        "stuck_key",
    )

    def __init__(self) -> None:
        self.introduced = False
        """The manager will be told of its end, so its blocks can be spared until then."""
        self.crowded = False
        """Room can only be made from its own blocks: sparing them need not be tried again."""
        self.shed = False
        """A store was cut short: what lies behind the cut is not worth storing."""
        self.accessed: dict[OffloadKey, None] = {}
        """Keys in the order of their first access: what the end of the request tells the policy."""
        self.inserted: dict[OffloadKey, None] = {}
        """Those of `accessed` that this request itself inserted: no reuse."""
        self.loads: list[CPULoadStoreSpec] = []
        """Loads prepared and not yet completed, oldest first."""
        self.deadline_at_s = math.inf
        """Once the request has been told to wait: until when."""
        self.deferred = False
        self.expired = False
        self.stuck_key: OffloadKey | None = None
        """The block that deferred the request last."""

    def note_reused(self, keys: dict[OffloadKey, None]) -> None:
        """The request has used blocks that were there. Takes over `keys`."""
        if not self.accessed:
            self.accessed = keys
            return
        if self.accessed is self.inserted:
            self.accessed = dict(self.inserted)
        self.accessed.update(keys)

    def note_inserted(self, keys: dict[OffloadKey, None]) -> None:
        """The request stores these blocks. Takes over `keys`."""
        if not self.accessed:
            # one dictionary for both, since nearly every request that misses stores all that it accesses
            self.accessed = self.inserted = keys
            return
        self.accessed.update(keys)
        if not self.inserted:
            self.inserted = keys
        elif self.inserted is not self.accessed:
            self.inserted.update(keys)

    def load_ended(self, keys: Collection[OffloadKey]) -> None:
        """A load of these keys was completed by key."""
        if self.loads and self.loads[-1].keys == keys:
            self.loads.pop()
            return
        named = set(keys)
        for spec in self.loads:
            ending = named.intersection(spec.keys) - spec.ended
            spec.ended |= ending
            named -= ending
        self.loads = [spec for spec in self.loads if len(spec.ended) < len(spec.keys)]

    def may_wait(self, now_s: float, deadline_s: float) -> bool:
        """Starts the request's deadline if it does not run yet; False once it has passed."""
        if self.expired:
            return False
        if now_s == -math.inf:
            return deadline_s > 0
        if self.deadline_at_s == math.inf:
            self.deadline_at_s = now_s + deadline_s
        if now_s >= self.deadline_at_s:
            self.expired = True
            self.stuck_key = None
            return False
        return True

    def load_begin_by_s(self, now_s: float, deadline_s: float) -> float | None:
        """When a load planned now must have begun: the request's waiting so far counts. None: nobody tells time."""
        if now_s == -math.inf:
            return None
        return max(min(self.deadline_at_s, now_s + deadline_s), now_s + MIN_LOAD_BEGIN_S)

    def finish(self) -> None:
        """The request ends: only its open loads are still of interest."""
        self.introduced = self.deferred = self.crowded = self.shed = self.expired = False
        self.accessed = {}
        self.inserted = {}
        self.deadline_at_s = math.inf
        self.stuck_key = None
