"""What the reference model is made of: the use of a slot, the free slots, and what it knows of a request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from kvtier.errors import DuplicateKeyError
from kvtier.interfaces import CPULoadStoreSpec, LoadStoreSpec, ReqContext
from kvtier.keys import OffloadKey


@dataclass(frozen=True, eq=False)
class Read:
    """One load of one block. `spec` is the one that `prepare_load` gave out."""

    req_context: ReqContext
    spec: LoadStoreSpec


@dataclass(eq=False)
class Allocation:
    """One use of one slot. It ends when the block is invisible and nobody reads or writes the slot."""

    key: OffloadKey
    slot: int
    generation: int
    since_s: float
    visible: bool = True
    writing: bool = True
    reads: list[Read] = field(default_factory=list)

    @property
    def ready(self) -> bool:
        return self.visible and not self.writing

    @property
    def busy(self) -> bool:
        return self.writing or bool(self.reads)


@dataclass(eq=False)
class RequestState:
    """What the manager remembers of one request, from its first call to `on_request_finished`."""

    introduced: bool = False
    """`on_request_finished` will come: its blocks may be spared until then."""
    crowded: bool = False
    """There was too little to evict besides its own blocks: they are spared no longer."""
    cut: bool = False
    deadline_s: float | None = None
    stuck: OffloadKey | None = None
    """The block that it waits for."""
    deferred: bool = False
    """Got None and has prepared nothing since."""
    counted: set[OffloadKey] = field(default_factory=set)
    accessed: list[OffloadKey] = field(default_factory=list)
    inserted: set[OffloadKey] = field(default_factory=set)

    def has_waited_for_load(self, spec: LoadStoreSpec | None) -> None:
        """A load has failed, and waiting for it counts."""
        limit_s = spec.begin_by_s if isinstance(spec, CPULoadStoreSpec) else None
        if limit_s is not None and (self.deadline_s is None or limit_s < self.deadline_s):
            self.deadline_s = limit_s


class FreeSlots:
    """Never-used slots first, ascending; then what was freed last. Slots freed in one call have no order."""

    def __init__(self, num_blocks: int) -> None:
        self._never_used = list(range(num_blocks))
        self._freed: list[set[int]] = []
        """Slots that became free together, the latest set last."""
        self.expected: list[int] = []
        """What the manager beside the model has handed out, for the next calls of `take`."""

    def take(self) -> int:
        """The next slot. AssertionError if another one was expected."""
        expected = self.expected.pop(0) if self.expected else None
        if self._never_used:
            slot = self._never_used.pop(0)
        else:
            latest = self._freed[-1]
            slot = expected if expected in latest else max(latest)
            latest.remove(slot)
            if not latest:
                self._freed.pop()
        assert expected in (None, slot), f"slot {expected} handed out where {slot} was next"
        return slot

    def give_back(self, slots: set[int]) -> None:
        """These became free in one call."""
        self._freed.append(slots)

    def all(self) -> list[int]:
        """Every free slot."""
        return [*self._never_used, *(slot for slots in self._freed for slot in slots)]


def refuse_duplicates(keys: Collection[OffloadKey]) -> None:
    for key, times in Counter(keys).items():
        if times > 1:
            raise DuplicateKeyError(f"block {key.hex()} is named {times} times")


def make_spec(blocks: list[Allocation], begin_by_s: float | None = None) -> CPULoadStoreSpec:
    return CPULoadStoreSpec(
        [block.slot for block in blocks],
        [block.generation for block in blocks],
        tuple(block.key for block in blocks),
        begin_by_s,
    )
