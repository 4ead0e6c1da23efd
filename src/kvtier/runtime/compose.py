"""The composition root: from a checked configuration to the parts that run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from kvtier.errors import TierError
from kvtier.interfaces import OffloadingManager
from kvtier.manager import (
    CircuitBreaker,
    CPUOffloadingManager,
    FilterReusedOffloadingManager,
    PersistedOffloadingManager,
    TieredOffloadingManager,
)
from kvtier.runtime.config import Config
from kvtier.runtime.disk import ADMISSIONS, DiskSettings
from kvtier.tier_interfaces import Tier
from kvtier.tiers.disk import DiskConfig, DiskTier, FileEpochStore, WeightEpochs
from kvtier.tiers.ram_keeper import RamKeeper

logger = logging.getLogger(__name__)

_FLUSH_SHARE = 0.8
"""Of the time that a stop may take to flush: for writing. The rest makes it durable."""
_FLUSH_PAUSE_S = 0.01


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose blocks a persisted tier holds."""

    namespace: bytes
    """32 bytes: see `kvtier.runtime.identity`."""
    label: str = ""
    """For people who look at the folder."""
    rank: int = 0
    """Which of `num_ranks` engines this is that were started with one configuration."""
    num_ranks: int = 1


@dataclass(slots=True)
class Stack:
    """The managers and tiers of one engine, the RAM pool not among them."""

    core: OffloadingManager
    """What an adapter calls."""
    ram: CPUOffloadingManager
    tiered: TieredOffloadingManager | None = None
    """In `core`, or that itself, where there are tiers below RAM."""
    tiers: list[Tier] = field(default_factory=list)
    """Below RAM, attached."""
    stop_flush_s: float = 0.0
    keeper: RamKeeper | None = None
    """Of a RAM pool that outlives the process."""
    _is_stopped: bool = False

    @property
    def breakers(self) -> list[tuple[str, CircuitBreaker]]:
        """Medium and breaker of each tier that has one, RAM first. The caller owns the list."""
        below = self.tiered.breakers if self.tiered is not None else []
        return ([("RAM", self.ram.breaker)] if self.ram.breaker is not None else []) + below

    def linger(self, timeout_s: float) -> None:
        """Returns once something that is on its way up, or being checked, may be there, or after `timeout_s`."""
        if self.keeper is not None and isinstance(self.ram, PersistedOffloadingManager) and self.ram.num_checking:
            self.keeper.wait_for_outcome(timeout_s)
        elif self.tiered is not None and self.tiered.num_promoting:
            self.tiers[0].wait_for_outcome(timeout_s)

    def stop(self, now_s: Callable[[], float] = time.monotonic) -> bool:
        """Flushes RAM to the tiers below it for at most `stop_flush_s`, then closes them. The workers have ended.

        `now_s` is the managers' time. Returns False if a transfer is stuck in a medium: keep the pool mapped then.
        """
        if self._is_stopped:
            return self._close(0.0)
        self._is_stopped = True
        left_s = self.stop_flush_s
        if self.tiered is not None and left_s > 0:
            began_s = time.monotonic()
            self._flush_down(self.tiered, began_s + _FLUSH_SHARE * left_s, now_s)
            left_s = max(0.0, began_s + left_s - time.monotonic())
        self.core.shutdown()
        if self.keeper is not None:
            self.keeper.close()
        return self._close(left_s)

    def _close(self, flush_s: float) -> bool:
        closed = [tier.close(flush_s) for tier in self.tiers]  # every one, whatever the first says
        return all(closed)

    def _flush_down(self, tiered: TieredOffloadingManager, until_s: float, now_s: Callable[[], float]) -> None:
        num_blocks, began_s = tiered.flush_down(), time.monotonic()
        while (left_s := until_s - time.monotonic()) > 0 and tiered.num_to_flush:
            tiered.on_schedule_end()
            for tier in self.tiers:
                tier.wait_for_outcome(min(left_s, _FLUSH_PAUSE_S))
            if not tiered.num_cascading:
                if all(tier.get_stats().closed_reason for tier in self.tiers):
                    break
                time.sleep(min(left_s, _FLUSH_PAUSE_S))  # refused: the tier is full, or left alone for a while
            tiered.advance(now_s())
        if num_blocks:
            num_left = tiered.num_to_flush
            logger.info(
                "kvtier: %d blocks that were only in RAM are on disk now, %d are not, after %.1f s",
                num_blocks - num_left,
                num_left,
                time.monotonic() - began_s,
            )


