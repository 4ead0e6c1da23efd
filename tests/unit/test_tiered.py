"""The tiered manager over memory tiers, through the request-level driver, with bytes that tell what they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvtier import (
    ConfigurationError,
    CPUOffloadingManager,
    KVTierError,
    RequestDriver,
    Residency,
    TieredOffloadingManager,
    TieringLimits,
    make_offload_key,
)
from kvtier.keys import OffloadKey
from kvtier.manager.pace import PROBE_EVERY_S
from kvtier.tier_interfaces import TierOutcome
from kvtier.tiers.memory import MemoryEpochStore, MemoryTier

SLOT_BYTES = 128


def keys_of(name: str, count: int) -> list[OffloadKey]:
    return [make_offload_key(f"{name}-{i}".encode().ljust(32, b"."), 0) for i in range(count)]


class Engine:
    """Steps of an engine over a tiered manager; engine blocks and slots hold the bytes of their keys."""

    def __init__(
        self, ram_blocks: int, tiers: Sequence[MemoryTier], deadline_s: float = 5.0, **options: object
    ) -> None:
        self.pool = np.zeros((ram_blocks, SLOT_BYTES), np.uint8)
        for tier in tiers:
            tier.attach(self.pool)
        ram = CPUOffloadingManager(ram_blocks, enable_events=True, deadline_s=deadline_s)
        self.manager = TieredOffloadingManager(ram, tiers, enable_events=True, **options)  # type: ignore[arg-type]
        self.driver = RequestDriver(self.manager)
        self.now_s = 100.0
        self.driver.advance(self.now_s)

    def step(self, seconds: float = 0.01) -> None:
        """The scheduler's step ends, and the next one begins."""
        self.manager.on_schedule_end()
        self.now_s += seconds
        self.driver.advance(self.now_s)
        self.manager.check_invariants()

    def settle(self, steps: int = 50) -> None:
        for _ in range(steps):
            self.step()

    def compute(self, name: str, keys: list[OffloadKey], succeeds: bool = True) -> None:
        """A request that computes and stores all of its prompt."""
        self.driver.add_request(name, keys)
        plan = self.driver.plan_store(name, len(keys))
        if plan is not None:
            for key, slot in zip(plan.spec.keys, plan.spec.slots, strict=True):
                self.pool[slot] = np.frombuffer(key.ljust(SLOT_BYTES, b"#"), np.uint8)
            self.driver.report(plan.job_id, failed=not succeeds)
        self.driver.finish(name)

    def load(self, name: str, count: int) -> None:
        plan = self.driver.plan_load(name, 0, count)
        for key, slot in zip(plan.spec.keys, plan.spec.slots, strict=True):
            assert self.pool[slot].tobytes() == key.ljust(SLOT_BYTES, b"#")
        self.driver.report(plan.job_id)

    def match_in_time(self, name: str, steps: int = 200) -> int:
        """Asks step by step until there is an answer."""
        for _ in range(steps):
            found = self.driver.match(name)
            if found is not None:
                return found
            self.step()
        raise AssertionError("no answer")


def engine_with_prompts_below(
    tier: MemoryTier, ram_blocks: int, num_prompts: int, length: int
) -> tuple[Engine, list[list[OffloadKey]]]:
    """Prompts of `length` blocks that the tier has and RAM has lost. Promotions may take all of RAM."""
    engine = Engine(ram_blocks, [tier], limits=TieringLimits(request_share=1.0, promoting_share=1.0))
    prompts = [keys_of(f"p{i}", length) for i in range(num_prompts)]
    for i, keys in enumerate(prompts):
        engine.compute(f"store-{i}", keys)
        engine.settle(10)
    engine.compute("fill", keys_of("fill", ram_blocks))
    engine.settle(20)
    return engine, prompts


def test_what_left_ram_comes_back_from_below() -> None:
    tier = MemoryTier(100, blocks_per_poll=3)
    engine = Engine(8, [tier])
    first, second = keys_of("first", 6), keys_of("second", 8)
    engine.compute("a", first)
    engine.settle()
    engine.compute("b", second)
    engine.settle()
    assert [engine.manager.ram.residency(key) for key in first] == [Residency.ABSENT] * 6
    assert all(engine.manager.residency(key) is Residency.ARRIVING for key in first)
    engine.driver.add_request("c", first)
    assert engine.driver.match("c") is None
    # the request's share of RAM bounds what is brought up for it
    assert engine.match_in_time("c") == 4
    engine.load("c", 4)
    engine.driver.finish("c")
    engine.settle()
    stats = engine.manager.get_stats()
    assert (stats.pinned_blocks, stats.in_flight_blocks, stats.condemned_blocks) == (0, 0, 0)
    assert stats.counters["promoted_blocks"] == 4


