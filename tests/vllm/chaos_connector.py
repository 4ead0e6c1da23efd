"""kvtier's connector with faults in its workers, and with a watch over how long its scheduler lets requests wait.

Loaded by `kv_connector_module_path`. Nothing goes wrong before `begin_faults`. What both sides have seen comes out
through the probes of `driven_engine.py`, as `scheduler_report` and `worker_report`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.engine.core import EngineCore

from kvtier.adapters.vllm import KVTierConnector
from kvtier.transfers.jobs import TransferJob, TransferOutcome


@dataclass
class Rates:
    """How often each fault strikes: of jobs, of copies, of reports."""

    stall_short: float = 0.10
    stall_medium: float = 0.04
    stall_long: float = 0.02
    fail_before: float = 0.06
    fail_halfway: float = 0.04
    delay_report: float = 0.15
    duplicate_report: float = 0.20


class FaultyTransfers:
    """Puts faults into one worker's transfers. What happens to a job depends on the seed and its id alone."""

    def __init__(self, transfers: Any) -> None:
        self._transfers = transfers
        self._poll = transfers.poll
        self._copy = transfers._copier
        self._lock = threading.Lock()
        self._calm = threading.Event()
        self._calm.set()
        self._seed = 0
        self._deadline_s = 0.0
        self._rates = Rates()
        self._num_copies = 0
        self._on_the_way: list[tuple[float, TransferOutcome]] = []
        self.dealt: Counter[str] = Counter()
        self.loads: dict[int, list[float | None]] = {}
        """Job -> for how long bytes were copied, when it was over, when that was told first."""
        transfers.before_copy = self._before_copy
        transfers.poll = self._poll_faultily
        transfers._copier = self

    def begin(self, seed: int, deadline_s: float) -> None:
        self._seed = seed
        self._deadline_s = deadline_s
        self._calm.clear()

    def end(self) -> None:
        """Nothing more goes wrong, and what stalls goes on."""
        self._calm.set()

    def _strikes(self, rng: Random, kind: str) -> bool:
        if self._calm.is_set() or rng.random() >= getattr(self._rates, kind):
            return False
        with self._lock:
            self.dealt[kind] += 1
        return True

    def _before_copy(self, job: TransferJob) -> None:
        """On a copy thread."""
        rng = Random(f"{self._seed} before {job.job_id}")
        if self._strikes(rng, "stall_short"):
            self._calm.wait(rng.uniform(0.005, 0.05))
        if self._strikes(rng, "stall_medium"):
            self._calm.wait(rng.uniform(0.2, 0.7) * self._deadline_s)
        if self._strikes(rng, "stall_long"):
            self._calm.wait(rng.uniform(1.2, 2.0) * self._deadline_s)
        if self._strikes(rng, "fail_before"):
            raise OSError("injected: before the copy")

    def copy(self, dst_addresses: np.ndarray, src_addresses: np.ndarray, sizes: np.ndarray) -> None:
        """On a copy thread: as the real copier, or half of it."""
        with self._lock:
            self._num_copies += 1
            rng = Random(f"{self._seed} copy {self._num_copies}")
        if self._strikes(rng, "fail_halfway"):
            half = len(sizes) // 2
            self._copy.copy(dst_addresses[:half], src_addresses[:half], sizes[:half])
            raise OSError("injected: halfway")
        self._copy.copy(dst_addresses, src_addresses, sizes)

    def _poll_faultily(self) -> list[TransferOutcome]:
        """On the engine's thread: some of what has ended is told later, some twice."""
        now_s = time.monotonic()
        for outcome in self._poll():
            rng = Random(f"{self._seed} report {outcome.job_id}")
            at_s = now_s
            if self._strikes(rng, "delay_report"):
                at_s += rng.uniform(0.005, 0.2)
            self._on_the_way.append((at_s, outcome))
            if self._strikes(rng, "duplicate_report"):
                self._on_the_way.append((at_s + rng.choice((0.0, 0.001, rng.uniform(0.01, 0.5))), outcome))
            if not outcome.is_store:
                self.loads[outcome.job_id] = [outcome.duration_s, now_s, None]
        arrived = [item for item in self._on_the_way if item[0] <= now_s or self._calm.is_set()]
        self._on_the_way = [item for item in self._on_the_way if item not in arrived]
        for _, outcome in arrived:
            load = self.loads.get(outcome.job_id)
            if load is not None and load[2] is None:
                load[2] = now_s
        return [outcome for _, outcome in sorted(arrived, key=lambda item: item[0])]


@dataclass
class LoadWait:
    """A request that waits for a load of its own. All times are of the one monotonic clock that all processes share."""

    req_id: str
    job_id: int
    since_s: float
    """When the request was first told to wait, or its first load was planned: once a request."""
    planned_s: float
    ended_s: float


