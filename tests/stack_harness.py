"""What an engine's process has, without an engine: a pool, and the managers and tiers that `build_stack` makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvtier import RequestDriver, Residency, make_offload_key
from kvtier.keys import OffloadKey
from kvtier.runtime import Identity, Stack, build_stack, parse_config

SLOT_BYTES = 4096
NUM_SLOTS = 16
NAMESPACE = bytes(range(32))
PATIENCE_STEPS = 20_000


def keys_of(name: str, count: int) -> list[OffloadKey]:
    return [make_offload_key(f"{name}-{i}".encode().ljust(32, b"."), 0) for i in range(count)]


def bytes_of(key: OffloadKey) -> np.ndarray:
    return np.frombuffer(key.ljust(SLOT_BYTES, b"#"), np.uint8)


class Process:
    """`settings` are kvtier's, with `ram` for NUM_SLOTS blocks."""

    def __init__(self, settings: dict[str, Any], identity: Identity | None = None) -> None:
        config = {"ram": NUM_SLOTS * SLOT_BYTES, "deadline_s": 60, "prefill_tokens_per_s": 0, **settings}
        self.pool = np.zeros((NUM_SLOTS, SLOT_BYTES), np.uint8)
        self.stack: Stack = build_stack(
            parse_config(config), self.pool, identity or Identity(NAMESPACE), enable_events=True
        )
        self.driver = RequestDriver(self.stack.core)
        self.now_s = 1.0
        self.driver.advance(self.now_s)
        self._num_requests = 0

    def step(self) -> None:
        self.stack.core.on_schedule_end()
        for tier in self.stack.tiers:
            tier.wait_for_outcome(1.0)
        self.now_s += 0.001
        self.driver.advance(self.now_s)

    def store(self, keys: Sequence[OffloadKey]) -> None:
        """Computes and stores all of `keys`, and lets the tiers take what they want."""
        name = self._add(keys)
        plan = self.driver.plan_store(name, len(keys))
        if plan is not None:
            for key, slot in zip(plan.spec.keys, plan.spec.slots, strict=True):
                self.pool[slot] = bytes_of(key)
            self.driver.report(plan.job_id)
        self.driver.finish(name)
        self.settle()

    def load(self, keys: Sequence[OffloadKey]) -> int:
        """How many leading `keys` come back, with the right bytes."""
        name = self._add(keys)
        for _ in range(PATIENCE_STEPS):
            count = self.driver.match(name)
            if count is not None:
                break
            self.step()
        else:
            raise AssertionError("no answer")
        if count:
            plan = self.driver.plan_load(name, 0, count)
            for key, slot in zip(plan.spec.keys, plan.spec.slots, strict=True):
                assert (self.pool[slot] == bytes_of(key)).all()
            self.driver.report(plan.job_id)
        self.driver.finish(name)
        self.settle()
        return count

    def settle(self) -> None:
        """Until nothing is on its way between the tiers."""
        tiered = self.stack.tiered
        if tiered is not None:
            self.until(lambda: not tiered.num_promoting + tiered.num_cascading + self._num_to_go_down())

    def until(self, done: Callable[[], object]) -> None:
        """Steps until `done()`."""
        for _ in range(PATIENCE_STEPS):
            self.step()
            if done():
                return
        raise AssertionError("it does not come to that")

    def _num_to_go_down(self) -> int:
        """A tier that is closed or cannot be reached takes nothing, however long one waits."""
        tiered = self.stack.tiered
        if tiered is None or any(stats.closed_reason or stats.down_reason for stats in tiered.tier_stats()):
            return 0
        return tiered.num_to_flush

    def on_disk(self, keys: Sequence[OffloadKey]) -> int:
        """How many of them the tiers below know to have."""
        return sum(found is Residency.READY for tier in self.stack.tiers for found in tier.lookup(keys))

    def counters(self, name: str) -> Counter[str]:
        """Of the tier of this name."""
        assert self.stack.tiered is not None
        return Counter(self.stack.tiered.tier_stats()[self.stack.tier_names.index(name)].counters)

    def stop(self) -> None:
        assert self.stack.stop(lambda: self.now_s)

    def die(self) -> None:
        """Like `kill -9`, as far as one process can: nothing is flushed, and the locks go."""
        for tier in self.stack.tiers:
            assert tier.close()

    def _add(self, keys: Sequence[OffloadKey]) -> str:
        self._num_requests += 1
        self.driver.add_request(f"r{self._num_requests}", keys)
        return f"r{self._num_requests}"
