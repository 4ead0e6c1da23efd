"""The composition root: from a checked configuration to the parts that run."""

from __future__ import annotations

from kvtier.manager import CPUOffloadingManager
from kvtier.runtime.config import Config


def build_manager(config: Config, num_slots: int, enable_events: bool = False) -> CPUOffloadingManager:
    """The manager of one engine's RAM tier."""
    return CPUOffloadingManager(
        num_slots,
        config.policy,
        enable_events=enable_events,
        store_threshold=config.store_threshold,
        max_tracker_size=config.max_tracker_size,
        deadline_s=config.deadline_s,
        store_timeout_s=config.store_timeout_s,
    )
