"""Block keys: a chained hash and a group index, and back."""

import pytest

from kvtier import get_offload_block_hash, get_offload_group_idx, make_offload_key


@pytest.mark.parametrize("block_hash", [b"", b"\x00" * 32, b"\xff\x00\x01" * 7])
@pytest.mark.parametrize("group_idx", [0, 1, 255, 256, 2**32 - 1])
def test_parts_come_back(block_hash, group_idx):
    key = make_offload_key(block_hash, group_idx)
    assert get_offload_block_hash(key) == block_hash
    assert get_offload_group_idx(key) == group_idx


def test_key_is_plain_bytes_ending_in_the_big_endian_group():
    key = make_offload_key(b"hash", 258)
    assert type(key) is bytes
    assert key == b"hash\x00\x00\x01\x02"


def test_groups_of_one_hash_are_different_blocks():
    assert len({make_offload_key(b"hash", group) for group in range(5)}) == 5


@pytest.mark.parametrize("group_idx", [-1, 2**32])
def test_group_outside_four_bytes_is_refused(group_idx):
    with pytest.raises(OverflowError):
        make_offload_key(b"hash", group_idx)
