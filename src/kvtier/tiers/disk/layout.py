"""What lies where in a cache's folder: names, header, records, checksums. No I/O.

    DIR/lock                       held while space is divided between the caches in DIR
    DIR/cache-<namespace>/lock     held for the life of the tier that owns the cache
    DIR/cache-<namespace>/epoch    the weight epoch (in the first folder of a tier)
    DIR/cache-<namespace>/table    a header of 4 KiB, then one record of 128 bytes a place
    DIR/cache-<namespace>/slab     the places, `place_bytes` each

Records and header carry a checksum over all of their other bytes and over their position, so whatever was torn,
moved or left by another version is simply not there.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.keys import OffloadKey

PAGE_BYTES = 4096
RECORD_BYTES = 128
MAX_KEY_BYTES = 64
CACHE_PREFIX = "cache-"
LOCK_NAME = "lock"
EPOCH_NAME = "epoch"
TABLE_NAME = "table"
SLAB_NAME = "slab"
OVERHEAD_BYTES = 6 * PAGE_BYTES
"""In a folder, besides slab, header and records: two lock files, the epoch and its successor, two folders."""

FREE = 0
READY = 1

RECORD = np.dtype(
    [
        ("state", "<u2"),
        ("key_bytes", "<u2"),
        ("num_uses", "<u4"),  # since the store
        ("key", f"V{MAX_KEY_BYTES}"),
        ("generation", "<u8"),  # number of the allocation, never used again in this cache
        ("epoch", "<u8"),
        ("data_checksum", "<u8"),
        ("use_order", "<u8"),  # greater: used later
        ("stored_at_s", "<u4"),  # Unix time
        ("used_at_s", "<u4"),
        ("namespace", "<u8"),  # its first bytes
        ("checksum", "<u8"),
    ]
)
assert RECORD.itemsize == RECORD_BYTES
Records = npt.NDArray[Any]
"""(n,) of `RECORD`."""

_HEADER = struct.Struct("<8sIIQQ32sQQ128s")
_HEADER_CHECKSUM = struct.Struct("<Q")
_MAGIC = b"kvtierD\n"
_VERSION = 1
_NUM_WORDS = RECORD_BYTES // 8 - 1
_CHUNK_RECORDS = 2048
"""Checksums are computed so many records at a time: what that takes stays in the cache."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_WORD_KEYS = (np.arange(1, _NUM_WORDS + 1, dtype=np.uint64) * _GOLDEN) | np.uint64(1)


@dataclass(frozen=True, slots=True)
class Header:
    """What every block of a cache has in common."""

    block_bytes: int
    namespace: bytes
    """32 bytes."""
    epoch: int
    created_at_s: int
    label: str = ""
    """For people: the model's name, say."""

    @property
    def place_bytes(self) -> int:
        """What a block takes in the slab: whole pages."""
        return round_up(self.block_bytes)

    def pack(self) -> bytes:
        """One page."""
        label = self.label.encode()[:128]
        fields = (_MAGIC, _VERSION, RECORD_BYTES, self.block_bytes, self.place_bytes)
        body = _HEADER.pack(*fields, self.namespace, self.epoch, self.created_at_s, label)
        return (body + _HEADER_CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))).ljust(PAGE_BYTES, b"\0")

    @classmethod
    def unpack(cls, page: bytes) -> Header | None:
        """The header in `page`, or None for anything that `pack` of this version did not write."""
        body, rest = page[: _HEADER.size], page[_HEADER.size :]
        if len(page) < PAGE_BYTES or rest[:8] != _HEADER_CHECKSUM.pack(xxhash.xxh3_64_intdigest(body)):
            return None
        magic, version, record_bytes, block_bytes, place_bytes, namespace, epoch, created, label = _HEADER.unpack(body)
        if (magic, version, record_bytes) != (_MAGIC, _VERSION, RECORD_BYTES) or any(rest[8:]):
            return None
        header = cls(block_bytes, namespace, epoch, created, label.rstrip(b"\0").decode(errors="replace"))
        return header if header.place_bytes == place_bytes else None


