"""A Hypothesis state machine that does to a request-level driver whatever engines, workers and time may do to it.

Run it over a manager, tier or policy of your own (it needs `hypothesis`):

    class MyMachine(DriverMachine):
        def make_manager(self):
            return MyManager(self.capacity_blocks, ...)

    run_state_machine_as_test(MyMachine, settings=settings(max_examples=200, stateful_step_count=100, deadline=None))
"""

from __future__ import annotations

import sys
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.interfaces import CachePolicy, OffloadingManager
from kvtier.keys import OffloadKey
from kvtier.manager import CircuitBreaker, CPUOffloadingManager, FilterReusedOffloadingManager
from kvtier.policy import POLICIES
from kvtier.testing.checked_driver import CheckedDriver
from kvtier.testing.ledger import Job, Request
from kvtier.testing.observe import make_keys
from kvtier.testing.promises import Promises

_KEYS = make_keys(14)
PROMPTS: list[list[OffloadKey]] = [_KEYS[:6], _KEYS[:3] + _KEYS[6:9], _KEYS[:2] + _KEYS[9:], _KEYS[:1] + _KEYS[4:12]]
"""They share prefixes, and some are longer than the tier."""
_GENERATED = make_keys(3, prefix="generated")
_NUM_REQUESTS = 4

_requests = st.integers(0, _NUM_REQUESTS - 1)
_blocks = st.integers(0, 6)
_jobs = st.integers(0, 5)
# Hypothesis likes the ends of a range, and what empties the tier must be rare for something to be in it
_rarely = st.integers(0, 5).map(lambda number: number == 3)
_mostly = st.integers(0, 3).map(lambda number: number != 2)
_hints = st.none() | st.fixed_dictionaries(
    {},
    optional={
        "kvtier.pin": st.sampled_from([True, True, True, False, "yes"]),
        "kvtier.priority": st.integers(-3, 4),
        "kvtier.ttl_s": st.sampled_from([0, 4.0, 20.0, -1.0]),
        "kvtier.ended": st.booleans(),
        "kvtier.no_store": st.integers(0, 4).map(lambda number: number == 3),
        "kvtier.other": st.none(),
    },
)


