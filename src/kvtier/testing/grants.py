"""What a manager may and must accept of a store that is offered to it."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.interfaces import ManagerStats
from kvtier.keys import OffloadKey
from kvtier.testing.ledger import Request, SlotLedger
from kvtier.testing.promises import Promises


@dataclass(frozen=True)
class Grant:
    """One answer to a store."""

    stored: list[OffloadKey]
    wanted: list[OffloadKey]
    """What had to be admitted of what was offered, and what was stored, in order."""
    allowed: set[OffloadKey]
    """What a reuse filter can have admitted."""
    num_free: int
    room: int
    """Free slots, and with them those of all blocks that may leave for this store."""
    least_room: int
    """As `room`, without what hints may have pinned."""
    may_be_shut: bool
    """A circuit breaker may have refused everything."""


def check_gauges(stats: ManagerStats, ledger: SlotLedger) -> None:
    """What the manager shows is what the ledger counts."""
    gauges = {
        "capacity": (stats.capacity_blocks, ledger.capacity_blocks),
        "ready": (stats.ready_blocks, len(ledger.present)),
        "in flight": (stats.in_flight_blocks, len(ledger.in_flight())),
        "pinned": (stats.pinned_blocks, len(ledger.pinned())),
        "condemned": (stats.condemned_blocks, len(ledger.condemned())),
    }
    for name, (shown, counted) in gauges.items():
        assert shown == counted, f"{name}: the manager counts {shown} blocks, the ledger {counted}"


def check_grant(request: Request, promises: Promises, grant: Grant) -> None:
    """The leading ones of what is wanted are stored: as many as fit, or as the promises leave open."""
    stored, wanted, room = grant.stored, grant.wanted, grant.room
    most = min(len(wanted), room)
    least = min(len(wanted), grant.least_room)
    if promises.declines_stores:
        least = min(len(wanted), grant.num_free)
    if grant.may_be_shut or request.may_be_cut:
        least = 0
    if request.cut:
        most = least = 0
    if not promises.stores_prefixes and (most < len(wanted) or (not stored and len(grant.allowed) > room)):
        most = least = 0
    assert stored == wanted[: len(stored)], f"stored {stored}, which are not the first of {wanted}"
    assert least <= len(stored) <= most, f"stored {stored} of {wanted}, not {least} to {most} of them"
    assert grant.allowed.issuperset(stored), f"not asked for often enough: {set(stored) - grant.allowed}"
    if promises.stores_prefixes:
        request.cut = request.cut or len(stored) < len(wanted)
        # what the filter may or may not have admitted may or may not have been cut off
        request.may_be_cut = request.may_be_cut or not grant.allowed.issubset(stored)
