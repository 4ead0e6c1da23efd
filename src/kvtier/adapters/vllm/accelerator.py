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
        self._never_begun: list[int] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        assert isinstance(dst_spec, CPULoadStoreSpec)
        if self._copies is None:
            self._never_begun.append(job_id)
            return True
        return bool(self._copies.submit_store(job_id, src_spec, VLLMCPULoadStoreSpec(list(dst_spec.slots))))

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        assert isinstance(src_spec, CPULoadStoreSpec)
        late = src_spec.begin_by_s is not None and time.monotonic() > src_spec.begin_by_s
        if self._copies is None or late or min(src_spec.slots, default=0) < 0:
            self._never_begun.append(job_id)
            return True
        return bool(self._copies.submit_load(job_id, VLLMCPULoadStoreSpec(list(src_spec.slots)), dst_spec))

    def get_finished(self) -> list[TransferResult]:
        results: list[TransferResult] = list(self._copies.get_finished()) if self._copies else []
        for job_id in self._never_begun:
            self._failed.add(job_id)
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
