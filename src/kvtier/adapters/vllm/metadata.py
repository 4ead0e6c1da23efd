"""What crosses between the scheduler's process and the workers', beyond vLLM's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)

from kvtier.tiers.ram import PoolHandle


@dataclass
class KVTierConnectorMetadata(OffloadingConnectorMetadata):
    """Scheduler -> workers, every step: vLLM's jobs, where the RAM pool is, and whether there is nothing to compute."""

    pool: PoolHandle | None = None
    is_idle_step: bool = False


@dataclass
class KVTierWorkerMetadata(OffloadingWorkerMetadata):
    """Workers -> scheduler: vLLM's completed jobs, and which of them failed (on at least one rank)."""

    failed_jobs: set[int] = field(default_factory=set)

    def aggregate(self, other: Any) -> KVTierWorkerMetadata:
        """Both ranks' reports in one. vLLM's own would drop the failures."""
        base = super().aggregate(other)
        failed = self.failed_jobs | getattr(other, "failed_jobs", set())
        return KVTierWorkerMetadata(base.completed_jobs, base.transfer_stats, failed)
