"""On accelerators vLLM's own copy worker moves the bytes; the pool and everything above it stay kvtier's.

This path follows vLLM's sources; it has not been run on a device yet.
"""

from __future__ import annotations

import time

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingParallelConfig
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec as VLLMCPULoadStoreSpec
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker
from vllm.v1.kv_offload.cpu.host_register import host_unregister

from kvtier.adapters.vllm.worker import PooledWorker, describe_caches
from kvtier.interfaces import CPULoadStoreSpec
from kvtier.tiers.ram import RamPool
from kvtier.transfers.jobs import REASON_DEADLINE


class PoolRegion:
    """Our pool with the members of vLLM's `SharedOffloadRegion` that its copy worker uses."""

    def __init__(self, pool: RamPool, rank: int, stripe_bytes: int) -> None:
        slots = pool.slots()
        self.rank = rank
        self.num_chunks, self._row_stride = slots.shape
        self.total_size_bytes = slots.nbytes
        self.is_pinned = False
        self.pinned_addresses: list[int] = []
        self._base = torch.from_numpy(slots.reshape(-1)).view(torch.int8)
        self._offset = rank * stripe_bytes
        self._end = self._offset + stripe_bytes

    def create_next_worker_view(self, tensor_page_size: int) -> torch.Tensor:
        """(num_chunks, tensor_page_size) int8: the next tensor's part of this rank's stripe in every slot."""
        offset, self._offset = self._offset, self._offset + tensor_page_size
        assert self._offset <= self._end, f"rank {self.rank}: {self._offset} > {self._end}"
        return torch.as_strided(
            self._base, (self.num_chunks, tensor_page_size), (self._row_stride, 1), storage_offset=offset
        )

    def cleanup(self) -> None:
        """Unpins. The pool itself is not this object's to close."""
        for address in reversed(self.pinned_addresses):
            host_unregister(address)
        self.pinned_addresses.clear()
        self.is_pinned = False


class AcceleratorWorker(PooledWorker):
    """vLLM's `CPUOffloadingWorker` over our pool."""

    def __init__(
        self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, parallel: OffloadingParallelConfig, num_threads: int
    ) -> None:
        """`num_threads` is not used: the device copies."""
        super().__init__()
        del num_threads
        self._kv_caches = kv_caches
        self._blocks_per_chunk = blocks_per_chunk
        self._rank = parallel.rank
        self._stripe_bytes = describe_caches(kv_caches, blocks_per_chunk, parallel.world_size)[0].stripe_bytes
        self._copies: OffloadingWorker | None = None
        self._never_begun: list[tuple[int, bool, str]] = []
        """(job, whether it is a store, why it was not begun)."""
        self._stores: set[int] = set()

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        assert isinstance(dst_spec, CPULoadStoreSpec)
        copies = self._copies_for(job_id, dst_spec, is_store=True)
        if copies is None:
            return True
        self._stores.add(job_id)
        return bool(copies.submit_store(job_id, src_spec, VLLMCPULoadStoreSpec(list(dst_spec.slots))))

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        assert isinstance(src_spec, CPULoadStoreSpec)
        copies = self._copies_for(job_id, src_spec, is_store=False)
        if copies is None:
            return True
        return bool(copies.submit_load(job_id, VLLMCPULoadStoreSpec(list(src_spec.slots)), dst_spec))

    def _copies_for(self, job_id: int, pool: CPULoadStoreSpec, is_store: bool) -> OffloadingWorker | None:
        """Who does the job. None: it has failed, for want of a pool, too late, or with slots that no pool has."""
        self._open.add(job_id)
        reason = ""
        if self._copies is None:
            reason = "no pool is attached"
        elif pool.begin_by_s is not None and time.monotonic() > pool.begin_by_s:
            reason = REASON_DEADLINE
        elif min(pool.slots, default=0) < 0:
            reason = "the blocks are not in the pool"
        if reason:
            self._never_begun.append((job_id, is_store, reason))
            return None
        return self._copies

    def get_finished(self) -> list[TransferResult]:
        results: list[TransferResult] = []
        for result in self._copies.get_finished() if self._copies else ():
            is_store = result.job_id in self._stores
            self._stores.discard(result.job_id)
            if not self._note_outcome(result.job_id, is_store, result.success, "the device's copy failed"):
                continue
            # vLLM's connector asserts success
            results.append(result if result.success else TransferResult(result.job_id, True))
        for job_id, is_store, reason in self._never_begun:
            if self._note_outcome(job_id, is_store, False, reason):
                results.append(TransferResult(job_id, True))
        self._never_begun.clear()
        return results

    def wait(self, job_ids: set[int]) -> None:
        if self._copies is not None:
            self._copies.wait(job_ids)

    def shutdown(self) -> None:
        if self._copies is not None:
            self._copies.shutdown()
            self._copies = None
        self._close_pool()

    def _use(self, pool: RamPool) -> None:
        region = PoolRegion(pool, self._rank, self._stripe_bytes)
        self._copies = CPUOffloadingWorker(
            self._kv_caches, self._blocks_per_chunk, pool.handle.num_slots, mmap_region=region
        )
