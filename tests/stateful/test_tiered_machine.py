"""The tiered manager under everything that engines, workers and tiers do, with bytes that tell what they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import pytest
from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvtier import (
    CPUOffloadingManager,
    ReqContext,
    RequestDriver,
    Residency,
    TieredOffloadingManager,
    TieringLimits,
    make_offload_key,
)
from kvtier.keys import OffloadKey
from kvtier.manager import LoadPlan, StorePlan
from kvtier.policy import POLICIES
from kvtier.testing import FaultyTier, TierFaults
from kvtier.tier_interfaces import TierOutcome
from kvtier.tiers.memory import MemoryTier

RAM_BLOCKS = 8
BYTES = 16
DEADLINE_S = 3.0
MAX_STEP_S = 1.0
FAULTS = TierFaults(refuse=0.1, fail=0.1, fail_some=0.1, stall=0.2, delay=0.2, reorder=0.2, duplicate=0.2)
PROMPTS = [
    [make_offload_key(f"{name}{'' if depth < 2 else branch}-{depth}".encode().ljust(32, b"."), 0) for depth in range(6)]
    for name in "ab"
    for branch in range(3)
]


class Epochs:
    def __init__(self) -> None:
        self.epoch = 0

    def current(self) -> int:
        return self.epoch

    def advance(self) -> int:
        self.epoch += 1
        return self.epoch


class ScribblingTier(MemoryTier):
    """A load that fails leaves anything in its slot."""

    def poll(self) -> list[TierOutcome]:
        outcomes = super().poll()
        for outcome in outcomes:
            if not outcome.is_store:
                slots = self.slots_of.pop(outcome.job_id)
                for slot, succeeded in zip(slots, outcome.succeeded, strict=True):
                    if not succeeded:
                        self._pool[slot] = 255
        return outcomes

    def submit_load(self, job_id: int, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        self.slots_of[job_id] = list(slots)
        super().submit_load(job_id, keys, slots)

    @cached_property
    def slots_of(self) -> dict[int, list[int]]:
        return {}


class Machine(RuleBasedStateMachine):
    policy_name = "lru"
    cascade_when = "stored"

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.weights = 0
        self.requests: dict[str, list[OffloadKey]] = {}
        self.waiting_since_s: dict[str, float] = {}
        self.plans: list[tuple[LoadPlan | StorePlan, int, bool]] = []
        self.next_request = 0

    @initialize(
        sizes=st.lists(st.integers(2, 24), min_size=1, max_size=2),
        shares=st.sampled_from([0.25, 0.5, 1.0]),
        queue=st.sampled_from([None, 1, 3]),
        faults=st.sampled_from(
            [TierFaults(), *(replace(FAULTS, seed=n, longest_polls=(5, 100)[n % 2]) for n in range(4))]
        ),
    )
    def build(self, sizes: list[int], shares: float, queue: int | None, faults: TierFaults) -> None:
        self.pool = np.zeros((RAM_BLOCKS, BYTES), np.uint8)
        self.tiers = [ScribblingTier(size, max_storing_blocks=queue, blocks_per_poll=2) for size in sizes]
        self.faulty = [FaultyTier(tier, faults) for tier in self.tiers]
        for tier in self.faulty:
            tier.attach(self.pool)
        ram = CPUOffloadingManager(RAM_BLOCKS, self.policy_name, deadline_s=DEADLINE_S, store_timeout_s=10.0)
        limits = TieringLimits(promoting_share=shares, request_share=1.0, cascading_share=0.5)
        self.manager = TieredOffloadingManager(
            ram, self.faulty, limits=limits, cascade_when=self.cascade_when, epochs=[Epochs() for _ in sizes]
        )
        self.driver = RequestDriver(self.manager)
        self.driver.advance(self.now_s)

    def bytes_of(self, key: OffloadKey, weights: int) -> np.ndarray:
        return np.frombuffer((key[:12] + weights.to_bytes(4, "big")).ljust(BYTES, b"."), np.uint8)

    def step(self, seconds: float) -> None:
        self.manager.on_schedule_end()
        self.now_s += seconds
        self.driver.advance(self.now_s)

    @rule(prompt=st.integers(0, len(PROMPTS) - 1), length=st.integers(1, 6))
    def new_request(self, prompt: int, length: int) -> None:
        name = f"r{self.next_request}"
        self.next_request += 1
        self.requests[name] = PROMPTS[prompt][:length]
        self.driver.add_request(name, self.requests[name])

    @rule(pick=st.integers(0, 99), take=st.integers(0, 6), is_computed=st.booleans())
    def match(self, pick: int, take: int, is_computed: bool) -> None:
        if not self.requests:
            return
        name = sorted(self.requests)[pick % len(self.requests)]
        found = self.driver.match(name)
        if found is None:
            since_s = self.waiting_since_s.setdefault(name, self.now_s)
            assert self.now_s - since_s < DEADLINE_S, "deferred past its deadline"
            return
        count = min(found, take)
        if count:
            plan = self.driver.plan_load(name, 0, count)
            self.plans.append((plan, self.weights, False))
            for key, slot in zip(plan.spec.keys, plan.spec.slots, strict=True):
                assert (self.pool[slot] == self.bytes_of(key, self.weights)).all(), "a load of other bytes"
        if is_computed:
            plan = self.driver.plan_store(name, len(self.requests[name]))
            if plan is not None:
                self.pool[plan.spec.slots] = 255  # not there before the copy has ended
                self.plans.append((plan, self.weights, True))

    @rule(prompt=st.integers(0, len(PROMPTS) - 1), length=st.integers(1, 6), steps=st.integers(0, 4))
    def whole_request(self, prompt: int, length: int, steps: int) -> None:
        """Comes, waits a little, computes and stores the rest, and goes."""
        self.new_request(prompt, length)
        name = f"r{self.next_request - 1}"
        keys = self.requests[name]
        for _ in range(steps):
            if self.driver.match(name) is not None:
                break
            self.step(0.01)
        self._store_all(name, len(keys))
        del self.requests[name]
        self.driver.finish(name)
        self.step(0.01)

    @rule(pick=st.integers(0, 99), seconds=st.sampled_from([0.01, 0.5]))
    def ask_until_answered(self, pick: int, seconds: float) -> None:
        """A waiting request is asked once a step. Whatever the tiers do, that has an end."""
        if not self.requests:
            return
        name = sorted(self.requests)[pick % len(self.requests)]
        asked = 0
        while self.driver.match(name) is None:
            asked += 1
            assert asked <= DEADLINE_S / seconds + 1, "deferred past its deadline"
            self.step(seconds)

    @rule(pick=st.integers(0, 99), succeeds=st.booleans())
    def transfer_ends(self, pick: int, succeeds: bool) -> None:
        if not self.plans:
            return
        plan, weights, is_store = self.plans.pop(pick % len(self.plans))
        for key, slot in zip(plan.spec.keys, plan.spec.slots, strict=True):
            if is_store:
                self.pool[slot] = self.bytes_of(key, weights if succeeds else 1 << 20)
            else:
                assert (self.pool[slot] == self.bytes_of(key, weights)).all(), "written under a load"
        self.driver.report(plan.job_id, failed=not succeeds)

    @rule(pick=st.integers(0, 99))
    def finish(self, pick: int) -> None:
        if self.requests:
            name = sorted(self.requests)[pick % len(self.requests)]
            del self.requests[name]
            self.waiting_since_s.pop(name, None)
            self.driver.finish(name)

    @rule(seconds=st.sampled_from([0.0, 0.001, 0.1, MAX_STEP_S]))
    def engine_steps(self, seconds: float) -> None:
        self.step(seconds)

    @rule(tier=st.integers(0, 1), blocks=st.sampled_from([0, 1, None]))
    def tier_changes_its_pace(self, tier: int, blocks: int | None) -> None:
        self.tiers[tier % len(self.tiers)].blocks_per_poll = blocks

    @rule(tier=st.integers(0, 1), prompt=st.integers(0, len(PROMPTS) - 1), depth=st.integers(0, 5))
    def tier_loses_a_block(self, tier: int, prompt: int, depth: int) -> None:
        self.tiers[tier % len(self.tiers)].drop([PROMPTS[prompt][depth]])

    @rule(tier=st.integers(0, 1), is_dead=st.booleans())
    def tier_dies_or_comes_back(self, tier: int, is_dead: bool) -> None:
        self.faulty[tier % len(self.faulty)].dead = is_dead

    @rule(rate=st.sampled_from([None, 0.5, 10.0, 1e4]))
    def engine_is_measured(self, rate: float | None) -> None:
        self.manager.tell_recompute_rate(rate)

    @rule(really=st.integers(0, 9))
    def weights_change(self, really: int) -> None:
        if really == 0:
            self.weights += 1
            self.driver.reset()
            assert all(self.manager.residency(key) is Residency.ABSENT for keys in PROMPTS for key in keys)

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check_invariants()
            stats = self.manager.get_stats()
            held = stats.ready_blocks + stats.in_flight_blocks + stats.condemned_blocks
            assert held <= RAM_BLOCKS
            for tier in self.manager.tier_stats():
                assert tier.ready_blocks + tier.storing_blocks <= tier.capacity_blocks

    @invariant()
    def what_ram_has_are_the_right_bytes(self) -> None:
        if not hasattr(self, "manager") or not (keys := self.manager.ram.ready_keys()):
            return
        inspector = ReqContext("inspector")
        spec = self.manager.ram.prepare_load(keys, inspector)
        for key, slot in zip(keys, spec.slots, strict=True):
            assert (self.pool[slot] == self.bytes_of(key, self.weights)).all(), "a block of other bytes is ready"
        self.manager.ram.complete_load(keys, inspector, spec=spec)

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        while self.plans:
            self.transfer_ends(0, True)
        for name in list(self.requests):
            self.driver.finish(name)
        for faulty in self.faulty:
            faulty.dead = False
            faulty.faults_off()
        for tier in self.tiers:
            tier.blocks_per_poll = None
            tier.max_storing_blocks = None
        for _ in range(40):
            self.step(0.01)
        stats = self.manager.get_stats()
        assert (stats.pinned_blocks, stats.in_flight_blocks, stats.condemned_blocks) == (0, 0, 0), "something leaked"
        self.everything_still_works()

    def everything_still_works(self) -> None:
        """A prompt that is pushed out of RAM comes back, after all that has happened."""
        self.manager.tell_recompute_rate(None)
        self.step(120.0)  # breakers have cooled down
        keys = PROMPTS[0][:2]
        for name, prompt in (("last", keys), ("last again", keys)):
            self.driver.add_request(name, prompt)
            self._answer(name)
            self._store_all(name, len(prompt))
            self.driver.finish(name)
            for _ in range(10):
                self.step(0.01)
        self.driver.add_request("verify", keys)
        assert self._answer("verify") == 2

    def _store_all(self, name: str, num_blocks: int) -> None:
        plan = self.driver.plan_store(name, num_blocks)
        if plan is not None:
            self.plans.append((plan, self.weights, True))
            self.transfer_ends(len(self.plans) - 1, True)

    def _answer(self, name: str) -> int:
        for _ in range(1000):
            found = self.driver.match(name)
            if found is not None:
                return found
            self.step(0.01)
        raise AssertionError("no answer")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cascade_when", ["stored", "reused", "evicted"])
@pytest.mark.parametrize("policy_name", sorted(POLICIES))
def test_tiered_manager_keeps_its_promises(policy_name: str, cascade_when: str) -> None:
    machine = type("TieredMachine", (Machine,), {"policy_name": policy_name, "cascade_when": cascade_when})
    seed(f"{policy_name} {cascade_when}")(machine)
    profile = settings(report_multiple_bugs=False)
    run_state_machine_as_test(machine, settings=settings(profile, max_examples=max(10, profile.max_examples // 2)))
