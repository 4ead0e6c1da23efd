"""Loading: pins, their order, and loads that fail."""

import pytest

from kvtier import CPUOffloadingManager, ReqContext, Residency
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


def pinned(manager):
    return manager.get_stats().pinned_blocks


def test_slots_follow_the_order_given(new):
    manager = new()
    assert store_ready(manager, K[:4], ReqContext("a")) == [0, 1, 2, 3]
    spec = manager.prepare_load([K[2], K[0], K[3]], ReqContext("b"))
    assert spec.block_ids.tolist() == [2, 0, 3]
    assert spec.medium() == "CPU"


@pytest.mark.parametrize("by_spec", [False, True])
def test_slots_are_right_after_a_store_that_completed_in_parts(new, by_spec):
    manager = new()
    granted = manager.prepare_store(K[:4], ReqContext("a"))
    spec = granted.store_spec if by_spec else None
    manager.complete_store([K[2]], ReqContext("a"), True, spec)
    manager.complete_store([K[0]], ReqContext("a"), False, spec)
    manager.complete_store([K[3], K[1]], ReqContext("a"), True, spec)
    assert manager.prepare_load([K[1], K[2], K[3]], ReqContext("b")).block_ids.tolist() == [1, 2, 3]


def test_generations_are_those_of_the_stores(new):
    manager = new()
    granted = manager.prepare_store(K[:3], ReqContext("a"))
    manager.complete_store(K[:3], ReqContext("a"), True, granted.store_spec)
    spec = manager.prepare_load([K[2], K[0]], ReqContext("b"))
    generations = granted.store_spec.generations.tolist()
    assert spec.generations.tolist() == [generations[2], generations[0]]


def test_two_readers_pin_twice(new):
    manager = new(1)
    store_ready(manager, K[:1], ReqContext("a"))
    first, second = ReqContext("first"), ReqContext("second")
    manager.prepare_load(K[:1], first)
    manager.prepare_load(K[:1], second)
    manager.complete_load(K[:1], first)
    assert manager.prepare_store(K[1:2], ReqContext("b")) is None
    manager.complete_load(K[:1], second)
    assert manager.prepare_store(K[1:2], ReqContext("b")).evicted_keys == K[:1]


def test_one_request_can_read_a_block_twice(new):
    manager = new()
    store_ready(manager, K[:1], ReqContext("a"))
    reader = ReqContext("reader")
    manager.prepare_load(K[:1], reader)
    manager.prepare_load(K[:1], reader)
    manager.complete_load(K[:1], reader)
    assert pinned(manager) == 1
    manager.complete_load(K[:1], reader)
    assert pinned(manager) == 0


@pytest.mark.parametrize("by_spec", [False, True])
def test_part_of_a_load_may_end_first(new, by_spec):
    manager = new()
    store_ready(manager, K[:3], ReqContext("a"))
    reader = ReqContext("reader")
    spec = manager.prepare_load(K[:3], reader)
    manager.complete_load({K[1]}, reader, True, spec if by_spec else None)
    assert pinned(manager) == 2
    manager.complete_load({K[0], K[2]}, reader, True, spec if by_spec else None)
    assert pinned(manager) == 0


def test_pinning_moves_no_block(new):
    manager = new()
    store_ready(manager, K[:4], ReqContext("a"))
    before = eviction_order(manager.policy)
    reader = ReqContext("reader")
    manager.prepare_load([K[0], K[2]], reader)
    assert eviction_order(manager.policy) == before
    manager.complete_load([K[0], K[2]], reader)
    assert eviction_order(manager.policy) == before


def test_load_after_the_deadline_of_its_request_still_works(new):
    manager = new()
    store_ready(manager, K[:1], ReqContext("a"))
    manager.prepare_store(K[1:2], ReqContext("a"))
    reader = ReqContext("reader")
    assert manager.lookup(K[1], reader) is None
    manager.advance(200.0)
    assert manager.lookup(K[0], reader) is True
    assert manager.prepare_load(K[:1], reader).block_ids.tolist() == [0]


def test_completion_may_come_after_the_request_has_finished(new):
    manager = new()
    store_ready(manager, K[:2], ReqContext("a"))
    reader = ReqContext("reader")
    manager.prepare_load(K[:2], reader)
    manager.on_request_finished(reader)
    assert pinned(manager) == 2
    manager.complete_load(K[:2], reader)
    assert pinned(manager) == 0


# -- failed loads


@pytest.mark.parametrize("by_spec", [False, True])
def test_failed_load_makes_the_block_absent_at_once(new, by_spec):
    manager = new()
    store_ready(manager, K[:2], ReqContext("a"))
    reader = ReqContext("reader")
    spec = manager.prepare_load(K[:2], reader)
    manager.complete_load(K[:1], reader, False, spec if by_spec else None)
    assert manager.residency(K[0]) is Residency.ABSENT
    assert manager.residency(K[1]) is Residency.READY
    assert K[0] not in manager.policy
    stats = manager.get_stats()
    assert (stats.ready_blocks, stats.pinned_blocks, stats.condemned_blocks) == (1, 1, 0)
    manager.check_invariants()