def test_two_requests_bring_a_block_up_once() -> None:
    tier = MemoryTier(100, blocks_per_poll=1)
    engine = Engine(16, [tier], limits=TieringLimits(request_share=1.0, promoting_share=1.0))
    keys = keys_of("shared", 6)
    engine.compute("a", keys)
    engine.settle()
    engine.compute("b", keys_of("other", 16))
    engine.settle()
    for name in ("c", "d"):
        engine.driver.add_request(name, keys)
        assert engine.driver.match(name) is None
    assert engine.match_in_time("c") == 6
    assert engine.match_in_time("d") == 6
    assert engine.manager.get_stats().counters["promoted_blocks"] == 6
    assert tier.get_stats().counters["loaded_blocks"] == 6


def test_asking_again_while_a_promotion_waits_or_runs_looks_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = MemoryTier(100, blocks_per_poll=0)
    engine = Engine(8, [tier])
    keys = keys_of("first", 4)
    engine.compute("a", keys)
    tier.blocks_per_poll = None
    engine.settle()
    engine.compute("b", keys_of("second", 8))
    engine.settle()
    tier.blocks_per_poll = 0
    engine.driver.add_request("c", keys)
    assert engine.driver.match("c") is None
    monkeypatch.setattr(tier, "lookup", None)
    assert engine.driver.match("c") is None, "the wish has not been planned yet"
    monkeypatch.undo()
    engine.step()
    monkeypatch.setattr(tier, "lookup", None)
    assert engine.driver.match("c") is None, "it is on its way"


def test_a_tier_that_stalls_holds_a_request_until_its_deadline_only() -> None:
    tier = MemoryTier(100)
    engine = Engine(8, [tier], deadline_s=2.0)
    keys = keys_of("first", 4)
    engine.compute("a", keys)
    engine.settle()
    engine.compute("b", keys_of("second", 8))
    engine.settle()
    tier.blocks_per_poll = 0
    engine.driver.add_request("c", keys)
    begun_s = engine.now_s
    while engine.driver.match("c") is None:
        engine.step(0.25)
    assert engine.driver.match("c") == 0
    assert engine.now_s - begun_s <= 2.0 + 0.25
    assert engine.manager.get_stats().in_flight_blocks == 0, "what had not begun was given up"
    plan = engine.driver.plan_store("c", 4)
    assert plan is not None
    assert plan.blocks == [0, 1, 2, 3]


def test_what_is_on_its_way_up_leaves_room_for_the_stores_of_running_requests() -> None:
    tier = MemoryTier(1000)
    engine = Engine(8, [tier], limits=TieringLimits(request_share=1.0))
    prompts = [keys_of(f"p{i}", 4) for i in range(4)]
    for i, keys in enumerate(prompts):
        engine.compute(f"store-{i}", keys)
        engine.settle(5)
    engine.compute("fill", keys_of("fill", 8))
    engine.settle(5)
    tier.blocks_per_poll = 0
    for i in range(3):
        engine.driver.add_request(f"r{i}", prompts[i])
        assert engine.driver.match(f"r{i}") is None
    engine.settle(5)
    assert engine.manager.get_stats().in_flight_blocks == 4
    running = keys_of("running", 4)
    engine.compute("running", running)
    assert [engine.manager.ram.residency(key) for key in running] == [Residency.READY] * 4


def test_a_block_that_cannot_be_read_is_recomputed() -> None:
    tier = MemoryTier(100)
    engine = Engine(8, [tier])
    keys = keys_of("first", 4)
    engine.compute("a", keys)
    engine.settle()
    engine.compute("b", keys_of("second", 8))
    engine.settle()
    engine.driver.add_request("c", keys)
    tier.blocks_per_poll = 0
    assert engine.driver.match("c") is None
    engine.step()
    tier.drop(keys[1:2])  # lost while it is being read
    tier.blocks_per_poll = None
    assert engine.match_in_time("c") == 1
    assert engine.manager.residency(keys[1]) is Residency.ABSENT
    assert engine.manager.get_stats().condemned_blocks == 0


