"""What requests say about their own future, and what the manager makes of it, whatever the policy."""

import pytest

from kvtier import ConfigurationError, CPUOffloadingManager, ReqContext
from kvtier.manager.hints import MAX_KINDS, HintReader, Hints
from kvtier.policy import POLICIES
from kvtier.testing import make_keys

K = make_keys(40)
NEW = make_keys(400, "new")


@pytest.fixture(params=sorted(POLICIES))
def manager(request):
    manager = CPUOffloadingManager(16, request.param, enable_events=True, pin_share=0.5)
    manager.advance(100.0)
    return manager


def run(manager, keys, **hints):
    """One whole request: what is there is loaded, what is not is stored. How many blocks were found."""
    context = ReqContext("request", {f"kvtier.{name}": value for name, value in hints.items()} or None)
    manager.on_new_request(context)
    found = manager.lookup_prefix(keys, context).num_ready
    if found:
        manager.complete_load(keys[:found], context, True, manager.prepare_load(keys[:found], context))
    if found < len(keys):
        output = manager.prepare_store_prefix(keys[found:], context)
        manager.complete_store(output.keys_to_store, context, True, output.store_spec)
    manager.on_request_finished(context)
    manager.check_invariants()
    return found


def press(manager, num_requests=30, first=0):
    """Traffic that never returns, many times the capacity."""
    for number in range(first, first + num_requests):
        run(manager, NEW[number * 5 : number * 5 + 5])


def there(manager, keys):
    return [key for key in keys if manager.lookup(key, ReqContext("asks"))]


# -- reading


@pytest.mark.parametrize(
    ("params", "hints"),
    [
        (None, None),
        ({}, None),
        ({"remote_host": "a", "priority": 3}, None),
        ({"kvtier.priority": -3}, Hints(priority=-3)),
        ({"kvtier.ttl_s": 1.5, "kvtier.pin": False, "other": 1}, Hints(ttl_s=1.5, pin=False)),
        ({"kvtier.no_store": True, "kvtier.ended": True}, Hints(no_store=True, ended=True)),
    ],
)
def test_reads_what_is_said(params, hints):
    reader = HintReader()
    assert reader.read(params) == hints
    assert reader.take_warnings() == []
    assert reader.num_ignored == 0


@pytest.mark.parametrize(
    "params",
    [
        {"kvtier.priority": 4},
        {"kvtier.priority": True},
        {"kvtier.priority": 1.0},
        {"kvtier.priority": "high"},
        {"kvtier.ttl_s": -1},
        {"kvtier.ttl_s": float("nan")},
        {"kvtier.ttl_s": float("inf")},
        {"kvtier.ttl_s": 10**5000},
        {"kvtier.ttl_s": True},
        {"kvtier.pin": 1},
        {"kvtier.no_store": "yes"},
        {"kvtier.ended": None},
        {"kvtier.ended": {"x": [1] * 10_000}},
        {"kvtier.unknown": True},
        {"kvtier." + "x" * 10_000: True},
    ],
)
def test_ignores_what_is_not_a_hint_and_keeps_the_others(params):
    reader = HintReader()
    name = next(iter(params))
    for _ in range(3):
        assert reader.read(params) is None
    (warning,) = reader.take_warnings()
    assert name[:40] in warning
    assert len(warning) < 300
    assert reader.read({**params, "kvtier.pin" if name != "kvtier.pin" else "kvtier.ended": True}) is not None
    assert reader.take_warnings() == []
    assert reader.num_ignored == 4


def test_params_that_are_no_mapping_or_have_odd_keys():
    reader = HintReader()
    assert reader.read([1, 2]) is None
    assert reader.read({1: 2, None: 3}) is None
    assert reader.take_warnings() == []


def test_kinds_are_bounded():
    reader = HintReader()
    for number in range(10 * MAX_KINDS):
        reader.read({f"kvtier.x{number}": 1})
    assert len(reader.take_warnings()) == MAX_KINDS


def test_the_manager_tells_once_and_counts():
    manager = CPUOffloadingManager(4)
    for _ in range(2):
        run(manager, K[:2], priority="x")
    (warning,) = manager.take_hint_warnings()
    assert "'kvtier.priority' is 'x'; allowed: a whole number from -3 to 3" in warning
    assert manager.take_hint_warnings() == []
    assert manager.get_stats().counters["ignored_hints"] == 2


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_pin_share_is_checked(share):
    with pytest.raises(ConfigurationError, match="pin_share"):
        CPUOffloadingManager(4, pin_share=share)


# -- pins


def test_a_pinned_prefix_survives_pressure(manager):
    run(manager, K[:4], pin=True)
    run(manager, K[10:14])
    press(manager, 100)
    assert there(manager, K[:4]) == K[:4]


