"""The contracts of the tiers below RAM (disk, remote stores), and of what keeps RAM over a restart. No logic.

A tier moves whole blocks between the slots of the RAM pool and its own medium, asynchronously. It has one caller,
which drives it from one thread; whatever threads a tier has are its own affair and are never seen from here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.interfaces import Residency
from kvtier.keys import OffloadKey

REASON_CANCELLED = "cancelled"
REASON_CLOSED = "closed"
REASON_RESET = "reset"


@dataclass(frozen=True, slots=True)
class TierOutcome:
    """How a job ended. Every submitted job that was not refused whole has exactly one."""

    job_id: int
    is_store: bool
    """True: RAM slots -> tier. False: tier -> RAM slots."""
    succeeded: tuple[bool, ...]
    """One for each key that the job was accepted for, in the order given.

    Store: True: the tier has the block, it can be loaded from now on (durable somewhat later, see `Tier.flush`).
    Load: True: the slot holds the block, and its bytes were verified in there. False: the slot's content is undefined.
    """
    num_bytes: int
    """Bytes moved for the keys that succeeded. A block that the tier had already moves none."""
    duration_s: float
    """From the begin of the job's first transfer to the end of its last; 0.0 if none began."""
    reason: str = ""
    """Why the first key that failed did: `"cancelled"`, `"closed"`, `"reset"`, or what went wrong. Empty if none."""

    @property
    def success(self) -> bool:
        """Whether every key succeeded."""
        return all(self.succeeded)


