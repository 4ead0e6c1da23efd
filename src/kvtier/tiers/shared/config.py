"""What every shared tier can be told."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.errors import ConfigurationError
from kvtier.tiers.shared.codec import ELEMENT_BYTES
from kvtier.tiers.shared.compressor import MODES
from kvtier.tiers.shared.envelope import Identity

MAX_RUN_BYTES = 4 << 20
"""Blocks of one job are moved in one operation up to this size."""
MIN_ABSENT_S = 0.05


@dataclass(frozen=True, slots=True)
class ThreadLimits:
    """How many and how long. Seconds are of single operations."""

    num_connections: int
    """Threads that move blocks, a connection each; the last one for loads alone."""
    max_run_blocks: int
    """Moved in one operation at most."""
    block_bytes: int
    connect_timeout_s: float
    lookup_timeout_s: float
    transfer_timeout_s: float
    queue_timeout_s: float
    """A block that could not begin by then fails."""
    min_backoff_s: float = 0.1
    max_backoff_s: float = 5.0


@dataclass(frozen=True, slots=True)
class SharedConfig:
    """What every shared tier can be told. Checked when made: raises ConfigurationError. Seconds throughout."""

    namespace: bytes
    """32 bytes: digest of everything that makes two engines' bytes interchangeable."""
    num_connections: int = 4
    """For moving blocks, a thread each; one more asks."""
    connect_timeout_s: float = 1.0
    lookup_timeout_s: float = 0.5
    """A look-up that was not answered by then is answered with absent."""
    transfer_timeout_s: float = 2.0
    """One operation on `MAX_RUN_BYTES` of blocks, or one block."""
    queue_timeout_s: float = 5.0
    """A block whose transfer could not begin by then fails."""
    present_s: float = 10.0
    """How long a block is believed to be there."""
    absent_s: float = 1.0
    """How long a block is believed to be absent: so long another engine's store may go unnoticed. An answer that is
    too old when the engine asks again is no answer, so this has to be longer than what passes between two polls."""
    max_keys: int = 1 << 16
    """Remembered as there, as absent, and asked for at once, each."""
    max_storing_bytes: int = 256 << 20
    """Blocks that wait to be stored hold RAM slots; beyond this, further stores are refused."""
    compression: str = "off"
    """Of what this engine stores: `off`, `on`, or `auto`, while it pays on this link. What others have compressed is
    read in any case. See docs/decisions/compression.md."""
    element_bytes: int = 2
    """Of the KV cache's elements: 2 for bf16 and fp16, 4 for fp32, 1 for fp8. Where they are others, blocks shrink
    less."""

    def __post_init__(self) -> None:
        Identity(self.namespace, 0)
        for name in ("num_connections", "max_keys", "max_storing_bytes"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; allowed: 1 or more")
        for name in ("connect_timeout_s", "lookup_timeout_s", "transfer_timeout_s", "queue_timeout_s", "present_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigurationError(f"{name} is {getattr(self, name)}; allowed: more than 0 seconds")
        for name, choices in (("compression", MODES), ("element_bytes", ELEMENT_BYTES)):
            if getattr(self, name) not in choices:
                allowed = ", ".join(map(str, choices))
                raise ConfigurationError(f"{name} is {getattr(self, name)!r}; allowed: {allowed}")
        if not MIN_ABSENT_S <= self.absent_s < float("inf"):
            raise ConfigurationError(f"absent_s is {self.absent_s}; allowed: {MIN_ABSENT_S} or more seconds")

    def thread_limits(self, block_bytes: int) -> ThreadLimits:
        """Of this for the threads, which move blocks of `block_bytes`."""
        return ThreadLimits(
            num_connections=self.num_connections,
            max_run_blocks=max(1, MAX_RUN_BYTES // block_bytes),
            block_bytes=block_bytes,
            connect_timeout_s=self.connect_timeout_s,
            lookup_timeout_s=self.lookup_timeout_s,
            transfer_timeout_s=self.transfer_timeout_s,
            queue_timeout_s=self.queue_timeout_s,
        )
