"""Tiers in stores that several engines share: the base, Mooncake Store, S3, and Valkey or Redis."""

from kvtier.tiers.shared.epochs import SharedEpochs
from kvtier.tiers.shared.mooncake import MooncakeStore
from kvtier.tiers.shared.mooncake_config import MooncakeConfig, parse_mooncake_url
from kvtier.tiers.shared.s3 import S3Store
from kvtier.tiers.shared.s3_config import S3Config, parse_s3_url
from kvtier.tiers.shared.tier import SharedConfig, SharedTier
from kvtier.tiers.shared.valkey import ValkeyStore
from kvtier.tiers.shared.valkey_config import ValkeyConfig, parse_valkey_url

__all__ = [
    "MooncakeConfig",
    "MooncakeStore",
    "S3Config",
    "S3Store",
    "SharedConfig",
    "SharedEpochs",
    "SharedTier",
    "ValkeyConfig",
    "ValkeyStore",
    "parse_mooncake_url",
    "parse_s3_url",
    "parse_valkey_url",
]
