"""The circuit breaker by itself: when it opens, how long, and what it lets through."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import ConfigurationError
from kvtier.interfaces import BreakerState
from kvtier.manager import CircuitBreaker, Transfer

LOAD, STORE = Transfer.LOAD, Transfer.STORE
CLOSED, HALF_OPEN, OPEN = BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN


@pytest.fixture
def breaker():
    made = CircuitBreaker(failures=3, cooldown_s=2.0, max_cooldown_s=16.0)
    made.advance(100.0)
    return made


def fail(breaker, kind=LOAD, times=1):
    for _ in range(times):
        breaker.note_begun()
        breaker.note_failure(kind)


def succeed(breaker, kind=LOAD):
    breaker.note_begun()
    breaker.note_success(kind)


def test_a_few_failures_are_nothing(breaker):
    fail(breaker, times=2)
    assert (breaker.state, breaker.is_shut) == (CLOSED, False)


def test_failures_in_a_row_open_it(breaker):
    fail(breaker, times=3)
    assert (breaker.state, breaker.is_shut) == (OPEN, True)


def test_several_failures_told_at_once(breaker):
    breaker.note_failure(STORE, count=3)
    assert breaker.state is OPEN


def test_a_success_in_between_starts_the_count_anew(breaker):
    for _ in range(10):
        fail(breaker, times=2)
        succeed(breaker)
    assert breaker.state is CLOSED


def test_stores_that_succeed_do_not_hide_loads_that_fail(breaker):
    for _ in range(3):
        fail(breaker, LOAD)
        succeed(breaker, STORE)
    assert breaker.state is OPEN


def test_the_two_kinds_are_not_added_up(breaker):
    fail(breaker, LOAD, times=2)
    fail(breaker, STORE, times=2)
    assert breaker.state is CLOSED


def test_it_stays_shut_until_the_cool_down_is_over(breaker):
    fail(breaker, times=3)
    breaker.advance(101.9)
    assert breaker.is_shut
    breaker.advance(102.0)
    assert (breaker.state, breaker.is_shut) == (HALF_OPEN, False)


def test_one_probe_and_nothing_beside_it(breaker):
    fail(breaker, times=3)
    breaker.advance(102.0)
    breaker.note_begun()
    assert (breaker.state, breaker.is_shut) == (HALF_OPEN, True)
    breaker.note_success(LOAD)
    assert (breaker.state, breaker.is_shut) == (CLOSED, False)


def cooldowns(breaker, kind, count):
    """How long it stays shut, `count` times, when every probe fails. In steps of a quarter second."""
    now_s = 100.0
    found = []
    for _ in range(count):
        begun_s = now_s
        while breaker.is_shut:
            now_s += 0.25
            breaker.advance(now_s)
        found.append(now_s - begun_s)
        fail(breaker, kind)
    return found


def test_the_cool_down_doubles_up_to_a_limit(breaker):
    fail(breaker, times=3)
    assert cooldowns(breaker, LOAD, 6) == [2.0, 4.0, 8.0, 16.0, 16.0, 16.0]
    assert breaker.num_openings == 7


def test_after_a_success_of_the_kind_that_failed_all_is_as_at_the_start(breaker):
    fail(breaker, times=3)
    assert cooldowns(breaker, LOAD, 2) == [2.0, 4.0]
    breaker.advance(200.0)
    succeed(breaker, LOAD)
    fail(breaker, times=2)
    assert breaker.state is CLOSED
    fail(breaker)
    breaker.advance(202.0)
    assert breaker.state is HALF_OPEN


def test_a_store_as_probe_puts_loads_on_trial(breaker):
    """Nothing may be left to load: stores must come back first, and the first load then decides."""
    fail(breaker, LOAD, times=3)
    breaker.advance(102.0)
    succeed(breaker, STORE)
    succeed(breaker, STORE)
    assert breaker.state is CLOSED
    fail(breaker, LOAD)
    assert breaker.state is OPEN
    breaker.advance(105.9)
    assert breaker.is_shut  # twice as long
    breaker.advance(106.0)
    assert not breaker.is_shut
    succeed(breaker, STORE)
    succeed(breaker, LOAD)
    fail(breaker, LOAD)
    assert breaker.state is CLOSED


def test_a_probe_that_never_ends_does_not_keep_it_shut_for_ever(breaker):
    fail(breaker, times=3)
    breaker.advance(102.0)
    breaker.note_begun()
    breaker.advance(117.9)
    assert breaker.is_shut
    breaker.advance(118.0)
    assert breaker.state is OPEN
    breaker.advance(122.0)
    assert (breaker.state, breaker.is_shut) == (HALF_OPEN, False)


def test_what_was_under_way_when_it_opened_changes_nothing(breaker):
    fail(breaker, times=3)
    fail(breaker, times=5)
    breaker.note_success(STORE)
    breaker.note_success(LOAD)
    assert breaker.state is OPEN
    assert breaker.num_openings == 1
    breaker.advance(102.0)
    assert breaker.state is HALF_OPEN


def test_before_the_time_is_told_it_does_not_open():
    breaker = CircuitBreaker(failures=1)
    fail(breaker, times=10)
    assert not breaker.is_shut
    breaker.advance(5.0)
    assert not breaker.is_shut
    fail(breaker)
    assert breaker.is_shut


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"failures": 0}, "failures is 0"),
        ({"cooldown_s": 0.0}, "cooldown_s is 0.0"),
        ({"cooldown_s": float("inf")}, "cooldown_s is inf"),
        ({"cooldown_s": float("nan")}, "cooldown_s is nan"),
        ({"cooldown_s": 5.0, "max_cooldown_s": 1.0}, "max_cooldown_s is 1.0"),
        ({"max_cooldown_s": float("inf")}, "max_cooldown_s is inf"),
    ],
)
def test_values_that_cannot_work(arguments, word):
    with pytest.raises(ConfigurationError, match=word):
        CircuitBreaker(**arguments)


@settings(deadline=None)
@given(st.lists(st.sampled_from([LOAD, STORE]), min_size=200, max_size=200))
def test_a_tier_that_is_down_is_left_in_peace(kinds):
    """Whatever is tried, one transfer a second: after the first failures only a probe now and then."""
    breaker = CircuitBreaker(failures=3, cooldown_s=2.0, max_cooldown_s=16.0)
    num_tried = 0
    for second, kind in enumerate(kinds):
        breaker.advance(100.0 + second)
        if not breaker.is_shut:
            num_tried += 1
            fail(breaker, kind)
    # up to 2 of one kind and 3 of the other, then after 2, 4, 8 s and every 16 s
    assert num_tried <= 5 + 3 + 200 / 16
    assert num_tried >= 3 + 200 / (16 + 1) - 1


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["fail", "succeed", "lose", "wait"]), st.sampled_from([LOAD, STORE]))))
def test_whatever_has_happened_a_tier_that_is_well_is_used_again(past):
    breaker = CircuitBreaker(failures=2, cooldown_s=1.0, max_cooldown_s=8.0)
    now_s = 0.0
    for what, kind in past:
        now_s += 0.5
        breaker.advance(now_s)
        if not breaker.is_shut:
            if what != "wait":
                breaker.note_begun()
            if what == "fail":
                breaker.note_failure(kind)
            elif what == "succeed":
                breaker.note_success(kind)
    # a probe may be lost: after that, and the longest cool-down, it is tried again, and works
    for _ in range(2 * int(8.0 + 8.0) + 2):
        now_s += 0.5
        breaker.advance(now_s)
    if breaker.is_shut:  # at a time like this nothing may be shut for longer than that
        raise AssertionError(breaker.state)
    for kind in (LOAD, STORE):
        succeed(breaker, kind)
    fail(breaker)
    assert breaker.state is CLOSED