def test_failing_loads_shut_a_tier_off_and_it_is_tried_again() -> None:
    tier = MemoryTier(1000)
    engine = Engine(8, [tier], limits=TieringLimits(request_share=1.0))
    prompts = [keys_of(f"p{i}", 2) for i in range(12)]
    for i, keys in enumerate(prompts):
        engine.compute(f"store-{i}", keys)
        engine.settle(5)
    engine.compute("fill", keys_of("fill", 8))
    engine.settle(5)
    submit_load = tier.submit_load

    def broken(job_id: int, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        submit_load(job_id, [key[::-1] for key in keys], slots)  # of blocks that are not there

    tier.submit_load = broken  # type: ignore[method-assign]
    for i in range(6):
        engine.driver.add_request(f"r{i}", prompts[i])
        assert engine.match_in_time(f"r{i}") == 0
        engine.driver.finish(f"r{i}")
    assert engine.manager.residency(prompts[7][0]) is Residency.ABSENT, "shut off"
    tier.submit_load = submit_load  # type: ignore[method-assign]
    engine.step(1.5)
    engine.driver.add_request("again", prompts[7])
    assert engine.match_in_time("again") == 2


def test_slow_tiers_are_not_waited_for() -> None:
    tier = MemoryTier(1000)
    engine, prompts = engine_with_prompts_below(tier, 32, 5, 8)
    tier.blocks_per_poll = 1
    engine.driver.add_request("measure", prompts[0])
    assert engine.match_in_time("measure") == 8  # one block a step of 10 ms: 100 a second
    engine.manager.tell_recompute_rate(1000.0)
    engine.driver.add_request("impatient", prompts[1])
    assert engine.driver.match("impatient") == 0, "computing 8 blocks takes 8 ms, bringing them up 80"
    engine.manager.tell_recompute_rate(50.0)
    engine.driver.add_request("patient", prompts[2])
    assert engine.match_in_time("patient") == 8


def test_a_tier_that_was_slow_is_tried_again_and_nobody_waits_for_it() -> None:
    tier = MemoryTier(1000)
    engine, prompts = engine_with_prompts_below(tier, 32, 8, 8)
    tier.blocks_per_poll = 1
    engine.driver.add_request("measure", prompts[0])
    engine.match_in_time("measure")
    engine.manager.tell_recompute_rate(1000.0)
    tier.blocks_per_poll = None
    for i in (1, 2):
        engine.driver.add_request(f"soon-{i}", prompts[i])
        assert engine.driver.match(f"soon-{i}") == 0, "known to be slow"
        engine.step()
    assert tier.get_stats().counters["loaded_blocks"] == 8
    engine.step(PROBE_EVERY_S)
    engine.driver.add_request("later", prompts[3])
    assert engine.driver.match("later") == 0, "a probe is for nobody"
    engine.step(0.0001)
    assert tier.get_stats().counters["loaded_blocks"] > 8
    engine.step(0.0001)
    engine.driver.add_request("at last", prompts[4])
    assert engine.match_in_time("at last") == 8


def test_a_tier_that_stalls_is_waited_for_no_longer_than_recomputing_takes() -> None:
    """However many requests come meanwhile, and although nothing was ever measured of the tier."""
    tier = MemoryTier(1000)
    engine, prompts = engine_with_prompts_below(tier, 32, 8, 8)
    engine.manager.tell_recompute_rate(100.0)
    tier.blocks_per_poll = 0
    began_s = engine.now_s
    names = [f"r{i}" for i in range(4)]
    for i, name in enumerate(names):
        engine.driver.add_request(name, prompts[i])
        assert engine.driver.match(name) is None
        engine.step(0.001)
    for name in names:
        assert engine.match_in_time(name) == 0
    assert engine.now_s - began_s < 0.25, "16 blocks on their way take .16 s to compute"
    engine.driver.add_request("next", prompts[5])
    assert engine.driver.match("next") == 0
    engine.driver.add_request("same", prompts[0])
    assert engine.driver.match("same") == 0, "what is on its way comes too slowly for others as well"


def test_a_request_waits_no_longer_than_what_is_brought_up_for_it_would_take_to_compute() -> None:
    """However much is on its way for others: for all of it together the tier is not late yet."""
    tier = MemoryTier(1000)
    engine, prompts = engine_with_prompts_below(tier, 64, 3, 16)
    engine.manager.tell_recompute_rate(100.0)
    engine.driver.add_request("measure", prompts[0])
    assert engine.match_in_time("measure") == 16
    tier.blocks_per_poll = 0
    for name, keys in (("long", prompts[1]), ("short", prompts[2][:4])):
        engine.driver.add_request(name, keys)
        assert engine.driver.match(name) is None
        engine.step(0.001)
    assert engine.manager.num_promoting == 20
    begun_s = engine.now_s
    while engine.driver.match("short") is None:
        engine.step(0.005)
    assert engine.now_s - begun_s < 0.06, "four blocks take .04 s to compute"
    assert engine.driver.match("long") is None


def test_a_slow_tier_sheds_and_pins_no_ram_while_it_waits() -> None:
    tier = MemoryTier(1000, blocks_per_poll=0, max_storing_blocks=2)
    engine = Engine(16, [tier])
    engine.compute("a", keys_of("a", 16))
    engine.settle(10)
    assert engine.manager.get_stats().pinned_blocks == 2
    engine.compute("b", keys_of("b", 14))
    assert sum(engine.manager.ram.residency(key) is Residency.READY for key in keys_of("b", 14)) == 14
    tier.blocks_per_poll = None
    engine.settle(100)
    assert engine.manager.get_stats().counters["cascade_shed_blocks"] > 0
    assert engine.manager.num_to_flush == 0
    assert all(found is Residency.READY for found in tier.lookup(keys_of("b", 14)))


def test_only_reused_blocks_go_down_if_so_told() -> None:
    tier = MemoryTier(100)
    engine = Engine(16, [tier], cascade_when="reused")
    keys = keys_of("a", 4)
    engine.compute("a", keys)
    engine.settle()
    assert tier.get_stats().ready_blocks == 0
    engine.driver.add_request("b", keys)
    assert engine.driver.match("b") == 4
    engine.load("b", 3)
    engine.settle()
    assert tier.lookup(keys) == [Residency.READY] * 3 + [Residency.ABSENT]


def test_flushing_sends_all_of_ram_down() -> None:
    tier = MemoryTier(100)
    engine = Engine(16, [tier], cascade_when="reused")
    keys = keys_of("a", 10)
    engine.compute("a", keys)
    assert engine.manager.flush_down() == 10
    engine.settle(20)
    assert engine.manager.num_to_flush == 0
    assert tier.lookup(keys) == [Residency.READY] * 10


class Epochs:
    def __init__(self) -> None:
        self.epoch = 1
        self.fails = False

    def current(self) -> int:
        return self.epoch

    def advance(self) -> int:
        if self.fails:
            raise KVTierError("no room")
        self.epoch += 1
        return self.epoch


@pytest.mark.parametrize("fails", [False, True])
def test_a_reset_leaves_nothing_in_any_tier(fails: bool) -> None:
    tiers = [MemoryTier(100, blocks_per_poll=2), MemoryTier(100)]
    epochs = Epochs()
    engine = Engine(16, tiers, epochs=[epochs, epochs])
    keys = keys_of("a", 12)
    engine.compute("a", keys)
    engine.settle(4)
    epochs.fails = fails
    engine.manager.reset_cache()
    assert all(engine.manager.residency(key) is Residency.ABSENT for key in keys)
    engine.settle()
    assert all(engine.manager.residency(key) is Residency.ABSENT for key in keys)
    stats = engine.manager.get_stats()
    assert (stats.ready_blocks, stats.pinned_blocks, stats.condemned_blocks) == (0, 0, 0)
    engine.compute("b", keys)
    engine.settle()
    below = tiers[1].lookup(keys)
    assert below == [Residency.ABSENT if fails else Residency.READY] * 12
    assert all(bool(stats.closed_reason) is fails for stats in engine.manager.tier_stats())


def test_events_tell_of_every_tier() -> None:
    tier = MemoryTier(4)
    engine = Engine(16, [tier])
    keys = keys_of("a", 4)
    engine.compute("a", keys)
    engine.settle()
    engine.compute("b", keys_of("b", 4))
    engine.settle()
    events = list(engine.manager.take_events())
    below = [(event.removed, set(event.keys)) for event in events if event.medium == "MEMORY"]
    held: set[OffloadKey] = set()
    for removed, named in below:
        held = held - named if removed else held | named
    assert held == {key for key in keys + keys_of("b", 4) if tier.lookup((key,)) == [Residency.READY]}
    assert any(removed for removed, _ in below)


def test_each_tier_has_its_moment_and_what_comes_from_afar_goes_to_the_nearer_ones() -> None:
    near, nearer_on_reuse, far = MemoryTier(100), MemoryTier(100), MemoryTier(100)
    engine = Engine(16, [near, nearer_on_reuse, far], cascade_when=["stored", "reused", "stored"])
    keys = keys_of("a", 4)
    engine.compute("a", keys)
    engine.settle()
    assert [tier.get_stats().ready_blocks for tier in (near, nearer_on_reuse, far)] == [4, 0, 4]
    near.drop(keys)
    for name in "bcde":
        engine.compute(name, keys_of(name, 8))
        engine.settle()
    engine.driver.add_request("again", keys)
    while engine.driver.match("again") is None:
        engine.step()
    engine.settle()
    assert near.lookup(keys) == [Residency.READY] * 4
    assert nearer_on_reuse.get_stats().ready_blocks == 0
    engine.load("again", 4)
    engine.settle()
    assert nearer_on_reuse.lookup(keys) == [Residency.READY] * 4


@pytest.mark.parametrize("options", [{"cascade_when": ["stored"]}, {"epochs": [MemoryEpochStore()] * 3}])
def test_not_one_for_each_tier(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=r"has [13] entries; allowed: 2, one for each tier"):
        TieredOffloadingManager(CPUOffloadingManager(4), [MemoryTier(4), MemoryTier(4)], **options)  # type: ignore[arg-type]


def test_an_epoch_that_cannot_be_raised_closes_its_own_tier_alone() -> None:
    tiers = [MemoryTier(100), MemoryTier(100)]
    epochs = [Epochs(), Epochs()]
    epochs[0].fails = True
    engine = Engine(16, tiers, epochs=epochs)
    keys = keys_of("a", 4)
    engine.compute("a", keys)
    engine.settle()
    engine.manager.reset_cache()
    assert [bool(stats.closed_reason) for stats in engine.manager.tier_stats()] == [True, False]
    assert all(engine.manager.residency(key) is Residency.ABSENT for key in keys)
    engine.compute("b", keys)
    engine.settle()
    assert tiers[1].lookup(keys) == [Residency.READY] * 4


def test_a_ram_manager_with_a_filter_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="reuse filter"):
        TieredOffloadingManager(CPUOffloadingManager(4, store_threshold=2), [])


