"""What tiers of this package share in handling jobs: checks of a submission, and a job until its outcome."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigurationError, DuplicateKeyError, ManagerUsageError
from kvtier.keys import OffloadKey
from kvtier.tier_interfaces import TierOutcome

NOT_THERE = "not there"
ALREADY_STORING = "another job is storing it"


class OpenJob:
    """A job from its submission to its outcome. Used by the tier's caller alone, from one thread."""

    __slots__ = (
        "begun_s",
        "ended_s",
        "is_store",
        "job_id",
        "keys",
        "num_bytes",
        "num_open",
        "reason",
        "results",
        "void_reason",
    )

    def __init__(self, job_id: int, is_store: bool, keys: Sequence[OffloadKey]) -> None:
        self.job_id = job_id
        self.is_store = is_store
        self.keys = keys
        self.results = [False] * len(keys)
        self.num_open = len(keys)
        self.num_bytes = 0
        self.begun_s: float | None = None
        self.ended_s = 0.0
        self.reason = ""
        self.void_reason = ""

    def void(self, reason: str) -> None:
        """No key of this job succeeds, whatever was moved already."""
        self.void_reason = self.reason = reason
        self.results = [False] * len(self.keys)
        self.num_bytes = 0

    def end_block(self, position: int, success: bool, num_bytes: int = 0, reason: str = "") -> None:
        """The block of `keys[position]` is done with."""
        self.num_open -= 1
        if self.void_reason:
            return
        self.results[position] = success
        if success:
            self.num_bytes += num_bytes
        elif not self.reason:
            self.reason = reason

    def note_time(self, begun_s: float, ended_s: float) -> None:
        """One transfer of this job took from `begun_s` to `ended_s`."""
        self.begun_s = begun_s if self.begun_s is None else min(self.begun_s, begun_s)
        self.ended_s = max(self.ended_s, ended_s)

    def outcome(self) -> TierOutcome:
        duration_s = 0.0 if self.begun_s is None else max(0.0, self.ended_s - self.begun_s)
        return TierOutcome(self.job_id, self.is_store, tuple(self.results), self.num_bytes, duration_s, self.reason)


def check_pool(pool: npt.NDArray[np.uint8]) -> None:
    """Raises ConfigurationError unless `pool` is a RAM pool: (num_slots, slot_bytes) uint8, contiguous, writable."""
    if pool.dtype != np.uint8 or pool.ndim != 2 or not (pool.flags.c_contiguous and pool.flags.writeable):
        raise ConfigurationError(
            f"a tier needs a pool of (num_slots, slot_bytes) uint8, C-contiguous and writable, "
            f"got {pool.shape} {pool.dtype}"
        )


def check_submission(
    job_id: int, keys: Sequence[OffloadKey], slots: Sequence[int], open_jobs: Collection[int], num_slots: int
) -> None:
    """Raises ManagerUsageError for a job that no caller may submit."""
    if job_id in open_jobs:
        raise ManagerUsageError(f"tier job {job_id} is open already")
    if len(keys) != len(slots):
        raise ManagerUsageError(f"tier job {job_id} has {len(keys)} keys and {len(slots)} slots")
    if len(set(keys)) < len(keys):
        seen: set[OffloadKey] = set()
        twice = next(key for key in keys if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise DuplicateKeyError(f"tier job {job_id} names block {twice.hex()} twice")
    if len(slots) and not (min(slots) >= 0 and max(slots) < num_slots):
        raise ManagerUsageError(f"tier job {job_id} names slots {min(slots)} to {max(slots)} of a pool of {num_slots}")
