"""Tiers in stores that several engines share: the base, Valkey or Redis, and Mooncake Store."""

from kvtier.tiers.shared.mooncake import MooncakeStore
from kvtier.tiers.shared.mooncake_config import MooncakeConfig, parse_mooncake_url
from kvtier.tiers.shared.tier import SharedConfig, SharedTier
from kvtier.tiers.shared.valkey import ValkeyStore
from kvtier.tiers.shared.valkey_config import ValkeyConfig, parse_valkey_url

__all__ = [
    "MooncakeConfig",
    "MooncakeStore",
    "SharedConfig",
    "SharedTier",
    "ValkeyConfig",
    "ValkeyStore",
    "parse_mooncake_url",
    "parse_valkey_url",
]
