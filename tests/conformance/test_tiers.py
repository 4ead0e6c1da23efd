"""The shipped suite, over the tiers that kvtier has."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.testing import FaultyTier, SimulatedFileSystem, TierConformance, TierFaults
from kvtier.tier_interfaces import Tier
from kvtier.tiers.disk import DiskConfig, DiskTier, FileEpochStore
from kvtier.tiers.disk.filesystem import FileSystem
from kvtier.tiers.disk.layout import cache_bytes, round_up
from kvtier.tiers.memory import MemoryTier


class TestMemoryTier(TierConformance):
    slot_bytes = 64

    def make_tier(self, capacity_blocks: int) -> Tier:
        return MemoryTier(capacity_blocks)


class TestMemoryTierBlockByBlock(TierConformance):
    slot_bytes = 64

    def make_tier(self, capacity_blocks: int) -> Tier:
        return MemoryTier(capacity_blocks, "arc", blocks_per_poll=1)


class TestTierThatReportsLate(TierConformance):
    """The wrapper with faults that the contract allows is a tier like any other."""

    slot_bytes = 64

    def make_tier(self, capacity_blocks: int) -> Tier:
        return FaultyTier(MemoryTier(capacity_blocks), TierFaults(seed=5, delay=0.4, reorder=0.4))


class DiskConformance(TierConformance):
    durable = True
    num_folders = 1
    num_threads: int | None = None
    policy = "arc"

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path
        self.files = FileSystem()

    def config(self, capacity_blocks: int) -> DiskConfig:
        assert capacity_blocks % self.num_folders == 0
        share = cache_bytes(capacity_blocks // self.num_folders, round_up(self.slot_bytes))
        return DiskConfig(
            paths=tuple(str(self.folder / f"device-{i}") for i in range(self.num_folders)),
            capacity_bytes=share * self.num_folders,
            namespace=b"conformance of the tiers".ljust(32),
            min_free_bytes=0,
            num_threads=self.num_threads,
            policy=self.policy,
        )

    def make_tier(self, capacity_blocks: int) -> Tier:
        config = self.config(capacity_blocks)
        return DiskTier(config, FileEpochStore(config.epoch_path, self.files), files=self.files)

    def advance_epoch(self) -> int:
        return FileEpochStore(self.config(2).epoch_path, self.files).advance()


class TestDiskTier(DiskConformance):
    pass


class TestDiskTierOddSize(DiskConformance):
    """Slots that are no whole pages: through the page cache, one block a call."""

    slot_bytes = 5000
    policy = "lru"


class TestDiskTierWithoutThreads(DiskConformance):
    """Every commit in the caller's thread: on a simulated device, whose syncs take no time."""

    num_threads = 0

    @pytest.fixture(autouse=True)
    def _device(self, _folder: None) -> None:
        self.files = SimulatedFileSystem()
