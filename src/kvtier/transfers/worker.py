"""Copy threads between one rank's engine tensors and its stripe of the pool. All concurrency is in here.

One lock guards every state change; copies run outside it and, with the compiled kernel, without the GIL.
A job's copy is cut into slices of megabytes: both threads share one big load, and a load never waits for more
than the slices that are running. Loads go before stores, and what `wait` waits for before both.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigurationError, TransferError
from kvtier.transfers.affinity import use_every_core_of_this_process
from kvtier.transfers.jobs import (
    REASON_DEADLINE,
    REASON_FLUSHED,
    REASON_SHUTDOWN,
    JobState,
    TransferJob,
    TransferOutcome,
    next_state,
)
from kvtier.transfers.kernels import Copier, default_copier
from kvtier.transfers.layout import PageRef, SlotLayout
from kvtier.transfers.plan import Fragments, Planner

MIN_SLICE_BYTES = 2 << 20
"""Below this, handing a slice to another thread costs more than it saves."""
MAX_LOAD_SLICE_BYTES = 64 << 20
MAX_STORE_SLICE_BYTES = 32 << 20
"""A load that arrives waits for at most one of these a thread: a few milliseconds."""
SLICES_PER_THREAD = 2
"""Slices of a job for each thread, so that a thread that is held up leaves its share to the others."""
JOIN_S = 1.0
"""How long `shutdown` waits for threads that are inside `before_copy`. They touch no memory afterwards."""


class _Work:
    """A job in the worker. Every field but `job` and `seq` is guarded by the worker's lock."""

    __slots__ = ("begun_s", "claimed", "job", "num_bytes", "num_copying", "reason", "seq", "slices", "state")

    def __init__(self, seq: int, job: TransferJob) -> None:
        self.seq = seq  # job ids may repeat, this does not
        self.job = job
        self.state = JobState.QUEUED
        self.claimed = False  # a thread is between picking it up and beginning the copy
        self.slices: list[Fragments] = []  # not yet handed to a thread, last one first
        self.num_copying = 0
        self.num_bytes = 0
        self.begun_s = 0.0
        self.reason = ""


