"""Block keys: a chained block hash plus the KV-cache group that the block belongs to.

A key is plain `bytes`, so that dictionaries hash and compare it at C speed and the garbage collector never
looks at it. The last four bytes are the group index, big endian.
"""

from __future__ import annotations

from typing import NewType

OffloadKey = NewType("OffloadKey", bytes)

MAX_TIER_KEY_BYTES = 64
"""Longer keys are private to the process: such blocks stay in RAM."""

_GROUP_INDEX_BYTES = 4


def make_offload_key(block_hash: bytes, group_idx: int) -> OffloadKey:
    """Key of the block with this chained hash in KV-cache group `group_idx` (0 <= group_idx < 2**32).

    Raises OverflowError for a group index outside that range.
    """
    return OffloadKey(block_hash + group_idx.to_bytes(_GROUP_INDEX_BYTES, "big"))


def get_offload_block_hash(key: OffloadKey) -> bytes:
    """The chained block hash inside `key`."""
    return key[:-_GROUP_INDEX_BYTES]


def get_offload_group_idx(key: OffloadKey) -> int:
    """The KV-cache group index inside `key`."""
    return int.from_bytes(key[-_GROUP_INDEX_BYTES:], "big")


def extend_key(key: OffloadKey, tag: bytes) -> OffloadKey:
    """The key of the same block made by other weights, those that `tag` names: the tag stands behind the hash."""
    return OffloadKey(key[:-_GROUP_INDEX_BYTES] + tag + key[-_GROUP_INDEX_BYTES:])


def shorten_key(key: OffloadKey, num_bytes: int) -> OffloadKey:
    """The key of `num_bytes` that `key` was before `extend_key`; `key` itself where it is no longer than that."""
    if len(key) <= num_bytes:
        return key
    return OffloadKey(key[: num_bytes - _GROUP_INDEX_BYTES] + key[-_GROUP_INDEX_BYTES:])


def is_private(key: OffloadKey) -> bool:
    """Whether a block stays in RAM, since its key says nothing to another process."""
    return len(key) > MAX_TIER_KEY_BYTES
