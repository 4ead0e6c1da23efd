"""The contracts between the parts of kvtier: abstract classes, enums and records. No logic.

The central one is `OffloadingManager`, the scheduler-side contract of vLLM's KV offload with a tri-state
`lookup`. One manager is driven from one thread. No method blocks, does I/O (one exception: `reset_cache`),
reads a clock, or raises for a condition that traffic can cause.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.events import OffloadingEvent
from kvtier.keys import OffloadKey

SlotArray = npt.NDArray[np.int64]


class Residency(enum.Enum):
    """Where a block stands, for one asking request."""

    READY = "ready"
    """All bytes are there: it can be loaded now."""
    ARRIVING = "arriving"
    """Known to exist, bytes on the way: ask again."""
    UNKNOWN = "unknown"
    """A lower tier has been asked whether it has the block: ask again."""
    ABSENT = "absent"
    """Not there, or not for this request (its deadline has passed)."""


class BreakerState(enum.Enum):
    """What a tier's circuit breaker lets through."""

    CLOSED = "closed"
    """Everything."""
    OPEN = "open"
    """Nothing, until the cool-down is over."""
    HALF_OPEN = "half-open"
    """One transfer, the probe. While that is on its way: nothing."""


class PrefixLookup(NamedTuple):
    """Answer of `OffloadingManager.lookup_prefix`."""

    num_ready: int
    """How many leading keys are ready."""
    stopped_by: Residency
    """Residency of the first key that is not ready; `READY` when all are."""


class ReqContext:
    """One request as the managers see it.

    A manager keeps its own per-request state in here, under a token of its own, so that one context may be used
    with several managers and state dies with the context. `kv_transfer_params` is never modified.
    """

    __slots__ = ("__weakref__", "_states", "kv_transfer_params", "req_id")

    by_engine = True
    """Its transfers are the engine's. Those of a lower tier say nothing about whether the engine's copies work."""

    def __init__(self, req_id: str, kv_transfer_params: Mapping[str, Any] | None = None) -> None:
        self.req_id = req_id
        self.kv_transfer_params = kv_transfer_params
        self._states: dict[object, Any] = {}

    def __repr__(self) -> str:
        return f"ReqContext(req_id={self.req_id!r})"


class LoadStoreSpec(ABC):
    """Where in a tier the blocks of one transfer lie. Crosses to the workers by pickling."""

    @staticmethod
    @abstractmethod
    def medium() -> str:
        """Name of the tier's medium, for example `"CPU"`."""


class CPULoadStoreSpec(LoadStoreSpec):
    """Slots of the RAM pool, in the order of the keys of the call that made it.

    `block_ids[i]` (int64) is the slot of `keys[i]` and `generations[i]` (int64) that slot's allocation number:
    completing by a spec whose generations no longer match is ignored by the manager. Both arrays are made when they
    are first read. `keys` stay on the side of the manager: a pickled spec arrives without them. `begin_by_s` is the
    manager's time by which the transfer must have begun (None: no limit); a worker that has not begun by then cancels
    it and reports it failed. `ended` is the manager's own: the keys whose load by this very spec is over, so that no
    completion counts twice.
    """

    __slots__ = ("_block_ids", "_generations", "begin_by_s", "ended", "keys", "slot_generations", "slots")

    def __init__(
        self,
        slots: Sequence[int],
        generations: Sequence[int] = (),
        keys: Sequence[OffloadKey] = (),
        begin_by_s: float | None = None,
    ) -> None:
        self.slots = slots
        self.slot_generations = generations
        self.keys = keys
        self.begin_by_s = begin_by_s
        self.ended: Collection[OffloadKey] = ()

    @property
    def block_ids(self) -> SlotArray:
        """Shape (len(keys),). The caller does not change it."""
        try:
            return self._block_ids
        except AttributeError:
            self._block_ids: SlotArray = np.array(self.slots, dtype=np.int64)
            return self._block_ids

    @property
    def generations(self) -> SlotArray:
        """Shape (len(keys),). The caller does not change it."""
        try:
            return self._generations
        except AttributeError:
            self._generations: SlotArray = np.array(self.slot_generations, dtype=np.int64)
            return self._generations

    @staticmethod
    def medium() -> str:
        return "CPU"

    def __reduce__(self) -> tuple[Any, ...]:
        return CPULoadStoreSpec, (list(self.slots), list(self.slot_generations), (), self.begin_by_s)

    def __repr__(self) -> str:
        return f"CPULoadStoreSpec(block_ids={list(self.slots)})"


