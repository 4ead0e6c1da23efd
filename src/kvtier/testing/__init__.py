"""For those who write managers, policies, tiers and workers of their own: a reference model, and injected faults."""

from kvtier.testing.faulty_worker import FaultyWorker, WorkerFaults
from kvtier.testing.model import ReferenceManager
from kvtier.testing.model_policies import ReferenceARC, ReferenceLRU
from kvtier.testing.observe import eviction_order, make_keys, snapshot, store_ready

__all__ = [
    "FaultyWorker",
    "ReferenceARC",
    "ReferenceLRU",
    "ReferenceManager",
    "WorkerFaults",
    "eviction_order",
    "make_keys",
    "snapshot",
    "store_ready",
]
