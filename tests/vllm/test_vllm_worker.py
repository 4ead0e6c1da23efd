"""The workers by themselves, without an engine: what they report when a transfer cannot be done, and what they log."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace

import pytest
from vllm_harness import prepare_process

from kvtier.interfaces import CPULoadStoreSpec
from kvtier.tiers.ram import PoolHandle, RamPool

PAGE_BYTES = 4096
NUM_BLOCKS = 8
GONE = PoolHandle(pid=2**22, fd=3, device=1, inode=1, num_slots=4, slot_bytes=PAGE_BYTES)
"""A pool of a process that does not exist."""


@pytest.fixture(params=["cpu", "accelerator"])
def worker(request):
    prepare_process()
    import torch
    from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

    from kvtier.adapters.vllm.accelerator import AcceleratorWorker
    from kvtier.adapters.vllm.worker import CPUPlatformWorker

    tensor = torch.zeros((NUM_BLOCKS, PAGE_BYTES), dtype=torch.int8)
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, PAGE_BYTES)], [[CanonicalKVCacheRef(0, PAGE_BYTES)]])
    kind = CPUPlatformWorker if request.param == "cpu" else AcceleratorWorker
    parallel = SimpleNamespace(rank=0, world_size=1)  # what is used of vLLM's
    made = kind(caches, 1, parallel, 1)
    yield made
    made.shutdown()


@pytest.fixture
def said(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("kvtier"), "propagate", True)
    caplog.set_level(logging.INFO, logger="kvtier")
    caplog.set_level(logging.INFO)
    return lambda: [record.getMessage() for record in caplog.records if record.name.startswith("kvtier")]


def submit(worker, job_id, is_store, begin_by_s=None, slot=0):
    from vllm.v1.kv_offload.base import GPULoadStoreSpec

    engine = GPULoadStoreSpec([1], group_sizes=[1], block_indices=[0])
    pool = CPULoadStoreSpec([slot], [1], begin_by_s=begin_by_s)
    accepted = worker.submit_store(job_id, engine, pool) if is_store else worker.submit_load(job_id, pool, engine)
    assert accepted is True


def test_a_worker_that_cannot_map_the_pool_fails_every_job_and_says_so_once(worker, said):
    for job_id in range(20):
        worker.attach(GONE)
        submit(worker, job_id, is_store=job_id % 2 == 0)
        worker.wait({job_id})
    results = worker.get_finished()
    assert sorted(result.job_id for result in results) == list(range(20))
    assert all(result.success for result in results)  # vLLM's connector asserts it
    assert worker.take_failed() == set(range(20))
    assert worker.take_failed() == set()
    assert worker.get_finished() == []
    assert len(said()) == 3  # the pool; loads; stores
    assert "cannot use the RAM pool" in said()[0]


class DeviceCopies:
    """vLLM's copy worker as far as ours uses it: what was submitted has ended, every second time badly."""

    def __init__(self):
        self.submitted = []

    def submit_store(self, job_id, src, dst):
        self.submitted.append(job_id)
        return True

    submit_load = submit_store

    def get_finished(self):
        from vllm.v1.kv_offload.base import TransferResult

        ended, self.submitted = self.submitted, []
        return [TransferResult(job_id, job_id % 2 == 0) for job_id in ended]

    def wait(self, job_ids):
        pass

    def shutdown(self):
        pass


@pytest.mark.parametrize("worker", ["accelerator"], indirect=True)
def test_a_copy_of_the_device_that_fails_does_not_reach_vllm_as_a_failure(worker):
    worker._copies = DeviceCopies()
    for job_id in range(6):
        submit(worker, job_id, is_store=job_id < 3)
    results = worker.get_finished()
    assert [(result.job_id, result.success) for result in results] == [(job_id, True) for job_id in range(6)]
    assert worker.take_failed() == {1, 3, 5}


@pytest.mark.parametrize("worker", ["accelerator"], indirect=True)
@pytest.mark.parametrize("is_store", [True, False])
def test_what_is_too_late_or_has_no_slot_never_reaches_the_device(worker, is_store):
    copies = worker._copies = DeviceCopies()
    submit(worker, 1, is_store, begin_by_s=time.monotonic() - 1)
    submit(worker, 2, is_store, slot=-1)
    submit(worker, 4, is_store, begin_by_s=time.monotonic() + 600)
    assert copies.submitted == [4]
    assert {result.job_id for result in worker.get_finished()} == {1, 2, 4}
    assert worker.take_failed() == {1, 2}


@pytest.mark.parametrize("worker", ["cpu"], indirect=True)
def test_with_a_pool_again_all_is_well(worker):
    pool = RamPool.create(4, PAGE_BYTES)
    worker.attach(pool.handle)
    submit(worker, 1, is_store=True)
    worker.wait({1})
    assert [result.job_id for result in worker.get_finished()] == [1]
    assert worker.take_failed() == set()
    worker.shutdown()
    pool.close()


def test_a_job_is_reported_once_however_often_the_copies_say_that_it_has_ended(worker):
    """Else, with several ranks, vLLM and the scheduler would take one rank's second report for another's first."""
    submit(worker, 1, is_store=True)
    submit(worker, 2, is_store=False)
    reported = []
    if hasattr(worker, "transfers"):
        ended = worker.transfers.poll()
        worker.transfers.poll = lambda: [*ended, *ended]
    else:
        worker._copies = SimpleNamespace(get_finished=lambda: [SimpleNamespace(job_id=1, success=False)] * 2)
        worker._copies.shutdown = lambda: None
    for _ in range(3):
        reported += [result.job_id for result in worker.get_finished()]
    assert sorted(reported) == [1, 2]
    assert worker.take_failed() == {1, 2}
    assert worker.num_repeated_reports > 0
