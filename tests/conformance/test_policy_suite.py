"""The suite itself: every kind of broken policy makes it go red, in the test that is about that."""

from __future__ import annotations

import pytest

from kvtier.policy import ARCCachePolicy, LRUCachePolicy
from kvtier.testing import PolicyConformance


class BreaksPins(LRUCachePolicy):
    def evict(self, count, protected=()):
        return super().evict(count, protected[1:])


class IsNotAtomic(LRUCachePolicy):
    def evict(self, count, protected=()):
        victims = super().evict(count, protected)
        if victims is None and len(self):
            self.touch([next(iter(self))])
        return victims


class GivesUpTooSoon(LRUCachePolicy):
    def evict(self, count, protected=()):
        return None if protected and any(key in protected[0] for key in self) else super().evict(count, protected)


class EvictsTooMany(LRUCachePolicy):
    def evict(self, count, protected=()):
        return super().evict(min(count + 1, len(self)), protected) if count > 2 else super().evict(count, protected)


class TakesInWhatIsTouched(LRUCachePolicy):
    def settle(self, keys, first_use):
        keys = list(keys)
        super().settle(keys, first_use)
        for key in keys:
            self._queue.setdefault(key)


class LosesWhatIsRemovedTwice(LRUCachePolicy):
    def remove(self, keys):
        super().remove([*keys][1:])


class RemembersForEver(LRUCachePolicy):
    def __init__(self, cache_capacity):
        super().__init__(cache_capacity)
        self.ghosts = []

    def evict(self, count, protected=()):
        victims = super().evict(count, protected)
        self.ghosts += victims or ()
        return victims


class RemembersWhatItIsAskedFor(LRUCachePolicy):
    def __init__(self, cache_capacity):
        super().__init__(cache_capacity)
        self.asked = set()

    def touch(self, keys, first_use=()):
        keys = list(keys)
        self.asked.update(keys)
        super().touch(keys, first_use)


class RemembersFailures(LRUCachePolicy):
    def __init__(self, cache_capacity):
        super().__init__(cache_capacity)
        self.failed = {}

    def remove(self, keys):
        keys = list(keys)
        self.failed.update(dict.fromkeys(keys))
        super().remove(keys)


class CountsEveryUse(LRUCachePolicy):
    def __init__(self, cache_capacity):
        super().__init__(cache_capacity)
        self.uses = []

    def settle(self, keys, first_use):
        keys = list(keys)
        self.uses += keys
        super().settle(keys, first_use)


class GoesByTheHash(LRUCachePolicy):
    def evict(self, count, protected=()):
        if count > len(self):
            return None
        victims = [key for key in set(self) if not any(key in container for container in protected)][:count]
        if len(victims) < count:
            return None
        self.remove(victims)
        return victims


class GoesByChance(LRUCachePolicy):
    """No two of them do the same; what chance would do now and then, so that it is always seen."""

    def __init__(self, cache_capacity):
        super().__init__(cache_capacity)
        self.draws = GoesByChance.made
        GoesByChance.made += 1

    made = 0

    def settle(self, keys, first_use):
        if self.draws % 2:
            super().settle(keys, first_use)
        self.draws += 1


class LooksForEver(LRUCachePolicy):
    def evict(self, count, protected=()):
        victims = super().evict(count, protected)
        while victims is None:
            victims = super().evict(count, protected)
        return victims


class KeepsItsGhosts(ARCCachePolicy):
    def clear(self):
        self.remove([*self])


class NamesKeysTwice(LRUCachePolicy):
    def __iter__(self):
        return iter([*self._queue, *list(self._queue)[:1]])


class NeedsKeys(LRUCachePolicy):
    def touch(self, keys, first_use=()):
        keys = list(keys)
        self.last = keys[-1]
        super().touch(keys, first_use)


BROKEN = {
    BreaksPins: "test_protected_keys_stay_under_any_pressure",
    IsNotAtomic: "test_all_or_nothing",
    GivesUpTooSoon: "test_protected_keys_stay_under_any_pressure",
    EvictsTooMany: "test_any_calls_in_any_order",
    TakesInWhatIsTouched: "test_any_calls_in_any_order",
    LosesWhatIsRemovedTwice: "test_any_calls_in_any_order",
    RemembersForEver: "test_memory_is_bounded_when_no_key_returns",
    RemembersWhatItIsAskedFor: "test_memory_is_bounded_when_nothing_is_stored",
    RemembersFailures: "test_memory_is_bounded_when_every_store_fails",
    CountsEveryUse: "test_memory_is_bounded_under_reuse",
    GoesByTheHash: "test_same_victims_under_another_hash_seed",
    GoesByChance: "test_same_calls_same_victims",
    LooksForEver: "test_the_smallest_cache",
    KeepsItsGhosts: "test_after_clear_as_if_new",
    NamesKeysTwice: "test_everything_can_be_evicted",
    NeedsKeys: "test_empty_calls_change_nothing",
}


class Suite(PolicyConformance):
    finds_the_shortest = False
    broken = GoesByTheHash

    def make_policy(self, capacity):
        return self.broken(capacity)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_goes_red(broken):
    suite = Suite()
    suite.broken = broken
    with pytest.raises((AssertionError, LookupError)):
        getattr(suite, BROKEN[broken])()


def test_every_test_of_the_suite_can_fail():
    tests = {name for name in dir(PolicyConformance) if name.startswith("test_")}
    assert tests == set(BROKEN.values())
