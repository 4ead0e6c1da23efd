"""Looking up: ready, absent, on its way; and how long a request waits."""

import pytest

from kvtier import CPUOffloadingManager, PrefixLookup, ReqContext, Residency
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


def test_tri_state(new):
    manager = new()
    context = ReqContext("a")
    assert manager.lookup(K[0], context) is False
    manager.prepare_store(K[:1], context)
    assert manager.lookup(K[0], context) is None
    manager.complete_store(K[:1], context)
    assert manager.lookup(K[0], context) is True


def test_residency_says_the_same_to_everyone(new):
    manager = new()
    assert manager.residency(K[0]) is Residency.ABSENT
    manager.prepare_store(K[:1], ReqContext("a"))
    assert manager.residency(K[0]) is Residency.ARRIVING
    manager.complete_store(K[:1], ReqContext("a"))
    assert manager.residency(K[0]) is Residency.READY


def test_residency_and_still_waiting_start_no_deadline(new):
    manager = new(deadline_s=5.0)
    manager.prepare_store(K[:1], ReqContext("a"))
    context = ReqContext("b")
    manager.residency(K[0])
    manager.still_waiting(context)
    manager.advance(110.0)
    assert manager.lookup(K[0], context) is None


def test_lookup_changes_nothing_that_is_stored(new):
    manager = new()
    store_ready(manager, K[:2], ReqContext("a"))
    manager.prepare_store(K[2:3], ReqContext("a"))
    before = snapshot(manager, K, manager.policy)
    for key in K:
        manager.lookup(key, ReqContext("b"))
    manager.lookup_prefix(K, ReqContext("c"))
    assert snapshot(manager, K, manager.policy) == before


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (K[:2], PrefixLookup(2, Residency.READY)),
        (K[:4], PrefixLookup(2, Residency.ARRIVING)),
        (K[1:4], PrefixLookup(1, Residency.ARRIVING)),
        ([K[1], K[7], K[0]], PrefixLookup(1, Residency.ABSENT)),
        ([K[7]], PrefixLookup(0, Residency.ABSENT)),
        ([], PrefixLookup(0, Residency.READY)),
    ],
)
def test_prefix(new, keys, expected):
    manager = new()
    store_ready(manager, K[:2], ReqContext("a"))
    manager.prepare_store(K[2:3], ReqContext("a"))
    assert manager.lookup_prefix(keys, ReqContext("b")) == expected


# -- the deadline


def test_past_its_deadline_a_request_takes_what_is_not_ready_for_absent(new):
    manager = new(deadline_s=5.0)
    store_ready(manager, K[:1], ReqContext("a"))
    manager.prepare_store(K[1:3], ReqContext("a"))
    context = ReqContext("b")
    assert manager.lookup(K[1], context) is None
    manager.advance(104.75)
    assert manager.lookup(K[1], context) is None
    manager.advance(105.0)
    assert manager.lookup(K[1], context) is False
    assert manager.lookup(K[2], context) is False
    assert manager.lookup(K[0], context) is True
    assert manager.lookup_prefix(K[:3], context) == PrefixLookup(1, Residency.ABSENT)


def test_the_block_stays_for_others(new):
    manager = new(deadline_s=5.0)
    manager.prepare_store(K[:1], ReqContext("a"))
    late, fresh = ReqContext("late"), ReqContext("fresh")
    manager.lookup(K[0], late)
    manager.advance(110.0)
    assert manager.lookup(K[0], late) is False
    assert manager.residency(K[0]) is Residency.ARRIVING
    assert manager.lookup(K[0], fresh) is None
    manager.complete_store(K[:1], ReqContext("a"))
    assert manager.lookup(K[0], late) is True


def test_one_deadline_for_all_blocks_of_a_request(new):
    manager = new(deadline_s=5.0)
    manager.prepare_store(K[:2], ReqContext("a"))
    context = ReqContext("b")
    manager.lookup(K[0], context)
    manager.advance(103.0)
    manager.complete_store(K[:1], ReqContext("a"))
    assert manager.lookup(K[1], context) is None
    manager.advance(105.0)
    assert manager.lookup(K[1], context) is False


