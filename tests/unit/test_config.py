"""The settings of waiting and of the circuit breaker: what they become, and what is refused in one line."""

import pytest

from kvtier import ConfigurationError, CPUOffloadingManager, ReqContext
from kvtier.interfaces import BreakerState
from kvtier.runtime import build_manager, parse_config
from kvtier.testing import make_keys

K = make_keys(20)


def manager_of(**settings) -> CPUOffloadingManager:
    manager = build_manager(parse_config({"ram": "1MiB", **settings}), 10)
    manager.advance(100.0)
    return manager


def fail_stores(manager, count):
    for i in range(count):
        output = manager.prepare_store([K[i]], ReqContext("a"))
        manager.complete_store([K[i]], ReqContext("a"), success=False, spec=output.store_spec)


def state(manager):
    return manager.get_stats().breaker_state


def test_without_settings_a_tier_that_fails_is_left_alone():
    manager = manager_of()
    fail_stores(manager, 20)
    assert state(manager) is BreakerState.OPEN
    manager.advance(101.0)
    assert state(manager) is BreakerState.HALF_OPEN


def test_how_many_failures_and_how_long():
    manager = manager_of(breaker_failures="2", breaker_cooldown_s=7)
    fail_stores(manager, 1)
    assert state(manager) is BreakerState.CLOSED
    fail_stores(manager, 1)
    assert state(manager) is BreakerState.OPEN
    manager.advance(106.9)
    assert state(manager) is BreakerState.OPEN
    manager.advance(107.0)
    assert state(manager) is BreakerState.HALF_OPEN


def test_no_breaker():
    manager = manager_of(breaker_failures=0)
    fail_stores(manager, 20)
    assert state(manager) is BreakerState.CLOSED
    assert manager.breaker is None


def test_the_prefill_rate():
    assert parse_config({"ram": 1}).prefill_tokens_per_s is None
    assert parse_config({"ram": 1, "prefill_tokens_per_s": "2500"}).prefill_tokens_per_s == 2500.0
    assert parse_config({"ram": 1, "prefill_tokens_per_s": 0}).prefill_tokens_per_s == 0.0


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("prefill_tokens_per_s", -1, "0 (never compare)"),
        ("prefill_tokens_per_s", "fast", "0 (never compare)"),
        ("prefill_tokens_per_s", float("inf"), "0 (never compare)"),
        ("prefill_tokens_per_s", True, "0 (never compare)"),
        ("breaker_failures", -1, "0 or more"),
        ("breaker_failures", 2.5, "0 or more"),
        ("breaker_cooldown_s", 0, "more than 0"),
        ("breaker_cooldown_s", 61, "at most 60"),
        ("breaker_cooldown_s", float("nan"), "more than 0"),
        ("deadline_s", -1, "0 (never wait)"),
        ("store_timeout_s", 0, "more than 0"),
    ],
)
def test_values_that_cannot_work_are_refused_in_one_line(key, value, allowed):
    with pytest.raises(ConfigurationError) as refusal:
        parse_config({"ram": "1MiB", key: value})
    message = str(refusal.value)
    assert f"{key} is {value!r}" in message
    assert allowed in message
    assert "\n" not in message
