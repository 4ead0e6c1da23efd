"""What is known of a cluster: which node has which slot, and which nodes cannot be used now. No I/O.

https://valkey.io/topics/cluster-spec/
"""

from __future__ import annotations

import logging
import threading
from binascii import crc_hqx
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.keys import OffloadKey
from kvtier.tiers.shared.resp import ErrorReply, Reply
from kvtier.tiers.shared.store import StoreUnreachableError
from kvtier.tiers.shared.valkey_config import Address, shown

logger = logging.getLogger(__name__)

NUM_SLOTS = 16384
MIN_PAUSE_S = 0.1
"""A node that is away is left alone for so long, then for twice as long, and so on; the map, where it is known to be
wrong, is asked for as often."""
MAX_PAUSE_S = 1.0
SAY_EVERY_S = 10.0
"""That a node is away is said no more often."""


def slots_of(prefix: bytes, keys: Sequence[OffloadKey]) -> list[int]:
    """The slot of each name `prefix + key`. O(bytes of the keys)."""
    opening = prefix.find(b"{")
    closing = prefix.find(b"}", opening + 1) if opening >= 0 else -1
    if closing > opening + 1:  # a hash tag: what stands in it decides alone
        return [crc_hqx(prefix[opening + 1 : closing], 0) % NUM_SLOTS] * len(keys)
    so_far = crc_hqx(prefix, 0)
    if closing > 0:  # an empty one, which is none
        return [crc_hqx(key, so_far) % NUM_SLOTS for key in keys]
    return [
        # a key is any bytes, and may have a hash tag, or end one
        crc_hqx(key, so_far) % NUM_SLOTS
        if opening < 0 and ((at := key.find(b"{")) < 0 or key.find(b"}", at) < 0)
        else _slot_of(prefix + key)
        for key in keys
    ]


def _slot_of(name: bytes) -> int:
    from redis.crc import key_slot  # noqa: PLC0415

    return int(key_slot(name))


def parse_slots(reply: Reply, asked: Address) -> tuple[list[Address | None], set[Address]]:
    """The owner of every slot, and all nodes, from the reply to `CLUSTER SLOTS` of the node at `asked`.

    Raises StoreUnreachableError where it is no such reply, or has no owner for any slot.
    """
    owners: list[Address | None] = [None] * NUM_SLOTS
    addresses: set[Address] = set()
    try:
        if not isinstance(reply, list):
            raise ValueError
        for first, last, *nodes in reply:
            # a node that does not know by which name it is reached: by the one that it was asked by
            found = [((host or b"").decode() or asked[0], int(port)) for host, port, *_ in nodes]
            if not 0 <= first <= last < NUM_SLOTS:
                raise ValueError
            owners[first : last + 1] = [found[0]] * (last + 1 - first)
            addresses.update(found)
    except (ValueError, TypeError, IndexError, AttributeError):
        said = f": {reply.text}" if isinstance(reply, ErrorReply) else ""
        raise StoreUnreachableError(f"{shown(asked)} does not say who has which slot{said}") from None
    if not addresses:
        raise StoreUnreachableError(f"{shown(asked)} is part of a cluster in which no slot has an owner")
    return owners, addresses


def redirection(error: ErrorReply, asked: Address) -> Address | None:
    """Where `MOVED` and `ASK` send those who have asked the node at `asked`."""
    if error.code not in ("MOVED", "ASK"):
        return None
    host, colon, port = error.text.split(" ")[-1].rpartition(":")
    return (host or asked[0], int(port)) if colon and port.isdecimal() else None


@dataclass(slots=True)
class _Absence:
    """Of a node."""

    reason: str
    pause_s: float
    try_s: float
    """When somebody is to try it again."""
    is_said: bool


class ClusterMap:
    """Shared by all connections to a cluster. Every method returns at once, and is for any thread; `now_s` is
    `time.monotonic()`."""

    def __init__(self, place: str, seeds: Sequence[Address]) -> None:
        self.owners: list[Address | None] = [None] * NUM_SLOTS
        self.version = 0
        """Counts the maps that have come."""
        self._place = place
        self._seeds = tuple(seeds)
        self._addresses = set(seeds)
        self._absences: dict[Address, _Absence] = {}
        self._is_stale = True
        self._pause_s = MIN_PAUSE_S
        self._ask_s = -float("inf")
        self._said_s: dict[Address, float] = {}
        self._lock = threading.Lock()

    # -- slots -----------------------------------------------------------------------------------------------

    @property
    def addresses(self) -> list[Address]:
        """All nodes, and those that the configuration names."""
        with self._lock:
            return list(self._addresses)

    def update(self, owners: list[Address | None], addresses: set[Address], now_s: float) -> None:
        """A node has said who has which slot."""
        with self._lock:
            is_other = owners != self.owners
            self.owners = owners
            self.version += 1
            self._addresses = addresses | set(self._seeds)
            for gone in self._absences.keys() - self._addresses:
                del self._absences[gone]
            self._pause_s = MIN_PAUSE_S if is_other else min(2 * self._pause_s, MAX_PAUSE_S)
            self._ask_s = now_s + self._pause_s
            # slots whose owner is away will have another one, or it comes back
            self._is_stale = any(owner is None or owner in self._absences for owner in set(owners))

    def note_moved(self, slot: int, address: Address) -> None:
        """A node has said that this slot has moved, and others may have."""
        with self._lock:
            self.owners[slot] = address
            self._addresses.add(address)
            self._note_stale()

    def note_stale(self) -> None:
        """A node has said something that cannot be so for long."""
        with self._lock:
            self._note_stale()

    def _note_stale(self) -> None:
        if not self._is_stale:
            self._is_stale, self._pause_s, self._ask_s = True, MIN_PAUSE_S, -float("inf")

    def take_turn_to_ask(self, now_s: float) -> bool:
        """Whether the caller is to ask for the map now: true for one of those who ask this at the same time."""
        if not self._is_stale or now_s < self._ask_s:
            return False
        with self._lock:
            if now_s < self._ask_s:
                return False
            self._ask_s = now_s + self._pause_s
            return True

    # -- nodes that are away -----------------------------------------------------------------------------------

    def absence(self, address: Address) -> str:
        """Why this node cannot be used; empty if it can."""
        absence = self._absences.get(address)
        return absence.reason if absence else ""

    def take_turn_to_try(self, address: Address, now_s: float) -> bool:
        """Whether the caller is to try a node that is away: as `take_turn_to_ask`."""
        with self._lock:
            absence = self._absences.get(address)
            if absence is None:
                return True
            if now_s < absence.try_s:
                return False
            absence.pause_s = min(2 * absence.pause_s, MAX_PAUSE_S)
            absence.try_s = now_s + absence.pause_s
            return True

    def note_away(self, address: Address, reason: str, now_s: float) -> None:
        with self._lock:
            if absence := self._absences.get(address):
                absence.reason = reason
                return
            is_said = now_s - self._said_s.get(address, -float("inf")) >= SAY_EVERY_S
            self._absences[address] = _Absence(reason, MIN_PAUSE_S, now_s + MIN_PAUSE_S, is_said)
            self._note_stale()
            if not is_said:
                return
            self._said_s[address] = now_s
        logger.warning(
            "kvtier: node %s of %s cannot be used, blocks in its slots are misses: %s",
            shown(address),
            self._place,
            reason,
        )

    def note_back(self, address: Address) -> None:
        if address not in self._absences:
            return
        with self._lock:
            absence = self._absences.pop(address, None)
        if absence and absence.is_said:
            logger.info("kvtier: node %s of %s is there again", shown(address), self._place)