def test_a_passed_deadline_stays_passed_until_the_request_finishes(new):
    manager = new(deadline_s=5.0)
    manager.prepare_store(K[:1], ReqContext("a"))
    context = ReqContext("b")
    manager.lookup(K[0], context)
    manager.advance(105.0)
    manager.prepare_store(K[1:2], context)
    assert manager.lookup(K[0], context) is False
    manager.complete_store(K[:1], ReqContext("a"))
    manager.prepare_load(K[:1], context)
    assert manager.lookup(K[1], context) is False
    manager.on_request_finished(context)
    assert manager.lookup(K[1], context) is None


def test_prefix_lookup_starts_the_deadline(new):
    manager = new(deadline_s=5.0)
    manager.prepare_store(K[:1], ReqContext("a"))
    context = ReqContext("b")
    assert manager.lookup_prefix(K, context).stopped_by is Residency.ARRIVING
    manager.advance(105.0)
    assert manager.lookup_prefix(K, context).stopped_by is Residency.ABSENT


def test_a_look_up_that_is_answered_starts_no_deadline(new):
    manager = new(deadline_s=5.0)
    store_ready(manager, K[:1], ReqContext("a"))
    context = ReqContext("b")
    manager.lookup_prefix(K[:2], context)
    manager.advance(110.0)
    manager.prepare_store(K[1:2], ReqContext("a"))
    assert manager.lookup(K[1], context) is None


def test_deadline_zero_never_waits(new):
    manager = new(deadline_s=0.0)
    manager.prepare_store(K[:1], ReqContext("a"))
    context = ReqContext("b")
    assert manager.lookup(K[0], context) is False
    assert manager.lookup_prefix(K[:1], context) == PrefixLookup(0, Residency.ABSENT)
    assert manager.still_waiting(context) is False
    assert manager.defer(context) is False
    assert manager.residency(K[0]) is Residency.ARRIVING


def test_defer_starts_the_same_deadline(new):
    manager = new(deadline_s=5.0)
    manager.prepare_store(K[:1], ReqContext("a"))
    context = ReqContext("b")
    assert manager.defer(context) is True
    manager.advance(104.75)
    assert manager.defer(context) is True
    assert manager.lookup(K[0], context) is None
    manager.advance(105.0)
    assert manager.defer(context) is False
    assert manager.lookup(K[0], context) is False


def test_without_advance_nothing_expires(new):
    manager = new(deadline_s=0.25)
    manager.prepare_store(K[:1], ReqContext("a"))
    context = ReqContext("b")
    assert all(manager.lookup(K[0], context) is None for _ in range(1000))


def test_an_earlier_time_is_ignored(new):
    manager = new(deadline_s=5.0)
    manager.prepare_store(K[:1], ReqContext("a"))
    manager.advance(50.0)
    context = ReqContext("b")
    assert manager.lookup(K[0], context) is None
    manager.advance(104.0)
    assert manager.lookup(K[0], context) is None
    manager.advance(105.0)
    manager.advance(101.0)
    assert manager.lookup(K[0], context) is False


def test_a_late_request_stores_around_what_is_in_flight(new):
    manager = new(deadline_s=5.0)
    manager.prepare_store(K[:2], ReqContext("a"))
    late = ReqContext("late")
    manager.lookup(K[0], late)
    manager.advance(105.0)
    assert manager.lookup(K[0], late) is False
    assert manager.prepare_store(K[:4], late).keys_to_store == K[2:4]
    manager.complete_store(K[:2], ReqContext("a"), success=False)
    assert manager.prepare_store(K[:4], ReqContext("next")).keys_to_store == K[:2]


# -- still_waiting


def test_waits_until_its_block_is_ready(new):
    manager = new()
    manager.prepare_store(K[:2], ReqContext("a"))
    context = ReqContext("b")
    assert manager.still_waiting(context) is False
    manager.lookup(K[0], context)
    assert manager.still_waiting(context) is True
    manager.complete_store(K[1:2], ReqContext("a"))
    assert manager.still_waiting(context) is True
    manager.complete_store(K[:1], ReqContext("a"))
    assert manager.still_waiting(context) is False


