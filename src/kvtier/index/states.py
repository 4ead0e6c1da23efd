"""The one state machine of a slot.

Every change of a slot's state in kvtier is one of these events, applied by `BlockIndex`, which looks the states
up here: an edge that is not in the table cannot be taken.
"""

from __future__ import annotations

import enum


class SlotState(enum.Enum):
    """Where a slot stands. A slot is in exactly one state."""

    FREE = "free"
    """Holds nothing; may be handed out."""
    IN_FLIGHT = "in flight"
    """A store writes it; its key is visible as on its way."""
    READY = "ready"
    """Its key can be loaded; loads pin it."""
    RESTORED = "restored"
    """An earlier process left a block in it; its bytes have not been checked yet, so nobody may have them."""
    CONDEMNED = "condemned"
    """Invisible, and not to be handed out while a reader or writer is still at it."""


class SlotEvent(enum.Enum):
    """What may happen to a slot."""

    ALLOCATE = "allocate"
    """A store begins."""
    RESTORE = "restore"
    """A block that an earlier process stored is found again; whoever loads it checks it."""
    RECALL = "recall"
    """As RESTORE, where the bytes must be checked before anybody may have them."""
    CHECK = "check"
    """The check of a recalled block begins: until it ends, its bytes are as good as on their way."""
    FORGET = "forget"
    """A recalled block leaves without ever having been checked."""
    PUBLISH = "publish"
    """The write is complete, or the check has found the block intact."""
    ABANDON = "abandon"
    """The write failed, and its writer is done; or the check has found another block's bytes."""
    DROP = "drop"
    """An unpinned block leaves: evicted, reset, or found bad."""
    CONDEMN_WRITE = "condemn write"
    """Reset or reaped under its writer."""
    CONDEMN_READ = "condemn read"
    """Reset or found bad under its readers."""
    RELEASE = "release"
    """The last reader or writer of a condemned slot has left."""


TRANSITIONS: dict[SlotEvent, tuple[SlotState, SlotState]] = {
    SlotEvent.ALLOCATE: (SlotState.FREE, SlotState.IN_FLIGHT),
    SlotEvent.RESTORE: (SlotState.FREE, SlotState.READY),
    SlotEvent.RECALL: (SlotState.FREE, SlotState.RESTORED),
    SlotEvent.CHECK: (SlotState.RESTORED, SlotState.IN_FLIGHT),
    SlotEvent.FORGET: (SlotState.RESTORED, SlotState.FREE),
    SlotEvent.PUBLISH: (SlotState.IN_FLIGHT, SlotState.READY),
    SlotEvent.ABANDON: (SlotState.IN_FLIGHT, SlotState.FREE),
    SlotEvent.DROP: (SlotState.READY, SlotState.FREE),
    SlotEvent.CONDEMN_WRITE: (SlotState.IN_FLIGHT, SlotState.CONDEMNED),
    SlotEvent.CONDEMN_READ: (SlotState.READY, SlotState.CONDEMNED),
    SlotEvent.RELEASE: (SlotState.CONDEMNED, SlotState.FREE),
}
