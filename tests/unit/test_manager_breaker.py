"""The manager with a breaker: a tier that is shut is as good as empty, and comes back."""

import pytest

from kvtier import CPUOffloadingManager, PrefixLookup, ReqContext, RequestDriver, Residency
from kvtier.interfaces import BreakerState
from kvtier.manager import CircuitBreaker
from kvtier.testing import make_keys, store_ready

K = make_keys(40)
COOLDOWN_S = 2.0


def new(num_blocks=20, failures=2, **options):
    breaker = CircuitBreaker(failures, COOLDOWN_S, 8.0)
    manager = CPUOffloadingManager(num_blocks, breaker=breaker, **options)
    manager.advance(100.0)
    return manager


def state(manager):
    return manager.get_stats().breaker_state


def fail_load(manager, keys):
    context = ReqContext("a load that fails")
    spec = manager.prepare_load(keys, context)
    manager.complete_load(keys, context, success=False, spec=spec)


def fail_store(manager, keys):
    context = ReqContext("a store that fails")
    output = manager.prepare_store(keys, context)
    manager.complete_store(keys, context, success=False, spec=output.store_spec)


@pytest.fixture
def shut():
    """K[:6] are ready, K[6:8] in flight; then two loads have failed."""
    manager = new()
    store_ready(manager, K[:10], ReqContext("a"))
    manager.writing = manager.prepare_store(K[10:12], ReqContext("writer")).store_spec
    fail_load(manager, K[6:8])
    fail_load(manager, K[8:10])
    assert state(manager) is BreakerState.OPEN
    return manager


def test_a_manager_without_a_breaker_never_gives_up():
    manager = CPUOffloadingManager(20)
    manager.advance(100.0)
    for i in range(20):
        fail_store(manager, K[i : i + 1])
    assert manager.prepare_store(K[:1], ReqContext("b")).keys_to_store == K[:1]
    assert state(manager) is BreakerState.CLOSED


def test_look_ups_of_a_shut_tier_answer_absent_and_nobody_waits(shut):
    context = ReqContext("b")
    assert [shut.lookup(key, context) for key in (K[0], K[10], K[30])] == [False] * 3
    assert shut.lookup_prefix(K[:12], context) == PrefixLookup(0, Residency.ABSENT)
    assert shut.residency(K[0]) is Residency.ABSENT
    assert shut.get_stats().counters.get("deferred_requests", 0) == 0
    shut.check_invariants()


def test_who_was_waiting_is_let_go_when_it_shuts():
    manager = new()
    store_ready(manager, K[:4], ReqContext("a"))
    manager.prepare_store(K[10:11], ReqContext("writer"))
    context = ReqContext("b")
    assert manager.lookup(K[10], context) is None
    fail_load(manager, K[:2])
    assert manager.still_waiting(context) is True
    fail_load(manager, K[2:4])
    assert manager.still_waiting(context) is False
    assert manager.lookup(K[10], context) is False


@pytest.mark.parametrize("operation", ["prepare_store", "prepare_store_prefix"])
def test_a_shut_tier_takes_no_stores(shut, operation):
    before = shut.get_stats()
    output = getattr(shut, operation)(K[:30], ReqContext("b"))
    assert output.keys_to_store == []
    assert output.evicted_keys == []
    assert len(output.store_spec.block_ids) == 0
    after = shut.get_stats()
    assert (after.ready_blocks, after.in_flight_blocks) == (before.ready_blocks, before.in_flight_blocks)
    # 6 ready, 2 in flight; the others could have been stored
    assert after.counters["shed_blocks"] - before.counters.get("shed_blocks", 0) == 22


def test_what_lies_behind_shed_blocks_is_not_stored_later(shut):
    context = ReqContext("b")
    shut.on_new_request(context)
    shut.prepare_store_prefix(K[20:22], context)
    shut.advance(100.0 + COOLDOWN_S)
    assert shut.prepare_store_prefix(K[22:24], context).keys_to_store == []
    assert shut.prepare_store_prefix(K[20:24], ReqContext("c")).keys_to_store == K[20:24]


def test_a_store_that_was_under_way_completes(shut):
    shut.complete_store(K[10:12], ReqContext("writer"), spec=shut.writing)
    shut.check_invariants()
    shut.advance(100.0 + COOLDOWN_S)
    assert shut.lookup(K[10], ReqContext("b")) is True


def test_after_the_cool_down_one_load_is_let_through(shut):
    shut.advance(100.0 + COOLDOWN_S)
    assert state(shut) is BreakerState.HALF_OPEN
    first, second = ReqContext("first"), ReqContext("second")
    assert shut.lookup(K[0], first) is True
    spec = shut.prepare_load(K[:2], first)
    assert shut.lookup(K[0], second) is False
    assert shut.prepare_store(K[20:22], second).keys_to_store == []
    shut.complete_load(K[:2], first, spec=spec)
    assert state(shut) is BreakerState.CLOSED
    assert shut.lookup(K[0], second) is True
    assert shut.prepare_store(K[20:22], second).keys_to_store == K[20:22]


