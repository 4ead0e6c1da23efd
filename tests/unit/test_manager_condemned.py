"""Slots whose block is gone while somebody still reads or writes them: reaped, reset, late."""

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


A = ReqContext("writer")


def slots(granted):
    return granted.store_spec.block_ids.tolist()


def gauges(manager):
    stats = manager.get_stats()
    return {
        "ready": stats.ready_blocks,
        "in flight": stats.in_flight_blocks,
        "pinned": stats.pinned_blocks,
        "condemned": stats.condemned_blocks,
    }


def late(manager):
    return manager.get_stats().counters.get("late_completions", 0)


def reaped(new, num_blocks=1):
    """A manager whose only write, of all its slots, has been reaped; and what that write was granted."""
    manager = new(num_blocks, store_timeout_s=64.0)
    granted = manager.prepare_store(K[:num_blocks], A)
    manager.advance(100.0 + 64.0 + 9.0)
    return manager, granted


# -- reaping


def test_a_store_in_time_is_not_reaped(new):
    manager = new(store_timeout_s=64.0)
    manager.prepare_store(K[:1], A)
    manager.advance(163.75)
    assert manager.residency(K[0]) is Residency.ARRIVING


def test_a_store_that_never_ends_is_reaped(new):
    manager, _ = reaped(new, 2)
    assert manager.residency(K[0]) is Residency.ABSENT
    assert manager.lookup(K[1], ReqContext("b")) is False
    assert len(manager.policy) == 0
    assert gauges(manager) == {"ready": 0, "in flight": 0, "pinned": 0, "condemned": 2}
    manager.check_invariants()


def test_only_what_is_in_flight_is_reaped(new):
    manager = new(store_timeout_s=64.0)
    store_ready(manager, K[:1], A)
    granted = manager.prepare_store(K[1:3], A)
    manager.complete_store(K[1:2], A, True, granted.store_spec)
    manager.advance(200.0)
    assert [manager.residency(key) for key in K[:3]] == [Residency.READY, Residency.READY, Residency.ABSENT]


def test_each_store_has_its_own_age(new):
    manager = new(store_timeout_s=64.0)
    manager.prepare_store(K[:1], A)
    manager.advance(150.0)
    manager.prepare_store(K[1:2], A)
    manager.advance(180.0)
    assert manager.residency(K[0]) is Residency.ABSENT
    assert manager.residency(K[1]) is Residency.ARRIVING
    manager.advance(230.0)
    assert manager.residency(K[1]) is Residency.ABSENT


def test_a_block_stored_again_has_a_new_age(new):
    manager = new(store_timeout_s=64.0)
    manager.prepare_store(K[:1], A)
    manager.advance(140.0)
    manager.complete_store(K[:1], A, success=False)
    manager.prepare_store(K[:1], A)
    manager.advance(190.0)
    assert manager.residency(K[0]) is Residency.ARRIVING


def test_a_reaped_slot_is_not_handed_out(new):
    manager, _ = reaped(new)
    assert manager.prepare_store(K[:1], ReqContext("b")) is None
    assert manager.prepare_store_prefix(K[1:2], ReqContext("c")).keys_to_store == []


@pytest.mark.parametrize("success", [True, False])
def test_late_completion_by_spec_frees_a_reaped_slot_and_stores_nothing(new, success):
    manager, granted = reaped(new)
    manager.complete_store(K[:1], A, success, granted.store_spec)
    assert manager.residency(K[0]) is Residency.ABSENT
    assert gauges(manager)["condemned"] == 0
    assert slots(manager.prepare_store(K[1:2], ReqContext("b"))) == [0]


def test_late_completion_does_not_touch_the_blocks_next_write(new):
    manager = new(2, store_timeout_s=64.0)
    old = manager.prepare_store(K[:1], A)
    manager.advance(180.0)
    again = manager.prepare_store(K[:1], ReqContext("b"))
    assert slots(again) == [1]
    manager.complete_store(K[:1], A, True, old.store_spec)
    assert manager.residency(K[0]) is Residency.ARRIVING
    assert gauges(manager) == {"ready": 0, "in flight": 1, "pinned": 0, "condemned": 0}
    manager.complete_store(K[:1], ReqContext("b"), True, again.store_spec)
    assert manager.residency(K[0]) is Residency.READY


