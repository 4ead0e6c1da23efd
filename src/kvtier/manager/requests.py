"""What a manager remembers of one request: its accesses, its open loads and its deadline."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

from kvtier.interfaces import CPULoadStoreSpec
from kvtier.keys import OffloadKey
from kvtier.manager.hints import Hints

MIN_LOAD_BEGIN_S = 1.0
"""A load may always wait this long to begin, however short the deadline: the engine's own step comes first."""


NO_KEYS: dict[OffloadKey, Any] = {}
NO_LOADS: list[CPULoadStoreSpec] = []
"""Nobody adds to these two: what a request has none of is replaced by its own."""


class RequestState:
    """One request in one manager. Dies with the request's context.

    What most requests never change has its default in the class: a request is made for every request of the engine.
    """

    introduced = False
    """The manager will be told of its end, so its blocks can be spared until then."""
    crowded = False
    """Room can only be made from its own blocks: sparing them need not be tried again."""
    shed = False
    """A store was cut short: what lies behind the cut is not worth storing."""
    refused = False
    """The policy has declined a block of it: it is not asked about the later ones."""
    hints: Hints | None = None
    """What it says of itself."""
    accessed = NO_KEYS
    """Keys in the order of their first access: what the end of the request tells the policy."""
    inserted = NO_KEYS
    """Those of `accessed` that this request itself inserted: no reuse."""
    loads = NO_LOADS
    """Loads prepared and not yet completed, oldest first."""
    deadline_at_s = math.inf
    """Once the request has been told to wait: until when."""
    patient_until_s = math.inf
    """From then on computing is cheaper than waiting for blocks in flight."""
    declined = False
    """It has come to that."""
    deferred = False
    expired = False
    stuck_key: OffloadKey | None = None
    """The block that deferred the request last."""

    def note_reused(self, keys: dict[OffloadKey, Any]) -> None:
        """The request has used blocks that were there. Takes over `keys`."""
        if not self.accessed:
            self.accessed = keys
            return
        if self.accessed is self.inserted:
            self.accessed = dict(self.inserted)
        self.accessed.update(keys)

    def note_inserted(self, keys: dict[OffloadKey, Any]) -> None:
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

    def keep_only(self, is_wanted: Callable[[OffloadKey], bool]) -> None:
        """Forgets the other accesses: a context that nobody finishes must not grow without bound."""
        self.accessed = dict.fromkeys(filter(is_wanted, self.accessed))
        self.inserted = dict.fromkeys(filter(self.accessed.__contains__, self.inserted))

    def load_begun(self, spec: CPULoadStoreSpec) -> None:
        """A load was prepared."""
        if self.loads:
            self.loads.append(spec)
        else:
            self.loads = [spec]

    def load_ended(self, keys: Collection[OffloadKey]) -> None:
        """A load of these keys was completed by key."""
        if not self.loads:
            return
        last = self.loads[-1]
        if last.keys == keys and not last.ended:
            last.ended = last.keys
            self.loads.pop()
            return
        named = set(keys)
        for spec in self.loads:
            ending = named.intersection(spec.keys).difference(spec.ended)
            spec.ended = ending.union(spec.ended)
            named -= ending
        self.loads = [spec for spec in self.loads if len(spec.ended) < len(spec.keys)]

    def may_wait(self, now_s: float, deadline_s: float, counters: defaultdict[str, int]) -> bool:
        """Starts the request's deadline if it does not run yet; False once it has passed. Counts either, once."""
        if self.expired:
            return False
        if now_s > -math.inf:
            if self.deadline_at_s == math.inf:
                self.deadline_at_s = now_s + deadline_s
            self.expired = now_s >= self.deadline_at_s
        may_wait = deadline_s > 0 and not self.expired
        if not may_wait:
            self.stuck_key = None
            counters["expired_requests"] += self.deferred
            self.deferred = False
        elif not self.deferred:
            self.deferred = True
            counters["deferred_requests"] += 1
        return may_wait

    def has_waited_for_load(self, spec: CPULoadStoreSpec) -> None:
        """A load has failed: waiting for it counts. What comes next does not get a deadline of its own."""
        if spec.begin_by_s is not None:
            self.deadline_at_s = min(self.deadline_at_s, spec.begin_by_s)

    def is_patient(self, now_s: float, counters: defaultdict[str, int]) -> bool:
        """False, for good, once waiting for blocks in flight has cost what computing them would have. Counts it."""
        if now_s < self.patient_until_s or self.patient_until_s == math.inf:
            return True
        self.stuck_key = None
        if not self.declined:
            self.declined = True
            counters["declined_waits"] += 1
        return False

    def load_begin_by_s(self, now_s: float, deadline_s: float) -> float | None:
        """When a load planned now must have begun: the request's waiting so far counts. None: nobody tells time."""
        if now_s == -math.inf:
            return None
        return max(min(self.deadline_at_s, now_s + deadline_s), now_s + MIN_LOAD_BEGIN_S)
