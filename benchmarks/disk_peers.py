"""What the benchmark of the disk tier is held against, and where its blocks go: vLLM's tier, an engine's memory."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier.tiers.ram import RamPool
from kvtier.transfers.jobs import GroupCopy, TransferJob
from kvtier.transfers.layout import PageRef, SlotLayout
from kvtier.transfers.worker import TransferWorker

JOB_BYTES = 32 << 20
Timed = Callable[[], tuple[float, float]]


def timed(run: Callable[[], None]) -> tuple[float, float]:
    """Seconds and CPU seconds of this process."""
    cpu, begin = time.process_time(), time.perf_counter()
    run()
    return time.perf_counter() - begin, time.process_time() - cpu


class Engine:
    """An engine's memory, eight tensors of pages, and the worker that copies blocks from the slots of a pool there."""

    NUM_TENSORS = 8

    def __init__(self, slots: npt.NDArray[np.uint8]) -> None:
        num_blocks, block_bytes = slots.shape
        fragment_bytes = block_bytes // self.NUM_TENSORS
        layout = SlotLayout((fragment_bytes,) * self.NUM_TENSORS, 1, 1)
        self.pool = RamPool.create(self.NUM_TENSORS * num_blocks, fragment_bytes, private=True)
        self.pool.slots()[:] = 0
        tensors = list(self.pool.slots().reshape(self.NUM_TENSORS, num_blocks, fragment_bytes))
        refs = [[PageRef(i, fragment_bytes) for i in range(self.NUM_TENSORS)]]
        self.worker = TransferWorker(tensors, refs, layout, 0, num_threads=2)
        self.worker.attach(slots)
        self.blocks = np.random.default_rng(1).permutation(num_blocks)
        self.num_open = 0

    def submit(self, job_id: int, slots: Sequence[int]) -> None:
        """Begins to copy these slots to wherever the engine has room for them."""
        self.worker.submit(TransferJob(job_id, False, (GroupCopy(0, self.blocks[: len(slots)], np.array(slots), 0),)))
        self.num_open += 1

    def finish(self) -> None:
        """Returns when all that was begun is there."""
        while self.num_open:
            outcomes = self.worker.poll()
            assert all(outcome.success for outcome in outcomes)
            self.num_open -= len(outcomes)
            time.sleep(1e-3)  # as an engine's step does

    def close(self) -> None:
        self.worker.shutdown()
        self.pool.close()


class VllmTier:
    """The thread pool and the block I/O of vLLM's filesystem tier, driven as its manager does: one task a job."""

    def __init__(self, root: Path, slots: npt.NDArray[np.uint8], order: list[int]) -> None:
        from vllm.v1.kv_offload.tiering.fs import io, thread_pool

        self.io = io
        self.num_blocks, self.block_bytes = slots.shape
        self.order = order
        self.round = 0
        self.root = root
        root.mkdir(parents=True)
        self.direct = io.probe_o_direct(str(root))
        self.threads = thread_pool.DualQueueThreadPool(16, 16)
        self.view = memoryview(slots)
        self.paths: list[str] = []
        how = "C extension" if io._HAS_FSIO_C else "Python"
        print(f"vLLM's filesystem tier: {how}, {'O_DIRECT' if self.direct else 'through the page cache'}")
        self.store(False)

    def _run(self, enqueue: Callable[..., None], batch: Callable[..., None]) -> None:
        per_job = max(1, JOB_BYTES // self.block_bytes)
        num_jobs = 0
        for start in range(0, self.num_blocks, per_job):
            paths = self.paths[start : start + per_job]
            offsets = [slot * self.block_bytes for slot in self.order[start : start + per_job]]
            enqueue(
                num_jobs,
                1,
                [lambda p=paths, o=offsets: batch(p, self.view, o, self.block_bytes, self.direct)],
            )
            num_jobs += 1
        self.threads.wait_idle()
        finished = self.threads.get_finished()
        assert len(finished) == num_jobs
        assert all(success for _, success, _ in finished)

    def store(self, durable: bool) -> tuple[float, float]:
        for path in self.paths:
            os.unlink(path)
        self.round += 1
        rng = random.Random(self.round)
        names = [rng.randbytes(32).hex() for _ in range(self.num_blocks)]
        self.paths = [str(self.root / name[:3] / f"{name[3:5]}_g0" / f"{name}.bin") for name in names]

        def run() -> None:
            self._run(self.threads.enqueue_store, self.io.batch_store_block)
            if durable:
                with ThreadPoolExecutor(16) as threads:
                    list(threads.map(_sync, self.paths))

        return timed(run)

    def load(self) -> tuple[float, float]:
        return timed(lambda: self._run(self.threads.enqueue_load, self.io.batch_load_block))

    def close(self) -> None:
        self.threads.shutdown()
        self.view.release()


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fdatasync(fd)
    os.close(fd)


def vllm_is_here() -> bool:
    try:
        import vllm.v1.kv_offload.tiering.fs.io  # noqa: F401
    except ImportError as error:
        print(f"without vLLM's tier: {error}")
        return False
    return True
