"""Waiting or recomputing: what is cheaper, as far as it is known."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import (
    ConfigurationError,
    CPUOffloadingManager,
    FilterReusedOffloadingManager,
    PrefixLookup,
    ReqContext,
    RequestDriver,
    Residency,
)
from kvtier.manager import PrefillRate
from kvtier.testing import make_keys

K = make_keys(60)
EARLIER = make_keys(64, prefix="earlier")
ARRIVING, ABSENT, READY = Residency.ARRIVING, Residency.ABSENT, Residency.READY


class Stores:
    """A tier that completes `blocks_per_s` blocks a second, one after the other, in the order they were begun."""

    def __init__(self, manager, blocks_per_s, now_s=100.0):
        self.manager = manager
        self.seconds_per_block = 1 / blocks_per_s
        self.now_s = now_s
        self.queue = []
        manager.advance(now_s)

    def begin(self, keys):
        context = ReqContext("writer")
        spec = self.manager.prepare_store(keys, context).store_spec
        self.queue += [(key, context, spec) for key in keys]

    def run(self, num_blocks):
        """Time passes until `num_blocks` more have completed."""
        for _ in range(num_blocks):
            self.now_s += self.seconds_per_block
            self.manager.advance(self.now_s)
            key, context, spec = self.queue.pop(0)
            self.manager.complete_store([key], context, spec=spec)

    def seconds_until(self, keys):
        """The truth: how long it takes from now until all of these are ready."""
        return self.seconds_per_block * max(i for i, (key, _, _) in enumerate(self.queue, 1) if key in keys)


def new(store_blocks_per_s=4.0, recompute_blocks_per_s=None, seen=16, **options):
    """A manager that has seen `seen` blocks complete; and its stores."""
    manager = CPUOffloadingManager(500, **options)
    manager.tell_recompute_rate(recompute_blocks_per_s)
    stores = Stores(manager, store_blocks_per_s)
    if seen:
        stores.begin(EARLIER[:seen])
        stores.run(seen)
    return manager, stores


def declined(manager):
    return manager.get_stats().counters.get("declined_waits", 0)


# -- nothing is known: as ever


@pytest.mark.parametrize(
    "unknown", [{"recompute_blocks_per_s": None}, {"recompute_blocks_per_s": 1e9, "seen": 0}], ids=["engine", "stores"]
)
def test_as_long_as_a_rate_is_unknown_a_request_waits_until_its_deadline(unknown):
    manager, stores = new(0.001, **unknown)
    stores.begin(K[:1])
    context = ReqContext("b")
    now_s = stores.now_s
    assert manager.lookup_prefix(K[:1], context).stopped_by is ARRIVING
    assert manager.worth_waiting(K[:1], context) is True
    manager.advance(now_s + 4.75)
    assert manager.still_waiting(context) is True
    manager.advance(now_s + 5.0)
    assert manager.lookup_prefix(K[:1], context).stopped_by is ABSENT
    assert declined(manager) == 0


def test_a_rate_that_is_not_known_any_more():
    manager, stores = new(1.0, recompute_blocks_per_s=100.0)
    stores.begin(K[:4])
    manager.tell_recompute_rate(None)
    assert manager.lookup_prefix(K[:4], ReqContext("b")).stopped_by is ARRIVING


def test_before_the_time_is_told_everybody_waits():
    manager = CPUOffloadingManager(10)
    manager.tell_recompute_rate(1e9)
    manager.prepare_store(K[:2], ReqContext("a"))
    manager.complete_store(K[:1], ReqContext("a"))
    assert manager.lookup_prefix(K[:2], ReqContext("b")) == PrefixLookup(1, ARRIVING)


@pytest.mark.parametrize("rate", [0, -1.0, float("inf"), float("nan")])
def test_rates_that_are_none(rate):
    with pytest.raises(ConfigurationError, match="recompute_blocks_per_s"):
        CPUOffloadingManager(10).tell_recompute_rate(rate)


# -- both are known


def test_it_waits_where_that_is_quicker():
    manager, stores = new(4.0, recompute_blocks_per_s=2.0)  # 10 blocks: 2.5 s, or 5 s of computing
    stores.begin(K[:10])
    assert manager.lookup_prefix(K[:12], ReqContext("b")) == PrefixLookup(0, ARRIVING)
    assert declined(manager) == 0


def test_it_does_not_wait_where_computing_is_quicker():
    manager, stores = new(4.0, recompute_blocks_per_s=8.0)  # 10 blocks: 2.5 s, or 1.25 s of computing
    stores.begin(K[:10])
    context = ReqContext("b")
    assert manager.lookup_prefix(K[:12], context) == PrefixLookup(0, ABSENT)
    assert manager.still_waiting(context) is False
    assert manager.lookup(K[3], context) is False
    assert declined(manager) == 1
    assert manager.get_stats().counters.get("deferred_requests", 0) == 0


def test_what_has_completed_in_this_very_step_counts():
    manager, stores = new(4.0, recompute_blocks_per_s=8.0, seen=1)
    stores.begin(K[:10])
    assert manager.lookup_prefix(K[:10], ReqContext("b")).stopped_by is ABSENT


def test_what_is_ready_is_used_all_the_same():
    manager, stores = new(4.0, recompute_blocks_per_s=8.0)
    stores.begin(K[:10])
    stores.run(4)
    context = ReqContext("b")
    assert manager.lookup_prefix(K[:12], context) == PrefixLookup(4, ABSENT)
    manager.prepare_load(K[:4], context)


def test_ready_blocks_behind_those_on_their_way_count_as_saved():
    """One block on its way hides thirty that are ready: 0.25 s of waiting saves 3.9 s."""
    manager, stores = new(4.0, recompute_blocks_per_s=8.0)
    stores.begin(K[1:31])
    stores.run(30)
    stores.begin(K[:1])
    assert manager.lookup_prefix(K[:31], ReqContext("b")).stopped_by is ARRIVING
    assert manager.lookup_prefix(K[:1], ReqContext("c")).stopped_by is ABSENT


def test_blocks_behind_a_hole_save_nothing():
    manager, stores = new(4.0, recompute_blocks_per_s=8.0)
    stores.begin(K[2:31])
    stores.run(29)
    stores.begin(K[:1])
    assert manager.lookup_prefix(K[:31], ReqContext("b")).stopped_by is ABSENT  # K[1] is missing


def test_it_waits_behind_the_stores_of_others():
    """Two blocks are worth a second; alone they come in half a second, behind ten others in three."""
    manager, stores = new(4.0, recompute_blocks_per_s=2.0)
    stores.begin(K[:2])
    assert manager.lookup_prefix(K[:2], ReqContext("b")).stopped_by is ARRIVING
    manager, stores = new(4.0, recompute_blocks_per_s=2.0)
    stores.begin(K[20:30])
    stores.begin(K[:2])
    assert manager.lookup_prefix(K[:2], ReqContext("b")).stopped_by is ABSENT


def test_stores_that_were_begun_later_do_not_count():
    manager, stores = new(4.0, recompute_blocks_per_s=2.0)
    stores.begin(K[:2])
    stores.begin(K[20:40])
    assert manager.lookup_prefix(K[:2], ReqContext("b")).stopped_by is ARRIVING


def test_the_others_still_wait():
    manager, stores = new(4.0, recompute_blocks_per_s=3.0)
    stores.begin(K[20:29])
    stores.begin(K[:2])
    assert manager.lookup_prefix(K[:2], ReqContext("short")).stopped_by is ABSENT
    assert manager.lookup_prefix(K[20:29], ReqContext("long")).stopped_by is ARRIVING
    assert manager.residency(K[0]) is ARRIVING


def test_who_has_declined_stays_with_it_until_it_finishes():
    manager, stores = new(4.0, recompute_blocks_per_s=8.0)
    stores.begin(K[:10])
    context = ReqContext("b")
    manager.lookup_prefix(K[:10], context)
    manager.tell_recompute_rate(0.001)
    assert manager.lookup_prefix(K[:10], context).stopped_by is ABSENT
    assert declined(manager) == 1
    manager.on_request_finished(context)
    assert manager.lookup_prefix(K[:10], context).stopped_by is ARRIVING


def test_who_has_declined_may_still_wait_for_a_load():
    manager, stores = new(4.0, recompute_blocks_per_s=8.0)
    stores.begin(K[:10])
    context = ReqContext("b")
    manager.lookup_prefix(K[:10], context)
    assert manager.defer(context) is True
    manager.advance(stores.now_s + 5.0)
    assert manager.defer(context) is False


def test_a_store_that_stalls_is_waited_for_no_longer_than_it_is_worth():
    """Four blocks are expected in a second and worth two: then the request computes, long before its deadline."""
    manager, stores = new(4.0, recompute_blocks_per_s=2.0, deadline_s=60.0)
    stores.begin(K[:4])
    context = ReqContext("b")
    assert manager.lookup_prefix(K[:4], context).stopped_by is ARRIVING
    manager.advance(stores.now_s + 1.75)
    assert manager.still_waiting(context) is True
    manager.advance(stores.now_s + 2.0)
    assert manager.still_waiting(context) is False
    assert manager.lookup_prefix(K[:4], context).stopped_by is ABSENT
    assert declined(manager) == 1


def test_the_deadline_holds_also_where_waiting_is_worth_more():
    manager, stores = new(4.0, recompute_blocks_per_s=0.01, deadline_s=5.0)
    stores.begin(K[:4])
    context = ReqContext("b")
    manager.lookup_prefix(K[:4], context)
    manager.advance(stores.now_s + 5.0)
    assert manager.lookup_prefix(K[:4], context).stopped_by is ABSENT
    counters = manager.get_stats().counters
    assert (counters["expired_requests"], declined(manager)) == (1, 0)


def test_stores_that_have_become_slow_are_noticed():
    manager, fast = new(64.0, recompute_blocks_per_s=4.0, seen=64)
    fast.begin(K[:4])
    assert manager.lookup_prefix(K[:4], ReqContext("b")).stopped_by is ARRIVING
    fast.run(4)
    slow = Stores(manager, 0.5, fast.now_s)
    slow.begin(K[10:50])
    slow.run(38)
    assert manager.lookup_prefix(K[48:50], ReqContext("b")).stopped_by is ABSENT


def test_time_without_stores_does_not_count():
    """An idle hour says nothing about how long a store takes."""
    manager, stores = new(4.0, recompute_blocks_per_s=2.0)
    stores.now_s += 3600.0
    manager.advance(stores.now_s)
    stores.begin(K[:10])
    assert manager.lookup_prefix(K[:10], ReqContext("b")).stopped_by is ARRIVING


def test_a_rate_that_is_told_late_does_not_take_old_stores_for_new_ones():
    manager, stores = new(4.0)
    stores.begin(K[:10])
    manager.tell_recompute_rate(8.0)
    stores.run(4)
    assert manager.lookup_prefix(K[:10], ReqContext("b")) == PrefixLookup(4, ABSENT)


def test_a_rate_that_is_told_again_does_not_take_the_time_between_for_storing():
    manager, stores = new(4.0, recompute_blocks_per_s=2.0)
    manager.tell_recompute_rate(None)
    stores.now_s += 3600.0
    manager.advance(stores.now_s)
    stores.begin(K[:10])
    manager.tell_recompute_rate(2.0)
    stores.run(1)
    assert manager.lookup_prefix(K[:10], ReqContext("b")) == PrefixLookup(1, ARRIVING)


def test_a_key_by_key_engine_asks_when_a_look_up_was_none():
    manager, stores = new(4.0, recompute_blocks_per_s=8.0)
    stores.begin(K[:10])
    context = ReqContext("b")
    assert manager.lookup(K[0], context) is None
    assert manager.worth_waiting(K[:10], context) is False
    assert manager.lookup(K[0], context) is False
    assert manager.still_waiting(context) is False


def test_leading_blocks_that_are_ready_are_not_saved_by_waiting():
    """A key by key engine names them too: they can be loaded either way."""
    manager, stores = new(4.0, recompute_blocks_per_s=8.0)
    stores.begin(K[:31])
    stores.run(30)
    assert manager.worth_waiting(K[:31], ReqContext("b")) is False


def test_behind_a_reuse_filter():
    manager, stores = new(4.0)
    stores.begin(K[:10])
    stores.run(2)
    filtered = FilterReusedOffloadingManager(manager)
    filtered.tell_recompute_rate(8.0)
    stores.run(4)
    context = ReqContext("b")
    assert filtered.worth_waiting(K[6:10], context) is False
    assert filtered.lookup_prefix(K[:10], context) == PrefixLookup(6, ABSENT)


def test_in_the_driver():
    manager, stores = new(4.0, recompute_blocks_per_s=8.0)
    driver = RequestDriver(manager)
    stores.begin(K[:10])
    stores.run(4)
    driver.add_request("b", K[:12])
    assert driver.match("b") == 4
    manager.tell_recompute_rate(0.5)
    driver.add_request("c", K[:12])
    assert driver.match("c") is None


@settings(deadline=None)
@given(
    queue=st.permutations(range(12)),
    num_done=st.integers(0, 12),
    wanted=st.integers(1, 12),
    store_rate=st.sampled_from([0.5, 1.0, 2.0, 4.0, 8.0]),
    recompute_rate=st.sampled_from([0.5, 1.0, 2.0, 4.0, 8.0]),
)
def test_it_decides_as_one_who_sees_the_future_would(queue, num_done, wanted, store_rate, recompute_rate):
    """With a steady rate: waits exactly if the blocks come at least as soon as computing would have them.

    The rate knows nothing yet of a block that has just come, which makes it a little lower than it is.
    """
    manager, stores = new(store_rate, recompute_rate, seen=64)
    for i in queue:
        stores.begin([K[i]])
    stores.run(num_done)
    ready = {K[i] for i in queue[:num_done]}
    prompt = K[:wanted]
    first = next((i for i, key in enumerate(prompt) if key not in ready), wanted)
    found = manager.lookup_prefix(prompt, ReqContext("b"))
    assert found.num_ready == first
    if first == wanted:
        assert found.stopped_by is READY
        return
    waiting_s = stores.seconds_until([key for key in prompt if key not in ready])
    computing_s = (wanted - first) / recompute_rate
    if not computing_s / 1.25 < waiting_s <= computing_s + 1e-6:
        assert found.stopped_by is (ARRIVING if waiting_s < computing_s else ABSENT)


# -- the engine's own rate


def test_the_engines_rate_is_unknown_at_first():
    rate = PrefillRate()
    assert rate.tokens_per_s is None
    assert rate.note_step(0.0, 2048, {"a"}) is False
    assert rate.tokens_per_s is None


def test_a_long_prompt_in_several_steps():
    rate = PrefillRate()
    for step in range(5):
        rate.note_step(0.5 * step, 2048, {"a"})
    assert rate.tokens_per_s == pytest.approx(4096)


def test_generation_says_nothing():
    rate = PrefillRate()
    requests = {f"request {i}" for i in range(200)}
    for step in range(50):
        assert rate.note_step(0.05 * step, 200, requests) is False
    assert rate.tokens_per_s is None


def test_a_pause_between_requests_says_nothing():
    rate = PrefillRate()
    rate.note_step(0.0, 2048, {"a"})
    assert rate.note_step(60.0, 2048, {"b"}) is False
    rate.note_step(60.5, 1, {"b"})
    assert rate.tokens_per_s == pytest.approx(4096)


def test_a_clock_that_stands_still_says_nothing():
    rate = PrefillRate()
    for _ in range(5):
        assert rate.note_step(7.0, 2048, {"a"}) is False
    assert rate.tokens_per_s is None


def test_a_rate_that_changes_is_followed():
    rate = PrefillRate()
    for step in range(200):
        rate.note_step(1.0 * step, 1000, {"a"})
    for step in range(600):
        rate.note_step(200 + 0.25 * step, 1000, {"a"})
    assert rate.tokens_per_s == pytest.approx(4000, rel=0.02)
