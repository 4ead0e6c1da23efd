"""Values of the envelope as one buffer, for clients that send and receive nothing smaller."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvtier.tiers.shared.envelope import CHECKSUM_BYTES, EnvelopeError, header_bytes
from kvtier.tiers.shared.store import BlockTransfer
from kvtier.tiers.shared.values import IncomingValue, OutgoingValue, may_be_block, refuse_size

PIECE_BYTES = 256 << 10
"""A block is copied, and hashed while that is in the processor's cache, in pieces up to this size."""


def seal(outgoing: OutgoingValue, value: npt.NDArray[np.uint8]) -> None:
    """Fills `value`, (outgoing.num_bytes,) uint8. O(bytes), mostly without the GIL."""
    begin, end = len(outgoing.header), value.nbytes - CHECKSUM_BYTES
    value[:begin] = np.frombuffer(outgoing.header, np.uint8)
    body, payload = value[begin:end], np.asarray(outgoing.payload)
    for piece in _pieces(payload.nbytes):
        np.copyto(body[piece], payload[piece])
        outgoing.checksum.update(body[piece].data)  # what is sent, not what the slot has by now
    value[end:] = np.frombuffer(outgoing.checksum.value(), np.uint8)


def unseal(value: npt.NDArray[np.uint8], block: BlockTransfer) -> None:
    """Fills the slot of the block from `value`, and says in the block how that went: the checksum is of what is in the
    slot. O(bytes), mostly without the GIL."""
    if not may_be_block(value.nbytes, len(block.key), block.buffer.nbytes):
        refuse_size(block, value.nbytes)
        return
    begin, end = header_bytes(len(block.key)), value.nbytes - CHECKSUM_BYTES
    try:
        incoming = IncomingValue(block, value[:begin].tobytes(), value.nbytes)
        body, payload = value[begin:end], np.asarray(incoming.payload)
        for piece in _pieces(payload.nbytes):
            np.copyto(payload[piece], body[piece])
            incoming.checksum.update(payload[piece].data)
        incoming.finish(value[end:].tobytes())
    except EnvelopeError as error:
        block.reject(error.rejection)
    else:
        block.succeed(block.buffer.nbytes)


def _pieces(size: int) -> Iterator[slice]:
    for begin in range(0, size, PIECE_BYTES):
        yield slice(begin, min(begin + PIECE_BYTES, size))
