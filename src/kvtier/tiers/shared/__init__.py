"""Tiers in stores that several engines share: the base, folders, Mooncake Store, S3, and Valkey or Redis."""

from kvtier.tiers.shared.config import SharedConfig
from kvtier.tiers.shared.epochs import SharedEpochs
from kvtier.tiers.shared.folder import FolderStore
from kvtier.tiers.shared.folder_config import FolderConfig, parse_folder_url
from kvtier.tiers.shared.mooncake import MooncakeStore
from kvtier.tiers.shared.mooncake_config import MooncakeConfig, parse_mooncake_url
from kvtier.tiers.shared.s3 import S3Store
from kvtier.tiers.shared.s3_config import S3Config, parse_s3_url
from kvtier.tiers.shared.tier import SharedTier
from kvtier.tiers.shared.valkey import ValkeyStore
from kvtier.tiers.shared.valkey_config import ValkeyConfig, parse_valkey_url

__all__ = [
    "FolderConfig",
    "FolderStore",
    "MooncakeConfig",
    "MooncakeStore",
    "S3Config",
    "S3Store",
    "SharedConfig",
    "SharedEpochs",
    "SharedTier",
    "ValkeyConfig",
    "ValkeyStore",
    "parse_folder_url",
    "parse_mooncake_url",
    "parse_s3_url",
    "parse_valkey_url",
]
