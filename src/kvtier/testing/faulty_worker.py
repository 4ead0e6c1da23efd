"""A worker with faults: wraps any worker of `TransferWorker`'s interface, with real threads and real bytes.

In an engine with kvtier's vLLM adapter, a connector of your own puts it in:

    class FaultyConnector(KVTierConnector):
        def register_kv_caches(self, kv_caches):
            super().register_kv_caches(kv_caches)
            worker = self.connector_worker.worker
            worker.transfers = FaultyWorker(worker.transfers, WorkerFaults.parse({"seed": 1, "fail": 0.02}))
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigurationError, TransferError
from kvtier.transfers.jobs import TransferJob, TransferOutcome

REASON_INJECTED = "injected fault"


class Worker(Protocol):
    """What can be wrapped. See `TransferWorker` for what each promises."""

    before_copy: Callable[[TransferJob], None] | None

    def attach(self, pool: npt.NDArray[np.uint8]) -> None: ...
    def submit(self, job: TransferJob) -> None: ...
    def poll(self) -> list[TransferOutcome]: ...
    def wait(self, job_ids: Collection[int], give_up_after_s: float = 1.0) -> None: ...
    def wait_for_outcome(self, timeout_s: float) -> None: ...
    def shutdown(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerFaults:
    """Which faults, how often, and how long. Rates are probabilities of each job, 0 to 1.

    Whether a fault strikes depends on `seed`, the job's id and the kind of the fault, and on nothing else.
    """

    seed: int = 0
    fail: float = 0.0
    """Fails before the copy begins."""
    fail_after: float = 0.0
    """Is copied, and said to have failed."""
    stall: float = 0.0
    """Stands on its copy thread for up to `stall_s` before the copy begins."""
    stall_s: float = 1.0
    delay: float = 0.0
    """Is reported up to `delay_s` late."""
    delay_s: float = 1.0
    reorder: float = 0.0
    """Is reported after the next one that ends (or after `reorder_s`, if none does)."""
    reorder_s: float = 0.1
    duplicate: float = 0.0
    """Is reported again by the next `poll`."""
    drop: float = 0.0
    """A store whose end is never reported."""
    drop_load: float = 0.0
    """A load whose end is never reported. No worker may do that and live: the request waits for ever."""
    corrupt: float = 0.0
    """A store that changes one byte of its first slot after the copy, and is said to be well."""

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> WorkerFaults:
        """From a mapping such as {"seed": 1, "fail": 0.02}. Raises ConfigurationError for what makes no sense."""
        known = {field.name for field in fields(cls)}
        for name, value in settings.items():
            if name not in known:
                raise ConfigurationError(f"fault {name!r} is unknown; allowed: {', '.join(sorted(known))}")
            if isinstance(value, bool) or not isinstance(value, int | float) or (value < 0 and name != "seed"):
                raise ConfigurationError(f"fault {name} is {value!r}; allowed: a number of 0 or more")
            if not name.endswith("_s") and name != "seed" and value > 1:
                raise ConfigurationError(f"fault {name} is {value!r}; allowed: a probability from 0 to 1")
        return cls(**settings)

    def draw(self, kind: str, job_id: int) -> float | None:
        """None if this fault does not strike the job; otherwise a number from 0 to 1 that says how hard."""
        rate: float = getattr(self, kind)
        if not rate:
            return None
        random = Random(f"{self.seed} {kind} {job_id}")
        return random.random() if random.random() < rate else None


@dataclass(slots=True)
class _Held:
    """An outcome that is given later."""

    outcome: TransferOutcome
    due_s: float
    until_another: bool = False
    is_repeat: bool = False


class FaultyWorker:
    """`inner` with faults. Threads, order and deadlines are the inner worker's; `dealt` counts faults by kind.

    Faults are on from the beginning. While they are off nothing goes wrong, and what was held back is given.
    """

    def __init__(self, inner: Worker, faults: WorkerFaults, clock: Callable[[], float] = time.monotonic) -> None:
        self.inner = inner
        self.faults = faults
        self.dealt: Counter[str] = Counter()
        self.before_copy = inner.before_copy
        """As the inner worker's: called before a copy that the faults have let through."""
        self._clock = clock
        self._lock = threading.Lock()
        self._calm = threading.Event()
        self._pool: npt.NDArray[np.uint8] | None = None
        self._slots: dict[int, int] = {}
        """First slot of each store that will be corrupted."""
        self._held: list[_Held] = []
        inner.before_copy = self._before_copy

    def attach(self, pool: npt.NDArray[np.uint8]) -> None:
        """As the inner worker's."""
        self._pool = pool
        self.inner.attach(pool)

    def submit(self, job: TransferJob) -> None:
        """As the inner worker's."""
        if job.is_store and self.faults.draw("corrupt", job.job_id) is not None and job.groups:
            self._slots[job.job_id] = int(job.groups[0].slots[0])
        self.inner.submit(job)

    def poll(self) -> list[TransferOutcome]:
        """What the inner worker says, and what was held back, less what is lost. The caller's list."""
        now_s = self._clock()
        given: list[TransferOutcome] = []
        repeats: list[TransferOutcome] = []
        for outcome in self.inner.poll():
            self._treat(outcome, now_s, given)
        has_another = bool(given)
        for held in list(self._held):
            if held.due_s <= now_s or (held.until_another and has_another) or self._calm.is_set():
                self._held.remove(held)
                (repeats if held.is_repeat else given).append(held.outcome)
        for outcome in given:
            if self._deals("duplicate", outcome.job_id) is not None:
                self._held.append(_Held(outcome, now_s, is_repeat=True))
        return given + repeats

    def wait(self, job_ids: Collection[int], give_up_after_s: float = 1.0) -> None:
        """As the inner worker's: a job that stalls is given up on."""
        self.inner.wait(job_ids, give_up_after_s)

    def wait_for_outcome(self, timeout_s: float) -> None:
        """As the inner worker's; what is held back counts when it is due."""
        due_s = min((held.due_s for held in self._held), default=None)
        left_s = timeout_s if due_s is None else min(timeout_s, due_s - self._clock())
        if left_s > 0:
            self.inner.wait_for_outcome(left_s)

    def shutdown(self) -> None:
        """As the inner worker's. Stalls end; what is held back can still be polled."""
        self._calm.set()
        self.inner.shutdown()
        self._pool = None

    def faults_on(self) -> None:
        """From now on things go wrong (again)."""
        self._calm.clear()

    def faults_off(self) -> None:
        """Nothing more goes wrong, and stalls end."""
        self._calm.set()

    # -- private ---------------------------------------------------------------------------------------------

    def _before_copy(self, job: TransferJob) -> None:
        """On a copy thread."""
        if (hard := self._deals("stall", job.job_id)) is not None:
            self._calm.wait(hard * self.faults.stall_s)
        if self._deals("fail", job.job_id) is not None:
            raise TransferError(REASON_INJECTED)
        if self.before_copy is not None:
            self.before_copy(job)

    def _treat(self, outcome: TransferOutcome, now_s: float, given: list[TransferOutcome]) -> None:
        """An outcome of the inner worker: lost, held back, or given, and changed before."""
        if self._deals("drop" if outcome.is_store else "drop_load", outcome.job_id) is not None:
            return
        slot = self._slots.pop(outcome.job_id, None)
        if outcome.success:
            if slot is not None and self._pool is not None and self._deals("corrupt", outcome.job_id) is not None:
                self._pool[slot, 0] ^= 0xFF
            if self._deals("fail_after", outcome.job_id) is not None:
                outcome = replace(outcome, success=False, num_bytes=0, reason=REASON_INJECTED)
        if (hard := self._deals("delay", outcome.job_id)) is not None:
            self._held.append(_Held(outcome, now_s + hard * self.faults.delay_s))
        elif self._deals("reorder", outcome.job_id) is not None:
            self._held.append(_Held(outcome, now_s + self.faults.reorder_s, until_another=True))
        else:
            given.append(outcome)

    def _deals(self, kind: str, job_id: int) -> float | None:
        """How hard this fault strikes the job now, if at all. Counts it."""
        hard = None if self._calm.is_set() else self.faults.draw(kind, job_id)
        if hard is not None:
            with self._lock:
                self.dealt[kind] += 1
        return hard
