"""Managers: the scheduler-side decisions over one tier, the reuse filter, and the request-level driver."""

from kvtier.manager.breaker import CircuitBreaker, Transfer
from kvtier.manager.cpu import CPUOffloadingManager
from kvtier.manager.driver import LoadPlan, RequestDriver, StorePlan
from kvtier.manager.jobs import JobTable, TransferRecord
from kvtier.manager.persisted import PersistedOffloadingManager
from kvtier.manager.promotions import TieringLimits
from kvtier.manager.reuse_filter import FilterReusedOffloadingManager, ReuseFilter
from kvtier.manager.tiered import TieredOffloadingManager
from kvtier.manager.waiting import PrefillRate

__all__ = [
    "CPUOffloadingManager",
    "CircuitBreaker",
    "FilterReusedOffloadingManager",
    "JobTable",
    "LoadPlan",
    "PersistedOffloadingManager",
    "PrefillRate",
    "RequestDriver",
    "ReuseFilter",
    "StorePlan",
    "TieredOffloadingManager",
    "TieringLimits",
    "Transfer",
    "TransferRecord",
]
