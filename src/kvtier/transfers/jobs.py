"""Transfer jobs, their outcomes, and the states between the two."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.errors import InvariantError


class GroupCopy(NamedTuple):
    """What one KV group contributes to a job."""

    group_idx: int
    engine_blocks: npt.NDArray[np.int64]
    """(n,) engine block ids, in logical order."""
    slots: npt.NDArray[np.int64]
    """(ceil((first_sub_block + n) / blocks_per_chunk),) pool slots in the same order."""
    first_sub_block: int
    """Where in the first slot the first engine block lies: 0 <= first_sub_block < blocks_per_chunk."""


@dataclass(frozen=True, slots=True)
class TransferJob:
    """One batch of pages to copy. The arrays may be reused by the caller once `submit` has returned.

    The caller guarantees that no two jobs in flight write the same bytes.
    """

    job_id: int
    is_store: bool
    """True: engine tensors -> pool. False: pool -> engine tensors."""
    groups: tuple[GroupCopy, ...]
    begin_by_s: float | None = None
    """Time of the worker's clock by which the copy must have begun (None: no limit). Later, it never begins."""


@dataclass(frozen=True, slots=True)
class TransferOutcome:
    """How a job ended. Every submitted job has exactly one."""

    job_id: int
    is_store: bool
    success: bool
    """True: every byte was copied. False: none or some were; the target's content is undefined."""
    num_bytes: int
    """Bytes copied; 0 unless it succeeded."""
    duration_s: float
    """From the begin of the copy to its end; 0.0 if it never began."""
    reason: str = ""
    """Why it failed: `"deadline"`, `"flushed"`, `"shutdown"`, or what went wrong. Empty on success."""


REASON_DEADLINE = "deadline"
REASON_FLUSHED = "flushed"
REASON_SHUTDOWN = "shutdown"


class JobState(enum.Enum):
    """The life of a job. Only a RUNNING job touches memory."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


JOB_TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    # QUEUED -> FAILED: badly described, or the seam before the copy raised
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.FAILED, JobState.CANCELLED}),
    JobState.RUNNING: frozenset({JobState.DONE, JobState.FAILED}),
    JobState.DONE: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}


def next_state(state: JobState, target: JobState) -> JobState:
    """`target`, if a job may go there from `state`. Raises InvariantError otherwise."""
    if target not in JOB_TRANSITIONS[state]:
        raise InvariantError(f"a transfer job cannot go from {state.value} to {target.value}")
    return target
