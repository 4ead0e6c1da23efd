"""`UnboundedTierConformance`: the contract of a tier as tests, but for what only a tier with a capacity can keep.

For tiers whose medium bounds itself; for all others there is `TierConformance`, with these tests and more.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

from kvtier.errors import ManagerUsageError
from kvtier.interfaces import Residency
from kvtier.testing.observe import make_keys
from kvtier.testing.tier_driver import TierDriver
from kvtier.testing.tier_traffic import RandomTierTraffic
from kvtier.tier_interfaces import REASON_RESET, Tier


class UnboundedTierConformance(ABC):
    """Every test makes its own tiers with `make_tier`."""

    answers_at_once: bool = True
    """Whether `lookup` never says UNKNOWN. Where it may, the tests ask until it says something else."""

    durable: bool = False
    """Whether a tier made by `make_tier` finds what the one before it, closed, has left."""
    slot_bytes: int = 4096
    num_slots: int = 32
    """Slots of the RAM pool of the tests; greater than the capacities they ask for."""

    @abstractmethod
    def make_tier(self, capacity_blocks: int) -> Tier:
        """A tier with room for so many blocks of `slot_bytes` at least, not attached. In one test always the same
        medium, empty at first."""

    def advance_epoch(self) -> int:
        """A weight epoch that was never current before; from now on the one that `make_tier` goes by."""
        self._epoch = getattr(self, "_epoch", 0) + 1
        return self._epoch

    def open(self, capacity_blocks: int = 8) -> TierDriver:
        """A tier with room for so many blocks, attached, in the hands of a driver."""
        return TierDriver(
            self.make_tier(capacity_blocks), self.num_slots, self.slot_bytes, answers_at_once=self.answers_at_once
        )

    # -- life ------------------------------------------------------------------------------------------------

    def test_constructor_starts_no_thread(self) -> None:
        before = threading.active_count()
        tier = self.make_tier(4)
        assert threading.active_count() == before
        assert tier.get_stats().closed_reason

    def test_close_ends_every_job_and_every_thread(self) -> None:
        before = threading.active_count()
        driver = self.open()
        keys = make_keys(6)
        driver.store(keys[:3])
        driver.submit_load(keys[:3])
        driver.submit_store(keys[3:], slots=[10, 11, 12])
        driver.close()
        driver.finish_all()
        driver.close()
        assert threading.active_count() == before
        assert driver.tier.get_stats().closed_reason

    def test_disabled_serves_nothing_and_stores_nothing(self) -> None:
        driver = self.open()
        keys = make_keys(4)
        driver.store(keys[:2])
        load = driver.submit_load(keys[:2])
        driver.tier.disable("a reason")
        assert driver.tier.get_stats().closed_reason == "a reason"
        assert driver.ready(keys) == []
        assert not any(driver.finish(load).succeeded)
        assert driver.submit_store(keys[2:]) == 0
        assert not any(driver.load(keys[:2]).succeeded)
        driver.tier.touch(keys)
        driver.tier.drop(keys)
        driver.close()

    # -- stores and loads ------------------------------------------------------------------------------------

    def test_what_was_stored_comes_back_to_the_byte(self) -> None:
        driver = self.open()
        keys = make_keys(5)
        stored = driver.store(keys)
        assert stored is not None
        assert (stored.is_store, stored.succeeded, stored.reason) == (True, (True,) * 5, "")
        assert stored.success
        assert stored.num_bytes == 5 * self.slot_bytes
        assert stored.duration_s >= 0
        driver.pool[:] = 0
        loaded = driver.finish(driver.submit_load(keys, slots=[9, 3, 7, 5, 1]))
        assert (loaded.is_store, loaded.succeeded, loaded.num_bytes) == (False, (True,) * 5, 5 * self.slot_bytes)
        for key, slot in zip(keys, [9, 3, 7, 5, 1], strict=True):
            assert driver.loaded_version(key, slot) == 0
        assert not driver.pool[[0, 2, 4, 6, 8]].any(), "a load wrote beyond its slots"
        driver.close()

    def test_ready_from_the_poll_of_its_outcome_on(self) -> None:
        driver = self.open()
        keys = make_keys(2)
        job = driver.submit_store(keys)
        assert driver.tier.lookup(keys) == [Residency.ABSENT] * 2
        driver.finish(job)
        assert driver.lookup([keys[1], *make_keys(1, "x"), keys[0]]) == [
            Residency.READY,
            Residency.ABSENT,
            Residency.READY,
        ]
        driver.close()

    def test_a_key_that_is_absent_fails_alone(self) -> None:
        driver = self.open()
        keys = make_keys(3)
        driver.store([keys[0], keys[2]])
        outcome = driver.load(keys)
        assert outcome.succeeded == (True, False, True)
        assert outcome.reason
        assert outcome.num_bytes == 2 * self.slot_bytes
        assert [driver.loaded_version(key, slot) for slot, key in enumerate(keys)] == [0, None, 0]
        driver.close()

    def test_one_block_at_a_time(self) -> None:
        driver = self.open()
        for i, key in enumerate(make_keys(40)):
            assert driver.store([key]) is not None
            assert driver.load([key]).success
            if i % 3:
                assert driver.load([key]).success
        driver.close()

    def test_many_loads_of_one_block_at_once(self) -> None:
        driver = self.open()
        (key,) = make_keys(1)
        driver.store([key])
        jobs = [driver.submit_load([key], slots=[slot]) for slot in range(10)]
        for slot, job in enumerate(jobs):
            assert driver.finish(job).succeeded == (True,)
            assert driver.loaded_version(key, slot) == 0
        driver.tier.check_invariants()
        driver.close()

    def test_a_block_that_is_there_is_not_stored_again(self) -> None:
        driver = self.open()
        keys = make_keys(3)
        driver.store(keys[:2], version=1)
        again = driver.store(keys, version=2)
        assert again is not None
        assert again.succeeded == (True, True, True)
        assert again.num_bytes == self.slot_bytes
        driver.load(keys)
        assert [driver.loaded_version(key, slot) for slot, key in enumerate(keys)] == [1, 1, 2]
        driver.close()

    def test_a_block_that_another_job_is_storing(self) -> None:
        driver = self.open()
        keys = make_keys(3)
        first = driver.submit_store(keys[:2], slots=[0, 1])
        second = driver.submit_store(keys, slots=[2, 3, 4])
        assert driver.finish(second).succeeded == (False, False, True)
        assert driver.finish(first).success
        assert driver.ready(keys) == keys
        driver.close()

    def test_empty_jobs(self) -> None:
        driver = self.open()
        assert driver.submit_store([]) == 0
        assert driver.load([]).succeeded == ()
        assert driver.tier.lookup([]) == []
        driver.tier.touch([])
        driver.tier.drop([])
        driver.close()

    # -- leaving ---------------------------------------------------------------------------------------------

    def test_dropped_blocks_are_gone_at_once(self) -> None:
        driver = self.open()
        keys = make_keys(3)
        driver.store(keys, version=1)
        driver.tier.drop([keys[0], *make_keys(1, "unknown")])
        assert driver.ready(keys) == keys[1:]
        assert driver.tier.take_removed() == [keys[0]]
        driver.store(keys, version=2)
        driver.load(keys)
        assert [driver.loaded_version(key, slot) for slot, key in enumerate(keys)] == [2, 1, 1]
        driver.tier.check_invariants()
        driver.close()

    def test_dropped_under_a_load(self) -> None:
        driver = self.open(2)
        keys = make_keys(2)
        driver.store(keys)
        load = driver.submit_load(keys, slots=[20, 21])
        driver.tier.drop(keys[:1])
        assert driver.finish(load).succeeded == (False, True)
        driver.tier.check_invariants()
        driver.close()

    def test_cancelled_jobs_end(self) -> None:
        driver = self.open(16)
        keys = make_keys(16)
        driver.store(keys[:8])
        load = driver.submit_load(keys[:8], slots=range(20, 28))
        store = driver.submit_store(keys[8:], slots=range(8))
        driver.tier.cancel(load)
        driver.tier.cancel(store)
        driver.tier.cancel(12345)
        loaded, stored = driver.finish(load), driver.finish(store)
        for i, success in enumerate(loaded.succeeded):
            assert not success or driver.loaded_version(keys[i], 20 + i) == 0
        assert driver.ready(keys) == keys[:8] + [keys[8 + i] for i, success in enumerate(stored.succeeded) if success]
        assert all(outcome.success or outcome.reason for outcome in (loaded, stored))
        driver.tier.cancel(store)
        assert driver.store(keys) is not None
        driver.tier.check_invariants()
        driver.close()

    def test_reset_makes_everything_absent(self) -> None:
        driver = self.open(8)
        keys = make_keys(8)
        driver.store(keys[:4])
        load = driver.submit_load(keys[:2], slots=[20, 21])
        store = driver.submit_store(keys[4:6], slots=[10, 11])
        present = driver.submit_store(keys[2:4], slots=[12, 13])
        gone = driver.tier.reset(self.advance_epoch())
        assert sorted(gone) == sorted(keys[:4])
        assert driver.ready(keys) == []
        for job in (load, store, present):
            outcome = driver.finish(job)
            assert not any(outcome.succeeded)
            assert outcome.reason == REASON_RESET
            assert outcome.num_bytes == 0
        assert driver.tier.take_removed() == []
        assert not any(driver.load(keys).succeeded)
        driver.store(keys, version=3)
        assert driver.load(keys).success
        assert [driver.loaded_version(key, slot) for slot, key in enumerate(keys)] == [3] * 8
        driver.tier.check_invariants()
        driver.close()

    # -- misuse ----------------------------------------------------------------------------------------------

    def test_misuse_raises_and_changes_nothing(self) -> None:
        driver = self.open()
        keys, tier = make_keys(3), driver.tier
        driver.store(keys[:2])
        job = driver.submit_load(keys[:1], slots=[20])
        for submit in (tier.submit_store, tier.submit_load):
            _raises(submit, 900, [keys[2], keys[2]], [0, 1])
            _raises(submit, 900, keys, [0, 1])
            _raises(submit, 900, keys[2:], [self.num_slots])
            _raises(submit, 900, keys[2:], [-1])
            _raises(submit, job, keys[2:], [0])
        assert driver.finish(job).success
        assert driver.poll() == []
        assert driver.ready(keys) == keys[:2]
        tier.check_invariants()
        driver.close()

    # -- restart ---------------------------------------------------------------------------------------------

    def test_what_is_there_after_a_restart(self) -> None:
        driver = self.open(8)
        keys = make_keys(8)
        driver.store(keys[:6])
        driver.tier.drop(keys[:1])
        assert driver.tier.flush(10.0)
        driver.close(10.0)
        driver = self.open(8)
        assert driver.ready(keys) == (keys[1:6] if self.durable else [])
        if self.durable:
            assert driver.load(keys[1:6]).success
            assert [driver.loaded_version(key, slot) for slot, key in enumerate(keys[1:6])] == [0] * 5
        driver.store(keys)
        assert driver.ready(keys) == keys
        driver.tier.check_invariants()
        driver.close()

    def test_a_stop_flushes(self) -> None:
        driver = self.open(8)
        keys = make_keys(4)
        driver.submit_store(keys)
        driver.close(10.0)
        driver = self.open(8)
        assert driver.ready(keys) == (keys if self.durable else [])
        driver.close()

    def test_reset_outlives_the_process(self) -> None:
        driver = self.open(8)
        keys = make_keys(4)
        driver.store(keys[:3])
        driver.tier.flush(10.0)
        driver.tier.reset(self.advance_epoch())
        driver.store(keys[2:], version=1)
        driver.tier.close(10.0)
        driver = self.open(8)
        assert driver.ready(keys) == (keys[2:] if self.durable else [])
        assert not any(driver.load(keys[:2]).succeeded)
        driver.close()

    # -- all together ----------------------------------------------------------------------------------------

    def test_random_traffic_never_hands_out_other_bytes(self) -> None:
        driver = self.open(8)
        traffic = RandomTierTraffic(driver, self.num_slots, seed=4)
        for step in range(400):
            traffic.act(step)
            if step % 100 == 99:
                driver.tier.reset(self.advance_epoch())
            traffic.check()
        driver.finish_all()
        driver.close()


def _raises(call: Callable[..., object], *args: object) -> None:
    try:
        call(*args)
    except ManagerUsageError:
        return
    raise AssertionError("misuse went unnoticed")
