"""Storing for engines that cannot offer again: the longest leading run that fits."""

import pytest

from kvtier import CPUOffloadingManager, ReqContext, Residency
from kvtier.testing import ReferenceManager, make_keys, store_ready

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


A = ReqContext("a")


def ready(manager):
    return [key for key in K if manager.residency(key) is Residency.READY]


def store_prefix(manager, keys, context):
    granted = manager.prepare_store_prefix(keys, context)
    manager.complete_store(granted.keys_to_store, context, True, granted.store_spec)
    return granted


def test_what_fits_is_stored_as_prepare_store_does(new):
    manager = new()
    granted = manager.prepare_store_prefix(K[:4], A)
    assert granted.keys_to_store == K[:4]
    assert granted.store_spec.block_ids.tolist() == [0, 1, 2, 3]
    assert granted.evicted_keys == []


def test_others_blocks_are_evicted(new):
    manager = new()
    store_ready(manager, K[:4], A)
    granted = manager.prepare_store_prefix(K[4:7], ReqContext("b"))
    assert granted.keys_to_store == K[4:7]
    assert granted.evicted_keys == K[:3]
    assert granted.store_spec.block_ids.tolist() == [2, 1, 0]


def test_never_none(new):
    manager = new()
    store_ready(manager, K[:4], A)
    manager.prepare_load(K[:4], ReqContext("reader"))
    granted = manager.prepare_store_prefix(K[4:6], ReqContext("b"))
    assert granted.keys_to_store == []
    assert granted.evicted_keys == []
    assert granted.store_spec.block_ids.tolist() == []
    assert manager.get_stats().counters["shed_blocks"] == 2


def test_leading_run_is_stored_and_the_rest_shed(new):
    manager = new()
    store_ready(manager, K[:4], A)
    manager.prepare_load(K[:2], ReqContext("reader"))
    granted = manager.prepare_store_prefix(K[4:8], ReqContext("b"))
    assert granted.keys_to_store == K[4:6]
    assert granted.evicted_keys == K[2:4]
    assert manager.get_stats().counters["shed_blocks"] == 2
    manager.check_invariants()


def test_a_prompt_of_twice_the_capacity_in_one_offer(new):
    manager = new()
    store_ready(manager, K[8:12], A)
    context = ReqContext("b")
    granted = store_prefix(manager, K[:8], context)
    assert granted.keys_to_store == K[:4]
    manager.on_request_finished(context)
    assert ready(manager) == K[:4]


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_a_prompt_of_twice_the_capacity_in_many_offers(new, chunk):
    manager = new()
    store_ready(manager, K[8:12], A)
    context = ReqContext("b")
    for start in range(0, 8, chunk):
        store_prefix(manager, K[start : min(8, start + chunk)], context)
        manager.check_invariants()
    manager.on_request_finished(context)
    assert ready(manager) == K[:4]
    assert manager.lookup_prefix(K[:8], ReqContext("c")).num_ready == 4
    assert manager.get_stats().counters["shed_blocks"] == 4


def test_once_cut_later_offers_are_shed_even_when_there_is_room(new):
    manager = new()
    context = ReqContext("b")
    store_prefix(manager, K[:6], context)
    manager.reset_cache()
    assert manager.prepare_store_prefix(K[6:8], context).keys_to_store == []
    assert manager.get_stats().counters["shed_blocks"] == 4


def test_other_requests_are_not_cut(new):
    manager = new()
    store_prefix(manager, K[:6], ReqContext("b"))
    assert manager.prepare_store_prefix(K[6:8], ReqContext("c")).keys_to_store == K[6:8]


def test_a_finished_request_is_cut_no_longer(new):
    manager = new()
    context = ReqContext("b")
    store_prefix(manager, K[:6], context)
    manager.on_request_finished(context)
    assert manager.prepare_store_prefix(K[6:8], context).keys_to_store == K[6:8]


def test_blocks_that_the_request_has_loaded_are_not_evicted(new):
    manager = new()
    store_ready(manager, K[:4], A)
    context = ReqContext("b")
    manager.complete_load(K[:2], context, True, manager.prepare_load(K[:2], context))
    granted = manager.prepare_store_prefix(K[4:8], context)
    assert granted.evicted_keys == K[2:4]
    assert granted.keys_to_store == K[4:6]


def test_blocks_that_the_request_offered_and_that_were_there_are_not_evicted(new):
    manager = new()
    store_ready(manager, K[:4], A)
    context = ReqContext("b")
    manager.prepare_store_prefix(K[:2], context)
    assert manager.prepare_store_prefix(K[4:8], context).evicted_keys == K[2:4]


def test_blocks_that_another_request_was_writing_for_the_same_prompt_are_not_evicted(new):
    manager = new()
    manager.prepare_store_prefix(K[:2], A)
    context = ReqContext("b")
    assert manager.prepare_store_prefix(K[:2], context).keys_to_store == []
    manager.complete_store(K[:2], A)
    assert manager.prepare_store_prefix(K[2:8], context).keys_to_store == K[2:4]
    assert manager.residency(K[0]) is Residency.READY


def test_own_keys_of_the_call_are_not_evicted(new):
    manager = new()
    store_ready(manager, K[2:6], A)
    granted = manager.prepare_store_prefix(K[:6], ReqContext("b"))
    assert granted.keys_to_store == []
    assert granted.evicted_keys == []


def test_resident_blocks_in_the_run_cost_nothing(new):
    manager = new()
    store_ready(manager, [K[1]], A)
    granted = manager.prepare_store_prefix(K[:5], ReqContext("b"))
    assert granted.keys_to_store == [K[0], K[2], K[3]]
    assert granted.store_spec.block_ids.tolist() == [1, 2, 3]


def test_a_tail_that_is_resident_is_no_cut(new):
    manager = new()
    store_ready(manager, K[1:4], A)
    context = ReqContext("b")
    assert manager.prepare_store_prefix(K[:4], context).keys_to_store == K[:1]
    assert manager.get_stats().counters.get("shed_blocks", 0) == 0
    manager.complete_store(K[:1], context)
    manager.reset_cache()
    assert manager.prepare_store_prefix(K[4:6], context).keys_to_store == K[4:6]


def test_a_store_that_was_cut_short_says_nothing_of_the_all_or_nothing_form(new):
    manager = new()
    context = ReqContext("b")
    store_ready(manager, K[:4], A)
    load = manager.prepare_load(K[:4], A)
    assert manager.prepare_store_prefix(K[4:6], context).keys_to_store == []
    assert manager.prepare_store(K[4:6], context) is None
    manager.complete_load(K[:4], A, True, load)
    granted = manager.prepare_store(K[4:6], context)
    assert granted.keys_to_store == K[4:6]
    assert granted.evicted_keys == K[:2]
