"""A tier below RAM in simulated time: blocks of which only the keys exist, moved at the speed of a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.interfaces import Residency
from kvtier.keys import OffloadKey
from kvtier.policy import make_policy
from kvtier.sim.clock import SimulatedClock
from kvtier.sim.transport import LinkSpeed, SimulatedTransport, TransportJob
from kvtier.tier_interfaces import REASON_CANCELLED, REASON_CLOSED, REASON_RESET, Tier, TierOutcome, TierStats
from kvtier.tiers.catalog import Place, TierCatalog
from kvtier.tiers.jobs import ALREADY_STORING, NOT_THERE, OpenJob, check_submission
from kvtier.transfers.jobs import TransferOutcome

MAX_STORING_BLOCKS = 64
"""Wait to be written at most, as in a tier with a bounded queue; more are refused."""


@dataclass(frozen=True, slots=True)
class TierModel:
    """What a device can do. The speeds are of the whole device, which moves one block at a time."""

    medium: str
    capacity_blocks: int
    load_speed: LinkSpeed
    store_speed: LinkSpeed
    policy: str = "lru"


class SimulatedTier(Tier):
    """`model.capacity_blocks` blocks of `block_bytes`. No bytes are kept: `attach` is not needed, slots are not used.

    Loads go before stores, block by block. `on_outcome` is called at the moment at which a job ends, for the caller to
    poll in an event of its own.
    """

    def __init__(
        self, clock: SimulatedClock, model: TierModel, block_bytes: int, on_outcome: Callable[[], object]
    ) -> None:
        self.medium = model.medium
        self._block_bytes = block_bytes
        self._on_outcome = on_outcome
        self._catalog = TierCatalog(model.capacity_blocks, make_policy(model.policy, model.capacity_blocks))
        self._transport = SimulatedTransport(
            clock,
            model.load_speed,
            model.store_speed,
            num_lanes=1,
            on_outcome=lambda outcome: self._moved(outcome, clock.now_s),
        )
        self._jobs: dict[int, OpenJob] = {}
        self._moves: dict[int, tuple[OpenJob, int, Place]] = {}
        """Number of the transport's job -> which block of which job it moves."""
        self._num_moves = 0
        self._ended: list[TierOutcome] = []
        self._closed_reason = ""

    def attach(self, pool: npt.NDArray[np.uint8]) -> None:
        """Nothing to open."""

    def lookup(self, keys: Sequence[OffloadKey]) -> list[Residency]:
        return self._catalog.lookup(keys)

    def submit_store(self, job_id: int, keys: Sequence[OffloadKey], slots: Sequence[int]) -> int:
        check_submission(job_id, keys, slots, self._jobs, max(slots, default=0) + 1)
        room = 0 if self._closed_reason else max(0, MAX_STORING_BLOCKS - self._catalog.num_storing)
        places = self._catalog.begin_store(keys, room)
        if places:
            job = self._jobs[job_id] = OpenJob(job_id, True, keys[: len(places)])
            for position, place in enumerate(places):
                if isinstance(place, Place):
                    self._begin_move(job, position, place)
                else:
                    job.end_block(position, place, reason=ALREADY_STORING)
            self._end_if_over(job)
        return len(places)

    def submit_load(self, job_id: int, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        check_submission(job_id, keys, slots, self._jobs, max(slots, default=0) + 1)
        job = self._jobs[job_id] = OpenJob(job_id, False, keys)
        for position, place in enumerate(self._catalog.begin_load(keys)):
            if place is None:
                job.end_block(position, False, reason=self._closed_reason or NOT_THERE)
            else:
                self._begin_move(job, position, place)
        self._end_if_over(job)

    def poll(self) -> list[TierOutcome]:
        ended, self._ended = self._ended, []
        return ended

    def cancel(self, job_id: int) -> None:
        for number in [number for number, (job, _, _) in self._moves.items() if job.job_id == job_id]:
            self._transport.cancel(number)

    def drop(self, keys: Sequence[OffloadKey]) -> None:
        self._catalog.drop(keys)

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        self._catalog.touch(keys)

    def reset(self, epoch: int) -> list[OffloadKey]:
        ready = self._catalog.reset()
        self._void_all(REASON_RESET)
        return ready

    def disable(self, reason: str) -> None:
        self._closed_reason = self._closed_reason or reason
        self._catalog.drop(self._catalog.ready_keys())
        self._void_all(REASON_CLOSED)

    def take_removed(self) -> list[OffloadKey]:
        return self._catalog.take_removed()

    def get_stats(self) -> TierStats:
        return TierStats(
            medium=self.medium,
            capacity_blocks=self._catalog.num_places,
            capacity_bytes=self._catalog.num_places * self._block_bytes,
            ready_blocks=self._catalog.num_ready,
            storing_blocks=self._catalog.num_storing,
            loading_blocks=self._catalog.num_loading,
            closed_reason=self._closed_reason,
            counters=dict(self._catalog.counters),
        )

    def wait_for_outcome(self, timeout_s: float) -> None:
        """Returns at once: whoever runs the clock waits."""

    def flush(self, timeout_s: float) -> bool:
        """Nothing survives the simulation."""
        return not self._closed_reason

    def close(self, flush_s: float = 0.0) -> bool:
        self.disable(REASON_CLOSED)
        return True

    def check_invariants(self) -> None:
        self._catalog.check_invariants()

    # -- private ---------------------------------------------------------------------------------------------

    def _begin_move(self, job: OpenJob, position: int, place: Place) -> None:
        self._num_moves += 1
        self._moves[self._num_moves] = (job, position, place)
        self._transport.submit(TransportJob(self._num_moves, job.is_store, self._block_bytes))

    def _moved(self, outcome: TransferOutcome, now_s: float) -> None:
        job, position, place = self._moves.pop(outcome.job_id)
        success = outcome.success
        if job.is_store:
            success = self._catalog.end_store(place, success)
        else:
            success = self._catalog.end_load(place) and success
            self._catalog.counters["loaded_blocks" if success else "failed_load_blocks"] += 1
        job.note_time(now_s - outcome.duration_s, now_s)
        job.end_block(position, success, self._block_bytes, REASON_CANCELLED)
        self._end_if_over(job)

    def _end_if_over(self, job: OpenJob) -> None:
        if not job.num_open:
            del self._jobs[job.job_id]
            self._ended.append(job.outcome())
            self._on_outcome()

    def _void_all(self, reason: str) -> None:
        jobs = list(self._jobs.values())
        for job in jobs:
            job.void(reason)
        for number in list(self._moves):
            self._transport.cancel(number)
