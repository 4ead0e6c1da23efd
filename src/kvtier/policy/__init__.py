"""Eviction policies, by name. One file a policy; keys only, no I/O."""

from kvtier.errors import ConfigurationError
from kvtier.interfaces import CachePolicy
from kvtier.policy.adaptive import AdaptiveCachePolicy
from kvtier.policy.arc import ARCCachePolicy
from kvtier.policy.lru import LRUCachePolicy
from kvtier.policy.lru2 import LRU2CachePolicy
from kvtier.policy.s3fifo import S3FIFOCachePolicy

POLICIES: dict[str, type[CachePolicy]] = {
    policy.name: policy
    for policy in (AdaptiveCachePolicy, ARCCachePolicy, LRU2CachePolicy, LRUCachePolicy, S3FIFOCachePolicy)
}


def make_policy(name: str, cache_capacity: int) -> CachePolicy:
    """A new policy of this name for `cache_capacity` blocks. Raises ConfigurationError for an unknown name."""
    try:
        policy = POLICIES[name]
    except KeyError:
        raise ConfigurationError(
            f"eviction policy {name!r} is unknown; allowed: {', '.join(sorted(POLICIES))}"
        ) from None
    return policy(cache_capacity)


__all__ = [
    "POLICIES",
    "ARCCachePolicy",
    "AdaptiveCachePolicy",
    "LRU2CachePolicy",
    "LRUCachePolicy",
    "S3FIFOCachePolicy",
    "make_policy",
]
