"""vLLM's `OffloadingManager` over kvtier's: other types, the same decisions, and no exception to vLLM's loop."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.base import ReqContext as VLLMReqContext
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.adapters.vllm.lora import Adapters, AdapterUse
from kvtier.adapters.vllm.metrics import TIER_IS_OFF, MetricsReporter, tier_figures
from kvtier.clock import Clock
from kvtier.events import OffloadingEvent as KVTierEvent
from kvtier.interfaces import BreakerState, CPULoadStoreSpec, ReqContext, Residency
from kvtier.keys import OffloadKey, shorten_key
from kvtier.manager import CircuitBreaker, PrefillRate
from kvtier.runtime import Stack
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.ram import PoolHandle, RamPool

logger = init_logger(__name__)

_NO_SLOT = -1
"""A slot that no pool has: the worker fails the job, and vLLM recomputes."""


class VLLMManager(OffloadingManager):
    """One kvtier manager as vLLM's scheduler side calls it.

    Completions are not taken here: vLLM would give them by key and always as a success. The connector completes
    jobs by spec, with what the workers said, right before vLLM's own calls come here and change nothing.
    """

    def __init__(
        self,
        stack: Stack,
        pool: RamPool,
        has_reuse_filter: bool,
        tier_names: Sequence[str] = (),
        *,
        has_persisted_ram: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        """`tier_names`: of the tiers below RAM that the user wants; `has_persisted_ram`: whether RAM is to outlive the
        process. Which of them there are, `stack` says. `stack` and `pool` are this object's to end."""
        self.core = stack.core
        self.stack = stack
        self.pool = pool
        self.counters = {"errors": 0, "loaded_blocks": 0, "failed_jobs": 0, "breaker_openings": 0}
        self.given_up: set[str] = set()
        """Requests whose load could not be prepared: asking again would find the same and fail again."""
        self.begun_before_reset: set[str] = set()
        """Requests that had computed or loaded something when the cache was reset. They store nothing any more: what
        they have is of the time before, perhaps of other weights. And vLLM offers all of it again, also what a sliding
        window had let go of long ago, in engine blocks that are other requests' by now."""
        self.adapters = Adapters()
        self._key_bytes: int | None = None
        """Length of vLLM's keys, once there are longer ones of ours."""
        self._clock = clock
        self._reporter = MetricsReporter(has_reuse_filter, bool(tier_names), has_persisted_ram)
        self._wanted_tiers = tier_names
        self._logged_errors: set[str] = set()
        self._breakers = stack.breakers
        self._breaker_states = {name: BreakerState.CLOSED for name, _ in self._breakers}
        self._prefill_rate: PrefillRate | None = None
        self._tokens_per_chunk = 0

    @property
    def pool_handle(self) -> PoolHandle:
        """Where workers find the pool."""
        return self.pool.handle

    # -- time, contexts, errors ------------------------------------------------------------------------------

    def advance(self) -> None:
        """Tells the manager the time."""
        self.core.advance(self._clock())
        self.adapters.forget_looks()
        for name, breaker in self._breakers:
            if breaker.state is not self._breaker_states[name]:
                self._tell_of(name, breaker)

    def _tell_of(self, name: str, breaker: CircuitBreaker) -> None:
        """The breaker has changed its state: one line, however many transfers it was about."""
        self._breaker_states[name] = breaker.state
        if breaker is self.stack.ram.breaker:
            self.counters["breaker_openings"] = breaker.num_openings
        if breaker.state is BreakerState.OPEN:
            left_s = max(0.0, breaker.until_s - self._clock())
            logger.warning("kvtier: transfers keep failing; the %s tier is not used for %.1f s", name, left_s)
        elif breaker.state is BreakerState.HALF_OPEN:
            logger.info("kvtier: the %s tier is tried again, with one transfer", name)
        else:
            logger.info("kvtier: the %s tier is in use again", name)

    def linger(self, timeout_s: float) -> None:
        """For a step that computes nothing: lets the threads of the tiers have the time that it would spin away."""
        self.stack.linger(timeout_s)

    # -- what waiting is compared with -----------------------------------------------------------------------

    def compare_waiting(self, tokens_per_chunk: int, prefill_tokens_per_s: float | None) -> None:
        """Waiting is compared with recomputing from now on, at this rate or (None) at the measured one."""
        self._tokens_per_chunk = tokens_per_chunk
        if prefill_tokens_per_s is None:
            self._prefill_rate = PrefillRate()
        else:
            self.core.tell_recompute_rate(prefill_tokens_per_s / tokens_per_chunk)

    def note_step(self, num_scheduled_tokens: Mapping[str, int]) -> None:
        """The engine begins a step of so many tokens of each of these requests."""
        rate = self._prefill_rate
        if rate is None:
            return
        # one token of each may be generation
        num_tokens = sum(num_scheduled_tokens.values()) - len(num_scheduled_tokens)
        if rate.note_step(self._clock(), num_tokens, num_scheduled_tokens.keys()):
            assert rate.tokens_per_s is not None
            self.core.tell_recompute_rate(rate.tokens_per_s / self._tokens_per_chunk)

    def context_of(self, req_context: VLLMReqContext) -> ReqContext:
        """Our context of vLLM's request; made when it is first asked for."""
        context = req_context.get_state(ReqContext)
        if context is None:
            context = ReqContext(req_context.req_id, req_context.kv_transfer_params)
            req_context.set_state(context)
        return context

    def begin_with_adapter(self, req_context: VLLMReqContext, adapter: LoRARequest) -> None:
        """A request uses an adapter. Right after `on_new_request`."""
        req_context.set_state(self.adapters.enter(adapter))

    def check_adapter(self, req_context: VLLMReqContext, num_computed_tokens: int = 0) -> bool:
        """Whether the request's blocks are what their keys say; if not, it uses and stores none from now on.

        `num_computed_tokens` of its prompt were found in the engine.
        """
        use = req_context.get_state(AdapterUse)
        return use is None or self.adapters.check(use, num_computed_tokens)

    def worth_waiting(self, keys: Sequence[OffloadKey], req_context: VLLMReqContext) -> bool:
        """As the manager's own, for vLLM's keys."""
        use = req_context.get_state(AdapterUse)
        return self.core.worth_waiting(keys if use is None else self._ours(use, keys), self.context_of(req_context))

    def _ours(self, use: AdapterUse, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """vLLM's keys of blocks that an adapter has made, told apart from those of other weights."""
        keys = list(keys)
        if keys:
            self._key_bytes = len(keys[0])
        return list(map(use.key, keys))

    def _theirs(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        """What vLLM calls these blocks."""
        return keys if self._key_bytes is None else [shorten_key(key, self._key_bytes) for key in keys]

    def count_error(self, where: str, error: Exception) -> None:
        """An error that must not reach the engine: counted, and logged the first time it comes from `where`."""
        self.counters["errors"] += 1
        if where not in self._logged_errors:
            self._logged_errors.add(where)
            logger.error("kvtier: %s failed and was treated as a miss: %r", where, error, exc_info=error)

    # -- vLLM's contract -------------------------------------------------------------------------------------

    def on_new_request(self, req_context: VLLMReqContext) -> RequestOffloadingContext:
        self.core.on_new_request(self.context_of(req_context))
        for warning in self.stack.ram.take_hint_warnings():
            logger.warning("kvtier: %s; it is ignored, and so are others like it", warning)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: VLLMReqContext) -> None:
        self.given_up.discard(req_context.req_id)
        self.begun_before_reset.discard(req_context.req_id)
        self.core.on_request_finished(self.context_of(req_context))

    def lookup(self, key: OffloadKey, req_context: VLLMReqContext) -> LookupResult:
        use = req_context.get_state(AdapterUse)
        if use is not None:
            if use.loaded is None:
                return LookupResult.MISS
            (key,) = self._ours(use, (key,))
        try:
            answer = self.core.lookup(key, self.context_of(req_context))
        except Exception as error:
            self.count_error("lookup", error)
            return LookupResult.MISS
        if answer is None:
            return LookupResult.RETRY if self.core.residency(key) is Residency.UNKNOWN else LookupResult.HIT_PENDING
        return LookupResult.HIT if answer else LookupResult.MISS

    def get_load_source(self, key: OffloadKey, req_context: VLLMReqContext) -> CacheHitSource:
        tiered = self.stack.tiered
        use = req_context.get_state(AdapterUse)
        key = key if use is None else use.key(key)
        medium = tiered.brought_up(key, self.context_of(req_context)) if tiered is not None else None
        if medium is not None:
            is_disk = medium == DiskTier.medium
            return CacheHitSource.DISK if is_disk else CacheHitSource.EXTERNAL_UNSPECIFIED
        return CacheHitSource.HOST

    def prepare_load(self, keys: Collection[OffloadKey], req_context: VLLMReqContext) -> CPULoadStoreSpec:
        use = req_context.get_state(AdapterUse)
        if use is not None:
            keys = self._ours(use, keys)
        try:
            spec = self.core.prepare_load(keys, self.context_of(req_context))
        except Exception as error:
            self.count_error("prepare_load", error)
            self.given_up.add(req_context.req_id)
            return CPULoadStoreSpec([_NO_SLOT] * len(keys))
        assert isinstance(spec, CPULoadStoreSpec)
        return spec

    def touch(self, keys: Collection[OffloadKey], req_context: VLLMReqContext) -> None:
        use = req_context.get_state(AdapterUse)
        self.core.touch(list(keys) if use is None else self._ours(use, keys), self.context_of(req_context))

    def complete_load(self, keys: Collection[OffloadKey], req_context: VLLMReqContext) -> None:
        """Nothing: see the class."""

    def complete_store(self, keys: Collection[OffloadKey], req_context: VLLMReqContext, success: bool = True) -> None:
        """Nothing: see the class."""

    def prepare_store(self, keys: Collection[OffloadKey], req_context: VLLMReqContext) -> PrepareStoreOutput:
        """Never None: vLLM would offer everything again on every step."""
        if req_context.req_id in self.begun_before_reset:
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        offered = list(keys)
        context = self.context_of(req_context)
        by_depth = _shallowest_first(offered, req_context)
        is_hybrid = by_depth is not offered
        theirs: dict[OffloadKey, OffloadKey] = {}
        use = req_context.get_state(AdapterUse)
        if use is not None:
            if not self.check_adapter(req_context):
                return PrepareStoreOutput([], CPULoadStoreSpec([]), [])
            by_depth, offered = self._ours(use, by_depth), self._ours(use, offered)
            theirs = dict(zip(offered, keys, strict=True))
        try:
            self.core.count_offers(by_depth, context)
            output = self.core.prepare_store_prefix(by_depth, context)
        except Exception as error:
            self.count_error("prepare_store", error)
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        spec = output.store_spec
        assert isinstance(spec, CPULoadStoreSpec)
        if output.keys_to_store:
            self._reporter.store_sizes.append(len(output.keys_to_store))
        if is_hybrid:
            spec = _in_order_of(offered, spec)
        stored = list(spec.keys) if use is None else [theirs[key] for key in spec.keys]
        return PrepareStoreOutput(stored, spec, self._theirs(output.evicted_keys))

    def take_events(self) -> Iterable[OffloadingEvent]:
        for event in map(_to_vllm, self.core.take_events()):
            event.keys = self._theirs(event.keys)
            yield event

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self.core.on_schedule_end()

    def has_pending_work(self) -> bool:
        return self.core.has_pending_work()

    def reset_cache(self) -> None:
        self.core.reset_cache()

    def get_stats(self) -> OffloadingConnectorStats | None:
        tiered, slot_bytes = self.stack.tiered, self.pool.handle.slot_bytes
        figures = dict.fromkeys(self._wanted_tiers, TIER_IS_OFF)
        if tiered is not None:
            for name, stats, (_, breaker) in zip(
                self.stack.tier_names, tiered.tier_stats(), tiered.breakers, strict=True
            ):
                figures[name] = tier_figures(stats, breaker, slot_bytes)
        return self._reporter.report(self.core.get_stats(), self.counters, figures)

    def shutdown(self) -> None:
        """The workers have stopped. Takes as long as the user lets a stop write what is only in RAM."""
        try:
            may_unmap = self.stack.stop(self._clock)
        except Exception as error:
            self.count_error("shutdown", error)
            may_unmap = False
        if may_unmap:
            self.pool.close()
        self.adapters.close()


def _to_vllm(event: KVTierEvent) -> OffloadingEvent:
    if event.medium == CPULoadStoreSpec.medium():
        return OffloadingEvent(event.keys, Medium.CPU, event.removed)
    locality = Locality.LOCAL if event.medium == DiskTier.medium else Locality.REMOTE
    return OffloadingEvent(event.keys, Medium.STORAGE, event.removed, locality=locality, ownership=event.medium)


def _shallowest_first(keys: list[OffloadKey], req_context: VLLMReqContext) -> list[OffloadKey]:
    """`keys` by depth, the groups of a hybrid model interleaved, so that a cut leaves all of them a prefix.

    vLLM offers one group after the other; with a single group `keys` itself is in order already.
    """
    if len({key[-4:] for key in keys}) < 2:
        return keys
    return sorted(keys, key=lambda key: req_context.get_offload_key_position(key) or 0)


def _in_order_of(keys: list[OffloadKey], spec: CPULoadStoreSpec) -> CPULoadStoreSpec:
    """The same slots in the order of `keys`: the worker walks the engine's blocks group by group."""
    row = {key: i for i, key in enumerate(spec.keys)}
    kept = [key for key in keys if key in row]
    rows = [row[key] for key in kept]
    return CPULoadStoreSpec(
        [spec.slots[i] for i in rows], [spec.slot_generations[i] for i in rows], kept, spec.begin_by_s
    )
