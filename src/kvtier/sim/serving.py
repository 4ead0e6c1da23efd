"""An engine in simulated time around the production manager: who waits for what, and how long to the first token.

The engine computes one prompt at a time, at a fixed rate; requests are taken in order of arrival. A request whose
prefix is in the cache is loaded first, while others compute; one whose prefix is on its way is deferred and asked
again, within the manager's deadline. What was computed is stored while the engine goes on. Decoding takes no time
from other requests: it only says when a request ends.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from kvtier.interfaces import OffloadingManager, ReqContext
from kvtier.keys import OffloadKey
from kvtier.manager import CPUOffloadingManager, RequestDriver, TieredOffloadingManager
from kvtier.sim.clock import SimulatedClock
from kvtier.sim.tier import SimulatedTier, TierModel
from kvtier.sim.traces import Trace
from kvtier.sim.transport import LinkSpeed, SimulatedTransport, TransportJob
from kvtier.tier_interfaces import TierStats
from kvtier.transfers.jobs import TransferOutcome

LOADS_AHEAD = 4
"""So many requests at the front of the queue may be loaded while the engine computes another."""
STEP_S = 0.001
"""An engine that has nothing to compute asks again for a request that waits after so long."""
_PROGRESS_EVERY = 200


@dataclass(frozen=True, slots=True)
class ServingModel:
    """What the engine and the tier can do. Rates are of the whole engine."""

    prefill_tokens_per_s: float
    block_bytes: int
    load_speed: LinkSpeed
    store_speed: LinkSpeed
    decode_tokens_per_s: float = 50.0
    """Of one request: how long it holds its place after its first token."""
    deadline_s: float = 5.0
    """The manager's: how long a request may wait for a block on its way."""
    lower_tiers: tuple[TierModel, ...] = ()
    """Behind RAM, the fastest first."""


@dataclass(slots=True)
class ServingResult:
    """What happened, one entry a request, in order of arrival."""

    ttft_s: npt.NDArray[np.float64]
    """(requests,): from arrival to the end of the prefill."""
    engine_blocks: npt.NDArray[np.int64]
    """(requests,): leading blocks found in the engine's own cache."""
    loaded_blocks: npt.NDArray[np.int64]
    """(requests,): blocks behind these that were loaded from RAM."""
    promoted_blocks: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    """Medium -> (requests,): those of the loaded blocks that a lower tier had brought up for this very request."""
    num_deferred: int = 0
    """Requests that were told to wait for a block on its way."""
    num_failed_loads: int = 0
    """Loads that did not begin in time and were computed instead."""
    busy_s: float = 0.0
    """The engine computed prompts for so long."""
    makespan_s: float = 0.0
    """From the first arrival to the last first token."""
    transfers: list[tuple[float, bool, int]] = field(default_factory=list)
    """(end in seconds after the first arrival, whether a store, bytes) of every transfer to and from RAM."""
    tier_stats: list[TierStats] = field(default_factory=list)
    """Of the lower tiers, at the end."""
    counters: dict[str, int] = field(default_factory=dict)
    """The manager's, at the end."""

    def moved_bytes(self, stores: bool) -> int:
        """Bytes stored to the tier, or loaded from it."""
        return sum(num_bytes for _, is_store, num_bytes in self.transfers if is_store is stores)