def round_up(num_bytes: int) -> int:
    """`num_bytes` as whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def table_bytes(num_places: int) -> int:
    """Size of a table: header and records."""
    return PAGE_BYTES + round_up(num_places * RECORD_BYTES)


def cache_bytes(num_places: int, place_bytes: int) -> int:
    """All that a cache of so many places takes in its folder."""
    return OVERHEAD_BYTES + table_bytes(num_places) + num_places * place_bytes


def places_within(budget_bytes: int, place_bytes: int) -> int:
    """The most places of a cache that takes no more than `budget_bytes`; 0 if not even one fits."""
    num_places = max(0, (budget_bytes - OVERHEAD_BYTES - PAGE_BYTES) // (place_bytes + RECORD_BYTES))
    while num_places and cache_bytes(num_places, place_bytes) > budget_bytes:
        num_places -= 1
    return num_places


def cache_folder(namespace: bytes, rank: int = 0) -> str:
    """Name of the subfolder of this namespace's cache."""
    return CACHE_PREFIX + namespace[:16].hex() + (f"-rank{rank}" if rank else "")


def namespace_tag(namespace: bytes) -> int:
    """What records carry of their namespace."""
    return int.from_bytes(namespace[:8], "little")


def record_offset(place: int) -> int:
    """Where in the table the record of a place lies."""
    return PAGE_BYTES + place * RECORD_BYTES


def record_checksums(records: Records, places: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """(n,) checksum of each record as the record of `places[i]`.

    A sum over the record's words, each mixed by a bijection of its own (the finaliser of MurmurHash3): one changed
    word always changes the sum. In NumPy, for all records at once: 100,000 in a few milliseconds.
    """
    words = np.ascontiguousarray(records).view(np.uint64).reshape(-1, _NUM_WORDS + 1)
    total = _mixed(places.astype(np.uint64) + _GOLDEN)
    for start in range(0, len(words), _CHUNK_RECORDS):
        chunk = words[start : start + _CHUNK_RECORDS, :_NUM_WORDS] ^ _WORD_KEYS
        total[start : start + _CHUNK_RECORDS] += _mixed(chunk).sum(axis=1, dtype=np.uint64)
    return total


def seal(records: Records, places: npt.NDArray[np.int64]) -> None:
    """Sets the checksums of `records`, in place."""
    records["checksum"] = record_checksums(records, places)


def valid_places(records: Records, namespace: bytes, epoch: int) -> npt.NDArray[np.int64]:
    """Ascending indexes of the records that are intact, ready, and of this namespace and epoch."""
    places = np.flatnonzero(records["state"] == READY)
    if len(places) < len(records):
        records = records[places]
    good = record_checksums(records, places) == records["checksum"]
    good &= (records["epoch"] == epoch) & (records["namespace"] == namespace_tag(namespace))
    good &= records["key_bytes"] <= MAX_KEY_BYTES
    valid: npt.NDArray[np.int64] = places[good]
    return valid


def record_keys(raw: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> list[OffloadKey]:
    """The keys in the fields `key` and `key_bytes` of (n,) records."""
    length = int(lengths[0]) if len(lengths) else 0
    if length and (lengths == length).all():  # nearly always
        column = np.ascontiguousarray(np.ascontiguousarray(raw).view(np.uint8).reshape(-1, MAX_KEY_BYTES)[:, :length])
        whole: list[OffloadKey] = column.view(f"V{length}").ravel().tolist()
        return whole
    return [OffloadKey(key[:size]) for key, size in zip(raw.tolist(), lengths.tolist(), strict=True)]


def data_checksum(block: npt.NDArray[np.uint8], key: OffloadKey, namespace: bytes, epoch: int) -> int:
    """xxh3 of the block's bytes, seeded with its identity: the same bytes under another key do not match."""
    seed = xxhash.xxh3_64_intdigest(namespace + epoch.to_bytes(8, "little") + key)
    return xxhash.xxh3_64_intdigest(cast(Any, block), seed)


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Changes `words`, and returns them."""
    words ^= words >> np.uint64(33)
    words *= np.uint64(0xFF51AFD7ED558CCD)
    words ^= words >> np.uint64(33)
    words *= np.uint64(0xC4CEB9FE1A85EC53)
    words ^= words >> np.uint64(33)
    return words
