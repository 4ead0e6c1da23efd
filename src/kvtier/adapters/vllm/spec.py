"""The offloading spec: what vLLM builds, once for the scheduler and once for each worker."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from kvtier import __version__
from kvtier.adapters.vllm.manager import VLLMManager
from kvtier.adapters.vllm.metrics import metric_definitions
from kvtier.adapters.vllm.worker import CPUPlatformWorker, PooledWorker
from kvtier.errors import ConfigurationError, KVTierError, PoolError
from kvtier.runtime import Identity, Stack, build_stack, check_tiers, num_slots_for, parse_config
from kvtier.runtime.identity import element_bytes_of, namespace_of
from kvtier.runtime.identity_record import LINE_PREFIX, IdentityRecord
from kvtier.runtime.tiers import SharedSettings, tier_names
from kvtier.tiers.memory_limits import check_pool_dir
from kvtier.tiers.ram import RamPool, check_pool_size
from kvtier.tiers.ram_keeper import RamKeeper
from kvtier.tiers.ram_persist import PersistedPool, open_persisted, pool_path
from kvtier.transfers.layout import SLOT_ALIGNMENT_BYTES

logger = init_logger(__name__)

ONE_PROCESS_KEY = "kvtier.one_process"
"""Set by the connector: scheduler and worker share a process, so nobody else has to see the pool."""
IDENTITY_KEY = "kvtier.identity"
"""Set by the connector in the scheduler: the fields of the namespace of persisted and shared tiers."""
NO_IDENTITY_KEY = "kvtier.no_identity"
"""Set with it: why there are none."""
NUM_ENGINES_KEY = "kvtier.num_engines"
"""Set with it: how many data-parallel engines there are."""
WEIGHTS_CHANGE_KEY = "kvtier.weights_may_change"
"""Set with it: this engine is made to be given other weights while it runs."""


class KVTierOffloadingSpec(OffloadingSpec):
    """kvtier as an offloading spec. Only `KVTierConnector` can drive it."""

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        settings = parse_config(extra_config)
        has_persisted_ram = settings.ram_persist is not None
        return metric_definitions(settings.store_threshold > 1, bool(settings.tiers), has_persisted_ram)

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.settings = parse_config(config.extra_config)
        _refuse_unsupported(config)
        check_tiers(self.settings.tiers)
        self.offload_prompt_only = self.settings.offload_prompt_only
        chunk_bytes = config.worker_kv_bytes_per_block * config.parallel.world_size * self.blocks_per_chunk
        self.slot_bytes = -(-chunk_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
        self.num_slots = num_slots_for(self.settings, self.slot_bytes) if chunk_bytes else 0
        self._manager: VLLMManager | None = None
        self._worker: PooledWorker | None = None
        self._fields: dict[str, Any] = {}
        self._namespace: bytes | None = None

    def get_manager(self) -> VLLMManager:
        if self._manager is None:
            if self.num_slots < 1:
                raise ConfigurationError("the model has no KV cache to offload")
            settings = self.settings
            identity = self._identity()
            persisted = self._open_persisted(identity)
            pool = persisted.pool if persisted is not None else self._create_pool()
            logger.info("kvtier: %s; eviction policy %s", pool.describe(), settings.policy)
            try:
                enable_events = self.kv_events_config.enable_kv_cache_events
                keeper = RamKeeper(persisted) if persisted is not None else None
                stack = build_stack(settings, pool.slots(), identity, enable_events, keeper)
                if persisted is not None:
                    _tell_of_persisted(persisted, stack)
            except BaseException:
                pool.close()
                raise
            self._log_identity(stack)
            self._manager = VLLMManager(
                stack,
                pool,
                settings.store_threshold > 1,
                tier_names(settings.tiers),
                has_persisted_ram=settings.ram_persist is not None,
            )
        return self._manager

    def _identity(self) -> Identity | None:
        """Whose blocks these are; None where no tier below RAM is wanted, or nobody could tell."""
        fields = self.extra_config.get(IDENTITY_KEY)
        if not fields:
            return None
        parallel = self.config.parallel
        self._fields = {**fields, "blocks_per_chunk": self.blocks_per_chunk, "slot_bytes": self.slot_bytes}
        self._namespace = namespace_of(self._fields)
        num_ranks = max(int(self.extra_config[NUM_ENGINES_KEY]), parallel.data_parallel_index + 1)
        may_change = bool(self.extra_config.get(WEIGHTS_CHANGE_KEY))
        return Identity(
            self._namespace,
            self.config.model.name,
            parallel.data_parallel_index,
            num_ranks,
            may_change,
            element_bytes_of(fields["cache_dtype"], fields["dtype"]),
        )

    def _log_identity(self, stack: Stack) -> None:
        """One line that says all of it: `kvtier doctor` reads it."""
        wanted = tier_names(self.settings.tiers)
        if wanted or self.settings.ram_persist is not None:
            record = IdentityRecord(
                namespace=self._namespace.hex() if self._namespace is not None else None,
                fields=self._fields,
                reason=self.extra_config.get(NO_IDENTITY_KEY),
                wanted_tiers=wanted,
                tiers=stack.tier_names,
                epochs={
                    name: tier.epoch
                    for name, tier in zip(wanted, self.settings.tiers, strict=True)
                    if isinstance(tier, SharedSettings)
                },
                weights_may_change=bool(self.extra_config.get(WEIGHTS_CHANGE_KEY)),
                model=self.config.model.name,
                rank=self.config.parallel.data_parallel_index,
                kvtier=__version__,
            )
            logger.info("%s%s", LINE_PREFIX, record.to_json())

    def _open_persisted(self, identity: Identity | None) -> PersistedPool | None:
        """The pool that an earlier process may have left; None if none is wanted or possible now: then RAM is as
        always, and the log says why."""
        settings = self.settings
        if settings.ram_persist is None or identity is None:
            return None
        if identity.weights_may_change:
            logger.warning(
                "kvtier: nothing in RAM will outlive this process: weight_transfer_config may change the weights"
            )
            return None
        if settings.pool_dir is not None:
            check_pool_dir(settings.pool_dir)
        path = pool_path(settings.ram_persist, settings.pool_dir, identity.rank)
        try:
            return open_persisted(path, self.num_slots, self.slot_bytes, identity.namespace, identity.label)
        except ConfigurationError as error:
            raise ConfigurationError(f"ram_persist is {settings.ram_persist!r}: {error}") from error
        except PoolError as error:
            logger.error("kvtier: nothing in RAM will outlive this process: %s", error)
            return None

    def _create_pool(self) -> RamPool:
        pool_dir = self.settings.pool_dir
        private = bool(self.extra_config.get(ONE_PROCESS_KEY)) and pool_dir is None
        if pool_dir is not None:
            check_pool_dir(pool_dir)
        try:
            return RamPool.create(self.num_slots, self.slot_bytes, pool_dir=pool_dir, private=private)
        except KVTierError as error:
            key = next(key for key in ("ram", "cpu_bytes_to_use") if key in self.extra_config)
            raise ConfigurationError(f"{key} is {self.extra_config[key]!r}: {error}") from error

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            check_pool_size(1, self.settings.pool_dir)  # a bad folder is said before the scheduler is built
            arguments = (kv_caches, self.blocks_per_chunk, self.config.parallel, self.settings.copy_threads)
            if current_platform.is_cpu():
                self._worker = CPUPlatformWorker(*arguments)
            else:
                # imports vLLM's device kernels
                from kvtier.adapters.vllm.accelerator import AcceleratorWorker  # noqa: PLC0415

                self._worker = AcceleratorWorker(*arguments)
        return self._worker


def _tell_of_persisted(persisted: PersistedPool, stack: Stack) -> None:
    num_blocks = stack.ram.get_stats().counters.get("restored_blocks", 0)
    if persisted.empty_since:
        logger.info("kvtier: the RAM pool begins empty: %s", persisted.empty_since)
    else:
        logger.info("kvtier: %d blocks of an earlier process are in RAM, to be checked at first use", num_blocks)
    logger.info("kvtier: %s stays in memory when the engine ends; removing the file frees it", persisted.path)


def _refuse_unsupported(config: OffloadingConfig) -> None:
    parallel = config.parallel
    for name, size in (
        ("pipeline parallel", parallel.pp_size),
        ("prefill context parallel", parallel.pcp_size),
        ("decode context parallel", parallel.dcp_size),
    ):
        if size > 1:
            raise ConfigurationError(f"{name} size is {size}; kvtier supports 1 (it has not been tested with more)")
    if config.canonical_layout:
        raise ConfigurationError("canonical_layout is true; kvtier supports vLLM's direct layout only")
    if not (current_platform.is_cpu() or current_platform.is_cuda_alike() or current_platform.is_xpu()):
        raise ConfigurationError(f"platform {current_platform.device_name!r}; kvtier supports CPU, CUDA, ROCm and XPU")