def test_a_prompt_that_was_there_can_be_pinned(manager):
    run(manager, K[:4])
    assert run(manager, K[:4], pin=True) == 4
    press(manager)
    assert there(manager, K) == K[:4]


def test_a_pin_holds_from_the_first_store_on(manager):
    context = ReqContext("runs", {"kvtier.pin": True})
    manager.on_new_request(context)
    output = manager.prepare_store_prefix(K[:4], context)
    manager.complete_store(output.keys_to_store, context, True, output.store_spec)
    press(manager)
    assert there(manager, K) == K[:4]


def test_pins_beyond_the_share_are_not_honoured_and_counted(manager):
    run(manager, K[:6], pin=True)
    run(manager, K[10:16], pin=True)
    assert manager.get_stats().counters["refused_pin_blocks"] == 4
    press(manager)
    pinned = [*K[:6], *K[10:12]]
    assert there(manager, pinned) == pinned
    assert manager.policy.name != "lru" or there(manager, K) == pinned


def test_a_share_of_nothing_pins_nothing():
    manager = CPUOffloadingManager(16, pin_share=0.0)
    run(manager, K[:4], pin=True)
    press(manager)
    assert there(manager, K) == []
    assert manager.get_stats().counters["refused_pin_blocks"] == 4


def test_a_pin_is_taken_back(manager):
    run(manager, K[:4], pin=True)
    run(manager, K[:4], pin=False)
    run(manager, K[10:18], pin=True)
    assert manager.get_stats().counters["refused_pin_blocks"] == 0
    press(manager)
    assert there(manager, K[10:18]) == K[10:18]
    assert manager.policy.name != "lru" or there(manager, K) == K[10:18]


def test_pins_return_with_what_leaves(manager):
    run(manager, K[:8], pin=True)
    manager.reset_cache()
    run(manager, K[10:18], pin=True)
    context = ReqContext("fails")
    manager.complete_load(K[10:14], context, False, manager.prepare_load(K[10:14], context))
    run(manager, K[20:24], pin=True)
    assert manager.get_stats().counters["refused_pin_blocks"] == 0
    press(manager)
    assert there(manager, K) == [*K[14:18], *K[20:24]]


def test_stores_go_on_beside_pins_and_are_refused_whole_or_cut():
    manager = CPUOffloadingManager(8, pin_share=0.75)
    run(manager, K[:6], pin=True)
    assert manager.prepare_store(K[10:13], ReqContext("a")) is None
    assert there(manager, K) == K[:6]
    assert manager.prepare_store_prefix(K[10:13], ReqContext("b")).keys_to_store == K[10:12]


# -- the end of a conversation


def test_an_ended_conversation_goes_first(manager):
    run(manager, K[:4], priority=0)
    run(manager, K[20:24])
    run(manager, K[:6])
    run(manager, K[:8], ended=True)
    before = len(there(manager, K))
    assert before == 12
    run(manager, NEW[:9])
    # four were free: what ended makes room for the other five, the deepest first
    assert there(manager, K[:8]) == K[:3]
    assert there(manager, K[20:24]) == K[20:24]


def test_what_others_share_does_not_go_first(manager):
    run(manager, K[:6], priority=0)
    run(manager, K[:3] + K[20:23])
    run(manager, K[:6], ended=True)
    run(manager, NEW[:10])
    assert there(manager, K[:6]) == K[:3]


def test_what_came_before_the_first_hint_may_be_shared():
    manager = CPUOffloadingManager(16)
    run(manager, K[:4])
    run(manager, K[:8], ended=True)
    run(manager, K[20:24])
    run(manager, NEW[:8])
    assert there(manager, K[:8]) == K[:4]


def test_a_use_brings_it_back(manager):
    run(manager, K[:4], ended=True)
    run(manager, K[20:24])
    run(manager, K[:4])
    run(manager, K[20:24])
    run(manager, NEW[:8])
    run(manager, K[:4])
    assert manager._hinted._level_of == {}


def test_an_end_unpins(manager):
    run(manager, K[:4], pin=True)
    run(manager, K[:6], pin=True, ended=True)
    press(manager, 4)
    assert there(manager, K) == []


# -- time to live


def test_what_has_not_been_used_for_its_time_goes_first(manager):
    run(manager, K[:4], ttl_s=10)
    run(manager, K[20:24])
    run(manager, K[:4], ttl_s=10)
    manager.advance(109.0)
    manager.advance(110.0)
    run(manager, NEW[:12])
    assert there(manager, K) == K[20:24]


