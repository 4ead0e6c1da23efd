"""What a manager remembers of one request: its accesses, its open loads and its deadline."""

from __future__ import annotations

import math
from collections.abc import Collection
from itertools import filterfalse

from kvtier.keys import OffloadKey

MIN_LOAD_BEGIN_S = 1.0
"""A load may always wait this long to begin, however short the deadline: the engine's own step comes first."""


class RequestState:
    """One request in one manager. Dies with the request's context."""

    __slots__ = (
        "accessed",
        "crowded",
        "deadline_at_s",
        "expired",
        "introduced",
        "loading",
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
        self.accessed: dict[OffloadKey, bool] = {}
        """Keys in the order of their first access; True for a reuse, False for one that this request inserted."""
        self.loading: dict[OffloadKey, int] = {}
        """Slot of each key that a load of this request has pinned and not yet released by key."""
        self.deadline_at_s = math.inf
        """Once the request has been told to wait: until when."""
        self.expired = False
        self.stuck_key: OffloadKey | None = None
        """The block that deferred the request last."""

    def note(self, keys: Collection[OffloadKey], reused: bool) -> None:
        """The request has accessed `keys`; the first access of a key decides whether it is a reuse."""
        accessed = self.accessed
        if accessed:
            accessed.update(dict.fromkeys(filterfalse(accessed.__contains__, keys), reused))
        else:
            accessed.update(dict.fromkeys(keys, reused))

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
        self.introduced = self.crowded = self.shed = self.expired = False
        self.accessed.clear()
        self.deadline_at_s = math.inf
        self.stuck_key = None
