"""`MemoryTier`: a tier whose medium is this process's memory. For simulations and tests: no threads, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigurationError
from kvtier.interfaces import Residency
from kvtier.keys import OffloadKey
from kvtier.policy import make_policy
from kvtier.tier_interfaces import REASON_CANCELLED, REASON_CLOSED, REASON_RESET, Tier, TierOutcome, TierStats
from kvtier.tiers.catalog import Place, TierCatalog
from kvtier.tiers.jobs import ALREADY_STORING, NOT_THERE, OpenJob, check_pool, check_submission


class MemoryTier(Tier):
    """`capacity_blocks` blocks in memory, moved by `poll`: loads first, in the order of their submission.

    `blocks_per_poll` bounds how many blocks one `poll` moves (None: all), so that jobs stay open for as many polls
    as a test or a simulation wants. `max_storing_blocks` (None: no bound) is how many blocks may wait to be stored
    before further ones are refused.
    """

    medium = "MEMORY"

    def __init__(
        self,
        capacity_blocks: int,
        policy: str = "lru",
        *,
        blocks_per_poll: int | None = None,
        max_storing_blocks: int | None = None,
    ) -> None:
        if capacity_blocks < 1:
            raise ConfigurationError(f"capacity_blocks is {capacity_blocks}; allowed: 1 or more")
        self.blocks_per_poll = blocks_per_poll
        self.max_storing_blocks = max_storing_blocks
        self._catalog = TierCatalog(capacity_blocks, make_policy(policy, capacity_blocks))
        self._pool: npt.NDArray[np.uint8] = np.empty((0, 0), np.uint8)
        self._blocks: dict[int, npt.NDArray[np.uint8]] = {}
        self._jobs: dict[int, OpenJob] = {}
        self._loads: deque[tuple[OpenJob, int, Place, int]] = deque()
        self._stores: deque[tuple[OpenJob, int, Place, int]] = deque()
        self._closed_reason = "not attached"

    def attach(self, pool: npt.NDArray[np.uint8]) -> None:
        check_pool(pool)
        self._pool = pool
        self._closed_reason = ""

    def lookup(self, keys: Sequence[OffloadKey]) -> list[Residency]:
        return self._catalog.lookup(keys)

    def submit_store(self, job_id: int, keys: Sequence[OffloadKey], slots: Sequence[int]) -> int:
        check_submission(job_id, keys, slots, self._jobs, len(self._pool))
        if self._closed_reason:
            self._catalog.counters["shed_blocks"] += len(keys)
            return 0
        room = len(keys) if self.max_storing_blocks is None else self.max_storing_blocks - len(self._stores)
        places = self._catalog.begin_store(keys, max(0, room))
        if places:
            job = self._jobs[job_id] = OpenJob(job_id, True, keys[: len(places)])
            for position, place in enumerate(places):
                if isinstance(place, Place):
                    self._stores.append((job, position, place, slots[position]))
                else:
                    job.end_block(position, place, reason=ALREADY_STORING)
        return len(places)

    def submit_load(self, job_id: int, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        check_submission(job_id, keys, slots, self._jobs, len(self._pool))
        job = self._jobs[job_id] = OpenJob(job_id, False, keys)
        for position, place in enumerate(self._catalog.begin_load(keys)):
            if place is None:
                job.end_block(position, False, reason=self._closed_reason or NOT_THERE)
            else:
                self._loads.append((job, position, place, slots[position]))

    def poll(self) -> list[TierOutcome]:
        left = len(self._loads) + len(self._stores) if self.blocks_per_poll is None else self.blocks_per_poll
        for queue in (self._loads, self._stores):
            while queue and left:
                left -= 1
                self._move(*queue.popleft())
        ended = [job for job in self._jobs.values() if not job.num_open]
        for job in ended:
            del self._jobs[job.job_id]
        return [job.outcome() for job in ended]

    def cancel(self, job_id: int) -> None:
        self._end_queued(REASON_CANCELLED, (self._jobs[job_id],) if job_id in self._jobs else ())

    def drop(self, keys: Sequence[OffloadKey]) -> None:
        self._catalog.drop(keys)

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        self._catalog.touch(keys)

    def reset(self, epoch: int) -> list[OffloadKey]:
        ready = self._catalog.reset()
        for job in self._jobs.values():
            job.void(REASON_RESET)
        self._end_queued(REASON_RESET, self._jobs.values())
        self._blocks.clear()
        return ready

    def disable(self, reason: str) -> None:
        self._closed_reason = self._closed_reason or reason
        self._catalog.drop(self._catalog.ready_keys())
        self._end_queued(REASON_CLOSED, self._jobs.values())
        self._blocks.clear()

    def take_removed(self) -> list[OffloadKey]:
        return self._catalog.take_removed()

    def get_stats(self) -> TierStats:
        return TierStats(
            medium=self.medium,
            capacity_blocks=self._catalog.num_places,
            capacity_bytes=self._catalog.num_places * self._pool.shape[1],
            ready_blocks=self._catalog.num_ready,
            storing_blocks=self._catalog.num_storing,
            loading_blocks=self._catalog.num_loading,
            closed_reason=self._closed_reason,
            counters=dict(self._catalog.counters),
        )

    def wait_for_outcome(self, timeout_s: float) -> None:
        """Returns at once: what is open moves with `poll`."""

    def flush(self, timeout_s: float) -> bool:
        for item in self._stores:
            self._move(*item)
        self._stores.clear()
        return not self._closed_reason

    def close(self, flush_s: float = 0.0) -> bool:
        self.disable(REASON_CLOSED)
        self._pool = np.empty((0, 0), np.uint8)
        return True

    def check_invariants(self) -> None:
        self._catalog.check_invariants()

    def _move(self, job: OpenJob, position: int, place: Place, slot: int) -> None:
        num_bytes = self._pool.shape[1]
        if job.is_store:
            self._blocks[place.index] = self._pool[slot].copy()
            success = self._catalog.end_store(place, True)
        else:
            self._pool[slot] = self._blocks[place.index]
            success = self._catalog.end_load(place)
            self._catalog.counters["loaded_blocks" if success else "failed_load_blocks"] += 1
        job.note_time(0.0, 0.0)
        job.end_block(position, success, num_bytes, NOT_THERE)

    def _end_queued(self, reason: str, jobs: Iterable[OpenJob]) -> None:
        """Blocks of `jobs` that have not moved never will."""
        mine = set(map(id, jobs))
        for queue in (self._loads, self._stores):
            for item in [item for item in queue if id(item[0]) in mine]:
                queue.remove(item)
                job, position, place, _ = item
                if job.is_store:
                    self._catalog.end_store(place, False)
                else:
                    self._catalog.end_load(place)
                    self._catalog.counters["failed_load_blocks"] += 1
                job.end_block(position, False, reason=reason)


class MemoryEpochStore:
    """An `EpochStore` for tiers whose blocks do not outlive the process."""

    def __init__(self, epoch: int = 0) -> None:
        self._epoch = epoch

    def current(self) -> int:
        return self._epoch

    def advance(self) -> int:
        self._epoch += 1
        return self._epoch
