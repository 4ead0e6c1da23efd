"""Processes that die of SIGKILL on a real filesystem: 500 of them, one after the other, on one cache.

Each is a fork of the test process, which starts in a millisecond. It checks what its predecessors left, block by
block, then stores, loads and resets until it dies: half of them at some call of their own, half of them of a signal
that comes whenever it comes.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from disk_harness import KEYS, NAMESPACE, SLOT_BYTES, check_no_slot_is_lost
from kvtier.testing import TierDriver
from kvtier.tiers.disk import DiskConfig, DiskTier, FileEpochStore
from kvtier.tiers.disk.filesystem import Buffer, FileSystem
from kvtier.tiers.disk.layout import cache_bytes

CAPACITY = 12
CAP_BYTES = cache_bytes(CAPACITY, SLOT_BYTES)
NUM_KILLS = 500
NUM_FAST = 100
WRONG_BYTES, ERROR, OVER_CAP, SURVIVED = 90, 91, 92, 93


class DyingFiles(FileSystem):
    """Kills the process at its call number `dies_at`, before it or, of a write, halfway through."""

    def __init__(self, dies_at: int, halfway: bool) -> None:
        self.left = dies_at
        self.halfway = halfway

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        if self.left == 1 and self.halfway and len(buffers) > 1:
            super().pwritev(fd, buffers[: len(buffers) // 2], offset)
        self._count()
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._count()
        return super().preadv(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        self._count()
        super().fdatasync(fd)

    def allocate(self, fd: int, size_bytes: int) -> bool:
        self._count()
        return super().allocate(fd, size_bytes)

    def replace(self, source: str, target: str) -> None:
        self._count()
        super().replace(source, target)

    def sync_folder(self, path: str) -> None:
        self._count()
        super().sync_folder(path)


def config_in(folder: Path) -> DiskConfig:
    return DiskConfig(
        (str(folder),), CAP_BYTES, NAMESPACE, min_free_bytes=0, num_threads=2, commit_s=0.001, grow_bytes=2 * SLOT_BYTES
    )


def version_of(epoch: int) -> int:
    return epoch % 8


def live_until_killed(folder: Path, seed: int, files: FileSystem) -> int:
    """What a process does. Its exit code, should it live so long."""
    chance = random.Random(seed)
    config = config_in(folder)
    epochs = FileEpochStore(config.epoch_path, files, lambda: seed << 20)
    driver = TierDriver(DiskTier(config, epochs, files=files), 64, SLOT_BYTES)
    for key in driver.ready(KEYS):  # what a kill leaves is whole
        if not driver.load([key]).success or driver.loaded_version(key, 0) != version_of(epochs.current()):
            return WRONG_BYTES
    while True:
        keys = chance.sample(KEYS, chance.randint(1, 8))
        version = version_of(epochs.current())
        action = chance.randrange(10)
        if action < 5:
            driver.store(keys, version)
        elif action < 8:
            outcome = driver.load(keys)
            for slot, (key, success) in enumerate(zip(keys, outcome.succeeded, strict=True)):
                if success and driver.loaded_version(key, slot) != version:
                    return WRONG_BYTES
        elif action == 8:
            driver.tier.touch(keys)
            driver.tier.flush(10.0)
        else:
            driver.tier.reset(epochs.advance())
        if sum(path.stat().st_blocks * 512 for path in folder.rglob("*")) > CAP_BYTES:
            return OVER_CAP


def die(folder: Path, seed: int) -> int:
    """One process, from fork to its end. The signal that ended it, as a negative number, or its exit code."""
    chance = random.Random(seed)
    at_a_call = seed % 2 == 0
    files = DyingFiles(chance.randint(1, 60) if at_a_call else 0, chance.random() < 0.5)
    child = os.fork()
    if child == 0:
        code = ERROR
        try:
            code = live_until_killed(folder, seed, files)
        finally:
            os._exit(code)
    if not at_a_call:
        time.sleep(chance.uniform(0.001, 0.03))  # the moment is the point, nothing waits for it
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    "seeds", [range(NUM_FAST), pytest.param(range(NUM_FAST, NUM_KILLS), marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_five_hundred_kills(seeds: range, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    for seed in seeds:
        assert die(folder, seed) == -signal.SIGKILL, f"process {seed}"
    config = config_in(folder)
    driver = TierDriver(DiskTier(config, FileEpochStore(config.epoch_path)), 64, SLOT_BYTES)
    ready = driver.ready(KEYS)
    assert not ready or driver.load(ready).success
    check_no_slot_is_lost(driver, CAPACITY)
    driver.close()
