"""`CPUOffloadingManager`: one tier of fixed slots in host memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import filterfalse
from typing import cast

from kvtier.errors import BlockNotReadyError, InvariantError
from kvtier.interfaces import CPULoadStoreSpec, LoadStoreSpec, PrepareStoreOutput, ReqContext
from kvtier.keys import OffloadKey
from kvtier.manager import completions
from kvtier.manager.breaker import Transfer
from kvtier.manager.queries import SingleTierQueries
from kvtier.manager.requests import RequestState
from kvtier.manager.room import evict_for_all, evict_for_prefix


class CPUOffloadingManager(SingleTierQueries):
    """Tracks `num_blocks` slots of one tier. See `OffloadingManager` for the contract.

    `store_threshold` of 2 or more filters stores by reuse (`max_tracker_size` keys are remembered); 0 and 1 do
    not. `deadline_s` bounds a request's waiting; 0 means that it never waits. A store that has not completed
    `store_timeout_s` after it was prepared is reaped: its keys become absent and its slots are condemned until a
    completion by spec, or `writers_died`, says that nobody writes them any more.

    With a `breaker` (which is then this manager's) the tier is not used while that is shut: look-ups answer absent,
    and stores are shed.

    Requests may give hints (`kvtier.manager.hints`): of the blocks they may keep a share of `pin_share` (0..1) pinned.

    Raises ConfigurationError for values outside what is said here.
    """

    # -- loads -----------------------------------------------------------------------------------------------

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:
        keys = list(keys)
        own = dict.fromkeys(keys, 1)
        if len(own) < len(keys):
            raise completions.named_twice(keys)
        try:
            slots = list(map(self._ready.__getitem__, keys))
        except KeyError as missing:
            key = missing.args[0]
            stands = self.residency(key).value
            raise BlockNotReadyError(f"block {key.hex()} is {stands}; a load needs it ready") from None
        index = self._index
        request: RequestState = req_context._states.get(self) or self._request(req_context)
        index.pin(own)
        request.note_reused(own)
        if request.hints is not None:
            self._note_hints(request.hints, keys)
        if self._filter is not None:
            self._filter.note_prepared(req_context)
        begin_by_s = request.load_begin_by_s(self._now_s, self.deadline_s) if self._now_s > -math.inf else None
        spec = CPULoadStoreSpec(slots, list(map(index.generations.__getitem__, slots)), keys, begin_by_s)
        request.load_begun(spec)
        if self.breaker is not None and req_context.by_engine:
            self.breaker.note_begun()
        return spec

    def complete_load(
        self,
        keys: Collection[OffloadKey],
        req_context: ReqContext,
        success: bool = True,
        spec: LoadStoreSpec | None = None,
    ) -> None:
        index = self._index
        request: RequestState = req_context._states.get(self) or self._request(req_context)
        if spec is not None:
            load = cast(CPULoadStoreSpec, spec)
            num_ended = len(load.ended)
            keys, num_late = completions.end_load_by_spec(index, keys, load, request)
            self._counters["late_completions"] += num_late
            if not success and len(load.ended) > num_ended:
                request.has_waited_for_load(load)
        elif index.condemned:
            keys = list(keys)
            if len(set(keys)) < len(keys):
                raise completions.named_twice(keys)
            keys = completions.end_load_by_key(index, keys, request)
        else:
            missing = index.unpin(keys)
            if missing is not None:
                raise completions.not_pinned(missing)
            request.load_ended(keys)
        if success:
            if self.breaker is not None and req_context.by_engine and keys:
                self.breaker.note_success(Transfer.LOAD)
        elif keys:
            if self.breaker is not None and req_context.by_engine:
                self.breaker.note_failure(Transfer.LOAD)
            self._counters["failed_load_blocks"] += len(keys)
            self._withdraw(list(filter(self._ready.__contains__, keys)))

    # -- stores ----------------------------------------------------------------------------------------------

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        keys = list(keys)
        distinct = set(keys)
        if len(distinct) < len(keys):
            raise completions.named_twice(keys)
        request: RequestState = req_context._states.get(self) or self._request(req_context)
        if self.breaker is not None and self.breaker.is_shut:
            return self._shed_all(keys, distinct, request)
        new = self._storable(keys, distinct, request)
        missing = len(new) - self._index.num_free
        evicted: list[OffloadKey] = []
        if missing > 0:
            victims = evict_for_all(self._order, new, missing, self._protected(distinct, new), request)
            if victims is None:
                self._counters["refused_blocks"] += len(new)
                return None
            evicted = victims
            if len(evicted) < missing:
                keys, new = self._shed(keys, new, len(new) - missing + len(evicted))
        return self._grant(keys, new, evicted, request, req_context)

    def prepare_store_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput:
        keys = list(keys)
        distinct = set(keys)
        if len(distinct) < len(keys):
            raise completions.named_twice(keys)
        request: RequestState = req_context._states.get(self) or self._request(req_context)
        if self.breaker is not None and self.breaker.is_shut:
            return self._shed_all(keys, distinct, request)
        new = self._storable(keys, distinct, request)
        missing = len(new) - self._index.num_free
        evicted: list[OffloadKey] = []
        fitting = len(new)
        if request.shed:
            fitting = 0
        elif missing > 0:
            evicted = evict_for_prefix(self._order, new, missing, self._protected(distinct, new), request)
            fitting -= missing - len(evicted)
        if fitting < len(new):
            keys, new = self._shed(keys, new, fitting)
        return self._grant(keys, new, evicted, request, req_context)

    def complete_store(
        self,
        keys: Collection[OffloadKey],
        req_context: ReqContext,
        success: bool = True,
        spec: LoadStoreSpec | None = None,
    ) -> None:
        arriving = keys
        if spec is not None:
            arriving, num_late = completions.writes_of(self._index, keys, cast(CPULoadStoreSpec, spec))
            self._counters["late_completions"] += num_late
        elif self._index.condemned:
            completions.writers_left_by_key(self._index, keys)
        if success:
            arrived = self._index.publish(arriving)
            self._counters["stored_blocks"] += len(arrived)
            if self.breaker is not None and req_context.by_engine and arrived:
                self.breaker.note_success(Transfer.STORE)
            if self._events is not None:
                self._emit(arrived, removed=False)
            return
        failed = list(dict.fromkeys(filter(self._in_flight.__contains__, arriving)))
        if failed:
            self._index.abandon(failed)
            self._order.remove(failed)
            self._counters["failed_store_blocks"] += len(failed)
            if self.breaker is not None and req_context.by_engine:
                self.breaker.note_failure(Transfer.STORE)

    def writers_died(self) -> None:
        for slot in [slot for slot, entry in self._index.condemned.items() if entry.has_writer]:
            self._index.writer_left(slot)

    # -- recency and requests --------------------------------------------------------------------------------

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self._order.touch(reversed(list(keys)), self._in_flight)

    def count_offers(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        if self._filter is not None:
            self._filter.count_offers(keys, req_context)

    def on_new_request(self, req_context: ReqContext) -> None:
        request = req_context._states.get(self)
        if request is None:
            request = self._request(req_context)
        request.introduced = True

    def on_request_finished(self, req_context: ReqContext) -> None:
        if self._filter is not None:
            self._filter.forget(req_context)
        request: RequestState | None = req_context._states.get(self)
        if request is None:
            return
        self._order.settle(reversed(request.accessed), request.inserted)
        if request.hints is not None and self._hinted is not None:
            self._hinted.note_finished(request.hints, list(request.accessed))
        if request.loads:
            # only its open loads are still of interest
            rest = req_context._states[self] = RequestState()
            rest.loads = request.loads
        else:
            del req_context._states[self]

    # -- time --------------------------------------------------------------------------------------------------

    def advance(self, now_s: float) -> None:
        if now_s <= self._now_s:
            return
        # what began before the time was first told begins to age now
        self._ages.note(now_s if self._now_s == -math.inf else self._now_s, self._index.num_allocations)
        self._now_s = now_s
        if self._hinted is not None:
            self._hinted.now_s = now_s
        if self.breaker is not None:
            self.breaker.advance(now_s)
        if self._cost.recompute_blocks_per_s is not None:
            self._cost.observe(now_s, self._num_arrived, bool(self._in_flight))
        if not self._in_flight:
            self._ages.forget()
        elif last_overdue := self._ages.last_overdue(now_s):
            self._reap(last_overdue)

    # -- whole cache -----------------------------------------------------------------------------------------

    def reset_cache(self) -> None:
        removed = [*self._ready, *self._index.restored]
        self._index.condemn_writes(list(self._in_flight))
        self._index.condemn_reads(list(self._index.pins))
        self._index.drop([*self._ready, *self._index.restored])
        self._index.renew_free_order()
        self._order.clear()
        self._counters["resets"] += 1
        self._emit(removed, removed=True)

    def check_invariants(self) -> None:
        self._index.check_invariants()
        resident = self._ready.keys() | self._in_flight.keys() | self._index.restored.keys()
        held = list(self.policy)
        if len(held) != len(self.policy) or len(held) != len(resident) or set(held) != resident:
            difference = [key.hex() for key in resident.symmetric_difference(held)]
            raise InvariantError(f"the policy does not hold exactly the resident keys: {difference}")
        if self._hinted is not None:
            self._hinted.check_invariants()

    # -- for a manager of several tiers ------------------------------------------------------------------------

    @property
    def has_reuse_filter(self) -> bool:
        """Whether stores have to be offered more than once."""
        return self._filter is not None

    @property
    def num_free(self) -> int:
        """Slots that a store can have without evicting. O(1)."""
        return self._index.num_free

    def evict_early(self, count: int, req_context: ReqContext) -> CPULoadStoreSpec:
        """Evicts `count` blocks, or as many as may go, but keeps their bytes until `complete_load` with this spec.

        For a manager that writes them down meanwhile: nobody else finds them any more. O(count) at best.
        """
        index = self._index
        victims = self._early_victims(count)
        spec = self.prepare_load(victims, req_context)
        index.condemn_reads(victims)
        self._counters["evicted_blocks"] += len(victims)
        self._emit(victims, removed=True)
        return spec

    def _early_victims(self, count: int) -> list[OffloadKey]:
        """Up to `count` ready blocks that the policy has just let go of."""
        return self._let_go(min(count, len(self._ready) - len(self._index.pins)))

    def _let_go(self, count: int) -> list[OffloadKey]:
        """`count` blocks that nobody holds, or fewer where hints keep some. The caller knows that nothing else does."""
        index, kept = self._index, self._hinted.kept if self._hinted is not None else {}
        count = min(count, len(self.policy) - len(index.in_flight) - len(index.pins) - len(kept))
        return (self._order.evict(count, (index.pins, index.in_flight, kept)) or []) if count > 0 else []

    def ready_keys(self) -> list[OffloadKey]:
        """Every block that can be loaded, oldest store first. The caller owns the list. O(capacity)."""
        return list(self._ready)

    # -- private ---------------------------------------------------------------------------------------------

    def _shed_all(self, keys: list[OffloadKey], distinct: set[OffloadKey], request: RequestState) -> PrepareStoreOutput:
        """The tier is not used now: nothing of this is stored, and nothing behind it."""
        num_shed = len(self._storable(keys, distinct, request))
        self._counters["shed_blocks"] += num_shed
        request.shed = request.shed or num_shed > 0
        return PrepareStoreOutput([], CPULoadStoreSpec([]), [])

    def _storable(self, keys: list[OffloadKey], distinct: set[OffloadKey], request: RequestState) -> list[OffloadKey]:
        """Those of `keys` that are neither stored nor in flight and that the filter admits, in order."""
        if request.hints is not None and request.hints.no_store:
            return []
        new = keys
        if not self._ready.keys().isdisjoint(distinct):
            new = list(filterfalse(self._ready.__contains__, keys))
        if self._in_flight:
            new = list(filterfalse(self._in_flight.__contains__, new))
        if self._filter is not None:
            num_offered = len(new)
            new = self._filter.admitted(new)
            self._counters["filtered_blocks"] += num_offered - len(new)
        return new

    def _shed(
        self, keys: list[OffloadKey], new: list[OffloadKey], fitting: int
    ) -> tuple[list[OffloadKey], list[OffloadKey]]:
        """Of the offered `keys`, and of the `new` ones among them, those that are not behind the first `fitting`."""
        self._counters["shed_blocks"] += len(new) - fitting
        self._order.decline(new[fitting:])
        return keys[: keys.index(new[fitting])], new[:fitting]

    def _grant(
        self,
        keys: list[OffloadKey],
        new: list[OffloadKey],
        evicted: list[OffloadKey],
        request: RequestState,
        req_context: ReqContext,
    ) -> PrepareStoreOutput:
        """Stores `new`, which are what is to be stored of `keys`, in place of `evicted`."""
        if self._filter is not None:
            self._filter.note_prepared(req_context)
        index = self._index
        if self._hinted is not None and new:
            self._note_order(keys, new, request)
        if evicted:
            index.drop(evicted)
            self._counters["evicted_blocks"] += len(evicted)
            if self._events is not None:
                self._emit(evicted, removed=True)
        if len(new) < len(keys):
            # the new ones too, so that all are in prefix order where stored and new blocks alternate
            stored = set(new)
            request.note_reused({key: None for key in keys if key in stored or index.state_of(key) is not None})
        if not new:
            if request.hints is not None:
                self._note_hints(request.hints, keys)
            return PrepareStoreOutput([], CPULoadStoreSpec([]), evicted)
        slot_of, slots, generation = index.allocate(new)
        self._order.insert(new)
        request.note_inserted(slot_of)
        if request.hints is not None:
            self._note_hints(request.hints, keys)
        if not request.introduced and len(request.accessed) > 2 * index.num_slots + 1024:
            request.keep_only(lambda key: index.state_of(key) is not None)
        if self.breaker is not None and req_context.by_engine:
            self.breaker.note_begun()
        begin_by_s = self._now_s + self.store_timeout_s if self._now_s > -math.inf else None
        spec = CPULoadStoreSpec(slots, [generation] * len(slots), new, begin_by_s)
        return PrepareStoreOutput(new.copy(), spec, evicted)

    def _withdraw(self, keys: list[OffloadKey]) -> None:
        """Ready keys whose bytes are not to be trusted become absent."""
        pinned = [key for key in keys if key in self._index.pins]
        self._index.condemn_reads(pinned)
        self._index.drop([key for key in keys if key in self._ready])
        self._order.remove(keys)
        self._emit(keys, removed=True)

    def _reap(self, last_overdue: int) -> None:
        """Condemns the stores in flight of this generation and older."""
        generations = self._index.generations
        overdue = [key for key, slot in self._in_flight.items() if generations[slot] <= last_overdue]
        if overdue:
            if self.breaker is not None:
                self.breaker.note_failure(Transfer.STORE, len({generations[self._in_flight[key]] for key in overdue}))
            self._index.condemn_writes(overdue)
            self._order.remove(overdue)
            self._counters["reaped_blocks"] += len(overdue)
