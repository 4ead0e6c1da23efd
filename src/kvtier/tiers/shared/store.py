"""What a shared store must offer to the base of the shared tiers: connections, and what is moved over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.errors import KVTierError
from kvtier.keys import OffloadKey
from kvtier.tiers.jobs import OpenJob
from kvtier.tiers.shared.envelope import Identity, Rejection

REASON_MISSING = "the store does not have it any more"


class StuckCall(Protocol):
    """A call that its connection has given up, and that goes on: it may still touch the buffers of its blocks."""

    def when_ended(self, then: Callable[[], None]) -> None:
        """Has `then` called, from whatever thread, once nothing of the call touches a buffer any more; never, where
        nobody can tell."""
        ...


class StoreUnreachableError(KVTierError):
    """The connection broke, or could not be made. What was asked for may be repeated over another one, unless it is
    `stuck`: then the blocks belong to it until it has ended."""

    def __init__(self, message: str, stuck: StuckCall | None = None) -> None:
        super().__init__(message)
        self.stuck = stuck


class StoreTimeoutError(StoreUnreachableError):
    """The store did not answer in time. The connection is of no use any more; nothing is repeated."""


class StoreRefusedError(KVTierError):
    """The store answers, and says that it will not: credentials, a mode that is not supported. Nothing is repeated."""


@dataclass(slots=True, eq=False)
class BlockTransfer:
    """One block to be moved. Belongs to the threads of the tier from its submission until it is taken back as done."""

    job: OpenJob
    position: int
    key: OffloadKey
    identity: Identity
    buffer: npt.NDArray[np.uint8]
    """(block_bytes,) uint8: its RAM slot."""
    is_new: bool = False
    """The store did not have it a moment ago: not worth a question before it is stored."""
    encode_element_bytes: int = 0
    """How it is to be compressed on its way out: the bytes of its elements. 0: not."""
    payload_bytes: int = 0
    """Of its value, when it was last moved; 0: it was not."""
    codec_s: float = 0.0
    """Of the time that this took, for compressing or decompressing."""
    queued_s: float = 0.0
    """As are all of its times: by `time.monotonic`, on the threads."""
    began: bool = False
    done: bool = False
    """It was moved, or will not be, and nothing of it is to be repeated."""
    success: bool = False
    num_bytes: int = 0
    reason: str = ""
    is_missing: bool = False
    """The store says that it has no such block."""
    is_corrupt: bool = False
    is_away: bool = False
    """The part of the store that it belongs to cannot be used now."""
    begun_s: float = 0.0
    ended_s: float = 0.0

    def succeed(self, num_bytes: int) -> None:
        self.done, self.success, self.num_bytes = True, True, num_bytes

    def fail(self, reason: str) -> None:
        self.done, self.success, self.reason = True, False, reason

    def miss(self) -> None:
        self.fail(REASON_MISSING)
        self.is_missing = True

    def lose(self, reason: str) -> None:
        self.fail(reason)
        self.is_away = True

    def reject(self, rejection: Rejection) -> None:
        self.fail(str(rejection))
        self.is_corrupt = True


class StoreConnection(Protocol):
    """One connection, used by one thread at a time. Every method ends by `deadline_s` (`time.monotonic`), or raises
    StoreTimeoutError; StoreUnreachableError where the connection breaks, StoreRefusedError where the store will not.
    After any of these the connection is only closed."""

    def ping(self, deadline_s: float) -> None:
        """The store answers."""
        ...

    def lookup(self, identity: Identity, keys: Sequence[OffloadKey], block_bytes: int, deadline_s: float) -> list[bool]:
        """Whether the store has each block, in one round trip."""
        ...

    def load(self, blocks: Sequence[BlockTransfer], deadline_s: float) -> None:
        """Fills the buffer of each block, verifies it there, and says in each block how that went."""
        ...

    def store(self, blocks: Sequence[BlockTransfer], overwrite: bool, deadline_s: float) -> None:
        """Stores the buffer of each block, and says in each how that went. Blocks that are there already are left
        alone, and succeed with no bytes moved, unless `overwrite`."""
        ...

    def remove(self, identity: Identity, keys: Sequence[OffloadKey], deadline_s: float) -> None:
        """These blocks are not there any more."""
        ...

    def touch(self, identity: Identity, keys: Sequence[OffloadKey], deadline_s: float) -> None:
        """One use of each of these blocks, for the store's own eviction and expiry."""
        ...

    def abort(self) -> None:
        """From another thread: whatever runs on this connection fails now."""
        ...

    def close(self) -> None:
        """Raises nothing."""
        ...


class Store(Protocol):
    """Where the blocks are."""

    medium: str
    """For events and metrics, for example `"VALKEY"`."""
    supports_compression: bool
    """It moves `OutgoingValue` and `IncomingValue`, of whatever length. If not, compression is refused for it."""

    @property
    def place(self) -> str:
        """Where it is, for people. No credentials."""
        ...

    def attach(self, pool: npt.NDArray[np.uint8]) -> None:
        """Before anything else: all buffers will be rows of `pool`, (num_slots, slot_bytes) uint8, which stays mapped
        until `detach` has returned True. For stores that register memory. Contacts nobody."""
        ...

    def detach(self, deadline_s: float) -> bool:
        """After everything else: lets go of the pool. May be called again. False: that could not be done by
        `deadline_s` (`time.monotonic`), and the pool has to stay mapped."""
        ...

    def connect(self, deadline_s: float) -> StoreConnection:
        """A new connection. The store has answered over it, or lately over another one. Raises as the methods of a
        connection do."""
        ...
