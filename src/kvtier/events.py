"""What a manager tells those who mirror its contents (vLLM's KV events, routers)."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.keys import OffloadKey


@dataclass(slots=True)
class OffloadingEvent:
    """One batch of blocks that became loadable (`removed=False`) or stopped being so (`removed=True`).

    `medium` is the tier's name, as `LoadStoreSpec.medium()` of that tier gives it.
    """

    keys: list[OffloadKey]
    medium: str
    removed: bool