@dataclass(slots=True)
class PrepareStoreOutput:
    """What a store was granted. The caller owns the lists."""

    keys_to_store: list[OffloadKey]
    """The keys that must now be written, in the order of the call."""
    store_spec: LoadStoreSpec
    """Where to write them: `store_spec.block_ids[i]` belongs to `keys_to_store[i]`."""
    evicted_keys: list[OffloadKey]
    """What left the tier to make room."""


@dataclass(frozen=True, slots=True)
class ManagerStats:
    """A manager's counters (since it was made, except where it says "now") and gauges."""

    capacity_blocks: int
    ready_blocks: int
    """Now."""
    in_flight_blocks: int
    """Now: slots that a store is writing."""
    pinned_blocks: int
    """Now: visible blocks that at least one load reads."""
    condemned_blocks: int
    """Now: invisible slots whose last reader or writer has not left."""
    breaker_state: BreakerState = BreakerState.CLOSED
    """Now: whether the tier is used, or was shut off since its transfers kept failing."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """Name to count, for example `stored_blocks`, `evicted_blocks`, `shed_blocks`, `late_completions`."""


class OffloadingManager(ABC):
    """Scheduler side of KV offloading: which block is where, and what may be read, written and evicted.

    **Time** enters only through `advance(now_s)`; without it nothing ever expires.

    **Recency.** `prepare_load` and `prepare_store` only note accesses in the request's own state. Eviction order
    changes in `touch` and once in `on_request_finished`: the request's accesses, deepest block first, where a
    block that this request itself inserted does not count as a reuse.

    **Bounded waiting.** A request has one deadline, counted from its first `None` (or `defer`), or from when a load
    was planned that failed; once past it, every block that is not ready is absent for that request until it finishes.

    **Cheaper than waiting.** A manager that knows how fast the engine computes (`tell_recompute_rate`) and has seen
    how fast stores complete lets no request wait for longer than what it waits for is worth: from then on blocks in
    flight are absent for that request, as if its deadline had passed (it may still `defer` to a load).

    **Completion.** `complete_*` with the `spec` of the `prepare_*` call is fenced: a slot whose generation has
    moved on is counted and ignored. Without a spec a completion applies to the keys' current entries, which is
    only safe where writes are never reaped.

    A context that was never introduced by `on_new_request` works too.
    """

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """True: ready to load. False: absent. None: on its way, defer the request and ask again.

        Never changes what is stored. O(1).
        """

    @abstractmethod
    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrefixLookup:
        """How many leading `keys` are ready and what stopped the run. Counts and defers as `lookup` does.

        O(blocks of the ready prefix), at C speed.
        """

    @abstractmethod
    def residency(self, key: OffloadKey) -> Residency:
        """Where the block stands, for any request. Notes nothing. O(1)."""

    @abstractmethod
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pins each key until `complete_load`. `block_ids[i]` belongs to `keys[i]`.

        Raises BlockNotReadyError if a key is not ready, DuplicateKeyError if one is named twice.
        """

    @abstractmethod
    def complete_load(
        self,
        keys: Collection[OffloadKey],
        req_context: ReqContext,
        success: bool = True,
        spec: LoadStoreSpec | None = None,
    ) -> None:
        """Unpins what `prepare_load` pinned. With `success=False` the keys become absent in this tier at once.

        Raises BlockNotPinnedError if a key is not pinned (not with a spec: that is counted and ignored).
        """

    @abstractmethod
    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Allocates slots for those of `keys` that are neither stored nor in flight, evicting where needed.

        Never evicts a pinned block, a block in flight, or any key of this very call. None if the room cannot be
        made; then nothing has changed. Raises DuplicateKeyError if a key is named twice.
        """

    @abstractmethod
    def prepare_store_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput:
        """As `prepare_store`, for engines that cannot offer again: stores the longest leading run that fits.

        The request's own earlier blocks are not evicted either, so a prompt larger than the tier leaves a usable
        prefix. Once a run was cut, the request's later offers are shed whole: a block behind a hole is no hit.
        """

    @abstractmethod
    def complete_store(
        self,
        keys: Collection[OffloadKey],
        req_context: ReqContext,
        success: bool = True,
        spec: LoadStoreSpec | None = None,
    ) -> None:
        """Makes blocks in flight ready, or on failure removes just those in flight. Unknown keys are ignored."""

    @abstractmethod
    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """One use of each key. Recency goes deepest (last) first, so that a prefix outlives its suffix."""

    @abstractmethod
    def count_offers(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Counts each key once a request for the reuse filter. For engines whose look-ups stop at the first miss."""

    @abstractmethod
    def still_waiting(self, req_context: ReqContext) -> bool:
        """Whether the block that deferred this request is still on its way and its deadline not passed. O(1)."""

    def worth_waiting(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> bool:
        """Whether waiting for those of `keys` that are in flight is expected to be cheaper than recomputing them.

        `keys` are what the request would use, shallowest first. False is final for the request: it does not wait for
        blocks in flight any more. True as long as too little is known. `lookup_prefix` asks this by itself; engines
        that look up key by key call it when a look-up was None. O(keys + blocks in flight), O(1) if nothing is known.
        """
        return True

    def tell_recompute_rate(self, blocks_per_s: float | None) -> None:
        """How many blocks a second the engine computes, configured or measured. None: not known (any more)."""

    @abstractmethod
    def defer(self, req_context: ReqContext) -> bool:
        """The request waits for something the manager cannot see. False once its deadline has passed. O(1)."""

    @abstractmethod
    def advance(self, now_s: float) -> None:
        """Tells the time (monotonic seconds; an earlier time than before is ignored): expires and reaps."""

    @abstractmethod
    def reset_cache(self) -> None:
        """Everything becomes absent at once. Slots that a transfer still uses are free when it ends."""

    def writers_died(self) -> None:
        """Every process that wrote this tier's slots is known to be gone: condemned writes are over."""

    @abstractmethod
    def get_stats(self) -> ManagerStats:
        """Counters and gauges. O(number of counters)."""

    @abstractmethod
    def check_invariants(self) -> None:
        """Recounts everything. Raises InvariantError on a mismatch. O(capacity): for tests and debugging."""

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Drains the events since the last call, in order. The caller owns them."""
        return ()

    def on_new_request(self, req_context: ReqContext) -> None:
        """The scheduler has seen a new request."""

    def on_request_finished(self, req_context: ReqContext) -> None:
        """No more `prepare_*` will come for it; completions of its transfers still may."""

    def on_schedule_end(self) -> None:
        """Once at the end of each scheduler step."""

    def has_pending_work(self) -> bool:
        """Whether the manager needs the engine to keep stepping."""
        return False

    def shutdown(self) -> None:
        """Releases what the manager holds. No other call follows."""


class CachePolicy(ABC):
    """Eviction order over the resident keys of one tier. Keys only: no slots, no I/O, no clock.

    Batches are sequences in prefix order (deepest last) unless it says otherwise. A policy holds exactly the
    keys that were inserted and neither evicted nor removed since.
    """

    name: str

    def __init__(self, cache_capacity: int) -> None:
        self.cache_capacity = cache_capacity

    @abstractmethod
    def insert(self, keys: Sequence[OffloadKey]) -> None:
        """New resident keys, newest last. The caller guarantees that none is resident."""

    @abstractmethod
    def touch(self, keys: Iterable[OffloadKey], first_use: Container[OffloadKey] = ()) -> None:
        """One use of each key, in the order given (so: the last one ends most recent).

        For keys in `first_use` this is no reuse: they only move. Keys that are not resident are not made so, but a
        policy may learn from their return.
        """

    @abstractmethod
    def settle(self, keys: Iterable[OffloadKey], first_use: Container[OffloadKey]) -> None:
        """A request has ended: as `touch`, once for all that it accessed. Keys that left meanwhile are ignored."""

    @abstractmethod
    def evict(self, count: int, protected: Sequence[Container[OffloadKey]] = ()) -> list[OffloadKey] | None:
        """Removes and returns exactly `count` victims, none of them in any of `protected`.

        Atomic: None, and nothing changed, if there are not that many. O(victims + protected keys passed over).
        """

    def evict_for(
        self, newcomers: Sequence[OffloadKey], count: int, protected: Sequence[Container[OffloadKey]] = ()
    ) -> list[OffloadKey] | None:
        """As `evict`, to make room for the last `count` of `newcomers`, which are in prefix order and not resident.

        A policy may return fewer victims where the others are worth more than what they would make room for: then
        only so many fewer of the newcomers, the leading ones, are to be inserted. Here it never does.
        """
        return self.evict(count, protected)

    def decline(self, keys: Sequence[OffloadKey]) -> None:
        """Keys, not resident, in prefix order, that were offered and are not stored. A policy may learn from it."""

    @abstractmethod
    def remove(self, keys: Iterable[OffloadKey]) -> None:
        """Forgets resident keys that were not evicted (a failed store or load). Leaves no ghosts."""

    @abstractmethod
    def clear(self) -> None:
        """Forgets everything, learned state included."""

    @abstractmethod
    def __contains__(self, key: object) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[OffloadKey]:
        """Every resident key once, in no promised order."""