def test_waits_until_its_block_has_failed(new):
    manager = new()
    manager.prepare_store(K[:1], ReqContext("a"))
    context = ReqContext("b")
    manager.lookup(K[0], context)
    manager.complete_store(K[:1], ReqContext("a"), success=False)
    assert manager.still_waiting(context) is False


def test_waits_until_its_deadline(new):
    manager = new(deadline_s=5.0)
    manager.prepare_store(K[:1], ReqContext("a"))
    context = ReqContext("b")
    manager.lookup_prefix(K[:1], context)
    manager.advance(104.75)
    assert manager.still_waiting(context) is True
    manager.advance(105.0)
    assert manager.still_waiting(context) is False


def test_waits_for_the_first_stuck_block(new):
    manager = new()
    manager.prepare_store(K[:2], ReqContext("a"))
    context = ReqContext("b")
    manager.lookup(K[0], context)
    manager.lookup(K[1], context)
    manager.complete_store(K[1:2], ReqContext("a"))
    assert manager.still_waiting(context) is True
    manager.complete_store(K[:1], ReqContext("a"))
    assert manager.still_waiting(context) is False


def test_waits_for_the_next_block_once_the_first_has_come(new):
    manager = new()
    manager.prepare_store(K[:2], ReqContext("a"))
    context = ReqContext("b")
    manager.lookup_prefix(K[:2], context)
    manager.complete_store(K[:1], ReqContext("a"))
    assert manager.lookup_prefix(K[:2], context) == PrefixLookup(1, Residency.ARRIVING)
    assert manager.still_waiting(context) is True


def test_no_longer_waits_after_a_reset(new):
    manager = new()
    manager.prepare_store(K[:1], ReqContext("a"))
    context = ReqContext("b")
    manager.lookup(K[0], context)
    manager.reset_cache()
    assert manager.still_waiting(context) is False


def test_a_finished_request_waits_for_nothing(new):
    manager = new()
    manager.prepare_store(K[:1], ReqContext("a"))
    context = ReqContext("b")
    manager.lookup(K[0], context)
    manager.on_request_finished(context)
    assert manager.still_waiting(context) is False


# -- contexts


def test_an_introduced_context_and_a_stranger_get_the_same_answers(new):
    manager = new()
    manager.prepare_store(K[:1], ReqContext("a"))
    introduced = ReqContext("b", {"some": "thing"})
    manager.on_new_request(introduced)
    assert manager.lookup(K[0], introduced) is manager.lookup(K[0], ReqContext("c")) is None
    manager.on_request_finished(introduced)
    manager.on_request_finished(ReqContext("never seen"))
    assert introduced.kv_transfer_params == {"some": "thing"}


def test_one_context_with_two_managers(new):
    impatient, patient = new(deadline_s=1.0), new(deadline_s=50.0)
    context = ReqContext("a")
    for manager in (impatient, patient):
        manager.prepare_store(K[:1], ReqContext("writer"))
        assert manager.lookup(K[0], context) is None
        manager.advance(102.0)
    assert impatient.lookup(K[0], context) is False
    assert patient.lookup(K[0], context) is None
    impatient.on_request_finished(context)
    assert patient.still_waiting(context) is True


def test_two_requests_of_one_name_are_two_requests(new):
    manager = new(deadline_s=5.0)
    manager.prepare_store(K[:1], ReqContext("a"))
    first = ReqContext("same")
    manager.lookup(K[0], first)
    manager.advance(105.0)
    assert manager.lookup(K[0], first) is False
    assert manager.lookup(K[0], ReqContext("same")) is None


def test_nothing_is_pending_for_the_engine(new):
    manager = new()
    manager.prepare_store(K[:1], ReqContext("a"))
    manager.on_schedule_end()
    assert manager.has_pending_work() is False
    manager.shutdown()
