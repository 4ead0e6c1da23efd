"""KV-cache offloading for LLM inference.

The names here are the public API. Engines' adapters live in `kvtier.adapters`; nothing here imports an engine.
"""

from kvtier.errors import (
    BlockNotPinnedError,
    BlockNotReadyError,
    ConfigurationError,
    DuplicateKeyError,
    InvariantError,
    KVTierError,
    ManagerUsageError,
)
from kvtier.events import OffloadingEvent
from kvtier.interfaces import (
    CachePolicy,
    CPULoadStoreSpec,
    LoadStoreSpec,
    ManagerStats,
    OffloadingManager,
    PrefixLookup,
    PrepareStoreOutput,
    ReqContext,
    Residency,
)
from kvtier.keys import OffloadKey, get_offload_block_hash, get_offload_group_idx, make_offload_key
from kvtier.manager import (
    CPUOffloadingManager,
    FilterReusedOffloadingManager,
    RequestDriver,
    TieredOffloadingManager,
    TieringLimits,
)
from kvtier.policy import ARCCachePolicy, LRUCachePolicy

__version__ = "0.1.0"

__all__ = [
    "ARCCachePolicy",
    "BlockNotPinnedError",
    "BlockNotReadyError",
    "CPULoadStoreSpec",
    "CPUOffloadingManager",
    "CachePolicy",
    "ConfigurationError",
    "DuplicateKeyError",
    "FilterReusedOffloadingManager",
    "InvariantError",
    "KVTierError",
    "LRUCachePolicy",
    "LoadStoreSpec",
    "ManagerStats",
    "ManagerUsageError",
    "OffloadKey",
    "OffloadingEvent",
    "OffloadingManager",
    "PrefixLookup",
    "PrepareStoreOutput",
    "ReqContext",
    "RequestDriver",
    "Residency",
    "TieredOffloadingManager",
    "TieringLimits",
    "get_offload_block_hash",
    "get_offload_group_idx",
    "make_offload_key",
]
