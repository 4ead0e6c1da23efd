"""Storing only what was asked for before: as a setting of the manager, and around any manager."""

import pytest

from kvtier import (
    ConfigurationError,
    CPUOffloadingManager,
    DuplicateKeyError,
    FilterReusedOffloadingManager,
    PrefixLookup,
    ReqContext,
    Residency,
)
from kvtier.testing import ReferenceManager, make_keys, store_ready

K = make_keys(12)


def _own(policy, threshold, tracker, **options):
    return CPUOffloadingManager(4, policy, store_threshold=threshold, max_tracker_size=tracker, **options)


def _around(policy, threshold, tracker, **options):
    return FilterReusedOffloadingManager(CPUOffloadingManager(4, policy, **options), threshold, tracker)


def _model(policy, threshold, tracker, **options):
    return ReferenceManager(4, policy, store_threshold=threshold, max_tracker_size=tracker, **options)


@pytest.fixture(params=[_own, _around, _model], ids=["own", "around", "model"])
def new(request):
    """Makes a manager of four slots with a reuse filter."""

    def make(threshold=2, tracker=64_000, **options):
        manager = request.param("lru", threshold, tracker, **options)
        manager.advance(100.0)
        return manager

    return make


def stored(manager, keys, context=None):
    granted = manager.prepare_store(keys, context or ReqContext("store"))
    return granted.keys_to_store


def look_up(manager, keys, times=1):
    for _ in range(times):
        context = ReqContext("look")
        for key in keys:
            manager.lookup(key, context)


def test_only_what_was_seen_often_enough_is_stored(new):
    manager = new(2)
    look_up(manager, K[:3], 1)
    look_up(manager, K[1:2], 1)
    assert stored(manager, K[:4]) == [K[1]]


def test_threshold_is_reached_exactly(new):
    manager = new(3)
    look_up(manager, K[:1], 2)
    assert stored(manager, K[:1]) == []
    look_up(manager, K[:1], 1)
    assert stored(manager, K[:1]) == K[:1]


def test_input_order_is_kept(new):
    manager = new()
    look_up(manager, K[:4], 2)
    granted = manager.prepare_store([K[3], K[9], K[0]], ReqContext("a"))
    assert granted.keys_to_store == [K[3], K[0]]
    assert granted.store_spec.block_ids.tolist() == [0, 1]


@pytest.mark.parametrize("threshold", [0, 1])
def test_no_filter(threshold):
    manager = CPUOffloadingManager(4, store_threshold=threshold)
    assert stored(manager, K[:2]) == K[:2]
    manager = FilterReusedOffloadingManager(CPUOffloadingManager(4), 1)
    assert stored(manager, K[:2]) == K[:2]


def test_storing_counts_nothing(new):
    manager = new()
    for _ in range(3):
        assert stored(manager, K[:2]) == []


def test_residency_counts_nothing(new):
    manager = new()
    for _ in range(3):
        manager.residency(K[0])
    assert stored(manager, K[:1]) == []


def test_prefix_lookup_counts_what_it_has_examined(new):
    manager = new()
    look_up(manager, K[:2], 2)
    store_ready(manager, K[:2], ReqContext("a"))
    for _ in range(2):
        assert manager.lookup_prefix(K[:5], ReqContext("b")) == PrefixLookup(2, Residency.ABSENT)
    assert stored(manager, K[:5]) == [K[2]]


def test_prefix_store_is_filtered_too(new):
    manager = new()
    look_up(manager, K[:2], 2)
    assert manager.prepare_store_prefix(K[:2], ReqContext("a")).keys_to_store == K[:2]
    assert manager.prepare_store_prefix(K[2:4], ReqContext("a")).keys_to_store == []


def test_one_request_may_count_a_key_more_than_once_by_looking_up(new):
    manager = new()
    context = ReqContext("a")
    manager.lookup(K[0], context)
    manager.lookup(K[0], context)
    assert stored(manager, K[:1]) == K[:1]


# -- deferred requests


def test_repeated_look_ups_of_a_deferred_request_do_not_count(new):
    manager = new(3)
    look_up(manager, K[:1], 3)
    manager.prepare_store(K[:1], ReqContext("writer"))
    context = ReqContext("deferred")
    for _ in range(5):
        assert manager.lookup(K[0], context) is None
        manager.lookup(K[1], context)
    assert stored(manager, K[1:2]) == []


def test_repeated_prefix_look_ups_of_a_deferred_request_do_not_count(new):
    manager = new(3)
    look_up(manager, K[:2], 3)
    store_ready(manager, K[:1], ReqContext("writer"))
    manager.prepare_store(K[1:2], ReqContext("writer"))
    manager.reset_cache()
    look_up(manager, K[2:4], 1)
    context = ReqContext("deferred")
    manager.prepare_store(K[:1], ReqContext("writer"))
    for _ in range(5):
        assert manager.lookup_prefix(K[:3], context).stopped_by is Residency.ARRIVING
    manager.complete_store(K[:1], ReqContext("writer"))
    assert stored(manager, K[2:3]) == []


