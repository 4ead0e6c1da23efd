"""Whatever somebody or something did to the files: a miss, never an exception, never wrong bytes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from disk_harness import (
    CACHE,
    CAPACITY,
    KEYS,
    NAMESPACE,
    SLOT_BYTES,
    Machine,
    check_no_slot_is_lost,
    check_serves_only_what_was_stored,
)
from kvtier.interfaces import Residency
from kvtier.keys import OffloadKey
from kvtier.testing import TierDriver
from kvtier.tiers.disk.layout import PAGE_BYTES, RECORD_BYTES, Header, data_checksum

TABLE, SLAB, EPOCH = f"{CACHE}/table", f"{CACHE}/slab", f"{CACHE}/epoch"
STORED = KEYS[:CAPACITY]


def stored_machine(**settings: object) -> Machine:
    """Six blocks in places 0 to 5, in the order of their keys, durable, and nobody has them open."""
    machine = Machine(**settings)
    driver = machine.open()
    driver.store(STORED)
    driver.close(1.0)
    return machine


def served(machine: Machine) -> list[OffloadKey]:
    """What another process gets out of the cache. It is sound afterwards."""
    driver = machine.open()
    came_back = check_serves_only_what_was_stored(driver, {key: {0} for key in STORED})
    check_no_slot_is_lost(driver)
    driver.close(1.0)
    return came_back


def flip(content: bytearray, bit: int) -> None:
    content[bit // 8] ^= 1 << bit % 8


def restore(machine: Machine, contents: dict[str, bytes]) -> None:
    for path, content in contents.items():
        machine.files.content(path)[:] = content


def contents_of(machine: Machine) -> dict[str, bytes]:
    return {path: bytes(machine.files.content(path)) for path in (TABLE, SLAB, EPOCH)}


def test_undamaged_everything_is_served() -> None:
    assert served(stored_machine()) == STORED


def test_every_bit_of_a_record() -> None:
    machine = stored_machine()
    intact = contents_of(machine)
    for bit in range(RECORD_BYTES * 8):
        restore(machine, intact)
        flip(machine.files.content(TABLE), (PAGE_BYTES + 2 * RECORD_BYTES) * 8 + bit)
        driver = machine.open()
        assert driver.ready(KEYS) == [key for key in STORED if key != STORED[2]], f"bit {bit}"
        driver.close()


def test_every_bit_of_the_header() -> None:
    machine = stored_machine()
    intact = contents_of(machine)
    used = len(Header(SLOT_BYTES, NAMESPACE, 0, 0).pack().rstrip(b"\0")) + 64
    for bit in [*range(used * 8), *range(used * 8, PAGE_BYTES * 8, 997)]:
        restore(machine, intact)
        flip(machine.files.content(TABLE), bit)
        driver = machine.open()
        assert driver.ready(KEYS) == [], f"bit {bit}"
        driver.close()


def test_every_bit_of_the_epoch() -> None:
    machine = stored_machine()
    intact = contents_of(machine)
    for bit in range(len(intact[EPOCH]) * 8):
        restore(machine, intact)
        flip(machine.files.content(EPOCH), bit)
        driver = machine.open()
        assert driver.ready(KEYS) == [], f"bit {bit}"
        driver.close()


def test_a_thousand_places_in_the_data() -> None:
    machine = stored_machine()
    driver = machine.open()
    chance = random.Random(7)
    for count in range(1, 1001):
        place = chance.randrange(CAPACITY)
        flip(machine.files.content(SLAB), place * SLOT_BYTES * 8 + chance.randrange(SLOT_BYTES * 8))
        outcome = driver.load(driver.ready(STORED))
        assert outcome.succeeded.count(False) == 1
        assert driver.tier.get_stats().counters["corrupt_blocks"] == count
        (lost,) = driver.tier.take_removed()
        assert driver.tier.lookup([lost]) == [Residency.ABSENT]
        driver.store([lost])  # its place is free again, and the only one
        assert driver.load(STORED).success
        assert all(driver.loaded_version(key, slot) == 0 for slot, key in enumerate(STORED))
    driver.tier.check_invariants()


@pytest.mark.parametrize("left_bytes", [0, 1, SLOT_BYTES - 1, SLOT_BYTES, 3 * SLOT_BYTES + 5, 6 * SLOT_BYTES - 1])
def test_a_slab_that_was_cut(left_bytes: int) -> None:
    machine = stored_machine()
    del machine.files.content(SLAB)[left_bytes:]
    assert served(machine) == STORED[: left_bytes // SLOT_BYTES]


def test_a_slab_that_is_cut_under_a_running_tier() -> None:
    machine = stored_machine()
    driver = machine.open()
    del machine.files.content(SLAB)[2 * SLOT_BYTES + 100 :]
    for slot, key in enumerate(STORED):
        assert driver.load([key]).success is (slot < 2)
    check_no_slot_is_lost(driver)


@pytest.mark.parametrize("left_bytes", [0, 100, PAGE_BYTES, PAGE_BYTES + RECORD_BYTES - 1, PAGE_BYTES + 300])
def test_a_table_that_was_cut(left_bytes: int) -> None:
    machine = stored_machine()
    del machine.files.content(TABLE)[left_bytes:]
    assert served(machine) == STORED[: max(0, left_bytes - PAGE_BYTES) // RECORD_BYTES]


def swap(content: bytearray, start: int, size: int, one: int, other: int) -> None:
    first, second = (slice(start + i * size, start + (i + 1) * size) for i in (one, other))
    content[first], content[second] = content[second], content[first]


@pytest.mark.parametrize("what", ["data", "records", "both"])
@pytest.mark.parametrize("reopen", [True, False], ids=["at rest", "while running"])
def test_swapped_slots(what: str, reopen: bool) -> None:
    machine = stored_machine()
    driver = machine.open()
    if reopen:
        driver.close()
    if what != "records":
        swap(machine.files.content(SLAB), 0, SLOT_BYTES, 1, 4)
    if what != "data":
        swap(machine.files.content(TABLE), PAGE_BYTES, RECORD_BYTES, 1, 4)
    if reopen:
        driver = machine.open()
    came_back = check_serves_only_what_was_stored(driver, {key: {0} for key in STORED})
    if reopen or what != "records":  # a running tier does not read the table
        assert came_back == [STORED[0], STORED[2], STORED[3], STORED[5]]
    check_no_slot_is_lost(driver)


def test_equal_bytes_under_another_identity_are_another_block() -> None:
    block = np.zeros(SLOT_BYTES, np.uint8)
    identities = [(key, namespace, epoch) for key in KEYS for namespace in (NAMESPACE, b"x" * 32) for epoch in (1, 2)]
    assert len({data_checksum(block, *identity) for identity in identities}) == len(identities)


def replaced_later(machine: Machine, keep: int) -> TierDriver:
    """Another process has put other blocks into the places of all but `keep` of the six."""
    driver = machine.open()
    driver.tier.touch(STORED[:keep])
    driver.store(KEYS[CAPACITY : 2 * CAPACITY - keep], version=1)
    assert driver.ready(STORED) == STORED[:keep]
    return driver


def test_a_table_from_before() -> None:
    machine = stored_machine()
    before = contents_of(machine)[TABLE]
    replaced_later(machine, keep=2).tier.close(1.0)
    machine.files.content(TABLE)[:] = before
    assert served(machine) == STORED[:2]  # the bytes of these are still there


def test_a_table_from_before_the_reset() -> None:
    machine = stored_machine()
    before = contents_of(machine)[TABLE]
    driver = machine.open()
    assert machine.reset(driver)
    driver.tier.close(1.0)
    machine.files.content(TABLE)[:] = before
    assert served(machine) == []


def test_records_from_before_the_reset() -> None:
    machine = stored_machine()
    before = contents_of(machine)[TABLE]
    driver = machine.open()
    assert machine.reset(driver)
    driver.tier.close(1.0)
    machine.files.content(TABLE)[PAGE_BYTES:] = before[PAGE_BYTES:]
    assert served(machine) == []


def test_an_epoch_from_before_the_reset() -> None:
    machine = stored_machine()
    before = contents_of(machine)[EPOCH]
    driver = machine.open()
    assert machine.reset(driver)
    driver.store(STORED, version=1)
    driver.tier.close(1.0)
    machine.files.content(EPOCH)[:] = before
    assert served(machine) == []


def test_files_of_another_cache_under_this_name() -> None:
    other_namespace = NAMESPACE[:16] + b"another one, the rest"[:16]
    machine, other = stored_machine(), stored_machine(namespace=other_namespace)
    assert other.config.epoch_path == machine.config.epoch_path
    for path in (TABLE, SLAB):
        machine.files.content(path)[:] = other.files.content(path)
    assert served(machine) == []


@pytest.mark.parametrize("name", [TABLE, SLAB, EPOCH])
def test_garbage(name: str) -> None:
    machine = stored_machine()
    content = machine.files.content(name)
    content[:] = random.Random(1).randbytes(len(content))
    assert served(machine) == []


def test_a_block_size_that_changed() -> None:
    machine = stored_machine()
    driver = machine.open(slot_bytes=2 * SLOT_BYTES)
    assert driver.ready(STORED) == []
    assert driver.store(STORED) is not None
    driver.close(1.0)
