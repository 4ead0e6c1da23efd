"""`RamKeeper`: records of what is in the slots of a pool in a named file, written and checked by threads of its own.

A record is void before anybody may write its slot, and becomes valid last of all, in one store, once its slot's bytes
were hashed and nobody has claimed the slot meanwhile. So whatever instant a process dies at, a valid record is that of
a block that was whole; and should that be wrong for any other reason, the checksum over the bytes says so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.keys import OffloadKey
from kvtier.tier_interfaces import CheckedBlock, Slots
from kvtier.tiers.disk.layout import (
    FREE,
    MAX_KEY_BYTES,
    READY,
    RECORD,
    data_checksum,
    namespace_tag,
    record_keys,
    seal,
    valid_places,
)
from kvtier.tiers.ram_persist import PersistedPool

logger = logging.getLogger(__name__)

NUM_THREADS = 2
"""Together they hash as fast as memory is read, nearly."""
MAX_BATCH_BLOCKS = 256
MAX_BATCH_BYTES = 64 << 20
"""Hashed before records are written or outcomes are told: some milliseconds."""
CLOSE_S = 1.0
"""How long a stop may take to hash what is left."""
_RUN_BITS = 24
"""Of a use counter: the place in the call. What is above them is the number of the call."""
_MAX_USE = 1 << 62
_NOBODY = 0


class _Task(NamedTuple):
    key: OffloadKey
    slot: int
    generation: int


class _Batch(NamedTuple):
    """Blocks that are to get records."""

    keys: Sequence[OffloadKey]
    slots: npt.NDArray[np.int64]
    generations: npt.NDArray[np.int64]


class RamKeeper:
    """A `PoolKeeper` over an open `PersistedPool`, which stays the caller's: `close` comes before that of the pool.

    The constructor starts no thread. Its methods are for one thread.
    """

    def __init__(self, persisted: PersistedPool, num_threads: int = NUM_THREADS) -> None:
        self._header = persisted.header
        self._slots = persisted.pool.slots()
        self._records = persisted.records()
        self._states = self._records["state"]
        self._uses = persisted.uses()
        self._magic = persisted.magic()
        self._num_threads = num_threads
        self._max_batch = max(1, min(MAX_BATCH_BLOCKS, MAX_BATCH_BYTES // persisted.header.slot_bytes))
        if int(self._uses.max(initial=0)) > _MAX_USE:  # nothing guards these bytes
            self._uses[:] = 0
        self._num_calls = int(self._uses.max(initial=0)) >> _RUN_BITS
        self._lock = threading.Lock()
        self._work_ready = threading.Condition(self._lock)
        self._progress = threading.Condition(self._lock)
        # guarded by the lock
        self._holders = np.zeros(persisted.header.num_slots, np.int64)
        """Generation of the block that each slot holds or is to get a record for; `_NOBODY` without one."""
        self._to_keep: deque[_Batch] = deque()
        """Oldest first. Blocks whose slots have other holders by now are passed over."""
        self._to_check: deque[_Task] = deque()
        self._checked: list[CheckedBlock] = []
        self._num_checking = 0
        self._num_hashing = 0
        """Batches in the hands of threads, to be kept."""
        self._is_off = False
        """There was a reset: nothing is written down any more."""
        self._stopping = False
        self._threads: list[threading.Thread] = []

    # -- the earlier process ---------------------------------------------------------------------------------

    def restore(self) -> list[dict[OffloadKey, int]]:
        """What an earlier process has left, for `PersistedOffloadingManager.recall`. Before anything else. O(slots)."""
        places = valid_places(self._records, self._header.namespace, self._header.epoch)
        places = places[np.argsort(self._uses[places], kind="stable")]
        records = self._records[places]
        keys = record_keys(records["key"], records["key_bytes"])
        # a block that was stored again after it was evicted may be there twice: the one that was used last stands
        slot_of = dict(zip(keys, places.tolist(), strict=True))
        uses = self._uses.tolist()
        runs: dict[int, list[OffloadKey]] = {}
        for key, slot in sorted(slot_of.items(), key=lambda block: uses[block[1]]):
            runs.setdefault(uses[slot] >> _RUN_BITS, []).append(key)
        # within a run the deepest block was the first to go
        return [{key: slot_of[key] for key in reversed(run)} for run in runs.values()]

    # -- PoolKeeper ------------------------------------------------------------------------------------------

    def forget(self, slots: Slots) -> None:
        if not len(slots):
            return
        slots = np.asarray(slots)
        with self._lock:
            self._holders[slots] = _NOBODY
            self._states[slots] = FREE

    def keep(self, keys: Sequence[OffloadKey], slots: Slots, generations: Slots) -> None:
        if self._is_off or not keys:
            return
        batch = _Batch(keys, np.asarray(slots), np.asarray(generations))
        is_new = self._holders[batch.slots] != batch.generations
        if max(map(len, keys)) > MAX_KEY_BYTES:
            is_new &= [len(key) <= MAX_KEY_BYTES for key in keys]
        if not is_new.all():
            batch = _part(batch, is_new)
            if not batch.keys:
                return
        self.note_use(batch.slots)
        with self._lock:
            self._holders[batch.slots] = batch.generations
            self._to_keep.append(batch)
            self._wake()

    def note_use(self, slots: Slots) -> None:
        # no record depends on it: at worst the next process evicts in another order
        self._num_calls += 1
        first = ((self._num_calls + 1) << _RUN_BITS) - 1
        self._uses[slots] = np.arange(first, first - len(slots), -1, dtype=np.uint64)

    def check(self, keys: Sequence[OffloadKey], slots: Sequence[int], generation: int) -> None:
        with self._lock:
            self._to_check.extend(_Task(key, slot, generation) for key, slot in zip(keys, slots, strict=True))
            self._num_checking += len(keys)
            self._wake()

    def poll(self) -> list[CheckedBlock]:
        with self._lock:
            checked, self._checked = self._checked, []
        return checked

    def reset(self) -> None:
        self._magic[0] = 0  # without its header, nothing in the file is believed
        with self._lock:
            self._is_off = True
            self._to_keep.clear()

    # -- waiting, the end ------------------------------------------------------------------------------------

    def wait_for_outcome(self, timeout_s: float) -> None:
        """Returns when `poll` has something to give, when nothing is being checked, or after `timeout_s`."""
        with self._lock:
            self._progress.wait_for(lambda: self._checked or not self._num_checking, timeout_s)

    def flush(self, timeout_s: float) -> bool:
        """Waits until every block that was told has its record. False if that took longer than `timeout_s`."""
        with self._lock:
            return self._progress.wait_for(lambda: not self._to_keep and not self._num_hashing, timeout_s)

    def close(self, flush_s: float = CLOSE_S) -> None:
        """Flushes for at most `flush_s`, then ends the threads. Idempotent. Nothing touches the pool afterwards."""
        if self._threads:
            self.flush(flush_s)
        with self._lock:
            self._stopping = True
            self._to_keep.clear()
            self._to_check.clear()
            self._work_ready.notify_all()
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.join()
        nothing: Any = np.zeros(0, np.uint8)  # views would keep the pool mapped
        self._slots = self._records = self._states = self._uses = self._magic = nothing

    # -- threads ---------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Lock held."""
        if not self._threads and not self._stopping:
            for number in range(self._num_threads):
                thread = threading.Thread(target=self._run, name=f"kvtier-keep-{number}", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._work_ready.notify(1 if len(self._to_keep) + len(self._to_check) == 1 else self._num_threads)

    def _run(self) -> None:
        while True:
            with self._lock:
                while not (self._to_check or self._to_keep or self._stopping):
                    self._work_ready.wait()
                if self._stopping:
                    return
                if self._to_check:  # somebody waits for it
                    work: list[_Task] | _Batch = self._take_checks()
                else:
                    work = self._take_batch()
                    self._num_hashing += 1
            try:
                self._keep(work) if isinstance(work, _Batch) else self._check(work)
            except Exception as error:  # a thread that ends would leave requests waiting
                logger.error("kvtier: some blocks of the RAM pool could not be hashed: %s", repr(error))
                if not isinstance(work, _Batch):
                    self._tell_checked(work, [False] * len(work))
            with self._lock:
                self._num_hashing -= isinstance(work, _Batch)
                self._progress.notify_all()

    def _take_checks(self) -> list[_Task]:
        """A share of them: another thread may help. Lock held."""
        count = min(self._max_batch, -(-len(self._to_check) // self._num_threads))
        return [self._to_check.popleft() for _ in range(count)]

    def _take_batch(self) -> _Batch:
        """Lock held."""
        batch = self._to_keep.popleft()
        if len(batch.keys) > self._max_batch:
            first = np.arange(len(batch.keys)) < self._max_batch
            self._to_keep.appendleft(_part(batch, ~first))
            batch = _part(batch, first)
        return batch

    def _hash(self, key: OffloadKey, slot: int) -> int:
        return data_checksum(self._slots[slot], key, self._header.namespace, self._header.epoch)

    def _check(self, tasks: list[_Task]) -> None:
        expected = self._records["data_checksum"][[task.slot for task in tasks]].tolist()
        self._tell_checked(
            tasks, [self._hash(task.key, task.slot) == checksum for task, checksum in zip(tasks, expected, strict=True)]
        )

    def _tell_checked(self, tasks: list[_Task], verdicts: list[bool]) -> None:
        with self._lock:
            self._checked += [CheckedBlock(*task, verdict) for task, verdict in zip(tasks, verdicts, strict=True)]
            self._num_checking -= len(tasks)

    def _keep(self, batch: _Batch) -> None:
        is_current = self._holders[batch.slots] == batch.generations
        keys, slots, generations = batch if is_current.all() else _part(batch, is_current)
        if not keys:
            return
        records = np.zeros(len(keys), RECORD)
        records["state"] = READY
        records["key_bytes"] = [len(key) for key in keys]
        records["key"] = np.frombuffer(b"".join(key.ljust(MAX_KEY_BYTES, b"\0") for key in keys), f"V{MAX_KEY_BYTES}")
        records["generation"] = generations
        records["epoch"] = self._header.epoch
        records["data_checksum"] = [self._hash(key, slot) for key, slot in zip(keys, slots.tolist(), strict=True)]
        records["stored_at_s"] = int(time.time())
        records["namespace"] = namespace_tag(self._header.namespace)
        seal(records, slots)
        records["state"] = FREE
        with self._lock:
            is_current = self._holders[slots] == generations
            slots = slots[is_current]
            self._records[slots] = records[is_current]
            self._states[slots] = READY


def _part(batch: _Batch, mask: npt.NDArray[np.bool_]) -> _Batch:
    """Those of `batch` for which `mask`, (len(batch.keys),), is true."""
    return _Batch(list(compress(batch.keys, mask)), batch.slots[mask], batch.generations[mask])
