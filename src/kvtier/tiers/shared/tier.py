"""`SharedTier`: blocks in a store that several engines use, asked over a network."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from kvtier.errors import InvariantError, ManagerUsageError
from kvtier.interfaces import Residency
from kvtier.keys import OffloadKey
from kvtier.tier_interfaces import (
    REASON_CANCELLED,
    REASON_CLOSED,
    REASON_RESET,
    EpochStore,
    Tier,
    TierOutcome,
    TierStats,
)
from kvtier.tiers.jobs import ALREADY_STORING, NOT_THERE, OpenJob, check_pool, check_submission
from kvtier.tiers.shared.answers import AnswerBook
from kvtier.tiers.shared.compressor import Compressor
from kvtier.tiers.shared.config import SharedConfig
from kvtier.tiers.shared.envelope import MAX_KEY_BYTES, SALT_BYTES, Identity
from kvtier.tiers.shared.store import BlockTransfer, Store
from kvtier.tiers.shared.threads import StoreThreads

logger = logging.getLogger(__name__)

MAX_FAILURES = 3
"""So many stores failed one after the other: stores are refused for a while."""
PAUSE_S = 10.0
STOP_S = 0.8
"""How long `close` waits for threads, after the flush."""


class SharedTier(Tier):
    """See `Tier` for the contract and docs/decisions/valkey.md for what is kept where.

    **Asking.** `lookup` never waits: what is not known is asked for, once for all who ask, and UNKNOWN until the store
    has answered, at most `lookup_timeout_s`. While the store is down everything is ABSENT, at once. That, answers, and
    that they grow old are seen in `poll`.

    **Room.** The store bounds itself, and says to nobody what it evicts: `capacity_blocks` is 0, and a READY block may
    turn out to be gone, which is a failed load. `ready_blocks` are those that this process has heard of lately.
    `take_removed` names those that it then found missing; a key that is merely forgotten (`max_keys`) is not named.

    **Sharing.** `drop` removes the block for all. After `reset` the weights are known to this process alone, so its
    blocks get a random salt that no other process has; `make_salt` is there for tests. `disable` leaves the store's
    blocks to the others. A store that is not there is no reason for `attach` to fail: it is tried for again.
    """

    def __init__(
        self,
        config: SharedConfig,
        store: Store,
        epoch_store: EpochStore,
        *,
        make_salt: Callable[[], bytes] = lambda: secrets.token_bytes(SALT_BYTES),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.medium = store.medium
        self._store = store
        self._epoch_store = epoch_store
        self._make_salt = make_salt
        self._clock = clock
        self._identity = Identity(config.namespace, 0)
        self._book = AnswerBook(config.present_s, config.absent_s, config.lookup_timeout_s, config.max_keys)
        self._compressor = Compressor(config.compression, config.element_bytes, store)
        self._threads = StoreThreads(store, config.thread_limits(1), self._compressor)
        self._is_attached = False
        self._pool: npt.NDArray[np.uint8] = np.empty((0, 0), np.uint8)
        self._jobs: dict[int, OpenJob] = {}
        self._storing: dict[OffloadKey, BlockTransfer] = {}
        self._num_in_flight = Counter({True: 0, False: 0})
        """By whether they are stores: blocks that the threads have."""
        self._removed: list[OffloadKey] = []
        self._counters: Counter[str] = Counter()
        self._down_reason = ""
        self._num_connects = 0
        self._now_s = -float("inf")
        self._num_failures = 0
        self._paused_until_s = -float("inf")
        self._closed_reason = "not attached"

    # -- life ------------------------------------------------------------------------------------------------

    def attach(self, pool: npt.NDArray[np.uint8]) -> None:
        check_pool(pool)
        if self._closed_reason != "not attached":
            raise ManagerUsageError("the tier has been attached already")
        self._pool = pool
        self._identity = Identity(self.config.namespace, self._epoch_store.current())
        self._store.attach(pool)
        self._threads = StoreThreads(self._store, self.config.thread_limits(pool.shape[1]), self._compressor)
        self._now_s = self._clock()
        self._threads.start()
        self._down_reason = self._threads.down_reason
        self._num_connects = self._threads.num_connects
        self._is_attached = True
        self._closed_reason = ""
        if not self._down_reason:
            logger.info("kvtier: shared tier in %s, %d connections", self._store.place, self.config.num_connections)

    def disable(self, reason: str) -> None:
        self._closed_reason = self._closed_reason or reason
        self._removed += self._book.present_keys()
        self._book.clear()
        self._threads.forget_questions()
        for job in self._jobs.values():
            job.void(self._closed_reason)
        self._end_queued(self._closed_reason, lambda block: True)

    def flush(self, timeout_s: float) -> bool:
        """What survives is the store's affair: waits until it has everything."""
        return not self._closed_reason and self._threads.flush(timeout_s)

    def close(self, flush_s: float = 0.0) -> bool:
        if self._is_attached and not self._closed_reason and flush_s > 0:
            self._threads.flush(flush_s)
        self._closed_reason = self._closed_reason or REASON_CLOSED
        self._end_queued(REASON_CLOSED, lambda block: True)
        deadline_s = time.monotonic() + STOP_S
        if self._is_attached and not (self._threads.stop(STOP_S) and self._store.detach(deadline_s)):
            return False
        self._pool = np.empty((0, 0), np.uint8)
        return True

    # -- look-up and recency ---------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[OffloadKey]) -> list[Residency]:
        if self._closed_reason or self._down_reason:
            return [Residency.ABSENT] * len(keys)
        if self._storing:
            asked = [key for key in keys if key not in self._storing]
            if len(asked) < len(keys):
                found = dict(zip(asked, self.lookup(asked), strict=True))
                return [found.get(key, Residency.ABSENT) for key in keys]
        answers, to_ask = self._book.lookup(keys, self._now_s, self._clock())
        self._threads.ask(self._identity, to_ask)
        return answers

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        if not self._closed_reason:
            self._threads.touch(self._identity, [key for key in keys if self._book.is_present(key)])

    # -- jobs ------------------------------------------------------------------------------------------------

    def submit_store(self, job_id: int, keys: Sequence[OffloadKey], slots: Sequence[int]) -> int:
        check_submission(job_id, keys, slots, self._jobs, len(self._pool))
        accepted = self._acceptable(keys)
        self._counters["shed_blocks"] += len(keys) - len(accepted)
        if not accepted:
            return 0
        job = self._jobs[job_id] = OpenJob(job_id, True, accepted)
        blocks = []
        for position, key in enumerate(accepted):
            if key in self._storing:
                job.end_block(position, False, reason=ALREADY_STORING)
            elif self._book.is_ready(key, self._now_s):
                job.end_block(position, True)
            else:
                self._storing[key] = block = self._block(job, position, slots[position])
                block.is_new = self._book.is_denied(key, self._now_s)
                blocks.append(block)
        self._submit(blocks)
        return len(accepted)

    def submit_load(self, job_id: int, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        check_submission(job_id, keys, slots, self._jobs, len(self._pool))
        job = self._jobs[job_id] = OpenJob(job_id, False, keys)
        refusal = self._closed_reason or self._down_reason
        blocks = []
        for position, key in enumerate(keys):
            if refusal or not self._book.is_present(key):
                job.end_block(position, False, reason=refusal or NOT_THERE)
            else:
                blocks.append(self._block(job, position, slots[position]))
        self._submit(blocks)

    def poll(self) -> list[TierOutcome]:
        done, answers = self._threads.take_done()
        self._now_s = self._clock()
        for block in done:
            self._end(block)
        self._down_reason = self._threads.down_reason  # first: else an old count could go with a new connection
        num_connects = self._threads.num_connects
        if self._num_connects != num_connects:  # it may be another store than before
            self._num_connects = num_connects
            self._book.doubt_everything(self._now_s)
            self._num_failures, self._paused_until_s = 0, -float("inf")
        for identity, key, is_there in answers:
            if identity is self._identity and self._book.note_answer(key, is_there, self._now_s):
                self._removed.append(key)
        self._removed += self._book.expire(self._now_s)
        ended = [job for job in self._jobs.values() if not job.num_open]
        for job in ended:
            del self._jobs[job.job_id]
        return [job.outcome() for job in ended]

    def cancel(self, job_id: int) -> None:
        job = self._jobs.get(job_id)
        if job is not None:
            self._end_queued(REASON_CANCELLED, lambda block: block.job is job)

    def wait_for_outcome(self, timeout_s: float) -> None:
        """Waits for answers to look-ups as well."""
        if all(job.num_open for job in self._jobs.values()) and (self._jobs or self._book.num_asked):
            self._threads.wait_for_progress(timeout_s)

    # -- leaving ---------------------------------------------------------------------------------------------

    def drop(self, keys: Sequence[OffloadKey]) -> None:
        dropped = [key for key in keys if self._book.is_present(key)]
        for key in dropped:
            self._book.note_absent(key, self._now_s)
        self._removed += dropped
        self._threads.remove(self._identity, dropped)

    def reset(self, epoch: int) -> list[OffloadKey]:
        ready = self._book.present_keys()
        self._book.clear()
        self._threads.forget_questions()
        self._storing.clear()
        self._identity = Identity(self.config.namespace, epoch, self._make_salt())
        for job in self._jobs.values():
            job.void(REASON_RESET)
        self._end_queued(REASON_RESET, lambda block: True)
        self._counters["resets"] += 1
        return ready

    def take_removed(self) -> list[OffloadKey]:
        removed, self._removed = self._removed, []
        return removed

    def get_stats(self) -> TierStats:
        return TierStats(
            medium=self.medium,
            capacity_blocks=0,
            capacity_bytes=0,
            ready_blocks=self._book.num_present,
            storing_blocks=self._num_in_flight[True],
            loading_blocks=self._num_in_flight[False],
            closed_reason=self._closed_reason,
            down_reason=self._down_reason,
            counters={
                **dict.fromkeys(("stored_blocks", "loaded_blocks", "evicted_blocks", "shed_blocks"), 0),
                **dict.fromkeys(("failed_store_blocks", "failed_load_blocks", "corrupt_blocks"), 0),
                **self._counters,
                **self._compressor.counters,
                "shed_lookups": self._book.num_shed,
                "connection_losses": self._threads.num_connection_losses,
            },
        )

    @property
    def down_reason(self) -> str:
        """Why the store could not be reached at the last `poll`; empty if it could."""
        return self._down_reason

    def check_invariants(self) -> None:
        self._book.check_invariants()
        num_open = sum(job.num_open for job in self._jobs.values())
        num_in_flight = self._num_in_flight[True] + self._num_in_flight[False]
        if num_open != num_in_flight:
            raise InvariantError(f"jobs wait for {num_open} blocks, and {num_in_flight} are in flight")
        for key, block in self._storing.items():
            if block.key != key or block.identity is not self._identity:
                raise InvariantError(f"block {key.hex()} is being stored by a transfer of something else")

    # -- private ---------------------------------------------------------------------------------------------

    def _acceptable(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """The leading keys that there is room for."""
        if self._closed_reason or self._down_reason or self._clock() < self._paused_until_s:
            return []
        room = self.config.max_storing_bytes // self._pool.shape[1] - self._num_in_flight[True]
        accepted: list[OffloadKey] = []
        for key in takewhile(lambda key: len(key) <= MAX_KEY_BYTES, keys):
            room -= not (key in self._storing or self._book.is_ready(key, self._now_s))
            if room < 0:
                break
            accepted.append(key)
        return accepted

    def _block(self, job: OpenJob, position: int, slot: int) -> BlockTransfer:
        return BlockTransfer(job, position, job.keys[position], self._identity, self._pool[slot])

    def _submit(self, blocks: list[BlockTransfer]) -> None:
        if blocks:
            self._num_in_flight[blocks[0].job.is_store] += len(blocks)
            self._threads.submit(blocks)

    def _end(self, block: BlockTransfer) -> None:
        """A block that was moved, or never will be, leaves the books."""
        job, key, success = block.job, block.key, block.success
        self._num_in_flight[job.is_store] -= 1
        is_current = block.identity is self._identity and not self._closed_reason
        if job.is_store:
            if self._storing.get(key) is block:
                del self._storing[key]
            success = success and is_current
            if success:
                self._book.note_present(key, self._now_s)
            self._counters["stored_blocks" if success else "failed_store_blocks"] += 1
            if block.began and not block.is_away:
                self._note_store(block.success, block.reason)
        else:
            success = self._end_load(block, is_current)
        if block.began:
            job.note_time(block.begun_s, block.ended_s)
        job.end_block(block.position, success, block.num_bytes, block.reason or NOT_THERE)

    def _end_load(self, block: BlockTransfer, is_current: bool) -> bool:
        success = block.success and is_current and self._book.is_present(block.key)
        if success:
            self._book.note_present(block.key, self._now_s)
        elif is_current and block.is_corrupt:
            self.drop((block.key,))
        elif is_current and (block.is_missing or block.is_away):
            was_there = self._book.note_absent(block.key, self._now_s, is_told=block.is_missing)
            self._removed += [block.key] if was_there else []
        self._counters["corrupt_blocks"] += block.is_corrupt
        self._counters["loaded_blocks" if success else "failed_load_blocks"] += 1
        return success

    def _note_store(self, success: bool, reason: str) -> None:
        """A store that is full says so again and again: left alone for a while."""
        self._num_failures = 0 if success else self._num_failures + 1
        if success:
            self._paused_until_s = -float("inf")
        elif self._num_failures >= MAX_FAILURES:
            if self._paused_until_s == -float("inf"):
                logger.warning("kvtier: nothing is stored in %s for a while: %s", self._store.place, reason)
            self._paused_until_s = self._clock() + PAUSE_S
            self._num_failures = MAX_FAILURES - 1  # one more failure is enough for the next pause

    def _end_queued(self, reason: str, wanted: Callable[[BlockTransfer], bool]) -> None:
        for block in self._threads.withdraw(wanted):
            block.fail(reason)
            self._end(block)
