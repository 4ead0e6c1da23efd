"""`PersistedOffloadingManager`: the manager of a RAM pool that outlives its process."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import filterfalse, takewhile
from typing import Any, cast

from kvtier.interfaces import CPULoadStoreSpec, LoadStoreSpec, PrefixLookup, PrepareStoreOutput, ReqContext, Residency
from kvtier.keys import OffloadKey
from kvtier.manager import completions
from kvtier.manager.cpu import CPUOffloadingManager
from kvtier.manager.requests import RequestState
from kvtier.tier_interfaces import CheckedBlock, PoolKeeper

_RESTORED = "restored_blocks"


class PersistedOffloadingManager(CPUOffloadingManager):
    """As `CPUOffloadingManager`, whose blocks `keeper` writes down for the next process.

    What an earlier process left (`recall`) is resident and may be evicted, but nobody has its bytes before they were
    checked. The first look-up of such a block begins its check: from then on it is in flight like any other whose
    writer has not ended, so requests wait for it within their deadlines, and it is ready or absent afterwards.
    Counted are `restored_blocks`, `verified_blocks` and `corrupt_blocks`.
    """

    def __init__(self, keeper: PoolKeeper, num_blocks: int, *arguments: Any, **options: Any) -> None:
        super().__init__(num_blocks, *arguments, **options)
        self._keeper = keeper
        self._restored = self._index.restored
        self._generation_of_check: dict[OffloadKey, int] = {}
        """Of restored blocks that were checked."""
        self.num_checking = 0
        """Blocks whose check has not ended."""

    def recall(self, runs: Sequence[dict[OffloadKey, int]]) -> None:
        """What an earlier process left: key to slot, in runs of blocks that were used together, each in prefix order,
        the run that was used last being the last. Once, before anything else; a key or slot is there once."""
        blocks = {key: slot for run in runs for key, slot in run.items()}
        self._index.recall(blocks)
        for run in runs:
            self._order.insert(list(run))
            self._order.settle(reversed(run), run)
        self._counters[_RESTORED] += len(blocks)
        self._emit(list(blocks), removed=False)

    # -- look-up ---------------------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        if key in self._restored:
            self._begin_check([key])
        return super().lookup(key, req_context)

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrefixLookup:
        if self._restored and not self._restored.keys().isdisjoint(keys):
            # all that may become the prefix: one after the other would be one wait after the other
            run = takewhile(lambda key: self._index.state_of(key) is not None, keys)
            self._begin_check([key for key in run if key in self._restored])
        return super().lookup_prefix(keys, req_context)

    def residency(self, key: OffloadKey) -> Residency:
        found = super().residency(key)
        if found is Residency.ABSENT and key in self._restored and not (self.breaker and self.breaker.is_shut):
            return Residency.ARRIVING
        return found

    # -- transfers -------------------------------------------------------------------------------------------

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:
        spec = super().prepare_load(keys, req_context)
        self._keeper.note_use(spec.block_ids)
        return spec

    def complete_store(
        self,
        keys: Collection[OffloadKey],
        req_context: ReqContext,
        success: bool = True,
        spec: LoadStoreSpec | None = None,
    ) -> None:
        keys = list(keys)
        super().complete_store(keys, req_context, success, spec)
        if success:
            kept = list(filter(self._ready.__contains__, keys))
            slots = list(map(self._ready.__getitem__, kept))
            self._keeper.keep(kept, slots, list(map(self._index.generations.__getitem__, slots)))

    # -- time --------------------------------------------------------------------------------------------------

    def advance(self, now_s: float) -> None:
        if self.num_checking:
            self._take_checked(self._keeper.poll())
        super().advance(now_s)

    # -- whole cache -----------------------------------------------------------------------------------------

    def reset_cache(self) -> None:
        self._keeper.reset()
        super().reset_cache()

    # -- private ---------------------------------------------------------------------------------------------

    def _begin_check(self, keys: list[OffloadKey]) -> None:
        if not keys:
            return
        slots, generation = self._index.check(keys)
        self._generation_of_check.update(dict.fromkeys(keys, generation))
        self.num_checking += len(keys)
        self._keeper.check(keys, slots, generation)

    def _take_checked(self, checked: list[CheckedBlock]) -> None:
        self.num_checking -= len(checked)
        # a slot that has been handed out again meanwhile is somebody else's
        generations = self._index.generations
        own = [block for block in checked if generations[block.slot] == block.generation]
        self._counters["late_completions"] += len(checked) - len(own)
        for is_intact in (True, False):
            blocks = [block for block in own if block.is_intact is is_intact]
            if not blocks:
                continue
            keys, slots = [block.key for block in blocks], [block.slot for block in blocks]
            spec = CPULoadStoreSpec(slots, [block.generation for block in blocks], keys)
            current, num_late = completions.writes_of(self._index, keys, spec)
            self._counters["late_completions"] += num_late
            if is_intact:
                self._counters["verified_blocks"] += len(self._index.publish(current))
                continue
            self._counters["corrupt_blocks"] += len(blocks)
            self._keeper.forget(slots)
            self._index.abandon(current)
            self._order.remove(current)
            self._emit(current, removed=True)

    @property
    def _num_arrived(self) -> int:
        return super()._num_arrived + self._counters["verified_blocks"]

    def _generation_of(self, key: OffloadKey) -> int:
        generation = super()._generation_of(key)
        # that of its check says nothing about who shares the block
        return 0 if generation == self._generation_of_check.get(key) else generation

    def _storable(self, keys: list[OffloadKey], distinct: set[OffloadKey], request: RequestState) -> list[OffloadKey]:
        if self._restored:
            keys = list(filterfalse(self._restored.__contains__, keys))
        return super()._storable(keys, distinct, request)

    def _grant(
        self,
        keys: list[OffloadKey],
        new: list[OffloadKey],
        evicted: list[OffloadKey],
        request: RequestState,
        req_context: ReqContext,
    ) -> PrepareStoreOutput:
        output = super()._grant(keys, new, evicted, request, req_context)
        self._keeper.forget(cast(CPULoadStoreSpec, output.store_spec).block_ids)
        return output

    def _withdraw(self, keys: list[OffloadKey]) -> None:
        self._keeper.forget(list(map(self._ready.__getitem__, keys)))
        super()._withdraw(keys)

    def _early_victims(self, count: int) -> list[OffloadKey]:
        index = self._index
        if not self._restored:
            return super()._early_victims(count)
        victims = self._let_go(min(count, len(self._ready) + len(self._restored) - len(index.pins)))
        # what nobody has checked cannot be handed on to another tier
        unchecked = list(filter(self._restored.__contains__, victims))
        index.drop(unchecked)
        self._counters["evicted_blocks"] += len(unchecked)
        self._emit(unchecked, removed=True)
        return list(filter(self._ready.__contains__, victims))