@pytest.mark.parametrize("limits", [{"promoting_share": 0.0}, {"request_share": 1.5}, {"requests_per_step": 0}])
def test_limits_out_of_range_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(limits))):
        TieringLimits(**limits)  # type: ignore[arg-type]


def test_an_unknown_moment_to_cascade_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="cascade_when is 'never'; allowed: stored, reused, evicted"):
        TieredOffloadingManager(CPUOffloadingManager(4), [], cascade_when="never")


def test_an_engine_with_long_steps_does_not_take_a_quick_tier_for_a_slow_one() -> None:
    """16 blocks that took 8 ms are seen after a step of 500 ms, in which 50 could have been computed."""

    class QuickTier(MemoryTier):
        def poll(self) -> list[TierOutcome]:
            return [replace(outcome, duration_s=0.008) for outcome in super().poll()]

    tier = QuickTier(1000)
    engine, prompts = engine_with_prompts_below(tier, 64, 4, 16)
    engine.manager.tell_recompute_rate(100.0)
    for i, keys in enumerate(prompts):
        engine.driver.add_request(f"again-{i}", keys)
        assert engine.driver.match(f"again-{i}") is None
        engine.step(0.5)
        engine.step(0.5)
        assert engine.driver.match(f"again-{i}") == 16
        engine.driver.finish(f"again-{i}")


