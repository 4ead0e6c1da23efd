"""A simulated engine: requests, steps and blocks around the production `RequestDriver`."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.errors import InvariantError
from kvtier.interfaces import CPULoadStoreSpec
from kvtier.keys import OffloadKey
from kvtier.manager import RequestDriver
from kvtier.sim.engine_blocks import EngineBlocks
from kvtier.sim.workers import Copy, RankReport, content
from kvtier.sim.world import World

FLUSH_S = 0.1
"""How long a preemption waits for stores to begin."""


class Phase(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(eq=False, slots=True)
class Request:
    """One request. It computes `path`, of which the first `num_known` keys are known to the driver."""

    req_id: str
    path: Sequence[OffloadKey]
    num_known: int
    phase: Phase = Phase.WAITING
    blocks: list[int] = field(default_factory=list)
    """Held: the engine's blocks of the first keys of the path."""
    num_computed: int = 0
    waits_since_s: float | None = None
    """When it was first told to ask again."""


class SimulatedEngine:
    """Drives `driver` as an engine does. `num_operations` counts the calls."""

    def __init__(self, world: World, driver: RequestDriver) -> None:
        self._scenario = world.scenario
        self._driver = driver
        self._workers = world.workers
        self._clock = world.clock
        self._checks = world.checks
        self._log = world.log
        self._blocks = EngineBlocks(world.scenario.num_engine_blocks)
        self.weights = 0
        self._num_added = 0
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._loading: dict[int, Request] = {}
        """By the id of the load job; a request that was aborted meanwhile too."""
        self.copies: dict[int, Copy] = {}
        """Jobs that have not been reported by every rank."""
        self.num_operations = 0

    @property
    def requests(self) -> list[Request]:
        """All that have not ended, in a fixed order."""
        return [*self.waiting, *(r for r in self._loading.values() if r.phase is Phase.LOADING), *self.running]

    # -- from outside ----------------------------------------------------------------------------------------

    def tell_time(self) -> None:
        """Time has passed. What waits for stores that are overdue is let go."""
        now_s = self._log.now_s = self._clock.now_s
        self._driver.advance(now_s)
        self._checks.time_told(now_s, self.copies.values())
        for copy in self.copies.values():
            if copy.given_up:
                self._let_go(copy)

    def add(self, path: Sequence[OffloadKey], num_prompt: int) -> None:
        """A new request, whose prompt is the first `num_prompt` blocks of `path`; it will generate the rest."""
        request = Request(f"r{self._num_added}", path, num_prompt)
        self._num_added += 1
        self.num_operations += 1
        self._driver.add_request(request.req_id, path[:num_prompt])
        self.waiting.append(request)
        self._log.say(f"adds {request.req_id} {self._log.names(path)} {num_prompt}")

    def forget(self) -> None:
        """Other traffic takes the idle blocks: nothing is found in the engine any more."""
        self._blocks.forget_all()

    def step(self, lags: bool, cut_to: int) -> None:
        """One step of the scheduler: starts what can start, computes, stores.

        With `lags` what was computed is not offered yet. No load is planned longer than `cut_to` blocks.
        """
        for request in list(self.waiting):
            if len(self.running) + len(self._loading) >= self._scenario.max_running:
                break
            self._try_to_start(request, cut_to)
        for request in list(self.running):
            if request.phase is Phase.RUNNING:
                self._compute(request, lags)

    def receive(self, report: RankReport) -> None:
        """A rank's report of a job has arrived, for the first time or once more."""
        outcome, rank = report.outcome, report.rank
        copy = self.copies.get(outcome.job_id)
        self.num_operations += 1
        record = self._driver.report(outcome.job_id, failed=not outcome.success, rank=rank)
        told = outcome.reason or "done"
        self._log.say(f"report {outcome.job_id} rank {rank} {told}{'' if record is None else ': ended'}")
        if copy is not None:
            copy.reported.add(rank)
        all_said = copy is not None and len(copy.reported) == self._scenario.num_ranks
        if all_said != (record is not None):
            raise InvariantError(f"job {outcome.job_id} {'should' if all_said else 'should not'} have ended now")
        if record is None or copy is None:
            return
        del self.copies[outcome.job_id]
        self._let_go(copy)
        if not copy.is_store:
            self._load_ended(copy, record.failed)

    def abort(self, request: Request, cancels: bool) -> None:
        """The client has gone. With `cancels` a load that has not begun is taken back."""
        self._log.say(f"aborts {request.req_id} {request.phase.value}")
        if request.phase is Phase.LOADING and cancels:
            for job_id in [job_id for job_id, loading in self._loading.items() if loading is request]:
                self._workers.cancel(job_id)
        self._end(request)

    def preempt(self, request: Request) -> None:
        """A running request loses its blocks and will begin again."""
        self._log.say(f"preempts {request.req_id}")
        self.running.remove(request)
        if self._scenario.flush_on_preempt:
            self.num_operations += 1
            self._workers.wait(self._driver.open_jobs(request.req_id), FLUSH_S)
            self.tell_time()
        self._begin_again(request)

    def reset(self, new_weights: bool) -> None:
        """The cache is reset. With new weights nothing that was computed or is being loaded counts any more."""
        self._log.say(f"resets {'new weights' if new_weights else 'same weights'}")
        self._blocks.forget_all()
        if new_weights:
            self.weights += 1
            while self.running:
                self._begin_again(self.running.pop())
        self._checks.before_reset()
        self.num_operations += 1
        self._driver.reset()
        self._checks.after_reset()

    def workers_died(self) -> list[Copy]:
        """Every worker process has died and was started anew. Returns the jobs that they leave unfinished."""
        unfinished = self._workers.die()
        self._log.say(f"workers die, {len(unfinished)} jobs unfinished")
        self._blocks.forget_all()
        while self.running:
            self._begin_again(self.running.pop())
        self._workers.revive()
        return unfinished

    # -- requests --------------------------------------------------------------------------------------------

    def _try_to_start(self, request: Request, cut_to: int) -> None:
        keys = request.path[: request.num_known]
        own = self._blocks.prefix(keys)
        now_s = self._clock.now_s
        self.num_operations += 1
        found = self._driver.match(request.req_id, len(own))
        self._log.say(f"match {request.req_id} behind {len(own)}: {found}")
        if found is None:
            if request.waits_since_s is None:
                request.waits_since_s = now_s
            self._checks.deferred(request.req_id, keys, request.waits_since_s, now_s, self.copies.values())
            return
        found = min(found, cut_to)
        self._blocks.hold(own)
        if self._blocks.num_idle < found:
            self._blocks.release(own)
            return
        self.waiting.remove(request)
        request.blocks = own + self._blocks.take(found)
        if found:
            self._load(request, len(own), found)
        else:
            request.num_computed = len(own)
            self._run(request)

    def _load(self, request: Request, first: int, count: int) -> None:
        self.num_operations += 1
        is_shut = self._checks.is_shut
        plan = self._driver.plan_load(request.req_id, first, count)
        copy = self._copy_of(plan.job_id, False, plan.spec, request.blocks[first : first + count])
        if list(copy.keys) != list(request.path[first : first + count]):
            raise InvariantError(f"load {plan.job_id} is not of the blocks that were asked for")
        being_loaded = {key for other in self.copies.values() if not other.is_store for key in other.keys}
        if not being_loaded.isdisjoint(copy.keys):
            raise InvariantError(f"load {plan.job_id} is of blocks that another load brings already")
        now_s, since_s = self._clock.now_s, request.waits_since_s
        self._checks.load_granted(copy, plan.spec.begin_by_s, now_s if since_s is None else since_s, is_shut)
        self._loading[plan.job_id] = request
        request.phase = Phase.LOADING
        self._submit(copy, request, plan.spec.begin_by_s)

    def _load_ended(self, copy: Copy, failed: bool) -> None:
        request = self._loading.pop(copy.job_id)
        is_current = copy.incarnation == self._workers.incarnation
        if failed:
            self._checks.load_failed(copy)
        elif is_current:
            self._workers.check_bytes(copy)
        if request.phase is Phase.ENDED:
            return
        if failed or not is_current or copy.weights != self.weights:
            self._begin_again(request)
            return
        for block, key in zip(copy.blocks, copy.keys, strict=True):
            self._blocks.fill(block, key)
        request.num_computed = len(request.blocks)
        self._run(request)

    def _run(self, request: Request) -> None:
        request.phase = Phase.RUNNING
        self.running.append(request)

    def _compute(self, request: Request, lags: bool) -> None:
        for _ in range(self._scenario.blocks_per_step):
            at = request.num_computed
            if at == len(request.path):
                break
            if at == request.num_known:
                self.num_operations += 1
                self._driver.extend_request(request.req_id, [request.path[at]])
                request.num_known += 1
            if not self._make_room(request):
                break
            (block,) = self._blocks.take(1)
            request.blocks.append(block)
            for rank, memory in enumerate(self._workers.memories):
                memory[block] = content(request.path[at], self.weights, rank)
            self._blocks.fill(block, request.path[at])
            request.num_computed += 1
        if request.phase is not Phase.RUNNING:
            return
        is_last = request.num_computed == len(request.path)
        if is_last or not lags:
            self._store(request)
        if is_last:
            self._log.say(f"finishes {request.req_id}")
            self._end(request)

    def _make_room(self, request: Request) -> bool:
        """One idle block, if need be at the cost of a younger running request. False: not now."""
        while not self._blocks.num_idle:
            victim = self.running[-1]
            if victim is request:
                if len(self.running) > 1:
                    self.preempt(request)
                return False
            self.preempt(victim)
        return request.phase is Phase.RUNNING

    def _store(self, request: Request) -> None:
        self.num_operations += 1
        is_shut = self._checks.is_shut
        plan = self._driver.plan_store(request.req_id, request.num_computed)
        if plan is None:
            return
        copy = self._copy_of(plan.job_id, True, plan.spec, [request.blocks[at] for at in plan.blocks])
        if list(copy.keys) != [request.path[at] for at in plan.blocks]:
            raise InvariantError(f"store {plan.job_id} is not of the blocks that were offered")
        self._checks.store_granted(copy, plan.spec.begin_by_s, is_shut)
        self._submit(copy, request, plan.spec.begin_by_s)

    def _begin_again(self, request: Request) -> None:
        self.num_operations += 1
        self._driver.preempt(request.req_id)
        self._blocks.release(request.blocks)
        request.blocks = []
        request.num_computed = 0
        request.phase = Phase.WAITING
        self.waiting.insert(0, request)

    def _end(self, request: Request) -> None:
        self.num_operations += 1
        self._driver.finish(request.req_id)
        if request.phase is Phase.WAITING:
            self.waiting.remove(request)
        elif request.phase is Phase.RUNNING:
            self.running.remove(request)
        self._blocks.release(request.blocks)
        request.phase = Phase.ENDED

    # -- jobs ------------------------------------------------------------------------------------------------

    def _copy_of(self, job_id: int, is_store: bool, spec: CPULoadStoreSpec, blocks: Sequence[int]) -> Copy:
        return Copy(
            job_id,
            is_store,
            keys=spec.keys,
            slots=spec.block_ids.tolist(),
            generations=spec.generations.tolist(),
            blocks=blocks,
            weights=self.weights,
            granted_s=self._clock.now_s,
            num_resets=self._checks.num_resets,
            incarnation=self._workers.incarnation,
        )

    def _submit(self, copy: Copy, request: Request, begin_by_s: float | None) -> None:
        self._blocks.hold(copy.blocks)
        self.copies[copy.job_id] = copy
        self._log.say(
            f"{'store' if copy.is_store else 'load'} {copy.job_id} of {request.req_id} "
            f"{self._log.names(copy.keys)} slots {copy.slots}"
        )
        self._workers.submit(copy, begin_by_s)

    def _let_go(self, copy: Copy) -> None:
        if copy.holds_blocks:
            copy.holds_blocks = False
            self._blocks.release(copy.blocks)
