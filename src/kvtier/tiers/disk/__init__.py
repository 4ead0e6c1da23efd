"""The disk tier: bounded, checksummed, still warm after a restart."""

from kvtier.tiers.disk.config import DiskConfig
from kvtier.tiers.disk.epoch import FileEpochStore, WeightEpochs
from kvtier.tiers.disk.tier import DiskTier

__all__ = ["DiskConfig", "DiskTier", "FileEpochStore", "WeightEpochs"]