class DriverMachine(RuleBasedStateMachine):
    """Overridden by class attributes and `make_manager`. Every step ends with `CheckedDriver.check`."""

    prompts = PROMPTS
    capacity_blocks = 6
    num_ranks = 2
    policy_name = "lru"
    store_threshold = 0
    filter_around = False
    """The reuse filter is a manager around the manager."""
    deadline_s = 5.0
    store_timeout_s = 32.0
    has_breaker = False
    pin_share = 0.0
    """More than 0: requests give hints, and may pin this share of the tier."""
    knows_rate = False
    """The engine's speed is told to the manager, which may then find waiting not worth it."""

    def __init__(self) -> None:
        super().__init__()
        self.world = CheckedDriver(self.make_manager(), self.capacity_blocks, self.promises(), self.num_ranks)
        if self.knows_rate:
            self.world.manager.tell_recompute_rate(50.0)

    def make_manager(self) -> OffloadingManager:
        """The manager under test, new, with `capacity_blocks` slots and the limits of `promises`."""
        manager = CPUOffloadingManager(
            self.capacity_blocks,
            self.policy_name,
            enable_events=True,
            store_threshold=0 if self.filter_around else self.store_threshold,
            deadline_s=self.deadline_s,
            store_timeout_s=self.store_timeout_s,
            breaker=CircuitBreaker(failures=2, cooldown_s=1.0, max_cooldown_s=4.0) if self.has_breaker else None,
            pin_share=self.pin_share,
        )
        return FilterReusedOffloadingManager(manager, self.store_threshold) if self.filter_around else manager

    def promises(self) -> Promises:
        """What that manager is to be held to."""
        policy = POLICIES[self.policy_name]
        return Promises(
            self.deadline_s,
            self.store_timeout_s,
            self.store_threshold,
            declines_stores=policy.evict_for is not CachePolicy.evict_for,
            max_kept=int(self.pin_share * self.capacity_blocks),
            declines_waits=self.knows_rate,
        )

    # -- requests --------------------------------------------------------------------------------------------

    @initialize(filled=st.booleans(), prompt=st.integers(0, len(PROMPTS) - 1))
    def begin_with_a_prompt(self, filled: bool, prompt: int) -> None:
        """Half of the runs begin with something in the tier."""
        if filled:
            self.whole_request(0, prompt, True)
            self.whole_request(1, prompt, True)

    @rule(request=_requests, prompt=st.integers(0, len(PROMPTS) - 1), cancels=st.booleans(), hints=_hints)
    def new_request(self, request: int, prompt: int, cancels: bool, hints: dict[str, object] | None = None) -> None:
        """A request with the name of an earlier one, which is aborted if it still runs."""
        name = f"request-{request}"
        if name in self.world.requests:
            self.world.finish(self.world.requests[name], cancels)
        self.world.add_request(name, self.prompts[prompt % len(self.prompts)], hints if self.pin_share else None)

    @precondition(lambda self: self.world.requests)
    @rule(request=_requests, engine_blocks=st.integers(0, 2), wanted=_blocks)
    def match_and_load(self, request: int, engine_blocks: int, wanted: int) -> None:
        """The scheduler looks at a waiting request; with `wanted` 0 there is no room for it in the engine."""
        chosen = self._request(request)
        found = self.world.match(chosen, engine_blocks)
        loads = any(not job.is_store for job in self._jobs_of(chosen))
        if found and wanted and not loads:
            self.world.load(chosen, engine_blocks, min(found, wanted))

    @precondition(lambda self: self.world.requests)
    @rule(request=_requests, blocks=_blocks)
    def compute(self, request: int, blocks: int) -> None:
        """The request runs, and its new blocks are offered."""
        chosen = self._request(request)
        self.world.store(chosen, min(chosen.num_computed + blocks, len(chosen.keys)))

    @precondition(lambda self: self.world.requests)
    @rule(request=_requests, blocks=st.integers(1, len(_GENERATED)))
    def generate(self, request: int, blocks: int) -> None:
        chosen = self._request(request)
        num_generated = sum(key in _GENERATED for key in chosen.keys)
        if chosen.num_computed == len(chosen.keys):
            self.world.extend_request(chosen, _GENERATED[num_generated : num_generated + blocks])

    @precondition(lambda self: self.world.requests)
    @rule(request=_requests, resumes=st.booleans())
    def preempt(self, request: int, resumes: bool) -> None:
        """The engine needs the request's blocks, and may compute it again soon."""
        chosen = self._request(request)
        if self.world.may_preempt(chosen):
            num_computed = chosen.num_computed
            self.world.preempt(chosen)
            if resumes:
                self.world.store(chosen, num_computed)

    @precondition(lambda self: self.world.requests)
    @rule(request=_requests, cancels=st.booleans())
    def finish(self, request: int, cancels: bool) -> None:
        self.world.finish(self._request(request), cancels)

    @rule(request=_requests, prompt=st.integers(0, len(PROMPTS) - 1), completes=_mostly, hints=_hints)
    def whole_request(self, request: int, prompt: int, completes: bool, hints: dict[str, object] | None = None) -> None:
        """The common case, so that the machine often has something to work with."""
        self.new_request(request, prompt, False, hints)
        self.match_and_load(0, 0, 6)
        chosen = self.world.requests[f"request-{request}"]
        job = self.world.store(chosen, len(chosen.keys))
        if job is not None and completes:
            self.world.run(job)

    # -- workers ---------------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.jobs)
    @rule(job=_jobs, succeeds=_mostly)
    def run_job(self, job: int, succeeds: bool) -> None:
        """Every rank, whichever job: completions come in any order."""
        self.world.run(self._job(job), succeeds)

    @precondition(lambda self: self.world.jobs)
    @rule(job=_jobs, rank=st.integers(0, 1), succeeds=_mostly)
    def run_rank(self, job: int, rank: int, succeeds: bool) -> None:
        """One rank: with another one's other outcome this is a partial failure."""
        self.world.run_rank(self._job(job), rank % self.num_ranks, succeeds)

    @precondition(lambda self: self.world.jobs)
    @rule(job=_jobs, rank=st.integers(0, 1), finishes=st.booleans())
    def stall(self, job: int, rank: int, finishes: bool) -> None:
        """A copy begins; its end, or the report of its end, is late."""
        chosen, rank = self._job(job), rank % self.num_ranks
        if self.world.begin_copy(chosen, rank) and finishes:
            self.world.finish_copy(chosen, rank)

    @precondition(lambda self: self.world.ended)
    @rule(job=_jobs, rank=st.integers(0, 1), failed=st.booleans())
    def report_twice(self, job: int, rank: int, failed: bool) -> None:
        self.world.report_again(self.world.ended[job % len(self.world.ended)], rank, failed)

    @precondition(lambda self: any(0 < len(job.ranks_pending) < self.num_ranks for job in self.world.jobs))
    @rule(failed=st.booleans())
    def report_rank_twice(self, failed: bool) -> None:
        """While another rank still copies."""
        job = next(job for job in self.world.jobs if 0 < len(job.ranks_pending) < self.num_ranks)
        rank = min(set(range(self.num_ranks)) - job.ranks_pending)
        self.world.report_again(job.job_id, rank, failed)

    # -- time, and the whole tier ----------------------------------------------------------------------------

    @precondition(lambda self: self.world.requests)
    @rule(request=_requests, past=st.booleans())
    def wait_until_deadline(self, request: int, past: bool) -> None:
        """A request that was told to wait asks again when its deadline has passed, or just before."""
        chosen = self._request(request)
        if self.world.match(chosen) is None:
            self.world.advance(self.deadline_s if past else self.deadline_s / 2)
            self.world.match(chosen)

    @precondition(lambda self: self.world.jobs)
    @rule(job=_jobs, begins=st.booleans())
    def outlive_the_timeout(self, job: int, begins: bool) -> None:
        """A copy has begun, or has not, and nothing more is heard of it for a long time."""
        if begins:
            self.world.begin_copy(self._job(job), 0)
        self.world.advance(self.store_timeout_s * 1.25)

    @rule(seconds=st.sampled_from([0.25, 1.0, 3.0, 5.0, 16.0, 40.0, -1.0]))
    def advance(self, seconds: float) -> None:
        self.world.advance(seconds)

    @precondition(lambda self: self.knows_rate)
    @rule(rate=st.sampled_from([None, 0.5, 5.0, 50.0]))
    def tell_rate(self, rate: float | None) -> None:
        """How many blocks a second the engine computes was measured anew."""
        self.world.manager.tell_recompute_rate(rate)

    @precondition(lambda self: self.knows_rate)
    @rule(request=_requests, prompt=st.integers(0, len(PROMPTS) - 1))
    def slow_store(self, request: int, prompt: int) -> None:
        """A store that takes its time, so that it is known how long stores take."""
        self.whole_request(request, prompt, False)
        self.world.advance(1.0)
        if self.world.jobs:
            self.world.run(self.world.jobs[-1])

    @rule(really=_rarely)
    def reset(self, really: bool) -> None:
        if really:
            self.world.reset()

    @rule(really=_rarely, loses_memory=st.booleans())
    def workers_die(self, really: bool, loses_memory: bool) -> None:
        if really:
            self.world.workers_die(loses_memory)

    @precondition(lambda self: self.world.jobs)
    @rule(really=_rarely, prompt=st.integers(0, len(PROMPTS) - 1))
    def reports_after_revival(self, really: bool, prompt: int) -> None:
        """Others write the slots of dead writers, are reset in turn, and only then the dead ones' reports come."""
        if not really:
            return
        dead = self.world.jobs
        self.world.reset()
        self.world.workers_die(loses_memory=False)
        self.whole_request(0, prompt, False)
        self.world.reset()
        for job in dead:
            self.world.run(job)
            self.world.check()

    @rule(really=_rarely, succeeds=_mostly)
    def everything_ends(self, really: bool, succeeds: bool) -> None:
        if really:
            self.world.end_everything(succeeds)

    def teardown(self) -> None:
        if sys.exc_info()[0] is None:  # after a failure nothing more is to be learnt
            self.world.end_everything()

    # -- checks ----------------------------------------------------------------------------------------------

    @invariant()
    def promises_are_kept(self) -> None:
        self.world.check()

    def _request(self, number: int) -> Request:
        requests: list[Any] = list(self.world.requests.values())
        chosen: Request = requests[number % len(requests)]
        return chosen

    def _job(self, number: int) -> Job:
        jobs = self.world.jobs
        return jobs[number % len(jobs)]

    def _jobs_of(self, request: Request) -> list[Job]:
        return [job for job in self.world.jobs if job.request is request]