def test_after_the_cool_down_one_store_is_let_through(shut):
    shut.advance(100.0 + COOLDOWN_S)
    context = ReqContext("b")
    output = shut.prepare_store(K[20:22], context)
    assert output.keys_to_store == K[20:22]
    assert shut.prepare_store(K[22:24], context).keys_to_store == []
    assert shut.lookup(K[0], context) is False
    shut.complete_store(K[20:22], context, spec=output.store_spec)
    assert shut.lookup(K[20], context) is True


def test_an_offer_with_nothing_new_is_no_probe(shut):
    shut.advance(100.0 + COOLDOWN_S)
    assert shut.prepare_store(K[:6], ReqContext("b")).keys_to_store == []
    assert shut.lookup(K[0], ReqContext("c")) is True


def test_a_probe_that_fails_shuts_it_again_for_longer(shut):
    shut.advance(100.0 + COOLDOWN_S)
    fail_load(shut, K[:1])
    assert shut.lookup(K[1], ReqContext("b")) is False
    shut.advance(100.0 + 2.9 * COOLDOWN_S)
    assert shut.lookup(K[1], ReqContext("b")) is False
    shut.advance(100.0 + 3 * COOLDOWN_S)
    assert shut.lookup(K[1], ReqContext("b")) is True
    assert shut.lookup(K[0], ReqContext("b")) is False


def test_stores_that_fail_open_it_too():
    manager = new()
    store_ready(manager, K[:1], ReqContext("a"))
    fail_store(manager, K[1:3])
    assert manager.lookup(K[0], ReqContext("b")) is True
    fail_store(manager, K[3:5])
    assert manager.lookup(K[0], ReqContext("b")) is False


def test_a_job_counts_once_however_many_blocks_it_has():
    manager = new(failures=3)
    fail_store(manager, K[:10])
    fail_store(manager, K[:10])
    assert state(manager) is BreakerState.CLOSED


def test_stores_that_never_end_count_each_once_when_they_are_given_up():
    manager = new(failures=3, store_timeout_s=10.0)
    store_ready(manager, K[30:31], ReqContext("a"))
    for i in range(2):
        manager.prepare_store(K[2 * i : 2 * i + 2], ReqContext("b"))
    manager.advance(115.0)
    assert state(manager) is BreakerState.CLOSED
    spec = manager.prepare_store(K[10:12], ReqContext("b")).store_spec
    manager.advance(130.0)
    assert state(manager) is BreakerState.OPEN
    openings = manager.breaker.num_openings
    manager.complete_store(K[10:12], ReqContext("b"), success=False, spec=spec)  # late: counted already
    assert manager.breaker.num_openings == openings
    manager.check_invariants()


def test_transfers_that_a_reset_has_cut_off_say_nothing():
    manager = new()
    store_ready(manager, K[:4], ReqContext("a"))
    context = ReqContext("b")
    loads = [manager.prepare_load(K[i : i + 1], context) for i in range(4)]
    stores = [manager.prepare_store(K[i : i + 1], context).store_spec for i in range(10, 14)]
    manager.reset_cache()
    for i, spec in enumerate(loads):
        manager.complete_load(K[i : i + 1], context, success=False, spec=spec)
    for i, spec in enumerate(stores):
        manager.complete_store(K[10 + i : 11 + i], context, success=False, spec=spec)
    assert state(manager) is BreakerState.CLOSED
    assert manager.get_stats().condemned_blocks == 0


def test_failed_keys_are_absent_at_once_for_everyone():
    """Also with a breaker that is still closed."""
    manager = new()
    store_ready(manager, K[:4], ReqContext("a"))
    fail_load(manager, K[:2])
    assert [manager.lookup(key, ReqContext("b")) for key in K[:4]] == [False, False, True, True]


def test_a_driver_over_a_tier_that_is_down_goes_on():
    """Every copy fails: requests compute, few jobs are begun, and none is left."""
    driver = RequestDriver(new(failures=3))
    num_jobs = 0
    for second in range(60):
        driver.advance(100.0 + second)
        req_id = f"request {second}"
        driver.add_request(req_id, K[:10])
        assert driver.match(req_id) == 0
        plan = driver.plan_store(req_id, 10)
        if plan is not None:
            num_jobs += 1
            driver.report(plan.job_id, failed=True)
        driver.finish(req_id)
    assert 3 + 60 // 9 <= num_jobs <= 3 + 2 + 60 // 8
    driver.manager.check_invariants()
    driver.advance(200.0)
    driver.add_request("healed", K[:10])
    driver.report(driver.plan_store("healed", 10).job_id)
    driver.add_request("served", K[:10])
    assert driver.match("served") == 10
