"""vLLM's `OffloadingWorker` over kvtier's transfers: other types, and failures reported beside vLLM's back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingParallelConfig

from kvtier.errors import KVTierError
from kvtier.interfaces import CPULoadStoreSpec
from kvtier.tiers.ram import PoolHandle, RamPool
from kvtier.transfers.health import FailureLog
from kvtier.transfers.jobs import GroupCopy, TransferJob
from kvtier.transfers.layout import PageRef, SlotLayout
from kvtier.transfers.worker import TransferWorker

logger = init_logger(__name__)


class PooledWorker(OffloadingWorker):
    """A worker whose pool is made by the scheduler, after it, and arrives with the first step.

    vLLM's base class asserts that every transfer succeeds. So each is reported to it as a success, and those that
    were not are in `take_failed`, for the connector to tell the scheduler.
    """

    def __init__(self) -> None:
        self._pool: RamPool | None = None
        self._attached: PoolHandle | None = None
        self._open: set[int] = set()
        """Ids of the jobs that were submitted and not reported yet."""
        self.num_repeated_reports = 0
        self._failed: set[int] = set()
        self._logs = {is_store: FailureLog("stores" if is_store else "loads") for is_store in (False, True)}

    def attach(self, handle: PoolHandle | None) -> None:
        """Maps the pool, once. A pool that cannot be mapped fails every job; it does not stop the engine."""
        if handle is None or handle == self._attached:
            return
        self._attached = handle
        try:
            self._pool = RamPool.attach(handle)
            self._use(self._pool)
        except KVTierError as error:
            logger.error("kvtier: this worker cannot use the RAM pool, so nothing will be offloaded: %s", error)

    def take_failed(self) -> set[int]:
        """Ids of the jobs that have failed since the last call. The caller owns the set."""
        failed, self._failed = self._failed, set()
        return failed

    def linger(self, timeout_s: float) -> None:
        """Returns once a transfer has ended, or none is open, or after `timeout_s`. May return at once."""

    def _use(self, pool: RamPool) -> None:
        raise NotImplementedError

    def _note_outcome(self, job_id: int, is_store: bool, success: bool, reason: str) -> bool:
        """Keeps what has failed for `take_failed`, and logs where failing begins and ends.

        False: the job has ended before, and must not be reported again. The scheduler counts ranks, and would take a
        second report of this one for that of another, which may still copy.
        """
        if job_id not in self._open:
            self.num_repeated_reports += 1
            return False
        self._open.discard(job_id)
        log = self._logs[is_store]
        if success:
            line = log.note_success()
        else:
            self._failed.add(job_id)
            line = log.note_failure(reason)
        if line:
            logger.warning("kvtier: %s", line)
        return True

    def _close_pool(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


class CPUPlatformWorker(PooledWorker):
    """Copies between vLLM's KV tensors in host memory and the pool, with kvtier's copy threads."""

    def __init__(
        self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, parallel: OffloadingParallelConfig, num_threads: int
    ) -> None:
        super().__init__()
        layout, group_refs = describe_caches(kv_caches, blocks_per_chunk, parallel.world_size)
        tensors = [block.tensor.view(torch.int8).numpy().view(np.uint8) for block in kv_caches.tensors]
        self._blocks_per_chunk = blocks_per_chunk
        self.transfers = TransferWorker(tensors, group_refs, layout, parallel.rank, num_threads=num_threads)

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        assert isinstance(dst_spec, CPULoadStoreSpec)
        self._submit(job_id, src_spec, dst_spec, is_store=True)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        assert isinstance(src_spec, CPULoadStoreSpec)
        self._submit(job_id, dst_spec, src_spec, is_store=False)
        return True

    def get_finished(self) -> list[TransferResult]:
        results = []
        for outcome in self.transfers.poll():
            if not self._note_outcome(outcome.job_id, outcome.is_store, outcome.success, outcome.reason):
                continue
            if outcome.success:
                results.append(TransferResult(outcome.job_id, True, outcome.num_bytes, outcome.duration_s))
            else:
                results.append(TransferResult(outcome.job_id, True))
        return results

    def wait(self, job_ids: set[int]) -> None:
        self.transfers.wait(job_ids)

    def linger(self, timeout_s: float) -> None:
        self.transfers.wait_for_outcome(timeout_s)

    def shutdown(self) -> None:
        self.transfers.shutdown()
        self._close_pool()

    def _use(self, pool: RamPool) -> None:
        self.transfers.attach(pool.slots())

    def _submit(self, job_id: int, engine: GPULoadStoreSpec, pool: CPULoadStoreSpec, is_store: bool) -> None:
        groups = split_by_group(engine, pool.block_ids, self._blocks_per_chunk)
        self._open.add(job_id)
        self.transfers.submit(TransferJob(job_id, is_store, groups, pool.begin_by_s))


def describe_caches(
    kv_caches: CanonicalKVCaches, blocks_per_chunk: int, num_ranks: int
) -> tuple[SlotLayout, list[list[PageRef]]]:
    """Layout of a slot, and which pages each KV group has in it."""
    page_bytes = tuple(block.page_size_bytes for block in kv_caches.tensors)
    layout = SlotLayout(page_bytes, blocks_per_chunk, num_ranks)
    refs = [[PageRef(ref.tensor_idx, ref.page_size_bytes) for ref in group] for group in kv_caches.group_data_refs]
    return layout, refs


def split_by_group(engine: GPULoadStoreSpec, slots: np.ndarray, blocks_per_chunk: int) -> tuple[GroupCopy, ...]:
    """vLLM's flat list of engine blocks, and the slots that belong to it, one piece a KV group.

    The first engine block of a group may lie in the middle of its first slot (a hit that ends inside a chunk).
    """
    groups = []
    block_at = slot_at = 0
    blocks = np.asarray(engine.block_ids, dtype=np.int64)
    sizes: Sequence[int] = engine.group_sizes
    for group_idx, (num_blocks, first_block) in enumerate(zip(sizes, engine.block_indices, strict=True)):
        if num_blocks == 0:
            continue
        skipped = first_block % blocks_per_chunk
        num_slots = -(-(skipped + num_blocks) // blocks_per_chunk)
        groups.append(
            GroupCopy(
                group_idx,
                blocks[block_at : block_at + num_blocks],
                slots[slot_at : slot_at + num_slots],
                skipped,
            )
        )
        block_at += num_blocks
        slot_at += num_slots
    return tuple(groups)
