"""`CPUOffloadingManager`: one tier of fixed slots in host memory."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Container, Sequence
from itertools import filterfalse, takewhile
from typing import cast

from kvtier.errors import (
    BlockNotPinnedError,
    BlockNotReadyError,
    ConfigurationError,
    DuplicateKeyError,
    InvariantError,
)
from kvtier.events import OffloadingEvent
from kvtier.index import BlockIndex
from kvtier.interfaces import (
    CPULoadStoreSpec,
    LoadStoreSpec,
    ManagerStats,
    OffloadingManager,
    PrefixLookup,
    PrepareStoreOutput,
    ReqContext,
    Residency,
)
from kvtier.keys import OffloadKey
from kvtier.manager.requests import RequestState
from kvtier.manager.reuse_filter import ReuseFilter
from kvtier.policy import make_policy
from kvtier.policy.recency import consume


class CPUOffloadingManager(OffloadingManager):
    """Tracks `num_blocks` slots of one tier. See `OffloadingManager` for the contract.

    `store_threshold` of 2 or more filters stores by reuse (`max_tracker_size` keys are remembered); 0 and 1 do
    not. `deadline_s` bounds a request's waiting; 0 means that it never waits. A store that has not completed
    `store_timeout_s` after it was prepared is reaped: its keys become absent and its slots are condemned until a
    completion by spec, or `writers_died`, says that nobody writes them any more.

    Raises ConfigurationError for values outside what is said here.
    """

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
    ) -> None:
        if num_blocks < 1:
            raise ConfigurationError(f"num_blocks is {num_blocks}; allowed: 1 or more")
        if not 0 <= deadline_s < math.inf:
            raise ConfigurationError(f"deadline_s is {deadline_s}; allowed: 0 (never wait) or more seconds")
        if not store_timeout_s > 0:
            raise ConfigurationError(f"store_timeout_s is {store_timeout_s}; allowed: more than 0 seconds")
        self.policy = make_policy(cache_policy, num_blocks)
        self.deadline_s = deadline_s
        self.store_timeout_s = store_timeout_s
        reuse_filter = ReuseFilter(store_threshold, max_tracker_size)
        self._filter = reuse_filter if store_threshold > 1 else None
        self._index = BlockIndex(num_blocks)
        self._ready = self._index.ready
        self._in_flight = self._index.in_flight
        self._events: list[OffloadingEvent] | None = [] if enable_events else None
        self._now_s = -math.inf
        self._store_times: deque[list[float]] = deque()
        """[time, number of the last allocation until then], oldest first: tells the age of what is in flight."""
        self._counters: Counter[str] = Counter()

    # -- look-up ---------------------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        if self._filter is not None:
            self._filter.count_lookups((key,), req_context)
        if key in self._ready:
            return True
        if key not in self._in_flight:
            return False
        return None if self._defer_on(key, req_context) else False

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrefixLookup:
        num_ready = len(list(takewhile(self._ready.__contains__, keys)))
        if self._filter is not None:
            self._filter.count_lookups(keys[: num_ready + 1], req_context)
        if num_ready == len(keys):
            return PrefixLookup(num_ready, Residency.READY)
        key = keys[num_ready]
        waits = key in self._in_flight and self._defer_on(key, req_context)
        return PrefixLookup(num_ready, Residency.ARRIVING if waits else Residency.ABSENT)

    def residency(self, key: OffloadKey) -> Residency:
        if key in self._ready:
            return Residency.READY
        return Residency.ARRIVING if key in self._in_flight else Residency.ABSENT

    # -- loads -----------------------------------------------------------------------------------------------

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:
        keys = list(keys)
        own = self._refuse_duplicates(keys)
        try:
            slots = list(map(self._ready.__getitem__, keys))
        except KeyError as missing:
            key = missing.args[0]
            stands = self.residency(key).value
            raise BlockNotReadyError(f"block {key.hex()} is {stands}; a load needs it ready") from None
        index = self._index
        request = self._request(req_context)
        index.pin(keys)
        request.note_reused(own)
        if self._filter is not None:
            self._filter.note_prepared(req_context)
        begin_by_s = request.load_begin_by_s(self._now_s, self.deadline_s)
        spec = CPULoadStoreSpec(slots, list(map(index.generations.__getitem__, slots)), keys, begin_by_s)
        request.loads.append(spec)
        return spec

    def complete_load(
        self,
        keys: Collection[OffloadKey],
        req_context: ReqContext,
        success: bool = True,
        spec: LoadStoreSpec | None = None,
    ) -> None:
        index = self._index
        request = self._request(req_context)
        if spec is not None:
            keys = self._end_load(keys, cast(CPULoadStoreSpec, spec), request)
        elif index.condemned:
            keys = self._end_loads_by_key(keys, request)
        else:
            missing = index.unpin(keys)
            if missing is not None:
                raise BlockNotPinnedError(f"block {missing.hex()} is not pinned by any load")
            request.load_ended(keys)
        if not success:
            self._counters["failed_load_blocks"] += len(keys)
            self._withdraw(list(filter(self._ready.__contains__, keys)))

    # -- stores ----------------------------------------------------------------------------------------------

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        keys = list(keys)
        own = self._refuse_duplicates(keys)
        request = self._request(req_context)
        new = self._storable(keys)
        missing = len(new) - self._index.num_free
        evicted: list[OffloadKey] = []
        if missing > 0:
            protected = self._protected(own, new)
            victims = None
            if request.introduced and request.accessed and not request.crowded:
                victims = self.policy.evict(missing, [*protected, request.accessed])
                request.crowded = victims is None
            if victims is None:
                victims = self.policy.evict(missing, protected)
            if victims is None:
                self._counters["refused_blocks"] += len(new)
                return None
            evicted = victims
        return self._grant(own, new, evicted, request, req_context)

    def prepare_store_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput:
        keys = list(keys)
        own = self._refuse_duplicates(keys)
        request = self._request(req_context)
        new = self._storable(keys)
        missing = len(new) - self._index.num_free
        evicted: list[OffloadKey] = []
        fitting = len(new)
        if request.shed:
            fitting = 0
        elif missing > 0:
            protected = [*self._protected(own, new), request.accessed]
            victims = self.policy.evict(missing, protected)
            if victims is None:
                request.shed = True
                spare = self._num_evictable(protected)
                fitting = self._index.num_free + spare
                victims = self.policy.evict(spare, protected) or []
            evicted = victims
        if fitting < len(new):
            self._counters["shed_blocks"] += len(new) - fitting
            own = dict.fromkeys(keys[: keys.index(new[fitting])])
            new = new[:fitting]
        return self._grant(own, new, evicted, request, req_context)

    def complete_store(
        self,
        keys: Collection[OffloadKey],
        req_context: ReqContext,
        success: bool = True,
        spec: LoadStoreSpec | None = None,
    ) -> None:
        arriving = keys if spec is None else self._stores_of(keys, cast(CPULoadStoreSpec, spec))
        if spec is None and self._index.condemned:
            self._writers_left_by_key(keys)
        if success:
            arrived = self._index.publish(arriving)
            self._counters["stored_blocks"] += len(arrived)
            self._emit(arrived, removed=False)
            return
        failed = list(filter(self._in_flight.__contains__, arriving))
        if failed:
            self._index.abandon(failed)
            self.policy.remove(failed)
            self._counters["failed_store_blocks"] += len(failed)

    def writers_died(self) -> None:
        """Every process that wrote this tier's slots is known to be gone: condemned writes are over."""
        for slot in [slot for slot, entry in self._index.condemned.items() if entry.has_writer]:
            self._index.writer_left(slot)

    # -- recency and requests --------------------------------------------------------------------------------

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self.policy.touch(reversed(list(keys)), self._in_flight)

    def count_offers(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        if self._filter is not None:
            self._filter.count_offers(keys, req_context)

    def on_new_request(self, req_context: ReqContext) -> None:
        self._request(req_context).introduced = True

    def on_request_finished(self, req_context: ReqContext) -> None:
        if self._filter is not None:
            self._filter.forget(req_context)
        request: RequestState | None = req_context._states.get(self)
        if request is None:
            return
        if request.accessed:
            self.policy.settle(reversed(request.accessed), request.inserted)
        request.finish()

    # -- waiting and time ------------------------------------------------------------------------------------

    def still_waiting(self, req_context: ReqContext) -> bool:
        request: RequestState | None = req_context._states.get(self)
        if request is None or request.stuck_key not in self._in_flight:
            return False
        return self._may_wait(request)

    def defer(self, req_context: ReqContext) -> bool:
        return self._may_wait(self._request(req_context))

    def advance(self, now_s: float) -> None:
        if now_s <= self._now_s:
            return
        if self._now_s == -math.inf and self._store_times:
            self._store_times[0][0] = now_s  # nobody told the time before: what is in flight begins to age
        self._now_s = now_s
        if not self._in_flight:
            self._store_times.clear()
        elif now_s - self._store_times[0][0] >= self.store_timeout_s:
            self._reap()

    # -- whole cache -----------------------------------------------------------------------------------------

    def reset_cache(self) -> None:
        removed = list(self._ready)
        self._index.condemn_writes(list(self._in_flight))
        self._index.condemn_reads(list(self._index.pins))
        self._index.drop(list(self._ready))
        self._index.renew_free_order()
        self.policy.clear()
        self._counters["resets"] += 1
        self._emit(removed, removed=True)

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
            counters=dict(self._counters),
        )

    def check_invariants(self) -> None:
        self._index.check_invariants()
        resident = self._ready.keys() | self._in_flight.keys()
        held = list(self.policy)
        if len(held) != len(self.policy) or len(held) != len(resident) or set(held) != resident:
            difference = [key.hex() for key in resident.symmetric_difference(held)]
            raise InvariantError(f"the policy does not hold exactly the resident keys: {difference}")

    # -- private ---------------------------------------------------------------------------------------------

    def _request(self, req_context: ReqContext) -> RequestState:
        request: RequestState | None = req_context._states.get(self)
        if request is None:
            request = req_context._states[self] = RequestState()
        return request

    def _refuse_duplicates(self, keys: list[OffloadKey]) -> dict[OffloadKey, None]:
        unique = dict.fromkeys(keys)
        if len(unique) < len(keys):
            twice = next(key for key, count in Counter(keys).items() if count > 1)
            raise DuplicateKeyError(f"block {twice.hex()} is named more than once in one call")
        return unique

    def _defer_on(self, key: OffloadKey, req_context: ReqContext) -> bool:
        request = self._request(req_context)
        if not self._may_wait(request):
            return False
        request.stuck_key = key
        if self._filter is not None:
            self._filter.note_deferred(req_context)
        return True

    def _may_wait(self, request: RequestState) -> bool:
        may_wait = request.may_wait(self._now_s, self.deadline_s)
        if may_wait and not request.deferred:
            request.deferred = True
            self._counters["deferred_requests"] += 1
        elif not may_wait and request.deferred:
            request.deferred = False
            self._counters["expired_requests"] += 1
        return may_wait

    def _storable(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        """Those of `keys` that are neither stored nor in flight and that the filter admits, in order."""
        new = list(filterfalse(self._ready.__contains__, keys))
        if self._in_flight:
            new = list(filterfalse(self._in_flight.__contains__, new))
        if self._filter is not None:
            num_offered = len(new)
            new = self._filter.admitted(new)
            self._counters["filtered_blocks"] += num_offered - len(new)
        return new

    def _protected(self, own: dict[OffloadKey, None], new: list[OffloadKey]) -> list[Container[OffloadKey]]:
        """What no store of the keys `own`, of which `new` are to be stored, may evict."""
        resident = own if len(new) < len(own) else None
        return [container for container in (self._index.pins, self._in_flight, resident) if container]

    def _num_evictable(self, protected: Sequence[Container[OffloadKey]]) -> int:
        keys: list[OffloadKey] = list(self.policy)
        for container in protected:
            keys = list(filterfalse(container.__contains__, keys))
        return len(keys)

    def _grant(
        self,
        own: dict[OffloadKey, None],
        new: list[OffloadKey],
        evicted: list[OffloadKey],
        request: RequestState,
        req_context: ReqContext,
    ) -> PrepareStoreOutput:
        if self._filter is not None:
            self._filter.note_prepared(req_context)
        if evicted:
            self._index.drop(evicted)
            self._counters["evicted_blocks"] += len(evicted)
            self._emit(evicted, removed=True)
        if len(new) == len(own):
            request.note_inserted(own)
        else:
            inserted = dict.fromkeys(new)
            # in prefix order, also where stored and new blocks alternate
            request.note_reused({key: None for key in own if key in inserted or key in self._ready})
            request.note_inserted(inserted)
        if not new:
            return PrepareStoreOutput([], CPULoadStoreSpec([]), evicted)
        slots = self._index.allocate(new)
        self.policy.insert(new)
        if not request.introduced and len(request.accessed) > 2 * self._index.num_slots + 1024:
            self._forget_absent(request)
        number = self._index.num_allocations
        if self._store_times and self._store_times[-1][0] == self._now_s:
            self._store_times[-1][1] = number
        else:
            self._store_times.append([self._now_s, number])
        spec = CPULoadStoreSpec(slots, [number] * len(slots), new)
        return PrepareStoreOutput(new.copy(), spec, evicted)

    def _forget_absent(self, request: RequestState) -> None:
        """A context that nobody finishes must not grow without bound."""
        resident = {key: None for key in request.accessed if self._index.state_of(key) is not None}
        request.inserted = {key: None for key in resident if key in request.inserted}
        request.accessed = resident

    def _end_load(
        self, keys: Collection[OffloadKey], spec: CPULoadStoreSpec, request: RequestState
    ) -> list[OffloadKey]:
        """Ends the load by `spec` of these keys; returns those that are visible. What does not match is counted."""
        named = dict.fromkeys(keys)
        ending = [key for key in spec.keys if key in named and key not in spec.ended]
        self._counters["late_completions"] += len(named) - len(ending)
        spec.ended.update(ending)
        if len(spec.ended) == len(spec.keys) and spec in request.loads:
            request.loads.remove(spec)
        if self._index.condemned:
            # a pinned slot is not handed out again, so a load that has not ended still has its slot
            slot_of = dict(zip(spec.keys, spec.slots, strict=True))
            condemned = [key for key in ending if slot_of[key] in self._index.condemned]
            ending = [key for key in ending if slot_of[key] not in self._index.condemned]
            for key in condemned:
                self._index.reader_left(slot_of[key])
        self._index.unpin(ending)
        return ending

    def _end_loads_by_key(self, keys: Collection[OffloadKey], request: RequestState) -> list[OffloadKey]:
        """As `_end_load`, by key while slots are condemned: the request's own oldest load of a key comes first."""
        keys = list(keys)
        self._refuse_duplicates(keys)
        visible: list[OffloadKey] = []
        condemned: list[int] = []
        for key in keys:
            slot = self._pinned_slot(key, request)
            if slot is None:
                raise BlockNotPinnedError(f"block {key.hex()} is not pinned by any load")
            if slot in self._index.condemned:
                condemned.append(slot)
            else:
                visible.append(key)
        consume(map(self._index.reader_left, condemned))
        self._index.unpin(visible)
        request.load_ended(keys)
        return visible

    def _pinned_slot(self, key: OffloadKey, request: RequestState) -> int | None:
        """Which slot a completion by key means."""
        for spec in request.loads:
            if key in spec.keys and key not in spec.ended:
                return spec.slots[list(spec.keys).index(key)]
        if key in self._index.pins:
            return self._ready[key]
        condemned = self._index.condemned
        return next((slot for slot in self._index.condemned_slots(key) if condemned[slot].readers), None)

    def _stores_of(self, keys: Collection[OffloadKey], spec: CPULoadStoreSpec) -> list[OffloadKey]:
        """The keys whose current write is the one of `spec`. Lets writers of condemned slots go; counts the rest."""
        index, named = self._index, set(keys)
        arrived = []
        for key, slot, generation in zip(spec.keys, spec.slots, spec.slot_generations, strict=True):
            if key not in named:
                continue
            same = index.generations[slot] == generation
            if same and self._in_flight.get(key) == slot:
                arrived.append(key)
            elif same and slot in index.condemned and index.condemned[slot].has_writer:
                index.writer_left(slot)
            else:
                self._counters["late_completions"] += 1
        return arrived

    def _writers_left_by_key(self, keys: Collection[OffloadKey]) -> None:
        for key in keys:
            if key in self._in_flight:
                continue
            condemned = self._index.condemned
            writing = [slot for slot in self._index.condemned_slots(key) if condemned[slot].has_writer]
            if writing:
                self._index.writer_left(writing[0])

    def _withdraw(self, keys: list[OffloadKey]) -> None:
        """Ready keys whose bytes are not to be trusted become absent."""
        pinned = [key for key in keys if key in self._index.pins]
        self._index.condemn_reads(pinned)
        self._index.drop([key for key in keys if key in self._ready])
        self.policy.remove(keys)
        self._emit(keys, removed=True)

    def _reap(self) -> None:
        """Condemns the stores that were already in flight at a time `store_timeout_s` ago."""
        last_overdue = 0.0
        while self._store_times and self._now_s - self._store_times[0][0] >= self.store_timeout_s:
            last_overdue = self._store_times.popleft()[1]
        generations = self._index.generations
        overdue = [key for key, slot in self._in_flight.items() if generations[slot] <= last_overdue]
        if overdue:
            self._index.condemn_writes(overdue)
            self.policy.remove(overdue)
            self._counters["reaped_blocks"] += len(overdue)

    def _emit(self, keys: list[OffloadKey], removed: bool) -> None:
        if self._events is not None and keys:
            self._events.append(OffloadingEvent(list(keys), CPULoadStoreSpec.medium(), removed))
