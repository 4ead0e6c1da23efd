"""The disk tier beyond the contract of every tier: space, neighbours, restart, order of writes, stalls, processes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from disk_harness import (
    CACHE,
    CAP_BYTES,
    KEYS,
    NAMESPACE,
    ROOT,
    SLOT_BYTES,
    Machine,
    check_no_slot_is_lost,
)
from kvtier.errors import ConfigurationError, TierError
from kvtier.interfaces import Residency
from kvtier.keys import OffloadKey
from kvtier.testing import SimulatedFileSystem, TierDriver, make_keys
from kvtier.tiers.disk import DiskConfig, DiskTier, FileEpochStore
from kvtier.tiers.disk.filesystem import Buffer, FileSystem
from kvtier.tiers.disk.layout import Header, cache_bytes
from kvtier.tiers.disk.table import BlockRecord, SlotTable

SLAB, TABLE = f"{CACHE}/slab", f"{CACHE}/table"


# -- space -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_folders", [1, 3])
def test_the_cap_covers_everything(num_folders: int, tmp_path: Path) -> None:
    """On the real filesystem, as `du` counts."""
    cap_bytes = 3 << 20
    paths = tuple(str(tmp_path / f"device-{i}") for i in range(num_folders))
    config = DiskConfig(paths, cap_bytes, NAMESPACE, min_free_bytes=0, policy="lru")
    driver = TierDriver(DiskTier(config, FileEpochStore(config.epoch_path)), 64, SLOT_BYTES)
    capacity = driver.tier.get_stats().capacity_blocks
    assert capacity * SLOT_BYTES > 0.9 * cap_bytes
    assert driver.tier.get_stats().capacity_bytes <= cap_bytes
    for start in range(0, 2 * capacity, 60):
        driver.store(make_keys(60, f"{start}-"))
    FileEpochStore(config.epoch_path).advance()
    driver.tier.flush(10)
    used = int(
        subprocess.run(["du", "-s", "-B1", tmp_path], capture_output=True, text=True, check=True).stdout.split()[0]
    )
    assert used <= cap_bytes + 2 * 4096  # the test's own folder, and a page for each of its
    driver.close(1.0)


def test_a_cap_below_one_block() -> None:
    machine = Machine(capacity_bytes=SLOT_BYTES)
    with pytest.raises(ConfigurationError, match="4096 bytes in 1 folders"):
        machine.open()
    assert machine.files.paths() == []


def test_free_space_below_its_floor_stores_nothing_new() -> None:
    machine = Machine(SimulatedFileSystem(device_bytes=10 << 20), min_free_bytes=4 << 20)
    driver = machine.open()
    driver.store(KEYS[:2])
    machine.files.device_bytes = 3 << 20  # somebody else filled it
    outcome = driver.store(KEYS[2:4])
    assert outcome is not None
    assert outcome.succeeded == (False, False)
    assert "free space" in outcome.reason
    assert driver.load(KEYS[:2]).success
    machine.files.device_bytes = 10 << 20
    machine.clock.now_s += 100
    assert driver.store(KEYS[2:4]) is not None
    assert driver.ready(KEYS) == KEYS[:4]


@pytest.mark.parametrize("grow_bytes", [SLOT_BYTES, 1 << 20])
def test_takes_no_more_than_the_floor_leaves(grow_bytes: int) -> None:
    floor_bytes = 1 << 20
    device_bytes = floor_bytes + 8192 + 4 * SLOT_BYTES  # a table, some 100 bytes of small files, three blocks
    machine = Machine(SimulatedFileSystem(device_bytes), min_free_bytes=floor_bytes, grow_bytes=grow_bytes)
    driver = machine.open()
    for key in KEYS[:6]:
        driver.store([key])
    assert len(driver.ready(KEYS)) == 3
    assert machine.files.free_bytes("/") >= floor_bytes
    assert driver.load(driver.ready(KEYS)).success
    full = Machine(SimulatedFileSystem(floor_bytes), min_free_bytes=floor_bytes)
    with pytest.raises(TierError, match=r"cannot use /disk for a disk tier: free space"):
        full.open()


def test_a_smaller_and_a_greater_cap_keep_what_fits() -> None:
    machine = Machine()
    driver = machine.open()
    driver.store(KEYS[:6])
    driver.close(1.0)
    machine.config = replace(machine.config, capacity_bytes=cache_bytes(4, SLOT_BYTES))
    driver = machine.open()
    assert driver.ready(KEYS) == KEYS[:4]
    assert machine.used_in_root() <= machine.config.capacity_bytes
    driver.close(1.0)
    machine.config = replace(machine.config, capacity_bytes=cache_bytes(9, SLOT_BYTES))
    driver = machine.open()
    assert driver.ready(KEYS) == KEYS[:4]
    check_no_slot_is_lost(driver, 9)


# -- neighbours ------------------------------------------------------------------------------------------------------


SHARED_BYTES = cache_bytes(40, SLOT_BYTES)


def sharing(files: SimulatedFileSystem, name: str, **settings: object) -> Machine:
    """An engine of its own namespace, in the same folder and under the same cap as the others."""
    return Machine(files, namespace=name.encode() * 32, capacity_bytes=SHARED_BYTES, grow_bytes=SLOT_BYTES, **settings)


def caches(files: SimulatedFileSystem) -> str:
    """The namespaces that have a cache, in order."""
    folders = sorted(path.split("/")[2] for path in files.paths() if path.endswith("table"))
    return "".join(bytes.fromhex(folder.removeprefix("cache-"))[:1].decode() for folder in folders)


def test_another_namespace_is_another_cache() -> None:
    files = SimulatedFileSystem()
    for version, name in enumerate("ab"):
        driver = sharing(files, name).open()
        assert driver.ready(KEYS) == []
        driver.store(KEYS[:2], version)
        driver.tier.close(1.0)
    for version, name in enumerate("ab"):
        driver = sharing(files, name).open()
        assert driver.load(KEYS[:2]).success
        assert [driver.loaded_version(key, slot) for slot, key in enumerate(KEYS[:2])] == [version, version]
        driver.tier.close(1.0)


def test_old_namespaces_make_room_as_it_is_needed_the_oldest_first() -> None:
    files = SimulatedFileSystem()
    for name in "bca":
        driver = sharing(files, name).open()
        driver.store(KEYS[:2])
        driver.tier.close(1.0)
    machine = sharing(files, "d")
    driver = machine.open()
    seen = [caches(files)]

    def watch() -> None:
        assert machine.used_in_root() <= SHARED_BYTES
        if caches(files) != seen[-1]:
            seen.append(caches(files))

    files.after_call = watch
    assert driver.tier.get_stats().capacity_blocks == 40
    for key in make_keys(40, "many"):
        driver.store([key])
    assert seen == ["abcd", "acd", "ad", "d"]
    assert driver.tier.get_stats().ready_blocks == 40


def test_a_namespace_in_use_is_left_alone() -> None:
    files = SimulatedFileSystem()
    live = sharing(files, "a").open()
    live.store(KEYS[:2])
    with pytest.raises(TierError, match="no room for a disk cache in /disk"):
        sharing(files, "b").open()
    greater = sharing(files, "b")
    greater.config = replace(greater.config, capacity_bytes=2 * SHARED_BYTES)
    driver = greater.open()
    assert driver.store(make_keys(16, "many")) is not None
    assert live.load(KEYS[:2]).success
    assert caches(files) == "ab"


def test_namespaces_that_are_to_be_kept() -> None:
    files = SimulatedFileSystem()
    first = sharing(files, "a").open()
    first.store(KEYS[:2])
    first.tier.close(1.0)
    machine = sharing(files, "b", keep_other_namespaces=True)
    driver = machine.open()
    capacity = driver.tier.get_stats().capacity_blocks
    assert 1 <= capacity < 40
    files.after_call = lambda: None if machine.used_in_root() <= SHARED_BYTES else pytest.fail("beyond the cap")
    check_no_slot_is_lost(driver, capacity, batch=8)
    driver.tier.close(1.0)
    assert sharing(files, "a").open().load(KEYS[:2]).success


def test_namespaces_that_are_to_be_kept_are_kept_when_it_gets_tight() -> None:
    files = SimulatedFileSystem()
    machine = sharing(files, "a", keep_other_namespaces=True)
    driver = machine.open()
    driver.store(KEYS[:2])
    greater = sharing(files, "b")
    greater.config = replace(greater.config, capacity_bytes=2 * SHARED_BYTES)
    other = greater.open()
    other.store(KEYS[:8])
    assert other.tier.close(1.0)
    for key in make_keys(40, "many"):
        driver.store([key])
    assert machine.used_in_root() <= SHARED_BYTES
    assert caches(files) == "ab"
    assert driver.load(KEYS[:2]).success
    assert greater.open().load(KEYS[:8]).success


# -- several folders -------------------------------------------------------------------------------------------------


def test_folders_share_the_blocks_and_each_stands_for_itself() -> None:
    paths = ("/one", "/two")
    machine = Machine(paths=paths, capacity_bytes=2 * cache_bytes(8, SLOT_BYTES))
    driver = machine.open()
    driver.store(KEYS)
    assert driver.ready(KEYS) == KEYS
    driver.close(1.0)
    driver = machine.open()
    assert driver.ready(KEYS) == KEYS
    assert driver.load(KEYS).success
    driver.close(1.0)
    machine.files.delete_folder("/two")
    driver = machine.open()
    assert len(driver.ready(KEYS)) == 8
    assert driver.load(driver.ready(KEYS)).success
    check_no_slot_is_lost(driver, 16)
    driver.close(1.0)
    machine.files.delete_folder("/one")  # with it the epoch: nobody knows any more what /two has
    assert machine.open().ready(make_keys(16, "fresh")) == []


def test_adjacent_places_of_two_folders_are_not_adjacent() -> None:
    machine = Machine(paths=("/one", "/two"), capacity_bytes=2 * cache_bytes(4, SLOT_BYTES))
    driver = machine.open()
    driver.store(KEYS[:8])
    # two places that follow each other within their folders, but are of different ones
    driver.tier.drop([KEYS[0]])
    driver.tier.drop([KEYS[3]])
    driver.store(KEYS[8:10])
    there = [key for key in KEYS[:10] if key not in (KEYS[0], KEYS[3])]
    assert driver.load(there).success
    assert [driver.loaded_version(key, slot) for slot, key in enumerate(there)] == [0] * 8


# -- restart ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_restart_evicts_what_would_have_been_evicted(policy: str) -> None:
    def left_over(restart: bool) -> list[OffloadKey]:
        machine = Machine(policy=policy)
        driver = machine.open()
        driver.store(KEYS[:3])
        driver.store(KEYS[3:6])
        driver.tier.touch(KEYS[1:3])
        driver.tier.touch(KEYS[4:5])
        if restart:
            driver.close(1.0)
            driver = machine.open()
        driver.store(KEYS[6:9])
        return driver.ready(KEYS)

    assert left_over(restart=True) == left_over(restart=False)


def test_what_was_stored_after_a_restart_is_younger() -> None:
    machine = Machine()
    for keys in (KEYS[:2], KEYS[2:4], KEYS[4:6]):
        driver = machine.open()
        driver.store(keys)
        driver.close(1.0)
    driver = machine.open()
    driver.store(KEYS[6:8])
    assert driver.ready(KEYS) == KEYS[2:8]


def test_keys_of_every_length_up_to_the_limit() -> None:
    machine = Machine()
    keys = [OffloadKey(bytes([i]) * length) for i, length in enumerate((1, 20, 36, 64))]
    zeros = OffloadKey(b"\0" * 7)
    driver = machine.open()
    assert driver.store([*keys, zeros]) is not None
    assert driver.submit_store([OffloadKey(b"x" * 65)]) == 0
    driver.close(1.0)
    driver = machine.open()
    assert driver.ready([*keys, zeros, OffloadKey(b"\0" * 8)]) == [*keys, zeros]
    assert driver.load([*keys, zeros]).success


def test_a_reset_that_cannot_be_made_durable_ends_the_cache() -> None:
    machine = Machine()
    driver = machine.open()
    driver.store(KEYS[:3])
    driver.tier.flush(1.0)

    def refuse(name: str, path: str) -> None:
        if name == "replace":
            raise OSError(28, "No space left on device")

    machine.files.before_call = refuse
    assert not machine.reset(driver)
    assert driver.ready(KEYS) == []
    machine.files.kill()
    machine.files.restart()
    assert machine.open().ready(KEYS) == []


def test_an_epoch_is_never_current_twice() -> None:
    files = SimulatedFileSystem()
    store = FileEpochStore("/folder/epoch", files)
    epochs = [store.current(), store.advance(), store.advance()]
    assert FileEpochStore("/folder/epoch", files).current() == epochs[-1]
    files.delete_folder("/folder")
    fresh = FileEpochStore("/folder/epoch", files)
    epochs += [fresh.current(), fresh.advance()]
    assert len(set(epochs)) == len(epochs)


# -- order of writes -------------------------------------------------------------------------------------------------


def written(machine: Machine, driver: TierDriver, keys: Sequence[OffloadKey]) -> list[tuple[str, str]]:
    """What the system was asked to write and to sync for a store and its commit."""
    calls: list[tuple[str, str]] = []

    def note(name: str, path: str) -> None:
        if name in ("pwritev", "fdatasync"):
            calls.append((name, path.rsplit("/", 1)[1]))

    machine.files.before_call = note
    driver.store(keys)
    machine.files.before_call = None
    return calls


def test_data_before_record_and_a_sync_after_each() -> None:
    machine = Machine()
    driver = machine.open()
    assert written(machine, driver, KEYS[:6]) == [
        ("pwritev", "slab"),
        ("fdatasync", "slab"),
        ("pwritev", "table"),
        ("fdatasync", "table"),
    ]


def test_a_record_is_blank_before_its_bytes_change() -> None:
    machine = Machine()
    driver = machine.open()
    driver.store(KEYS[:6])
    assert written(machine, driver, KEYS[6:12])[:2] == [("pwritev", "table"), ("pwritev", "slab")]


class InterruptedSync(SimulatedFileSystem):
    """Lets other threads do something while the data is being synced."""

    meanwhile: Callable[[], None] | None = None

    def fdatasync(self, fd: int) -> None:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        super().fdatasync(fd)


def test_a_place_that_is_given_away_during_its_commit() -> None:
    files = InterruptedSync()
    files.make_folders(CACHE)
    table_fd, slab_fd = files.open(TABLE, create=True), files.open(SLAB, create=True)
    header = Header(SLOT_BYTES, NAMESPACE, 1, 0)
    table = SlotTable(files, table_fd, header, 4)
    table.format()

    def recorded() -> list[int]:
        other = SlotTable(files, table_fd, header, 4)
        return other.recover(4).tolist()

    table.stage([BlockRecord(i, KEYS[i], i + 1, 1, 99, i) for i in (0, 1, 2)], 0.0)
    files.meanwhile = lambda: table.begin_writes([1])
    table.commit(slab_fd)
    assert recorded() == [0, 2]

    def replace_again() -> None:
        table.begin_writes([1])
        table.stage([BlockRecord(1, KEYS[5], 9, 1, 99, 9)], 0.0)

    table.stage([BlockRecord(i, KEYS[i], i + 1, 1, 99, i) for i in (1, 3)], 0.0)
    files.meanwhile = replace_again
    table.commit(slab_fd)
    assert recorded() == [0, 2, 3], "a record whose bytes were not synced before it"
    table.commit(slab_fd)
    assert recorded() == [0, 1, 2, 3]


def test_a_place_that_is_freed_and_given_away_before_the_commit() -> None:
    machine = Machine()
    driver = machine.open()
    driver.store(KEYS[:6])
    driver.tier.drop([KEYS[2]])
    driver.store([KEYS[6]])
    assert driver.load([KEYS[6]]).success
    driver.close(1.0)
    assert machine.open().ready(KEYS) == [*KEYS[:2], *KEYS[3:7]]


# -- how it is written -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot_bytes", [SLOT_BYTES, SLOT_BYTES + 8])
@pytest.mark.parametrize("has_direct", [True, False])
def test_through_the_page_cache_where_it_must_be_and_said_once(
    slot_bytes: int, has_direct: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvtier")
    machine = Machine(SimulatedFileSystem(has_direct=has_direct), capacity_bytes=CAP_BYTES * 2)
    driver = machine.open(slot_bytes=slot_bytes)
    driver.store(KEYS[:3])
    assert driver.load(KEYS[:3]).success
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    if has_direct and slot_bytes == SLOT_BYTES:
        assert said == []
        assert "past the page cache" in caplog.text
    else:
        assert len(said) == 1
        assert ("O_DIRECT" if slot_bytes == SLOT_BYTES else "whole pages") in said[0]


# -- stalls and processes ----------------------------------------------------------------------------------------------


class StallingFiles(FileSystem):
    """Reads, or writes of the slab, that end only when they are let go."""

    def __init__(self) -> None:
        self.stalled: set[str] = set()
        self.go_on = threading.Event()
        self.entered = threading.Semaphore(0)

    def _pass(self, name: str) -> None:
        if name in self.stalled:
            self.entered.release()
            assert self.go_on.wait(60)

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._pass("preadv")
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._pass("pwritev")
        return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        self._pass("fdatasync")
        super().fdatasync(fd)


@pytest.fixture
def stalling() -> Iterator[StallingFiles]:
    files = StallingFiles()
    yield files
    files.go_on.set()


def real_driver(tmp_path: Path, files: FileSystem | None = None, **settings: object) -> TierDriver:
    fields = {"paths": (str(tmp_path),), "capacity_bytes": cache_bytes(32, SLOT_BYTES), "namespace": NAMESPACE}
    config = DiskConfig(**{**fields, "min_free_bytes": 0, **settings})  # type: ignore[arg-type]
    return TierDriver(DiskTier(config, FileEpochStore(config.epoch_path), files=files), 64, SLOT_BYTES)


def test_a_stalled_write_holds_up_no_load_and_no_caller(tmp_path: Path, stalling: StallingFiles) -> None:
    driver = real_driver(tmp_path, stalling, num_threads=2, max_storing_bytes=8 * SLOT_BYTES)
    driver.store(KEYS[:4])
    stalling.stalled = {"pwritev"}
    stuck = driver.submit_store(KEYS[4:16], slots=range(20, 32))
    for _ in range(2):
        assert stalling.entered.acquire(timeout=60)
    assert driver.load(KEYS[:4]).success, "a load waited for a store"
    assert driver.submit_store(make_keys(4, "more")) == 0, "a store waits behind a device that does not move"
    assert not driver.tier.flush(0.01)
    driver.tier.cancel(stuck)
    stalling.go_on.set()
    outcome = driver.finish(stuck)
    assert len(outcome.succeeded) == 8
    assert outcome.succeeded.count(True) == len(driver.ready(KEYS[4:]))
    assert outcome.reason == "cancelled"
    driver.close(5.0)


def test_a_stalled_read_is_said_at_close(tmp_path: Path, stalling: StallingFiles) -> None:
    driver = real_driver(tmp_path, stalling, num_threads=1)
    driver.store(KEYS[:8])
    stalling.stalled = {"preadv"}
    first = driver.submit_load(KEYS[:1], slots=[20])
    second = driver.submit_load(KEYS[1:2], slots=[21])
    third = driver.submit_load(KEYS[2:4], slots=[22, 23])
    for _ in range(2):
        assert stalling.entered.acquire(timeout=60)
    driver.tier.cancel(third)
    assert driver.finish(third).succeeded == (False, False)
    assert (driver.pool[22:24] == 0xA5).all(), "a job that never began touched its slots"
    assert driver.tier.lookup(KEYS[:1]) == [Residency.READY]
    assert not driver.tier.close(), "a thread may still write into the pool"
    stalling.go_on.set()
    driver.finish(first)
    driver.finish(second)
    driver.close()


def test_a_stalled_sync_pins_no_slots(tmp_path: Path, stalling: StallingFiles) -> None:
    driver = real_driver(tmp_path, stalling, commit_s=0.0)
    stalling.stalled = {"fdatasync"}
    outcome = driver.store(KEYS[:4])
    assert outcome is not None
    assert outcome.success
    assert stalling.entered.acquire(timeout=60)
    assert driver.store(KEYS[4:8]) is not None
    assert driver.load(KEYS[:8]).success
    stalling.go_on.set()
    assert driver.tier.flush(60)
    driver.close()


OWNER = """
import sys
from disk_harness import KEYS, NAMESPACE, SLOT_BYTES
from kvtier.testing import TierDriver
from kvtier.tiers.disk import DiskConfig, DiskTier, FileEpochStore
config = DiskConfig((sys.argv[1],), int(sys.argv[2]), NAMESPACE, min_free_bytes=0)
driver = TierDriver(DiskTier(config, FileEpochStore(config.epoch_path)), 64, SLOT_BYTES)
driver.store(KEYS[:4])
driver.tier.flush(60)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parents[1])])}
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path), str(cache_bytes(32, SLOT_BYTES))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "ready\n"
    with pytest.raises(TierError, match=f"in use by another process \\(process {owner.pid}\\)"):
        real_driver(tmp_path)
    owner.kill()
    owner.wait()
    driver = real_driver(tmp_path)
    assert driver.load(KEYS[:4]).success
    with pytest.raises(TierError, match=f"process {os.getpid()}"):
        real_driver(tmp_path)
    driver.close()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError, match="file/inside"):
        real_driver(tmp_path, paths=(str(tmp_path / "file" / "inside"),))


@pytest.mark.parametrize(
    "settings",
    [
        {"paths": ()},
        {"paths": (ROOT, ROOT)},
        {"paths": (ROOT, ROOT + "/../disk")},
        {"namespace": b"short"},
        {"capacity_bytes": 0},
        {"policy": "fifo"},
        {"min_free_bytes": -1},
        {"num_threads": -1},
        {"commit_s": float("nan")},
    ],
)
def test_settings_that_cannot_work(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        Machine(**settings)
