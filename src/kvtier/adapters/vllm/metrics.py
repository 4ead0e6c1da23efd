"""kvtier's figures under vLLM's metrics: vLLM's names where it has one, `vllm:kvtier_*` for ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
_DISK_COUNTERS: dict[str, tuple[str, str]] = {
    "promoted_blocks": ("vllm:kvtier_promoted_blocks", "Blocks brought up from disk into RAM."),
    "failed_promotion_blocks": ("vllm:kvtier_failed_promotion_blocks", "Blocks that did not arrive in RAM."),
    "declined_promotions": (
        "vllm:kvtier_declined_promotions",
        "Requests that recomputed since that was cheaper than the disk, or their share of RAM was used up.",
    ),
    "cascaded_blocks": ("vllm:kvtier_cascaded_blocks", "Blocks taken over from RAM by the disk."),
    "cascade_shed_blocks": ("vllm:kvtier_cascade_shed_blocks", "Blocks that left RAM before the disk could take them."),
    "disk_stored_bytes": ("vllm:kvtier_disk_stored_bytes", "Bytes written to disk."),
    "disk_loaded_bytes": ("vllm:kvtier_disk_loaded_bytes", "Bytes read from disk and verified."),
    "disk_evicted_blocks": ("vllm:kvtier_disk_evicted_blocks", "Blocks evicted from disk to make room."),
    "disk_shed_blocks": ("vllm:kvtier_disk_shed_blocks", "Times that the busy or full disk refused a block."),
    "disk_failed_store_blocks": ("vllm:kvtier_disk_failed_store_blocks", "Blocks that could not be written."),
    "disk_failed_load_blocks": ("vllm:kvtier_disk_failed_load_blocks", "Blocks that could not be read."),
    "disk_corrupt_blocks": ("vllm:kvtier_disk_corrupt_blocks", "Blocks on disk that failed their check: misses."),
    "disk_failed_commits": ("vllm:kvtier_disk_failed_commits", "Times that the disk could not make blocks durable."),
    "disk_breaker_openings": ("vllm:kvtier_disk_breaker_openings", "Times that the disk was left alone for a while."),
}
_DISK_GAUGES: dict[str, tuple[str, str]] = {
    "disk_in_use": (
        "vllm:kvtier_disk_in_use",
        "1 while the disk tier serves; 0: it is off, the log says why.",
    ),
    "disk_capacity_bytes": ("vllm:kvtier_disk_capacity_bytes", "What the disk tier may take."),
    "disk_ready_blocks": ("vllm:kvtier_disk_ready_blocks", "Blocks on disk that can be loaded now."),
    "disk_breaker_state": ("vllm:kvtier_disk_breaker_state", "As the RAM tier's, for the disk."),
}
_BREAKER_VALUES = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}
_STORES_SKIPPED = "filtered_blocks"


def metric_definitions(
    has_reuse_filter: bool, has_disk: bool, has_persisted_ram: bool = False
) -> dict[str, OffloadingMetricMetadata]:
    """Every metric that `MetricsReporter` may report, as vLLM wants them declared."""
    counters = _counters(has_disk, has_persisted_ram)
    gauges = {**_GAUGES, **(_DISK_GAUGES if has_disk else {})}
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
    definitions.update({name: OffloadingCounterMetadata(text) for name, text in counters.values()})
    definitions.update({name: OffloadingGaugeMetadata(text) for name, text in gauges.values()})
    if has_reuse_filter:
        definitions[CPUOffloadingMetrics.STORES_SKIPPED] = OffloadingCounterMetadata(
            "Stores skipped because the reuse threshold was not reached."
        )
    return definitions


class MetricsReporter:
    """Turns a manager's stats into vLLM's: counters as increments, and nothing at all while nothing changes."""

    def __init__(self, has_reuse_filter: bool, has_disk: bool, has_persisted_ram: bool = False) -> None:
        counters = _counters(has_disk, has_persisted_ram)
        self._counters = {key: name for key, (name, _) in counters.items()}
        if has_reuse_filter:
            self._counters[_STORES_SKIPPED] = CPUOffloadingMetrics.STORES_SKIPPED
        self._reported: dict[str, int] = {}
        self._last: tuple[Any, ...] | None = None
        self.store_sizes: list[int] = []
        """Blocks of each store since the last report."""

    def report(
        self, stats: ManagerStats, extra_counters: dict[str, int], disk_gauges: Mapping[str, int] = MappingProxyType({})
    ) -> OffloadingConnectorStats | None:
        """What has changed since the last call, or None. `extra_counters` are the adapter's own and the disk's."""
        counters = {**stats.counters, **extra_counters}
        gauges = {name: _gauge(stats, key) for key, (name, _) in _GAUGES.items()}
        gauges.update({_DISK_GAUGES[key][0]: value for key, value in disk_gauges.items()})
        seen = (gauges, counters)
        if seen == self._last:
            return None
        self._last = seen
        report = OffloadingConnectorStats()
        for key, name in self._counters.items():
            increase = counters.get(key, 0) - self._reported.get(key, 0)
            if increase or self._reported.get(key) is None:
                report.increase_counter(name, increase)
                self._reported[key] = counters.get(key, 0)
        for name, value in gauges.items():
            report.set_gauge(name, value)
        for size in self.store_sizes:
            report.observe_histogram(CPUOffloadingMetrics.CPU_ALLOCATION_SIZE, size)
        self.store_sizes.clear()
        writing = stats.in_flight_blocks / stats.capacity_blocks
        reading = (stats.pinned_blocks + stats.condemned_blocks) / stats.capacity_blocks
        report.set_gauge(CPUOffloadingMetrics.CPU_CACHE_USAGE_PERC, writing + reading)
        report.set_gauge(CPUOffloadingMetrics.CPU_CACHE_WRITE_USAGE_PERC, writing)
        report.set_gauge(CPUOffloadingMetrics.CPU_CACHE_READ_USAGE_PERC, reading)
        return report


def disk_figures(
    tiers: Sequence[TierStats], breakers: Sequence[CircuitBreaker], slot_bytes: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Counters and gauges of the tier below RAM. Without one it is off, and nothing is counted."""
    if not tiers:
        return {}, {"disk_in_use": 0}
    (tier,), (breaker,) = tiers, breakers
    counters = {f"disk_{name}": count for name, count in tier.counters.items()}
    for kind in ("stored", "loaded"):
        counters[f"disk_{kind}_bytes"] = counters.get(f"disk_{kind}_blocks", 0) * slot_bytes
    counters["disk_breaker_openings"] = breaker.num_openings
    gauges = {
        "disk_in_use": int(not tier.closed_reason),
        "disk_capacity_bytes": tier.capacity_bytes,
        "disk_ready_blocks": tier.ready_blocks,
        "disk_breaker_state": _BREAKER_VALUES[breaker.state],
    }
    return counters, gauges


def _counters(has_disk: bool, has_persisted_ram: bool) -> dict[str, tuple[str, str]]:
    disk = _DISK_COUNTERS if has_disk else {}
    return {**_COUNTERS, **disk, **(_PERSISTED_RAM_COUNTERS if has_persisted_ram else {})}


def _gauge(stats: ManagerStats, key: str) -> int:
    value = getattr(stats, key)
    return _BREAKER_VALUES[value] if isinstance(value, BreakerState) else int(value)
