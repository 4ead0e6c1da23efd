"""A block as byte planes, the highest of them compressed, and back. Needs zstandard (the extra `compression`).

    the low planes, one after the other ((element bytes - 1) * elements) | what is left of the block where its elements
    end (less than an element) | a Zstandard frame of the highest plane

Sign and exponent of the elements of a KV cache are in their highest byte, and say little; what is in the others is
noise, on which nothing is spent. Zstandard's matches are of no use there either, so its parameters are those with
which it looks for hardly any and does its entropy coding: docs/decisions/compression.md.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.errors import KVTierError


def _zstandard() -> Any:
    try:
        return importlib.import_module("zstandard")
    except ImportError:
        return None


zstandard = _zstandard()
ELEMENT_BYTES = (1, 2, 4, 8)
MAX_SHARE = 0.95
"""Of the block: what does not become so small is not worth it."""
_WINDOW_BYTES = 1 << 17

Bytes = npt.NDArray[np.uint8]


class CodecError(KVTierError):
    """What was to be decoded is not what `encode` makes of a block of that size."""


def is_available() -> bool:
    """Whether blocks can be encoded and decoded here."""
    return zstandard is not None


def encode(block: Bytes, element_bytes: int, margin_bytes: int = 0) -> Bytes | None:
    """(block bytes,) uint8 -> (fewer bytes,) uint8, which the caller owns; None if it would not shrink enough.

    `margin_bytes` before what was made of the block are the caller's to fill. Elements are of little endian. O(bytes),
    nearly all of it without the GIL.
    """
    num_elements = block.size // element_bytes
    if not num_elements:
        return None
    elements = block[: num_elements * element_bytes].view(f"<u{element_bytes}")
    top = np.empty(num_elements, np.uint8)
    _take_plane(elements, element_bytes - 1, top)
    frame = zstandard.ZstdCompressor(compression_params=_parameters()).compress(top.data)
    frame_at = block.size - num_elements
    if frame_at + len(frame) > MAX_SHARE * block.size:
        return None
    whole = np.empty(margin_bytes + frame_at + len(frame), np.uint8)
    payload = whole[margin_bytes:]
    for number in range(element_bytes - 1):
        _take_plane(elements, number, _plane(payload, number, num_elements))
    payload[num_elements * (element_bytes - 1) : frame_at] = block[num_elements * element_bytes :]
    payload[frame_at:] = np.frombuffer(frame, np.uint8)
    return whole


def decode(payload: Bytes, block: Bytes, element_bytes: int) -> None:
    """Fills `block`, (block bytes,) uint8, with that of which `encode` made `payload`, and never more than that.

    Raises CodecError where it cannot be that; then the block has any bytes. Bytes that were changed need not be
    noticed: whoever cares has a checksum. O(bytes), nearly all of it without the GIL.
    """
    num_elements = block.size // element_bytes
    frame_at = block.size - num_elements
    if not num_elements or payload.size <= frame_at:
        raise CodecError(f"a payload of {payload.size} bytes is too short for a block of {block.size}")
    top = np.empty(num_elements, np.uint8)
    _decompress(payload[frame_at:], top)
    elements = block[: num_elements * element_bytes].view(f"<u{element_bytes}")
    np.copyto(elements, top)
    for number in reversed(range(element_bytes - 1)):
        np.left_shift(elements, 8, out=elements)
        np.bitwise_or(elements, _plane(payload, number, num_elements), out=elements)
    block[num_elements * element_bytes :] = payload[num_elements * (element_bytes - 1) : frame_at]


def _take_plane(elements: npt.NDArray[Any], number: int, plane: Bytes) -> None:
    np.right_shift(elements, 8 * number, out=plane, casting="unsafe", dtype=elements.dtype)


def _plane(payload: Bytes, number: int, num_elements: int) -> Bytes:
    return payload[number * num_elements : (number + 1) * num_elements]


def _decompress(frame: Bytes, plane: Bytes) -> None:
    """Fills `plane` with what is in `frame`. What is allocated goes by what is allowed, not by what the frame says."""
    target = plane.data
    done = 0
    try:
        reader = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).stream_reader(
            frame.data, read_size=frame.size
        )
        while done < len(target):
            size = reader.readinto(target[done:])
            if not size:
                raise CodecError(f"the plane ends after {done} of {len(target)} bytes")
            done += size
        if reader.read(1):
            raise CodecError(f"the plane has more than {len(target)} bytes")
    except zstandard.ZstdError as error:
        raise CodecError(f"the plane cannot be decompressed: {error}") from None


@cache
def _parameters() -> Any:
    # a hash table that small finds few matches, quickly; `target_length=0`: literals are entropy coded
    return zstandard.ZstdCompressionParameters(
        window_log=17,
        hash_log=6,
        chain_log=6,
        search_log=1,
        min_match=7,
        target_length=0,
        strategy=zstandard.STRATEGY_FAST,
    )
