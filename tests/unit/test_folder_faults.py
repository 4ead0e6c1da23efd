"""A folder that fills up, fails, vanishes, stalls, or has other files: no wrong byte, no waiting for ever, recovery."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.errors import ConfigurationError
from kvtier.interfaces import Residency
from kvtier.keys import OffloadKey
from kvtier.testing import TierDriver, make_keys
from kvtier.tiers.memory import MemoryEpochStore
from kvtier.tiers.shared import FolderConfig, FolderStore, SharedConfig, SharedTier, folder, parse_folder_url, shards
from kvtier.tiers.shared.envelope import BlockChecksum, Identity, header_of, value_bytes
from kvtier.tiers.shared.store import StoreTimeoutError
from valkey_harness import GIVE_UP_S, wait_until

NAMESPACE = b"tests of the folder tier".ljust(32)
SLOT_BYTES = 64 << 10
FILE_BYTES = value_bytes(len(make_keys(1)[0]), SLOT_BYTES)
PATIENT = dict.fromkeys(("connect_timeout_s", "lookup_timeout_s", "transfer_timeout_s", "queue_timeout_s"), 30.0)
"""Where nothing stalls: this machine may be busy."""


def open_driver(
    path: Path, settings: dict[str, float] = PATIENT, capacity_bytes: int = 1 << 30, **config: int
) -> TierDriver:
    store = FolderStore(FolderConfig(str(path), capacity_bytes, **{"min_free_bytes": 0, **config}))
    tier = SharedTier(SharedConfig(NAMESPACE, **settings), store, MemoryEpochStore())  # type: ignore[arg-type]
    return TierDriver(tier, 32, SLOT_BYTES, answers_at_once=False)


def tier_of(driver: TierDriver) -> SharedTier:
    assert isinstance(driver.tier, SharedTier)
    return driver.tier


def file_of(path: Path, key: OffloadKey) -> Path:
    (file,) = path.glob(f"*/{folder._name(Identity(NAMESPACE, 0), key)}")
    return file


def check_loads(driver: TierDriver, keys: list[OffloadKey]) -> list[bool]:
    """Loads; what succeeded has the right bytes."""
    outcome = driver.load(keys)
    for slot, (key, success) in enumerate(zip(keys, outcome.succeeded, strict=True)):
        assert not success or driver.loaded_version(key, slot) == 0
    return list(outcome.succeeded)


def bytes_in(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


# -- the cap ---------------------------------------------------------------------------------------------------


def test_several_machines_keep_the_cap_together(tmp_path: Path) -> None:
    capacity = 64 * FILE_BYTES
    drivers = [open_driver(tmp_path, capacity_bytes=capacity) for _ in range(3)]
    for i in range(12):
        for number, driver in enumerate(drivers):
            assert driver.store(make_keys(8, f"{i} of {number} "))
            assert bytes_in(tmp_path) <= capacity + 3 * capacity // shards.RESCAN_SHARE
    assert bytes_in(tmp_path) > capacity // 2
    last = make_keys(8, "11 of 2 ")
    assert check_loads(drivers[2], last) == [True] * 8
    for driver in drivers:
        driver.tier.check_invariants()
        driver.close()


def test_machines_that_store_load_and_evict_at_once(tmp_path: Path) -> None:
    """Each with a tier of its own, as processes have."""
    capacity = 64 * FILE_BYTES
    keys = make_keys(150)
    drivers = [open_driver(tmp_path, capacity_bytes=capacity) for _ in range(3)]
    num_loaded = [0, 0, 0]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        random = np.random.default_rng(number)
        try:
            for _ in range(40):
                some = [keys[i] for i in random.choice(len(keys), 6, replace=False)]
                drivers[number].store(some)
                num_loaded[number] += sum(check_loads(drivers[number], some))
                drivers[number].tier.drop(some[:1])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert all(num_loaded)
    assert bytes_in(tmp_path) <= capacity + 3 * capacity // shards.RESCAN_SHARE
    for driver in drivers:
        assert driver.tier.get_stats().counters["corrupt_blocks"] == 0
        assert not tier_of(driver).down_reason
        driver.tier.check_invariants()
        driver.close()
    assert not list(tmp_path.rglob(".new-*"))


def test_what_was_used_last_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = open_driver(tmp_path, capacity_bytes=32 * FILE_BYTES)
    keys = make_keys(24)
    driver.store(keys)
    for age, key in enumerate(keys):  # the first one is the youngest
        os.utime(file_of(tmp_path, key), (1e9 - age, 1e9 - age))
    driver.tier.touch(keys[-2:])
    wait_until(driver, lambda: file_of(tmp_path, keys[-2]).stat().st_mtime > 1e9, "a use does not count")
    wait_until(driver, lambda: file_of(tmp_path, keys[-1]).stat().st_mtime > 1e9, "a use does not count")
    driver.store(make_keys(8, "more"))
    there = [bool(list(tmp_path.glob(f"*/*{key.hex()}"))) for key in keys]
    assert there[-2:] == [True, True]
    assert there[0]
    assert not there[-3]
    driver.close()


def test_less_free_than_the_floor_refuses_stores(tmp_path: Path) -> None:
    driver = open_driver(tmp_path, min_free_bytes=1 << 60)
    outcome = driver.store(make_keys(2))
    assert outcome is not None
    assert "free" in outcome.reason
    assert [file.name for file in tmp_path.rglob("*")] == [shards.MARKER]
    driver.close()


def test_nothing_of_others_is_touched(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(bytes(FILE_BYTES))
    path = tmp_path / "kv"
    driver = open_driver(path, capacity_bytes=16 * FILE_BYTES)
    driver.store(make_keys(1))
    own = file_of(path, make_keys(1)[0])
    (path / "readme").write_text("somebody's")
    (own.parent / "note").write_text("somebody's")
    (own.parent / "link").symlink_to(outside / "precious")
    os.utime(own.parent / "note", (0, 0))
    for i in range(4):
        driver.store(make_keys(8, f"more {i}"))
    assert (path / "readme").read_text() == (own.parent / "note").read_text() == "somebody's"
    assert (own.parent / "link").is_symlink()
    assert (outside / "precious").exists()
    driver.close()


def test_a_shard_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    outside, path = tmp_path / "outside", tmp_path / "kv"
    outside.mkdir()
    path.mkdir()
    (path / "000").symlink_to(outside)
    driver = open_driver(path, capacity_bytes=1 << 28)  # one shard
    outcome = driver.store(make_keys(3))
    assert outcome is not None
    assert not any(outcome.succeeded)
    assert driver.ready(make_keys(3)) == []
    assert list(outside.iterdir()) == []
    driver.close()


def test_what_a_dead_process_left_on_its_way_is_removed(tmp_path: Path) -> None:
    shard = tmp_path / "000"
    shard.mkdir()
    left, young = shard / f".new-{'0' * 16}", shard / f".new-{'1' * 16}"
    for file in (left, young):
        file.write_bytes(b"half")
    os.utime(left, (0, 0))
    driver = open_driver(tmp_path, capacity_bytes=1 << 28)
    driver.store(make_keys(2))
    assert not left.exists()
    assert young.exists()
    driver.close()


# -- the filesystem fails --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "number"), [("pwritev", errno.ENOSPC), ("pwritev", errno.EDQUOT), ("rename", errno.EIO)]
)
def test_a_store_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    driver = open_driver(tmp_path)
    keys = make_keys(4)
    driver.store(keys)

    def fail(*args: Any, **more: Any) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        outcome = driver.store(make_keys(2, "more"))
    assert outcome is not None
    assert not any(outcome.succeeded)
    assert os.strerror(number) in outcome.reason
    assert len([file for file in tmp_path.rglob("*") if file.is_file()]) == 1 + 4
    assert check_loads(driver, keys) == [True] * 4
    assert not tier_of(driver).down_reason
    driver.close()


def test_short_writes_and_reads_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev, preadv = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda file, pieces, at: pwritev(file, [pieces[0][:1000]], at))
    monkeypatch.setattr(os, "preadv", lambda file, pieces, at: preadv(file, [pieces[0][:777]], at))
    driver = open_driver(tmp_path)
    keys = make_keys(2)
    driver.store(keys)
    assert check_loads(driver, keys) == [True, True]
    driver.close()


def test_a_block_that_cannot_be_read_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = open_driver(tmp_path)
    keys = make_keys(3)
    driver.store(keys)

    def fail(*args: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        assert check_loads(driver, keys) == [False] * 3
    assert check_loads(driver, keys) == [True] * 3
    driver.close()


def test_a_folder_that_vanishes_is_down_until_it_is_back(tmp_path: Path) -> None:
    path, away = tmp_path / "kv", tmp_path / "away"
    driver = open_driver(path)
    keys = make_keys(4)
    driver.store(keys)
    os.rename(path, away)
    path.mkdir()  # what is left of a mount point
    tier_of(driver)._threads._asking_line.close()
    driver.tier.lookup(make_keys(1, "unknown"))
    wait_until(driver, lambda: tier_of(driver).down_reason, "it is not noticed")
    assert driver.tier.lookup(keys) == [Residency.ABSENT] * 4
    assert driver.submit_store(make_keys(2, "more")) == 0
    assert list(path.iterdir()) == [], "nothing is written beside what is not mounted"
    path.rmdir()
    os.rename(away, path)
    wait_until(driver, lambda: not tier_of(driver).down_reason, "it does not come back")
    assert driver.ready(keys) == keys
    assert check_loads(driver, keys) == [True] * 4
    driver.close()


def test_removed_with_all_that_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    driver = open_driver(path)
    keys = make_keys(4)
    driver.store(keys)
    for file in sorted(path.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    assert check_loads(driver, keys) == [False] * 4
    wait_until(driver, lambda: tier_of(driver).down_reason, "it is not noticed")
    assert list(path.iterdir()) == []
    driver.close()


def test_not_there_at_the_start(tmp_path: Path) -> None:
    driver = open_driver(tmp_path / "mount" / "kv")
    assert "not there" in tier_of(driver).down_reason
    (tmp_path / "mount").mkdir()
    wait_until(driver, lambda: not tier_of(driver).down_reason, "it does not come")
    assert driver.store(make_keys(2)) is not None
    driver.close()


@pytest.mark.parametrize("call", ["preadv", "stat"])
def test_a_filesystem_that_stalls_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    driver = open_driver(tmp_path, {**PATIENT, "transfer_timeout_s": 0.3, "lookup_timeout_s": 0.3})
    keys = make_keys(4)
    wait_until(driver, lambda: driver.store(keys) and driver.ready(keys) == keys, "it does not store")
    gate = threading.Event()
    real: Callable[..., Any] = getattr(os, call)

    def stalled(*args: Any, **more: Any) -> Any:
        if threading.current_thread().name.startswith("kvtier-folder"):
            gate.wait(GIVE_UP_S)
        return real(*args, **more)

    monkeypatch.setattr(os, call, stalled)
    if call == "preadv":
        job = driver.submit_load(keys)
        wait_until(driver, lambda: len(tier_of(driver)._store._left), "it is not given up")  # type: ignore[attr-defined]
        driver.poll()
        assert job not in driver.outcomes, "its slots may still be written"
    else:
        assert driver.lookup(make_keys(2, "unknown")) == [Residency.ABSENT] * 2
        wait_until(driver, lambda: len(tier_of(driver)._store._left), "it is not given up")  # type: ignore[attr-defined]
    assert not driver.tier.close()
    gate.set()
    driver.close()
    driver.finish_all()


# -- the folder has other files --------------------------------------------------------------------------------


def _sealed(key: OffloadKey, namespace: bytes = NAMESPACE, epoch: int = 0, size: int = SLOT_BYTES) -> bytes:
    block = np.full(size, 7, np.uint8)
    header = header_of(Identity(namespace, epoch), key, size)
    checksum = BlockChecksum(header)
    checksum.update(block.data)
    return header + block.tobytes() + checksum.value()


def _flipped(value: bytes, at: int) -> bytes:
    return value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]


KEY = make_keys(1)[0]
LIES = {
    "first byte": _flipped(_sealed(KEY), 0),
    "namespace": _sealed(KEY, namespace=bytes(32)),
    "epoch": _sealed(KEY, epoch=1),
    "another key": _sealed(make_keys(2)[1]),
    "length": _sealed(KEY, size=SLOT_BYTES - 1) + b"x",
    "checksum": _flipped(_sealed(KEY), FILE_BYTES - 1),
    "first byte of the block": _flipped(_sealed(KEY), FILE_BYTES - SLOT_BYTES - 8),
    "last byte of the block": _flipped(_sealed(KEY), FILE_BYTES - 9),
    "zeros": bytes(FILE_BYTES),
    "truncated": _sealed(KEY)[:-1],
    "empty": b"",
    "longer": _sealed(KEY) + b"x",
}


@pytest.mark.parametrize("lie", LIES)
def test_altered_files_are_misses(tmp_path: Path, lie: str) -> None:
    driver = open_driver(tmp_path)
    keys = make_keys(4)
    driver.store(keys)
    file = file_of(tmp_path, KEY)
    file.write_bytes(LIES[lie])
    assert check_loads(driver, keys) == [False, True, True, True], "only the altered one fails"
    assert driver.tier.get_stats().counters["corrupt_blocks"] == 1
    assert driver.tier.take_removed() == [KEY]
    assert driver.tier.flush(10.0)
    assert not file.exists(), "it is of no use to anybody"
    assert driver.store(keys) is not None
    assert check_loads(driver, keys) == [True] * 4
    driver.close()


def test_the_right_file_from_elsewhere_is_a_hit(tmp_path: Path) -> None:
    """The oracle of the lies: unaltered, the same file is taken."""
    driver = open_driver(tmp_path)
    driver.store([KEY])
    file_of(tmp_path, KEY).write_bytes(_sealed(KEY))
    assert driver.load([KEY]).success
    assert (driver.pool[0] == 7).all()
    driver.close()


@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
def test_what_is_no_file_is_a_miss(tmp_path: Path, kind: str) -> None:
    driver = open_driver(tmp_path)
    keys = make_keys(2)
    driver.store(keys)
    file = file_of(tmp_path, KEY)
    file.rename(tmp_path / "elsewhere")
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "link":
        file.symlink_to(tmp_path / "elsewhere")
    else:
        file.mkdir()
    assert check_loads(driver, keys) == [False, True]
    assert driver.tier.flush(10.0)
    assert check_loads(driver, keys[1:]) == [True]
    assert not tier_of(driver).down_reason
    driver.close()


# -- URLs ------------------------------------------------------------------------------------------------------


def test_urls_that_it_takes() -> None:
    config = parse_folder_url("file:///mnt/shared/kv%20cache/?capacity=200GiB&min_free=5GB")
    assert config == FolderConfig("/mnt/shared/kv cache", 200 << 30, 5 * 10**9)
    assert config.place == "file:///mnt/shared/kv cache"


@pytest.mark.parametrize(
    ("url", "named", "allowed"),
    [
        ("files:///mnt?capacity=1GiB", "'files'", "file"),
        ("file://host/mnt?capacity=1GiB", "'host'", "file:///ABSOLUTE/PATH"),
        ("file://?capacity=1GiB", "''", "file:///ABSOLUTE/PATH"),
        ("file:///?capacity=1GiB", "''", "file:///ABSOLUTE/PATH"),
        ("file:///mnt", "no capacity", "200GiB"),
        ("file:///mnt?capacity=much", "'much'", "512MiB"),
        ("file:///mnt?capacity=1", "'1'", "1MiB or more"),
        ("file:///mnt?capacity=1GiB&minfree=1", "'minfree'", "'min_free'"),
    ],
)
def test_urls_that_it_does_not(url: str, named: str, allowed: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_folder_url(url)
    assert named in str(caught.value)
    assert allowed in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_was_given_up_leaves_no_descriptor_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, gate, opened = FolderStore(FolderConfig(str(tmp_path), 1 << 30)), threading.Event(), []
    connection = store.connect(time.monotonic() + GIVE_UP_S)
    opened.append(connection._root)
    with pytest.raises(StoreTimeoutError):
        connection._call(lambda: gate.wait(GIVE_UP_S), time.monotonic() + 0.01)
    connection.close()
    really_open = shards.Shards.open

    def open_late(self: shards.Shards) -> int:
        gate.wait(GIVE_UP_S)
        opened.append(really_open(self))
        return opened[-1]

    monkeypatch.setattr(shards.Shards, "open", open_late)
    with pytest.raises(StoreTimeoutError):
        store.connect(time.monotonic() + 0.01)
    gate.set()
    folder_inode = tmp_path.stat().st_ino

    def is_closed(descriptor: int) -> bool:
        try:
            return os.fstat(descriptor).st_ino != folder_inode
        except OSError:
            return True

    until_s = time.monotonic() + GIVE_UP_S
    while not (len(opened) == 2 and all(map(is_closed, opened))):
        assert time.monotonic() < until_s, "a descriptor of the folder is still open"
        time.sleep(0.005)


def test_the_cap_holds_where_there_are_more_files_than_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "MAX_SCAN", 8)
    capacity = 16 * FILE_BYTES
    driver = open_driver(tmp_path, capacity_bytes=capacity)
    for i in range(20):
        assert driver.store(make_keys(2, f"{i} "))
        assert bytes_in(tmp_path) <= capacity
