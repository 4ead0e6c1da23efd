"""Looking at a manager from outside, and the few steps that most tests begin with."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from kvtier.interfaces import CachePolicy, CPULoadStoreSpec, OffloadingManager, ReqContext
from kvtier.keys import OffloadKey, make_offload_key

_LISTS = ("t1", "t2", "b1", "b2", "small", "main", "ghosts")
# others may count questions too
_COUNTERS_OF_STATE = ("stored_blocks", "evicted_blocks", "late_completions")


def make_keys(count: int, prefix: str = "k") -> list[OffloadKey]:
    """Distinct keys of group 0: `k0`, `k1`, ..."""
    return [make_offload_key(f"{prefix}{i}".encode(), 0) for i in range(count)]


def eviction_order(policy: CachePolicy) -> list[OffloadKey]:
    """The order in which the policy would evict everything now. The policy itself is not changed."""
    victims = copy.deepcopy(policy).evict(len(policy))
    assert victims is not None
    return victims


def policy_state(policy: CachePolicy) -> dict[str, Any]:
    """Eviction order and the lists that a policy shows, and ARC's target."""
    state: dict[str, Any] = {"order": eviction_order(policy), "resident": sorted(policy)}
    for name in _LISTS:
        if hasattr(policy, name):
            state[name] = list(getattr(policy, name))
    if hasattr(policy, "target_t1_size"):
        state["target_t1_size"] = float(policy.target_t1_size)
    return state


def snapshot(manager: OffloadingManager, keys: Sequence[OffloadKey], policy: CachePolicy) -> dict[str, Any]:
    """Everything that the contract lets one see without changing it: equal snapshots, equal managers."""
    stats = manager.get_stats()
    return {
        "residency": {key: manager.residency(key) for key in keys},
        "gauges": (
            stats.capacity_blocks,
            stats.ready_blocks,
            stats.in_flight_blocks,
            stats.pinned_blocks,
            stats.condemned_blocks,
        ),
        "counters": [stats.counters.get(name, 0) for name in _COUNTERS_OF_STATE],
        **policy_state(policy),
    }


def store_ready(manager: OffloadingManager, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[int]:
    """Stores `keys` and completes the store. The slots that they got."""
    granted = manager.prepare_store(keys, req_context)
    assert granted is not None
    assert isinstance(granted.store_spec, CPULoadStoreSpec)
    manager.complete_store(granted.keys_to_store, req_context, True, granted.store_spec)
    slots: list[int] = granted.store_spec.block_ids.tolist()
    return slots
