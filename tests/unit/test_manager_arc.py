"""What the manager tells an adaptive policy: reuse, own inserts, ghosts."""

import pytest

from kvtier import ARCCachePolicy, CPUOffloadingManager, LRUCachePolicy, ReqContext
from kvtier.testing import ReferenceManager, make_keys, store_ready

K = make_keys(12)
A = ReqContext("a")


@pytest.fixture(params=[CPUOffloadingManager, ReferenceManager])
def manager(request):
    manager = request.param(4, "arc")
    manager.advance(100.0)
    return manager


def lists(manager):
    policy = manager.policy
    return [list(policy.t1), list(policy.t2), list(policy.b1), list(policy.b2)]


def test_policy_is_the_one_asked_for():
    assert isinstance(CPUOffloadingManager(4, "lru").policy, LRUCachePolicy)
    assert isinstance(CPUOffloadingManager(4).policy, LRUCachePolicy)
    assert isinstance(CPUOffloadingManager(4, cache_policy="arc").policy, ARCCachePolicy)


def test_new_blocks_are_in_t1(manager):
    store_ready(manager, K[:2], A)
    manager.prepare_store(K[2:3], A)
    assert lists(manager) == [K[:3], [], [], []]


def test_a_touch_promotes_what_is_ready_deepest_first(manager):
    store_ready(manager, K[:3], A)
    manager.touch(K[:2], ReqContext("b"))
    assert lists(manager) == [[K[2]], [K[1], K[0]], [], []]


@pytest.mark.parametrize("how", ["touch", "finish"])
def test_a_prefix_already_in_t2_outlives_the_suffix_that_joins_it(manager, how):
    store_ready(manager, K[:4], A)
    manager.touch(K[:2], A)
    context = ReqContext("b")
    if how == "touch":
        manager.touch(K[:4], context)
    else:
        manager.complete_load(K[:4], context, True, manager.prepare_load(K[:4], context))
        manager.on_request_finished(context)
    assert lists(manager) == [[], [K[3], K[2], K[1], K[0]], [], []]


def test_a_prefix_that_returned_to_t2_outlives_the_suffix_that_was_there(manager):
    store_ready(manager, K[:4], A)
    store_ready(manager, K[4:5], ReqContext("b"))
    context = ReqContext("c")
    store_ready(manager, K[:2], context)
    assert lists(manager)[1] == K[:1]
    manager.on_request_finished(context)
    assert lists(manager)[1] == [K[1], K[0]]


def test_a_touch_does_not_promote_what_is_in_flight(manager):
    manager.prepare_store(K[:2], A)
    manager.touch(K[:1], ReqContext("b"))
    assert lists(manager) == [[K[1], K[0]], [], [], []]


def test_a_finished_request_promotes_what_it_read(manager):
    store_ready(manager, K[:3], A)
    context = ReqContext("b")
    manager.complete_load(K[:2], context, True, manager.prepare_load(K[:2], context))
    assert lists(manager) == [K[:3], [], [], []]
    manager.on_request_finished(context)
    assert lists(manager) == [[K[2]], [K[1], K[0]], [], []]


def test_a_finished_request_promotes_what_it_offered_and_others_stored(manager):
    store_ready(manager, K[:2], A)
    context = ReqContext("b")
    store_ready(manager, K[:4], context)
    manager.on_request_finished(context)
    assert lists(manager) == [[K[3], K[2]], [K[1], K[0]], [], []]


@pytest.mark.parametrize("how", ["stored", "stored and offered again", "stored and read"])
def test_own_inserts_are_no_reuse(manager, how):
    context = ReqContext("b")
    store_ready(manager, K[:2], context)
    if how == "stored and offered again":
        manager.prepare_store(K[:2], context)
    elif how == "stored and read":
        manager.complete_load(K[:2], context, True, manager.prepare_load(K[:2], context))
    manager.on_request_finished(context)
    assert lists(manager) == [[K[1], K[0]], [], [], []]


def test_own_inserts_of_an_earlier_life_of_the_context_are_reuse(manager):
    context = ReqContext("b")
    store_ready(manager, K[:2], context)
    manager.on_request_finished(context)
    manager.prepare_store(K[:2], context)
    manager.on_request_finished(context)
    assert lists(manager) == [[], [K[1], K[0]], [], []]


def test_a_stored_ghost_enters_t2_and_teaches(manager):
    store_ready(manager, K[:4], A)
    store_ready(manager, K[4:6], ReqContext("b"))
    assert lists(manager) == [K[2:6], [], K[:2], []]
    store_ready(manager, [K[1], K[6]], ReqContext("c"))
    assert lists(manager) == [[K[4], K[5], K[6]], [K[1]], [K[0], K[2], K[3]], []]
    assert manager.policy.target_t1_size == 1.0


def test_a_touched_ghost_teaches_but_is_not_resident(manager):
    store_ready(manager, K[:4], A)
    store_ready(manager, K[4:6], ReqContext("b"))
    manager.touch(K[:1], ReqContext("c"))
    assert manager.policy.target_t1_size == 1.0
    assert manager.lookup(K[0], ReqContext("c")) is False
    manager.check_invariants()


def test_a_finished_request_does_not_teach_by_what_has_left(manager):
    context = ReqContext("a")
    store_ready(manager, K[:4], A)
    manager.complete_load(K[:4], context, True, manager.prepare_load(K[:4], context))
    store_ready(manager, K[4:6], ReqContext("b"))
    manager.on_request_finished(context)
    assert manager.policy.target_t1_size == 0.0
    assert list(manager.policy.b1) == K[:2]


def test_a_failed_store_leaves_no_ghost(manager):
    store_ready(manager, K[:2], A)
    manager.prepare_store(K[2:4], A)
    manager.complete_store(K[2:4], A, success=False)
    assert lists(manager) == [K[:2], [], [], []]


def test_a_failed_store_of_a_ghost_leaves_none(manager):
    store_ready(manager, K[:4], A)
    store_ready(manager, K[4:5], ReqContext("b"))
    manager.prepare_store(K[:1], ReqContext("c"))
    manager.complete_store(K[:1], ReqContext("c"), success=False)
    assert K[0] not in manager.policy.b1
    assert K[0] not in manager.policy.t2


def test_a_reset_leaves_no_ghosts(manager):
    store_ready(manager, K[:4], A)
    manager.touch(K[:1], A)
    store_ready(manager, K[4:6], ReqContext("b"))
    store_ready(manager, K[1:2], ReqContext("c"))
    manager.reset_cache()
    assert lists(manager) == [[], [], [], []]
    assert manager.policy.target_t1_size == 0.0


def test_none_leaves_the_lists_alone(manager):
    store_ready(manager, K[:4], A)
    manager.touch(K[:1], A)
    store_ready(manager, K[4:5], ReqContext("b"))
    before = lists(manager)
    manager.prepare_load(K[2:4], ReqContext("reader"))
    assert manager.prepare_store([K[1], K[6], K[7]], ReqContext("c")) is None
    assert lists(manager) == before
    assert manager.policy.target_t1_size == 0.0


def test_pinned_t1_makes_t2_give_the_victim(manager):
    store_ready(manager, K[:4], A)
    manager.touch(K[:2], A)
    manager.prepare_load(K[2:4], ReqContext("reader"))
    assert manager.prepare_store(K[4:5], ReqContext("b")).evicted_keys == [K[1]]
