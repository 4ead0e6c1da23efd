"""What the tests of the disk tier share: a tier on a simulated device, and what must hold after anything."""

from __future__ import annotations

import random

from kvtier.interfaces import Residency
from kvtier.keys import OffloadKey
from kvtier.testing import SimulatedFileSystem, TierDriver, make_keys
from kvtier.tiers.disk import DiskConfig, DiskTier, FileEpochStore
from kvtier.tiers.disk.layout import cache_bytes, cache_folder

SLOT_BYTES = 4096
CAPACITY = 6
NAMESPACE = b"the namespace of the tests".ljust(32)
ROOT = "/disk"
CACHE = f"{ROOT}/{cache_folder(NAMESPACE)}"
CAP_BYTES = cache_bytes(CAPACITY, SLOT_BYTES)
KEYS = make_keys(16)


class Clock:
    """A time that tests set."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Machine:
    """A simulated device and the processes that open a disk tier on it, one after the other."""

    def __init__(self, files: SimulatedFileSystem | None = None, **settings: object) -> None:
        self.files = files or SimulatedFileSystem()
        self.clock = Clock()
        fields = {
            "paths": (ROOT,),
            "capacity_bytes": CAP_BYTES,
            "namespace": NAMESPACE,
            "min_free_bytes": 0,
            "num_threads": 0,
            "policy": "lru",
        }
        self.config = DiskConfig(**{**fields, **settings})  # type: ignore[arg-type]
        self.epochs = FileEpochStore(self.config.epoch_path, self.files)

    def tier(self) -> DiskTier:
        """A new process: nothing of an earlier one is remembered."""
        random_epoch = random.Random(len(self.files.calls)).getrandbits
        self.epochs = FileEpochStore(self.config.epoch_path, self.files, lambda: random_epoch(60))
        return DiskTier(self.config, self.epochs, files=self.files, clock=self.clock, wall_clock=self.clock)

    def open(self, num_slots: int = 16, slot_bytes: int = SLOT_BYTES) -> TierDriver:
        return TierDriver(self.tier(), num_slots, slot_bytes)

    def reset(self, driver: TierDriver) -> bool:
        """What a manager does. Whether the epoch could be raised."""
        try:
            epoch = self.epochs.advance()
        except OSError:
            driver.tier.disable("the weight epoch could not be raised")
            return False
        driver.tier.reset(epoch)
        return True

    def used_in_root(self) -> int:
        """Bytes of the files in the tier's folder, as the cap counts them."""
        return sum(len(self.files.content(path)) for path in self.files.paths() if path.startswith(ROOT + "/"))


def check_serves_only_what_was_stored(driver: TierDriver, versions: dict[OffloadKey, set[int]]) -> list[OffloadKey]:
    """Loads everything that is ready. Each block is one of those that may be there. Returns what came back."""
    ready = driver.ready(KEYS)
    came_back = []
    for key in ready:
        if driver.load([key]).success:
            assert driver.loaded_version(key, 0) in versions.get(key, set()), "wrong bytes were handed out"
            came_back.append(key)
        else:
            assert driver.tier.lookup([key]) == [Residency.ABSENT]
    return came_back


def check_no_slot_is_lost(driver: TierDriver, capacity: int = CAPACITY, batch: int = 16) -> None:
    """The whole capacity can still be stored into and read."""
    fresh = make_keys(capacity, "fresh")
    assert driver.tier.get_stats().capacity_blocks == capacity
    for start in range(0, capacity, batch):
        keys = fresh[start : start + batch]
        outcome = driver.store(keys)
        assert outcome is not None
        assert outcome.success, outcome.reason
        assert len(outcome.succeeded) == len(keys)
    assert driver.tier.get_stats().ready_blocks == capacity
    for start in range(0, capacity, batch):
        assert driver.load(fresh[start : start + batch]).success
    driver.tier.check_invariants()
