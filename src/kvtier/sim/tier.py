"""A tier below RAM in simulated time: blocks of which only the keys exist, moved at the speed of a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.interfaces import Residency
from kvtier.keys import OffloadKey
from kvtier.policy import make_policy
from kvtier.sim.clock import SimulatedClock
from kvtier.sim.transport import Disturbance, LinkSpeed, SimulatedTransport, TransportJob
from kvtier.tier_interfaces import REASON_CANCELLED, REASON_CLOSED, REASON_RESET, Tier, TierOutcome, TierStats
from kvtier.tiers.catalog import Place, TierCatalog
from kvtier.tiers.jobs import ALREADY_STORING, NOT_THERE, OpenJob, check_submission
from kvtier.tiers.shared.payoff import CompressionSwitch
from kvtier.transfers.jobs import TransferOutcome

MAX_STORING_BLOCKS = 64
"""Wait to be written at most, as in a tier with a bounded queue; more are refused."""


@dataclass(frozen=True, slots=True)
class CompressionModel:
    """How blocks shrink, and how quickly, in bytes of blocks. The defaults were measured on a core: see
    docs/decisions/compression.md."""

    mode: str = "auto"
    """`auto` or `on`, as of a shared tier."""
    ratio: float = 1.45
    encode_bytes_per_s: float = 1.5e9
    decode_bytes_per_s: float = 2.0e9


@dataclass(frozen=True, slots=True)
class TierModel:
    """What a device can do. The speeds are of the whole device, which moves one block at a time."""

    medium: str
    capacity_blocks: int
    load_speed: LinkSpeed
    store_speed: LinkSpeed
    policy: str = "lru"
    compression: CompressionModel | None = None
    """None: blocks go as they are."""


class _Move(NamedTuple):
    """A block on its way."""

    job: OpenJob
    position: int
    place: Place
    codec_s: float = 0.0
    """For compressing or decompressing it: as on a connection of a shared tier, the device waits for that."""


class SimulatedTier(Tier):
    """`model.capacity_blocks` blocks of `block_bytes`. No bytes are kept: `attach` is not needed, slots are not used.

    Loads go before stores, block by block. `on_outcome` is called at the moment at which a job ends, for the caller to
    poll in an event of its own.
    """

    def __init__(
        self, clock: SimulatedClock, model: TierModel, block_bytes: int, on_outcome: Callable[[], object]
    ) -> None:
        self.medium = model.medium
        self._clock = clock
        self._block_bytes = block_bytes
        self._compression = model.compression
        self._switch = CompressionSwitch()
        self._latency_s = model.load_speed.latency_s
        self._compressed: set[OffloadKey] = set()
        """Blocks that were compressed when they were last stored."""
        self._on_outcome = on_outcome
        self._catalog = TierCatalog(model.capacity_blocks, make_policy(model.policy, model.capacity_blocks))
        self._transport = SimulatedTransport(
            clock,
            model.load_speed,
            model.store_speed,
            num_lanes=1,
            on_outcome=self._moved,
            disturb=lambda job: Disturbance(during_s=self._moves[job.job_id].codec_s),
        )
        self._jobs: dict[int, OpenJob] = {}
        self._moves: dict[int, _Move] = {}
        """By the number of the transport's job."""
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
        for number in [number for number, move in self._moves.items() if move.job.job_id == job_id]:
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
            counters={**self._catalog.counters, **self._compression_counters()},
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
        num_bytes, codec_s = self._payload(job.keys[position], job.is_store)
        self._moves[self._num_moves] = _Move(job, position, place, codec_s)
        self._transport.submit(TransportJob(self._num_moves, job.is_store, num_bytes))

    def _payload(self, key: OffloadKey, is_store: bool) -> tuple[int, float]:
        """Bytes that are moved, and the seconds that making them, or the block of them, takes."""
        model = self._compression
        if model is None:
            return self._block_bytes, 0.0
        if is_store:
            wanted = model.mode == "on" or self._switch.wants(self._clock.now_s)
            (self._compressed.add if wanted else self._compressed.discard)(key)
        if key not in self._compressed:
            return self._block_bytes, 0.0
        bytes_per_s = model.encode_bytes_per_s if is_store else model.decode_bytes_per_s
        return int(self._block_bytes / model.ratio), self._block_bytes / bytes_per_s

    def _moved(self, outcome: TransferOutcome) -> None:
        job, position, place, codec_s = self._moves.pop(outcome.job_id)
        success = outcome.success
        if success and self._compression is not None:
            self._measure(outcome, codec_s)
        if job.is_store:
            success = self._catalog.end_store(place, success)
        else:
            success = self._catalog.end_load(place) and success
            self._catalog.counters["loaded_blocks" if success else "failed_load_blocks"] += 1
        now_s = self._clock.now_s
        job.note_time(now_s - outcome.duration_s, now_s)
        job.end_block(position, success, self._block_bytes, REASON_CANCELLED)
        self._end_if_over(job)

    def _measure(self, outcome: TransferOutcome, codec_s: float) -> None:
        """What a shared tier would tell its switch."""
        if codec_s and outcome.is_store:
            self._switch.note_encoded(self._block_bytes, outcome.num_bytes, codec_s)
        elif codec_s:
            self._switch.note_decoded(self._block_bytes, codec_s)
        if self._latency_s:
            self._switch.note_round_trip(self._latency_s)
        wire_s = outcome.duration_s - codec_s
        self._switch.note_transfer(outcome.is_store, outcome.num_bytes, wire_s, self._clock.now_s)

    def _compression_counters(self) -> dict[str, int]:
        if self._compression is None:
            return {}
        is_on = self._compression.mode == "on" or self._switch.is_on
        return {"compression_on": int(is_on), "compression_changes": self._switch.num_changes}

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
