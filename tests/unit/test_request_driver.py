"""The request-level driver: what its own state machine has found, and the order of its answers."""

import pytest

from kvtier import CPUOffloadingManager, FilterReusedOffloadingManager, ReqContext, RequestDriver, Residency
from kvtier.errors import ManagerUsageError
from kvtier.testing import make_keys

KEYS = make_keys(4)


def stored_prompt(driver, keys=KEYS):
    """A request that has computed, stored and finished its prompt."""
    driver.add_request("first", keys)
    plan = driver.plan_store("first", len(keys))
    driver.report(plan.job_id)
    driver.finish("first")


def test_a_rank_that_reports_twice_does_not_end_the_job_of_another_that_still_copies():
    manager = CPUOffloadingManager(4)
    driver = RequestDriver(manager, num_ranks=2)
    driver.add_request("request", KEYS)
    plan = driver.plan_store("request", len(KEYS))
    assert driver.report(plan.job_id, rank=0) is None
    assert driver.report(plan.job_id, rank=0) is None
    assert driver.jobs.num_unknown_reports == 1
    assert manager.residency(KEYS[0]) is Residency.ARRIVING
    assert driver.report(plan.job_id, rank=1) is not None
    assert manager.residency(KEYS[0]) is Residency.READY


def test_what_a_failed_load_made_absent_is_stored_again_by_its_request():
    manager = CPUOffloadingManager(4)
    driver = RequestDriver(manager)
    stored_prompt(driver)
    driver.add_request("second", KEYS)
    assert driver.match("second") == len(KEYS)
    load = driver.plan_load("second", 0, len(KEYS))
    driver.report(load.job_id, failed=True)
    assert driver.match("second") == 0
    store = driver.plan_store("second", len(KEYS))
    assert store is not None
    assert store.blocks == [0, 1, 2, 3]


def test_a_failed_load_of_an_earlier_request_of_the_same_name_changes_nothing_for_the_later_one():
    driver = RequestDriver(CPUOffloadingManager(4))
    stored_prompt(driver)
    driver.add_request("second", KEYS[:2])
    assert driver.match("second") == 2
    load = driver.plan_load("second", 0, 2)
    driver.finish("second")
    driver.add_request("second", KEYS)
    assert driver.plan_store("second", 1) is None  # it is stored
    driver.report(load.job_id, failed=True)
    assert driver.plan_store("second", 1) is None  # and was offered


def test_a_manager_behind_a_filter_is_told_that_its_writers_died():
    core = CPUOffloadingManager(1)
    manager = FilterReusedOffloadingManager(core, store_threshold=0)
    manager.prepare_store(KEYS[:1], ReqContext("request"))
    manager.reset_cache()
    assert manager.get_stats().condemned_blocks == 1
    manager.writers_died()
    assert manager.get_stats().condemned_blocks == 0


def test_unknown_requests_are_named():
    driver = RequestDriver(CPUOffloadingManager(1))
    with pytest.raises(ManagerUsageError, match="'nobody'"):
        driver.match("nobody")
    driver.add_request("request", KEYS)
    with pytest.raises(ManagerUsageError, match="'request'"):
        driver.add_request("request", KEYS)
    driver.finish("nobody")  # aborts may come twice
