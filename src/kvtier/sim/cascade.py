"""A second reader of the tier, beside the engine: what copies blocks on into a lower tier.

It talks to the manager without the driver's bookkeeping: blocks are pinned twice, contexts are never introduced,
and what is reported twice completes twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.interfaces import CPULoadStoreSpec, OffloadingManager, ReqContext
from kvtier.keys import OffloadKey
from kvtier.sim.workers import Copy, RankReport
from kvtier.sim.world import World

FIRST_JOB_ID = 1_000_000
"""Its jobs are numbered from here, the engine's below."""
MAX_BLOCKS = 4
NUM_AREAS = 2
STAGING_BLOCKS = MAX_BLOCKS * NUM_AREAS
"""Blocks behind the engine's own that it copies into: one area a job."""


class SimulatedCascade:
    """Reads blocks of the tier whenever it is asked to. `num_operations` counts its calls."""

    def __init__(self, world: World, manager: OffloadingManager) -> None:
        self._manager = manager
        self._workers = world.workers
        self._clock = world.clock
        self._checks = world.checks
        self._log = world.log
        self._num_ranks = world.scenario.num_ranks
        first = world.scenario.num_engine_blocks
        self._idle_areas = [
            range(first + MAX_BLOCKS * area, first + MAX_BLOCKS * (area + 1)) for area in range(NUM_AREAS)
        ]
        self._begun: dict[int, tuple[Copy, CPULoadStoreSpec, ReqContext, range, list[bool]]] = {}
        self.copies: dict[int, Copy] = {}
        """Jobs that have not been reported by every rank."""
        self.num_operations = 0

    def read(self, keys: Sequence[OffloadKey], weights: int) -> None:
        """Begins to copy the first of `keys`, which are ready, unless it is busy."""
        keys = keys[:MAX_BLOCKS]
        if not keys or not self._idle_areas:
            return
        area = self._idle_areas.pop()
        job_id = FIRST_JOB_ID + len(self._begun)
        context = ReqContext(f"cascade-{job_id}")
        self.num_operations += 1
        is_shut = self._checks.is_shut
        spec = self._manager.prepare_load(keys, context)
        assert isinstance(spec, CPULoadStoreSpec)
        copy = Copy(
            job_id,
            False,
            keys=keys,
            slots=spec.block_ids.tolist(),
            generations=spec.generations.tolist(),
            blocks=area[: len(keys)],
            weights=weights,
            granted_s=self._clock.now_s,
            num_resets=self._checks.num_resets,
            incarnation=self._workers.incarnation,
        )
        self._checks.load_granted(copy, spec.begin_by_s, self._clock.now_s, is_shut)
        self._begun[job_id] = (copy, spec, context, area, [])
        self.copies[job_id] = copy
        self._log.say(f"cascade {job_id} {self._log.names(keys)} slots {copy.slots}")
        self._workers.submit(copy, spec.begin_by_s)

    def receive(self, report: RankReport) -> None:
        """A rank's report has arrived, for the first time or once more."""
        job_id = report.outcome.job_id
        copy, spec, context, area, failures = self._begun[job_id]
        ended_before = len(copy.reported) == self._num_ranks
        if not ended_before and report.rank in copy.reported:
            return
        copy.reported.add(report.rank)
        failures.append(not report.outcome.success)
        if len(copy.reported) < self._num_ranks:
            return
        failed = any(failures)
        self._log.say(f"cascade {job_id} {'failed' if failed else 'done'}{' once more' if ended_before else ''}")
        self.num_operations += 1
        self._manager.complete_load(copy.keys, context, success=not failed, spec=spec)
        if ended_before:
            return
        self._manager.touch(copy.keys, context)
        self._manager.on_request_finished(context)
        del self.copies[job_id]
        self._idle_areas.append(area)
        if failed:
            self._checks.load_failed(copy)
        elif copy.incarnation == self._workers.incarnation:
            self._workers.check_bytes(copy)
