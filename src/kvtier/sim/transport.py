"""Transfers in simulated time: what `kvtier.transfers.TransferWorker` does with threads, done with events.

It decides when each job begins and ends, and tells; what is copied is the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from kvtier.errors import InvariantError
from kvtier.sim.clock import SimulatedClock
from kvtier.transfers.jobs import (
    REASON_DEADLINE,
    REASON_FLUSHED,
    JobState,
    TransferOutcome,
    next_state,
)


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """One direction of one lane: a copy of n bytes takes `latency_s + n / bytes_per_s`."""

    latency_s: float = 0.0
    bytes_per_s: float = math.inf


@dataclass(frozen=True, slots=True)
class TransportJob:
    """One batch to copy. `begin_by_s`: when it must have begun (None: no limit); later, it never begins."""

    job_id: int
    is_store: bool
    num_bytes: int
    begin_by_s: float | None = None


class Disturbance(NamedTuple):
    """What goes wrong with one job."""

    before_s: float = 0.0
    """It holds its lane this long before the copy begins, and can still be cancelled."""
    during_s: float = 0.0
    """The copy takes this much longer."""
    failure_before: str = ""
    """It fails for this reason before anything is copied."""
    failure: str = ""
    """It fails for this reason at its end: any of its bytes may have been copied."""


_UNDISTURBED = Disturbance()


class _Work:
    __slots__ = ("begun_s", "claimed", "disturbance", "job", "num_copying", "num_left_bytes", "seq", "starts", "state")

    def __init__(self, seq: int, job: TransportJob) -> None:
        self.seq = seq  # job ids may repeat, this does not
        self.job = job
        self.state = JobState.QUEUED
        self.claimed = False  # a lane is between picking it up and beginning the copy
        self.starts = False  # nothing of it has been handed to a lane
        self.num_left_bytes = job.num_bytes
        self.num_copying = 0
        self.begun_s = 0.0
        self.disturbance = _UNDISTURBED


class SimulatedTransport:
    """Copies of one rank, `num_lanes` at a time: loads before stores, what `wait` waits for before both.

    Every submitted job yields exactly one outcome, of the type the real worker yields: to `on_outcome` at the
    moment it ends, or, without that, to the next `poll`. A job that has begun always finishes; one that is cancelled
    before never begins. Jobs are cut into slices of `slice_bytes` that the lanes share, so a load waits for no more
    than the slices that are running (infinite: for whole jobs). `on_begin(job)` and `on_end(job, success)` are
    called for a job that has begun, at either end of its copy.

    Nothing is random: `disturb(job)` says what goes wrong with a job when a lane picks it up.
    """

    def __init__(
        self,
        clock: SimulatedClock,
        load_speed: LinkSpeed,
        store_speed: LinkSpeed,
        *,
        num_lanes: int = 2,
        slice_bytes: float = math.inf,
        on_begin: Callable[[TransportJob], None] | None = None,
        on_end: Callable[[TransportJob, bool], None] | None = None,
        on_outcome: Callable[[TransferOutcome], None] | None = None,
        disturb: Callable[[TransportJob], Disturbance] | None = None,
    ) -> None:
        self._clock = clock
        self._load_speed = load_speed
        self._store_speed = store_speed
        self._slice_bytes = slice_bytes
        self._on_begin = on_begin
        self._on_end = on_end
        self._on_outcome = on_outcome
        self._disturb = disturb
        self._num_idle = num_lanes
        self._dead = False
        self._next_seq = 0
        # as in the real worker: insertion-ordered, by seq. _live: no outcome yet; the queues: something left to copy
        self._live: dict[int, _Work] = {}
        self._urgent: dict[int, _Work] = {}
        self._loads: dict[int, _Work] = {}
        self._stores: dict[int, _Work] = {}
        self._outcomes: list[TransferOutcome] = []

    def submit(self, job: TransportJob) -> None:
        """Queues a job; it may begin at once. A transport that was killed swallows it."""
        if self._dead:
            return
        work = _Work(self._next_seq, job)
        self._next_seq += 1
        self._live[work.seq] = work
        (self._stores if job.is_store else self._loads)[work.seq] = work
        if job.begin_by_s is not None:
            self._clock.at(math.nextafter(job.begin_by_s, math.inf), partial(self._expire, work))
        self._dispatch()

    def poll(self) -> list[TransferOutcome]:
        """The jobs that ended since the last call, in the order in which they ended. The caller's list."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def cancel(self, job_id: int) -> bool:
        """Cancels the job if it has not begun, and says whether it was so (`"flushed"`). Unknown ids: False."""
        queued = [work for work in self._live.values() if work.job.job_id == job_id and work.state is JobState.QUEUED]
        self._cancel(queued)
        return bool(queued)

    def wait(self, job_ids: Collection[int], give_up_after_s: float = 1.0) -> None:
        """Time runs until none of these jobs copies any more. Not to be called from an event.

        Stores that have not begun go before everything else and have `give_up_after_s` to begin, then they are
        cancelled (`"flushed"`); loads that have not begun are cancelled at once. Other ids are ignored.
        """
        mine = [work for work in self._live.values() if work.job.job_id in job_ids]
        for work in mine:
            if work.state is JobState.QUEUED and not work.job.is_store:
                self._cancel((work,))
            elif self._loads.pop(work.seq, None) or self._stores.pop(work.seq, None):
                self._urgent[work.seq] = work
        self._dispatch()
        give_up_at_s = self._clock.now_s + give_up_after_s
        while any(work.state is JobState.QUEUED for work in mine):
            next_at_s = self._clock.next_at_s
            if next_at_s is None or next_at_s > give_up_at_s:
                self._clock.run_until(give_up_at_s)
                self._cancel(work for work in mine if work.state is JobState.QUEUED)
                break
            self._clock.run_until(next_at_s)
        while any(work.state is JobState.RUNNING for work in mine):
            if not self._clock.run_next():
                raise InvariantError("a copy is running and nothing will end it")

    def kill(self) -> list[TransportJob]:
        """The process dies: nothing begins or ends any more. Returns the jobs that have no outcome, oldest first.

        Outcomes that were not polled can still be (they were on their way).
        """
        self._dead = True
        return [work.job for work in self._live.values()]

    @property
    def num_live(self) -> int:
        """Jobs without an outcome."""
        return len(self._live)

    # -- on the lanes ----------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        while self._num_idle and not self._dead:
            work = self._next_work()
            if work is None:
                return
            self._num_idle -= 1
            if work.state is JobState.RUNNING:
                self._copy_slice(work)
                continue
            work.claimed = True
            if self._disturb is not None:
                work.disturbance = self._disturb(work.job)
            if work.disturbance.before_s:
                self._clock.after(work.disturbance.before_s, partial(self._stall_over, work))
            else:
                self._begin(work)

    def _next_work(self) -> _Work | None:
        for queue in (self._urgent, self._loads, self._stores):
            for work in queue.values():
                if work.state is JobState.RUNNING or not work.claimed:
                    return work
        return None

    def _stall_over(self, work: _Work) -> None:
        if not self._dead:
            self._begin(work)
            self._dispatch()

    def _begin(self, work: _Work) -> None:
        self._num_idle += 1
        job = work.job
        if work.state is not JobState.QUEUED:
            pass  # cancelled meanwhile
        elif work.disturbance.failure_before:
            self._finish(work, JobState.FAILED, work.disturbance.failure_before)
        elif job.begin_by_s is not None and self._clock.now_s > job.begin_by_s:
            self._finish(work, JobState.CANCELLED, REASON_DEADLINE)
        else:
            work.state = next_state(work.state, JobState.RUNNING)
            work.begun_s = self._clock.now_s
            work.starts = True
            if self._on_begin is not None:
                self._on_begin(job)

    def _copy_slice(self, work: _Work) -> None:
        speed = self._store_speed if work.job.is_store else self._load_speed
        num_bytes = min(work.num_left_bytes, self._slice_bytes)
        duration_s = num_bytes / speed.bytes_per_s
        if work.starts:
            work.starts = False
            duration_s += speed.latency_s + work.disturbance.during_s
        work.num_left_bytes -= int(num_bytes)
        work.num_copying += 1
        if not work.num_left_bytes:
            self._unqueue(work)
        self._clock.after(duration_s, partial(self._slice_copied, work))

    def _slice_copied(self, work: _Work) -> None:
        if self._dead:
            return
        self._num_idle += 1
        work.num_copying -= 1
        if not work.num_left_bytes and not work.num_copying:
            failure = work.disturbance.failure
            if self._on_end is not None:
                self._on_end(work.job, not failure)
            self._finish(work, JobState.FAILED if failure else JobState.DONE, failure)
        self._dispatch()

    # -- ends ------------------------------------------------------------------------------------------------

    def _expire(self, work: _Work) -> None:
        if work.state is JobState.QUEUED and not self._dead:
            self._finish(work, JobState.CANCELLED, REASON_DEADLINE)

    def _cancel(self, works: Iterable[_Work]) -> None:
        for work in list(works):
            self._finish(work, JobState.CANCELLED, REASON_FLUSHED)

    def _finish(self, work: _Work, state: JobState, reason: str) -> None:
        began = work.state is JobState.RUNNING
        work.state = next_state(work.state, state)
        self._unqueue(work)
        del self._live[work.seq]
        success = state is JobState.DONE
        outcome = TransferOutcome(
            job_id=work.job.job_id,
            is_store=work.job.is_store,
            success=success,
            num_bytes=work.job.num_bytes if success else 0,
            duration_s=self._clock.now_s - work.begun_s if began else 0.0,
            reason=reason,
        )
        if self._on_outcome is None:
            self._outcomes.append(outcome)
        else:
            self._on_outcome(outcome)

    def _unqueue(self, work: _Work) -> None:
        for queue in (self._urgent, self._loads, self._stores):
            queue.pop(work.seq, None)
