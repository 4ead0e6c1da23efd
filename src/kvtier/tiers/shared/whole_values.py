"""Values of the envelope as one buffer, for clients that send and receive nothing smaller."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvtier.tiers.shared.envelope import (
    CHECKSUM_BYTES,
    BlockChecksum,
    EnvelopeError,
    Rejection,
    check_header,
    header_of,
    value_bytes,
)
from kvtier.tiers.shared.store import BlockTransfer

PIECE_BYTES = 256 << 10
"""A block is copied, and hashed while that is in the processor's cache, in pieces up to this size."""


def size_of(block: BlockTransfer) -> int:
    """Bytes of the value of a block."""
    return value_bytes(len(block.key), block.buffer.nbytes)


def seal(block: BlockTransfer, value: npt.NDArray[np.uint8]) -> None:
    """Fills `value`, (size_of(block),) uint8, from the slot of the block. O(bytes), mostly without the GIL."""
    header = header_of(block.identity, block.key, block.buffer.nbytes)
    checksum = BlockChecksum(header)
    begin, end = len(header), len(header) + block.buffer.nbytes
    value[:begin] = np.frombuffer(header, np.uint8)
    body = value[begin:end]
    for piece in _pieces(block.buffer.nbytes):
        np.copyto(body[piece], block.buffer[piece])
        checksum.update(body[piece].data)  # what is sent, not what the slot has by now
    value[end:] = np.frombuffer(checksum.value(), np.uint8)


def unseal(value: npt.NDArray[np.uint8], block: BlockTransfer) -> None:
    """Fills the slot of the block from `value`, and says in the block how that went: the checksum is of what is in the
    slot. O(bytes), mostly without the GIL."""
    if value.nbytes != size_of(block):
        block.reject(Rejection.SIZE)
        return
    end = value.nbytes - CHECKSUM_BYTES
    begin = end - block.buffer.nbytes
    header = value[:begin].tobytes()
    try:
        check_header(header, block.identity, block.key, block.buffer.nbytes)
        checksum = BlockChecksum(header)
        body = value[begin:end]
        for piece in _pieces(block.buffer.nbytes):
            np.copyto(block.buffer[piece], body[piece])
            checksum.update(block.buffer[piece].data)
        checksum.check(value[end:].tobytes())
    except EnvelopeError as error:
        block.reject(error.rejection)
    else:
        block.succeed(block.buffer.nbytes)


def _pieces(size: int) -> Iterator[slice]:
    for begin in range(0, size, PIECE_BYTES):
        yield slice(begin, min(begin + PIECE_BYTES, size))
