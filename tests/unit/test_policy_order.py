"""Eviction order of each policy, and what every policy promises."""

import copy

import pytest

from kvtier import ARCCachePolicy, LRUCachePolicy
from kvtier.testing import ReferenceARC, ReferenceLRU, eviction_order, make_keys
from kvtier.testing.observe import policy_state

K = make_keys(20)


@pytest.fixture(params=[LRUCachePolicy, ARCCachePolicy, ReferenceLRU, ReferenceARC])
def policy(request):
    return request.param(6)


@pytest.fixture(params=[LRUCachePolicy, ReferenceLRU])
def lru(request):
    return request.param(6)


@pytest.fixture(params=[ARCCachePolicy, ReferenceARC])
def arc(request):
    return request.param(4)


def lists(arc):
    return [list(arc.t1), list(arc.t2), list(arc.b1), list(arc.b2)]


# -- all of them


def test_holds_exactly_what_was_inserted_and_has_not_left(policy):
    policy.insert(K[:5])
    assert policy.evict(1) == K[:1]
    policy.remove([K[1]])
    assert sorted(policy) == sorted(K[2:5])
    assert len(policy) == 3
    assert K[2] in policy
    assert K[0] not in policy
    assert K[1] not in policy


def test_victims_of_first_comers_come_in_input_order(policy):
    policy.insert([K[3], K[1]])
    policy.insert([K[2]])
    assert policy.evict(3) == [K[3], K[1], K[2]]


def test_last_key_of_a_touch_ends_most_recent(policy):
    policy.insert(K[:4])
    policy.touch([K[0], K[2]])
    assert eviction_order(policy) == [K[1], K[3], K[0], K[2]]


def test_first_use_only_moves(policy):
    policy.insert(K[:4])
    policy.touch([K[1], K[0]], first_use={K[0], K[1]})
    assert eviction_order(policy) == [K[2], K[3], K[1], K[0]]


def test_touch_makes_nothing_resident(policy):
    policy.insert(K[:2])
    policy.touch([K[9]])
    assert K[9] not in policy
    assert eviction_order(policy) == K[:2]


def test_protected_keys_are_passed_over(policy):
    policy.insert(K[:6])
    assert policy.evict(2, [{K[0]}, [K[2]], {K[1]: None}]) == [K[3], K[4]]
    assert eviction_order(policy) == [*K[:3], K[5]]


def test_evicting_nothing(policy):
    assert policy.evict(0) == []
    policy.insert(K[:2])
    assert policy.evict(0, [set(K)]) == []


def test_eviction_is_all_or_nothing(policy):
    policy.insert(K[:6])
    policy.touch([K[1], K[2]])
    policy.evict(1)
    policy.insert([K[0]])
    before = policy_state(policy)
    assert policy.evict(4, [{K[1], K[3], K[5]}]) is None
    assert policy.evict(7) is None
    assert policy_state(policy) == before


def test_passed_over_keys_keep_their_place(policy):
    policy.insert(K[:6])
    policy.evict(1, [set(K[:5])])
    assert eviction_order(policy) == K[:5]


def test_clear_forgets_everything(policy):
    policy.insert(K[:6])
    policy.touch(K[:3])
    policy.evict(3)
    policy.clear()
    assert policy_state(policy) == policy_state(type(policy)(6))
    policy.insert(K[:3])
    assert eviction_order(policy) == K[:3]


def test_settling_ignores_what_has_left(policy):
    policy.insert(K[:6])
    policy.evict(2)
    policy.insert(K[6:8])
    before = copy.deepcopy(policy)
    policy.settle([K[0], K[1]], ())
    assert policy_state(policy) == policy_state(before)


def test_settling_touches_what_is_there(policy):
    policy.insert(K[:4])
    policy.settle([K[2], K[0]], ())
    assert eviction_order(policy) == [K[1], K[3], K[2], K[0]]


def test_settling_only_moves_first_uses(policy):
    policy.insert(K[:4])
    policy.settle([K[1], K[0]], {K[0], K[1]})
    assert eviction_order(policy) == [K[2], K[3], K[1], K[0]]


# -- LRU


def test_lru_knows_recency_only(lru):
    lru.insert(K[:4])
    for _ in range(3):
        lru.touch([K[0]])
    lru.touch([K[1]])
    assert eviction_order(lru) == [K[2], K[3], K[0], K[1]]


# -- ARC: lists


def test_arc_starts_empty(arc):
    assert lists(arc) == [[], [], [], []]
    assert arc.target_t1_size == 0
    assert arc.cache_capacity == 4


def test_arc_second_use_promotes(arc):
    arc.insert(K[:3])
    assert lists(arc) == [K[:3], [], [], []]
    arc.touch([K[1]])
    assert lists(arc) == [[K[0], K[2]], [K[1]], [], []]
    arc.touch([K[0], K[1]])
    assert lists(arc) == [[K[2]], [K[0], K[1]], [], []]


def test_arc_first_use_does_not_promote(arc):
    arc.insert(K[:3])
    arc.touch([K[0]], first_use={K[0]})
    assert lists(arc) == [[K[1], K[2], K[0]], [], [], []]


def test_arc_first_use_moves_within_t2_as_well(arc):
    arc.insert(K[:3])
    arc.touch([K[0], K[1]])
    arc.touch([K[0]], first_use={K[0]})
    assert lists(arc) == [[K[2]], [K[1], K[0]], [], []]


