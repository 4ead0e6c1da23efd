"""Blocks whose key says nothing to another process: RAM has them, and no tier below hears of them."""

from __future__ import annotations

import pytest
from test_tiered import Engine, keys_of

from kvtier import Residency
from kvtier.keys import MAX_TIER_KEY_BYTES, OffloadKey, extend_key, get_offload_group_idx, is_private, shorten_key
from kvtier.tiers.disk import layout
from kvtier.tiers.memory import MemoryTier
from kvtier.tiers.shared import envelope


class StrictTier(MemoryTier):
    """A tier that has no place for long keys and says so."""

    def lookup(self, keys):
        assert not any(map(is_private, keys))
        return super().lookup(keys)

    def submit_store(self, job_id, keys, slots):
        accepted = [key for key in keys if not is_private(key)]
        assert list(keys[: len(accepted)]) == accepted, "a private key stands before others, which are lost by that"
        return super().submit_store(job_id, accepted, slots[: len(accepted)])


def private(keys: list[OffloadKey]) -> list[OffloadKey]:
    return [extend_key(key, b"p" * MAX_TIER_KEY_BYTES) for key in keys]


def test_a_tag_stands_between_hash_and_group():
    (key,) = keys_of("a", 1)
    tagged = extend_key(key, b"t" * 24)
    assert len({key, tagged, extend_key(key, b"u" * 24)}) == 3
    assert get_offload_group_idx(tagged) == get_offload_group_idx(key)
    assert shorten_key(tagged, len(key)) == shorten_key(key, len(key)) == key
    assert [is_private(k) for k in (key, tagged, *private([key]))] == [False, False, True]


def test_every_tier_has_place_for_what_is_not_private():
    assert {layout.MAX_KEY_BYTES, envelope.MAX_KEY_BYTES} == {MAX_TIER_KEY_BYTES}


@pytest.mark.parametrize("when", ["stored", "reused", "evicted"])
def test_they_stay_in_ram(when):
    tier = StrictTier(32)
    engine = Engine(16, [tier], cascade_when=when)
    own, shared = private(keys_of("own", 4)), keys_of("shared", 4)
    engine.compute("own", own)
    engine.compute("shared", shared)
    for name, keys in (("own again", own), ("shared again", shared)):
        engine.driver.add_request(name, keys)
        assert engine.match_in_time(name) == 4
        engine.load(name, 4)
        engine.driver.finish(name)
    engine.settle()
    if when == "evicted":
        engine.compute("more", keys_of("more", 8))
        engine.settle()
    engine.manager.flush_down()
    engine.settle()
    below = tier.get_stats().ready_blocks
    assert below == (12 if when == "evicted" else 4)
    engine.driver.add_request("gone", private(keys_of("unknown", 3)))
    assert engine.driver.match("gone") == 0


def test_a_private_block_that_leaves_ram_costs_no_other_its_way_down():
    tier = StrictTier(64)
    engine = Engine(64, [tier], cascade_when="evicted")
    own, shared = private(keys_of("own", 32)), keys_of("shared", 32)
    engine.compute("mixed", [key for pair in zip(own, shared, strict=True) for key in pair])
    engine.settle()
    in_ram = set(engine.manager.ram.ready_keys())
    assert in_ram < {*own, *shared}
    below = tier.lookup(shared)
    assert all(key in in_ram or found is Residency.READY for key, found in zip(shared, below, strict=True))
    assert engine.manager.get_stats().counters["cascade_shed_blocks"] == len(own) - len(in_ram & set(own))
