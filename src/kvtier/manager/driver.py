"""A request-level driver over a manager, for engines that are not vLLM and for the simulator.

The engine tells it of requests, asks what can be loaded, plans loads and stores, and reports what the workers
say. The driver adds what every engine needs around a manager: no block is loaded twice at once, a deferred request
is asked again at O(1), and jobs end in the manager whatever becomes of their request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from kvtier.errors import ManagerUsageError
from kvtier.interfaces import CPULoadStoreSpec, OffloadingManager, ReqContext, Residency
from kvtier.keys import OffloadKey
from kvtier.manager.jobs import JobTable, TransferRecord


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Copy slot `spec.block_ids[i]` into the engine's block `first_block + i` of the request."""

    job_id: int
    req_id: str
    first_block: int
    spec: CPULoadStoreSpec


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Copy the engine's block `blocks[i]` of the request into slot `spec.block_ids[i]`."""

    job_id: int
    req_id: str
    blocks: list[int]
    spec: CPULoadStoreSpec


@dataclass(slots=True)
class _Request:
    context: ReqContext
    keys: list[OffloadKey]
    num_offered: int = 0
    behind: OffloadKey | None = None
    """The key of another request's load that this request waits for."""
    jobs: set[int] = field(default_factory=set)


class RequestDriver:
    """Drives one manager from one thread. `num_ranks` workers each report every job.

    Unknown request ids are a ManagerUsageError; everything else that traffic can do is answered.
    """

    def __init__(self, manager: OffloadingManager, num_ranks: int = 1) -> None:
        self.manager = manager
        self.jobs = JobTable(manager, num_ranks)
        self._requests: dict[str, _Request] = {}
        self._being_loaded: dict[OffloadKey, int] = {}
        self._next_job_id = 0

    def advance(self, now_s: float) -> None:
        """Tells the manager the time. Call it first in every step."""
        self.manager.advance(now_s)

    # -- requests --------------------------------------------------------------------------------------------

    def add_request(
        self, req_id: str, keys: Sequence[OffloadKey], kv_transfer_params: Mapping[str, Any] | None = None
    ) -> None:
        """A new request whose prompt has these block keys, shallowest first."""
        if req_id in self._requests:
            raise ManagerUsageError(f"request {req_id!r} is known already")
        context = ReqContext(req_id, kv_transfer_params)
        self._requests[req_id] = _Request(context, list(keys))
        self.manager.on_new_request(context)

    def extend_request(self, req_id: str, keys: Iterable[OffloadKey]) -> None:
        """The request has grown (it generates): more keys, deeper than those before."""
        self._request(req_id).keys.extend(keys)

    def match(self, req_id: str, num_engine_blocks: int = 0) -> int | None:
        """How many blocks can be loaded behind the `num_engine_blocks` leading ones that the engine has itself.

        None: not known yet, ask again in the next step (bounded by the request's deadline). O(1) while the block
        that the request waits for is still on its way.
        """
        request = self._request(req_id)
        manager, context = self.manager, request.context
        if manager.still_waiting(context):
            return None
        if request.behind in self._being_loaded:
            return None if manager.defer(context) else 0
        request.behind = None
        wanted = request.keys[num_engine_blocks:]
        found = manager.lookup_prefix(wanted, context)
        if found.stopped_by in (Residency.ARRIVING, Residency.UNKNOWN):
            return None
        if self._being_loaded:
            hits = wanted[: found.num_ready]
            request.behind = next(filter(self._being_loaded.__contains__, hits), None)
            if request.behind is not None:
                return None if manager.defer(context) else 0
        return found.num_ready

    def plan_load(self, req_id: str, first_block: int, num_blocks: int) -> LoadPlan:
        """Pins and plans the load of blocks that `match` has just found."""
        request = self._request(req_id)
        keys = request.keys[first_block : first_block + num_blocks]
        spec = cast(CPULoadStoreSpec, self.manager.prepare_load(keys, request.context))
        for key in keys:
            self._being_loaded[key] = self._being_loaded.get(key, 0) + 1
        request.num_offered = max(request.num_offered, first_block + num_blocks)
        return LoadPlan(self._submit(request, spec, is_store=False), req_id, first_block, spec)

    def plan_store(self, req_id: str, num_computed_blocks: int) -> StorePlan | None:
        """Plans the store of what the engine has computed since the last call, or None if nothing is to be done.

        Blocks that do not fit are shed, deepest first: the call never has to be repeated.
        """
        request = self._request(req_id)
        first = request.num_offered
        keys = request.keys[first:num_computed_blocks]
        if not keys:
            return None
        request.num_offered = first + len(keys)
        self.manager.count_offers(keys, request.context)
        output = self.manager.prepare_store_prefix(keys, request.context)
        if not output.keys_to_store:
            return None
        position = {key: first + i for i, key in enumerate(keys)}
        spec = cast(CPULoadStoreSpec, output.store_spec)
        blocks = [position[key] for key in output.keys_to_store]
        return StorePlan(self._submit(request, spec, is_store=True), req_id, blocks, spec)

    def preempt(self, req_id: str) -> None:
        """The engine took the request's blocks: what it computes again is offered again."""
        self._request(req_id).num_offered = 0

    def finish(self, req_id: str) -> None:
        """The request has finished or was aborted. Its open jobs still end by `report`."""
        request = self._requests.pop(req_id, None)
        if request is not None:
            self.manager.on_request_finished(request.context)

    def open_jobs(self, req_id: str) -> set[int]:
        """Ids of the request's jobs that have not ended. The caller owns the set."""
        return set(self._request(req_id).jobs)

    def context_of(self, req_id: str) -> ReqContext:
        """The request's context in the manager. O(1)."""
        return self._request(req_id).context

    # -- workers ---------------------------------------------------------------------------------------------

    def report(
        self, job_id: int, num_ranks: int = 1, failed: bool = False, rank: int | None = None
    ) -> TransferRecord | None:
        """A worker is done with a job. Returns the job's record when the last rank has reported.

        With several ranks that report one by one, `rank` names the one: a report that comes twice then counts once.
        """
        record = self.jobs.report(job_id, num_ranks, failed, rank)
        if record is None:
            return None
        if not record.is_store:
            for key in record.spec.keys:
                self._being_loaded[key] -= 1
                if not self._being_loaded[key]:
                    del self._being_loaded[key]
        request = self._requests.get(record.req_context.req_id)
        if request is not None and request.context is record.req_context:
            request.jobs.discard(job_id)
            if record.failed and not record.is_store:
                request.num_offered = 0  # what it computes instead is not stored any more: it is offered again
        return record

    def reset(self) -> None:
        """Everything becomes absent; running requests offer their blocks again."""
        self.manager.reset_cache()
        for request in self._requests.values():
            request.num_offered = 0

    def _submit(self, request: _Request, spec: CPULoadStoreSpec, is_store: bool) -> int:
        job_id = self._next_job_id
        self._next_job_id += 1
        self.jobs.add(job_id, request.context, spec, is_store)
        request.jobs.add(job_id)
        return job_id

    def _request(self, req_id: str) -> _Request:
        try:
            return self._requests[req_id]
        except KeyError:
            raise ManagerUsageError(f"request {req_id!r} is not known, or has finished") from None
