"""Driving a tier as its caller does, with a pool whose bytes are known."""

from __future__ import annotations

import functools
import mmap
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.interfaces import Residency
from kvtier.keys import OffloadKey
from kvtier.tier_interfaces import Tier, TierOutcome

GIVE_UP_S = 60.0


def make_pool(num_slots: int, slot_bytes: int) -> npt.NDArray[np.uint8]:
    """(num_slots, slot_bytes) uint8 of zeros, beginning at a whole page. The memory lives as long as the array."""
    return np.frombuffer(mmap.mmap(-1, num_slots * slot_bytes), np.uint8).reshape(num_slots, slot_bytes)


@functools.lru_cache(maxsize=256)
def block_bytes(key: OffloadKey, num_bytes: int, version: int = 0) -> npt.NDArray[np.uint8]:
    """(num_bytes,) uint8: what the driver stores under `key`; other bytes for every key and version.

    Normally distributed numbers in bf16: as compressible as the blocks of a KV cache. Shared: not to be changed.
    """
    seed = int.from_bytes(key, "big") * 64 + version
    numbers = np.random.default_rng(seed).standard_normal((num_bytes + 1) // 2, dtype=np.float32)
    return (numbers.view(np.uint32) >> 16).astype("<u2").view(np.uint8)[:num_bytes]


class TierDriver:
    """A tier, attached to a pool, and what its caller would do with it. Job ids count up from 1.

    With `answers_at_once` a look-up that says UNKNOWN is no answer; without, it is asked again until it says more.
    """

    def __init__(self, tier: Tier, num_slots: int, slot_bytes: int, *, answers_at_once: bool = True) -> None:
        self.tier = tier
        self.answers_at_once = answers_at_once
        self.pool = make_pool(num_slots, slot_bytes)
        self.outcomes: dict[int, TierOutcome] = {}
        """Of every job that has ended."""
        self.open_jobs: set[int] = set()
        self._next_job = 1
        tier.attach(self.pool)

    def submit_store(self, keys: Sequence[OffloadKey], slots: Sequence[int] | None = None, version: int = 0) -> int:
        """Fills slots (default: 0, 1, ...) with the blocks of `keys` and submits a store.

        The job's id; 0 if it was refused whole.
        """
        slots = range(len(keys)) if slots is None else slots
        for key, slot in zip(keys, slots, strict=True):
            self.pool[slot] = block_bytes(key, self.pool.shape[1], version)
        job_id = self._new_job()
        accepted = self.tier.submit_store(job_id, keys, slots)
        assert 0 <= accepted <= len(keys)
        if accepted:
            self.open_jobs.add(job_id)
        return job_id if accepted else 0

    def submit_load(self, keys: Sequence[OffloadKey], slots: Sequence[int] | None = None) -> int:
        """Submits a load into slots (default: 0, 1, ...), which are filled with other bytes before. The job's id."""
        slots = range(len(keys)) if slots is None else slots
        for slot in slots:
            self.pool[slot] = 0xA5
        job_id = self._new_job()
        self.tier.submit_load(job_id, keys, slots)
        self.open_jobs.add(job_id)
        return job_id

    def poll(self) -> list[TierOutcome]:
        """Polls, and checks that every outcome is of an open job and none comes twice."""
        outcomes = self.tier.poll()
        for outcome in outcomes:
            assert outcome.job_id in self.open_jobs, f"no open job has this outcome: {outcome}"
            self.open_jobs.remove(outcome.job_id)
            self.outcomes[outcome.job_id] = outcome
        return outcomes

    def finish(self, job_id: int) -> TierOutcome:
        """Polls until the job has ended; its outcome."""
        until_s = time.monotonic() + GIVE_UP_S
        while job_id not in self.outcomes:
            self.poll()
            if job_id not in self.outcomes:
                self.tier.wait_for_outcome(1.0)
                assert time.monotonic() < until_s, f"job {job_id} does not end"
        return self.outcomes[job_id]

    def finish_all(self) -> None:
        """Polls until no job is open."""
        for job_id in sorted(self.open_jobs):
            self.finish(job_id)

    def store(self, keys: Sequence[OffloadKey], version: int = 0) -> TierOutcome | None:
        """Stores and waits. The outcome; None if it was refused."""
        job_id = self.submit_store(keys, version=version)
        return self.finish(job_id) if job_id else None

    def load(self, keys: Sequence[OffloadKey]) -> TierOutcome:
        """Loads into slots 0, 1, ... and waits."""
        return self.finish(self.submit_load(keys))

    def close(self, flush_s: float = 0.0) -> None:
        """Closes the tier, and waits for what is still on its way in the medium."""
        until_s = time.monotonic() + GIVE_UP_S
        while not self.tier.close(flush_s):
            assert time.monotonic() < until_s, "the tier does not close"

    def loaded_version(self, key: OffloadKey, slot: int) -> int | None:
        """Which of the first versions of the key's block the slot holds; None: none of them."""
        for version in range(8):
            if np.array_equal(self.pool[slot], block_bytes(key, self.pool.shape[1], version)):
                return version
        return None

    def lookup(self, keys: Sequence[OffloadKey]) -> list[Residency]:
        """What the tier says of each key, once it says something. Polls only while it does not."""
        until_s = time.monotonic() + GIVE_UP_S
        while Residency.UNKNOWN in (answers := self.tier.lookup(keys)):
            assert not self.answers_at_once, "the tier has to answer at once, and says UNKNOWN"
            assert time.monotonic() < until_s, "the tier does not answer"
            self.tier.wait_for_outcome(1.0)
            self.poll()
        return answers

    def ready(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Those of `keys` that the tier says it has."""
        return [key for key, stands in zip(keys, self.lookup(keys), strict=True) if stands is Residency.READY]

    def _new_job(self) -> int:
        self._next_job += 1
        return self._next_job - 1
