"""What mirrors of the contents are told, and in which order."""

import pytest

from kvtier import CPULoadStoreSpec, CPUOffloadingManager, OffloadingEvent, ReqContext
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


def taken(manager):
    """Keys of a batch have no order: completions name them in a set."""
    return [(set(event.keys), event.removed) for event in manager.take_events() if event.keys]


def test_off_by_default(new):
    manager = new()
    store_ready(manager, K[:4], A)
    store_ready(manager, K[4:6], ReqContext("b"))
    manager.reset_cache()
    assert list(manager.take_events()) == []


def test_form_of_an_event(new):
    manager = new(enable_events=True)
    store_ready(manager, K[:1], A)
    (event,) = manager.take_events()
    assert event == OffloadingEvent([K[0]], "CPU", False)
    assert type(event.keys) is list
    assert event.medium == CPULoadStoreSpec.medium()


def test_one_batch_a_completed_store(new):
    manager = new(enable_events=True)
    granted = manager.prepare_store(K[:4], A)
    assert taken(manager) == []
    manager.complete_store(K[:3], A, True, granted.store_spec)
    manager.complete_store(K[3:4], A, True, granted.store_spec)
    assert taken(manager) == [(set(K[:3]), False), (set(K[3:4]), False)]
    assert taken(manager) == []


def test_only_what_became_ready_is_told(new):
    manager = new(enable_events=True)
    store_ready(manager, K[:1], A)
    manager.prepare_store(K[1:2], A)
    taken(manager)
    manager.complete_store([*K[:2], K[9]], A)
    assert taken(manager) == [(set(K[1:2]), False)]


def test_a_failed_store_is_not_told(new):
    manager = new(enable_events=True)
    manager.prepare_store(K[:2], A)
    manager.complete_store(K[:2], A, success=False)
    assert taken(manager) == []


def test_evictions_come_before_the_store_that_needed_them(new):
    manager = new(enable_events=True)
    store_ready(manager, K[:4], A)
    store_ready(manager, K[4:6], ReqContext("b"))
    assert taken(manager) == [(set(K[:4]), False), (set(K[:2]), True), (set(K[4:6]), False)]


def test_a_store_that_fails_has_still_evicted(new):
    manager = new(enable_events=True)
    store_ready(manager, K[:4], A)
    taken(manager)
    manager.prepare_store(K[4:5], ReqContext("b"))
    manager.complete_store(K[4:5], ReqContext("b"), success=False)
    assert taken(manager) == [(set(K[:1]), True)]


def test_reset_is_one_batch_of_what_was_ready(new):
    manager = new(enable_events=True)
    store_ready(manager, K[:2], A)
    manager.prepare_load(K[:1], ReqContext("reader"))
    manager.prepare_store(K[2:3], A)
    manager.reset_cache()
    assert taken(manager) == [(set(K[:2]), False), (set(K[:2]), True)]


def test_completions_after_a_reset_are_not_told(new):
    manager = new(enable_events=True)
    granted = manager.prepare_store(K[:2], A)
    manager.reset_cache()
    taken(manager)
    manager.complete_store(K[:2], A, True, granted.store_spec)
    assert taken(manager) == []


def test_a_failed_load_is_one_removed_batch(new):
    manager = new(enable_events=True)
    store_ready(manager, K[:3], A)
    first, second = ReqContext("first"), ReqContext("second")
    manager.prepare_load(K[:3], first)
    manager.prepare_load(K[:1], second)
    taken(manager)
    manager.complete_load(K[:2], first, success=False)
    assert taken(manager) == [(set(K[:2]), True)]
    manager.complete_load(K[:1], second, success=False)
    assert taken(manager) == []


def test_a_reaped_store_is_not_told(new):
    manager = new(enable_events=True, store_timeout_s=64.0)
    manager.prepare_store(K[:2], A)
    manager.advance(200.0)
    assert taken(manager) == []


def test_a_mirror_of_the_events_knows_what_is_ready(new):
    manager = new(enable_events=True)
    mirror = set()
    for i in range(9):
        context = ReqContext(str(i))
        store_ready(manager, K[i : i + 3], context)
        if i % 3 == 0:
            spec = manager.prepare_load([K[i + 1]], context)
            manager.complete_load([K[i + 1]], context, i % 2 == 0, spec)
        for event in manager.take_events():
            mirror = mirror - set(event.keys) if event.removed else mirror | set(event.keys)
        assert mirror == {key for key in K if manager.lookup(key, context)}
