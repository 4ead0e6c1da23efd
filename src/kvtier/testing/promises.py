"""What a manager offers, so that it is held to that and to nothing else."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Promises:
    """What a manager offers beyond the contract's safety. What it does not offer is not checked."""

    deadline_s: float | None = 5.0
    """A request waits this long and no longer. None: for as long as it takes."""
    store_timeout_s: float | None = 30.0
    """A store may take this long before it is reaped, and an eighth longer at most. None: for ever."""
    store_threshold: int = 0
    """Blocks are stored once they were asked for this often. The tracker must be larger than the set of keys."""
    stores_prefixes: bool = True
    """Of a store that does not fit the leading run is stored, the request's own blocks being spared. Otherwise the
    store is refused whole."""
    load_limits: bool = True
    """Loads say by when they must have begun."""
    events: bool = True
    """Every change of what can be loaded is told by `take_events`."""
    fences_resets: bool = True
    """Slots that a transfer uses at a reset are not handed out before it ends. Otherwise the engine must wait for
    every transfer at a reset, and does."""
    declines_stores: bool = False
    """What would need room may be declined, from some block of the store on."""
    max_kept: int = 0
    """So many blocks hints may pin. 0: hints are not checked, and not to be given."""
    declines_waits: bool = False
    """A request may be told that something is absent where it could wait for it: then for good."""
