"""A RAM pool in a named file: whose it is, who may open it, and what is believed of it."""

from __future__ import annotations

import base64
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import ConfigurationError, PoolError
from kvtier.runtime import num_slots_for, parse_config
from kvtier.tiers import ram_persist
from kvtier.tiers.ram import RamPool
from kvtier.tiers.ram_persist import PersistedPool, PoolHeader, index_bytes, open_persisted, pool_path, slots_within
from persist_harness import KEYS, NAMESPACE, NUM_SLOTS, SLOT_BYTES, Process, content

RANK = """
import base64, pickle, sys
from kvtier.tiers.ram import RamPool
pool = RamPool.attach(pickle.loads(base64.b64decode(sys.argv[1])))
print("attached", flush=True)
sys.stdin.read()
"""
OWNER = """
import base64, pickle, sys
from kvtier.tiers.ram_persist import open_persisted
persisted = open_persisted(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), bytes.fromhex(sys.argv[4]))
print(base64.b64encode(pickle.dumps(persisted.pool.handle)).decode(), flush=True)
sys.stdin.read()
"""


def start(code: str, *arguments: object) -> tuple[subprocess.Popen[str], str]:
    """A process, and the first line that it says."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def start_owner(path: Path) -> tuple[subprocess.Popen[str], str]:
    return start(OWNER, path, NUM_SLOTS, SLOT_BYTES, NAMESPACE.hex())


def encode(persisted: PersistedPool) -> str:
    return base64.b64encode(pickle.dumps(persisted.pool.handle)).decode()


def kill(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        process.kill()
        process.communicate()


def open_it(path: Path, **changes: object) -> PersistedPool:
    settings = {"num_slots": NUM_SLOTS, "slot_bytes": SLOT_BYTES, "namespace": NAMESPACE, **changes}
    return open_persisted(str(path), **settings)  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kvtier-ram-test"


# -- what comes back ----------------------------------------------------------------------------------------


def test_blocks_come_back_after_a_stop(path: Path) -> None:
    first = Process(path)
    assert first.persisted.empty_since
    first.store(KEYS[:5])
    first.stop()
    second = Process(path)
    assert second.persisted.empty_since == ""
    assert second.restored == set(KEYS[:5])
    assert second.load(KEYS[:8]) == {key: content(key).tobytes() for key in KEYS[:5]}
    assert second.counters["restored_blocks"] == second.counters["verified_blocks"] == 5
    second.stop()
    third = Process(path)
    assert third.restored == set(KEYS[:5]), "a block that was checked, or never asked for, comes back again"
    third.stop()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"namespace": b"another".ljust(32)}, "other weights or settings"),
        ({"num_slots": NUM_SLOTS - 1}, "8 slots of 4096 bytes"),
        ({"num_slots": NUM_SLOTS + 1}, "8 slots of 4096 bytes"),
        ({"slot_bytes": 2 * SLOT_BYTES}, "8 slots of 4096 bytes"),
    ],
)
def test_a_file_of_something_else_is_emptied(path: Path, changes: dict[str, object], reason: str) -> None:
    first = Process(path)
    first.store(KEYS[:5])
    first.stop()
    other = Process(path, **changes)  # type: ignore[arg-type]
    assert reason in other.persisted.empty_since
    assert not other.restored
    assert not other.slots.any()
    other.store(KEYS[5:8])
    other.stop()
    again = Process(path, **changes)  # type: ignore[arg-type]
    assert again.restored == set(KEYS[5:8])
    again.stop()
    back = Process(path)
    assert not back.restored
    back.stop()


def test_what_has_outlived_the_kernel_is_not_believed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Process(path)
    first.store(KEYS[:5])
    first.stop()
    monkeypatch.setattr(ram_persist, "boot_id", lambda: "11111111-2222-3333-4444-555555555555")
    second = Process(path)
    assert not second.restored
    assert "started again" in second.persisted.empty_since
    second.stop()
    monkeypatch.setattr(ram_persist, "boot_id", str)
    for _ in range(2):  # a kernel that does not say could be any
        third = Process(path)
        assert not third.restored
        third.store(KEYS[:5])
        third.stop()


@pytest.mark.parametrize("offset", range(0, 380, 7))
def test_a_header_with_a_flipped_bit_is_none(path: Path, offset: int) -> None:
    header = PoolHeader(NUM_SLOTS, SLOT_BYTES, NAMESPACE, "boot", 2**64 - 1, 12345, "model")
    packed = header.pack()
    assert PoolHeader.unpack(packed.ljust(4096, b"\0")) == header
    torn = bytearray(packed)
    torn[offset % len(packed)] ^= 1 << offset % 8
    assert PoolHeader.unpack(bytes(torn)) is None
    assert PoolHeader.unpack(packed[: offset % len(packed)]) is None
    assert PoolHeader.unpack(bytes(4096)) is None


def test_a_reset_is_in_force_when_it_returns(path: Path, tmp_path: Path) -> None:
    first = Process(path)
    first.store(KEYS[:5])
    first.flush()
    first.core.reset_cache()
    image = first.image(tmp_path / "image")
    first.core.check_invariants()
    first.store(KEYS[5:8])
    assert first.load(KEYS[:8]).keys() == set(KEYS[5:8]), "what is stored after it is of use while the process runs"
    first.stop()
    for left in (image, path):
        second = Process(left)
        assert not second.restored, "after a reset the weights may have been others than the files have"
        assert not second.find(KEYS)
        assert "reset" in second.persisted.empty_since
        second.store(KEYS[:2])
        second.stop()
        third = Process(left)
        assert third.restored == set(KEYS[:2])
        third.stop()


# -- who may open it ----------------------------------------------------------------------------------------


def test_one_engine_at_a_time(path: Path) -> None:
    first = Process(path)
    first.store(KEYS[:5])
    with pytest.raises(PoolError, match="in use by another engine"):
        open_it(path)
    with pytest.raises(PoolError, match="in use by another engine"):
        open_it(path, namespace=b"another model's engine".ljust(32))
    assert first.load(KEYS[:5]) == {key: content(key).tobytes() for key in KEYS[:5]}
    first.stop()
    open_it(path).pool.close()


def test_an_engine_that_was_killed_holds_nothing(path: Path) -> None:
    owner, _ = start_owner(path)
    with pytest.raises(PoolError, match="in use"):
        open_it(path)
    kill(owner)
    again = open_it(path)
    assert again.empty_since == ""
    again.pool.close()


def test_a_rank_of_the_old_engine_that_is_alive(path: Path) -> None:
    owner, handle = start_owner(path)
    rank, said = start(RANK, handle)
    assert said == "attached"
    kill(owner)
    with pytest.raises(PoolError, match="a worker that an earlier one has left"):
        open_it(path)
    kill(rank)
    again = open_it(path)
    again.pool.close()


def test_a_rank_that_comes_when_the_file_has_another_owner(path: Path) -> None:
    first = open_it(path)
    late = first.pool.handle
    # as if the process were gone between the rank's opening of the file and its lock
    fd = os.open(path, os.O_RDWR)
    first.pool.close()
    del first
    second = open_it(path)
    path_of_late = pickle.loads(pickle.dumps(late))
    stale = type(late)(os.getpid(), fd, late.device, late.inode, NUM_SLOTS, SLOT_BYTES, late.offset_bytes, late.owner)
    assert path_of_late == late
    with pytest.raises(PoolError, match="another engine by now"):
        RamPool.attach(stale)
    rank, said = start(RANK, encode(second))
    assert said == "attached"
    kill(rank)
    os.close(fd)
    second.pool.close()


def test_ranks_of_the_owner_share_its_memory(path: Path) -> None:
    first = Process(path)
    code = RANK.replace('print("attached", flush=True)', "pool.slots()[3] = 77; print('wrote', flush=True)")
    ranks = [start(code, encode(first.persisted)) for _ in range(2)]
    assert [said for _, said in ranks] == ["wrote", "wrote"]
    assert (first.slots[3] == 77).all()
    assert not first.slots[[0, 1, 2, 4, 5, 6, 7]].any()
    kill(*(rank for rank, _ in ranks))
    first.stop()


def test_a_file_that_is_not_ours_alone_is_left_alone(path: Path, tmp_path: Path) -> None:
    path.write_bytes(b"somebody's")
    path.chmod(0o644)
    with pytest.raises(PoolError, match="not a file of this user alone"):
        open_it(path)
    assert path.read_bytes() == b"somebody's"
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(PoolError, match="cannot open"):
        open_it(link)
    with pytest.raises(PoolError, match="cannot open"):
        open_it(tmp_path / "no folder" / "file")
    with pytest.raises(PoolError, match="cannot open"):
        open_it(tmp_path)


def test_a_name_that_is_removed_is_free_and_what_runs_goes_on(path: Path) -> None:
    first = Process(path)
    first.store(KEYS[:5])
    path.unlink()
    second = Process(path)
    assert not second.restored
    second.store(KEYS[5:8])
    assert first.load(KEYS).keys() == set(KEYS[:5])
    assert second.load(KEYS).keys() == set(KEYS[5:8])
    first.stop()
    second.stop()


def test_a_name_that_is_removed_while_it_is_opened(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, removed = ram_persist.try_to_own, []

    def remove_first(fd: int) -> bool:
        if not removed:
            removed.append(path.unlink())
        return real(fd)

    monkeypatch.setattr(ram_persist, "try_to_own", remove_first)
    first = Process(path)
    first.store(KEYS[:5])
    first.stop()
    second = Process(path)
    assert second.restored == set(KEYS[:5]), "it was written where the name is"
    second.stop()


def test_no_room_leaves_no_file(path: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not fit"):
        open_it(path, num_slots=1 << 40)
    assert not path.exists()
    Process(path).stop()
    with pytest.raises(ConfigurationError, match="does not fit"):
        open_it(path, num_slots=1 << 40)
    assert not path.exists()


def test_a_start_that_died_halfway_is_started_again(path: Path) -> None:
    path.touch(0o600)
    os.truncate(path, 3 * SLOT_BYTES)
    first = Process(path)
    assert "never finished" in first.persisted.empty_since
    first.stop()


def test_every_byte_is_reserved_and_counted(path: Path) -> None:
    persisted = open_it(path, num_slots=100)
    assert path.stat().st_blocks * 512 >= path.stat().st_size == index_bytes(100) + 100 * SLOT_BYTES
    assert path.stat().st_mode & 0o777 == 0o600
    persisted.pool.close()


@pytest.mark.parametrize("slot_bytes", [4096, 12288, 2359296])
def test_records_count_as_ram(slot_bytes: int) -> None:
    for budget in (*range(0, 20 * 4096, 1021), 1 << 30, (1 << 30) + 4095):
        num_slots = slots_within(budget, slot_bytes)
        assert num_slots == 0 or index_bytes(num_slots) + num_slots * slot_bytes <= budget
        assert index_bytes(num_slots + 1) + (num_slots + 1) * slot_bytes > budget


# -- settings -----------------------------------------------------------------------------------------------


def test_names() -> None:
    for name in ("chat", "Qwen3-8B_fp8.v2", "_x", "7"):
        assert parse_config({"ram": "1GiB", "ram_persist": name}).ram_persist == name
    for bad in ("", ".", "..", ".hidden", "-x", "a/b", "a b", "a+rank1", "ä", "x" * 65, "a\n", 7, True, None):
        with pytest.raises(ConfigurationError, match=r"ram_persist is .*; allowed: a name"):
            parse_config({"ram": "1GiB", "ram_persist": bad})


def test_paths_never_meet() -> None:
    assert pool_path("chat") == "/dev/shm/kvtier-ram-chat"
    names = ["chat", "chat-rank1", "chat1", "chat.1"]
    paths = {pool_path(name, "/mnt/huge", rank) for name in names for rank in range(3)}
    assert len(paths) == 3 * len(names)
    assert {os.path.dirname(path) for path in paths} == {"/mnt/huge"}


def test_slots_of_a_setting() -> None:
    plain, persisted = {"ram": "1MiB"}, {"ram": "1MiB", "ram_persist": "x"}
    assert num_slots_for(parse_config(plain), 4096) == 256
    assert num_slots_for(parse_config(persisted), 4096) == slots_within(1 << 20, 4096) < 256
    with pytest.raises(ConfigurationError, match="one offloaded block needs 4096"):
        num_slots_for(parse_config({**persisted, "ram": 8192}), 4096)


def test_slots_are_pages(path: Path) -> None:
    persisted = open_it(path, num_slots=33)
    assert persisted.pool.slots().ctypes.data % 4096 == 0
    assert persisted.pool.slots().shape == (33, SLOT_BYTES)
    assert isinstance(persisted.records(), np.ndarray)
    persisted.pool.close()
