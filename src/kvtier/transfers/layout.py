"""Where a page of an engine tensor lies inside a slot of the pool. Arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier.errors import ConfigurationError

SLOT_ALIGNMENT_BYTES = 4096
"""Slots are padded to this, so that every slot can be read and written with O_DIRECT."""


class PageRef(NamedTuple):
    """One engine tensor as one KV group uses it."""

    tensor_idx: int
    page_bytes: int
    """Bytes of this group's page that matter: the rest of the tensor's row is padding and is never copied."""


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """One slot: `num_ranks` stripes one behind the other, then padding.

    A stripe holds the engine tensors of one rank in order; each tensor has `blocks_per_chunk` pages of
    `page_bytes[tensor_idx]` bytes, contiguous, in the logical order of the blocks. Every group uses the same
    layout: a slot of a group that has no pages in a tensor leaves that part unused.

    Raises ConfigurationError for sizes below 1.
    """

    page_bytes: tuple[int, ...]
    """Per engine tensor: bytes of one engine block of one rank (a row)."""
    blocks_per_chunk: int
    """Engine blocks in one offloaded block (slot)."""
    num_ranks: int
    _offsets: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.page_bytes or min(self.page_bytes) < 1:
            raise ConfigurationError(f"page_bytes must be one positive size a tensor, got {self.page_bytes}")
        if self.blocks_per_chunk < 1:
            raise ConfigurationError(f"blocks_per_chunk must be at least 1, got {self.blocks_per_chunk}")
        if self.num_ranks < 1:
            raise ConfigurationError(f"num_ranks must be at least 1, got {self.num_ranks}")
        offsets = [0]
        for page_bytes in self.page_bytes:
            offsets.append(offsets[-1] + page_bytes * self.blocks_per_chunk)
        object.__setattr__(self, "_offsets", tuple(offsets))

    @property
    def stripe_bytes(self) -> int:
        """Bytes of one rank's part of a slot, without padding."""
        return self._offsets[-1]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: every rank's stripe, padded to 4096."""
        return -(-self.num_ranks * self.stripe_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES

    def tensor_offset(self, tensor_idx: int) -> int:
        """Byte offset of a tensor's first page inside a stripe."""
        if not 0 <= tensor_idx < len(self.page_bytes):
            raise IndexError(f"tensor_idx {tensor_idx} is not in 0..{len(self.page_bytes) - 1}")
        return self._offsets[tensor_idx]
