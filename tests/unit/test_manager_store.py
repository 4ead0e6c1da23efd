"""Storing: who gets a slot, which slot, and who has to leave."""

import contextlib

import pytest

from kvtier import CPUOffloadingManager, DuplicateKeyError, PrepareStoreOutput, ReqContext, Residency
from kvtier.testing import ReferenceManager, eviction_order, make_keys, snapshot, store_ready

K = make_keys(12)


@pytest.fixture(params=["manager-lru", "manager-arc", "model-lru", "model-arc"])
def new(request):
    """Makes a manager of four slots, or of as many as asked for. The reference model must pass too."""
    side, policy = request.param.split("-")

    def make(num_blocks=4, **options):
        implementation = CPUOffloadingManager if side == "manager" else ReferenceManager
        manager = implementation(num_blocks, policy, **options)
        manager.advance(100.0)
        return manager

    return make


def slots(granted):
    return granted.store_spec.block_ids.tolist()


def introduced(manager):
    context = ReqContext("introduced")
    manager.on_new_request(context)
    return context


def test_input_order_is_kept(new):
    granted = new().prepare_store([K[2], K[0], K[1]], ReqContext("a"))
    assert isinstance(granted, PrepareStoreOutput)
    assert granted.keys_to_store == [K[2], K[0], K[1]]
    assert type(granted.keys_to_store) is list
    assert slots(granted) == [0, 1, 2]
    assert granted.evicted_keys == []
    assert type(granted.evicted_keys) is list


def test_block_ids_are_an_integer_array_with_one_generation_a_slot(new):
    spec = new().prepare_store(K[:3], ReqContext("a")).store_spec
    assert spec.block_ids.dtype.kind == "i"
    assert spec.generations.shape == spec.block_ids.shape == (3,)


def test_a_collection_of_any_kind_will_do(new):
    manager = new()
    granted = manager.prepare_store(dict.fromkeys(K[:2]).keys(), ReqContext("a"))
    assert granted.keys_to_store == K[:2]
    manager.complete_store({K[0], K[1]}, ReqContext("a"))
    assert manager.get_stats().ready_blocks == 2


def test_no_keys_is_a_grant_of_nothing(new):
    granted = new().prepare_store([], ReqContext("a"))
    assert granted.keys_to_store == []
    assert slots(granted) == []


def test_stored_and_in_flight_keys_are_skipped(new):
    manager = new()
    store_ready(manager, K[:1], ReqContext("a"))
    manager.prepare_store(K[1:2], ReqContext("a"))
    granted = manager.prepare_store(K[:4], ReqContext("b"))
    assert granted.keys_to_store == K[2:4]
    assert slots(granted) == [2, 3]


def test_all_skipped_is_not_none(new):
    manager = new()
    store_ready(manager, K[:4], ReqContext("a"))
    granted = manager.prepare_store(K[:4], ReqContext("b"))
    assert granted is not None
    assert granted.keys_to_store == []
    assert granted.evicted_keys == []
    assert slots(granted) == []


def test_caller_owns_the_lists(new):
    manager = new()
    granted = manager.prepare_store(K[:2], ReqContext("a"))
    granted.keys_to_store.clear()
    granted.evicted_keys.append(K[0])
    manager.complete_store(K[:2], ReqContext("a"), True, granted.store_spec)
    assert manager.lookup(K[1], ReqContext("a")) is True
    manager.check_invariants()


def test_success_makes_ready(new):
    manager = new()
    manager.prepare_store(K[:2], ReqContext("a"))
    assert manager.residency(K[0]) is Residency.ARRIVING
    manager.complete_store(K[:1], ReqContext("a"))
    assert manager.residency(K[0]) is Residency.READY
    assert manager.residency(K[1]) is Residency.ARRIVING


def test_failure_removes_what_was_in_flight(new):
    manager = new()
    manager.prepare_store(K[:2], ReqContext("a"))
    manager.complete_store(K[:2], ReqContext("a"), success=False)
    assert manager.residency(K[0]) is Residency.ABSENT
    assert len(manager.policy) == 0
    manager.check_invariants()


def test_ready_block_stays_ready_when_a_later_batch_naming_it_fails(new):
    manager = new()
    store_ready(manager, K[:1], ReqContext("a"))
    manager.prepare_store(K[:2], ReqContext("b"))
    manager.complete_store(K[:2], ReqContext("b"), success=False)
    assert manager.residency(K[0]) is Residency.READY
    assert manager.residency(K[1]) is Residency.ABSENT


