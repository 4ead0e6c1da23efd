"""Configuration and composition: the only place where parts are wired together."""

from kvtier.runtime.compose import build_manager
from kvtier.runtime.config import DEFAULT_POLICY, Config, num_slots_for, parse_config, parse_size

__all__ = ["DEFAULT_POLICY", "Config", "build_manager", "num_slots_for", "parse_config", "parse_size"]