def test_arc_first_uses_and_reuses_keep_the_order_given(arc):
    arc.insert(K[:3])
    arc.touch(K[:1])
    arc.touch([K[1], K[0]], first_use={K[0]})
    assert lists(arc) == [[K[2]], [K[1], K[0]], [], []]


def test_arc_evicted_keys_become_ghosts_of_their_list(arc):
    arc.insert(K[:4])
    arc.touch([K[0], K[1]])
    assert arc.evict(3) == [K[2], K[3], K[0]]
    assert lists(arc) == [[], [K[1]], [K[2], K[3]], [K[0]]]


def test_arc_removed_keys_leave_no_ghosts(arc):
    arc.insert(K[:4])
    arc.touch([K[0]])
    arc.remove([K[0], K[1]])
    assert lists(arc) == [K[2:4], [], [], []]


def test_arc_ghosts_are_bounded_by_the_capacity(arc):
    for key in K[:10]:
        arc.insert([key])
        arc.evict(1)
    assert lists(arc) == [[], [], K[6:10], []]
    arc.clear()
    for key in K[:10]:
        arc.insert([key])
        arc.touch([key])
        arc.evict(1)
    assert lists(arc) == [[], [], [], K[6:10]]


# -- ARC: which list gives the victim


def test_arc_takes_from_t1_while_it_is_larger_than_its_target(arc):
    arc.insert(K[:4])
    arc.touch([K[0], K[1]])
    arc.target_t1_size = 1.0
    assert arc.evict(2) == [K[2], K[0]]


def test_arc_takes_from_t1_at_a_fraction_over_its_target(arc):
    arc.insert(K[:4])
    arc.touch([K[0], K[1]])
    arc.target_t1_size = 1.5
    assert arc.evict(2) == [K[2], K[0]]


def test_arc_takes_from_the_other_list_when_one_is_empty(arc):
    arc.insert(K[:2])
    arc.target_t1_size = 4.0
    assert arc.evict(1) == [K[0]]
    arc.target_t1_size = 0.0
    arc.touch([K[1]])
    assert arc.evict(1) == [K[1]]


def test_arc_takes_from_the_other_list_when_one_is_protected(arc):
    arc.insert(K[:4])
    arc.touch([K[0], K[1]])
    assert arc.evict(1, [{K[2], K[3]}]) == [K[0]]
    arc.target_t1_size = 4.0
    assert arc.evict(1, [{K[1]}]) == [K[2]]


# -- ARC: ghosts teach


@pytest.fixture
def taught(arc):
    """K0..K3 ghosts of T1 but K1 of T2; K4..K7 resident, target 2."""
    arc.insert(K[:4])
    arc.touch([K[1]])
    assert arc.evict(4) == [K[0], K[2], K[3], K[1]]
    arc.insert(K[4:8])
    arc.target_t1_size = 2.0
    assert lists(arc) == [K[4:8], [], [K[0], K[2], K[3]], [K[1]]]
    return arc


def test_arc_stored_ghost_enters_t2(taught):
    taught.evict(1)
    taught.insert([K[2]])
    assert list(taught.t2) == [K[2]]
    assert K[2] not in taught.t1
    assert K[2] not in taught.b1


def test_arc_hit_in_b1_raises_the_target_by_at_least_one(taught):
    taught.insert([K[0]])
    assert taught.target_t1_size == 3.0


def test_arc_hit_in_b2_lowers_the_target_by_the_ratio(taught):
    taught.target_t1_size = 4.0
    taught.insert([K[1]])
    assert taught.target_t1_size == 1.0


def test_arc_hit_in_b1_raises_the_target_by_the_ratio(arc):
    arc.insert(K[:4])
    arc.touch(K[1:4])
    arc.evict(4)
    assert lists(arc) == [[], [], [K[0]], K[1:4]]
    arc.insert([K[0]])
    assert arc.target_t1_size == 3.0
    assert lists(arc) == [[], [K[0]], [], K[1:4]]


def test_arc_target_stays_within_zero_and_the_capacity(taught):
    taught.target_t1_size = 3.5
    taught.touch([K[0]])
    assert taught.target_t1_size == 4.0
    taught.target_t1_size = 1.0
    taught.touch([K[1]])
    assert taught.target_t1_size == 0.0


def test_arc_touched_ghost_teaches_but_is_not_resident(taught):
    taught.touch([K[0]])
    assert taught.target_t1_size == 3.0
    assert K[0] not in taught
    assert K[0] in taught.b1
    taught.touch([K[1]])
    assert taught.target_t1_size == 0.0
    assert K[1] in taught.b2


def test_arc_settling_a_ghost_teaches_nothing(taught):
    taught.settle([K[0], K[1]], ())
    assert taught.target_t1_size == 2.0


def test_arc_a_stranger_teaches_nothing(taught):
    taught.touch([K[9]])
    taught.insert([K[10]])
    assert taught.target_t1_size == 2.0
    assert K[10] in taught.t1


def test_arc_survives_a_scan(arc):
    """Blocks that are used again stay, however many are read once."""
    arc.insert(K[:2])
    arc.touch(K[:2])
    for key in K[2:]:
        if len(arc) == 4:
            arc.evict(1)
        arc.insert([key])
    assert set(K[:2]) <= set(arc)
