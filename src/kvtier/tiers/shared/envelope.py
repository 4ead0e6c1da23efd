"""What lies in a shared store: one value a block, with a header and a checksum, and the name it lies under.

    magic (8) | format version (2) | codec (1) | element bytes (1) | namespace (32) | epoch (8) | reset salt (8)
    | key bytes (2) | block bytes (8) | key | the payload | xxh3 of the payload, seeded with that of the header (8)

Little endian. The payload is the block, or what `kvtier.tiers.shared.values` makes of it: its length is the value's,
less the rest. The checksum stands last, so that a block is hashed piece by piece as it is moved, while it is in the
processor's cache. Anybody can have written a value: nothing in it is used before the header says what the reader
expects and the checksum holds.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import StrEnum

import xxhash

from kvtier.errors import ConfigurationError, KVTierError
from kvtier.keys import OffloadKey

MAGIC = b"kvtier\x00\xb1"
FORMAT_VERSION = 1
CODEC_NONE = 0
"""The block's bytes as they are; no element bytes."""
CODEC_PLANES = 1
"""Byte planes of its elements, the highest of them compressed; see `kvtier.tiers.shared.codec`."""
NAMESPACE_BYTES = 32
SALT_BYTES = 8
MAX_KEY_BYTES = 64

_FIXED = struct.Struct("<8sHBB32sQ8sHQ")
_ELEMENT_BYTES_AT = struct.calcsize("<8sHB")
_CHECKSUM = struct.Struct("<Q")
CHECKSUM_BYTES = _CHECKSUM.size


class Rejection(StrEnum):
    """Why a value is not the block that was asked for."""

    SIZE = "the value has another size than the block"
    MAGIC = "the value is not kvtier's"
    VERSION = "the value has another format version"
    CODEC = "the value has an unknown codec"
    IDENTITY = "the value is of another namespace or weight epoch"
    KEY = "the value is of another key"
    LENGTH = "the value's block has another length"
    CHECKSUM = "the bytes are not those that were stored"
    STREAM = "the payload cannot be decompressed into the block"


class EnvelopeError(KVTierError):
    """A value that is not the block that was asked for. Never leaves the threads of a tier: there it is a miss."""

    def __init__(self, rejection: Rejection) -> None:
        super().__init__(str(rejection))
        self.rejection = rejection


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose blocks these are: only what agrees in all three may be exchanged."""

    namespace: bytes
    """32 bytes: digest of everything that makes two engines' bytes interchangeable."""
    epoch: int
    """Weight epoch, 0 <= epoch < 2**64."""
    salt: bytes = bytes(SALT_BYTES)
    """8 bytes. Zeros for the weights that the namespace names. After a reset the weights may be others, which two
    processes with equal epochs need not share: then random."""

    def __post_init__(self) -> None:
        if len(self.namespace) != NAMESPACE_BYTES:
            raise ConfigurationError(f"the namespace has {len(self.namespace)} bytes; allowed: {NAMESPACE_BYTES}")
        if len(self.salt) != SALT_BYTES:
            raise ConfigurationError(f"the reset salt has {len(self.salt)} bytes; allowed: {SALT_BYTES}")
        if not 0 <= self.epoch < 2**64:
            raise ConfigurationError(f"the weight epoch is {self.epoch}; allowed: 0 or more, below 2**64")

    @property
    def path(self) -> bytes:
        """What the names of all of its blocks begin with, in ASCII; for people and expiry rules. The header, which has
        the namespace in full, is what counts."""
        return b"v%d:%s:%x-%s:" % (
            FORMAT_VERSION,
            self.namespace[:16].hex().encode(),
            self.epoch,
            self.salt.hex().encode(),
        )


def value_bytes(key_bytes: int, block_bytes: int) -> int:
    """Size of the value of a block of `block_bytes`, as it is, whose key has `key_bytes`."""
    return header_bytes(key_bytes) + block_bytes + CHECKSUM_BYTES


def header_bytes(key_bytes: int) -> int:
    """Size of what stands before the payload."""
    return _FIXED.size + key_bytes


def header_of(
    identity: Identity, key: OffloadKey, block_bytes: int, coding: tuple[int, int] = (CODEC_NONE, 0)
) -> bytes:
    """What stands before the payload. `coding`: the codec, and the bytes of the block's elements where that matters."""
    fixed = _FIXED.pack(
        MAGIC,
        FORMAT_VERSION,
        *coding,
        identity.namespace,
        identity.epoch,
        identity.salt,
        len(key),
        block_bytes,
    )
    return fixed + key


class BlockChecksum:
    """Of a block or payload after `header`, piece by piece. O(bytes), without the GIL for pieces of 128 KiB and up."""

    def __init__(self, header: bytes) -> None:
        self._state = xxhash.xxh3_64(seed=xxhash.xxh3_64_intdigest(header))

    def update(self, piece: memoryview) -> None:
        self._state.update(piece)

    def value(self) -> bytes:
        """What stands after the payload."""
        return _CHECKSUM.pack(self._state.intdigest())

    def check(self, checksum: bytes | bytearray | memoryview) -> None:
        """Raises EnvelopeError unless this is what stands after the payload."""
        if checksum != self.value():
            raise EnvelopeError(Rejection.CHECKSUM)


def element_bytes_in(header: bytes | bytearray) -> int:
    """What `header` says about the elements, true or not; 0 where it is too short to say."""
    return header[_ELEMENT_BYTES_AT] if len(header) > _ELEMENT_BYTES_AT else 0


def check_header(
    header: bytes | bytearray,
    identity: Identity,
    key: OffloadKey,
    block_bytes: int,
    coding: tuple[int, int] = (CODEC_NONE, 0),
) -> None:
    """Raises EnvelopeError unless `header` announces this very block, in this coding. O(1)."""
    if header == header_of(identity, key, block_bytes, coding):
        return
    if len(header) < _FIXED.size:
        raise EnvelopeError(Rejection.SIZE)
    magic, version, *stored_coding, namespace, epoch, salt, key_bytes, length = _FIXED.unpack_from(header)
    wrong = (
        (magic != MAGIC, Rejection.MAGIC),
        (version != FORMAT_VERSION, Rejection.VERSION),
        (tuple(stored_coding) != coding, Rejection.CODEC),
        ((namespace, epoch, salt) != (identity.namespace, identity.epoch, identity.salt), Rejection.IDENTITY),
        (key_bytes != len(key) or header[_FIXED.size : _FIXED.size + len(key)] != key, Rejection.KEY),
        (length != block_bytes, Rejection.LENGTH),
    )
    raise EnvelopeError(next((rejection for is_wrong, rejection in wrong if is_wrong), Rejection.VERSION))