def build_manager(config: Config, num_slots: int, enable_events: bool = False) -> CPUOffloadingManager:
    """The manager of one engine's RAM tier, without tiers below it."""
    return _build_ram(config, num_slots, enable_events, config.store_threshold)


def build_stack(
    config: Config,
    pool: npt.NDArray[np.uint8],
    identity: Identity | None,
    enable_events: bool = False,
    keeper: RamKeeper | None = None,
) -> Stack:
    """The managers of one engine, and the disk tier behind its RAM, opened over `pool`.

    `pool` is (num_slots, slot_bytes) uint8 and stays mapped until `Stack.stop` has returned True. Without an `identity`
    there is no tier that persists. Raises ConfigurationError for settings that cannot work. A disk that cannot be used
    now (in use, full, failing) is an error in the log, and RAM alone. `keeper` is that of a pool that outlives the
    process, and the stack's from now on.
    """
    tier = open_disk(config.disk, pool, identity) if config.disk is not None else None
    if config.disk is None or tier is None:
        ram = _build_ram(config, len(pool), enable_events, config.store_threshold, keeper)
        return Stack(ram, ram, keeper=keeper)
    try:
        ram = _build_ram(config, len(pool), enable_events, 0, keeper)
        tiered = TieredOffloadingManager(
            ram,
            [tier],
            cascade_when=ADMISSIONS[config.disk.admission].value,
            epochs=tier.epoch_store,
            enable_events=enable_events,
        )
        core: OffloadingManager = tiered
        if config.store_threshold > 1:
            core = FilterReusedOffloadingManager(tiered, config.store_threshold, config.max_tracker_size)
    except BaseException:
        tier.close()
        raise
    return Stack(core, ram, tiered, [tier], config.disk.stop_flush_s, keeper)


def build_breaker(config: Config) -> CircuitBreaker | None:
    """A breaker for one tier; None where the user wants none."""
    if not config.breaker_failures:
        return None
    return CircuitBreaker(config.breaker_failures, config.breaker_cooldown_s)


def _build_ram(
    config: Config, num_slots: int, enable_events: bool, store_threshold: int, keeper: RamKeeper | None = None
) -> CPUOffloadingManager:
    persisted = partial(PersistedOffloadingManager, keeper) if keeper is not None else None
    ram = (persisted or CPUOffloadingManager)(
        num_slots,
        config.policy,
        enable_events=enable_events,
        store_threshold=store_threshold,
        max_tracker_size=config.max_tracker_size,
        deadline_s=config.deadline_s,
        store_timeout_s=config.store_timeout_s,
        breaker=build_breaker(config),
        pin_share=config.pin_share,
    )
    if keeper is not None and isinstance(ram, PersistedOffloadingManager):
        ram.recall(keeper.restore())
    return ram


def open_disk(settings: DiskSettings, pool: npt.NDArray[np.uint8], identity: Identity | None) -> DiskTier | None:
    """The disk tier, open over `pool`. None if that is not possible now (an error in the log says why), or nobody can
    tell whose blocks these are. Raises ConfigurationError for settings that cannot work."""
    if identity is None:
        return None
    config = DiskConfig(
        paths=settings.paths,
        capacity_bytes=settings.capacity_bytes,
        namespace=identity.namespace,
        rank=identity.rank,
        num_ranks=identity.num_ranks,
        label=identity.label,
        min_free_bytes=settings.min_free_bytes,
        direct=settings.direct,
        num_threads=settings.num_threads,
    )
    tier = DiskTier(config, WeightEpochs(FileEpochStore(config.epoch_path, rank=identity.rank)))
    try:
        tier.attach(pool)
    except TierError as error:
        logger.error("kvtier: no disk tier, blocks stay in RAM only: %s", error)
        return None
    return tier