def test_not_before_its_time_and_a_use_starts_it_anew():
    manager = CPUOffloadingManager(16)
    manager.advance(0.0)
    run(manager, K[:4], ttl_s=10)
    run(manager, K[20:24])
    manager.advance(9.0)
    run(manager, K[:4])
    manager.advance(18.0)
    run(manager, NEW[:12])
    assert there(manager, K) == K[:4]
    manager.advance(19.0)
    run(manager, NEW[20:24])
    assert there(manager, K) == []


def test_a_pin_with_a_time_to_live_ends_with_it(manager):
    run(manager, K[:4], pin=True, ttl_s=60)
    press(manager)
    assert there(manager, K) == K[:4]
    manager.advance(160.0)
    press(manager, 4, first=30)
    assert there(manager, K) == []


def test_without_time_nothing_expires():
    manager = CPUOffloadingManager(8)
    run(manager, K[:4], ttl_s=0)
    run(manager, K[10:14])
    run(manager, K[:4])
    run(manager, NEW[:4])
    assert there(manager, K) == K[:4]


def test_the_times_to_live_are_bounded(manager):
    for number in range(400):
        run(manager, K[:4], ttl_s=100_000 - 2 * number if number % 2 else 200_000)
    assert sum(len(keys) for _, _, keys in manager._hinted._expiries) <= 4 * 16 + 64 + 4


# -- priority


def test_higher_priorities_leave_later(manager):
    run(manager, K[:3], priority=2)
    run(manager, K[10:13], priority=1)
    run(manager, K[20:23])
    press(manager)
    spared = [*K[:3], *K[10:13]]
    assert there(manager, spared) == spared
    for number in range(3):
        run(manager, NEW[300 + number * 4 : 304 + number * 4], priority=2)
    assert there(manager, K[:3]) == K[:3]
    assert manager.policy.name == "adaptive" or len(there(manager, K[10:13])) < 3


def test_lower_priorities_leave_first_deepest_first(manager):
    run(manager, K[:4], priority=-1)
    run(manager, K[10:14], priority=-3)
    run(manager, K[20:24])
    run(manager, NEW[:6])
    assert there(manager, K) == [*K[:4], *K[10:12], *K[20:24]]
    run(manager, NEW[10:13])
    assert there(manager, K) == [*K[:3], *K[20:24]]


def test_the_latest_priority_counts():
    manager = CPUOffloadingManager(16)
    run(manager, K[:4], priority=3)
    run(manager, K[:4], priority=0)
    press(manager)
    assert there(manager, K) == []


# -- no store


def test_no_store_stores_nothing_and_still_loads(manager):
    run(manager, K[:4])
    assert run(manager, K[:8], no_store=True) == 4
    assert there(manager, K) == K[:4]
    context = ReqContext("plain", {"kvtier.no_store": True})
    output = manager.prepare_store(K[:8], context)
    assert (output.keys_to_store, output.evicted_keys) == ([], [])
    assert manager.get_stats().counters.get("shed_blocks", 0) == 0


# -- all of it


def test_passing_over_what_is_kept_stays_cheap():
    """What is pinned is moved away from the end where victims are looked for, whatever it is that uses nothing."""
    manager = CPUOffloadingManager(400, "lru", pin_share=0.5)
    pinned = make_keys(200, "pinned")
    for first in range(0, 200, 20):
        run(manager, pinned[first : first + 20], pin=True)
    keys = make_keys(4000, "x")
    longest_run = 0
    for first in range(0, 4000, 10):
        run(manager, keys[first : first + 10])
        order = list(manager.policy)
        leading = next(i for i, key in enumerate(order) if not key.startswith(b"pinned"))
        longest_run += leading
    assert there(manager, pinned) == pinned
    assert longest_run == 0 or longest_run / 400 < 40


def test_what_is_kept_is_not_among_what_leaves_early(manager):
    kept = K[:6]
    run(manager, kept, pin=True)
    press(manager)
    context = ReqContext("eviction")
    spec = manager.evict_early(16, context)
    assert not set(spec.keys) & set(kept)
    assert spec.keys, "the others may go"
    manager.complete_load(spec.keys, context, spec=spec)
    manager.check_invariants()
    assert there(manager, kept) == kept


def test_what_has_left_early_is_not_chosen_again(manager):
    run(manager, K[:8], priority=-1)
    run(manager, K[8:16])
    context = ReqContext("eviction")
    spec = manager.evict_early(4, context)
    assert set(spec.keys) <= set(K[:8]), "of low priority, so they go first"
    manager.complete_load(spec.keys, context, spec=spec)
    manager.check_invariants()
    for number in range(4):
        run(manager, NEW[number * 6 : number * 6 + 6])
