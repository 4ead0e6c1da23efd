"""What a manager of one tier answers without changing what is stored: look-ups, waiting, gauges, events."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import takewhile

from kvtier.errors import ConfigurationError
from kvtier.events import OffloadingEvent
from kvtier.index import BlockIndex
from kvtier.interfaces import (
    BreakerState,
    CachePolicy,
    CPULoadStoreSpec,
    ManagerStats,
    OffloadingManager,
    PrefixLookup,
    ReqContext,
    Residency,
)
from kvtier.keys import OffloadKey
from kvtier.manager.ages import StoreAges
from kvtier.manager.breaker import CircuitBreaker
from kvtier.manager.hinted import HintedPolicy
from kvtier.manager.hints import DEFAULT_PIN_SHARE, HintReader, Hints
from kvtier.manager.requests import RequestState
from kvtier.manager.reuse_filter import ReuseFilter
from kvtier.manager.room import Protected, protected_from
from kvtier.manager.waiting import WaitingCost
from kvtier.policy import make_policy

_READY, _ARRIVING, _ABSENT = Residency.READY, Residency.ARRIVING, Residency.ABSENT  # members are slow to look up


class SingleTierQueries(OffloadingManager):
    """The half of `CPUOffloadingManager` that only answers, and the books that both halves share."""

    def __init__(
        self,
        num_blocks: int,
        cache_policy: str = "lru",
        enable_events: bool = False,
        store_threshold: int = 0,
        max_tracker_size: int = 64_000,
        *,
        deadline_s: float = 5.0,
        store_timeout_s: float = 30.0,
        breaker: CircuitBreaker | None = None,
        pin_share: float = DEFAULT_PIN_SHARE,
    ) -> None:
        if num_blocks < 1:
            raise ConfigurationError(f"num_blocks is {num_blocks}; allowed: 1 or more")
        if not 0 <= deadline_s < math.inf:
            raise ConfigurationError(f"deadline_s is {deadline_s}; allowed: 0 (never wait) or more seconds")
        if not store_timeout_s > 0:
            raise ConfigurationError(f"store_timeout_s is {store_timeout_s}; allowed: more than 0 seconds")
        if not 0 <= pin_share <= 1:
            raise ConfigurationError(f"pin_share is {pin_share}; allowed: 0 (no hint pins) to 1 (all blocks)")
        self.policy = make_policy(cache_policy, num_blocks)
        self._order: CachePolicy = self.policy
        """The policy, or what stands in front of it once a request has given a hint."""
        self._hinted: HintedPolicy | None = None
        self._hint_reader = HintReader()
        self._max_kept = int(pin_share * num_blocks)
        self.deadline_s = deadline_s
        self.store_timeout_s = store_timeout_s
        reuse_filter = ReuseFilter(store_threshold, max_tracker_size)
        self._filter = reuse_filter if store_threshold > 1 else None
        self._index = BlockIndex(num_blocks)
        self._ready = self._index.ready
        self._in_flight = self._index.in_flight
        self._events: list[OffloadingEvent] | None = [] if enable_events else None
        self._now_s = -math.inf
        self._ages = StoreAges(store_timeout_s)
        self._counters: defaultdict[str, int] = defaultdict(int)  # a Counter sets its items through Python slots
        self._cost = WaitingCost()
        self.breaker = breaker

    # -- look-up ---------------------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        if self._filter is not None:
            self._filter.count_lookups((key,), req_context)
        if self.breaker is not None and self.breaker.is_shut:
            return False
        if key in self._ready:
            return True
        if key not in self._in_flight:
            return False
        return None if self._defer_on(key, req_context) else False

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrefixLookup:
        if self.breaker is not None and self.breaker.is_shut:
            return PrefixLookup(0, _ABSENT)
        num_ready = len(list(takewhile(self._ready.__contains__, keys)))
        if self._filter is not None:
            self._filter.count_lookups(keys[: num_ready + 1], req_context)
        if num_ready == len(keys):
            return PrefixLookup(num_ready, _READY)
        if not self._in_flight:
            return PrefixLookup(num_ready, _ABSENT)
        key = keys[num_ready]
        waits = (
            key in self._in_flight
            and self.worth_waiting(keys[num_ready:], req_context)
            and self._defer_on(key, req_context)
        )
        return PrefixLookup(num_ready, _ARRIVING if waits else _ABSENT)

    def residency(self, key: OffloadKey) -> Residency:
        if self.breaker is not None and self.breaker.is_shut:
            return _ABSENT
        if key in self._ready:
            return _READY
        return _ARRIVING if key in self._in_flight else _ABSENT

    # -- waiting ---------------------------------------------------------------------------------------------

    def still_waiting(self, req_context: ReqContext) -> bool:
        return self.stuck_on(req_context) is not None

    def stuck_on(self, req_context: ReqContext) -> OffloadKey | None:
        """The block in flight that the request was told to wait for and still has to; None: it need not wait. O(1)."""
        request: RequestState | None = req_context._states.get(self)
        if request is None or request.stuck_key not in self._in_flight:
            return None
        if self.breaker is not None and self.breaker.is_shut:
            return None
        return request.stuck_key if self._may_wait_for_stores(request) else None

    def limit_wait(self, req_context: ReqContext, patience_s: float) -> None:
        """The request waits for blocks in flight no longer than this from now: later, computing is cheaper."""
        request = self._request(req_context)
        request.patient_until_s = min(request.patient_until_s, self._now_s + patience_s)

    def worth_waiting(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> bool:
        if self._cost.recompute_blocks_per_s is None or not self._in_flight:
            return True
        request = self._request(req_context)
        self._cost.observe(self._now_s, self._num_arrived, is_storing=True)
        patience_s = self._cost.patience_s(keys, self._ready, self._in_flight)
        request.patient_until_s = min(request.patient_until_s, self._now_s + patience_s)
        return request.is_patient(self._now_s, self._counters)

    def tell_recompute_rate(self, blocks_per_s: float | None) -> None:
        self._cost.tell(blocks_per_s)

    def defer(self, req_context: ReqContext) -> bool:
        return self._request(req_context).may_wait(self._now_s, self.deadline_s, self._counters)

    # -- seen from outside -------------------------------------------------------------------------------------

    def take_hint_warnings(self) -> list[str]:
        """A line for each kind of hint that was ignored for the first time since the last call. The caller owns it."""
        return self._hint_reader.take_warnings()

    def take_events(self) -> list[OffloadingEvent]:
        if not self._events:
            return []
        events, self._events = self._events, []
        return events

    def get_stats(self) -> ManagerStats:
        return ManagerStats(
            capacity_blocks=self._index.num_slots,
            ready_blocks=len(self._ready),
            in_flight_blocks=len(self._in_flight),
            pinned_blocks=len(self._index.pins),
            condemned_blocks=len(self._index.condemned),
            breaker_state=self.breaker.state if self.breaker is not None else BreakerState.CLOSED,
            counters=dict(self._counters),
        )

    # -- for the other half ------------------------------------------------------------------------------------

    def _request(self, req_context: ReqContext) -> RequestState:
        request: RequestState | None = req_context._states.get(self)
        if request is None:
            request = req_context._states[self] = RequestState()
            if req_context.kv_transfer_params:
                request.hints = self._read_hints(req_context)
        return request

    def _read_hints(self, req_context: ReqContext) -> Hints | None:
        hints = self._hint_reader.read(req_context.kv_transfer_params)
        self._counters["ignored_hints"] = self._hint_reader.num_ignored
        if hints is not None and self._hinted is None:
            known_since = self._index.num_allocations
            self._order = self._hinted = HintedPolicy(self.policy, self._max_kept, self._generation_of, known_since)
            self._hinted.now_s = self._now_s
        return hints

    @property
    def _num_arrived(self) -> int:
        """Blocks that were in flight and became ready."""
        return self._counters["stored_blocks"]

    def _generation_of(self, key: OffloadKey) -> int:
        slot = self._ready.get(key)
        if slot is None:
            slot = self._in_flight.get(key)
        return self._index.generations[self._index.restored[key] if slot is None else slot]

    def _note_hints(self, hints: Hints, keys: Iterable[OffloadKey]) -> None:
        """A request with these hints uses those of `keys` that are there."""
        if self._hinted is not None:
            there = list(filter(self.policy.__contains__, keys))
            self._counters["refused_pin_blocks"] += self._hinted.note_access(hints, there)

    def _note_order(self, keys: list[OffloadKey], new: list[OffloadKey], request: RequestState) -> None:
        """Of the prompt `keys` (or its part that is offered now), `new` are about to be stored."""
        assert self._hinted is not None
        first = keys.index(new[0])
        parent = keys[first - 1] if first else next(reversed(request.accessed), None)
        self._hinted.note_store(parent if parent in self.policy else None, new)

    def _protected(self, own: set[OffloadKey], new: list[OffloadKey]) -> Protected:
        """What no store of the keys `own`, of which `new` are to be stored, may evict."""
        protected = protected_from(self._index, own, new)
        if self._hinted is not None and self._hinted.kept:
            protected.append(self._hinted.kept)
        return protected

    def _defer_on(self, key: OffloadKey, req_context: ReqContext) -> bool:
        request = self._request(req_context)
        if not self._may_wait_for_stores(request):
            return False
        if request.stuck_key not in self._in_flight:
            request.stuck_key = key
        if self._filter is not None:
            self._filter.note_deferred(req_context)
        return True

    def _may_wait_for_stores(self, request: RequestState) -> bool:
        now_s, counters = self._now_s, self._counters
        return request.is_patient(now_s, counters) and request.may_wait(now_s, self.deadline_s, counters)

    def _emit(self, keys: list[OffloadKey], removed: bool) -> None:
        if self._events is not None and keys:
            self._events.append(OffloadingEvent(list(keys), CPULoadStoreSpec.medium(), removed))
