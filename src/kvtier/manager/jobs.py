"""Transfer jobs on the scheduler's side: who writes or reads which slots, until every rank has reported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvtier.interfaces import CPULoadStoreSpec, OffloadingManager, ReqContext


@dataclass(slots=True)
class TransferRecord:
    """One submitted job. `spec.keys` are its keys, `spec.block_ids` and `spec.generations` its slots."""

    job_id: int
    req_context: ReqContext
    spec: CPULoadStoreSpec
    is_store: bool
    num_pending: int
    """Ranks that have not reported yet."""
    failed: bool = False
    """At least one rank has failed."""
    reported: int = 0
    """Bit `rank` is set: that rank has reported."""


class JobTable:
    """Jobs by id, completed in the manager by spec when the last rank has reported.

    A job of which one rank failed is failed as a whole, but not before the others are done: until then they may
    still write (or read) the slots. The table survives a reset of the cache: the manager has condemned the slots,
    and each is free when its job ends. Reports of unknown jobs, and second reports of a rank that is named, are counted
    and ignored.
    """

    def __init__(self, manager: OffloadingManager, num_ranks: int = 1) -> None:
        self._manager = manager
        self._num_ranks = num_ranks
        self._jobs: dict[int, TransferRecord] = {}
        self.num_unknown_reports = 0

    def add(self, job_id: int, req_context: ReqContext, spec: CPULoadStoreSpec, is_store: bool) -> None:
        """A job was handed to every rank. The caller guarantees a fresh `job_id`. O(1)."""
        self._jobs[job_id] = TransferRecord(job_id, req_context, spec, is_store, self._num_ranks)

    def report(
        self, job_id: int, num_ranks: int = 1, failed: bool = False, rank: int | None = None
    ) -> TransferRecord | None:
        """`num_ranks` more ranks are done with the job. Returns its record if it has ended with this. O(blocks).

        A caller that reports for one rank names it in `rank`: where reports can come twice, only that keeps the job
        open while another rank still copies.
        """
        record = self._jobs.get(job_id)
        if record is None or (rank is not None and record.reported >> rank & 1):
            self.num_unknown_reports += 1
            return None
        if rank is not None:
            record.reported |= 1 << rank
        record.failed = record.failed or failed
        record.num_pending -= num_ranks
        if record.num_pending > 0:
            return None
        del self._jobs[job_id]
        complete = self._manager.complete_store if record.is_store else self._manager.complete_load
        complete(record.spec.keys, record.req_context, success=not record.failed, spec=record.spec)
        return record

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[TransferRecord]:
        return iter(self._jobs.values())

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._jobs
