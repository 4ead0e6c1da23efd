"""Tiers in stores that several engines share: the base, and Valkey or Redis."""

from kvtier.tiers.shared.config import SharedConfig
from kvtier.tiers.shared.epochs import SharedEpochs
from kvtier.tiers.shared.tier import SharedTier
from kvtier.tiers.shared.valkey import ValkeyStore
from kvtier.tiers.shared.valkey_config import ValkeyConfig, parse_valkey_url

__all__ = ["SharedConfig", "SharedEpochs", "SharedTier", "ValkeyConfig", "ValkeyStore", "parse_valkey_url"]
