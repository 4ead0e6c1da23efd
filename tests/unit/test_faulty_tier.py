"""The fault-injecting wrapper of a tier: each fault does what it says, a seed always the same; the manager survives."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from kvtier import CPUOffloadingManager, RequestDriver, TieredOffloadingManager
from kvtier.errors import ConfigurationError
from kvtier.testing import FaultyTier, TierDriver, TierFaults, make_keys
from kvtier.tiers.memory import MemoryTier

SLOT_BYTES = 64
NUM_SLOTS = 16


def driver_of(**faults: float) -> tuple[TierDriver, FaultyTier]:
    tier = FaultyTier(MemoryTier(NUM_SLOTS), TierFaults(**faults))  # type: ignore[arg-type]
    return TierDriver(tier, NUM_SLOTS, SLOT_BYTES), tier


def test_without_faults_nothing_happens():
    driver, tier = driver_of()
    keys = make_keys(4)
    assert driver.store(keys).success
    assert driver.load(keys).success
    assert [driver.loaded_version(key, slot) for slot, key in enumerate(keys)] == [0] * 4
    assert not tier.dealt


def test_a_refused_store_is_no_job():
    driver, tier = driver_of(refuse=1.0)
    assert driver.submit_store(make_keys(3)) == 0
    assert tier.dealt["refuse"] == 1


def test_a_failed_store_leaves_nothing_and_a_failed_load_leaves_anything():
    driver, tier = driver_of(fail=1.0)
    keys = make_keys(3)
    assert driver.store(keys).succeeded == (False,) * 3
    assert driver.ready(keys) == []
    tier.faults_off()
    driver.store(keys)
    tier.faults_on()
    assert driver.load(keys).succeeded == (False,) * 3
    assert not any(driver.loaded_version(key, slot) == 0 for slot, key in enumerate(keys))


def test_some_blocks_of_a_job_fail():
    driver, _ = driver_of(fail_some=1.0)
    keys = make_keys(4)
    assert driver.store(keys).succeeded == (False, True, False, True)
    assert driver.ready(keys) == [keys[1], keys[3]]


def test_a_stalled_job_begins_later_or_never():
    driver, tier = driver_of(stall=1.0, longest_polls=1)
    keys = make_keys(2)
    store = driver.submit_store(keys)
    assert tier.inner.get_stats().storing_blocks == 0
    assert driver.finish(store).success
    load = driver.submit_load(keys)
    tier.cancel(load)
    assert driver.finish(load).reason == "cancelled"
    load = driver.submit_load(keys)
    tier.reset(1)
    assert driver.finish(load).reason == "reset"


def test_a_late_outcome_is_given_in_the_end():
    driver, tier = driver_of(delay=1.0, longest_polls=4)
    store = driver.submit_store(make_keys(1))
    outcomes = [driver.poll() for _ in range(4)]
    assert [outcome.job_id for given in outcomes for outcome in given] == [store]
    assert tier.dealt["delay"] == 1


def test_outcomes_change_places():
    # the first job is held back until the second has ended
    driver, tier = driver_of(reorder=1.0)
    first = driver.submit_store(make_keys(4)[:2])
    tier.poll()
    tier.faults = TierFaults()
    second = driver.submit_store(make_keys(4)[2:], slots=[2, 3])
    assert [outcome.job_id for outcome in driver.poll()] == [second, first]


def test_an_outcome_comes_twice_or_never():
    driver, tier = driver_of(duplicate=1.0)
    store = driver.submit_store(make_keys(1))
    assert [[outcome.job_id for outcome in tier.poll()] for _ in range(3)] == [[store], [store], []]
    driver, tier = driver_of(drop=1.0)
    driver.submit_store(make_keys(1))
    assert [tier.poll() for _ in range(20)] == [[]] * 20


def test_a_corrupt_load_is_said_to_be_well():
    driver, _ = driver_of(corrupt=1.0)
    keys = make_keys(2)
    driver.store(keys)
    assert driver.load(keys).success
    assert driver.loaded_version(keys[0], 0) is None
    assert driver.loaded_version(keys[1], 1) == 0


def test_death_and_revival():
    driver, tier = driver_of()
    keys = make_keys(2)
    driver.store(keys)
    tier.dead = True
    assert driver.ready(keys) == []
    assert driver.submit_store(make_keys(4)[2:]) == 0
    assert not any(driver.load(keys).succeeded)
    tier.dead = False
    assert driver.load(keys).success


def test_the_same_seed_strikes_the_same_jobs():
    def dealt(seed: int) -> list[Counter[str]]:
        driver, tier = driver_of(seed=seed, refuse=0.3, fail=0.3, delay=0.3)
        counts = []
        for number in range(40):
            driver.submit_store(make_keys(40)[number : number + 1])
            driver.poll()
            counts.append(Counter(tier.dealt))
        return counts

    assert dealt(3) == dealt(3)
    assert dealt(3) != dealt(4)


@pytest.mark.parametrize("settings", [{"fail": 1.5}, {"stall": -0.1}, {"longest_polls": 0}])
def test_faults_that_make_no_sense_are_refused(settings):
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        TierFaults(**settings)


@pytest.mark.parametrize("fault", ["duplicate", "drop"])
def test_a_tier_that_breaks_its_contract_does_not_stop_the_manager(fault):
    """Every job of the tier is reported twice, or never: RAM serves on, and no request waits beyond its deadline."""
    tier = FaultyTier(MemoryTier(64), TierFaults(**{fault: 1.0}))
    tier.attach(np.zeros((NUM_SLOTS, SLOT_BYTES), np.uint8))
    ram = CPUOffloadingManager(NUM_SLOTS, deadline_s=1.0, store_timeout_s=5.0)
    manager = TieredOffloadingManager(ram, [tier])
    driver = RequestDriver(manager)
    keys = make_keys(60)
    now_s = 0.0
    for number in range(200):
        prompt = keys[number % 15 * 4 :][:4]
        name = f"r{number}"
        driver.add_request(name, prompt)
        asked_s = now_s
        while driver.match(name) is None:
            now_s += 0.1
            driver.advance(now_s)
            manager.on_schedule_end()
            assert now_s - asked_s <= 1.1
        plan = driver.plan_store(name, len(prompt))
        if plan is not None:
            driver.report(plan.job_id)
        driver.finish(name)
        manager.on_schedule_end()
        now_s += 0.01
        driver.advance(now_s)
        manager.check_invariants()
    assert tier.dealt[fault] > 0
    counters = manager.get_stats().counters
    assert counters["stored_blocks"] > 0
    if fault == "duplicate":
        assert counters["tier_reports_ignored"] > 0
        assert counters["promoted_blocks"] > 0
