"""What is where: slots, their states and generations, and the keys that are visible through them."""

from kvtier.index.blocks import BlockIndex
from kvtier.index.states import TRANSITIONS, SlotEvent, SlotState

__all__ = ["TRANSITIONS", "BlockIndex", "SlotEvent", "SlotState"]
