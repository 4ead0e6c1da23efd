"""Random traffic for a tier, with a record of which bytes may come back."""

from __future__ import annotations

import random

from kvtier.keys import OffloadKey
from kvtier.testing.observe import make_keys
from kvtier.testing.tier_driver import TierDriver


class RandomTierTraffic:
    """Stores, loads, drops and cancels at random, and knows which bytes each key may have."""

    def __init__(self, driver: TierDriver, num_slots: int, seed: int) -> None:
        self.driver = driver
        self.chance = random.Random(seed)
        self.keys = make_keys(24)
        self.free = set(range(num_slots))
        self.versions: dict[OffloadKey, int] = {}
        self.jobs: dict[int, tuple[list[OffloadKey], list[int]]] = {}

    def act(self, step: int) -> None:
        picked = self.chance.sample(self.keys, self.chance.randint(1, 6))
        action = self.chance.choice(["store", "store", "store", "load", "load", "load", "touch", "drop", "cancel"])
        if action == "store" and len(self.free) >= len(picked):
            self._store([key for key in picked if key not in self.versions], step % 8)
        elif action == "load" and len(self.free) >= len(picked):
            slots = self._take_slots(len(picked))
            self.jobs[self.driver.submit_load(picked, slots)] = (picked, slots)
        elif action == "touch":
            self.driver.tier.touch(picked)
        elif action == "drop":
            self.driver.tier.drop(picked)
        elif action == "cancel" and self.jobs:
            self.driver.tier.cancel(self.chance.choice(list(self.jobs)))

    def check(self) -> None:
        self.driver.poll()
        ready = self.driver.ready(self.keys)  # which may poll, too
        for job_id in sorted(self.jobs.keys() & self.driver.outcomes.keys()):
            outcome = self.driver.outcomes[job_id]
            keys, slots = self.jobs.pop(job_id)
            for success, key, slot in zip(outcome.succeeded, keys, slots, strict=False):
                if success and not outcome.is_store:
                    assert self.driver.loaded_version(key, slot) == self.versions[key]
            self.free.update(slots)
        # a key gets other bytes only when it is certain to have left
        moving = {key for keys, _ in self.jobs.values() for key in keys}
        there = moving.union(ready)
        self.versions = {key: version for key, version in self.versions.items() if key in there}
        self.driver.tier.check_invariants()

    def _store(self, keys: list[OffloadKey], version: int) -> None:
        slots = self._take_slots(len(keys))
        job = self.driver.submit_store(keys, slots, version)
        if job:
            self.versions.update(dict.fromkeys(keys, version))
            self.jobs[job] = (keys, slots)
        else:
            self.free.update(slots)

    def _take_slots(self, count: int) -> list[int]:
        return [self.free.pop() for _ in range(count)]
