"""Everything that can happen to a disk tier, in any order, beside a dictionary of what may and must be there."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from disk_harness import CACHE, CAP_BYTES, CAPACITY, KEYS, SLOT_BYTES, Machine
from kvtier.interfaces import Residency
from kvtier.keys import OffloadKey
from kvtier.tier_interfaces import REASON_RESET, TierOutcome

NUM_SLOTS = 24
NUM_VERSIONS = 8
key_lists = st.lists(st.sampled_from(KEYS), min_size=1, max_size=CAPACITY + 2, unique=True)


class DiskMachine(RuleBasedStateMachine):
    """`may_be` has, for each key, the versions of its block that may be handed out; `durable` the keys that the next
    process must have."""

    @initialize(policy=st.sampled_from(["lru", "arc"]), has_direct=st.booleans(), has_allocate=st.booleans())
    def start(self, policy: str, has_direct: bool, has_allocate: bool) -> None:
        self.machine = Machine(policy=policy)
        self.machine.files.has_direct = has_direct
        self.machine.files.has_allocate = has_allocate
        self.may_be: dict[OffloadKey, set[int]] = {}
        self.durable: set[OffloadKey] = set()
        self.version = 0
        self.damaged = False
        self.jobs: dict[int, tuple[list[OffloadKey], list[int]]] = {}
        self.free = set(range(NUM_SLOTS))
        self._open()

    # -- what a caller does --------------------------------------------------------------------------------------

    @rule(keys=key_lists)
    def store(self, keys: list[OffloadKey]) -> None:
        if len(keys) > len(self.free):
            return
        self.version = (self.version + 1) % NUM_VERSIONS
        ready = self.driver.ready(keys)
        for key in keys:  # after a kill, a block from before a drop may be back: its key says that it is the same
            if key not in ready:
                self.may_be.setdefault(key, set()).add(self.version)
        slots = [self.free.pop() for _ in keys]
        job = self.driver.submit_store(keys, slots, self.version)
        if job:
            self.jobs[job] = (keys, slots)
        else:
            self.free.update(slots)

    @rule(keys=key_lists)
    def load(self, keys: list[OffloadKey]) -> None:
        if len(keys) <= len(self.free):
            slots = [self.free.pop() for _ in keys]
            self.jobs[self.driver.submit_load(keys, slots)] = (keys, slots)

    @rule()
    def poll(self) -> None:
        for outcome in self.driver.poll():
            self._check(outcome)

    @rule(keys=key_lists)
    def touch(self, keys: list[OffloadKey]) -> None:
        self.driver.tier.touch(keys)

    @rule(keys=key_lists)
    def drop(self, keys: list[OffloadKey]) -> None:
        self.driver.tier.drop(keys)
        assert self.driver.ready(keys) == []

    @rule(chance=st.randoms(use_true_random=False))
    def cancel(self, chance: random.Random) -> None:
        if self.jobs:
            self.driver.tier.cancel(chance.choice(sorted(self.jobs)))

    @rule()
    def reset(self) -> None:
        assert self.machine.reset(self.driver)
        self.durable.clear()
        for job in self.jobs:
            self.jobs[job] = ([], self.jobs[job][1])
        self.may_be.clear()
        assert self.driver.ready(KEYS) == []

    @rule()
    def flush(self) -> None:
        assert self.driver.tier.flush(1.0)
        self.durable = set(self.driver.ready(KEYS))

    # -- what happens to it --------------------------------------------------------------------------------------

    @rule()
    def stop_and_start(self) -> None:
        for _ in range(2):
            self.poll()
        ready = set(self.driver.ready(KEYS))
        assert self.driver.tier.close(1.0)
        self.durable = ready - set(self.driver.tier.take_removed())
        self.machine.files.kill()
        self._open()
        assert self.damaged or set(self.driver.ready(KEYS)) == ready

    @rule()
    def kill_and_start(self) -> None:
        self._forget_removed()
        self.machine.files.kill()
        self._open()
        if not self.damaged:  # what a kill leaves is whole
            for key in self.driver.ready(KEYS):
                assert self.driver.load([key]).success

    @rule(seed=st.integers(0, 2**32))
    def lose_power_and_start(self, seed: int) -> None:
        self._forget_removed()
        self.machine.files.lose_power(random.Random(seed))
        self._open()

    @rule(bit=st.integers(0, CAPACITY * SLOT_BYTES * 8 - 1))
    def damage_a_block(self, bit: int) -> None:
        content = self.machine.files.content(f"{CACHE}/slab")
        if bit // 8 < len(content):
            content[bit // 8] ^= 1 << bit % 8
            self.damaged = True

    @rule(bit=st.integers(0, 5000 * 8))
    def damage_the_table(self, bit: int) -> None:
        content = self.machine.files.content(f"{CACHE}/table")
        if bit // 8 < len(content):
            content[bit // 8] ^= 1 << bit % 8
            self.damaged = True

    # -- what must hold ------------------------------------------------------------------------------------------

    @invariant()
    def sound(self) -> None:
        self._forget_removed()
        stats = self.driver.tier.get_stats()
        assert stats.ready_blocks == len(self.driver.ready(KEYS)) <= CAPACITY
        assert not stats.closed_reason
        assert self.machine.used_in_root() <= CAP_BYTES
        self.driver.tier.check_invariants()

    def _open(self) -> None:
        self.machine.files.restart()
        self.driver = self.machine.open(NUM_SLOTS)
        self.jobs.clear()
        self.free = set(range(NUM_SLOTS))
        ready = set(self.driver.ready(KEYS))
        assert ready <= self.may_be.keys(), "a block came from nowhere"
        assert self.damaged or self.durable <= ready, "a durable block is gone"
        self.durable &= ready

    def _forget_removed(self) -> None:
        self.durable -= set(self.driver.tier.take_removed())

    def _check(self, outcome: TierOutcome) -> None:
        keys, slots = self.jobs.pop(outcome.job_id)
        self.free.update(slots)
        if not keys:
            assert outcome.reason == REASON_RESET
            assert not any(outcome.succeeded)
        for success, key, slot in zip(outcome.succeeded, keys, slots, strict=False):
            if success and not outcome.is_store:
                version = self.driver.loaded_version(key, slot)
                assert version in self.may_be.get(key, ()), "wrong bytes were handed out"
            if (
                not success
                and not outcome.is_store
                and self.damaged
                and self.driver.tier.lookup([key]) == [Residency.ABSENT]
            ):
                self.durable.discard(key)


@pytest.mark.slow
def test_disk_tier_beside_a_dictionary() -> None:
    run_state_machine_as_test(DiskMachine, settings=settings(max_examples=100, stateful_step_count=50))
