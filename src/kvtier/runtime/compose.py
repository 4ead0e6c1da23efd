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
from kvtier.runtime.tiers import SharedSettings, TierSettings, tier_names
from kvtier.tier_interfaces import EpochStore, Tier
from kvtier.tiers.disk import DiskConfig, DiskTier, FileEpochStore, WeightEpochs
from kvtier.tiers.ram_keeper import RamKeeper
from kvtier.tiers.shared import SharedEpochs, SharedTier

logger = logging.getLogger(__name__)

_FLUSH_SHARE = 0.8
"""Of the time that a stop may take to flush: for writing. The rest makes it durable."""
_FLUSH_PAUSE_S = 0.01


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose blocks a persisted or shared tier holds."""

    namespace: bytes
    """32 bytes: see `kvtier.runtime.identity`."""
    label: str = ""
    """For people who look at the folder."""
    rank: int = 0
    """Which of `num_ranks` engines this is that were started with one configuration."""
    num_ranks: int = 1
    weights_may_change: bool = False
    """The engine is made to be given other weights while it runs, reset or not: what it has is not for others."""
    element_bytes: int = 2
    """Of the KV cache's elements, for compression."""


@dataclass(frozen=True, slots=True)
class _Opened:
    """A tier that is open."""

    name: str
    tier: Tier
    epochs: EpochStore
    settings: TierSettings


@dataclass(slots=True)
class Stack:
    """The managers and tiers of one engine, the RAM pool not among them."""

    core: OffloadingManager
    """What an adapter calls."""
    ram: CPUOffloadingManager
    tiered: TieredOffloadingManager | None = None
    """In `core`, or that itself, where there are tiers below RAM."""
    tiers: list[Tier] = field(default_factory=list)
    """Below RAM, attached, the nearest first."""
    tier_names: list[str] = field(default_factory=list)
    """Of each of them: see `kvtier.runtime.tiers.tier_names`."""
    stop_flush_s: list[float] = field(default_factory=list)
    """Of each of them: how long a stop may take to write what is only in RAM."""
    keeper: RamKeeper | None = None
    """Of a RAM pool that outlives the process."""
    _is_stopped: bool = False

    @property
    def breakers(self) -> list[tuple[str, CircuitBreaker]]:
        """Name, in capitals, and breaker of each tier that has one, RAM first. The caller owns the list."""
        below = self.tiered.breakers if self.tiered is not None else []
        named = [(name.upper(), breaker) for name, (_, breaker) in zip(self.tier_names, below, strict=True)]
        return ([("RAM", self.ram.breaker)] if self.ram.breaker is not None else []) + named

    def linger(self, timeout_s: float) -> None:
        """Returns once something that a request waits for may have been checked, or have come from a lower tier, or
        after `timeout_s`."""
        if self.keeper is not None and isinstance(self.ram, PersistedOffloadingManager) and self.ram.num_checking:
            self.keeper.wait_for_outcome(timeout_s)
            return
        awaited = self.tiered.awaited_tiers if self.tiered is not None else []
        for tier in awaited:
            tier.wait_for_outcome(timeout_s / len(awaited))

    def stop(self, now_s: Callable[[], float] = time.monotonic) -> bool:
        """Flushes RAM to the tiers below it for at most the longest `stop_flush_s`, then closes them. The workers have
        ended.

        `now_s` is the managers' time. Returns False if a transfer is stuck in a medium: keep the pool mapped then.
        """
        if self._is_stopped:
            return self._close(0.0)
        self._is_stopped = True
        left_s = max(self.stop_flush_s, default=0.0)
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
        wanted = [number for number, flush_s in enumerate(self.stop_flush_s) if flush_s > 0]
        num_blocks, began_s = tiered.flush_down(wanted), time.monotonic()
        while (left_s := until_s - time.monotonic()) > 0 and tiered.num_to_flush:
            tiered.on_schedule_end()
            for tier in self.tiers:
                tier.wait_for_outcome(min(left_s, _FLUSH_PAUSE_S))
            if not tiered.num_cascading:
                if all(stats.closed_reason or stats.down_reason for stats in tiered.tier_stats()):
                    break
                time.sleep(min(left_s, _FLUSH_PAUSE_S))  # refused: the tier is full, or left alone for a while
            tiered.advance(now_s())
        if num_blocks:
            num_left = tiered.num_to_flush
            logger.info(
                "kvtier: of what was only in RAM %d blocks have gone down to %s, %d have not, after %.1f s",
                num_blocks - num_left,
                " and ".join(self.tier_names),
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
    """The managers of one engine, and the tiers behind its RAM, opened over `pool`.

    `pool` is (num_slots, slot_bytes) uint8 and stays mapped until `Stack.stop` has returned True. Without an `identity`
    there is no tier that persists or is shared. Raises ConfigurationError for settings that cannot work. A disk that
    cannot be used now (in use, full, failing) is an error in the log, and the stack is without it; a store that is not
    there now is a line in the log, and tried again all the time. `keeper` is that of a pool that outlives the process,
    and the stack's from now on.
    """
    opened = _open_tiers(config, pool, identity) if identity is not None else []
    if not opened:
        ram = _build_ram(config, len(pool), enable_events, config.store_threshold, keeper)
        return Stack(ram, ram, keeper=keeper)
    tiers = [each.tier for each in opened]
    try:
        ram = _build_ram(config, len(pool), enable_events, 0, keeper)
        tiered = TieredOffloadingManager(
            ram,
            tiers,
            cascade_when=[ADMISSIONS[each.settings.admission].value for each in opened],
            epochs=[each.epochs for each in opened],
            enable_events=enable_events,
        )
        core: OffloadingManager = tiered
        if config.store_threshold > 1:
            core = FilterReusedOffloadingManager(tiered, config.store_threshold, config.max_tracker_size)
    except BaseException:
        _close(tiers)
        raise
    flush_s = [each.settings.stop_flush_s for each in opened]
    return Stack(core, ram, tiered, tiers, [each.name for each in opened], flush_s, keeper)


def _open_tiers(config: Config, pool: npt.NDArray[np.uint8], identity: Identity) -> list[_Opened]:
    """Those that can be opened, in their order. If one raises, none stays open."""
    opened: list[_Opened] = []
    try:
        for name, settings in zip(tier_names(config.tiers), config.tiers, strict=True):
            if isinstance(settings, SharedSettings):
                opened.append(_Opened(name, *_open_shared(settings, pool, identity), settings))
            elif (disk := open_disk(settings, pool, identity)) is not None:
                opened.append(_Opened(name, disk, disk.epoch_store, settings))
    except BaseException:
        _close([each.tier for each in opened])
        raise
    return opened


def _open_shared(
    settings: SharedSettings, pool: npt.NDArray[np.uint8], identity: Identity
) -> tuple[SharedTier, EpochStore]:
    """All data-parallel ranks of all engines with this namespace share the blocks: see
    docs/decisions/shared-tiers-in-the-engine.md."""
    epochs = SharedEpochs(settings.epoch)
    tier = SharedTier(settings.config(identity.namespace, identity.element_bytes), settings.make_store(), epochs)
    tier.attach(pool)
    if identity.weights_may_change:
        tier.reset(epochs.advance())
    return tier, epochs


def _close(tiers: list[Tier]) -> None:
    for tier in tiers:
        tier.close()


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
        if identity.weights_may_change:  # what is there is of the files' weights, what will be there perhaps not
            tier.reset(tier.epoch_store.advance())
    except TierError as error:
        tier.close()
        logger.error("kvtier: no disk tier, blocks stay in RAM only: %s", error)
        return None
    return tier
