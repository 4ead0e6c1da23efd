"""`KVTierConnector`: vLLM's offloading connector, made to survive failures and to wait within bounds."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvtier.adapters.vllm.identity import NoIdentityError, identity_fields
from kvtier.adapters.vllm.lora import watch_loads
from kvtier.adapters.vllm.manager import VLLMManager
from kvtier.adapters.vllm.metadata import KVTierConnectorMetadata, KVTierWorkerMetadata
from kvtier.adapters.vllm.recording import Recording
from kvtier.adapters.vllm.spec import (
    IDENTITY_KEY,
    NO_IDENTITY_KEY,
    NUM_ENGINES_KEY,
    ONE_PROCESS_KEY,
    WEIGHTS_CHANGE_KEY,
    KVTierOffloadingSpec,
)
from kvtier.adapters.vllm.worker import PooledWorker
from kvtier.errors import ConfigurationError
from kvtier.interfaces import CPULoadStoreSpec, ReqContext
from kvtier.keys import OffloadKey
from kvtier.manager import JobTable
from kvtier.runtime import Config, parse_config

logger = init_logger(__name__)

IDLE_STEP_S = 0.01
"""How long a step that computes nothing may wait for a transfer to end: so long may a new request be held up by it."""


class KVTierConnector(OffloadingConnector):
    """One of these in the scheduler, one in each worker; both build a `KVTierOffloadingSpec`.

    Raises ConfigurationError, before anything is started, for settings that cannot work.
    """

    # -- construction ----------------------------------------------------------------------------------------

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        transfer_config = vllm_config.kv_transfer_config
        settings = parse_config(transfer_config.kv_connector_extra_config)
        if vllm_config.parallel_config.nnodes > 1:
            raise ConfigurationError(f"the engine spans {vllm_config.parallel_config.nnodes} nodes; kvtier supports 1")
        _name_our_spec(vllm_config)
        transfer_config.kv_connector_extra_config[ONE_PROCESS_KEY] = (
            vllm_config.parallel_config.distributed_executor_backend == "uni"
        )
        if role == KVConnectorRole.SCHEDULER and (settings.tiers or settings.ram_persist is not None):
            _tell_identity(vllm_config, kv_cache_config, settings)
        # the scheduler reads this right after: a failed load is recomputed, not an error of the request
        transfer_config.kv_load_failure_policy = "recompute"
        super().__init__(vllm_config, role, kv_cache_config)
        self._debug = settings.debug
        self._num_ranks = vllm_config.parallel_config.world_size
        # worker side
        self._failed_jobs: set[int] = set()
        # scheduler side
        self._jobs: JobTable | None = None
        self._behind: dict[str, OffloadKey] = {}
        """Request -> the key that another request is loading and that it waits for."""
        self._worth_group: int | None = None
        """The KV group whose blocks tell what waiting is worth."""
        self._recording: Recording | None = None
        if role == KVConnectorRole.SCHEDULER:
            if settings.record_trace is not None:
                group = self.scheduler.config.kv_group_configs[0]
                tokens_per_hash = group.tokens_per_chunk // group.hashes_per_chunk
                self._recording = Recording(settings.record_trace, tokens_per_hash)
            self._jobs = JobTable(self._manager.core, self._num_ranks)
            if vllm_config.lora_config is not None:
                watch_loads(self._manager.adapters)
            self._compare_waiting(settings.prefill_tokens_per_s)

    def _compare_waiting(self, prefill_tokens_per_s: float | None) -> None:
        """Lets the manager compare waiting with recomputing, where blocks of one group say what a prefix is worth."""
        groups = self.scheduler._full_attention_groups
        self._worth_group = groups[0] if groups else None
        if groups and prefill_tokens_per_s != 0:
            tokens_per_chunk = self.scheduler.config.kv_group_configs[groups[0]].tokens_per_chunk
            self._manager.compare_waiting(tokens_per_chunk, prefill_tokens_per_s)

    @property
    def _manager(self) -> VLLMManager:
        manager = self.scheduler.manager
        assert isinstance(manager, VLLMManager)
        return manager

    @property
    def _worker(self) -> PooledWorker:
        assert self.connector_worker is not None
        worker = self.connector_worker.worker
        assert isinstance(worker, PooledWorker)
        return worker

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        # runs in the API server, which has never built a connector
        _name_our_spec(vllm_config)
        return super().build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- scheduler side: look-up and deferral ----------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self._manager.advance()
        if self._recording is not None:
            self._recording.arrived(request)
        super().on_new_request(request)
        if request.lora_request is not None:
            context = self.scheduler._req_status[request.request_id].req_context
            self._manager.begin_with_adapter(context, request.lora_request)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if self._recording is not None:
            self._recording.finished(request)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._recording is not None:
            self._recording.finished(request)
        return super().request_finished_all_groups(request, block_ids)

    def shutdown(self) -> None:
        if self._recording is not None:
            self._recording.close()
        super().shutdown()

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """As vLLM's, but a request that waits costs O(1) a step, and waits no longer than its deadline."""
        manager = self._manager
        manager.advance()
        if request.request_id in manager.given_up:
            return 0, False
        state = self.scheduler._req_status[request.request_id]
        context = manager.context_of(state.req_context)
        if manager.core.still_waiting(context) or self._waits_for_load(request, context):
            return None, False
        manager.check_adapter(state.req_context, num_computed_tokens)
        num_tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if num_tokens is None and not self._is_worth_waiting(state, num_computed_tokens):
            # what is in flight is absent for this request from now on
            num_tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if num_tokens is not None:
            self._behind.pop(request.request_id, None)
            return num_tokens, is_async
        if not manager.core.defer(context):
            # past its deadline; what vLLM still waits for is another request's load, or a transfer of its own
            return 0, False
        if not manager.core.still_waiting(context):
            self._note_load_in_front(request, state)
        return None, False

    def _is_worth_waiting(self, state: RequestOffloadState, num_computed_tokens: int) -> bool:
        """Whether waiting for stores is expected to be quicker than computing what they would save."""
        if self._worth_group is None:
            return True
        group = self.scheduler.config.kv_group_configs[self._worth_group]
        keys = state.group_states[self._worth_group].offload_keys
        first = num_computed_tokens // group.tokens_per_chunk
        return self._manager.worth_waiting(keys[first:], state.req_context)

    def _waits_for_load(self, request: Request, context: ReqContext) -> bool:
        """The load that the request waited for is still going on, and its deadline has not passed. O(1)."""
        key = self._behind.get(request.request_id)
        return key is not None and key in self._keys_being_loaded and self._manager.core.defer(context)

    def _note_load_in_front(self, request: Request, state: RequestOffloadState) -> None:
        """vLLM does not say which load the request waits for: remember its first block that is being loaded."""
        being_loaded = self._keys_being_loaded
        for group in state.group_states:
            key = next(filter(being_loaded.__contains__, group.offload_keys), None)
            if key is not None:
                self._behind[request.request_id] = key
                return

    @property
    def _keys_being_loaded(self) -> set[OffloadKey]:
        return self.scheduler._chunks_being_loaded or set()

    # -- scheduler side: jobs --------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        manager, jobs = self._manager, self._jobs
        assert jobs is not None
        manager.advance()
        # vLLM forgets a finished request as soon as it has no job: its contexts are taken before that
        meta = super().build_connector_meta(scheduler_output)
        assert isinstance(meta, OffloadingConnectorMetadata)
        for is_store, submitted in ((False, meta.load_jobs), (True, meta.store_jobs)):
            for job_id, job in submitted.items():
                spec = job.dst_spec if is_store else job.src_spec
                assert isinstance(spec, CPULoadStoreSpec)
                state = self.scheduler._req_status.get(job.req_id)
                context = manager.context_of(state.req_context) if state else ReqContext(job.req_id)
                jobs.add(job_id, context, spec, is_store)
        manager.note_step(scheduler_output.num_scheduled_tokens)
        for req_id in scheduler_output.finished_req_ids or ():
            self._behind.pop(req_id, None)
        if self._debug and not len(jobs):
            try:
                manager.core.check_invariants()
            except Exception as error:
                manager.count_error("check_invariants", error)
        is_idle_step = not scheduler_output.total_num_scheduled_tokens
        if is_idle_step:
            manager.linger(IDLE_STEP_S)
        return KVTierConnectorMetadata(
            load_jobs=meta.load_jobs,
            store_jobs=meta.store_jobs,
            jobs_to_flush=meta.jobs_to_flush,
            pool=manager.pool_handle,
            is_idle_step=is_idle_step,
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._manager.advance()
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, OffloadingWorkerMetadata):
            failed_jobs = meta.failed_jobs if isinstance(meta, KVTierWorkerMetadata) else frozenset()
            for job_id, num_ranks in meta.completed_jobs.items():
                self._report(job_id, num_ranks, failed=job_id in failed_jobs or self._has_other_weights(job_id))
            self._drop_unknown_to_vllm(meta)
        super().update_connector_output(connector_output)
        # what has just been stored goes down now: an idle engine has no next step
        self._manager.core.on_schedule_end()

    def _has_other_weights(self, job_id: int) -> bool:
        """Whether a store has ended whose blocks may have been made by another adapter than its keys say.

        Its request may have loaded the adapter after the store was planned: that was in the same step.
        """
        status = self.scheduler._jobs.get(job_id)
        state = self.scheduler._req_status.get(status.req_id) if status is not None and status.is_store else None
        return state is not None and not self._manager.check_adapter(state.req_context)

    def _report(self, job_id: int, num_ranks: int, failed: bool) -> None:
        manager, jobs = self._manager, self._jobs
        assert jobs is not None
        try:
            record = jobs.report(job_id, num_ranks, failed)
        except Exception as error:
            manager.count_error("completion", error)
            return
        if record is None:
            return
        if record.failed:
            manager.counters["failed_jobs"] += 1
        elif not record.is_store:
            manager.counters["loaded_blocks"] += len(record.spec.keys)

    def _drop_unknown_to_vllm(self, meta: OffloadingWorkerMetadata) -> None:
        """A completion that comes twice would be a KeyError in vLLM's loop."""
        scheduler = self.scheduler
        for job_id, num_ranks in list(meta.completed_jobs.items()):
            status = scheduler._jobs.get(job_id)
            if status is not None:
                meta.completed_jobs[job_id] = min(num_ranks, status.pending_count)
            elif job_id >= scheduler._stale_job_threshold:
                del meta.completed_jobs[job_id]

    def has_pending_push_work(self) -> bool:
        # jobs from before a reset are forgotten by vLLM, but their slots are only free when they end
        return bool(self._jobs) or super().has_pending_push_work()

    def reset_cache(self) -> bool | None:
        self._manager.advance()
        self._behind.clear()
        for req_id, state in self.scheduler._req_status.items():
            has_begun = state.req.num_computed_tokens or state.req.status is RequestStatus.WAITING_FOR_REMOTE_KVS
            if has_begun and not state.req.is_finished():
                self._manager.begun_before_reset.add(req_id)
        logger.info("kvtier: cache reset; %d transfers still open", len(self._jobs or ()))
        return super().reset_cache()

    # -- worker side -----------------------------------------------------------------------------------------

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self._attach(kv_connector_metadata)
        super().handle_preemptions(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._attach(self._connector_metadata)
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self.connector_worker is not None
        metadata = self._connector_metadata
        if isinstance(metadata, KVTierConnectorMetadata) and metadata.is_idle_step:
            # polling at full speed would take the cores from the copies that it polls for
            self._worker.linger(IDLE_STEP_S)
        requests = dict(self.connector_worker._load_jobs)  # vLLM forgets them as it reports them
        results = super().get_transfer_results(finished_req_ids)
        self._failed_jobs |= self._worker.take_failed()
        results.failed_recving |= {requests[job_id] for job_id in self._failed_jobs if job_id in requests}
        return results

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        meta = super().build_connector_worker_meta()
        if meta is None:
            return None
        failed, self._failed_jobs = self._failed_jobs, set()
        return KVTierWorkerMetadata(meta.completed_jobs, meta.transfer_stats, failed)

    def _attach(self, metadata: KVConnectorMetadata | None) -> None:
        if isinstance(metadata, KVTierConnectorMetadata):
            self._worker.attach(metadata.pool)


def _tell_identity(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: Config) -> None:
    """What the spec cannot see: whose blocks others would be given. Where nobody could tell, nobody is."""
    extra_config, parallel = vllm_config.kv_transfer_config.kv_connector_extra_config, vllm_config.parallel_config
    wanted = ["disk tier"] * bool(settings.disk) + ["shared tiers"] * bool(settings.shared)
    extra_config[IDENTITY_KEY] = None
    lost = [f"no {' and no '.join(wanted)}, blocks stay in RAM only"] * bool(wanted)
    lost += ["nothing in RAM will outlive this process"] * (settings.ram_persist is not None)
    without = "; ".join(lost)
    try:
        extra_config[IDENTITY_KEY] = identity_fields(vllm_config, kv_cache_config, settings.weights_id)
    except NoIdentityError as reason:
        extra_config[NO_IDENTITY_KEY] = str(reason)
        logger.warning("kvtier: %s: %s", without, reason)
    except Exception as error:  # a model with settings of its own kind is no reason not to start
        extra_config[NO_IDENTITY_KEY] = f"this model's identity cannot be told: {error!r}"
        logger.error("kvtier: %s: %s", without, extra_config[NO_IDENTITY_KEY])
    extra_config[WEIGHTS_CHANGE_KEY] = vllm_config.weight_transfer_config is not None
    # of independent engines vLLM forgets the number, but for this field
    extra_config[NUM_ENGINES_KEY] = max(parallel.data_parallel_size, parallel.elastic_ep_max_dp_size)


def _name_our_spec(vllm_config: VllmConfig) -> None:
    """The user names the connector only; vLLM finds the spec by these two keys."""
    extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config
    extra_config["spec_name"] = KVTierOffloadingSpec.__name__
    extra_config["spec_module_path"] = "kvtier.adapters.vllm"
