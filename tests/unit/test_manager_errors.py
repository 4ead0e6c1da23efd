"""Misuse and bad settings: a typed error that names what is wrong, and nothing has changed."""

import pytest

from kvtier import (
    BlockNotPinnedError,
    BlockNotReadyError,
    ConfigurationError,
    CPUOffloadingManager,
    DuplicateKeyError,
    InvariantError,
    ManagerUsageError,
    ReqContext,
)
from kvtier.testing import ReferenceManager, make_keys, snapshot, store_ready

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


@pytest.fixture
def manager(new):
    """K0, K1 ready; K0 pinned by `A`; K2 in flight."""
    manager = new(enable_events=True)
    store_ready(manager, K[:2], A)
    manager.prepare_load(K[:1], A)
    manager.prepare_store(K[2:3], A)
    list(manager.take_events())
    return manager


@pytest.fixture
def unchanged(manager):
    """After the test the manager is as it was before it."""
    before = snapshot(manager, K, manager.policy)
    yield
    assert snapshot(manager, K, manager.policy) == before
    assert list(manager.take_events()) == []
    manager.check_invariants()
    # the pins too: the one of A ends as it should
    manager.complete_load(K[:1], A)
    assert manager.get_stats().pinned_blocks == 0


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("bad", [K[2], K[9]], ids=["in flight", "absent"])
def test_loading_what_is_not_ready(manager, bad):
    with pytest.raises(BlockNotReadyError, match=bad.hex()) as caught:
        manager.prepare_load([K[0], K[1], bad], ReqContext("b"))
    assert isinstance(caught.value, ManagerUsageError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.usefixtures("unchanged")
def test_loading_a_key_twice(manager):
    with pytest.raises(DuplicateKeyError, match=K[1].hex()):
        manager.prepare_load([K[1], K[1], K[0]], ReqContext("b"))


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("bad", [K[1], K[2], K[9]], ids=["ready", "in flight", "absent"])
@pytest.mark.parametrize("success", [True, False])
def test_unpinning_what_is_not_pinned(manager, bad, success):
    with pytest.raises(BlockNotPinnedError, match=bad.hex()):
        manager.complete_load([K[0], bad], A, success)


@pytest.mark.usefixtures("unchanged")
def test_storing_a_key_twice(manager):
    with pytest.raises(DuplicateKeyError, match=K[5].hex()):
        manager.prepare_store([K[4], K[5], K[5], K[6]], ReqContext("b"))
    with pytest.raises(DuplicateKeyError, match=K[5].hex()):
        manager.prepare_store_prefix([K[5], K[4], K[5], K[6]], ReqContext("b"))


@pytest.mark.usefixtures("unchanged")
def test_storing_a_resident_key_twice(manager):
    with pytest.raises(DuplicateKeyError, match=K[1].hex()):
        manager.prepare_store([K[1], K[1]], ReqContext("b"))


def test_after_an_error_the_request_notes_nothing(manager):
    context = ReqContext("b")
    with pytest.raises(BlockNotReadyError):
        manager.prepare_load([K[0], K[9]], context)
    before = snapshot(manager, K, manager.policy)
    manager.on_request_finished(context)
    assert snapshot(manager, K, manager.policy) == before


def test_reading_twice_and_unpinning_three_times(new):
    manager = new()
    store_ready(manager, K[:1], A)
    for _ in range(2):
        manager.prepare_load(K[:1], A)
    for _ in range(2):
        manager.complete_load(K[:1], A)
    with pytest.raises(BlockNotPinnedError):
        manager.complete_load(K[:1], A)


# -- settings


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_no_blocks(num_blocks):
    with pytest.raises(ConfigurationError, match=str(num_blocks)):
        CPUOffloadingManager(num_blocks)


def test_unknown_policy_says_which_there_are():
    with pytest.raises(ConfigurationError) as caught:
        CPUOffloadingManager(4, "clock-pro")
    message = str(caught.value)
    assert "clock-pro" in message
    assert "lru" in message
    assert "arc" in message


@pytest.mark.parametrize("deadline_s", [-0.5, -1.0])
def test_negative_deadline(deadline_s):
    with pytest.raises(ConfigurationError, match=str(deadline_s)):
        CPUOffloadingManager(4, deadline_s=deadline_s)


def test_deadline_that_is_no_number():
    with pytest.raises(ConfigurationError, match="nan"):
        CPUOffloadingManager(4, deadline_s=float("nan"))


def test_empty_tracker():
    with pytest.raises(ConfigurationError, match="0"):
        CPUOffloadingManager(4, store_threshold=2, max_tracker_size=0)


# -- the check itself


def test_check_finds_a_policy_that_lost_a_block(new):
    manager = new()
    store_ready(manager, K[:2], A)
    manager.check_invariants()
    manager.policy.remove(K[:1])
    with pytest.raises(InvariantError):
        manager.check_invariants()


def test_check_finds_a_policy_with_a_stranger(new):
    manager = new()
    store_ready(manager, K[:2], A)
    manager.policy.insert(K[5:6])
    with pytest.raises(InvariantError):
        manager.check_invariants()
