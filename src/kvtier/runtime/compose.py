"""The composition root: from a checked configuration to the parts that run."""

from __future__ import annotations

from kvtier.manager import CircuitBreaker, CPUOffloadingManager
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
        breaker=build_breaker(config),
    )


def build_breaker(config: Config) -> CircuitBreaker | None:
    """A breaker for one tier; None where the user wants none."""
    if not config.breaker_failures:
        return None
    return CircuitBreaker(config.breaker_failures, config.breaker_cooldown_s)
