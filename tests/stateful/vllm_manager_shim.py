"""vLLM's own `CPUOffloadingManager` behind kvtier's contract, called as vLLM's offloading connector calls it.

Where the connector does something around the manager, the shim does it too: it looks up key by key until a miss and
defers for a pending one, names keys in any order when a transfer ends, and drops the ends of transfers that a reset
has made stale. What vLLM's manager has no call for is answered so that the driver goes on: nothing expires.
"""

from collections.abc import Sequence

from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.base import ReqContext as VLLMReqContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvtier import CPULoadStoreSpec, OffloadingManager, PrepareStoreOutput, ReqContext, Residency
from kvtier.events import OffloadingEvent
from kvtier.interfaces import ManagerStats, PrefixLookup

_RESIDENCY = {
    LookupResult.HIT: Residency.READY,
    LookupResult.HIT_PENDING: Residency.ARRIVING,
    LookupResult.MISS: Residency.ABSENT,
}


class VLLMManagerShim(OffloadingManager):
    """`manager` is vLLM's."""

    def __init__(self, num_blocks: int, cache_policy: str, store_threshold: int) -> None:
        self.manager = CPUOffloadingManager(
            num_blocks, cache_policy=cache_policy, enable_events=True, store_threshold=max(1, store_threshold)
        )
        self._num_resets = 0
        self._reset_events: list[OffloadingEvent] = []

    def _context(self, req_context: ReqContext) -> VLLMReqContext:
        context = req_context._states.get(self)
        if context is None:
            context = req_context._states[self] = VLLMReqContext(req_id=req_context.req_id)
        return context

    # -- asking: vLLM's `_maximal_prefix_lookup`

    def lookup(self, key, req_context):
        answer = self.manager.lookup(key, self._context(req_context))
        return {LookupResult.HIT: True, LookupResult.HIT_PENDING: None, LookupResult.MISS: False}[answer]

    def lookup_prefix(self, keys, req_context):
        num_ready, defers = 0, False
        for key in keys:
            answer = self.lookup(key, req_context)
            if answer is False:
                break
            defers = defers or answer is None
            num_ready += not defers
        if defers:
            return PrefixLookup(num_ready, Residency.ARRIVING)
        return PrefixLookup(num_ready, Residency.READY if num_ready == len(keys) else Residency.ABSENT)

    def residency(self, key):
        return _RESIDENCY[self.manager.lookup(key, VLLMReqContext(req_id="nobody"))]

    def still_waiting(self, req_context):
        return False

    def defer(self, req_context):
        return True

    # -- transfers: vLLM's `update_state_after_alloc`, `_build_store_jobs` and `update_connector_output`

    def prepare_load(self, keys, req_context):
        keys = list(keys)
        return self._spec(keys, self.manager.prepare_load(keys, self._context(req_context)))

    def complete_load(self, keys, req_context, success=True, spec=None):
        assert success, "vLLM's connector has no failed loads"
        if not self._is_stale(spec):
            self.manager.complete_load(set(keys), self._context(req_context))

    def prepare_store(self, keys, req_context):
        granted = self.manager.prepare_store(list(keys), self._context(req_context))
        if granted is None:
            return None
        spec = self._spec(granted.keys_to_store, granted.store_spec)
        return PrepareStoreOutput(list(granted.keys_to_store), spec, list(granted.evicted_keys))

    def prepare_store_prefix(self, keys, req_context):
        """vLLM's connector goes on without the store."""
        return self.prepare_store(keys, req_context) or PrepareStoreOutput([], CPULoadStoreSpec([]), [])

    def complete_store(self, keys, req_context, success=True, spec=None):
        """vLLM's connector only ever calls it with success; the manager takes failures too."""
        if not self._is_stale(spec):
            self.manager.complete_store(set(keys), self._context(req_context), success)

    def _spec(self, keys: Sequence[bytes], spec) -> CPULoadStoreSpec:
        """The number of resets stands where kvtier has generations: it tells a stale transfer."""
        return CPULoadStoreSpec(spec.block_ids.tolist(), [self._num_resets] * len(keys), keys)

    def _is_stale(self, spec) -> bool:
        return spec is not None and bool(spec.slot_generations) and spec.slot_generations[0] != self._num_resets

    # -- the rest

    def touch(self, keys, req_context):
        """vLLM's connector never calls it."""

    def count_offers(self, keys, req_context):
        """vLLM's manager counts in `prepare_store`."""

    def advance(self, now_s):
        """vLLM's manager knows no time."""

    def on_new_request(self, req_context):
        self.manager.on_new_request(self._context(req_context))

    def on_request_finished(self, req_context):
        self.manager.on_request_finished(self._context(req_context))

    def reset_cache(self):
        # vLLM tells of a reset by other means than the manager's events
        gone = [key for key, chunk in self._chunks() if chunk.is_ready]
        self._reset_events.append(OffloadingEvent(gone, "CPU", True))
        self.manager.reset_cache()
        self._num_resets += 1

    def take_events(self):
        told = [OffloadingEvent(list(event.keys), "CPU", event.removed) for event in self.manager.take_events()]
        told += self._reset_events
        self._reset_events = []
        return told

    def get_stats(self):
        chunks = [chunk for _, chunk in self._chunks()]
        return ManagerStats(
            capacity_blocks=self.manager._num_chunks,
            ready_blocks=sum(chunk.is_ready for chunk in chunks),
            in_flight_blocks=self.manager._num_write_pending_chunks,
            pinned_blocks=sum(chunk.ref_cnt > 0 for chunk in chunks),
            condemned_blocks=0,
        )

    def check_invariants(self):
        """What vLLM's manager counts, recounted."""
        manager = self.manager
        chunks = [chunk for _, chunk in self._chunks()]
        assert manager._num_evictable_cache_chunks == sum(chunk.ref_cnt == 0 for chunk in chunks)
        assert manager._num_write_pending_chunks == sum(not chunk.is_ready for chunk in chunks)
        slots = sorted([chunk.chunk_id for chunk in chunks] + manager._free_list)
        assert slots == list(range(manager._num_allocated_chunks)), f"slots in use or free: {slots}"

    def _chunks(self):
        policy = self.manager._policy
        lists = [policy.t1, policy.t2] if hasattr(policy, "t1") else [policy.chunks]
        return [item for chunks in lists for item in chunks.items()]
