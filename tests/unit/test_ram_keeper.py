"""What a persisted RAM pool brings back: whole blocks under their own keys, or nothing, whatever is in the file."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from kvtier.keys import OffloadKey
from kvtier.tiers import ram_keeper
from kvtier.tiers.disk.layout import PAGE_BYTES, RECORD_BYTES
from kvtier.tiers.ram_persist import index_bytes
from persist_harness import KEYS, NUM_SLOTS, SLOT_BYTES, Process, content

NUM_KILLS = 40


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kvtier-ram-test"


def assert_loads_only_whole_blocks(path: Path, keys: list[OffloadKey]) -> dict[OffloadKey, bytes]:
    """A new process gives the right bytes of each block, or none. What it gives."""
    process = Process(path)
    loaded = process.load(keys)
    for key, found in loaded.items():
        assert found == content(key).tobytes(), key.hex()
    process.core.check_invariants()
    process.store(keys)
    assert process.find(keys[:NUM_SLOTS]) == keys[:NUM_SLOTS], "a miss is stored again"
    process.stop()
    return loaded


# -- damage -------------------------------------------------------------------------------------------------


def test_any_flipped_bit_is_a_miss(path: Path, tmp_path: Path) -> None:
    first = Process(path)
    first.store(KEYS[:5])
    first.flush()
    whole = first.image(tmp_path / "whole").read_bytes()
    first.stop()
    chance = random.Random(3)
    offset = index_bytes(NUM_SLOTS)
    in_records = [PAGE_BYTES + slot * RECORD_BYTES + chance.randrange(RECORD_BYTES) for slot in range(5) for _ in "abc"]
    in_slots = [offset + slot * SLOT_BYTES + chance.randrange(SLOT_BYTES) for slot in range(5) for _ in "abc"]
    for at in (*in_records, *in_slots):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << chance.randrange(8)
        image = tmp_path / "image"
        image.write_bytes(damaged)
        image.chmod(0o600)
        loaded = assert_loads_only_whole_blocks(image, KEYS[:8])
        slot = (at - offset) // SLOT_BYTES if at >= offset else (at - PAGE_BYTES) // RECORD_BYTES
        assert loaded.keys() == set(KEYS[:5]) - {KEYS[slot]}


def test_rubbish_in_the_use_counters_costs_the_order_alone(path: Path) -> None:
    first = Process(path)
    first.store(KEYS[:5])
    first.stop()
    with path.open("r+b") as file:
        file.seek(PAGE_BYTES + 4096)
        file.write(b"\xff" * 8 * NUM_SLOTS)
    assert assert_loads_only_whole_blocks(path, KEYS[:5]).keys() == set(KEYS[:5])


@pytest.mark.parametrize("what", ["records", "slots"])
def test_two_blocks_that_changed_places(path: Path, what: str) -> None:
    first = Process(path)
    first.store(KEYS[:5])
    first.stop()
    size, start = (RECORD_BYTES, PAGE_BYTES) if what == "records" else (SLOT_BYTES, index_bytes(NUM_SLOTS))
    data = bytearray(path.read_bytes())
    one, two = slice(start, start + size), slice(start + size, start + 2 * size)
    data[one], data[two] = data[two], data[one]
    path.write_bytes(data)
    assert assert_loads_only_whole_blocks(path, KEYS[:5]).keys() == set(KEYS[2:5])


def test_a_record_of_another_life_of_the_file(path: Path) -> None:
    """The file was emptied in between: equal key, equal slot, other epoch."""
    first = Process(path)
    first.store(KEYS[:5])
    first.stop()
    records = path.read_bytes()[PAGE_BYTES : PAGE_BYTES + 5 * RECORD_BYTES]
    second = Process(path)
    second.core.reset_cache()
    second.stop()
    third = Process(path)
    third.stop()
    with path.open("r+b") as file:
        file.seek(PAGE_BYTES)
        file.write(records)
    assert assert_loads_only_whole_blocks(path, KEYS[:5]) == {}


# -- when a record is valid ---------------------------------------------------------------------------------


def test_a_record_is_void_before_its_slot_is_written(path: Path, tmp_path: Path) -> None:
    first = Process(path)
    first.store(KEYS[:NUM_SLOTS])
    first.flush()
    context = first.context()
    spec = first.begin_store(KEYS[10:13], context)
    evicted = set(KEYS[:NUM_SLOTS]) - {key for key in KEYS[:NUM_SLOTS] if first.ram.residency(key).value == "ready"}
    assert len(evicted) == 3
    second = Process(first.image(tmp_path / "granted"))
    assert second.restored == set(KEYS[:NUM_SLOTS]) - evicted
    second.stop()
    first.write(spec)
    second = Process(first.image(tmp_path / "written"))
    assert second.restored == set(KEYS[:NUM_SLOTS]) - evicted, "nobody has said that they are whole"
    second.stop()
    first.core.complete_store(spec.keys, context, True, spec)
    first.flush()
    second = Process(first.image(tmp_path / "completed"))
    assert second.restored == (set(KEYS[:NUM_SLOTS]) - evicted) | set(KEYS[10:13])
    second.stop()
    first.stop()


def test_a_store_that_failed_leaves_no_record(path: Path) -> None:
    first = Process(path)
    first.store(KEYS[:3], success=False)
    first.store(KEYS[3:5])
    first.stop()
    assert assert_loads_only_whole_blocks(path, KEYS[:5]).keys() == set(KEYS[3:5])


def test_a_block_whose_load_failed_leaves_no_record(path: Path, tmp_path: Path) -> None:
    first = Process(path)
    first.store(KEYS[:5])
    first.flush()
    context = first.context()
    spec = first.core.prepare_load(KEYS[:2], context)
    first.core.complete_load(KEYS[:2], context, success=False, spec=spec)
    second = Process(first.image(tmp_path / "image"))
    assert second.restored == set(KEYS[2:5])
    second.stop()
    first.stop()


def test_no_record_for_a_slot_that_was_claimed_while_it_was_hashed(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Process(path)
    real, hashed = ram_keeper.data_checksum, []

    def hash_late(block: object, key: OffloadKey, *rest: object) -> int:
        checksum = real(block, key, *rest)  # type: ignore[arg-type]
        if key in KEYS[:NUM_SLOTS] and not hashed:
            hashed.append(key)
            spec = first.begin_store(KEYS[10:18])  # in the middle of it, all slots get other blocks
            first.write(spec)
        return checksum

    monkeypatch.setattr(ram_keeper, "data_checksum", hash_late)
    monkeypatch.setattr(first.keeper, "_num_threads", 1)
    first.store(KEYS[:NUM_SLOTS])
    first.flush()
    assert hashed
    second = Process(first.image(tmp_path / "image"))
    assert second.restored == set()
    second.stop()
    first.abandon()


def test_blocks_that_are_told_again_and_slots_that_changed_hands(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Process(path)
    with pytest.MonkeyPatch.context() as idle:
        idle.setattr(first.keeper, "_wake", lambda: None)
        for keys in (KEYS[:8], KEYS[8:16], KEYS[6:10]):
            first.store(keys)  # the last ones take the slots of the first, which are to get records still
    first.store(KEYS[20:21])
    assert KEYS[8:10] == [key for key in KEYS[8:10] if key in first.ram._ready]
    slots = [first.ram._ready[key] for key in KEYS[8:10]]
    first.keeper.keep(KEYS[8:10], slots, [first.ram._index.generations[slot] for slot in slots])
    ready = set(first.ram._ready)
    first.stop()
    assert assert_loads_only_whole_blocks(path, sorted(ready)).keys() == ready
    assert not caplog.records


def test_a_key_that_fits_no_record_is_not_kept(path: Path) -> None:
    first = Process(path)
    long = OffloadKey(b"k" * 65)
    first.store([KEYS[0], long, KEYS[1]])
    assert first.find([long]) == [long]
    first.stop()
    second = Process(path)
    assert second.restored == set(KEYS[:2])
    second.stop()


def test_a_block_that_was_evicted_and_stored_again_is_there_once(path: Path) -> None:
    first = Process(path)
    first.store(KEYS[:2], version=1)
    first.flush()
    # evicted, its slot not written since: the old record stands beside the new one
    victims = first.ram.evict_early(2, first.context())
    assert set(victims.keys) == set(KEYS[:2])
    first.ram.complete_load(victims.keys, first.context(), spec=victims)
    first.store(KEYS[2:6])
    first.store(KEYS[:2], version=2)
    first.stop()
    second = Process(path)
    assert second.restored == set(KEYS[:6])
    assert second.load(KEYS[:2]) == {key: content(key, 2).tobytes() for key in KEYS[:2]}
    second.core.check_invariants()
    second.stop()


def test_what_was_not_hashed_at_a_kill_is_a_miss(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Process(path)
    monkeypatch.setattr(first.keeper, "_wake", lambda: None)
    first.store(KEYS[:5])
    image = first.image(tmp_path / "image")
    monkeypatch.undo()
    first.stop()
    assert assert_loads_only_whole_blocks(image, KEYS[:5]) == {}


def test_errors_of_a_thread_cost_hits_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Process(path)

    def fail(*arguments: object) -> int:
        raise MemoryError("injected fault")

    with monkeypatch.context() as faults:
        faults.setattr(ram_keeper, "data_checksum", fail)
        first.store(KEYS[:3])
        first.flush()
    first.store(KEYS[3:5])
    first.stop()
    second = Process(path)
    assert second.restored == set(KEYS[3:5])
    with monkeypatch.context() as faults:
        faults.setattr(ram_keeper, "data_checksum", fail)
        assert second.find([KEYS[3]]) == []
    assert second.find(KEYS[3:5]) == [KEYS[4]]
    second.stop()


# -- order --------------------------------------------------------------------------------------------------


def test_what_was_used_last_is_evicted_last(path: Path) -> None:
    first = Process(path)
    first.store(KEYS[0:2])
    first.store(KEYS[2:4])
    first.store(KEYS[4:6])
    first.load(KEYS[0:2])
    first.stop()
    second = Process(path)
    second.store(KEYS[6:8])  # no more free slots
    order = []
    for key in KEYS[8:16]:
        before = {key for key in KEYS[:8] if second.ram.policy.__contains__(key)}
        second.store([key])
        order += sorted(before - {key for key in KEYS[:8] if key in second.ram.policy})
    # of blocks that were used together, the deepest goes first
    assert order[:6] == [KEYS[i] for i in (3, 2, 5, 4, 1, 0)]
    second.stop()


@pytest.mark.parametrize("policy", ["lru", "arc", "adaptive", "s3fifo", "lru2"])
def test_every_policy_takes_what_comes_back(path: Path, policy: str) -> None:
    chance = random.Random(1)
    contents = {key: content(key).tobytes() for key in KEYS}
    for _ in range(4):
        process = Process(path, policy=policy)
        process.core.check_invariants()
        for _ in range(20):
            first = chance.randrange(len(KEYS) - 4)
            keys = KEYS[first : first + chance.randrange(1, 5)]
            for key, found in process.load(keys).items():
                assert found == contents[key]
            process.store(keys)
        process.core.check_invariants()
        ready = process.find(KEYS)
        process.stop()
    process = Process(path, policy=policy)
    assert process.restored >= set(ready)
    process.stop()


# -- kills --------------------------------------------------------------------------------------------------

WRONG_BYTES, ERROR = 90, 91


def live_until_killed(path: Path, seed: int) -> int:
    """What a process does. Its exit code, should it see something wrong."""
    chance = random.Random(seed)
    process = Process(path)
    for key, found in process.load(KEYS).items():
        if found != content(key).tobytes():
            return WRONG_BYTES
    while True:
        keys = chance.sample(KEYS, chance.randint(1, 4))
        if chance.random() < 0.1:
            process.store(keys, version=chance.randint(1, 99), success=False)
        elif chance.random() < 0.02:
            process.core.reset_cache()
        process.store(keys)
        for key, found in process.load(keys).items():
            if found != content(key).tobytes():
                return WRONG_BYTES


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_kills_at_any_moment(path: Path) -> None:
    num_found = 0
    for seed in range(NUM_KILLS):
        child = os.fork()
        if child == 0:
            code = ERROR
            try:
                code = live_until_killed(path, seed)
            finally:
                os._exit(code)
        time.sleep(random.Random(seed).uniform(0.005, 0.05))  # the moment is the point, nothing waits for it
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, f"process {seed}"
        if seed % 4 == 3:
            process = Process(path)
            num_found += len(process.restored)
            assert all(found == content(key).tobytes() for key, found in process.load(KEYS).items())
            process.core.check_invariants()
            process.stop()
    assert num_found > 0, "the test means nothing if nothing ever comes back"


def test_hashing_large_slots_lets_others_run(path: Path) -> None:
    """Blocks of several batches: each has its record after a flush, and all are found."""
    process = Process(path, num_slots=20, slot_bytes=8 << 20)
    keys = KEYS[:20]
    context = process.context()
    spec = process.begin_store(keys, context)
    for key, slot in zip(spec.keys, spec.slots, strict=True):
        process.slots[slot, :: 1 << 16] = content(key, num_bytes=128)
    process.core.complete_store(keys, context, True, spec)
    process.flush()
    process.stop()
    again = Process(path, num_slots=20, slot_bytes=8 << 20)
    loaded = again.load(keys)
    assert loaded.keys() == set(keys)
    for key, found in loaded.items():
        assert np.array_equal(np.frombuffer(found, np.uint8)[:: 1 << 16], content(key, num_bytes=128))
    again.stop()