class Serving:
    """One run of a trace. `ram` None: no tier, everything that the engine itself has lost is computed again.

    With lower tiers in the model `ram` is in front of them, in a `TieredOffloadingManager`.
    """

    def __init__(
        self,
        trace: Trace,
        model: ServingModel,
        ram: CPUOffloadingManager | None,
        engine_cache: OffloadingManager | None = None,
    ) -> None:
        num = len(trace.requests)
        self._trace = trace
        self._model = model
        self._clock = SimulatedClock()
        self._tiered: TieredOffloadingManager | None = None
        manager: OffloadingManager | None = ram
        if ram is not None and model.lower_tiers:
            manager = self._tiered = self._with_lower_tiers(ram)
        self._driver = RequestDriver(manager) if manager is not None else None
        self._engine_cache = engine_cache
        self._engine_contexts: dict[int, ReqContext] = {}
        self._transport = SimulatedTransport(
            self._clock,
            model.load_speed,
            model.store_speed,
            num_lanes=1,
            slice_bytes=model.block_bytes,
            on_outcome=self._transfer_ended,
        )
        self._arrivals_s = [
            (request.timestamp_ms - trace.requests[0].timestamp_ms) / 1000 for request in trace.requests
        ]
        self._waiting: deque[int] = deque()
        self._loaded: list[int] = []
        """Heap of requests whose load has ended."""
        self._loads: dict[int, int] = {}
        """Job -> the request that it loads for."""
        self._busy = False
        self._newly_deferred = False
        self._deferred_until_s: dict[int, float] = {}
        self._wake_at_s = math.inf
        self.result = ServingResult(np.full(num, math.nan), np.zeros(num, np.int64), np.zeros(num, np.int64))
        self.result.promoted_blocks = {tier.medium: np.zeros(num, np.int64) for tier in model.lower_tiers}

    def _with_lower_tiers(self, ram: CPUOffloadingManager) -> TieredOffloadingManager:
        model = self._model
        tiers = [SimulatedTier(self._clock, tier, model.block_bytes, self._tier_moved) for tier in model.lower_tiers]
        tiered = TieredOffloadingManager(ram, tiers)
        tiered.tell_recompute_rate(model.prefill_tokens_per_s / self._trace.block_tokens)
        return tiered

    def run(self, on_progress: Callable[[int], object] = lambda num_requests: None) -> ServingResult:
        """Everything from the first arrival until all is quiet. O(events x log events + blocks)."""
        self._on_progress = on_progress
        self._num_started = 0
        self._clock.at(0.0, partial(self._arrive, 0))
        while self._clock.run_next():
            pass
        on_progress(self._num_started % _PROGRESS_EVERY)
        if self._driver is not None:
            self.result.counters = dict(self._driver.manager.get_stats().counters)
            self.result.num_deferred = self.result.counters.get("deferred_requests", 0)
        if self._tiered is not None:
            self.result.tier_stats = self._tiered.tier_stats()
        return self.result

    # -- requests --------------------------------------------------------------------------------------------

    def _arrive(self, number: int) -> None:
        if number + 1 < len(self._arrivals_s):
            self._clock.at(self._arrivals_s[number + 1], partial(self._arrive, number + 1))
        if self._driver is not None:
            self._driver.add_request(str(number), self._trace.keys[number])
        self._waiting.append(number)
        if not self._busy or len(self._waiting) <= LOADS_AHEAD:
            self._schedule()

    def _schedule(self) -> None:
        """Begins what can begin: loads for the requests in front, and one prefill."""
        if self._driver is not None:
            self._driver.advance(self._clock.now_s)
        if not self._busy and self._loaded:
            self._prefill(heapq.heappop(self._loaded))
        passed_over: list[int] = []
        while self._waiting:
            number = self._waiting.popleft()
            if not self._begin(number):
                passed_over.append(number)
                if self._busy and len(passed_over) + len(self._loads) + len(self._loaded) >= LOADS_AHEAD:
                    break
        self._waiting.extendleft(reversed(passed_over))
        if not self._busy and self._deferred_until_s:
            # nothing else may ever happen: the next deadline is a reason to ask again
            wake_at_s = min(self._deferred_until_s.values())
            if self._clock.now_s < wake_at_s < self._wake_at_s:
                self._wake_at_s = wake_at_s
                self._clock.at(wake_at_s, self._ask_again)
        if self._driver is not None:
            self._driver.manager.on_schedule_end()
        if self._newly_deferred:
            # what is on its way for them is decided at the end of the step
            self._newly_deferred = False
            self._clock.after(STEP_S, self._schedule)

    def _ask_again(self) -> None:
        self._wake_at_s = math.inf
        if not self._busy:
            self._schedule()

    def _begin(self, number: int) -> bool:
        """Begins the request's load or prefill; False: it has to wait."""
        in_engine = self._find_in_engine(number)
        num_ready: int | None = 0
        if self._driver is not None:
            num_ready = self._driver.match(str(number), in_engine)
        if num_ready is None:
            if number not in self._deferred_until_s:
                self._deferred_until_s[number] = self._clock.now_s + self._model.deadline_s
                self._newly_deferred = self._tiered is not None
            return False
        self._deferred_until_s.pop(number, None)
        if num_ready and len(self._loads) < LOADS_AHEAD and self._driver is not None:
            plan = self._driver.plan_load(str(number), in_engine, num_ready)
            self._loads[plan.job_id] = number
            self._note_promoted(number, plan.spec.keys)
            self.result.engine_blocks[number] = in_engine
            num_bytes = num_ready * self._model.block_bytes
            self._transport.submit(TransportJob(plan.job_id, False, num_bytes, plan.spec.begin_by_s))
            return True
        if self._busy or num_ready:
            return False
        self.result.engine_blocks[number] = in_engine
        self._prefill(number)
        return True

    def _prefill(self, number: int) -> None:
        request = self._trace.requests[number]
        found = int(self.result.engine_blocks[number] + self.result.loaded_blocks[number])
        # an engine computes at least the last token itself
        num_tokens = max(1, request.input_length - found * self._trace.block_tokens)
        duration_s = num_tokens / self._model.prefill_tokens_per_s
        self._busy = True
        self.result.busy_s += duration_s
        self._clock.after(duration_s, partial(self._prefilled, number))
        self._num_started += 1
        if self._num_started % _PROGRESS_EVERY == 0:
            self._on_progress(_PROGRESS_EVERY)

    def _prefilled(self, number: int) -> None:
        now_s = self._clock.now_s
        self._busy = False
        self.result.ttft_s[number] = now_s - self._arrivals_s[number]
        self.result.makespan_s = max(self.result.makespan_s, now_s)
        self._keep_in_engine(number)
        if self._driver is not None:
            self._driver.advance(now_s)
            plan = self._driver.plan_store(str(number), len(self._trace.keys[number]))
            if plan is not None:
                num_bytes = len(plan.blocks) * self._model.block_bytes
                self._transport.submit(TransportJob(plan.job_id, True, num_bytes))
            decode_s = self._trace.requests[number].output_length / self._model.decode_tokens_per_s
            self._clock.after(decode_s, partial(self._driver.finish, str(number)))
        self._schedule()

    # -- transfers -------------------------------------------------------------------------------------------

    def _note_promoted(self, number: int, keys: Sequence[OffloadKey]) -> None:
        if self._tiered is not None and self._driver is not None:
            context = self._driver.context_of(str(number))
            for key in keys:
                medium = self._tiered.brought_up(key, context)
                if medium is not None:
                    self.result.promoted_blocks[medium][number] += 1

    def _tier_moved(self) -> None:
        """A job between RAM and a lower tier has ended: the engine takes note in its next step."""
        self._clock.after(0.0, self._schedule)

    def _transfer_ended(self, outcome: TransferOutcome) -> None:
        assert self._driver is not None
        if outcome.success:
            self.result.transfers.append((self._clock.now_s, outcome.is_store, outcome.num_bytes))
        record = self._driver.report(outcome.job_id, failed=not outcome.success)
        number = self._loads.pop(outcome.job_id, None)
        if number is not None and record is not None:
            if outcome.success:
                self.result.loaded_blocks[number] = len(record.spec.keys)
            else:
                self.result.num_failed_loads += 1
            heapq.heappush(self._loaded, number)
        if not self._busy or number is not None:
            self._schedule()
        else:
            self._driver.manager.on_schedule_end()

    # -- the engine's own cache ------------------------------------------------------------------------------

    def _find_in_engine(self, number: int) -> int:
        if self._engine_cache is None:
            return 0
        return self._engine_cache.lookup_prefix(self._trace.keys[number], ReqContext(str(number))).num_ready

    def _keep_in_engine(self, number: int) -> None:
        cache = self._engine_cache
        if cache is None:
            return
        keys: Sequence[OffloadKey] = self._trace.keys[number]
        context = ReqContext(str(number))
        cache.on_new_request(context)
        cache.touch(keys, context)
        output = cache.prepare_store_prefix(keys, context)
        cache.complete_store(output.keys_to_store, context, spec=output.store_spec)
        cache.on_request_finished(context)


