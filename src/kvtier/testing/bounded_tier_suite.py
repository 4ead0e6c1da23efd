"""`TierConformance`: the contract of a tier as tests. Whoever writes a tier subclasses it; pytest does the rest.

class TestMyTier(TierConformance):
    def make_tier(self, capacity_blocks):
        return MyTier(capacity_blocks)
"""

from __future__ import annotations

from abc import abstractmethod

from kvtier.testing.observe import make_keys
from kvtier.testing.tier_driver import TierDriver
from kvtier.testing.tier_suite import UnboundedTierConformance
from kvtier.tier_interfaces import Tier


class TierConformance(UnboundedTierConformance):
    """Every test makes its own tiers with `make_tier`."""

    @abstractmethod
    def make_tier(self, capacity_blocks: int) -> Tier:
        """A tier with room for exactly so many blocks of `slot_bytes`, not attached. In one test always the same
        medium, empty at first."""

    def open(self, capacity_blocks: int = 8) -> TierDriver:
        driver = super().open(capacity_blocks)
        assert driver.tier.get_stats().capacity_blocks == capacity_blocks
        return driver

    # -- room ------------------------------------------------------------------------------------------------

    def test_never_more_than_its_capacity(self) -> None:
        driver = self.open(8)
        everything = []
        for i in range(6):
            keys = make_keys(3, f"p{i}-")
            driver.store(keys)
            everything += keys
            assert driver.tier.get_stats().ready_blocks == len(driver.ready(everything)) <= 8
            assert driver.ready(keys) == keys
        removed = driver.tier.take_removed()
        assert sorted(removed) == sorted(set(everything) - set(driver.ready(everything)))
        assert driver.tier.take_removed() == []
        assert driver.tier.get_stats().counters["evicted_blocks"] == len(removed)
        driver.tier.check_invariants()
        driver.close()

    def test_takes_the_leading_keys_that_fit(self) -> None:
        driver = self.open(4)
        driver.store(make_keys(4, "old"))
        keys = make_keys(7)
        outcome = driver.store(keys)
        assert outcome is not None
        assert len(outcome.succeeded) == 4
        assert outcome.success
        assert driver.ready(keys) == keys[:4]
        assert driver.tier.get_stats().counters["shed_blocks"] == 3
        driver.close()

    def test_evicts_none_of_the_keys_of_the_call(self) -> None:
        driver = self.open(4)
        keys = make_keys(6)
        driver.store(keys[:4])
        outcome = driver.store([keys[0], keys[4], keys[1], keys[5]])
        assert outcome is not None
        assert outcome.success
        assert driver.ready(keys) == [keys[0], keys[1], keys[4], keys[5]]
        driver.close()

    def test_a_block_that_is_being_loaded_stays(self) -> None:
        driver = self.open(4)
        keys, others = make_keys(4), make_keys(8, "other")
        driver.store(keys)
        load = driver.submit_load(keys[:2], slots=[20, 21])
        store = driver.submit_store(others, slots=range(8))
        outcome = driver.finish(store)
        assert len(outcome.succeeded) == 2
        assert driver.finish(load).success
        assert [driver.loaded_version(keys[i], 20 + i) for i in range(2)] == [0, 0]
        assert driver.ready(keys) == keys[:2]
        driver.close()

    def test_nothing_may_leave_so_nothing_is_taken(self) -> None:
        driver = self.open(3)
        keys = make_keys(3)
        driver.store(keys)
        load = driver.submit_load(keys, slots=[20, 21, 22])
        assert driver.submit_store(make_keys(2, "other")) == 0
        assert driver.finish(load).success
        assert driver.store(make_keys(2, "other")) is not None
        driver.close()

    def test_used_blocks_stay_longer(self) -> None:
        driver = self.open(4)
        keys = make_keys(4)
        driver.store(keys)
        driver.tier.touch(keys[:2])
        driver.tier.touch(make_keys(3, "unknown"))
        driver.store(make_keys(2, "new"))
        assert driver.ready(keys) == keys[:2]
        driver.close()

    def test_dropped_under_a_load_keeps_its_place(self) -> None:
        driver = self.open(2)
        keys = make_keys(2)
        driver.store(keys)
        load = driver.submit_load(keys, slots=[20, 21])
        driver.tier.drop(keys[:1])
        assert driver.submit_store(make_keys(2, "other")) == 0, "the place of a block that is being read was reused"
        assert driver.finish(load).succeeded == (False, True)
        assert driver.store(make_keys(1, "other")) is not None
        driver.tier.check_invariants()
        driver.close()