def test_completion_by_key_goes_to_the_current_write_first(new):
    manager = new(2, store_timeout_s=64.0)
    manager.prepare_store(K[:1], A)
    manager.advance(180.0)
    manager.prepare_store(K[:1], ReqContext("b"))
    manager.complete_store(K[:1], ReqContext("b"))
    assert manager.residency(K[0]) is Residency.READY
    assert gauges(manager)["condemned"] == 1
    manager.complete_store(K[:1], A, success=False)
    assert manager.residency(K[0]) is Residency.READY
    assert gauges(manager)["condemned"] == 0


def test_completion_by_key_goes_to_the_oldest_condemned_write(new):
    manager = new(2, store_timeout_s=64.0)
    first = manager.prepare_store(K[:1], A)
    manager.advance(180.0)
    second = manager.prepare_store(K[:1], A)
    manager.advance(260.0)
    assert gauges(manager)["condemned"] == 2
    manager.complete_store(K[:1], A)
    assert slots(manager.prepare_store(K[1:2], A)) == slots(first)
    manager.complete_store(K[:1], A)
    assert slots(manager.prepare_store(K[2:3], A)) == slots(second)


def test_dead_writers_hold_nothing(new):
    manager, granted = reaped(new, 2)
    manager.writers_died()
    assert gauges(manager)["condemned"] == 0
    assert sorted(slots(manager.prepare_store(K[2:4], ReqContext("b")))) == [0, 1]
    manager.complete_store(K[:2], A, True, granted.store_spec)
    assert gauges(manager) == {"ready": 0, "in flight": 2, "pinned": 0, "condemned": 0}
    assert late(manager) == 2
    manager.check_invariants()


def test_dead_writers_do_not_free_what_is_being_read(new):
    manager = new(1)
    store_ready(manager, K[:1], A)
    reader = ReqContext("reader")
    manager.prepare_load(K[:1], reader)
    manager.reset_cache()
    manager.writers_died()
    assert manager.prepare_store(K[1:2], ReqContext("b")) is None
    manager.complete_load(K[:1], reader)
    assert slots(manager.prepare_store(K[1:2], ReqContext("b"))) == [0]


def test_reaping_leaves_no_ghost(new):
    manager = new(2, store_timeout_s=64.0)
    granted = manager.prepare_store(K[:1], A)
    manager.advance(180.0)
    manager.complete_store(K[:1], A, True, granted.store_spec)
    store_ready(manager, K[:2], A)
    assert eviction_order(manager.policy) == K[:2]


# -- generations


@pytest.mark.parametrize("success", [True, False])
def test_a_completion_of_an_earlier_use_of_the_slot_is_counted_and_ignored(new, success):
    manager = new(1)
    old = manager.prepare_store(K[:1], A)
    manager.complete_store(K[:1], A, False, old.store_spec)
    current = manager.prepare_store(K[:1], ReqContext("b"))
    assert slots(current) == slots(old)
    manager.complete_store(K[:1], A, success, old.store_spec)
    assert manager.residency(K[0]) is Residency.ARRIVING
    assert late(manager) == 1


def test_a_late_failure_does_not_remove_the_slots_next_block(new):
    manager = new(1)
    old = manager.prepare_store(K[:1], A)
    manager.complete_store(K[:1], A, True, old.store_spec)
    store_ready(manager, K[1:2], ReqContext("b"))
    manager.complete_store(K[:1], A, False, old.store_spec)
    assert manager.residency(K[1]) is Residency.READY
    assert late(manager) == 1
    manager.check_invariants()


