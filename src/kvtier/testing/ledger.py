"""An account of who writes, reads and holds which slot, kept from what an engine and its workers see.

It knows the contract of a manager and nothing of how one is made: it is told what was granted and what ended, and
says what must be visible, in flight, pinned and condemned, and which slots nobody may be given.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from kvtier.interfaces import Residency
from kvtier.keys import OffloadKey
from kvtier.manager.hints import Hints


@dataclass(eq=False)
class Request:
    """A request as the engine knows it."""

    req_id: str
    keys: list[OffloadKey]
    num_computed: int = 0
    """Leading blocks that the engine holds."""
    num_offered: int = 0
    """Leading blocks that were offered for storing, or loaded, since they were last computed."""
    cut: bool = False
    """A store of it did not fit: the rest of it is not stored."""
    may_be_cut: bool = False
    deadline_at_s: float | None = None
    """Since it was first told to wait: until when it may be."""
    stuck_on: OffloadKey | None = None
    declined: bool = False
    """It was told not to wait for what is being written."""
    hints: Hints = field(default_factory=Hints)
    """What it says of itself."""
    accessed: set[OffloadKey] = field(default_factory=set)
    """What it loaded and stored, or found stored: not to be evicted for its own stores."""
    offered: set[OffloadKey] = field(default_factory=set)
    """What it has offered for storing at any time."""


@dataclass(eq=False)
class Job:
    """A transfer that the manager has not been told the end of."""

    job_id: int
    request: Request
    is_store: bool
    keys: Sequence[OffloadKey]
    slots: Sequence[int]
    since_s: float
    ranks_pending: set[int]
    """Ranks that have not reported."""
    begin_by_s: float | None = None
    begun: set[int] = field(default_factory=set)
    copied: set[int] = field(default_factory=set)
    """Ranks that have moved all bytes."""
    failed: bool = False
    source_gone: bool = False
    """The engine has taken the blocks back: what has not begun must not begin."""
    dead: bool = False
    """Its worker is gone: no byte moves any more."""
    void: set[OffloadKey] = field(default_factory=set)
    """Keys that this job has nothing to do with any more: reset, reaped, or found bad by another load."""
    released: set[int] = field(default_factory=set)
    """Slots of a dead writer, which are nobody's."""

    def slot_of(self, key: OffloadKey) -> int:
        return self.slots[self.keys.index(key)]


class SlotLedger:
    """`present`: which key can be loaded from which slot. `jobs`: every open transfer, by id."""

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.present: dict[OffloadKey, int] = {}
        self.jobs: dict[int, Job] = {}

    # -- what must be so -------------------------------------------------------------------------------------

    def in_flight(self) -> dict[OffloadKey, Job]:
        """Keys that a store is writing, as everybody sees it."""
        return {key: job for job in self._stores() for key in job.keys if key not in job.void}

    def residency(self) -> dict[OffloadKey, Residency]:
        """Every key that is not absent."""
        return {
            **dict.fromkeys(self.present, Residency.READY),
            **dict.fromkeys(self.in_flight(), Residency.ARRIVING),
        }

    def being_loaded(self) -> set[OffloadKey]:
        """Keys of open loads, also of those that a reset has made invisible."""
        return {key for job in self._loads() for key in job.keys}

    def pinned(self) -> set[OffloadKey]:
        """Visible keys that a load reads."""
        return {key for job in self._loads() for key in job.keys if key not in job.void}

    def condemned(self) -> set[int]:
        """Slots of invisible blocks that a reader or a writer has not left."""
        return {
            slot
            for job in self.jobs.values()
            for key, slot in zip(job.keys, job.slots, strict=True)
            if key in job.void and slot not in job.released
        }

    def num_free(self) -> int:
        """Slots that may be handed out now."""
        return self.capacity_blocks - len(self.present) - len(self.in_flight()) - len(self.condemned())

    def evictable(self, spared: Collection[OffloadKey]) -> set[OffloadKey]:
        """What may leave to make room: loadable, read by nobody, and not spared."""
        return self.present.keys() - self.pinned() - set(spared)

    def holders(self, slot: int) -> list[Job]:
        """Open jobs that may touch the slot."""
        return [job for job in self.jobs.values() if slot in job.slots and slot not in job.released]

    # -- what has happened -----------------------------------------------------------------------------------

    def evicted(self, keys: Iterable[OffloadKey]) -> None:
        """These made room."""
        for key in keys:
            del self.present[key]

    def begin(self, job: Job) -> None:
        """A job was granted. AssertionError if it shares a slot with a job or a block that it must not share with."""
        if job.is_store:
            for key, slot in zip(job.keys, job.slots, strict=True):
                assert 0 <= slot < self.capacity_blocks, f"slot {slot} of {self.capacity_blocks}"
                others = [other.job_id for other in self.holders(slot)]
                assert not others, f"slot {slot} handed out for {key!r} while jobs {others} use it"
                assert slot not in self.present.values(), f"slot {slot} handed out for {key!r} while it holds a block"
            assert len(set(job.slots)) == len(job.slots), f"slots handed out twice in one store: {job.slots}"
        else:
            for key, slot in zip(job.keys, job.slots, strict=True):
                assert self.present.get(key) == slot, f"load of {key!r} from slot {slot}: {self.present.get(key)}"
        self.jobs[job.job_id] = job

    def end(self, job: Job) -> list[OffloadKey]:
        """Every rank has reported. The keys that have become loadable (a store) or absent (a failed load)."""
        del self.jobs[job.job_id]
        valid = [key for key in job.keys if key not in job.void]
        if job.is_store:
            arrived = [] if job.failed else valid
            self.present.update((key, job.slot_of(key)) for key in arrived)
            return arrived
        if not job.failed:
            return []
        for key in valid:
            del self.present[key]
            for other in self._loads():
                if key in other.keys:
                    other.void.add(key)
        return valid

    def reset(self) -> list[OffloadKey]:
        """Everything is absent. The keys that were loadable."""
        for job in self.jobs.values():
            job.void.update(job.keys)
        gone = list(self.present)
        self.present.clear()
        return gone

    def reaped(self, job: Job, key: OffloadKey) -> None:
        """The store of `key` was given up: absent, and the slot is its writer's."""
        job.void.add(key)

    def writers_died(self) -> None:
        """No process writes any more. What was in flight stays so until it is reported or reaped."""
        for job in self._stores():
            job.released.update(job.slot_of(key) for key in job.void)

    def num_late(self, job: Job) -> int:
        """How many blocks of a store whose end is told were somebody else's by then, or free."""
        return sum(job.slot_of(key) in job.released for key in job.keys) if job.is_store else 0

    def _stores(self) -> list[Job]:
        return [job for job in self.jobs.values() if job.is_store]

    def _loads(self) -> list[Job]:
        return [job for job in self.jobs.values() if not job.is_store]