WIDE = TieringLimits(request_share=1.0, promoting_share=1.0, cascading_share=0.5)


def test_with_evicted_a_block_goes_down_before_it_leaves_ram_and_not_earlier() -> None:
    tier = MemoryTier(100)
    engine = Engine(16, [tier], cascade_when="evicted", limits=WIDE)
    first, second, third = keys_of("first", 8), keys_of("second", 6), keys_of("third", 8)
    engine.compute("a", first)
    engine.settle()
    assert tier.get_stats().ready_blocks == 0, "RAM has room"
    for name, keys in (("b", second), ("c", third)):
        for i in range(0, len(keys), 2):
            engine.compute(f"{name}{i}", keys[: i + 2])
            engine.settle()
    ram, stats = engine.manager.ram, engine.manager.get_stats()
    left = [key for key in (*first, *second, *third) if ram.residency(key) is Residency.ABSENT]
    assert len(left) >= 6
    assert tier.lookup(left) == [Residency.READY] * len(left)
    assert tier.get_stats().ready_blocks == len(left)
    assert stats.counters["cascade_shed_blocks"] == 0
    assert (stats.pinned_blocks, stats.condemned_blocks) == (0, 0)
    assert ram.num_free >= 4
    engine.driver.add_request("again", first)
    count = engine.match_in_time("again")
    assert count == len(first)
    engine.load("again", count)


