"""kvtier's parts for those who keep vLLM's own `TieringOffloadingSpec`: the disk tier and the eviction policies.

    "kv_connector_extra_config": {
      "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 34359738368,
      "eviction_policy": "KVTierARCPolicy", "cache_policy_module_path": "kvtier.adapters.vllm.parts",
      "secondary_tiers": [{"type": "KVTierDisk", "module_path": "kvtier.adapters.vllm.parts",
                           "path": "/var/cache/kvtier", "capacity": "200GiB", "weights_id": "llama-3-rev-7"}]}

What vLLM's manager and connector do is theirs to answer for: failed transfers, waiting, resets (docs/design.md).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection, Container, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED, get_none_hash_seed
from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadingSpec, ReqContext, RequestOffloadingContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus, order_request_keys
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

import vllm
from kvtier.adapters.vllm.identity import device_layout
from kvtier.errors import ConfigurationError, TierError
from kvtier.interfaces import Residency
from kvtier.keys import OffloadKey
from kvtier.policy import make_policy
from kvtier.runtime import Identity, check_folders, open_disk
from kvtier.runtime.disk import parse_disk
from kvtier.runtime.identity import namespace_of
from kvtier.tier_interfaces import TierOutcome
from kvtier.tiers.disk import DiskTier

logger = init_logger(__name__)

DRAIN_STEP_S = 1.0


class KVTierDisk(SecondaryTierManager):
    """kvtier's disk tier as a secondary tier of vLLM's `TieringOffloadingManager`.

    Settings are those of `disk` in kvtier's own configuration; `weights_id` is required: a secondary tier is not told
    what the weights are, nor of LoRA or draft models, so it takes the user's word that blocks of one id are
    interchangeable. A reset of vLLM's manager reaches a tier as `drain_jobs` alone, and here empties it, for good.

    Raises ConfigurationError for settings that cannot work. A disk that cannot be used now is an error in the log, and
    a tier that never hits.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        disk = parse_disk(settings, f"secondary tier {tier_type}")
        if disk.weights_id is None:
            raise ConfigurationError(
                f"the setting 'weights_id' of secondary tier {tier_type} is missing; allowed: your name for the weights"
            )
        check_folders(disk, f"secondary tier {tier_type}")
        self._stop_flush_s = disk.stop_flush_s
        self._load_keys: dict[int, list[OffloadKey]] = {}
        self._finished: list[JobResult] = []
        self._disk: DiskTier | None = open_disk(
            disk, _as_pool(primary_kv_view), _identity_of(offloading_spec, disk.weights_id)
        )

    # -- look-up and transfers -------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if self._disk is None or self._disk.lookup((key,))[0] is not Residency.READY:
            return LookupResult.MISS
        return LookupResult.HIT

    def submit_store(self, job_metadata: TransferJob) -> None:
        job_id, keys = job_metadata.job_id, list(job_metadata.keys)
        slots = job_metadata.chunk_ids.tolist()
        if self._disk is None or not self._disk.submit_store(job_id, keys, slots):
            self._finished.append(JobResult(job_id, success=False))  # shed

    def submit_load(self, job_metadata: TransferJob) -> None:
        job_id, keys = job_metadata.job_id, list(job_metadata.keys)
        if self._disk is None:
            self._finished.append(JobResult(job_id, success=False))
            return
        self._load_keys[job_id] = keys
        self._disk.submit_load(job_id, keys, job_metadata.chunk_ids.tolist())
        self._disk.touch(keys)  # vLLM 0.32 does not say what is used in RAM

    def get_finished_jobs(self) -> Iterable[JobResult]:
        if self._disk is not None:
            self._finished += map(self._result_of, self._disk.poll())
        finished, self._finished = self._finished, []
        return finished

    def _result_of(self, outcome: TierOutcome) -> JobResult:
        arrived = None
        if not outcome.is_store:
            keys = self._load_keys.pop(outcome.job_id)
            arrived = [key for key, succeeded in zip(keys, outcome.succeeded, strict=True) if succeeded]
        return JobResult(outcome.job_id, outcome.success, arrived, outcome.duration_s, outcome.num_bytes)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        if self._disk is not None:
            self._disk.touch(list(keys))

    # -- requests, reset, the end ----------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if self._disk is not None and get_none_hash_seed() != _fixed_hash_seed():
            # vLLM decides this after its tiers are made
            logger.warning("kvtier: the disk tier is off: block hashes begin with random bytes; set PYTHONHASHSEED")
            self._disk.close()
            self._disk = None
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Empties the tier: vLLM calls this at a reset and nowhere else. Waits for what the device is doing."""
        disk = self._disk
        if disk is None:
            return
        try:
            disk.reset(disk.epoch_store.advance())
        except TierError as error:
            disk.disable(f"the weight epoch could not be raised: {error}")
        while True:
            self._finished += map(self._result_of, disk.poll())
            if not disk.num_open_jobs:
                return
            disk.wait_for_outcome(DRAIN_STEP_S)

    def shutdown(self) -> None:
        disk, self._disk = self._disk, None
        if disk is not None and not disk.close(self._stop_flush_s):
            raise TierError("a transfer of the disk tier is stuck; the RAM stays mapped")


def _as_pool(view: memoryview) -> npt.NDArray[np.uint8]:
    """(num_chunks, bytes of a chunk) uint8 over vLLM's memory. Holds no export: vLLM releases the view at its end."""
    memory = np.asarray(view)
    num_bytes = (ctypes.c_uint8 * memory.nbytes).from_address(memory.ctypes.data)
    return np.ctypeslib.as_array(num_bytes).reshape(memory.shape[0], -1)