@dataclass
class Waits:
    """How long the scheduler lets requests wait for the cache, seen from outside the connector."""

    first_s: dict[str, float] = field(default_factory=dict)
    """Request -> when it was first told to wait, or its first load was planned."""
    planned_s: dict[str, float] = field(default_factory=dict)
    job_ids: dict[str, int] = field(default_factory=dict)
    told_after_s: list[tuple[float, str]] = field(default_factory=list)
    """Every time a request was told to wait again: how long after the first time."""
    loads: list[LoadWait] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    """When each step began."""
    num_preempted: int = 0
    num_ended_in_a_load: int = 0

    def told_to_wait(self, req_id: str, asked_s: float) -> None:
        first_s = self.first_s.setdefault(req_id, time.monotonic())
        if first_s < asked_s:
            self.told_after_s.append((asked_s - first_s, req_id))

    def load_planned(self, req_id: str) -> None:
        now_s = time.monotonic()
        self.first_s.setdefault(req_id, now_s)
        self.planned_s[req_id] = now_s

    def load_ended(self, req_id: str) -> None:
        planned_s, job_id = self.planned_s.pop(req_id, None), self.job_ids.pop(req_id, None)
        if planned_s is not None and job_id is not None:
            self.loads.append(LoadWait(req_id, job_id, self.first_s[req_id], planned_s, time.monotonic()))

    def request_finished(self, req_id: str) -> None:
        self.num_ended_in_a_load += self.planned_s.pop(req_id, None) is not None
        self.job_ids.pop(req_id, None)


class ChaosConnector(KVTierConnector):
    """See the module."""

    in_this_process: dict[KVConnectorRole, ChaosConnector] = {}  # noqa: RUF012

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.in_this_process[role] = self
        self.waits = Waits()
        self.faults: FaultyTransfers

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        self.faults = FaultyTransfers(self._worker.transfers)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        asked_s = time.monotonic()
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if answer[0] is None:
            self.waits.told_to_wait(request.request_id, asked_s)
        return answer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            self.waits.load_planned(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self.waits.steps_s.append(time.monotonic())
        self.waits.num_preempted += len(scheduler_output.preempted_req_ids or ())
        meta = super().build_connector_meta(scheduler_output)
        self.waits.job_ids.update((job.req_id, job_id) for job_id, job in meta.load_jobs.items())
        return meta

    def update_connector_output(self, connector_output: Any) -> None:
        for req_id in connector_output.finished_recving or ():
            self.waits.load_ended(req_id)
        super().update_connector_output(connector_output)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        self.waits.request_finished(request.request_id)
        return super().request_finished_all_groups(request, block_ids)


# -- probes ----------------------------------------------------------------------------------------------------------


def call_in_worker(worker: object, function: str, arguments: list[Any]) -> Any:
    """A probe's way into a worker."""
    return globals()[function](*arguments)


def call_in_scheduler(core: object, function: str, arguments: list[Any]) -> Any:
    """A probe's way into the engine core."""
    return globals()[function](*arguments)


EngineCore.call_in_scheduler = call_in_scheduler


def begin_faults(seed: int, deadline_s: float) -> None:
    """In a worker: from now on things go wrong."""
    ChaosConnector.in_this_process[KVConnectorRole.WORKER].faults.begin(seed, deadline_s)


def end_faults() -> None:
    """In a worker: nothing more goes wrong."""
    ChaosConnector.in_this_process[KVConnectorRole.WORKER].faults.end()


def worker_report() -> dict[str, Any]:
    """In a worker: the faults that were dealt, and what became of each load."""
    connector = ChaosConnector.in_this_process[KVConnectorRole.WORKER]
    return {
        "dealt": dict(connector.faults.dealt),
        "loads": list(connector.faults.loads.items()),
        "num_repeated_reports": connector._worker.num_repeated_reports,
    }


def num_open() -> int:
    """In the scheduler: transfers and requests that are not over."""
    connector = ChaosConnector.in_this_process[KVConnectorRole.SCHEDULER]
    return len(connector._jobs or ()) + len(connector.scheduler._req_status)


def scheduler_report() -> dict[str, Any]:
    """In the scheduler, when nothing is open: all waiting, the counters and what is left. Recounts the books."""
    connector = ChaosConnector.in_this_process[KVConnectorRole.SCHEDULER]
    manager, waits = connector._manager, connector.waits
    manager.core.check_invariants()
    stats = manager.core.get_stats()
    assert connector._jobs is not None
    assert connector._kv_cache_manager is not None
    block_pool = connector._kv_cache_manager.block_pool
    return {
        "steps_s": waits.steps_s,
        "loads": [asdict(load) for load in waits.loads],
        "told_after_s": sorted(waits.told_after_s, reverse=True),
        "num_preempted": waits.num_preempted,
        "num_ended_in_a_load": waits.num_ended_in_a_load,
        "counters": {**stats.counters, **manager.counters},
        "left_over": {
            "pinned blocks": stats.pinned_blocks,
            "blocks in flight": stats.in_flight_blocks,
            "condemned blocks": stats.condemned_blocks,
            "jobs": len(connector._jobs),
            "jobs of vLLM": len(connector.scheduler._jobs),
            "requests": len(connector.scheduler._req_status),
            "requests behind a load": len(connector._behind),
            "engine blocks": block_pool.num_gpu_blocks - 1 - block_pool.get_num_free_blocks(),
        },
    }
