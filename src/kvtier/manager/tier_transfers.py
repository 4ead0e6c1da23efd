"""Transfers between RAM slots and the tiers below: which slots are in whose hands until a tier has said how it ended.

Sans-I/O: time is an argument.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from kvtier.errors import InvariantError
from kvtier.interfaces import CPULoadStoreSpec, ReqContext
from kvtier.keys import OffloadKey, is_private
from kvtier.manager.cpu import CPUOffloadingManager
from kvtier.manager.pace import TierPace
from kvtier.tier_interfaces import TierOutcome


class _TierContext(ReqContext):
    """Stands for a tier in the RAM manager's books, one for each job."""

    __slots__ = ()
    by_engine = False


@dataclass(slots=True)
class _Job:
    """A transfer between RAM slots and a tier that has not ended."""

    context: _TierContext
    spec: CPULoadStoreSpec
    keys: list[OffloadKey]
    """What the tier has accepted: of `spec.keys`, the leading ones."""
    tier_number: int
    is_promotion: bool
    begin_by_s: float
    is_cancelled: bool = False


class TierTransfers:
    """Jobs of the tiers, in RAM's books: a block on its way up is a store into RAM, one on its way down a load from it.

    `on_taken(number, keys)` hears of blocks that a tier has taken, `on_arrived(number, keys)` of those that came up
    from one; `counters` are the caller's, and counted in.
    """

    def __init__(
        self,
        ram: CPUOffloadingManager,
        paces: list[TierPace],
        counters: Counter[str],
        on_taken: Callable[[int, list[OffloadKey]], None],
        on_arrived: Callable[[int, list[OffloadKey]], None],
    ) -> None:
        self.num_promoting = 0
        """Blocks on their way up."""
        self.num_cascading = 0
        """Blocks on their way down."""
        self._ram = ram
        self._paces = paces
        self._counters = counters
        self._on_taken = on_taken
        self._on_arrived = on_arrived
        self._jobs: dict[int, _Job] = {}
        self._num_jobs = 0
        self._coming_from: dict[OffloadKey, int] = {}
        self._now_s = -math.inf

    def source_of(self, key: OffloadKey) -> int | None:
        """The number of the tier that this block is on its way up from; None: it is not. O(1)."""
        return self._coming_from.get(key)

    def bring_up(self, number: int, keys: list[OffloadKey]) -> list[OffloadKey]:
        """Makes room in RAM and asks the tier for the leading `keys` that fit. Returns those; the caller owns the list.

        The caller guarantees that the keys are absent in RAM. O(keys).
        """
        context = self._new_context("promotion")
        output = self._ram.prepare_store_prefix(keys, context)
        begun = output.keys_to_store
        if begun:
            spec = cast(CPULoadStoreSpec, output.store_spec)
            # what has not begun by the deadline of whoever asks is of no use to them any more
            begin_by_s = self._now_s + self._ram.deadline_s
            self._jobs[self._num_jobs] = _Job(context, spec, begun, number, is_promotion=True, begin_by_s=begin_by_s)
            self.num_promoting += len(begun)
            self._coming_from.update(dict.fromkeys(begun, number))
            self._paces[number].note_begun(len(begun), is_store=False)
            self._paces[number].tier.submit_load(self._num_jobs, begun, spec.slots)
        return begun

    def take_down(self, number: int, keys: list[OffloadKey]) -> int:
        """Offers blocks to the tier, and pins those that it accepts until it has them. How many: the leading ones.

        The caller guarantees that the keys are ready in RAM. O(keys).
        """
        context = self._new_context("cascade")
        return self._offer(number, context, self._ram.prepare_load(keys, context))

    def evict_down(self, number: int, count: int) -> int:
        """Evicts blocks from RAM, as many as `count`, and offers them to the tier. Their slots are free once it has
        read them, or at once if it does not accept them. Returns how many it does not. O(count) at best."""
        context = self._new_context("eviction")
        spec = self._ram.evict_early(count, context)
        if any(map(is_private, spec.keys)):
            _put_private_last(spec)
        return len(spec.keys) - self._offer(number, context, spec) if spec.keys else 0

    def _offer(self, number: int, context: _TierContext, spec: CPULoadStoreSpec) -> int:
        keys = list(spec.keys)
        num_accepted = self._paces[number].tier.submit_store(self._num_jobs, keys, spec.slots)
        if num_accepted < len(keys):
            self._ram.complete_load(keys[num_accepted:], context, spec=spec)
        if num_accepted:
            accepted = keys[:num_accepted]
            self._jobs[self._num_jobs] = _Job(context, spec, accepted, number, is_promotion=False, begin_by_s=math.inf)
            self.num_cascading += num_accepted
            self._paces[number].note_begun(num_accepted, is_store=True)
        return num_accepted

    def advance(self, now_s: float) -> None:
        """Tells the time, and takes what the tiers have done since the last call. O(open jobs)."""
        later = now_s > self._now_s
        if later:
            self._now_s = now_s
            self._cancel_late()
            for pace in self._paces:
                pace.breaker.advance(now_s)
        for pace in self._paces:
            for outcome in pace.tier.poll():
                self._end(outcome, pace)
        if later:
            for pace in self._paces:
                pace.observe(now_s)

    def cancel_all(self) -> None:
        """What the tiers have not begun they never will. Outcomes still come."""
        for job_id, job in self._jobs.items():
            self._paces[job.tier_number].tier.cancel(job_id)

    def check_invariants(self) -> None:
        """Recounts. Raises InvariantError on a mismatch. O(blocks on their way)."""
        promoting = [key for job in self._jobs.values() if job.is_promotion for key in job.keys]
        if not set(promoting).issuperset(self._coming_from):
            raise InvariantError("a block is said to be on its way up, and no job brings it")
        num_cascading = sum(len(job.keys) for job in self._jobs.values() if not job.is_promotion)
        if (len(promoting), num_cascading) != (self.num_promoting, self.num_cascading):
            counted = f"{self.num_promoting} and {self.num_cascading}"
            raise InvariantError(
                f"{len(promoting)} blocks on their way up and {num_cascading} down are counted as {counted}"
            )

    # -- private ---------------------------------------------------------------------------------------------

    def _new_context(self, what: str) -> _TierContext:
        self._num_jobs += 1
        return _TierContext(f"{what}-{self._num_jobs}")

    def _cancel_late(self) -> None:
        if self.num_promoting:
            for job_id, job in self._jobs.items():
                if job.is_promotion and not job.is_cancelled and self._now_s >= job.begin_by_s:
                    job.is_cancelled = True
                    self._paces[job.tier_number].tier.cancel(job_id)

    def _end(self, outcome: TierOutcome, pace: TierPace) -> None:
        job = self._jobs.get(outcome.job_id)
        if job is None or len(outcome.succeeded) != len(job.keys):
            # a tier that breaks its contract costs hits; what it said of other slots is not to be believed
            self._counters["tier_reports_ignored"] += 1
            return
        del self._jobs[outcome.job_id]
        pace.note_outcome(outcome, job.is_cancelled)
        moved = [key for key, succeeded in zip(job.keys, outcome.succeeded, strict=True) if succeeded]
        if job.is_promotion:
            failed = [key for key, succeeded in zip(job.keys, outcome.succeeded, strict=True) if not succeeded]
            self.num_promoting -= len(job.keys)
            for key in job.keys:
                self._coming_from.pop(key, None)
            self._ram.complete_store(moved, job.context, spec=job.spec)
            self._ram.complete_store(failed, job.context, success=False, spec=job.spec)
            self._ram.on_request_finished(job.context)
            self._counters["promoted_blocks"] += len(moved)
            self._counters["failed_promotion_blocks"] += len(failed)
            self._on_arrived(job.tier_number, moved)
            return
        self.num_cascading -= len(job.keys)
        self._ram.complete_load(job.keys, job.context, spec=job.spec)
        self._counters["cascaded_blocks"] += len(moved)
        self._on_taken(job.tier_number, moved)


def _put_private_last(spec: CPULoadStoreSpec) -> None:
    """Changes the order of a spec that nobody else has yet: tiers accept leading blocks, and no private ones."""
    order = sorted(range(len(spec.keys)), key=lambda i: is_private(spec.keys[i]))
    spec.keys = [spec.keys[i] for i in order]
    spec.slots = [spec.slots[i] for i in order]
    spec.slot_generations = [spec.slot_generations[i] for i in order]
