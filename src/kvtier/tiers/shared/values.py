"""Blocks as the values of a shared store: what a store sends, and what it makes of what it receives.

A compressed value has codec `CODEC_PLANES` and, as its payload, an xxh3 of the block (8) before what the codec made.
The first checksum keeps bytes that were damaged on their way from the decompressor, the second is that of the bytes
in the RAM slot: these count.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from kvtier.tiers.shared import codec
from kvtier.tiers.shared.envelope import (
    CHECKSUM_BYTES,
    CODEC_PLANES,
    BlockChecksum,
    EnvelopeError,
    Rejection,
    check_header,
    element_bytes_in,
    header_bytes,
    header_of,
    value_bytes,
)

if TYPE_CHECKING:
    from kvtier.tiers.shared.store import BlockTransfer


def may_be_block(size: int, key_bytes: int, block_bytes: int) -> bool:
    """Whether a value of `size` bytes may be that of a block: as it is, or compressed where that can be read. O(1)."""
    if size == value_bytes(key_bytes, block_bytes):
        return True
    return codec.is_available() and _may_be_compressed(size, key_bytes, block_bytes)


def refuse_size(block: BlockTransfer, size: int) -> None:
    """Ends a load that found a value of `size` bytes, which it may not be: a miss where another engine, with a library
    that is missing here, may have compressed it."""
    if not codec.is_available() and _may_be_compressed(size, len(block.key), block.buffer.nbytes):
        block.miss()
    else:
        block.reject(Rejection.SIZE)


class OutgoingValue:
    """The value of a block that is to be stored: `header`, `payload`, and what `checksum` then says of the payload,
    which is to be told to it piece by piece as it is sent.

    The payload is the RAM slot itself, or where the transfer says how, and that makes it small enough, what is made of
    it here. To be made for every time that it is sent.
    """

    __slots__ = ("checksum", "header", "payload")

    def __init__(self, block: BlockTransfer) -> None:
        self.header = header_of(block.identity, block.key, block.buffer.nbytes)
        self.payload = block.buffer.data
        if block.encode_element_bytes:
            self._encode(block, block.encode_element_bytes)
        self.checksum = BlockChecksum(self.header)
        block.payload_bytes = len(self.payload)

    @property
    def num_bytes(self) -> int:
        """Of the whole value."""
        return len(self.header) + len(self.payload) + CHECKSUM_BYTES

    def _encode(self, block: BlockTransfer, element_bytes: int) -> None:
        begun_s = time.monotonic()
        payload = codec.encode(block.buffer, element_bytes, CHECKSUM_BYTES)
        if payload is not None:
            self.header = header_of(block.identity, block.key, block.buffer.nbytes, (CODEC_PLANES, element_bytes))
            self.payload = payload.data
            self.payload[:CHECKSUM_BYTES] = _checksum_of(block, self.header)
        block.codec_s = time.monotonic() - begun_s


class IncomingValue:
    """A value of `num_bytes` that begins with `header`, on its way into the RAM slot of the block that was asked for.

    To be filled: `payload`, all of it, told to `checksum` piece by piece as it comes. It is the RAM slot itself, or
    what `finish` makes that of. Raises EnvelopeError for what is not this block.
    """

    __slots__ = ("_block", "_element_bytes", "_header", "checksum", "payload")

    def __init__(self, block: BlockTransfer, header: bytes | bytearray, num_bytes: int) -> None:
        block_bytes = block.buffer.nbytes
        if not may_be_block(num_bytes, len(block.key), block_bytes):
            raise EnvelopeError(Rejection.SIZE)
        self._block = block
        self._header = bytes(header)
        self._element_bytes = 0
        if num_bytes == value_bytes(len(block.key), block_bytes):
            check_header(header, block.identity, block.key, block_bytes)
            self.payload = block.buffer.data
        else:
            self._element_bytes = element_bytes_in(header)
            if self._element_bytes not in codec.ELEMENT_BYTES:
                raise EnvelopeError(Rejection.CODEC)
            check_header(header, block.identity, block.key, block_bytes, (CODEC_PLANES, self._element_bytes))
            self.payload = np.empty(num_bytes - header_bytes(len(block.key)) - CHECKSUM_BYTES, np.uint8).data
        self.checksum = BlockChecksum(self._header)

    def finish(self, checksum: bytes | bytearray) -> None:
        """The payload is there, and `checksum` stood behind it. Then the RAM slot has the block. Raises EnvelopeError
        where it is not what was stored: then the slot has any bytes."""
        block = self._block
        self.checksum.check(checksum)
        if self._element_bytes:
            begun_s = time.monotonic()
            try:
                codec.decode(np.asarray(self.payload[CHECKSUM_BYTES:]), block.buffer, self._element_bytes)
            except codec.CodecError:
                raise EnvelopeError(Rejection.STREAM) from None
            if self.payload[:CHECKSUM_BYTES] != _checksum_of(block, self._header):
                raise EnvelopeError(Rejection.CHECKSUM)
            block.codec_s = time.monotonic() - begun_s
        block.payload_bytes = len(self.payload)


def _may_be_compressed(size: int, key_bytes: int, block_bytes: int) -> bool:
    least = value_bytes(key_bytes, CHECKSUM_BYTES)
    return least < size <= least + codec.MAX_SHARE * block_bytes


def _checksum_of(block: BlockTransfer, header: bytes) -> bytes:
    checksum = BlockChecksum(header)
    checksum.update(block.buffer.data)
    return checksum.value()
