"""kvtier's figures under vLLM's metrics: vLLM's names where it has one, `vllm:kvtier_*` for ours."""

from __future__ import annotations

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
_BREAKER_VALUES = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}
_STORES_SKIPPED = "filtered_blocks"


def metric_definitions(has_reuse_filter: bool) -> dict[str, OffloadingMetricMetadata]:
    """Every metric that `MetricsReporter` may report, as vLLM wants them declared."""
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
    definitions.update({name: OffloadingCounterMetadata(text) for name, text in _COUNTERS.values()})
    definitions.update({name: OffloadingGaugeMetadata(text) for name, text in _GAUGES.values()})
    if has_reuse_filter:
        definitions[CPUOffloadingMetrics.STORES_SKIPPED] = OffloadingCounterMetadata(
            "Stores skipped because the reuse threshold was not reached."
        )
    return definitions


class MetricsReporter:
    """Turns a manager's stats into vLLM's: counters as increments, and nothing at all while nothing changes."""

    def __init__(self, has_reuse_filter: bool) -> None:
        self._counters = {key: name for key, (name, _) in _COUNTERS.items()}
        if has_reuse_filter:
            self._counters[_STORES_SKIPPED] = CPUOffloadingMetrics.STORES_SKIPPED
        self._reported: dict[str, int] = {}
        self._last: tuple[Any, ...] | None = None
        self.store_sizes: list[int] = []
        """Blocks of each store since the last report."""

    def report(self, stats: ManagerStats, extra_counters: dict[str, int]) -> OffloadingConnectorStats | None:
        """What has changed since the last call, or None. `extra_counters` are the adapter's own."""
        counters = {**stats.counters, **extra_counters}
        gauges = tuple(_gauge(stats, key) for key in _GAUGES)
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
        for (name, _), value in zip(_GAUGES.values(), gauges, strict=True):
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


def _gauge(stats: ManagerStats, key: str) -> int:
    value = getattr(stats, key)
    return _BREAKER_VALUES[value] if isinstance(value, BreakerState) else int(value)