def test_unknown_keys_are_ignored(new):
    manager = new()
    manager.prepare_store(K[:1], ReqContext("a"))
    manager.complete_store([K[9], K[0]], ReqContext("a"))
    manager.complete_store([K[10]], ReqContext("a"), success=False)
    assert manager.lookup(K[0], ReqContext("a")) is True
    assert manager.lookup(K[9], ReqContext("a")) is False
    manager.check_invariants()


@pytest.mark.parametrize("success", [True, False])
def test_a_completion_that_names_a_key_twice_corrupts_nothing(new, success):
    manager = new()
    manager.prepare_store(K[:2], ReqContext("a"))
    with contextlib.suppress(DuplicateKeyError):
        manager.complete_store([K[0], K[0]], ReqContext("a"), success)
    manager.check_invariants()
    manager.complete_store(K[:2], ReqContext("a"))
    assert manager.residency(K[1]) is Residency.READY


def test_after_a_failure_the_same_block_can_be_stored(new):
    manager = new()
    manager.prepare_store(K[:1], ReqContext("a"))
    manager.complete_store(K[:1], ReqContext("a"), success=False)
    assert manager.prepare_store(K[:1], ReqContext("b")).keys_to_store == K[:1]


# -- which slot


def test_freed_slot_waits_until_no_slot_is_fresh(new):
    manager = new()
    first = ReqContext("a")
    assert slots(manager.prepare_store(K[:2], first)) == [0, 1]
    manager.complete_store(K[:1], first, success=False)
    assert slots(manager.prepare_store(K[2:4], first)) == [2, 3]
    assert slots(manager.prepare_store(K[4:5], first)) == [0]


def test_last_freed_slot_is_handed_out_first(new):
    manager = new()
    context = ReqContext("a")
    manager.prepare_store(K[:4], context)
    for key in (K[1], K[3], K[0]):
        manager.complete_store([key], context, success=False)
    assert slots(manager.prepare_store(K[4:7], context)) == [0, 3, 1]


def test_victims_slots_are_freed_in_eviction_order(new):
    manager = new()
    store_ready(manager, K[:4], ReqContext("a"))
    granted = manager.prepare_store(K[4:7], ReqContext("b"))
    assert granted.evicted_keys == K[:3]
    assert slots(granted) == [2, 1, 0]


def test_a_slot_freed_by_failure_goes_before_an_eviction(new):
    manager = new()
    context = ReqContext("a")
    store_ready(manager, K[:3], context)
    manager.prepare_store([K[3]], context)
    manager.complete_store([K[3]], context, success=False)
    granted = manager.prepare_store([K[4]], ReqContext("b"))
    assert granted.evicted_keys == []
    assert slots(granted) == [3]


def test_every_allocation_of_a_slot_has_a_generation_of_its_own(new):
    manager = new(1)
    seen = set()
    for key in K:
        granted = manager.prepare_store([key], ReqContext("a"))
        assert slots(granted) == [0]
        seen.add(int(granted.store_spec.generations[0]))
        manager.complete_store([key], ReqContext("a"), True, granted.store_spec)
    assert len(seen) == len(K)


# -- who leaves


def test_oldest_leaves_first_and_only_as_many_as_needed(new):
    manager = new()
    store_ready(manager, K[:4], ReqContext("a"))
    granted = manager.prepare_store(K[4:6], ReqContext("b"))
    assert granted.evicted_keys == K[:2]
    assert manager.residency(K[0]) is Residency.ABSENT
    assert manager.residency(K[2]) is Residency.READY


def test_pinned_block_is_never_evicted(new):
    manager = new()
    store_ready(manager, K[:4], ReqContext("a"))
    manager.prepare_load(K[:2], ReqContext("reader"))
    assert manager.prepare_store(K[4:6], ReqContext("b")).evicted_keys == K[2:4]


def test_block_in_flight_is_never_evicted(new):
    manager = new()
    manager.prepare_store(K[:2], ReqContext("writer"))
    store_ready(manager, K[2:4], ReqContext("a"))
    assert manager.prepare_store(K[4:6], ReqContext("b")).evicted_keys == K[2:4]


def test_own_keys_are_never_evicted(new):
    manager = new()
    store_ready(manager, K[:4], ReqContext("a"))
    granted = manager.prepare_store([K[0], K[5], K[1], K[6]], ReqContext("b"))
    assert granted.evicted_keys == [K[2], K[3]]
    assert granted.keys_to_store == [K[5], K[6]]