def _fixed_hash_seed() -> str:
    """What block hashes begin with, unless that is random."""
    return os.environ.get("PYTHONHASHSEED", DEFAULT_NONE_HASH_SEED)


def _identity_of(spec: OffloadingSpec, weights_id: str) -> Identity:
    config, parallel = spec.config, spec.config.parallel
    fields = {
        "route": "secondary tier",
        "weights": weights_id,
        "model": [config.model.name, config.model.dtype],
        "groups": [[group.group_id, group.tokens_per_block, list(group.layer_names)] for group in config.groups],
        "chunk": [config.cache.tokens_per_hash, config.cache.blocks_per_chunk, config.worker_kv_bytes_per_block],
        "ranks": [parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
        "layout": [config.kv_cache_layout, config.canonical_layout, config.replicated_layout],
        "hash": _fixed_hash_seed(),
        "engine": ["vllm", str(vllm.__version__)],
        "device": device_layout(),
    }
    rank = parallel.data_parallel_index
    return Identity(namespace_of(fields), config.model.name, rank, max(parallel.data_parallel_size, rank + 1))


class _Others(Container[OffloadKey]):
    """All keys but these."""

    def __init__(self, keys: set[OffloadKey]) -> None:
        self._keys = keys

    def __contains__(self, key: object) -> bool:
        return key not in self._keys


class _Policy(CachePolicy):
    """One of kvtier's eviction policies as vLLM's `CPUOffloadingManager` wants it: with the chunks in it."""

    name: ClassVar[str]

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._order = make_policy(self.name, cache_capacity)
        self._chunks: dict[OffloadKey, ChunkStatus] = {}
        self._evictable: set[OffloadKey] = set()

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        return self._chunks.get(key)

    def insert(self, key: OffloadKey, chunk: ChunkStatus) -> None:
        self._chunks[key] = chunk
        self._order.insert((key,))
        if chunk.ref_cnt == 0:
            self._evictable.add(key)

    def remove(self, key: OffloadKey) -> None:
        del self._chunks[key]
        self._order.remove((key,))
        self._evictable.discard(key)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self._order.touch(reversed(list(keys)))

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Nothing: `insert` learns from what returns."""

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        self._order.settle(reversed(order_request_keys(key_groups, req_context)), insertion_only_keys)

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        victims = self._order.evict(n, (protected, _Others(self._evictable))) if n else []
        if victims is None:
            return None
        self._evictable.difference_update(victims)
        return [(key, self._chunks.pop(key)) for key in victims]

    def clear(self) -> None:
        self._order.clear()
        self._chunks.clear()
        self._evictable.clear()

    def mark_evictable(self, key: OffloadKey) -> None:
        self._evictable.add(key)

    def mark_non_evictable(self, key: OffloadKey) -> None:
        self._evictable.discard(key)


class KVTierARCPolicy(_Policy):
    """kvtier's `arc`."""

    name = "arc"


class KVTierLRUPolicy(_Policy):
    """kvtier's `lru`."""

    name = "lru"


class KVTierAdaptivePolicy(_Policy):
    """kvtier's `adaptive`."""

    name = "adaptive"