@pytest.mark.parametrize("success", [True, False])
def test_a_store_completed_twice_changes_nothing_the_second_time(new, success):
    manager = new()
    granted = manager.prepare_store(K[:2], A)
    manager.complete_store(K[:2], A, True, granted.store_spec)
    manager.complete_store(K[:2], A, success, granted.store_spec)
    assert gauges(manager) == {"ready": 2, "in flight": 0, "pinned": 0, "condemned": 0}
    assert manager.get_stats().counters["stored_blocks"] == 2


@pytest.mark.parametrize("success", [True, False])
def test_a_load_completed_twice_by_spec_is_counted_and_ignored(new, success):
    manager = new()
    store_ready(manager, K[:2], A)
    reader = ReqContext("reader")
    spec = manager.prepare_load(K[:2], reader)
    manager.complete_load(K[:2], reader, True, spec)
    manager.complete_load(K[:2], reader, success, spec)
    assert gauges(manager) == {"ready": 2, "in flight": 0, "pinned": 0, "condemned": 0}
    assert late(manager) == 2


@pytest.mark.parametrize("same_request", [True, False])
def test_a_load_completed_twice_by_spec_does_not_unpin_another_load(new, same_request):
    manager = new(1)
    store_ready(manager, K[:1], A)
    first = ReqContext("first")
    second = first if same_request else ReqContext("second")
    spec = manager.prepare_load(K[:1], first)
    other = manager.prepare_load(K[:1], second)
    manager.complete_load(K[:1], first, True, spec)
    manager.complete_load(K[:1], first, True, spec)
    assert gauges(manager)["pinned"] == 1
    assert manager.prepare_store(K[1:2], A) is None
    manager.complete_load(K[:1], second, True, other)
    assert gauges(manager)["pinned"] == 0


def test_a_load_completed_by_key_and_again_by_spec_does_not_unpin_another_load(new):
    manager = new(1)
    store_ready(manager, K[:1], A)
    first, second = ReqContext("first"), ReqContext("second")
    spec = manager.prepare_load(K[:1], first)
    manager.complete_load(K[:1], first)
    manager.prepare_load(K[:1], second)
    manager.complete_load(K[:1], first, False, spec)
    assert manager.residency(K[0]) is Residency.READY
    assert gauges(manager)["pinned"] == 1
    assert late(manager) == 1


def test_a_load_of_an_earlier_use_of_the_slot_is_counted_and_ignored(new):
    manager = new(1)
    store_ready(manager, K[:1], A)
    first, second = ReqContext("first"), ReqContext("second")
    old = manager.prepare_load(K[:1], first)
    manager.complete_load(K[:1], first, False, old)
    store_ready(manager, K[:1], A)
    manager.prepare_load(K[:1], second)
    manager.complete_load(K[:1], first, False, old)
    assert manager.residency(K[0]) is Residency.READY
    assert gauges(manager)["pinned"] == 1
    assert late(manager) == 1


# -- reset


def test_everything_is_absent_at_once(new):
    manager = new()
    store_ready(manager, K[:2], A)
    manager.prepare_store(K[2:3], A)
    manager.prepare_load(K[:1], ReqContext("reader"))
    manager.reset_cache()
    assert all(manager.residency(key) is Residency.ABSENT for key in K)
    assert len(manager.policy) == 0
    assert gauges(manager) == {"ready": 0, "in flight": 0, "pinned": 0, "condemned": 2}
    manager.check_invariants()


def test_idle_manager_allocates_as_if_new(new):
    for keys in (K[:4], K[:7], K[:2], [K[2], K[0], K[1]]):
        manager = new()
        for key in keys:
            store_ready(manager, [key], A)
        manager.complete_load(keys[-1:], A, True, manager.prepare_load(keys[-1:], A))
        manager.reset_cache()
        assert slots(manager.prepare_store(K[8:12], ReqContext("c"))) == [0, 1, 2, 3]


def test_reset_of_an_empty_manager(new):
    manager = new()
    manager.reset_cache()
    assert slots(manager.prepare_store(K[:2], A)) == [0, 1]
    manager.check_invariants()


