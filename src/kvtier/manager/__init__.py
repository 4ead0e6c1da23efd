"""Managers: the scheduler-side decisions over one tier, the reuse filter, and the request-level driver."""

from kvtier.manager.cpu import CPUOffloadingManager
from kvtier.manager.driver import LoadPlan, RequestDriver, StorePlan
from kvtier.manager.jobs import JobTable, TransferRecord
from kvtier.manager.reuse_filter import FilterReusedOffloadingManager, ReuseFilter

__all__ = [
    "CPUOffloadingManager",
    "FilterReusedOffloadingManager",
    "JobTable",
    "LoadPlan",
    "RequestDriver",
    "ReuseFilter",
    "StorePlan",
    "TransferRecord",
]
