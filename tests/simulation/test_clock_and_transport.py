"""Simulated time, and transfers in it: order, deadlines, cancellation, speed."""

from __future__ import annotations

import pytest

from kvtier.sim import Disturbance, LinkSpeed, SimulatedClock, SimulatedTransport, TransportJob

ONE_BYTE_A_SECOND = LinkSpeed(latency_s=0.0, bytes_per_s=1.0)


class Tape:
    """A transport whose copies take as many seconds as they have bytes, and what it did when."""

    def __init__(self, disturbances: dict[int, Disturbance] | None = None, **options: object) -> None:
        self.clock = SimulatedClock()
        self.begun: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        disturbances = disturbances or {}
        options = {"num_lanes": 1, "load_speed": ONE_BYTE_A_SECOND, "store_speed": ONE_BYTE_A_SECOND} | options
        self.transport = SimulatedTransport(
            self.clock,
            on_begin=lambda job: self.begun.setdefault(job.job_id, self.clock.now_s),
            on_end=lambda job, success: self.ended.setdefault(job.job_id, self.clock.now_s),
            disturb=lambda job: disturbances.get(job.job_id, Disturbance()),
            **options,
        )

    def store(self, job_id: int, num_bytes: int = 1, **options: float) -> None:
        self.transport.submit(TransportJob(job_id, True, num_bytes, **options))

    def load(self, job_id: int, num_bytes: int = 1, **options: float) -> None:
        self.transport.submit(TransportJob(job_id, False, num_bytes, **options))

    def run(self, until_s: float = 1000.0) -> dict[int, str]:
        """Why each job that has ended meanwhile failed; empty for a success."""
        self.clock.run_until(until_s)
        return {outcome.job_id: outcome.reason for outcome in self.transport.poll()}


def test_events_happen_by_time_then_in_the_order_of_asking():
    clock = SimulatedClock(10.0)
    happened = []
    for name, at_s in (("c", 12.0), ("a", 11.0), ("d", 12.0), ("b", 11.0), ("past", 1.0)):
        clock.at(at_s, lambda name=name: happened.append((name, clock())))
    clock.at(11.5, lambda: happened.append(("never", clock()))).cancel()
    clock.after(2.5, lambda: happened.append(("e", clock())))
    assert clock.run_until(12.0) == 5
    assert happened == [("past", 10.0), ("a", 11.0), ("b", 11.0), ("c", 12.0), ("d", 12.0)]
    assert clock() == 12.0
    assert clock.run_next()
    assert clock() == 12.5
    assert not clock.run_next()
    assert clock.next_at_s is None


def test_what_an_event_asks_for_happens_in_the_same_run():
    clock = SimulatedClock()
    happened = []
    clock.at(1.0, lambda: clock.after(1.0, lambda: happened.append(clock())))
    clock.run_until(3.0)
    assert happened == [2.0]
    assert clock() == 3.0


def test_loads_go_before_stores():
    tape = Tape()
    tape.store(1, 5)
    tape.store(2, 5)
    tape.load(3, 2)
    assert tape.run() == {1: "", 3: "", 2: ""}
    assert tape.ended == {1: 5.0, 3: 7.0, 2: 12.0}


def test_a_load_waits_for_a_running_slice_only():
    tape = Tape(slice_bytes=2)
    tape.store(1, 6)
    tape.load(2, 1)
    tape.run()
    assert tape.ended == {2: 3.0, 1: 7.0}


def test_lanes_share_a_job_and_each_direction_has_its_speed():
    tape = Tape(
        num_lanes=2, slice_bytes=4, store_speed=LinkSpeed(1.0, 2.0), load_speed=LinkSpeed(latency_s=3.0, bytes_per_s=4)
    )
    tape.store(1, 8)
    tape.run(100.0)
    tape.load(2, 4)
    tape.run(200.0)
    assert tape.ended == {1: 3.0, 2: 104.0}


def test_a_job_that_has_not_begun_in_time_never_begins():
    tape = Tape()
    tape.store(1, 5)
    tape.load(2, begin_by_s=4.0)
    tape.load(3, begin_by_s=5.0)
    assert tape.run() == {2: "deadline", 1: "", 3: ""}
    assert 2 not in tape.begun
    assert tape.begun[3] == 5.0


def test_a_stall_before_the_copy_counts_against_the_deadline_and_can_be_cancelled():
    stalled = Disturbance(before_s=10.0)
    tape = Tape({1: stalled, 2: stalled, 3: stalled}, num_lanes=3)
    tape.load(1, begin_by_s=5.0)
    tape.load(2)
    tape.load(3)
    assert tape.run(1.0) == {}
    assert tape.transport.cancel(2)
    assert tape.run() == {2: "flushed", 1: "deadline", 3: ""}
    assert tape.begun == {3: 10.0}


def test_a_running_copy_cannot_be_cancelled():
    tape = Tape({1: Disturbance(during_s=9.0)})
    tape.load(1, 1, begin_by_s=0.5)
    tape.run(0.25)
    assert not tape.transport.cancel(1)
    assert not tape.transport.cancel(77)
    assert tape.run() == {1: ""}
    assert tape.ended == {1: 10.0}


def test_failures_before_and_at_the_end_of_a_copy():
    tape = Tape({1: Disturbance(failure_before="no pool"), 2: Disturbance(failure="torn")})
    tape.store(1, 5)
    tape.store(2, 5)
    assert tape.run() == {1: "no pool", 2: "torn"}
    assert tape.begun == {2: 0.0}
    assert tape.ended == {2: 5.0}


def test_wait_prefers_stores_cancels_loads_and_waits_for_copies():
    tape = Tape()
    tape.store(1, 4)
    tape.store(2, 4)
    tape.store(3, 4)
    tape.load(4)
    tape.load(5)
    tape.transport.wait({3, 4, 99}, give_up_after_s=100.0)
    assert tape.clock() == 8.0
    assert tape.run() == {4: "flushed", 1: "", 3: "", 5: "", 2: ""}
    assert tape.begun == {1: 0.0, 3: 4.0, 5: 8.0, 2: 9.0}


def test_wait_gives_up_on_stores_that_do_not_begin():
    tape = Tape({1: Disturbance(before_s=50.0)})
    tape.store(1)
    tape.transport.wait({1}, give_up_after_s=2.0)
    assert tape.clock() == 2.0
    assert tape.run() == {1: "flushed"}
    assert tape.begun == {}


def test_a_killed_transport_ends_nothing_more():
    tape = Tape()
    tape.store(1, 1)
    tape.store(2, 5)
    tape.store(3, 5)
    tape.clock.run_until(3.0)
    assert [job.job_id for job in tape.transport.kill()] == [2, 3]
    tape.store(4)
    assert tape.run() == {1: ""}
    assert tape.ended == {1: 1.0}


def test_outcomes_as_events():
    outcomes = []
    tape = Tape(on_outcome=lambda outcome: outcomes.append((tape.clock(), outcome)))
    tape.store(1, 7)
    tape.clock.run_until(20.0)
    ((at_s, outcome),) = outcomes
    assert (at_s, outcome.job_id, outcome.is_store, outcome.success) == (7.0, 1, True, True)
    assert (outcome.num_bytes, outcome.duration_s) == (7, 7.0)
    assert tape.transport.poll() == []


@pytest.mark.parametrize("num_jobs", [5000])
def test_many_jobs_that_fail_at_once(num_jobs):
    tape = Tape({job_id: Disturbance(failure_before="no") for job_id in range(1, num_jobs)})
    for job_id in range(num_jobs):
        tape.store(job_id)
    assert len(tape.run()) == num_jobs
