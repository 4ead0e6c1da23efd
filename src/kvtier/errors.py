"""Typed errors. Each names the thing, the value it had and what is allowed.

Traffic never raises: these are for misuse by a caller (a bug in the engine side) and for bad configuration
(before anything has started). An error leaves the state of the object that raised it unchanged.
"""

from __future__ import annotations


class KVTierError(Exception):
    """Base of every error that kvtier raises on purpose."""


class ConfigurationError(KVTierError, ValueError):
    """A setting that cannot work. Nothing has been started or allocated."""


class ManagerUsageError(KVTierError, ValueError):
    """The caller broke the manager's contract. The manager's state is unchanged."""


class BlockNotReadyError(ManagerUsageError):
    """A load was prepared for a block that is not ready."""


class BlockNotPinnedError(ManagerUsageError):
    """A load was completed for a block that no load has pinned."""


class DuplicateKeyError(ManagerUsageError):
    """One call named the same key twice."""


class InvariantError(KVTierError, AssertionError):
    """`check_invariants()` found a recount that does not match. This is a bug in kvtier."""


class PoolError(KVTierError, OSError):
    """The RAM pool could not be created, reserved or attached."""


class TransferError(KVTierError):
    """A transfer job was described wrongly: out of range, or for another layout."""


class TierError(KVTierError, OSError):
    """A tier's medium could not be opened, is in use by another process, or could not make an epoch durable."""


class SimulationError(KVTierError, AssertionError):
    """A simulated run broke a promise: a bug in what was simulated, or in the simulation.

    `seed` and `step` say where; `command` repeats it.
    """

    def __init__(self, seed: int, step: int, what: str, command: str) -> None:
        super().__init__(f"seed {seed}, step {step}: {what}; to repeat it: {command}")
        self.seed = seed
        self.step = step
        self.what = what
        self.command = command
