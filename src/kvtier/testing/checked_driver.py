"""A request-level driver whose every answer is held against an independent account, with workers that move real keys.

Use it under a state machine, a simulation or by hand: each method is one thing that an engine or a worker may do, and
raises AssertionError as soon as the manager or the driver breaks a promise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvtier.interfaces import BreakerState, OffloadingManager, Residency
from kvtier.keys import OffloadKey
from kvtier.manager import LoadPlan, RequestDriver, StorePlan
from kvtier.testing.grants import Grant, check_gauges, check_grant
from kvtier.testing.hint_ledger import HintLedger
from kvtier.testing.keyed_pool import KeyedPool
from kvtier.testing.ledger import Job, Request, SlotLedger
from kvtier.testing.promises import Promises

_SHORTEST_LOAD_LIMIT_S = 1.0
_LATEST_REAP = 1.125


class CheckedDriver:
    """One manager of `capacity_blocks` slots, a `RequestDriver` over it, its engine and `num_ranks` workers.

    Every method is O(keys and jobs there are), and some are quadratic in them: for a few dozen of each.
    """

    def __init__(
        self, manager: OffloadingManager, capacity_blocks: int, promises: Promises | None = None, num_ranks: int = 1
    ) -> None:
        self.manager = manager
        self.promises = promises or Promises()
        self.num_ranks = num_ranks
        self.driver = RequestDriver(manager, num_ranks)
        self.ledger = SlotLedger(capacity_blocks)
        self.hints = HintLedger(self.promises.max_kept)
        self.requests: dict[str, Request] = {}
        self.ended: list[int] = []
        """Ids of the latest jobs that have ended."""
        self.now_s = 0.0
        self.counts: Counter[str] = Counter()
        """What the manager's own counters must show, under their names there."""
        self._known_keys: set[OffloadKey] = set()
        self._pool = KeyedPool()
        self._num_unknown_reports = 0
        self._asked: Counter[OffloadKey] = Counter()
        """At most how often each key can have been counted by a reuse filter."""
        self._offered: Counter[OffloadKey] = Counter()
        """How many requests have offered each key for storing: at least so often it was counted."""
        self.advance(100.0)

    @property
    def may_be_shut(self) -> bool:
        """The tier's circuit breaker is not closed: answers may be that nothing is there and nothing is stored."""
        return self.manager.get_stats().breaker_state is not BreakerState.CLOSED

    @property
    def jobs(self) -> list[Job]:
        """Open jobs, oldest first."""
        return list(self.ledger.jobs.values())

    # -- time and requests -----------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Time passes (negative: somebody reads a clock that lags)."""
        self.driver.advance(self.now_s + seconds)
        self.now_s = max(self.now_s, self.now_s + seconds)
        timeout_s = self.promises.store_timeout_s
        if timeout_s is not None:
            for key, job in self.ledger.in_flight().items():
                self._note_if_reaped(key, job, self.now_s - job.since_s, timeout_s)

    def _note_if_reaped(self, key: OffloadKey, job: Job, age_s: float, timeout_s: float) -> None:
        if age_s < timeout_s:
            return
        # a breaker hides what is in flight; the counts, which are compared afterwards, do not follow it
        if self.may_be_shut or self.manager.residency(key) is not Residency.ARRIVING:
            self.ledger.reaped(job, key)
        else:
            assert age_s <= timeout_s * _LATEST_REAP, f"the store of {key!r} is {age_s} s old and was not reaped"

    def add_request(
        self, req_id: str, keys: Sequence[OffloadKey], kv_transfer_params: dict[str, object] | None = None
    ) -> Request:
        """A new request with this prompt, and with these hints."""
        self.driver.add_request(req_id, keys, kv_transfer_params)
        request = Request(req_id, list(keys), hints=self.hints.read(kv_transfer_params))
        self.requests[req_id] = request
        self._known_keys.update(keys)
        return request

    def extend_request(self, request: Request, keys: Sequence[OffloadKey]) -> None:
        """It has generated more blocks."""
        self.driver.extend_request(request.req_id, keys)
        request.keys += keys
        self._known_keys.update(keys)

    def finish(self, request: Request, cancels_jobs: bool = False) -> None:
        """It has ended, or was aborted at any point. Its jobs go on, or do so only where they have begun."""
        self.driver.finish(request.req_id)
        self.hints.note_finished(request.hints, request.accessed)
        del self.requests[request.req_id]
        for job in self._jobs_of(request):
            job.source_gone = job.source_gone or cancels_jobs

    def preempt(self, request: Request) -> None:
        """The engine takes its blocks. Copies from them that have not begun never will."""
        self.driver.preempt(request.req_id)
        request.num_computed = request.num_offered = 0
        for job in self._jobs_of(request):
            job.source_gone = True

    def may_preempt(self, request: Request) -> bool:
        """An engine takes no blocks that a transfer still reads or writes."""
        return not any(not job.is_store or job.begun - job.copied for job in self._jobs_of(request))

    # -- look-up and loads -----------------------------------------------------------------------------------

    def match(self, request: Request, num_engine_blocks: int = 0) -> int | None:
        """Asks what can be loaded, and checks the answer and whether the request may be made to wait."""
        ledger = self.ledger
        wanted = request.keys[num_engine_blocks:]
        num_ready = next((at for at, key in enumerate(wanted) if key not in ledger.present), len(wanted))
        in_flight, being_loaded = ledger.in_flight(), ledger.being_loaded()
        arriving = wanted[num_ready] if num_ready < len(wanted) and wanted[num_ready] in in_flight else None
        waits_for_load = not being_loaded.isdisjoint(wanted[:num_ready])
        may_wait = bool(being_loaded) or (not request.declined and (arriving or request.stuck_on in in_flight))
        if self._deadline_passed(request):
            may_wait = waits_for_load = False
            arriving = None
        self._asked.update(wanted[: num_ready + 1])

        found = self.driver.match(request.req_id, num_engine_blocks)
        if found is None:
            assert may_wait, f"{request.req_id} waits: deadline {request.deadline_at_s}, now {self.now_s}"
            if request.stuck_on not in in_flight:
                request.stuck_on = arriving
            if request.deadline_at_s is None and self.promises.deadline_s is not None:
                request.deadline_at_s = self.now_s + self.promises.deadline_s
            return None
        if found == 0 and self.may_be_shut:
            return found
        if arriving and not request.declined:
            assert self.promises.declines_waits, f"{request.req_id} was told {found} while {arriving!r} is on its way"
            request.declined = True
        assert not waits_for_load, f"{request.req_id} was told {found} while another request loads what it wants"
        behind_load = found == 0 and bool(being_loaded)
        assert found == num_ready or behind_load, f"{request.req_id} was told {found}; {num_ready} are ready"
        return found

    def load(self, request: Request, first_block: int, num_blocks: int) -> Job:
        """Loads some of what `match` has just found."""
        keys = request.keys[first_block : first_block + num_blocks]
        twice = self.ledger.being_loaded().intersection(keys)
        assert not twice, f"found for loading while another request loads it: {twice}"
        plan = self.driver.plan_load(request.req_id, first_block, num_blocks)
        assert (plan.req_id, plan.first_block) == (request.req_id, first_block)
        job = self._job_of(plan, request, keys, is_store=False)
        self._check_load_limit(request, job)
        self.ledger.begin(job)
        request.accessed.update(keys)
        self.hints.note_access(request.hints, keys)
        request.num_offered = max(request.num_offered, first_block + num_blocks)
        return job

    # -- stores ----------------------------------------------------------------------------------------------

    def store(self, request: Request, num_computed: int) -> Job | None:
        """The engine has computed the leading `num_computed` blocks: the new ones are offered."""
        ledger = self.ledger
        request.num_computed = max(request.num_computed, num_computed)
        offered = request.keys[request.num_offered : num_computed]
        request.num_offered += len(offered)
        self._note_offers(request, offered)
        visible = ledger.residency()
        self.hints.sync(visible)
        new = [key for key in offered if key not in visible]
        spared = {*offered, *request.accessed} if self.promises.stores_prefixes else set(offered)
        num_free, evictable = ledger.num_free(), ledger.evictable(spared) - self.hints.kept
        least_room = num_free + len(evictable - self.hints.maybe)

        plan = self.driver.plan_store(request.req_id, num_computed)
        stored = [] if plan is None else [request.keys[block] for block in plan.blocks]
        evicted = self._evicted()
        wanted = [key for key in new if key in stored or self._must_admit(key)] if not request.hints.no_store else []
        allowed = {key for key in new if self._asked[key] >= self.promises.store_threshold}
        grant = Grant(stored, wanted, allowed, num_free, num_free + len(evictable), least_room, self.may_be_shut)
        check_grant(request, self.promises, grant)
        assert evicted <= evictable, f"evicted what is read, kept, or the request's own: {evicted - evictable}"
        needed = max(0, len(stored) - num_free)
        assert len(evicted) == needed, f"evicted {len(evicted)} blocks for {len(stored)} with {num_free} slots free"
        ledger.evicted(evicted)
        self.counts["evicted_blocks"] += len(evicted)
        shed = wanted[len(stored) :]
        before_cut = offered[: offered.index(shed[0])] if shed else offered
        there = [key for key in before_cut if key in visible or key in stored]
        request.accessed.update(there)
        self.hints.note_access(request.hints, there)
        if plan is None:
            return None
        assert plan.req_id == request.req_id
        job = self._job_of(plan, request, stored, is_store=True)
        ledger.begin(job)
        return job

    def _evicted(self) -> set[OffloadKey]:
        """What the manager has just evicted, by what it tells or, if it tells nothing, by what has gone."""
        if not self.promises.events:
            return {key for key in self.ledger.present if self.manager.residency(key) is not Residency.READY}
        told = list(self.manager.take_events())
        assert all(event.removed for event in told), f"events of a store that has only begun: {told}"
        return {key for event in told for key in event.keys}

    def _note_offers(self, request: Request, keys: Sequence[OffloadKey]) -> None:
        self._asked.update(keys)
        self._offered.update(key for key in keys if key not in request.offered)
        request.offered.update(keys)

    def _must_admit(self, key: OffloadKey) -> bool:
        return self._offered[key] >= self.promises.store_threshold

    # -- workers ---------------------------------------------------------------------------------------------

    def begin_copy(self, job: Job, rank: int) -> bool:
        """A worker starts to move bytes; False if it must not any more: it can only report a failure then."""
        if job.dead or rank not in job.ranks_pending:
            return False
        if rank in job.begun:
            return True
        too_late = job.begin_by_s is not None and self.now_s > job.begin_by_s
        if job.source_gone or too_late:
            return False
        job.begun.add(rank)
        if job.is_store:
            self._pool.begin_write(job.slots, rank)
        else:
            self._pool.read(job.slots, rank, job.keys)
        return True

    def finish_copy(self, job: Job, rank: int) -> None:
        """A worker that has begun moves the last byte."""
        if job.dead:
            return
        assert rank in job.begun
        if job.is_store:
            self._pool.finish_write(job.slots, rank, job.keys)
        else:
            self._pool.read(job.slots, rank, job.keys)
        job.copied.add(rank)

    def report(self, job: Job, rank: int) -> None:
        """A rank says that it is done: with success if it has copied everything."""
        ledger = self.ledger
        failed = rank not in job.copied
        job.ranks_pending.discard(rank)
        job.failed = job.failed or failed
        num_late = ledger.num_late(job)
        record = self.driver.report(job.job_id, failed=failed, rank=rank)
        if job.ranks_pending:
            assert record is None, f"job {job.job_id} has ended without rank {job.ranks_pending}"
            return
        assert record is not None, f"job {job.job_id} has not ended although every rank has reported"
        assert (record.is_store, record.failed) == (job.is_store, job.failed)
        changed = ledger.end(job)
        self.counts["late_completions"] += num_late
        if job.is_store:
            self.counts["stored_blocks"] += len(changed)
            self._expect_events(stored=changed)
        else:
            if job.failed and self.promises.deadline_s is not None and job.begin_by_s is not None:
                deadline_at_s = job.request.deadline_at_s  # waiting for a load that fails counts
                job.request.deadline_at_s = min(job.begin_by_s, deadline_at_s or job.begin_by_s)
            self._expect_events(removed=changed)
            if job.failed and self.requests.get(job.request.req_id) is job.request:
                job.request.num_computed = job.request.num_offered = 0
        self.ended = [*self.ended[-7:], job.job_id]

    def report_again(self, job_id: int, rank: int, failed: bool) -> None:
        """A report that was delivered twice, of a job that has ended or of a rank that has reported."""
        self._num_unknown_reports += 1
        assert self.driver.report(job_id, failed=failed, rank=rank) is None
        assert self.driver.jobs.num_unknown_reports == self._num_unknown_reports
        self._expect_events()

    def run_rank(self, job: Job, rank: int, succeeds: bool = True) -> None:
        """One rank from wherever it is to its report."""
        if rank not in job.ranks_pending:
            return
        if succeeds and rank not in job.copied and self.begin_copy(job, rank):
            self.finish_copy(job, rank)
        self.report(job, rank)

    def run(self, job: Job, succeeds: bool = True) -> None:
        """Every rank of a job."""
        for rank in sorted(job.ranks_pending):
            self.run_rank(job, rank, succeeds)

    # -- the whole tier --------------------------------------------------------------------------------------

    def reset(self) -> None:
        """The cache is emptied; running requests and open jobs go on."""
        self.driver.reset()
        gone = self.ledger.reset()
        for request in self.requests.values():
            request.num_offered = 0
        self._expect_events(removed=gone)
        if not self.promises.fences_resets:
            for job in self.jobs:
                self.run(job)

    def workers_die(self, loses_memory: bool) -> None:
        """Every worker is gone and others take over. What was open never moves again; its end may be told late."""
        if loses_memory:
            self._pool.lose_everything()
            self.reset()
        for job in self.jobs:
            job.dead = True
        self.ledger.writers_died()
        self.manager.writers_died()

    def end_everything(self, succeeds: bool = True) -> None:
        """All requests finish and all jobs end: then nobody holds anything."""
        for request in list(self.requests.values()):
            self.finish(request)
        for job in self.jobs:
            self.run(job, succeeds)
        self.check()
        stats = self.manager.get_stats()
        held = (stats.in_flight_blocks, stats.pinned_blocks, stats.condemned_blocks)
        assert held == (0, 0, 0), f"in flight, pinned, condemned at the end: {held}"
        assert not len(self.driver.jobs)

    # -- checks ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Everything that must be so between any two calls."""
        ledger, manager = self.ledger, self.manager
        manager.check_invariants()
        expected = ledger.residency()
        hides = self.may_be_shut
        for key in self._known_keys:
            found, wanted = manager.residency(key), expected.get(key, Residency.ABSENT)
            if found is not Residency.ABSENT or not hides:
                assert found is wanted, f"{key!r} is {found.value}; it must be {wanted.value}"
        stats = manager.get_stats()
        check_gauges(stats, ledger)
        self.hints.sync(expected)
        for name, shown in stats.counters.items():
            if name in ("stored_blocks", "evicted_blocks", "late_completions"):
                assert shown == self.counts[name], f"{name} is {shown}; {self.counts[name]} have happened"
        assert ledger.num_free() >= 0, "more blocks than slots"
        for rank in range(self.num_ranks):
            self._pool.read(list(ledger.present.values()), rank, list(ledger.present))
        for request in self.requests.values():
            open_jobs = {job.job_id for job in self._jobs_of(request)}
            assert self.driver.open_jobs(request.req_id) == open_jobs

    def _check_load_limit(self, request: Request, job: Job) -> None:
        """A load waits to begin no longer than its request may wait."""
        deadline_s = self.promises.deadline_s
        if not self.promises.load_limits or deadline_s is None:
            return
        deadline_at_s = self.now_s + deadline_s if request.deadline_at_s is None else request.deadline_at_s
        latest_s = max(deadline_at_s, self.now_s + _SHORTEST_LOAD_LIMIT_S)
        assert job.begin_by_s is not None, "a load without a time by which it must begin"
        assert self.now_s <= job.begin_by_s <= latest_s, f"to begin by {job.begin_by_s}, between now and {latest_s}"

    def _deadline_passed(self, request: Request) -> bool:
        deadline_s = self.promises.deadline_s
        if deadline_s is None:
            return False
        return deadline_s == 0 or (request.deadline_at_s is not None and self.now_s >= request.deadline_at_s)

    def _expect_events(
        self, stored: Sequence[OffloadKey] = (), removed: Sequence[OffloadKey] | set[OffloadKey] = ()
    ) -> None:
        """What happened since the last call is told to those who mirror the contents, if the manager tells anything."""
        if not self.promises.events:
            return
        told = list(self.manager.take_events())
        for name, keys in (("stored", stored), ("removed", removed)):
            shown = [key for event in told if event.removed == (name == "removed") for key in event.keys]
            assert sorted(shown) == sorted(keys), f"events say {name}: {shown}; it was {sorted(keys)}"

    def _jobs_of(self, request: Request) -> list[Job]:
        return [job for job in self.ledger.jobs.values() if job.request is request]

    def _job_of(self, plan: LoadPlan | StorePlan, request: Request, keys: list[OffloadKey], is_store: bool) -> Job:
        spec = plan.spec
        slots = spec.block_ids.tolist()
        assert len(slots) == len(keys)
        assert spec.medium(), "a spec without a medium"
        ranks = set(range(self.num_ranks))
        return Job(plan.job_id, request, is_store, keys, slots, self.now_s, ranks, spec.begin_by_s)
