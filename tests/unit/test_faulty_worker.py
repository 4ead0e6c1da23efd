"""The fault-injecting wrapper, around a real worker: each fault does what it says, and a seed always the same."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvtier.errors import ConfigurationError
from kvtier.testing import FaultyWorker, WorkerFaults
from kvtier.transfers.jobs import GroupCopy, TransferJob, TransferOutcome
from kvtier.transfers.layout import PageRef, SlotLayout
from kvtier.transfers.worker import TransferWorker

NUM_JOBS = 8
PATIENCE_S = 60.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class CountingWorker(TransferWorker):
    num_ended = 0

    def poll(self) -> list[TransferOutcome]:
        outcomes = super().poll()
        self.num_ended += len(outcomes)
        return outcomes


class Bench:
    """A real worker on 8 blocks and 8 slots of 96 bytes, behind faults, with a clock of its own."""

    def __init__(self, **faults: float) -> None:
        self.blocks = np.random.default_rng(3).integers(1, 256, (NUM_JOBS, 96), dtype=np.uint8)
        layout = SlotLayout((96,), 1, 1)
        self.pool = np.zeros((NUM_JOBS, layout.slot_bytes), dtype=np.uint8)
        self.clock = Clock()
        self.inner = CountingWorker([self.blocks], [[PageRef(0, 96)]], layout, 0)
        self.worker = FaultyWorker(self.inner, WorkerFaults.parse(faults), self.clock)
        self.worker.attach(self.pool)
        self.num_submitted = 0

    def submit(self, job_id: int, is_store: bool = True, begin_by_s: float | None = None) -> None:
        self.num_submitted += 1
        rows = np.array([job_id % NUM_JOBS])
        self.worker.submit(TransferJob(job_id, is_store, (GroupCopy(0, rows, rows, 0),), begin_by_s))

    def store_all(self) -> None:
        for job_id in range(NUM_JOBS):
            self.submit(job_id)

    def polls_until_idle(self) -> list[list[TransferOutcome]]:
        """What each call of `poll` gave, until the inner worker has ended all."""
        polled = []
        while self.inner.num_ended < self.num_submitted:
            self.inner.wait_for_outcome(PATIENCE_S)
            polled.append(self.worker.poll())
        return polled

    def matches(self, slot: int) -> bool:
        return bool((self.pool[slot, :96] == self.blocks[slot]).all())


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(**faults: float) -> Bench:
        benches.append(Bench(**faults))
        return benches[-1]

    yield make
    for made in benches:
        made.worker.shutdown()


def flat(polled: list[list[TransferOutcome]]) -> list[TransferOutcome]:
    return [outcome for outcomes in polled for outcome in outcomes]


def test_without_faults_nothing_changes(bench):
    made = bench(seed=1)
    made.store_all()
    outcomes = flat(made.polls_until_idle())
    assert sorted(outcome.job_id for outcome in outcomes) == list(range(NUM_JOBS))
    assert all(outcome.success for outcome in outcomes)
    assert all(map(made.matches, range(NUM_JOBS)))
    assert not made.worker.dealt


def test_fail_copies_nothing(bench):
    made = bench(fail=1.0)
    made.store_all()
    outcomes = flat(made.polls_until_idle())
    assert [outcome.success for outcome in outcomes] == [False] * NUM_JOBS
    assert not made.pool.any()
    assert made.worker.dealt == {"fail": NUM_JOBS}


def test_fail_after_has_copied(bench):
    made = bench(fail_after=1.0)
    made.store_all()
    outcomes = flat(made.polls_until_idle())
    assert [outcome.success for outcome in outcomes] == [False] * NUM_JOBS
    assert all(map(made.matches, range(NUM_JOBS)))


def test_delay_holds_reports_back_until_their_time(bench):
    made = bench(delay=1.0, delay_s=10.0)
    made.store_all()
    assert flat(made.polls_until_idle()) == []
    made.clock.now_s += 5.0
    early = made.worker.poll()
    made.clock.now_s += 5.0
    late = made.worker.poll()
    assert sorted(outcome.job_id for outcome in early + late) == list(range(NUM_JOBS))
    assert early
    assert late


def test_duplicates_come_once_more_and_no_more(bench):
    made = bench(duplicate=1.0)
    made.store_all()
    outcomes = flat(made.polls_until_idle()) + made.worker.poll() + made.worker.poll()
    assert Counter(outcome.job_id for outcome in outcomes) == dict.fromkeys(range(NUM_JOBS), 2)


def test_reordered_reports_come_after_the_next_one(bench):
    made = bench(seed=0, reorder=0.5, reorder_s=1000.0)
    order = []
    for job_id in range(NUM_JOBS):
        made.submit(job_id)
        order += [outcome.job_id for outcome in flat(made.polls_until_idle())]
    made.clock.now_s += 1000.0
    order += [outcome.job_id for outcome in made.worker.poll()]
    assert sorted(order) == list(range(NUM_JOBS))
    assert order != sorted(order)


def test_drop_loses_stores_and_not_loads(bench):
    made = bench(drop=1.0)
    made.store_all()
    assert flat(made.polls_until_idle()) == []
    assert all(map(made.matches, range(NUM_JOBS)))
    made.submit(20, is_store=False)
    assert [outcome.job_id for outcome in flat(made.polls_until_idle())] == [20]


def test_drop_load_loses_loads(bench):
    made = bench(drop_load=1.0)
    made.submit(20, is_store=False)
    assert flat(made.polls_until_idle()) == []


def test_corrupt_changes_a_byte_and_says_nothing(bench):
    made = bench(corrupt=1.0)
    made.store_all()
    assert all(outcome.success for outcome in flat(made.polls_until_idle()))
    assert not any(map(made.matches, range(NUM_JOBS)))
    made.pool[:, 0] ^= 0xFF
    assert all(map(made.matches, range(NUM_JOBS)))


def test_a_stalled_job_is_given_up_by_wait_and_never_copies(bench):
    made = bench(stall=1.0, stall_s=10_000.0)
    made.submit(0)
    made.worker.wait({0}, give_up_after_s=0.0)
    (outcome,) = flat(made.polls_until_idle())
    assert (outcome.success, outcome.reason) == (False, "flushed")
    made.worker.shutdown()
    assert not made.pool.any()


def test_shutdown_ends_stalls(bench):
    made = bench(stall=1.0, stall_s=10_000.0)
    made.submit(0)
    made.worker.shutdown()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvtier-copy-0")]
    assert [outcome.reason for outcome in made.worker.poll()] == ["shutdown"]


def test_faults_can_be_turned_off_and_on(bench):
    made = bench(stall=1.0, stall_s=10_000.0, delay=1.0, delay_s=10_000.0)
    made.submit(0)
    made.worker.faults_off()
    assert [outcome.success for outcome in flat(made.polls_until_idle())] == [True]
    made.worker.faults_on()
    made.submit(1)
    made.worker.wait({1}, give_up_after_s=0.0)
    assert flat(made.polls_until_idle()) == []
    made.worker.faults_off()
    assert [outcome.reason for outcome in made.worker.poll()] == ["flushed"]


def test_the_inner_hook_is_called_for_what_is_let_through(bench):
    made = bench(seed=2, fail=0.5)
    seen = []
    made.worker.before_copy = lambda job: seen.append(job.job_id)
    made.store_all()
    well = [outcome.job_id for outcome in flat(made.polls_until_idle()) if outcome.success]
    assert sorted(seen) == sorted(well)
    assert 0 < len(well) < NUM_JOBS


def test_the_same_seed_strikes_the_same_jobs_whatever_the_order():
    faults = WorkerFaults.parse({"seed": 7, "fail": 0.3, "delay": 0.3})
    there = {(kind, job_id): faults.draw(kind, job_id) for kind in ("fail", "delay") for job_id in range(200)}
    back = {(kind, job_id): faults.draw(kind, job_id) for kind in ("delay", "fail") for job_id in range(199, -1, -1)}
    assert there == back
    struck = {job_id for (kind, job_id), hard in there.items() if kind == "fail" and hard is not None}
    assert 30 < len(struck) < 90
    other = WorkerFaults(seed=8, fail=0.3)
    assert struck != {job_id for job_id in range(200) if other.draw("fail", job_id) is not None}


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"fial": 0.1}, "fial"), ({"fail": 1.5}, "fail"), ({"stall_s": -1}, "stall_s"), ({"drop": "often"}, "drop")],
)
def test_bad_settings_are_named(settings, named):
    with pytest.raises(ConfigurationError, match=named):
        WorkerFaults.parse(settings)
