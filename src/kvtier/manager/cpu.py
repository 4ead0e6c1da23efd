"""`CPUOffloadingManager`: one tier of fixed slots in host memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import filterfalse, takewhile
from typing import cast

import numpy as np

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
from kvtier.policy.ordering import consume, evictable


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
        self._next_reap_s = math.inf
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
        self._refuse_duplicates(keys)
        slots = list(map(self._ready.get, keys))
        if None in slots:
            key = keys[slots.index(None)]
            raise BlockNotReadyError(f"block {key.hex()} is {self.residency(key).value}; a load needs it ready")
        request = self._request(req_context)
        self._index.pin(keys)
        request.loading.update(zip(keys, cast("list[int]", slots), strict=True))
        request.note(keys, reused=True)
        if self._filter is not None:
            self._filter.note_prepared(req_context)
        block_ids = np.array(slots, dtype=np.int64)
        return CPULoadStoreSpec(
            block_ids,
            self._index.generations[block_ids],
            keys,
            begin_by_s=request.load_begin_by_s(self._now_s, self.deadline_s),
        )

    def complete_load(
        self,
        keys: Collection[OffloadKey],
        req_context: ReqContext,
        success: bool = True,
        spec: LoadStoreSpec | None = None,
    ) -> None:
        index = self._index
        if spec is not None:
            ended = self._loads_of(keys, cast(CPULoadStoreSpec, spec), self._request(req_context))
        elif index.condemned:
            ended = self._loads_by_key(keys, self._request(req_context))
        else:
            missing = index.unpin(keys)
            if missing is not None:
                raise BlockNotPinnedError(f"block {missing.hex()} is not pinned by any load")
            consume(map(self._request(req_context).loading.pop, keys, [None] * len(keys)))
            ended = None
        if ended is not None:
            visible, condemned = ended
            index.unpin(visible)
            consume(map(index.reader_left, condemned))
            keys = visible
        if not success:
            self._counters["failed_load_blocks"] += len(keys)
            self._withdraw([key for key in keys if key in self._ready])

    # -- stores ----------------------------------------------------------------------------------------------

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        keys = list(keys)
        own = self._refuse_duplicates(keys)
        request = self._request(req_context)
        new = self._storable(keys)
        missing = len(new) - self._index.num_free
        evicted: list[OffloadKey] = []
        if missing > 0:
            protected = self._protected(own)
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
        return self._grant(keys, new, evicted, request, req_context)

    def prepare_store_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput:
        keys = list(keys)
        own = self._refuse_duplicates(keys)
        request = self._request(req_context)
        new = self._storable(keys)
        missing = len(new) - self._index.num_free
        evicted: list[OffloadKey] = []
        if request.shed and new:
            self._counters["shed_blocks"] += len(new)
            keys = keys[: keys.index(new[0])]
            new = []
        elif missing > 0:
            protected = [*self._protected(own), request.accessed]
            victims = self.policy.evict(missing, protected)
            if victims is None:
                request.shed = True
                spare = sum(1 for _ in evictable(self.policy, protected))
                fitting = self._index.num_free + spare
                self._counters["shed_blocks"] += len(new) - fitting
                keys = keys[: keys.index(new[fitting])]
                new = new[:fitting]
                victims = self.policy.evict(spare, protected) or []
            evicted = victims
        return self._grant(keys, new, evicted, request, req_context)

    def complete_store(
        self,
        keys: Collection[OffloadKey],
        req_context: ReqContext,
        success: bool = True,
        spec: LoadStoreSpec | None = None,
    ) -> None:
        if spec is None:
            arrived = list(filter(self._in_flight.__contains__, keys))
            if self._index.condemned and len(arrived) < len(keys):
                self._writers_left_by_key(keys)
        else:
            arrived = self._stores_of(keys, cast(CPULoadStoreSpec, spec))
        if not arrived:
            return
        if success:
            self._index.publish(arrived)
            self._counters["stored_blocks"] += len(arrived)
            self._emit(arrived, removed=False)
        else:
            self._index.abandon(arrived)
            self.policy.remove(arrived)
            self._counters["failed_store_blocks"] += len(arrived)

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
            ready, in_flight = self._ready, self._in_flight
            deepest_first = reversed(request.accessed)
            if in_flight:
                resident = [key for key in deepest_first if key in ready or key in in_flight]
            else:
                resident = list(filter(ready.__contains__, deepest_first))
            inserted = {key for key, reused in request.accessed.items() if not reused}
            self.policy.touch(resident, inserted)
        request.finish()

    # -- waiting and time ------------------------------------------------------------------------------------

    def still_waiting(self, req_context: ReqContext) -> bool:
        request: RequestState | None = req_context._states.get(self)
        if request is None or request.stuck_key not in self._in_flight:
            return False
        return request.may_wait(self._now_s, self.deadline_s)

    def defer(self, req_context: ReqContext) -> bool:
        return self._request(req_context).may_wait(self._now_s, self.deadline_s)

    def advance(self, now_s: float) -> None:
        if now_s <= self._now_s:
            return
        if self._now_s == -math.inf:  # until now nothing could expire: what is in flight starts to age
            self._index.allocated_at_s[:] = now_s
            if self._in_flight:
                self._next_reap_s = now_s + self.store_timeout_s
        self._now_s = now_s
        if now_s >= self._next_reap_s:
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
        if self._next_reap_s == math.inf and self._in_flight and self._now_s != -math.inf:
            raise InvariantError("stores are in flight but nothing would ever reap them")

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
        if not request.may_wait(self._now_s, self.deadline_s):
            return False
        request.stuck_key = key
        self._counters["deferred_lookups"] += 1
        if self._filter is not None:
            self._filter.note_deferred(req_context)
        return True

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

    def _protected(self, own: dict[OffloadKey, None]) -> list[dict[OffloadKey, int] | dict[OffloadKey, None]]:
        return [container for container in (self._index.pins, self._in_flight, own) if container]

    def _grant(
        self,
        offered: list[OffloadKey],
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
        if len(new) < len(offered):
            inserted = set(new)
            for key in offered:  # in prefix order, also where stored and new blocks alternate
                if key in inserted or key in self._ready:
                    request.note((key,), reused=key not in inserted)
        else:
            request.note(new, reused=False)
        if not new:
            return PrepareStoreOutput([], CPULoadStoreSpec([]), evicted)
        slots = self._index.allocate(new, self._now_s)
        self.policy.insert(new)
        if not request.introduced and len(request.accessed) > 2 * self._index.num_slots + 1024:
            self._forget_absent(request)
        if self._now_s + self.store_timeout_s < self._next_reap_s and self._now_s != -math.inf:
            self._next_reap_s = self._now_s + self.store_timeout_s
        spec = CPULoadStoreSpec(slots, self._index.generations[slots], new)
        return PrepareStoreOutput(list(new), spec, evicted)

    def _forget_absent(self, request: RequestState) -> None:
        """A context that nobody finishes must not grow without bound."""
        kept = {k: reused for k, reused in request.accessed.items() if self._index.state_of(k) is not None}
        request.accessed.clear()
        request.accessed.update(kept)

    def _loads_of(
        self, keys: Collection[OffloadKey], spec: CPULoadStoreSpec, request: RequestState
    ) -> tuple[list[OffloadKey], list[int]]:
        """-> (visible keys, condemned slots) whose load by `spec` ends now. What does not match is counted."""
        slots = dict(zip(spec.keys, spec.block_ids.tolist(), strict=True))
        visible, condemned = [], []
        for key in dict.fromkeys(keys):
            slot = slots.get(key)
            if slot is None or key in spec.ended:
                self._counters["late_completions"] += 1
                continue
            spec.ended.add(key)
            if request.loading.get(key) == slot:
                del request.loading[key]
            # a pinned slot is never handed out again, so a load that has not ended still has its slot
            if slot in self._index.condemned:
                condemned.append(slot)
            else:
                visible.append(key)
        return visible, condemned

    def _loads_by_key(self, keys: Collection[OffloadKey], request: RequestState) -> tuple[list[OffloadKey], list[int]]:
        """As `_loads_of`, for a completion by key while slots are condemned: the request's own load comes first."""
        visible, condemned = [], []
        for key in keys:
            readers = [s for s in self._index.condemned_slots(key) if self._index.condemned[s].readers]
            slot = request.loading.get(key)
            if slot in readers:
                condemned.append(cast(int, slot))
            elif key in self._index.pins:
                visible.append(key)
            elif readers:
                condemned.append(readers[0])
            else:
                raise BlockNotPinnedError(f"block {key.hex()} is not pinned by any load")
        self._refuse_duplicates(list(keys))
        consume(map(request.loading.pop, keys, [None] * len(keys)))
        return visible, condemned

    def _stores_of(self, keys: Collection[OffloadKey], spec: CPULoadStoreSpec) -> list[OffloadKey]:
        """The keys whose current write is the one of `spec`. Lets writers of condemned slots go; counts the rest."""
        slots = spec.block_ids.tolist()
        fresh = self._index.generations[spec.block_ids] == spec.generations
        if len(keys) == len(slots) and list(map(self._in_flight.get, spec.keys)) == slots and fresh.all():
            return list(spec.keys)
        named = set(keys)
        arrived = []
        for key, slot, same in zip(spec.keys, slots, fresh.tolist(), strict=True):
            if key not in named:
                continue
            if same and self._in_flight.get(key) == slot:
                arrived.append(key)
            elif same and slot in self._index.condemned and self._index.condemned[slot].has_writer:
                self._index.writer_left(slot)
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
        keys = list(self._in_flight)
        ages = self._now_s - self._index.allocated_at_s[list(self._in_flight.values())]
        overdue = [key for key, age in zip(keys, ages.tolist(), strict=True) if age >= self.store_timeout_s]
        if overdue:
            self._index.condemn_writes(overdue)
            self.policy.remove(overdue)
            self._counters["reaped_blocks"] += len(overdue)
        # rescanning for every single store would cost O(in flight) a step; an eighth of the limit is soon enough
        oldest = max((age for age in ages.tolist() if age < self.store_timeout_s), default=None)
        wait_s = None if oldest is None else max(self.store_timeout_s - oldest, self.store_timeout_s / 8)
        self._next_reap_s = math.inf if wait_s is None else self._now_s + wait_s

    def _emit(self, keys: list[OffloadKey], removed: bool) -> None:
        if self._events is not None and keys:
            self._events.append(OffloadingEvent(list(keys), CPULoadStoreSpec.medium(), removed))