def test_after_preparing_a_look_up_counts_again(new):
    manager = new(3)
    look_up(manager, K[:1], 3)
    store_ready(manager, K[:1], ReqContext("writer"))
    look_up(manager, K[1:2], 3)
    manager.prepare_store(K[1:2], ReqContext("writer"))
    context = ReqContext("deferred")
    assert manager.lookup(K[2], context) is False
    assert manager.lookup(K[1], context) is None
    manager.lookup(K[2], context)
    manager.prepare_load(K[:1], context)
    manager.lookup(K[2], context)
    assert stored(manager, K[2:3]) == []
    look_up(manager, K[2:3], 1)
    assert stored(manager, K[2:3]) == K[2:3]


# -- offers


def test_an_offer_counts_once_a_request(new):
    manager = new()
    context = ReqContext("a")
    for _ in range(3):
        manager.count_offers(K[:2], context)
    assert stored(manager, K[:2]) == []
    manager.count_offers(K[:2], ReqContext("b"))
    assert stored(manager, K[:2]) == K[:2]


def test_an_offer_does_not_count_what_the_requests_look_up_has_counted(new):
    manager = new()
    context = ReqContext("a")
    manager.lookup_prefix(K[:3], context)
    manager.count_offers(K[:3], context)
    manager.count_offers(K[1:2], ReqContext("b"))
    assert stored(manager, K[:3]) == [K[1]]


def test_a_prompt_is_stored_whole_by_its_third_request(new):
    manager = new()
    admitted = []
    for i in range(3):
        context = ReqContext(str(i))
        manager.lookup_prefix(K[:4], context)
        manager.count_offers(K[:4], context)
        granted = manager.prepare_store_prefix(K[:4], context)
        manager.complete_store(granted.keys_to_store, context, True, granted.store_spec)
        manager.on_request_finished(context)
        admitted.append(granted.keys_to_store)
    assert admitted[0] == []
    assert [key for keys in admitted for key in keys] == K[:4]


def test_offers_without_a_filter_do_nothing():
    manager = CPUOffloadingManager(4)
    manager.count_offers(K[:2], ReqContext("a"))
    assert stored(manager, K[:2]) == K[:2]


# -- the tracker


def test_tracker_forgets_the_key_counted_longest_ago(new):
    manager = new(2, 2)
    look_up(manager, K[:1])
    look_up(manager, K[1:2])
    look_up(manager, K[2:3])
    look_up(manager, K[:1])
    assert stored(manager, K[:1]) == []
    look_up(manager, K[2:3])
    assert stored(manager, K[2:3]) == K[2:3]


def test_counting_makes_a_key_recent(new):
    manager = new(3, 2)
    for key in (K[0], K[1], K[0], K[2], K[0]):
        look_up(manager, [key])
    assert stored(manager, K[:1]) == K[:1]


def test_storing_does_not_make_a_key_recent(new):
    manager = new(2, 2)
    look_up(manager, [K[0], K[1]])
    stored(manager, K[:1])
    look_up(manager, [K[2], K[0]])
    assert stored(manager, K[:1]) == []


def test_a_key_of_the_call_that_the_tracker_has_forgotten_is_not_evicted(new):
    manager = new(2, 6)
    look_up(manager, K[:4], 2)
    store_ready(manager, K[:4], ReqContext("a"))
    look_up(manager, K[4:10], 2)
    granted = manager.prepare_store([K[0], K[9]], ReqContext("b"))
    assert granted.keys_to_store == [K[9]]
    assert granted.evicted_keys == [K[1]]


# -- misuse and settings


def test_a_key_named_twice_is_refused_even_if_it_would_be_dropped(new):
    manager = new()
    with pytest.raises(DuplicateKeyError, match=K[0].hex()):
        manager.prepare_store([K[0], K[1], K[0]], ReqContext("a"))


def test_tracker_needs_room():
    with pytest.raises(ConfigurationError, match="0"):
        FilterReusedOffloadingManager(CPUOffloadingManager(4), 2, 0)


# -- everything else is the backing manager's


def test_the_filter_hands_everything_else_on():
    backing = CPUOffloadingManager(4, enable_events=True, deadline_s=5.0, store_timeout_s=64.0)
    manager = FilterReusedOffloadingManager(backing)
    manager.advance(100.0)
    look_up(manager, K[:4], 2)
    writer, reader = ReqContext("writer"), ReqContext("reader")
    manager.on_new_request(reader)
    granted = manager.prepare_store(K[:3], writer)
    assert manager.residency(K[0]) is backing.residency(K[0]) is Residency.ARRIVING
    assert manager.lookup(K[0], reader) is None
    assert manager.still_waiting(reader) is True
    assert manager.defer(reader) is True
    manager.complete_store(K[:3], writer, True, granted.store_spec)
    assert manager.still_waiting(reader) is False
    spec = manager.prepare_load(K[:3], reader)
    assert manager.get_stats().pinned_blocks == 3
    manager.complete_load(K[:1], reader, False, spec)
    manager.complete_load(K[1:3], reader, True, spec)
    manager.touch(K[1:2], reader)
    assert backing.policy.evict(0) == []
    assert list(backing.policy)
    manager.on_request_finished(reader)
    manager.on_schedule_end()
    assert manager.has_pending_work() is False
    assert [event.removed for event in manager.take_events()] == [False, True]
    manager.check_invariants()
    manager.reset_cache()
    assert backing.get_stats().ready_blocks == manager.get_stats().ready_blocks == 0
    manager.advance(106.0)
    assert manager.defer(reader) is True
    manager.shutdown()