def test_with_evicted_a_tier_that_refuses_costs_the_block_and_no_slot() -> None:
    tier = MemoryTier(100, max_storing_blocks=0)
    engine = Engine(8, [tier], cascade_when="evicted")
    for i in range(4):
        engine.compute(f"r{i}", keys_of(f"prompt-{i}", 4))
        engine.settle()
    stats = engine.manager.get_stats()
    assert tier.get_stats().ready_blocks == 0
    assert stats.counters["cascade_shed_blocks"] > 0
    assert stats.counters["stored_blocks"] == 16
    assert (stats.pinned_blocks, stats.condemned_blocks) == (0, 0)


def test_with_evicted_what_is_being_written_is_found_by_nobody_and_its_slot_is_not_reused() -> None:
    tier = MemoryTier(100)
    engine = Engine(8, [tier], cascade_when="evicted", limits=TieringLimits(cascading_share=0.5))
    keys = keys_of("first", 8)
    tier.blocks_per_poll = 0
    engine.compute("a", keys)
    engine.step()
    stats = engine.manager.get_stats()
    assert stats.condemned_blocks == 2
    leaving = [key for key in keys if engine.manager.residency(key) is Residency.ABSENT]
    assert len(leaving) == 2
    engine.compute("b", keys_of("second", 8))
    assert engine.manager.get_stats().condemned_blocks == 2
    tier.blocks_per_poll = None
    engine.settle()
    assert tier.lookup(leaving) == [Residency.READY] * 2
    engine.driver.add_request("c", keys)
    count = engine.match_in_time("c")
    if count:
        engine.load("c", count)


# -- tiers that must ask elsewhere -----------------------------------------------------------------------------


class LateTier(MemoryTier):
    """Says UNKNOWN of every key until the second poll after it was first asked."""

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks)
        self.num_polls = 0
        self.asked_at: dict[OffloadKey, int] = {}

    def lookup(self, keys: Sequence[OffloadKey]) -> list[Residency]:
        return [
            found if self.num_polls - self.asked_at.setdefault(key, self.num_polls) >= 2 else Residency.UNKNOWN
            for key, found in zip(keys, super().lookup(keys), strict=True)
        ]

    def poll(self) -> list[TierOutcome]:
        self.num_polls += 1
        return super().poll()


def test_blocks_go_down_to_a_tier_that_does_not_know_yet_whether_it_has_them() -> None:
    tier = LateTier(32)
    engine = Engine(8, [tier])
    keys = keys_of("a", 4)
    engine.compute("writer", keys)
    engine.settle()
    assert MemoryTier.lookup(tier, keys) == [Residency.READY] * 4


def test_a_request_waits_for_an_answer_and_then_for_the_blocks() -> None:
    tier = LateTier(32)
    engine = Engine(8, [tier])
    keys = keys_of("a", 4)
    engine.compute("writer", keys)
    engine.settle()
    engine.compute("other", keys_of("b", 8))  # pushes them out of RAM
    engine.settle()
    tier.asked_at.clear()
    engine.driver.add_request("reader", keys)
    assert engine.driver.match("reader") is None
    assert engine.match_in_time("reader") == 4
    engine.load("reader", 4)
    engine.driver.finish("reader")


def test_stopping_offers_what_a_tier_does_not_know() -> None:
    tier = LateTier(32)
    engine = Engine(8, [tier], cascade_when="reused")
    keys = keys_of("a", 4)
    engine.compute("writer", keys)
    assert engine.manager.flush_down() == 4
    engine.settle()
    assert MemoryTier.lookup(tier, keys) == [Residency.READY] * 4