def test_slot_of_a_failed_load_is_handed_out_only_when_no_reader_is_left(new):
    manager = new(1)
    store_ready(manager, K[:1], ReqContext("a"))
    first, second = ReqContext("first"), ReqContext("second")
    manager.prepare_load(K[:1], first)
    manager.prepare_load(K[:1], second)
    manager.complete_load(K[:1], first, success=False)
    assert manager.lookup(K[0], first) is False
    assert manager.get_stats().condemned_blocks == 1
    assert manager.prepare_store(K[1:2], ReqContext("b")) is None
    assert manager.prepare_store(K[:1], ReqContext("b")) is None
    manager.complete_load(K[:1], second)
    assert manager.get_stats().condemned_blocks == 0
    assert manager.prepare_store(K[:1], ReqContext("b")).store_spec.block_ids.tolist() == [0]


def test_second_reader_failing_too_changes_nothing_more(new):
    manager = new(enable_events=True)
    store_ready(manager, K[:1], ReqContext("a"))
    first, second = ReqContext("first"), ReqContext("second")
    manager.prepare_load(K[:1], first)
    manager.prepare_load(K[:1], second)
    manager.complete_load(K[:1], first, success=False)
    store_ready(manager, K[:1], ReqContext("again"))
    list(manager.take_events())
    manager.complete_load(K[:1], second, success=False)
    assert manager.residency(K[0]) is Residency.READY
    assert list(manager.take_events()) == []
    manager.check_invariants()


def test_failed_load_leaves_no_ghost(new):
    manager = new(2)
    store_ready(manager, K[:1], ReqContext("a"))
    reader = ReqContext("reader")
    manager.prepare_load(K[:1], reader)
    manager.complete_load(K[:1], reader, success=False)
    store_ready(manager, [K[0], K[1]], ReqContext("b"))
    assert eviction_order(manager.policy) == [K[0], K[1]]


# -- by when a load must begin


def test_load_limit_of_a_request_that_never_waited(new):
    manager = new(deadline_s=5.0)
    store_ready(manager, K[:1], ReqContext("a"))
    assert manager.prepare_load(K[:1], ReqContext("b")).begin_by_s == 105.0


def test_load_limit_is_the_running_deadline(new):
    manager = new(deadline_s=5.0)
    store_ready(manager, K[:1], ReqContext("a"))
    reader = ReqContext("b")
    assert manager.defer(reader) is True
    manager.advance(102.0)
    assert manager.prepare_load(K[:1], reader).begin_by_s == 105.0


def test_load_has_at_least_a_second(new):
    manager = new(deadline_s=5.0)
    store_ready(manager, K[:1], ReqContext("a"))
    reader = ReqContext("b")
    manager.defer(reader)
    manager.advance(104.5)
    assert manager.prepare_load(K[:1], reader).begin_by_s == 105.5
    manager.advance(300.0)
    assert manager.prepare_load(K[:1], reader).begin_by_s == 301.0


def test_load_of_a_manager_that_never_waits_has_a_second(new):
    manager = new(deadline_s=0.0)
    store_ready(manager, K[:1], ReqContext("a"))
    assert manager.prepare_load(K[:1], ReqContext("b")).begin_by_s == 101.0


def test_waiting_for_a_load_that_failed_counts(new):
    manager = new(deadline_s=5.0)
    store_ready(manager, K[:1], ReqContext("a"))
    reader, other = ReqContext("b"), ReqContext("c")
    spec = manager.prepare_load(K[:1], reader)
    manager.advance(103.0)
    manager.complete_load(K[:1], reader, success=False, spec=spec)
    manager.prepare_store(K[:1], other)
    assert manager.lookup(K[0], reader) is None
    manager.advance(105.0)
    assert manager.lookup(K[0], reader) is False
    assert manager.lookup(K[0], other) is None


def test_a_failure_told_of_a_load_that_has_ended_well_does_not_count(new):
    manager = new(deadline_s=5.0)
    store_ready(manager, K[:1], ReqContext("a"))
    reader = ReqContext("b")
    spec = manager.prepare_load(K[:1], reader)
    manager.complete_load(K[:1], reader, spec=spec)
    manager.advance(200.0)
    manager.complete_load(K[:1], reader, success=False, spec=spec)
    manager.prepare_store(K[1:2], ReqContext("c"))
    assert manager.lookup(K[1], reader) is None


def test_a_manager_that_never_waits_does_not_after_a_failed_load_either(new):
    manager = new(deadline_s=0.0)
    store_ready(manager, K[:1], ReqContext("a"))
    reader = ReqContext("b")
    spec = manager.prepare_load(K[:1], reader)
    manager.complete_load(K[:1], reader, success=False, spec=spec)
    manager.prepare_store(K[1:2], ReqContext("c"))
    assert manager.lookup(K[1], reader) is False
    assert manager.defer(reader) is False


def test_waiting_for_a_load_that_succeeded_does_not_count(new):
    manager = new(deadline_s=5.0)
    store_ready(manager, K[:1], ReqContext("a"))
    reader = ReqContext("b")
    spec = manager.prepare_load(K[:1], reader)
    manager.advance(101.0)
    manager.complete_load(K[:1], reader, spec=spec)
    manager.prepare_store(K[1:2], ReqContext("c"))
    manager.advance(110.0)
    assert manager.lookup(K[1], reader) is None


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_completion_by_a_request_that_pinned_nothing_leaks_no_other_pin(policy):
    manager = CPUOffloadingManager(8, policy)
    store_ready(manager, K[:2], ReqContext("stores"))
    a, b = ReqContext("a"), ReqContext("b")
    spec = manager.prepare_load(K[:2], a)
    manager.complete_load(K[:1], b)
    manager.complete_load(K[:2], a, True, spec)
    assert manager.get_stats().pinned_blocks == 0
    assert manager.get_stats().counters["late_completions"] == 1
    manager.check_invariants()
