"""What moves a block in the eviction order, and what does not."""

import pytest

from kvtier import CPUOffloadingManager, ReqContext
from kvtier.testing import ReferenceManager, eviction_order, make_keys, store_ready

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


@pytest.fixture
def order(new):
    """The eviction order of a manager."""
    return lambda manager: eviction_order(manager.policy)


def test_new_blocks_stand_in_input_order(new, order):
    manager = new()
    store_ready(manager, [K[2], K[0]], ReqContext("a"))
    manager.prepare_store([K[3], K[1]], ReqContext("b"))
    assert order(manager) == [K[2], K[0], K[3], K[1]]


def test_touch_leaves_the_first_key_most_recent(new, order):
    manager = new()
    store_ready(manager, K[:4], ReqContext("a"))
    manager.touch([K[0], K[1]], ReqContext("b"))
    assert order(manager) == [K[2], K[3], K[1], K[0]]


def test_touch_that_names_a_key_twice(new, order):
    manager = new()
    store_ready(manager, K[:3], ReqContext("a"))
    manager.touch([K[0], K[1], K[0]], ReqContext("b"))
    assert order(manager) == [K[2], K[1], K[0]]
    manager.check_invariants()


def test_touch_of_unknown_keys_makes_nothing_resident(new, order):
    manager = new()
    store_ready(manager, K[:2], ReqContext("a"))
    manager.touch([K[7], K[0]], ReqContext("b"))
    assert order(manager) == [K[1], K[0]]
    manager.check_invariants()


def test_prepare_and_complete_move_nothing(new, order):
    manager = new()
    store_ready(manager, K[:4], ReqContext("a"))
    context = ReqContext("b")
    spec = manager.prepare_load([K[0]], context)
    manager.prepare_store(K[:2], context)
    manager.prepare_store_prefix(K[:3], context)
    manager.complete_load([K[0]], context, True, spec)
    manager.complete_store(K[:2], context)
    manager.lookup_prefix(K[:4], context)
    manager.count_offers(K[:4], context)
    assert order(manager) == K[:4]


def test_finishing_touches_what_was_read_deepest_first(new, order):
    manager = new()
    store_ready(manager, K[:4], ReqContext("a"))
    context = ReqContext("b")
    manager.prepare_load([K[0], K[1]], context)
    manager.prepare_load([K[2]], context)
    manager.on_request_finished(context)
    assert order(manager) == [K[3], K[2], K[1], K[0]]


def test_finishing_touches_what_was_offered_and_there(new, order):
    manager = new()
    store_ready(manager, K[:4], ReqContext("a"))
    context = ReqContext("b")
    assert manager.prepare_store(K[:2], context).keys_to_store == []
    manager.on_request_finished(context)
    assert order(manager) == [K[2], K[3], K[1], K[0]]


def test_finishing_moves_own_blocks_so_that_the_prefix_outlives_its_suffix(new, order):
    manager = new()
    context = ReqContext("a")
    store_ready(manager, K[:3], context)
    store_ready(manager, [K[3]], ReqContext("b"))
    manager.on_request_finished(context)
    assert order(manager) == [K[3], K[2], K[1], K[0]]


def test_finishing_moves_own_blocks_still_in_flight(new, order):
    manager = new()
    context = ReqContext("a")
    manager.prepare_store(K[:3], context)
    manager.on_request_finished(context)
    assert order(manager) == [K[2], K[1], K[0]]


def test_a_request_is_finished_once(new, order):
    manager = new()
    store_ready(manager, K[:4], ReqContext("a"))
    context = ReqContext("b")
    manager.prepare_load([K[0]], context)
    manager.complete_load([K[0]], context)
    manager.on_request_finished(context)
    manager.touch([K[1]], ReqContext("c"))
    manager.on_request_finished(context)
    assert order(manager) == [K[2], K[3], K[0], K[1]]


def test_a_request_that_came_to_nothing_moves_nothing(new, order):
    manager = new()
    store_ready(manager, K[:4], ReqContext("a"))
    context = ReqContext("b")
    manager.lookup_prefix(K[:4], context)
    manager.on_request_finished(context)
    assert order(manager) == K[:4]


def test_finishing_after_the_blocks_are_gone(new, order):
    manager = new(2)
    context = ReqContext("a")
    store_ready(manager, K[:2], context)
    store_ready(manager, K[2:4], ReqContext("b"))
    manager.on_request_finished(context)
    assert order(manager) == K[2:4]
    manager.check_invariants()


def test_a_finished_prompt_loses_its_suffix_first(new):
    manager = new(4)
    context = ReqContext("a")
    store_ready(manager, K[:4], context)
    manager.on_request_finished(context)
    assert manager.prepare_store(K[4:6], ReqContext("b")).evicted_keys == [K[3], K[2]]