@dataclass(frozen=True, slots=True)
class TierStats:
    """A tier's gauges (now) and counters (since it was made)."""

    medium: str
    capacity_blocks: int
    """0 where the medium bounds itself."""
    capacity_bytes: int
    """What the medium may hold at most, the tier's own books included; 0 where the tier does not know."""
    ready_blocks: int
    storing_blocks: int
    """Accepted for a store that has not ended."""
    loading_blocks: int
    """Blocks that at least one load in flight reads."""
    closed_reason: str = ""
    """Why the tier serves nothing any more. Empty while it does."""
    down_reason: str = ""
    """Why the medium cannot be reached at the moment: it is tried again. Empty while it can."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """Name to count, among them `stored_blocks`, `loaded_blocks`, `evicted_blocks`, `shed_blocks` (refused stores),
    `failed_store_blocks`, `failed_load_blocks`, `corrupt_blocks` (bytes or record did not match)."""


class Tier(ABC):
    """Blocks on a medium below RAM: whole blocks, by key, moved from and to slots of the RAM pool.

    **Life.** The constructor starts no thread, opens and maps nothing. `attach` opens the medium and brings back what
    an earlier process left there. `close` ends it; no other call follows, save `poll` and `get_stats`.

    **Never in the way.** Between `attach` and `close` no method blocks or does I/O (`flush` and `wait_for_outcome`
    are there to wait), and none raises for a condition that traffic or the medium can cause. A medium that fails is a
    tier with fewer hits: at worst `closed_reason` says why, look-ups answer `ABSENT`, stores are refused and loads
    fail. Misuse (a key twice in one call, a job id that is open, a slot out of range) raises a ManagerUsageError and
    changes nothing.

    **Slots.** From the moment a job is accepted until `poll` has returned its outcome, its RAM slots belong to the
    tier: a store reads them and nobody may write them; a load writes them and nobody may read them. Afterwards the
    tier touches them no more. A device that stalls holds the slots of the transfers that have begun, and no others
    (`cancel`).

    **Jobs** end in any order, their blocks are moved in any order, loads before stores. What is `READY` changes in
    the caller's own calls alone: blocks become so in `poll`, one by one, at the latest in the one that returns the
    outcome of their store; and blocks leave in `submit_store` (evicted) and `poll` (failed their check, lost), which
    `take_removed` names. A block that a load in flight reads is not evicted, and its place is not reused.

    **Identity.** Bytes are handed out for a key only if they are what was stored under that very key, in the same
    namespace and weight epoch. Anything else is a failed load, counted as `corrupt_blocks`, and the block is gone.
    """

    medium: str
    """Name in events and metrics, for example `"DISK"`."""

    @abstractmethod
    def attach(self, pool: npt.NDArray[np.uint8]) -> None:
        """Opens the medium over `pool`, (num_slots, slot_bytes) uint8, C-contiguous and writable. Once.

        May block. The caller keeps the pool mapped until `close` has returned True. Raises TierError if the medium
        cannot be used (the message says what and why), ConfigurationError for settings that do not fit; in both
        cases nothing is left open.
        """

    @abstractmethod
    def lookup(self, keys: Sequence[OffloadKey]) -> list[Residency]:
        """For each key: `READY`, `ABSENT`, or, of a tier that must ask elsewhere, `UNKNOWN`: ask again.

        A block whose store has not ended is `ABSENT`. Counts as no use. O(keys).
        """

    @abstractmethod
    def submit_store(self, job_id: int, keys: Sequence[OffloadKey], slots: Sequence[int]) -> int:
        """Stores the block in RAM slot `slots[i]` under `keys[i]`, for the leading keys that the tier has room for.

        Returns how many leading keys were accepted; the job is about those alone, and with 0 there is no job and no
        outcome. A tier that is slow, full of blocks that may not leave, short of space or closed accepts fewer or
        none (`shed_blocks`). Evicts where needed, but none of `keys`. Keys that the tier has already are accepted,
        move no bytes and succeed; keys that an open job is storing are accepted and fail: that other job says when
        they are ready. O(keys).
        """

    @abstractmethod
    def submit_load(self, job_id: int, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        """Brings the block of `keys[i]` into RAM slot `slots[i]`. Keys that are not `READY` fail, the others do not.

        Each key is verified in its slot before the outcome says that it succeeded. Counts as no use (see `touch`).
        O(keys).
        """

    @abstractmethod
    def poll(self) -> list[TierOutcome]:
        """The jobs that ended since the last call. The caller owns the list. Never blocks; also after `close`."""

    @abstractmethod
    def cancel(self, job_id: int) -> None:
        """Begins no further transfer of this job. Transfers that have begun finish; what they moved counts.

        The outcome still comes, from the next `poll` on if nothing had begun. Unknown and ended ids are ignored.
        """

    @abstractmethod
    def drop(self, keys: Sequence[OffloadKey]) -> None:
        """These blocks become `ABSENT` at once. Unknown keys are ignored; stores in flight are not affected."""

    @abstractmethod
    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """One use of each of these blocks, for eviction. Keys are in prefix order; recency goes deepest first.

        Keys that are not there are not made so, but the tier's policy may learn from them.
        """

    @abstractmethod
    def reset(self, epoch: int) -> list[OffloadKey]:
        """Everything becomes `ABSENT` at once; from now on the tier stores and serves blocks of weight epoch `epoch`.

        The caller has made `epoch` durable before (`EpochStore.advance`), so no I/O is needed here: whatever carries
        another epoch is never served again, and reclaimed lazily. Jobs that are open end by and by, and no key of
        theirs succeeds (`"reset"`). Returns the keys that were `READY`; the caller owns the list.
        """

    @abstractmethod
    def disable(self, reason: str) -> None:
        """Serves nothing from now on, and nothing of what is stored may ever be served again (the weight epoch could
        not be raised). The tier does what it can, later, to make that true for the next process as well.
        """

    @abstractmethod
    def take_removed(self) -> list[OffloadKey]:
        """Keys that were `READY` and left since the last call: evicted, dropped or lost. Not those that `reset`
        returned. The caller owns the list. One key may be in it more than once, and be `READY` again."""

    @abstractmethod
    def get_stats(self) -> TierStats:
        """Counters and gauges. O(number of counters)."""

    @abstractmethod
    def wait_for_outcome(self, timeout_s: float) -> None:
        """Returns when `poll` may have something to give, when no job is open and no look-up unanswered, or after
        `timeout_s`.

        For stops and tests; `poll` may still be empty then: ask again.
        """

    @abstractmethod
    def flush(self, timeout_s: float) -> bool:
        """Waits until what the stores that have ended left, recency included, would survive a power loss.

        Stores that are open are finished first. False if that took longer than `timeout_s` or failed. Ended jobs
        still have to be polled. A tier whose blocks survive nothing returns True at once.
        """

    @abstractmethod
    def close(self, flush_s: float = 0.0) -> bool:
        """Ends the tier: flushes for at most `flush_s`, begins nothing more, and returns within about a second of
        that, whatever the medium does. Idempotent. Outcomes of open jobs can be polled afterwards.

        False: a transfer is stuck in the medium, and may still touch its RAM slots: keep the pool mapped.
        """

    def check_invariants(self) -> None:
        """Recounts the books. Raises InvariantError on a mismatch. O(capacity): for tests and debugging."""


class EpochStore(Protocol):
    """The weight epoch, kept durably. Blocks of another epoch than the current one are never served."""

    def current(self) -> int:
        """The epoch that holds now, 0 <= epoch < 2**64."""
        ...

    def advance(self) -> int:
        """Raises the epoch to one that was never current before, durable when this returns. May do one small write.

        Raises TierError if it cannot: then `current` is unchanged, and everything that relies on it must be disabled.
        """
        ...


class CheckedBlock(NamedTuple):
    """A block of an earlier process whose bytes have been looked at."""

    key: OffloadKey
    slot: int
    generation: int
    """That the check was asked for with."""
    is_intact: bool
    """Every byte is as it was stored, under this very key."""


Slots = Sequence[int] | npt.NDArray[np.int64]


class PoolKeeper(Protocol):
    """Writes down what is in the slots of a RAM pool that outlives its process, and checks what comes back.

    A slot has a record or none. A record says which block the slot holds, and by a checksum which bytes: the next
    process finds it, whenever and however this one dies. None of these calls blocks or does I/O.
    """

    def forget(self, slots: Slots) -> None:
        """The records of these slots are void when this returns, and none that was on its way will come. Called before
        anybody may write the slots, and for blocks that are not to be trusted."""
        ...

    def keep(self, keys: Sequence[OffloadKey], slots: Slots, generations: Slots) -> None:
        """These slots hold these blocks, whole, until `forget`. By and by they get records. Blocks that were told
        before are passed over. Keys are in prefix order."""
        ...

    def note_use(self, slots: Slots) -> None:
        """One use of the blocks in these slots, in prefix order: the next process evicts others before them."""
        ...

    def check(self, keys: Sequence[OffloadKey], slots: Sequence[int], generation: int) -> None:
        """Looks at the bytes of blocks that an earlier process left. Nobody writes the slots until `poll` has said what
        they are."""
        ...

    def poll(self) -> list[CheckedBlock]:
        """What was checked since the last call. The caller owns the list."""
        ...

    def reset(self) -> None:
        """No later process finds anything of this one any more, what it stores from now on included: a reset says that
        the weights may be others. In force when this returns, whatever happens to the process next."""
        ...
