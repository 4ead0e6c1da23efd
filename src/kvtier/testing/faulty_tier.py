"""A tier with faults: wraps any `Tier`, on the calls between it and its caller.

    tier = FaultyTier(MyTier(...), TierFaults(seed=1, fail=0.05, stall=0.1))
    manager = TieredOffloadingManager(ram, [tier])

Faults that the contract of `Tier` allows (refuse, fail, stall, delay, reorder, death) a caller must take in its stride;
those that it forbids (duplicate, drop, corrupt) show that it survives, or that a test notices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from random import Random

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigurationError
from kvtier.interfaces import Residency
from kvtier.keys import OffloadKey
from kvtier.tier_interfaces import REASON_CANCELLED, REASON_CLOSED, REASON_RESET, Tier, TierOutcome, TierStats
from kvtier.tiers.jobs import check_submission

REASON_INJECTED = "injected fault"
_SCRIBBLE = 0xFF


@dataclass(frozen=True, slots=True)
class TierFaults:
    """Which faults, and how often: probabilities of each job, 0 to 1. Times are counted in calls of `poll`.

    Whether a fault strikes depends on `seed`, the job's id and the kind of the fault, and on nothing else. Raises
    ConfigurationError for what is no probability.
    """

    seed: int = 0
    refuse: float = 0.0
    """A store that is not accepted."""
    fail: float = 0.0
    """No block of the job succeeds; a load leaves anything in its slots."""
    fail_some: float = 0.0
    """As `fail`, for every second block of the job."""
    stall: float = 0.0
    """Is not begun before up to `longest_polls` polls; can be cancelled until then. Such a store is accepted blindly:
    the inner tier, asked later, may have room for none of it, and then it fails."""
    delay: float = 0.0
    """Has ended, and is reported up to `longest_polls` polls late."""
    longest_polls: int = 8
    reorder: float = 0.0
    """Is reported after the next job that ends (or with the next poll but one, if none does)."""
    duplicate: float = 0.0
    """Is reported again by the next poll. Forbidden."""
    drop: float = 0.0
    """Is never reported: its slots stay in the tier's hands. Forbidden."""
    corrupt: float = 0.0
    """A load that changes one byte of its first slot and is said to be well. Forbidden: no caller can notice."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name not in ("seed", "longest_polls") and not 0 <= value <= 1:
                raise ConfigurationError(f"fault {item.name} is {value!r}; allowed: a probability from 0 to 1")
        if self.longest_polls < 1:
            raise ConfigurationError(f"longest_polls is {self.longest_polls!r}; allowed: 1 or more")

    def draw(self, kind: str, job_id: int) -> Random | None:
        """None if this fault does not strike the job; otherwise where to draw from how hard."""
        rate: float = getattr(self, kind)
        random = Random(f"{self.seed} {kind} {job_id}")
        return random if rate and random.random() < rate else None


@dataclass(slots=True)
class _Job:
    """Accepted, and not reported yet."""

    is_store: bool
    keys: Sequence[OffloadKey]
    slots: Sequence[int]
    polls_to_begin: int = 0
    """More than 0: stalls, and the inner tier does not know of it."""
    void_reason: str = ""
    """While it stalled it was cancelled, or a reset or the end of the tier came: it will never begin."""


@dataclass(slots=True)
class _Held:
    """An outcome that is given later."""

    outcome: TierOutcome
    polls: int
    until_another: bool = False


class FaultyTier(Tier):
    """`inner` with faults. `dealt` counts them by kind. Everything else, threads included, is the inner tier's.

    Faults are on from the beginning; while they are off nothing goes wrong and what was held back is given. A tier
    that is `dead` has nothing, accepts nothing and fails every job; alive again it has what it had.
    """

    def __init__(self, inner: Tier, faults: TierFaults) -> None:
        self.inner = inner
        self.medium = inner.medium
        self.faults = faults
        self.dead = False
        self.dealt: Counter[str] = Counter()
        self._calm = False
        self._pool: npt.NDArray[np.uint8] = np.empty((0, 0), np.uint8)
        self._jobs: dict[int, _Job] = {}
        self._held: list[_Held] = []
        self._again: list[TierOutcome] = []

    def faults_on(self) -> None:
        """From now on things go wrong (again)."""
        self._calm = False

    def faults_off(self) -> None:
        """Nothing more goes wrong; what stalls begins with the next poll."""
        self._calm = True

    # -- the contract ----------------------------------------------------------------------------------------

    def attach(self, pool: npt.NDArray[np.uint8]) -> None:
        self.inner.attach(pool)
        self._pool = pool

    def lookup(self, keys: Sequence[OffloadKey]) -> list[Residency]:
        return [Residency.ABSENT] * len(keys) if self.dead else self.inner.lookup(keys)

    def submit_store(self, job_id: int, keys: Sequence[OffloadKey], slots: Sequence[int]) -> int:
        check_submission(job_id, keys, slots, self._jobs, len(self._pool))
        if self.dead or self._deals("refuse", job_id):
            return 0
        accepted = len(keys)
        if (stall := self._stalls(job_id)) is None:
            accepted = self.inner.submit_store(job_id, keys, slots)
        if accepted:
            self._jobs[job_id] = _Job(True, list(keys[:accepted]), list(slots[:accepted]), self._polls(stall))
        return accepted

    def submit_load(self, job_id: int, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        check_submission(job_id, keys, slots, self._jobs, len(self._pool))
        if (stall := self._stalls(job_id)) is None:
            self.inner.submit_load(job_id, keys, slots)
        self._jobs[job_id] = _Job(False, list(keys), list(slots), self._polls(stall))

    def poll(self) -> list[TierOutcome]:
        outcomes = self._begin_stalled() + [self._whole(outcome) for outcome in self.inner.poll()]
        given: list[TierOutcome] = []
        for outcome in outcomes:
            self._treat(outcome, given)
        has_another = bool(given)
        for held in list(self._held):
            held.polls -= 1
            if self._calm or held.polls <= 0 or (held.until_another and has_another):
                self._held.remove(held)
                given.append(held.outcome)
        again, self._again = self._again, []
        self._again = [outcome for outcome in given if self._deals("duplicate", outcome.job_id)]
        for outcome in given:
            self._jobs.pop(outcome.job_id, None)
        return given + again

    def cancel(self, job_id: int) -> None:
        job = self._jobs.get(job_id)
        if job is not None and job.polls_to_begin:
            job.void_reason = job.void_reason or REASON_CANCELLED
        else:
            self.inner.cancel(job_id)

    def drop(self, keys: Sequence[OffloadKey]) -> None:
        self.inner.drop(keys)

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        self.inner.touch(keys)

    def reset(self, epoch: int) -> list[OffloadKey]:
        self._void_stalled(REASON_RESET)
        for held in self._held:
            held.outcome = _failed(held.outcome, REASON_RESET)
        return self.inner.reset(epoch)

    def disable(self, reason: str) -> None:
        self._void_stalled(REASON_CLOSED)
        self.inner.disable(reason)

    def take_removed(self) -> list[OffloadKey]:
        return self.inner.take_removed()

    def get_stats(self) -> TierStats:
        return self.inner.get_stats()

    def wait_for_outcome(self, timeout_s: float) -> None:
        if not self._held and not any(job.polls_to_begin for job in self._jobs.values()):
            self.inner.wait_for_outcome(timeout_s)

    def flush(self, timeout_s: float) -> bool:
        for job in self._jobs.values():
            job.polls_to_begin = min(job.polls_to_begin, 1)
        self._held += [_Held(outcome, 1) for outcome in self._begin_stalled()]
        return self.inner.flush(timeout_s)

    def close(self, flush_s: float = 0.0) -> bool:
        self._void_stalled(REASON_CLOSED)
        return self.inner.close(flush_s)

    def check_invariants(self) -> None:
        self.inner.check_invariants()

    # -- faults ----------------------------------------------------------------------------------------------

    def _begin_stalled(self) -> list[TierOutcome]:
        """Begins what has stalled long enough. Outcomes of what can no more begin."""
        ended = []
        for job_id, job in self._jobs.items():
            if not job.polls_to_begin:
                continue
            job.polls_to_begin = 0 if self._calm or job.void_reason else job.polls_to_begin - 1
            if job.polls_to_begin:
                continue
            num_begun = 0
            if not job.void_reason and job.is_store:
                num_begun = self.inner.submit_store(job_id, job.keys, job.slots)
            elif not job.void_reason:
                self.inner.submit_load(job_id, job.keys, job.slots)
                num_begun = len(job.keys)
            if not num_begun:
                reason = job.void_reason or REASON_INJECTED
                ended.append(TierOutcome(job_id, job.is_store, (False,) * len(job.keys), 0, 0.0, reason))
        return ended

    def _whole(self, outcome: TierOutcome) -> TierOutcome:
        """The inner tier may have accepted fewer blocks, after a stall, than this tier had."""
        missing = len(self._jobs[outcome.job_id].keys) - len(outcome.succeeded)
        if not missing:
            return outcome
        return replace(
            outcome,
            succeeded=outcome.succeeded + (False,) * missing,
            reason=outcome.reason or REASON_INJECTED,
        )

    def _treat(self, outcome: TierOutcome, given: list[TierOutcome]) -> None:
        """An outcome is changed, and lost, held back or given."""
        job = self._jobs[outcome.job_id]
        if self.dead or self._deals("fail", outcome.job_id):
            outcome = self._fail(outcome, job, 1)
        elif self._deals("fail_some", outcome.job_id):
            outcome = self._fail(outcome, job, 2)
        if not outcome.is_store and outcome.succeeded[:1] == (True,) and self._deals("corrupt", outcome.job_id):
            self._pool[job.slots[0], 0] ^= 0xFF
        if self._deals("drop", outcome.job_id):
            return
        if delay := self._deals("delay", outcome.job_id):
            self._held.append(_Held(outcome, self._polls(delay)))
        elif self._deals("reorder", outcome.job_id):
            self._held.append(_Held(outcome, 2, until_another=True))
        else:
            given.append(outcome)

    def _fail(self, outcome: TierOutcome, job: _Job, every: int) -> TierOutcome:
        """Every so many blocks of the job fail: what was stored is dropped, and slots of loads hold anything."""
        chosen = range(0, len(job.keys), every)
        if job.is_store:
            self.inner.drop([job.keys[i] for i in chosen if outcome.succeeded[i]])
        else:
            self._pool[[job.slots[i] for i in chosen]] = _SCRIBBLE
        succeeded = tuple(done and i not in chosen for i, done in enumerate(outcome.succeeded))
        num_moved = sum(outcome.succeeded)
        num_bytes = outcome.num_bytes * sum(succeeded) // num_moved if num_moved else 0
        return replace(outcome, succeeded=succeeded, num_bytes=num_bytes, reason=outcome.reason or REASON_INJECTED)

    def _void_stalled(self, reason: str) -> None:
        for job in self._jobs.values():
            if job.polls_to_begin:
                job.void_reason = job.void_reason or reason

    def _stalls(self, job_id: int) -> Random | None:
        return None if self.inner.get_stats().closed_reason else self._deals("stall", job_id)

    def _polls(self, random: Random | None) -> int:
        return random.randint(1, self.faults.longest_polls) if random is not None else 0

    def _deals(self, kind: str, job_id: int) -> Random | None:
        """Whether this fault strikes the job now: where to draw from how hard. Counts it."""
        random = None if self._calm else self.faults.draw(kind, job_id)
        if random is not None:
            self.dealt[kind] += 1
        return random


def _failed(outcome: TierOutcome, reason: str) -> TierOutcome:
    return replace(outcome, succeeded=(False,) * len(outcome.succeeded), num_bytes=0, reason=reason)
