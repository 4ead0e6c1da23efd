"""For those who write managers, policies, tiers and workers of their own: a reference model, and injected faults.

`kvtier.testing.driver_machine` has a Hypothesis state machine over the request-level driver (it needs `hypothesis`);
`CheckedDriver` is what it drives, for use by hand or from a simulation.
"""

from kvtier.testing.bounded_tier_suite import TierConformance
from kvtier.testing.checked_driver import CheckedDriver
from kvtier.testing.faulty_tier import FaultyTier, TierFaults
from kvtier.testing.faulty_worker import FaultyWorker, WorkerFaults
from kvtier.testing.model import ReferenceManager
from kvtier.testing.model_policies import ReferenceARC, ReferenceLRU, ReferenceLRU2, ReferenceS3FIFO
from kvtier.testing.observe import eviction_order, make_keys, snapshot, store_ready
from kvtier.testing.policy_driver import PolicyDriver
from kvtier.testing.policy_suite import PolicyConformance
from kvtier.testing.promises import Promises
from kvtier.testing.simulated_disk import SimulatedFileSystem
from kvtier.testing.tier_driver import TierDriver
from kvtier.testing.tier_suite import UnboundedTierConformance

__all__ = [
    "CheckedDriver",
    "FaultyTier",
    "FaultyWorker",
    "PolicyConformance",
    "PolicyDriver",
    "Promises",
    "ReferenceARC",
    "ReferenceLRU",
    "ReferenceLRU2",
    "ReferenceManager",
    "ReferenceS3FIFO",
    "SimulatedFileSystem",
    "TierConformance",
    "TierDriver",
    "TierFaults",
    "UnboundedTierConformance",
    "WorkerFaults",
    "eviction_order",
    "make_keys",
    "snapshot",
    "store_ready",
]