def test_blocks_that_the_request_has_read_leave_last(new):
    manager = new()
    context = introduced(manager)
    store_ready(manager, K[:4], ReqContext("a"))
    manager.prepare_load(K[:2], context)
    manager.complete_load(K[:2], context)
    assert manager.prepare_store(K[4:6], context).evicted_keys == K[2:4]


def test_blocks_that_the_request_has_stored_leave_last(new):
    manager = new()
    context = introduced(manager)
    store_ready(manager, K[:2], context)
    store_ready(manager, K[2:4], ReqContext("a"))
    assert manager.prepare_store(K[4:6], context).evicted_keys == K[2:4]


def test_with_too_few_others_the_order_is_the_policys(new):
    manager = new()
    context = introduced(manager)
    store_ready(manager, K[:2], context)
    store_ready(manager, K[2:4], ReqContext("a"))
    assert manager.prepare_store(K[4:7], context).evicted_keys == K[:3]


def test_blocks_of_a_request_that_nobody_will_finish_are_not_spared(new):
    manager = new()
    context = ReqContext("stranger")
    store_ready(manager, K[:2], context)
    store_ready(manager, K[2:4], ReqContext("a"))
    assert manager.prepare_store(K[4:6], context).evicted_keys == K[:2]


def test_a_finished_request_spares_nothing(new):
    manager = new()
    context = introduced(manager)
    store_ready(manager, K[:2], context)
    store_ready(manager, K[2:4], ReqContext("a"))
    manager.on_request_finished(context)
    manager.touch(K[2:4], ReqContext("c"))
    assert set(manager.prepare_store(K[4:6], context).evicted_keys) == set(K[:2])


def test_none_does_not_end_the_sparing(new):
    manager = new()
    context = introduced(manager)
    store_ready(manager, K[:2], context)
    store_ready(manager, K[2:4], ReqContext("a"))
    assert manager.prepare_store(K[4:9], context) is None
    assert manager.prepare_store(K[4:6], context).evicted_keys == K[2:4]


# -- None


@pytest.mark.parametrize("obstacle", ["pinned", "in flight", "own keys", "too small"])
def test_none_leaves_everything_unchanged(new, obstacle):
    manager = new(enable_events=True)
    store_ready(manager, K[:3], ReqContext("a"))
    offered = K[5:7]
    if obstacle == "pinned":
        store_ready(manager, K[3:4], ReqContext("a"))
        manager.prepare_load(K[1:4], ReqContext("reader"))
    elif obstacle == "in flight":
        manager.prepare_load(K[1:3], ReqContext("reader"))
        manager.prepare_store(K[3:4], ReqContext("writer"))
    elif obstacle == "own keys":
        offered = [*K[:3], *K[5:7]]
    else:
        offered = K[5:10]
    list(manager.take_events())
    before = snapshot(manager, K, manager.policy)
    assert manager.prepare_store(offered, ReqContext("b")) is None
    assert snapshot(manager, K, manager.policy) == before
    assert list(manager.take_events()) == []
    manager.check_invariants()


def test_after_none_slots_go_on_as_if_it_had_not_been_asked(new):
    manager = new()
    store_ready(manager, K[:2], ReqContext("a"))
    manager.prepare_load(K[:2], ReqContext("reader"))
    context = ReqContext("b")
    assert manager.prepare_store(K[4:7], context) is None
    assert slots(manager.prepare_store(K[4:6], context)) == [2, 3]


# -- counting


def test_gauges_and_counters(new):
    manager = new()
    store_ready(manager, K[:3], ReqContext("a"))
    manager.prepare_load(K[1:3], ReqContext("r1"))
    manager.prepare_load(K[2:3], ReqContext("r2"))
    manager.prepare_store(K[3:5], ReqContext("b"))
    stats = manager.get_stats()
    assert stats.capacity_blocks == 4
    assert stats.ready_blocks == 2
    assert stats.in_flight_blocks == 2
    assert stats.pinned_blocks == 2
    assert stats.condemned_blocks == 0
    assert stats.counters["stored_blocks"] == 3
    assert stats.counters["evicted_blocks"] == 1


def test_a_new_managers_policy_is_empty(new):
    manager = new()
    assert eviction_order(manager.policy) == []
    assert manager.policy.cache_capacity == 4