class TransferWorker:
    """Copies between one rank's engine tensors and its stripe of the pool's slots.

    Every submitted job yields exactly one outcome. A job that has begun always finishes; one that is cancelled
    before never touches memory, not even if a thread had picked it up. Thread-safe for ONE submitting thread.

    `engine_tensors` are (num_blocks, row_bytes) uint8, writable; rows may be further apart than `row_bytes`.
    They are written by loads and kept alive until `shutdown`. `group_refs[g]` says which tensors KV group `g`
    uses, and how much of each page. The constructor starts no thread, but prepares the copy kernel, which may
    take a second. Raises ConfigurationError or TransferError if the description does not fit together.
    """

    before_copy: Callable[[TransferJob], None] | None = None
    """Seam for fault injection: called on a copy thread before a job's copy begins. Raising fails the job."""

    def __init__(
        self,
        engine_tensors: Sequence[npt.NDArray[np.uint8]],
        group_refs: Sequence[Sequence[PageRef]],
        layout: SlotLayout,
        rank: int,
        *,
        num_threads: int = 2,
        clock: Callable[[], float] = time.monotonic,
        copier: Copier | None = None,
    ) -> None:
        if num_threads < 1:
            raise ConfigurationError(f"num_threads must be at least 1, got {num_threads}")
        self._planner = Planner(engine_tensors, group_refs, layout, rank)
        self._tensors: list[npt.NDArray[np.uint8]] = list(engine_tensors)  # planned addresses point into them
        self._layout = layout
        self._num_threads = num_threads
        self._clock = clock
        self._copier = copier or default_copier()
        self._thread_name = f"kvtier-copy-{rank}"
        self._pool: npt.NDArray[np.uint8] | None = None
        self._threads: list[threading.Thread] = []
        self._stopping = False
        self._lock = threading.Lock()
        self._work_ready = threading.Condition(self._lock)
        self._progress = threading.Condition(self._lock)
        self._next_seq = 0
        # insertion-ordered, by seq. _live: no outcome yet; the queues: something left to hand to a thread
        self._live: dict[int, _Work] = {}
        self._urgent: dict[int, _Work] = {}
        self._loads: dict[int, _Work] = {}
        self._stores: dict[int, _Work] = {}
        self._outcomes: list[TransferOutcome] = []

    def attach(self, pool: npt.NDArray[np.uint8]) -> None:
        """Starts the copy threads on `pool`: (num_slots, slot_bytes) uint8, C-contiguous, written by stores.

        The caller guarantees that it stays mapped until `shutdown`. Raises TransferError if it does not fit the
        layout, or if the worker has a pool already or was shut down.
        """
        if self._pool is not None or self._stopping:
            raise TransferError("the worker was shut down" if self._stopping else "it has a pool already")
        if pool.dtype != np.uint8 or pool.ndim != 2 or pool.shape[1] != self._layout.slot_bytes:
            raise TransferError(
                f"the pool must be (num_slots, {self._layout.slot_bytes}) uint8, got {pool.shape} {pool.dtype}"
            )
        if not (pool.flags.c_contiguous and pool.flags.writeable):
            raise TransferError("the pool must be C-contiguous and writable")
        self._pool = pool
        for i in range(self._num_threads):
            thread = threading.Thread(target=self._run, name=f"{self._thread_name}-{i}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def submit(self, job: TransferJob) -> None:
        """Queues a job. Never blocks or raises for traffic: a job that cannot run has a failed outcome."""
        work = _Work(self._next_seq, job)
        self._next_seq += 1
        try:
            if self._pool is None:
                raise TransferError("shut down" if self._stopping else "no pool is attached")
            fragments = self._planner.plan(job, self._pool)
            work.num_bytes = int(fragments.sizes.sum())
            work.slices = fragments.cut(self._slice_bytes(job, work.num_bytes))[::-1]
        except Exception as exc:  # the description comes from another process: an outcome, not a crash
            work.reason = _describe(exc)
        with self._lock:
            self._live[work.seq] = work
            if work.reason:
                self._finish(work, JobState.FAILED, work.reason)
                return
            (self._stores if job.is_store else self._loads)[work.seq] = work
            self._work_ready.notify()

    def poll(self) -> list[TransferOutcome]:
        """The jobs that ended since the last call, in the order in which they ended. The caller's list.

        Also cancels jobs that are past their `begin_by_s` and have not begun. Never blocks.
        """
        with self._lock:
            self._expire(self._live.values())
            outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def wait_for_outcome(self, timeout_s: float) -> None:
        """Returns when `poll` has something to give, when no job is open, or after `timeout_s`."""
        give_up_at_s = time.monotonic() + timeout_s
        with self._lock:
            while self._live and not self._outcomes:
                left_s = give_up_at_s - time.monotonic()
                if left_s <= 0:
                    break
                self._progress.wait(left_s)

    def wait(self, job_ids: Collection[int], give_up_after_s: float = 1.0) -> None:
        """Returns when none of these jobs touches memory any more. Their outcomes come with `poll`.

        Running copies are waited for without limit: they are memory copies. Stores that have not begun go
        before everything else and have `give_up_after_s` to begin, then they are cancelled (`"flushed"`); loads that
        have not begun are cancelled at once. Unknown and finished ids are ignored.
        """
        wanted = frozenset(job_ids)
        with self._lock:
            mine = [work for work in self._live.values() if work.job.job_id in wanted]
            for work in mine:
                if work.state is JobState.QUEUED and not work.job.is_store:
                    self._finish(work, JobState.CANCELLED, REASON_FLUSHED)
                elif self._loads.pop(work.seq, None) or self._stores.pop(work.seq, None):
                    self._urgent[work.seq] = work
            self._work_ready.notify_all()
            give_up_at_s = time.monotonic() + give_up_after_s
            while self._expire(mine):
                left_s = give_up_at_s - time.monotonic()
                if left_s <= 0:
                    self._cancel_queued(mine, REASON_FLUSHED)
                    break
                self._progress.wait(left_s)
            while any(work.state is JobState.RUNNING for work in mine):
                self._progress.wait()

    def shutdown(self) -> None:
        """Cancels what has not begun (`"shutdown"`), returns after the running copies. Idempotent.

        The outcomes can still be polled; the tensors and the pool are no longer used or held. A thread that is
        stuck in `before_copy` is left behind: it ends as soon as it returns from there.
        """
        with self._lock:
            self._stopping = True
            self._cancel_queued(list(self._live.values()), REASON_SHUTDOWN)
            self._work_ready.notify_all()
            while self._live:  # only running copies are left
                self._progress.wait()
        threads, self._threads = self._threads, []
        join_until_s = time.monotonic() + JOIN_S
        for thread in threads:
            thread.join(max(0.0, join_until_s - time.monotonic()))
        self._pool = None
        self._tensors = []

    def _slice_bytes(self, job: TransferJob, num_bytes: int) -> int:
        share = -(-num_bytes // (self._num_threads * SLICES_PER_THREAD))
        largest = MAX_STORE_SLICE_BYTES if job.is_store else MAX_LOAD_SLICE_BYTES
        return max(MIN_SLICE_BYTES, min(share, largest))

    # On the copy threads.

    def _run(self) -> None:
        use_every_core_of_this_process()
        while True:
            with self._lock:
                while (item := self._next_item()) is None:
                    if self._stopping:
                        return
                    self._work_ready.wait()
            work, piece = item
            if piece is None:
                self._begin(work)
            else:
                self._copy(work, piece)
            del item, work, piece  # an idle thread keeps nothing alive

    def _next_item(self) -> tuple[_Work, Fragments | None] | None:
        """The next slice to copy, or (work, None): a job to begin, now claimed by the caller. Lock held."""
        for queue in (self._urgent, self._loads, self._stores):
            for work in queue.values():
                if work.state is JobState.RUNNING:
                    piece = work.slices.pop()
                    work.num_copying += 1
                    if not work.slices:
                        del queue[work.seq]
                    return work, piece
                if not work.claimed:
                    work.claimed = True
                    return work, None
        return None

    def _begin(self, work: _Work) -> None:
        reason = ""
        try:
            if self.before_copy is not None:
                self.before_copy(work.job)
        except BaseException as exc:  # whatever it is, this thread has other jobs to do
            reason = _describe(exc)
        with self._lock:
            if work.state is not JobState.QUEUED:
                return  # cancelled meanwhile: its memory may already belong to someone else
            if reason:
                self._finish(work, JobState.FAILED, reason)
            elif self._expire((work,)):
                work.state = next_state(work.state, JobState.RUNNING)
                work.begun_s = self._clock()
                if not work.slices:
                    self._finish(work, JobState.DONE, "")
                elif len(work.slices) > 1:
                    self._work_ready.notify_all()
                self._progress.notify_all()

    def _copy(self, work: _Work, piece: Fragments) -> None:
        reason = ""
        try:
            self._copier.copy(*piece)
        except BaseException as exc:  # fails this job only
            reason = _describe(exc)
        with self._lock:
            work.num_copying -= 1
            if reason:
                work.reason = work.reason or reason
                work.slices.clear()
                self._unqueue(work)
            if not work.slices and not work.num_copying:
                self._finish(work, JobState.FAILED if work.reason else JobState.DONE, work.reason)

    # State changes. Lock held.

    def _expire(self, works: Iterable[_Work]) -> bool:
        """Cancels those that have not begun and are too late. True if others that have not begun are left."""
        queued = [work for work in works if work.state is JobState.QUEUED]
        if not queued:
            return False
        now_s = self._clock()
        late = [work for work in queued if work.job.begin_by_s is not None and now_s > work.job.begin_by_s]
        self._cancel_queued(late, REASON_DEADLINE)
        return len(late) < len(queued)

    def _cancel_queued(self, works: Iterable[_Work], reason: str) -> None:
        for work in works:
            if work.state is JobState.QUEUED:
                self._finish(work, JobState.CANCELLED, reason)

    def _finish(self, work: _Work, state: JobState, reason: str) -> None:
        began = work.state is JobState.RUNNING
        work.state = next_state(work.state, state)
        success = state is JobState.DONE
        duration_s = max(0.0, self._clock() - work.begun_s) if began else 0.0
        self._unqueue(work)
        del self._live[work.seq]
        work.slices = []
        self._outcomes.append(
            TransferOutcome(
                job_id=work.job.job_id,
                is_store=work.job.is_store,
                success=success,
                num_bytes=work.num_bytes if success else 0,
                duration_s=duration_s,
                reason=reason,
            )
        )
        self._progress.notify_all()

    def _unqueue(self, work: _Work) -> None:
        for queue in (self._urgent, self._loads, self._stores):
            queue.pop(work.seq, None)


def _describe(exc: BaseException) -> str:
    return str(exc) if isinstance(exc, TransferError) else f"{type(exc).__name__}: {exc}"
