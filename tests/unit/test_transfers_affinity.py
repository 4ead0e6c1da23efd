"""Copy threads are not confined to the core of the thread that starts them."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from kvtier.transfers.jobs import GroupCopy, TransferJob
from kvtier.transfers.layout import PageRef, SlotLayout
from kvtier.transfers.worker import TransferWorker


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_copy_threads_of_a_pinned_thread_may_use_every_core_of_the_process():
    every_core = os.sched_getaffinity(0)
    seen: list[set[int]] = []
    copied = threading.Event()

    def note_cores(job: TransferJob) -> None:
        seen.append(os.sched_getaffinity(0))
        copied.set()

    def attach_pinned() -> TransferWorker:
        layout = SlotLayout((4096,), 1, 1)
        worker = TransferWorker([np.zeros((2, 4096), np.uint8)], [[PageRef(0, 4096)]], layout, 0)
        worker.before_copy = note_cores
        os.sched_setaffinity(0, {min(every_core)})
        worker.attach(np.zeros((2, layout.slot_bytes), np.uint8))
        return worker

    workers: list[TransferWorker] = []
    pinned = threading.Thread(target=lambda: workers.append(attach_pinned()))
    pinned.start()
    pinned.join()
    (worker,) = workers
    try:
        one = np.array([0], dtype=np.int64)
        worker.submit(TransferJob(1, True, (GroupCopy(0, one, one, 0),)))
        assert copied.wait(30)
    finally:
        worker.shutdown()
    assert seen == [every_core]
