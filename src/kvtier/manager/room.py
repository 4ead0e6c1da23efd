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
    policy: CachePolicy, new: list[OffloadKey], count: int, protected: Protected, request: RequestState
) -> list[OffloadKey] | None:
    """Evicts `count` blocks, the request's own ones only if nothing else is left; or nothing, and None.

    Fewer if the policy declines the last of `new`; then it is not asked about the request's later blocks.
    """
    if request.refused:
        return []
    spares_own = request.introduced and request.accessed and not request.crowded
    victims = policy.evict_for(new, count, [*protected, request.accessed]) if spares_own else None
    if victims is None:
        victims = policy.evict_for(new, count, protected)
        if spares_own and victims is not None:
            request.crowded = True
    if request.introduced and victims is not None and len(victims) < count:
        request.refused = request.shed = True
    return victims


def evict_for_prefix(
    policy: CachePolicy, new: list[OffloadKey], count: int, protected: Protected, request: RequestState
) -> list[OffloadKey]:
    """Evicts `count` blocks, or all that may be, or fewer if the policy declines the last of `new`.

    O(capacity), once a request, where what may be evicted is not enough.
    """
    protected = [*protected, request.accessed]
    victims = policy.evict_for(new, count, protected)
    if victims is None:
        evictable = sum(1 for key in policy if not any(key in container for container in protected))
        fitting = len(new) - count + evictable
        victims = policy.evict_for(new[:fitting], evictable, protected) or []
    request.shed = len(victims) < count
    return victims
