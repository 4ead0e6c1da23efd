"""Simulated workers: one rank's memory each, with real bytes in it, moved by a simulated transport.

The bytes of a block are a digest of its key, the weights and the rank, so whoever reads a block can tell whether it
is the right one; while it is written it holds something else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

from kvtier.errors import InvariantError
from kvtier.keys import OffloadKey
from kvtier.sim.clock import SimulatedClock
from kvtier.sim.scenario import BLOCK_BYTES, Scenario
from kvtier.sim.transport import Disturbance, LinkSpeed, SimulatedTransport, TransportJob
from kvtier.transfers.jobs import TransferOutcome

TORN = b"torn"
"""What a block holds from the begin of a copy into it to its end."""


@lru_cache(maxsize=65_536)
def content(key: OffloadKey, weights: int, rank: int) -> bytes:
    """The bytes that `rank` must find in the block of this key under these weights."""
    return hashlib.blake2b(b"%d %d " % (weights, rank) + key, digest_size=8).digest()


@dataclass(slots=True)
class Copy:
    """One job, on all ranks. `keys[i]` lies in `slots[i]` of the pool and in block `blocks[i]` of the engine."""

    job_id: int
    is_store: bool
    keys: Sequence[OffloadKey]
    slots: Sequence[int]
    generations: Sequence[int]
    blocks: Sequence[int]
    weights: int
    granted_s: float
    num_resets: int
    """Of the cache, before the grant."""
    incarnation: int
    """Of the workers."""
    num_live: int = 0
    """Ranks whose transport has not ended it."""
    holds_blocks: bool = True
    """The engine keeps its blocks for it."""
    given_up: bool = False
    """A store that has taken longer than stores may: the engine keeps nothing for it any more."""
    freed_early: bool = False
    """A store whose slots the manager has freed before its report, because the workers had died."""
    reported: set[int] = field(default_factory=set)
    """Ranks whose report has arrived."""


@dataclass(slots=True)
class RankReport:
    """What one rank says of one job."""

    rank: int
    outcome: TransferOutcome


class SimulatedWorkers:
    """All ranks of one engine, their pool stripes and engine memory, and who is at which slot.

    `num_staging_blocks` lie behind the engine's own. Raises InvariantError for wrong bytes in a load, and for a slot
    or an engine block in two hands.
    """

    def __init__(
        self,
        scenario: Scenario,
        clock: SimulatedClock,
        disturb: Callable[[Copy], Disturbance],
        num_staging_blocks: int = 0,
    ) -> None:
        self._scenario = scenario
        self._clock = clock
        self._disturb = disturb
        self._pools = [[b""] * scenario.num_slots for _ in range(scenario.num_ranks)]
        num_blocks = scenario.num_engine_blocks + num_staging_blocks
        self.memories = [[b""] * num_blocks for _ in range(scenario.num_ranks)]
        """[rank][block]: what the engine computes and loads. The engine writes it too."""
        self._copies: dict[int, Copy] = {}
        """By job id: those that a rank may still work on."""
        self._writers: dict[int, int] = {}
        """Slot -> id of the store that may write it."""
        self._readers: dict[int, set[int]] = {}
        """Slot -> ids of the loads that may read it."""
        self._outbox: list[RankReport] = []
        self._transports: list[SimulatedTransport] = []
        self.incarnation = 0
        self.revive()

    # -- what the engine asks for ----------------------------------------------------------------------------

    def submit(self, copy: Copy, begin_by_s: float | None) -> None:
        """Hands the job to every rank, after a look at whose hands its slots are in."""
        self._take_in_hand(copy)
        self._copies[copy.job_id] = copy
        copy.num_live = self._scenario.num_ranks
        job = TransportJob(copy.job_id, copy.is_store, BLOCK_BYTES * len(copy.keys), begin_by_s)
        for transport in self._transports:
            transport.submit(job)

    def cancel(self, job_id: int) -> int:
        """Cancels the job on the ranks where it has not begun. Returns on how many."""
        return sum(transport.cancel(job_id) for transport in self._transports)

    def wait(self, job_ids: set[int], give_up_after_s: float) -> None:
        """Time runs until no rank copies any of these jobs any more."""
        for transport in self._transports:
            transport.wait(job_ids, give_up_after_s)

    def take_reports(self) -> list[RankReport]:
        """What the ranks have said since the last call. The caller's list."""
        outbox, self._outbox = self._outbox, []
        return outbox

    @property
    def num_live(self) -> int:
        """Jobs that some rank has not ended."""
        return len(self._copies)

    def die(self) -> list[Copy]:
        """Every process is gone, and with it the engine's memory. Returns the jobs that some rank had not ended.

        What was said before still arrives.
        """
        for transport in self._transports:
            transport.kill()
        unfinished = list(self._copies.values())
        for copy in unfinished:
            copy.num_live = 0
            self._out_of_hand(copy)
        self._copies.clear()
        for memory in self.memories:
            memory[:] = [b""] * len(memory)
        return unfinished

    def revive(self) -> None:
        """New processes, with the same pool."""
        scenario = self._scenario
        self.incarnation += 1
        self._transports = [
            SimulatedTransport(
                self._clock,
                LinkSpeed(scenario.load_latency_s, scenario.load_bytes_per_s),
                LinkSpeed(scenario.store_latency_s, scenario.store_bytes_per_s),
                num_lanes=scenario.num_lanes,
                slice_bytes=BLOCK_BYTES * scenario.slice_blocks,
                on_begin=partial(self._begin, rank),
                on_end=partial(self._end, rank),
                on_outcome=partial(self._note_outcome, rank),
                disturb=lambda job: self._disturb(self._copies[job.job_id]),
            )
            for rank in range(scenario.num_ranks)
        ]

    def check_bytes(self, copy: Copy) -> None:
        """A load has been reported as a success: every rank's engine blocks are what the keys demand."""
        for rank, memory in enumerate(self.memories):
            for key, block, slot in zip(copy.keys, copy.blocks, copy.slots, strict=True):
                if memory[block] != content(key, copy.weights, rank):
                    raise InvariantError(
                        f"wrong bytes: load {copy.job_id} of block {key.hex()} from slot {slot} is said to be "
                        f"done, and rank {rank} has {_describe(memory[block])} in engine block {block}"
                    )

    # -- hands -----------------------------------------------------------------------------------------------

    def _take_in_hand(self, copy: Copy) -> None:
        for slot in copy.slots:
            if not 0 <= slot < self._scenario.num_slots:
                raise InvariantError(f"slot {slot} was granted; there are {self._scenario.num_slots}")
            if slot in self._writers:
                raise InvariantError(
                    f"slot {slot} in two hands: granted to {_name(copy)} while store {self._writers[slot]} may write it"
                )
            if copy.is_store and self._readers.get(slot):
                raise InvariantError(
                    f"slot {slot} in two hands: granted to {_name(copy)} while loads {sorted(self._readers[slot])} "
                    "may read it"
                )
            if copy.is_store:
                self._writers[slot] = copy.job_id
            else:
                self._readers.setdefault(slot, set()).add(copy.job_id)

    def _out_of_hand(self, copy: Copy) -> None:
        for slot in copy.slots:
            if copy.is_store:
                del self._writers[slot]
            else:
                self._readers[slot].discard(copy.job_id)

    def _note_outcome(self, rank: int, outcome: TransferOutcome) -> None:
        copy = self._copies[outcome.job_id]
        copy.num_live -= 1
        if not copy.num_live:
            self._out_of_hand(copy)
            del self._copies[outcome.job_id]
        self._outbox.append(RankReport(rank, outcome))

    # -- bytes -----------------------------------------------------------------------------------------------

    def _begin(self, rank: int, job: TransportJob) -> None:
        copy = self._copies[job.job_id]
        target, places = self._target(rank, copy)
        for place in places:
            target[place] = TORN
        self._move(rank, copy, range(len(copy.keys) // 2))

    def _end(self, rank: int, job: TransportJob, success: bool) -> None:
        # of a copy that fails, any part may have been made: here the first half
        if success:
            copy = self._copies[job.job_id]
            self._move(rank, copy, range(len(copy.keys) // 2, len(copy.keys)))

    def _target(self, rank: int, copy: Copy) -> tuple[list[bytes], Sequence[int]]:
        return (self._pools[rank], copy.slots) if copy.is_store else (self.memories[rank], copy.blocks)

    def _move(self, rank: int, copy: Copy, rows: Iterable[int]) -> None:
        pool, memory = self._pools[rank], self.memories[rank]
        if not copy.holds_blocks and not copy.given_up:
            raise InvariantError(f"engine memory was released while {_name(copy)} still used it on rank {rank}")
        for i in rows:
            key, slot, block = copy.keys[i], copy.slots[i], copy.blocks[i]
            expected = content(key, copy.weights, rank)
            if copy.is_store:
                if memory[block] != expected and not copy.given_up:
                    raise InvariantError(f"the engine has {_describe(memory[block])} in block {block}: not {key.hex()}")
                pool[slot] = memory[block]
                continue
            if pool[slot] != expected:
                raise InvariantError(
                    f"wrong bytes: {_name(copy)} of block {key.hex()} finds {_describe(pool[slot])} "
                    f"in slot {slot} of rank {rank}"
                )
            memory[block] = pool[slot]


def _name(copy: Copy) -> str:
    return f"{'store' if copy.is_store else 'load'} {copy.job_id}"


def _describe(found: bytes) -> str:
    if found == TORN:
        return "half-written bytes"
    return f"bytes {found.hex()}" if found else "nothing"
