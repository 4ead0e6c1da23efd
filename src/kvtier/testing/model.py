"""A reference model of the single-tier manager: plain lists, linear searches, the contract and nothing else.

Drive it beside a manager of your own, with the same calls, and compare what the two say. It is exact except
where the contract leaves the manager a choice; there it follows, and raises AssertionError if the choice is
not allowed:

- which of the slots that became free in one call is handed out first (`expect_slots`);
- reaping a store between its timeout and an eighth later (`reap`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence

from kvtier.errors import BlockNotPinnedError, BlockNotReadyError, InvariantError
from kvtier.events import OffloadingEvent
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
from kvtier.testing.model_parts import Allocation, FreeSlots, Read, RequestState, make_spec, refuse_duplicates
from kvtier.testing.model_policies import REFERENCE_POLICIES

_SHORTEST_LOAD_LIMIT_S = 1.0
_LATEST_REAP = 1.125


class ReferenceManager(OffloadingManager):
    """The contract of `CPUOffloadingManager`, written to be read. Every operation is O(capacity) or worse."""

    def __init__(
        self,
        num_blocks: int,
        cache_policy: str = "lru",
        enable_events: bool = False,
        store_threshold: int = 0,
        max_tracker_size: int = 64_000,
        *,
        deadline_s: float = 5.0,
        store_timeout_s: float = 600.0,
    ) -> None:
        self.policy = REFERENCE_POLICIES[cache_policy](num_blocks)
        self._num_blocks = num_blocks
        self._events: list[OffloadingEvent] | None = [] if enable_events else None
        self._store_threshold = store_threshold
        self._max_tracker_size = max_tracker_size
        self._deadline_s = deadline_s
        self._store_timeout_s = store_timeout_s
        self._now_s = 0.0
        self._allocations: list[Allocation] = []
        self._generation = 0
        self._free = FreeSlots(num_blocks)
        self._seen: OrderedDict[OffloadKey, int] = OrderedDict()
        self._counters: Counter[str] = Counter(stored_blocks=0, evicted_blocks=0, shed_blocks=0, late_completions=0)

    # -- asking

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        state = self._state(req_context)
        self._count_lookup(key, state)
        block = self._visible(key)
        if block is None:
            return False
        if block.ready:
            return True
        if not self.defer(req_context):
            return False
        state.deferred = True
        if not self.still_waiting(req_context):
            state.stuck = key
        return None

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrefixLookup:
        for num_ready, key in enumerate(keys):
            answer = self.lookup(key, req_context)
            if not answer:
                return PrefixLookup(num_ready, Residency.ARRIVING if answer is None else Residency.ABSENT)
        return PrefixLookup(len(keys), Residency.READY)

    def residency(self, key: OffloadKey) -> Residency:
        block = self._visible(key)
        if block is None:
            return Residency.ABSENT
        return Residency.READY if block.ready else Residency.ARRIVING

    def defer(self, req_context: ReqContext) -> bool:
        state = self._state(req_context)
        if state.deadline_s is None:
            state.deadline_s = self._now_s + self._deadline_s
        return self._deadline_s > 0 and self._now_s < state.deadline_s

    def still_waiting(self, req_context: ReqContext) -> bool:
        state = self._state(req_context)
        return state.stuck in self._in_flight() and self.defer(req_context)

    # -- loading

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        refuse_duplicates(keys)
        blocks = []
        for key in keys:
            block = self._visible(key)
            if block is None or not block.ready:
                raise BlockNotReadyError(f"block {key.hex()} is not ready")
            blocks.append(block)
        state = self._state(req_context)
        state.deferred = False
        self._note_accesses(keys, state)
        deadline_s = state.deadline_s if state.deadline_s is not None else self._now_s + self._deadline_s
        spec = make_spec(blocks, begin_by_s=max(deadline_s, self._now_s + _SHORTEST_LOAD_LIMIT_S))
        for block in blocks:
            block.reads.append(Read(req_context, spec))
        return spec

    def complete_load(
        self,
        keys: Collection[OffloadKey],
        req_context: ReqContext,
        success: bool = True,
        spec: LoadStoreSpec | None = None,
    ) -> None:
        ended: list[tuple[Allocation, Read]] = []
        for key in keys:
            reads = [(block, read) for block in self._allocations if block.key == key for read in block.reads]
            if spec is None:
                own = [(block, read) for block, read in reads if read.req_context is req_context]
                if not own:
                    raise BlockNotPinnedError(f"block {key.hex()} is not pinned")
            else:
                own = [(block, read) for block, read in reads if read.spec is spec]
                self._counters["late_completions"] += not own
            ended += own[:1]
        for block, read in ended:
            block.reads.remove(read)
        if not success:
            if ended:
                self._state(req_context).has_waited_for_load(spec)
            self._vanish([block for block, _ in ended if block.visible])
        self._release_idle()

    # -- storing

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        refuse_duplicates(keys)
        state = self._state(req_context)
        passed = self._admitted(keys)
        new = [key for key in passed if self._visible(key) is None]
        needed = max(0, len(new) - self._num_free())
        protected = [set(keys), self._not_evictable()]
        victims = None
        if state.introduced and not state.crowded:
            victims = self.policy.evict(needed, [*protected, state.accessed])
        if victims is None:
            victims = self.policy.evict(needed, protected)
            if victims is None:
                return None
            state.crowded |= state.introduced
        return self._store(passed, new, victims, state)

    def prepare_store_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput:
        refuse_duplicates(keys)
        state = self._state(req_context)
        passed = self._admitted(keys)
        protected = [set(keys), self._not_evictable(), state.accessed]
        room = self._num_free() + sum(not any(key in p for p in protected) for key in self.policy)
        if state.cut:
            room = 0
        leading: list[OffloadKey] = []
        new: list[OffloadKey] = []
        for key in passed:
            if self._visible(key) is None:
                if len(new) == room:
                    break
                new.append(key)
            leading.append(key)
        rest = passed[len(leading) :]
        if rest:
            state.cut = True
            self._counters["shed_blocks"] += sum(self._visible(key) is None for key in rest)
        victims = self.policy.evict(max(0, len(new) - self._num_free()), protected)
        assert victims is not None
        return self._store(leading, new, victims, state)

    def complete_store(
        self,
        keys: Collection[OffloadKey],
        req_context: ReqContext,
        success: bool = True,
        spec: LoadStoreSpec | None = None,
    ) -> None:
        written: list[Allocation] = []
        for key in keys:
            if spec is None:
                writes = [b for b in self._allocations if b.key == key and b.writing]
                writes.sort(key=lambda block: not block.visible)
                written += writes[:1]
            elif key in spec.keys:  # type: ignore[attr-defined]
                block = self._bymake_spec(key, spec)
                if block is None or not block.writing:
                    self._counters["late_completions"] += 1
                else:
                    written.append(block)
        for block in written:
            block.writing = False
        visible = [block for block in written if block.visible]
        if success:
            self._counters["stored_blocks"] += len(visible)
            self._emit([block.key for block in visible], removed=False)
        else:
            self.policy.remove([block.key for block in visible])
            for block in visible:
                block.visible = False
        self._release_idle()

    # -- recency and the reuse filter

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self.policy.touch(list(reversed(dict.fromkeys(keys))), self._in_flight())

    def count_offers(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        state = self._state(req_context)
        for key in reversed(keys):
            if key not in state.counted:
                self._count(key, state)

    def on_new_request(self, req_context: ReqContext) -> None:
        self._state(req_context).introduced = True

    def on_request_finished(self, req_context: ReqContext) -> None:
        state = self._state(req_context)
        self.policy.settle(list(reversed(state.accessed)), state.inserted)
        del req_context._states[self]

    # -- time, reset, and what the model adds

    def advance(self, now_s: float) -> None:
        self._now_s = max(self._now_s, now_s)
        limit_s = self._store_timeout_s * _LATEST_REAP
        self._condemn([block for block in self.overdue() if self._now_s - block.since_s > limit_s])

    def overdue(self) -> list[Allocation]:
        """Stores that a manager may reap by now."""
        return [
            block
            for block in self._allocations
            if block.visible and block.writing and self._now_s - block.since_s >= self._store_timeout_s
        ]

    def reap(self, key: OffloadKey) -> None:
        """The manager has reaped the store of `key`."""
        found = [block for block in self.overdue() if block.key == key]
        assert found, f"reaped too early: {key.hex()}"
        self._condemn(found)

    def expect_slots(self, slots: Iterable[int]) -> None:
        """The slots that the manager handed out in the next store, in order. Empty: the model chooses."""
        self._free.expected = list(slots)

    def writers_died(self) -> None:
        """Every writer is gone: what only a condemned write still held is free."""
        for block in self._allocations:
            block.writing = block.writing and block.visible
        self._release_idle()

    def reset_cache(self) -> None:
        self._emit([block.key for block in self._allocations if block.ready], removed=True)
        for block in self._allocations:
            block.visible = False
        self.policy.clear()
        self._release_idle()
        if not self._allocations:
            self._free = FreeSlots(self._num_blocks)

    def take_events(self) -> Iterable[OffloadingEvent]:
        if self._events is None:
            return []
        events, self._events = self._events, []
        return events

    def get_stats(self) -> ManagerStats:
        return ManagerStats(
            capacity_blocks=self._num_blocks,
            ready_blocks=sum(block.ready for block in self._allocations),
            in_flight_blocks=len(self._in_flight()),
            pinned_blocks=sum(block.visible and bool(block.reads) for block in self._allocations),
            condemned_blocks=sum(not block.visible for block in self._allocations),
            counters=dict(self._counters),
        )

    def check_invariants(self) -> None:
        visible = [block.key for block in self._allocations if block.visible]
        slots = [block.slot for block in self._allocations] + self._free.all()
        if sorted(slots) != list(range(self._num_blocks)):
            raise InvariantError(f"slots are no partition: {sorted(slots)}")
        if sorted(visible) != sorted(self.policy):
            raise InvariantError("the policy does not hold exactly the resident keys")
        if not all(block.visible or block.busy for block in self._allocations):
            raise InvariantError("an idle slot is condemned")

    # -- parts

    def _state(self, req_context: ReqContext) -> RequestState:
        state: RequestState = req_context._states.setdefault(self, RequestState())
        return state

    def _visible(self, key: OffloadKey) -> Allocation | None:
        return next((block for block in self._allocations if block.visible and block.key == key), None)

    def _bymake_spec(self, key: OffloadKey, spec: LoadStoreSpec) -> Allocation | None:
        assert isinstance(spec, CPULoadStoreSpec)
        at = list(spec.keys).index(key)
        place = (spec.block_ids[at], spec.generations[at])
        return next((b for b in self._allocations if (b.slot, b.generation) == place), None)

    def _in_flight(self) -> set[OffloadKey]:
        return {block.key for block in self._allocations if block.visible and block.writing}

    def _not_evictable(self) -> set[OffloadKey]:
        return {block.key for block in self._allocations if block.visible and block.busy}

    def _num_free(self) -> int:
        return self._num_blocks - len(self._allocations)

    def _store(
        self,
        passed: Sequence[OffloadKey],
        new: list[OffloadKey],
        victims: list[OffloadKey],
        state: RequestState,
    ) -> PrepareStoreOutput:
        for victim in victims:
            block = self._visible(victim)
            assert block is not None
            block.visible = False
            self._release_idle()
        self._counters["evicted_blocks"] += len(victims)
        self._emit(victims, removed=True)
        blocks = [self._allocate(key) for key in new]
        self.policy.insert(new)
        state.deferred = False
        state.inserted.update(new)
        self._note_accesses(passed, state)
        return PrepareStoreOutput(list(new), make_spec(blocks), list(victims))

    def _allocate(self, key: OffloadKey) -> Allocation:
        self._generation += 1
        block = Allocation(key, self._free.take(), self._generation, self._now_s)
        self._allocations.append(block)
        return block

    def _release_idle(self) -> None:
        idle = {block.slot for block in self._allocations if not block.visible and not block.busy}
        if idle:
            self._free.give_back(idle)
        self._allocations = [block for block in self._allocations if block.slot not in idle]

    def _vanish(self, blocks: list[Allocation]) -> None:
        """Ready blocks become absent, without having been evicted."""
        keys = [block.key for block in blocks]
        for block in blocks:
            block.visible = False
        self.policy.remove(keys)
        self._emit(keys, removed=True)

    def _condemn(self, blocks: list[Allocation]) -> None:
        """Writes that are given up: absent at once, the slots stay with their writers."""
        for block in blocks:
            block.visible = False
        self.policy.remove([block.key for block in blocks])

    def _emit(self, keys: list[OffloadKey], *, removed: bool) -> None:
        if self._events is not None and keys:
            self._events.append(OffloadingEvent(list(keys), CPULoadStoreSpec.medium(), removed))

    def _note_accesses(self, keys: Collection[OffloadKey], state: RequestState) -> None:
        state.accessed += [key for key in keys if key not in state.accessed]

    def _admitted(self, keys: Collection[OffloadKey]) -> list[OffloadKey]:
        if self._store_threshold < 2:
            return list(keys)
        return [key for key in keys if self._visible(key) or self._seen.get(key, 0) >= self._store_threshold]

    def _count_lookup(self, key: OffloadKey, state: RequestState) -> None:
        if not (state.deferred and key in state.counted):
            self._count(key, state)

    def _count(self, key: OffloadKey, state: RequestState) -> None:
        state.counted.add(key)
        self._seen[key] = self._seen.pop(key, 0) + 1
        while len(self._seen) > self._max_tracker_size:
            self._seen.popitem(last=False)
