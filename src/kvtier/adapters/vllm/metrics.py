"""kvtier's figures under vLLM's metrics: vLLM's names where it has one, `vllm:kvtier_*` for ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)
from vllm.v1.kv_offload.cpu.common import CPUOffloadingMetrics

from kvtier.interfaces import BreakerState, ManagerStats
from kvtier.manager import CircuitBreaker
from kvtier.tier_interfaces import TierStats

_COUNTERS: dict[str, tuple[str, str]] = {
    "stored_blocks": ("vllm:kvtier_stored_blocks", "Blocks stored."),
    "evicted_blocks": ("vllm:kvtier_evicted_blocks", "Blocks evicted to make room."),
    "shed_blocks": ("vllm:kvtier_shed_blocks", "Blocks not stored for want of room."),
    "loaded_blocks": ("vllm:kvtier_loaded_blocks", "Blocks loaded into the engine."),
    "failed_load_blocks": ("vllm:kvtier_failed_load_blocks", "Blocks whose load failed; they were recomputed."),
    "failed_store_blocks": ("vllm:kvtier_failed_store_blocks", "Blocks whose store failed; they are not stored."),
    "reaped_blocks": ("vllm:kvtier_reaped_blocks", "Blocks whose store outlived its limit and was given up."),
    "late_completions": ("vllm:kvtier_late_completions", "Completions that came too late, or twice, and were ignored."),
    "deferred_requests": ("vllm:kvtier_deferred_requests", "Requests that were deferred at least once."),
    "expired_requests": ("vllm:kvtier_expired_requests", "Requests whose deadline passed: they recomputed."),
    "declined_waits": ("vllm:kvtier_declined_waits", "Requests that recomputed since that was cheaper than waiting."),
    "refused_pin_blocks": ("vllm:kvtier_refused_pin_blocks", "Blocks that a hint wanted pinned beyond the share."),
    "ignored_hints": ("vllm:kvtier_ignored_hints", "Hints of requests that were unknown or malformed."),
    "failed_jobs": ("vllm:kvtier_failed_jobs", "Loads and stores that failed, were cancelled or were given up."),
    "breaker_openings": ("vllm:kvtier_breaker_openings", "Times that the RAM tier was shut off for a while."),
    "errors": ("vllm:kvtier_errors", "Errors that were turned into a miss. Each is a bug; the log has the first."),
}
_GAUGES: dict[str, tuple[str, str]] = {
    "capacity_blocks": ("vllm:kvtier_capacity_blocks", "Blocks that fit into the RAM pool."),
    "ready_blocks": ("vllm:kvtier_ready_blocks", "Blocks that can be loaded now."),
    "in_flight_blocks": ("vllm:kvtier_in_flight_blocks", "Blocks being stored now."),
    "pinned_blocks": ("vllm:kvtier_pinned_blocks", "Blocks being loaded now."),
    "condemned_blocks": ("vllm:kvtier_condemned_blocks", "Slots without a block that a transfer still uses."),
    "breaker_state": ("vllm:kvtier_breaker_state", "RAM tier: 0 used, 1 being tried again, 2 shut off after failures."),
}
_PERSISTED_RAM_COUNTERS: dict[str, tuple[str, str]] = {
    "restored_blocks": ("vllm:kvtier_restored_blocks", "Blocks found in RAM at the start, not checked yet."),
    "verified_blocks": ("vllm:kvtier_verified_blocks", "Of those: blocks that were checked and are intact."),
    "corrupt_blocks": ("vllm:kvtier_corrupt_blocks", "Of those: blocks that failed their check: misses."),
}
_TIERED_COUNTERS: dict[str, tuple[str, str]] = {
    "promoted_blocks": ("vllm:kvtier_promoted_blocks", "Blocks brought up from a lower tier into RAM."),
    "failed_promotion_blocks": ("vllm:kvtier_failed_promotion_blocks", "Blocks that did not arrive in RAM."),
    "declined_promotions": (
        "vllm:kvtier_declined_promotions",
        "Requests that recomputed since that was cheaper than a lower tier, or their share of RAM was used up.",
    ),
    "cascaded_blocks": ("vllm:kvtier_cascaded_blocks", "Blocks taken over from RAM by a lower tier."),
    "cascade_shed_blocks": ("vllm:kvtier_cascade_shed_blocks", "Blocks that left RAM before a tier could take them."),
}
_TIER_COUNTERS: dict[str, tuple[str, str]] = {
    "stored_bytes": ("vllm:kvtier_tier_stored_bytes", "Bytes of the blocks that the tier has taken."),
    "loaded_bytes": ("vllm:kvtier_tier_loaded_bytes", "Bytes brought up from the tier and verified."),
    "evicted_blocks": ("vllm:kvtier_tier_evicted_blocks", "Blocks evicted from the tier to make room."),
    "shed_blocks": ("vllm:kvtier_tier_shed_blocks", "Times that the tier, busy, full or away, refused a block."),
    "failed_store_blocks": ("vllm:kvtier_tier_failed_store_blocks", "Blocks that could not be stored in the tier."),
    "failed_load_blocks": ("vllm:kvtier_tier_failed_load_blocks", "Blocks that could not be loaded from the tier."),
    "corrupt_blocks": ("vllm:kvtier_tier_corrupt_blocks", "Blocks of the tier that failed their check: misses."),
    "failed_commits": ("vllm:kvtier_tier_failed_commits", "Times that the tier could not make blocks durable."),
    "connection_losses": ("vllm:kvtier_tier_connection_losses", "Times that the tier's store could not be used."),
    "shed_lookups": ("vllm:kvtier_tier_shed_lookups", "Look-ups that were misses since too many were on their way."),
    "breaker_openings": ("vllm:kvtier_tier_breaker_openings", "Times that the tier was left alone for a while."),
    "compressed_blocks": ("vllm:kvtier_tier_compressed_blocks", "Blocks that were stored in the tier compressed."),
    "decompressed_blocks": ("vllm:kvtier_tier_decompressed_blocks", "Blocks that came from the tier compressed."),
    "compression_saved_bytes": (
        "vllm:kvtier_tier_compression_saved_bytes",
        "Bytes that did not have to be moved since blocks were compressed.",
    ),
    "compression_changes": (
        "vllm:kvtier_tier_compression_changes",
        "Times that compression was switched on or off by what the link was measured to do.",
    ),
}
"""By the label `medium`."""
_TIER_GAUGES: dict[str, tuple[str, str]] = {
    "in_use": ("vllm:kvtier_tier_in_use", "1 while the tier serves; 0: it is off, or away, the log says why."),
    "capacity_bytes": ("vllm:kvtier_tier_capacity_bytes", "What the tier may take; 0: its store bounds itself."),
    "ready_blocks": (
        "vllm:kvtier_tier_ready_blocks",
        "Blocks that can be loaded from the tier now; of a shared one, those that this engine has heard of lately.",
    ),
    "breaker_state": ("vllm:kvtier_tier_breaker_state", "As the RAM tier's."),
    "compression_on": ("vllm:kvtier_tier_compression_on", "1 while blocks are stored in the tier compressed."),
}
"""By the label `medium`."""
_LABELS = ("medium",)
_BREAKER_VALUES = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}
_STORES_SKIPPED = "filtered_blocks"


def metric_definitions(
    has_reuse_filter: bool, has_tiers: bool, has_persisted_ram: bool = False
) -> dict[str, OffloadingMetricMetadata]:
    """Every metric that `MetricsReporter` may report, as vLLM wants them declared. `has_tiers`: below RAM."""
    definitions: dict[str, OffloadingMetricMetadata] = {
        CPUOffloadingMetrics.CPU_CACHE_USAGE_PERC: OffloadingGaugeMetadata(
            "Fraction of the RAM pool in use by transfers (0.0 = idle, 1.0 = saturated)."
        ),
        CPUOffloadingMetrics.CPU_CACHE_WRITE_USAGE_PERC: OffloadingGaugeMetadata(
            "Fraction of the RAM pool that stores are writing."
        ),
        CPUOffloadingMetrics.CPU_CACHE_READ_USAGE_PERC: OffloadingGaugeMetadata(
            "Fraction of the RAM pool that loads are reading."
        ),
        CPUOffloadingMetrics.CPU_ALLOCATION_SIZE: OffloadingHistogramMetadata(
            "Blocks asked for by each store.",
            buckets=(1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144),
        ),
    }
    counters = _counters(has_tiers, has_persisted_ram)
    definitions.update({name: OffloadingCounterMetadata(text) for name, text in counters.values()})
    definitions.update({name: OffloadingGaugeMetadata(text) for name, text in _GAUGES.values()})
    if has_tiers:
        definitions.update({name: OffloadingCounterMetadata(text, _LABELS) for name, text in _TIER_COUNTERS.values()})
        definitions.update({name: OffloadingGaugeMetadata(text, _LABELS) for name, text in _TIER_GAUGES.values()})
    if has_reuse_filter:
        definitions[CPUOffloadingMetrics.STORES_SKIPPED] = OffloadingCounterMetadata(
            "Stores skipped because the reuse threshold was not reached."
        )
    return definitions


@dataclass(frozen=True, slots=True)
class TierFigures:
    """Of one tier below RAM, by what `_TIER_COUNTERS` and `_TIER_GAUGES` call them."""

    counters: Mapping[str, int]
    gauges: Mapping[str, int]


TIER_IS_OFF = TierFigures({}, {"in_use": 0})
"""A tier that is wanted, and is not there."""


def tier_figures(stats: TierStats, breaker: CircuitBreaker, slot_bytes: int) -> TierFigures:
    """Of a tier that was opened."""
    counters = dict(stats.counters)
    for kind in ("stored", "loaded"):
        counters[f"{kind}_bytes"] = counters.get(f"{kind}_blocks", 0) * slot_bytes
    counters["breaker_openings"] = breaker.num_openings
    gauges = {
        "in_use": int(not (stats.closed_reason or stats.down_reason)),
        "capacity_bytes": stats.capacity_bytes,
        "ready_blocks": stats.ready_blocks,
        "breaker_state": _BREAKER_VALUES[breaker.state],
    }
    if "compression_on" in counters:
        gauges["compression_on"] = counters["compression_on"]
    return TierFigures({name: counters[name] for name in _TIER_COUNTERS if name in counters}, gauges)


class MetricsReporter:
    """Turns a manager's stats into vLLM's: counters as increments, and nothing at all while nothing changes."""

    def __init__(self, has_reuse_filter: bool, has_tiers: bool, has_persisted_ram: bool = False) -> None:
        counters = _counters(has_tiers, has_persisted_ram)
        self._counters = {key: name for key, (name, _) in counters.items()}
        if has_reuse_filter:
            self._counters[_STORES_SKIPPED] = CPUOffloadingMetrics.STORES_SKIPPED
        self._reported: dict[tuple[str, tuple[str, ...]], int] = {}
        """By metric and labels."""
        self._last: tuple[Any, ...] | None = None
        self.store_sizes: list[int] = []
        """Blocks of each store since the last report."""

    def report(
        self,
        stats: ManagerStats,
        extra_counters: Mapping[str, int],
        tiers: Mapping[str, TierFigures] = MappingProxyType({}),
    ) -> OffloadingConnectorStats | None:
        """What has changed since the last call, or None. `extra_counters` are the adapter's own, `tiers` those below
        RAM by name."""
        counters = {**stats.counters, **extra_counters}
        gauges = {name: _gauge(stats, key) for key, (name, _) in _GAUGES.items()}
        seen = (gauges, counters, dict(tiers))
        if seen == self._last:
            return None
        self._last = seen
        report = OffloadingConnectorStats()
        for key, name in self._counters.items():
            self._count(report, name, (), counters.get(key, 0))
        for name, value in gauges.items():
            report.set_gauge(name, value)
        for medium, figures in tiers.items():
            for key, count in figures.counters.items():
                self._count(report, _TIER_COUNTERS[key][0], (medium,), count)
            for key, value in figures.gauges.items():
                report.set_gauge(_TIER_GAUGES[key][0], value, (medium,))
        for size in self.store_sizes:
            report.observe_histogram(CPUOffloadingMetrics.CPU_ALLOCATION_SIZE, size)
        self.store_sizes.clear()
        writing = stats.in_flight_blocks / stats.capacity_blocks
        reading = (stats.pinned_blocks + stats.condemned_blocks) / stats.capacity_blocks
        report.set_gauge(CPUOffloadingMetrics.CPU_CACHE_USAGE_PERC, writing + reading)
        report.set_gauge(CPUOffloadingMetrics.CPU_CACHE_WRITE_USAGE_PERC, writing)
        report.set_gauge(CPUOffloadingMetrics.CPU_CACHE_READ_USAGE_PERC, reading)
        return report

    def _count(self, report: OffloadingConnectorStats, name: str, labels: tuple[str, ...], count: int) -> None:
        """Reports the increase, the first time also none: a counter that nobody has seen cannot be watched."""
        before = self._reported.get((name, labels))
        if before is None or count != before:
            report.increase_counter(name, count - (before or 0), labels)
            self._reported[name, labels] = count


def _counters(has_tiers: bool, has_persisted_ram: bool) -> dict[str, tuple[str, str]]:
    tiered = _TIERED_COUNTERS if has_tiers else {}
    return {**_COUNTERS, **tiered, **(_PERSISTED_RAM_COUNTERS if has_persisted_ram else {})}


def _gauge(stats: ManagerStats, key: str) -> int:
    value = getattr(stats, key)
    return _BREAKER_VALUES[value] if isinstance(value, BreakerState) else int(value)