def serve_with_hits(trace: Trace, model: ServingModel, hit_blocks: npt.NDArray[np.int64]) -> ServingResult:
    """The same engine with a cache of which only the hits are known (an offline optimum), nothing ever in flight.

    `hit_blocks` is (requests,): each is loaded before its request's prefill begins. O(requests).
    """
    num = len(trace.requests)
    result = ServingResult(np.zeros(num), np.zeros(num, np.int64), hit_blocks.astype(np.int64))
    start_ms = trace.requests[0].timestamp_ms
    free_at_s = 0.0
    for number, request in enumerate(trace.requests):
        arrival_s = (request.timestamp_ms - start_ms) / 1000
        num_bytes = int(hit_blocks[number]) * model.block_bytes
        loaded_at_s = arrival_s
        if num_bytes:
            loaded_at_s += model.load_speed.latency_s + num_bytes / model.load_speed.bytes_per_s
            result.transfers.append((loaded_at_s, False, num_bytes))
        num_tokens = max(1, request.input_length - int(hit_blocks[number]) * trace.block_tokens)
        prefill_s = num_tokens / model.prefill_tokens_per_s
        free_at_s = max(free_at_s, loaded_at_s) + prefill_s
        result.ttft_s[number] = free_at_s - arrival_s
        result.busy_s += prefill_s
    result.makespan_s = free_at_s
    return result
