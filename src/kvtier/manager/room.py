"""Making room for a store: what may be evicted for it, and how much of it then fits."""

from __future__ import annotations

from collections.abc import Container

from kvtier.index import BlockIndex
from kvtier.interfaces import CachePolicy
from kvtier.keys import OffloadKey
from kvtier.manager.requests import RequestState

Protected = list[Container[OffloadKey]]


def protected_from(index: BlockIndex, own: set[OffloadKey], new: list[OffloadKey]) -> Protected:
    """What no store of the keys `own`, of which `new` are to be stored, may evict."""
    protected: Protected = [own] if len(new) < len(own) else []
    if index.pins:
        protected.append(index.pins)
    if index.in_flight:
        protected.append(index.in_flight)
    return protected


def evict_for_all(
    policy: CachePolicy, count: int, protected: Protected, request: RequestState
) -> list[OffloadKey] | None:
    """Evicts `count` blocks, the request's own ones only if nothing else is left; or nothing, and None."""
    if not request.introduced or request.crowded or not request.accessed:
        return policy.evict(count, protected)
    victims = policy.evict(count, [*protected, request.accessed])
    if victims is None:
        victims = policy.evict(count, protected)
        request.crowded = victims is not None
    return victims


def evict_for_prefix(policy: CachePolicy, count: int, protected: Protected, request: RequestState) -> list[OffloadKey]:
    """Evicts `count` blocks, or all that may be. O(capacity), once a request, where they are not enough."""
    protected = [*protected, request.accessed]
    victims = policy.evict(count, protected)
    if victims is None:
        request.shed = True
        evictable = sum(1 for key in policy if not any(key in container for container in protected))
        victims = policy.evict(evictable, protected) or []
    return victims
