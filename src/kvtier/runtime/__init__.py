"""Configuration and composition: the only place where parts are wired together."""

from kvtier.runtime.compose import Identity, Stack, build_manager, build_stack, open_disk
from kvtier.runtime.config import DEFAULT_POLICY, Config, num_slots_for, parse_config
from kvtier.runtime.disk import check_folders
from kvtier.runtime.tiers import check_tiers
from kvtier.runtime.values import parse_size

__all__ = [
    "DEFAULT_POLICY",
    "Config",
    "Identity",
    "Stack",
    "build_manager",
    "build_stack",
    "check_folders",
    "check_tiers",
    "num_slots_for",
    "open_disk",
    "parse_config",
    "parse_size",
]