def test_slots_of_transfers_under_way_are_not_handed_out(new):
    manager = new()
    store_ready(manager, K[:2], A)
    written = manager.prepare_store(K[2:3], A)
    reader = ReqContext("reader")
    read = manager.prepare_load(K[:1], reader)
    manager.reset_cache()
    context = ReqContext("b")
    assert manager.prepare_store(K[4:7], context) is None
    assert sorted(slots(manager.prepare_store(K[4:6], context))) == [1, 3]
    manager.complete_load(K[:1], reader, True, read)
    assert slots(manager.prepare_store(K[6:7], context)) == [0]
    manager.complete_store(K[2:3], A, True, written.store_spec)
    assert slots(manager.prepare_store(K[7:8], context)) == [2]
    assert late(manager) == 0
    manager.check_invariants()


@pytest.mark.parametrize("by_spec", [True, False])
@pytest.mark.parametrize("success", [True, False])
def test_load_under_a_reset_unpins_the_condemned_slot_only(new, by_spec, success):
    manager = new(2)
    store_ready(manager, K[:1], A)
    reader, other = ReqContext("reader"), ReqContext("other")
    spec = manager.prepare_load(K[:1], reader)
    manager.reset_cache()
    store_ready(manager, K[:1], A)
    manager.prepare_load(K[:1], other)
    manager.complete_load(K[:1], reader, success, spec if by_spec else None)
    assert manager.residency(K[0]) is Residency.READY
    assert gauges(manager) == {"ready": 1, "in flight": 0, "pinned": 1, "condemned": 0}


def test_load_of_the_new_block_leaves_the_condemned_slot_to_its_reader(new):
    manager = new(2)
    store_ready(manager, K[:1], A)
    old, young = ReqContext("old"), ReqContext("young")
    manager.prepare_load(K[:1], old)
    manager.reset_cache()
    store_ready(manager, K[:1], A)
    manager.prepare_load(K[:1], young)
    manager.complete_load(K[:1], young)
    assert gauges(manager) == {"ready": 1, "in flight": 0, "pinned": 0, "condemned": 1}


def test_condemned_slot_waits_for_all_its_readers(new):
    manager = new(1)
    store_ready(manager, K[:1], A)
    readers = [ReqContext(name) for name in "abc"]
    for reader in readers:
        manager.prepare_load(K[:1], reader)
    manager.reset_cache()
    for reader in readers:
        assert manager.prepare_store(K[1:2], A) is None
        manager.complete_load(K[:1], reader)
    assert slots(manager.prepare_store(K[1:2], A)) == [0]


def test_store_under_a_reset_stores_nothing(new):
    manager = new()
    granted = manager.prepare_store(K[:2], A)
    manager.reset_cache()
    manager.complete_store(K[:2], A, True, granted.store_spec)
    assert manager.residency(K[0]) is Residency.ABSENT
    assert manager.get_stats().counters.get("stored_blocks", 0) == 0
    assert gauges(manager)["condemned"] == 0


def test_two_resets_under_one_write(new):
    manager = new(1)
    granted = manager.prepare_store(K[:1], A)
    manager.reset_cache()
    manager.reset_cache()
    manager.advance(1000.0)
    assert manager.prepare_store(K[:1], A) is None
    manager.complete_store(K[:1], A, True, granted.store_spec)
    assert slots(manager.prepare_store(K[:1], A)) == [0]
    manager.check_invariants()


def test_reset_forgets_what_was_learned(new):
    manager = new(2)
    store_ready(manager, K[:2], A)
    manager.touch(K[:1], A)
    store_ready(manager, K[2:4], ReqContext("b"))
    manager.reset_cache()
    store_ready(manager, K[:2], ReqContext("c"))
    assert eviction_order(manager.policy) == K[:2]
    manager.touch(K[2:4], ReqContext("d"))
    assert eviction_order(manager.policy) == K[:2]
