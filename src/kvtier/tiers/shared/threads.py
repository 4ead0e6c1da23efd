"""The threads of a shared tier: some move blocks, one asks, removes and reconnects. All of its concurrency is here."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial

from kvtier.keys import OffloadKey
from kvtier.tiers.shared.compressor import Compressor
from kvtier.tiers.shared.config import ThreadLimits
from kvtier.tiers.shared.envelope import Identity
from kvtier.tiers.shared.line import Line
from kvtier.tiers.shared.loss_log import LossLog
from kvtier.tiers.shared.questions import Batch, Keys, QuestionQueue
from kvtier.tiers.shared.store import BlockTransfer, Store, StoreConnection, StoreUnreachableError, StuckCall
from kvtier.transfers.affinity import use_every_core_of_this_process

logger = logging.getLogger(__name__)

ABORT_AFTER_S = 0.2
"""After a stop, how long what runs may go on."""


class StoreThreads:
    """Moves blocks, loads before stores; asks for keys in batches. A store that is down is known to be: then everything
    fails at once until a connection has been made again, which is tried all the time, ever more rarely.

    Everything public is for the tier's caller, and returns at once, unless it says that it waits.
    """

    def __init__(self, store: Store, limits: ThreadLimits, compressor: Compressor) -> None:
        self._store = store
        self._limits = limits
        self._compressor = compressor
        self._lock = threading.Lock()
        self._work_ready = threading.Condition(self._lock)
        self._asking_ready = threading.Condition(self._lock)
        self._progress = threading.Condition(self._lock)
        self._stopping = threading.Event()
        self._loads: deque[BlockTransfer] = deque()
        self._stores: deque[BlockTransfer] = deque()
        self._num_moving = Counter({True: 0, False: 0})
        """By whether they are stores: runs that have begun, those that are stuck included."""
        self._done: list[BlockTransfer] = []
        self._questions = QuestionQueue()
        self._answers: list[tuple[Identity, OffloadKey, bool]] = []
        self._down_reason = "not connected yet"
        self._is_suspect = False
        self._backoff_s = 0.0
        self._loss_log = LossLog(store.place)
        self._num_connects = 0
        self._num_connection_losses = 0
        self._asking_line = Line(store, self._stopping, limits.connect_timeout_s)
        self._lines = [Line(store, self._stopping, limits.connect_timeout_s) for _ in range(limits.num_connections)]
        self._threads: list[threading.Thread] = []

    # -- life ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Makes the first connection, which may take `connect_timeout_s`, and starts the threads either way."""
        self._reconnect()
        last = len(self._lines) - 1
        self._threads = [
            _thread(f"kvtier-shared-{i}", partial(self._run_moves, line, i == last and last > 0))
            for i, line in enumerate(self._lines)
        ]
        self._threads.append(_thread("kvtier-shared-asks", self._run_asking))
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Begins nothing more, breaks off what runs. Waits; False while a thread or a stuck call does not end."""
        self._stopping.set()
        with self._lock:
            for condition in (self._work_ready, self._asking_ready, self._progress):
                condition.notify_all()
        until_s = time.monotonic() + timeout_s
        self._join(min(time.monotonic() + ABORT_AFTER_S, until_s))
        for line in [*self._lines, self._asking_line]:
            line.abort()
        self._join(until_s)
        with self._lock:
            return not (any(self._num_moving.values()) or any(thread.is_alive() for thread in self._threads))

    # -- state -----------------------------------------------------------------------------------------------

    @property
    def down_reason(self) -> str:
        """Why the store cannot be asked now; empty while it can."""
        return self._down_reason

    @property
    def num_connects(self) -> int:
        """How often the store came back: it may be another one since, with other blocks."""
        return self._num_connects

    @property
    def num_connection_losses(self) -> int:
        return self._num_connection_losses

    # -- work ------------------------------------------------------------------------------------------------

    def submit(self, blocks: Sequence[BlockTransfer]) -> None:
        """Queues the blocks of one job."""
        if not blocks:
            return
        now_s = time.monotonic()
        for block in blocks:
            block.queued_s = now_s
        with self._lock:
            if self._down_reason:
                self._fail(blocks, self._down_reason)
            else:
                (self._stores if blocks[0].job.is_store else self._loads).extend(blocks)
                self._work_ready.notify_all()

    def ask(self, identity: Identity, keys: Sequence[OffloadKey]) -> None:
        """Queues questions. Those that are lost with the store are never answered."""
        if keys:
            with self._lock:
                if not self._down_reason:
                    self._questions.ask(identity, keys)
                    self._asking_ready.notify()

    def remove(self, identity: Identity, keys: Sequence[OffloadKey]) -> None:
        """Has these blocks removed from the store, before anything stored or asked from now on, if it is reachable."""
        if keys:
            with self._lock:
                if not self._down_reason:
                    self._questions.remove(identity, keys)
                    self._asking_ready.notify()

    def touch(self, identity: Identity, keys: Sequence[OffloadKey]) -> None:
        """Tells the store by and by that these blocks were used."""
        if keys:
            with self._lock:
                if not self._down_reason:
                    self._questions.touch(identity, keys)
                    self._asking_ready.notify()

    def withdraw(self, wanted: Callable[[BlockTransfer], bool]) -> list[BlockTransfer]:
        """Takes back those queued blocks of which nothing has begun. O(queued)."""
        withdrawn: list[BlockTransfer] = []
        with self._lock:
            for queue in (self._loads, self._stores):
                withdrawn += [block for block in queue if wanted(block)]
                left = [block for block in queue if not wanted(block)]
                queue.clear()
                queue.extend(left)
        return withdrawn

    def forget_questions(self) -> None:
        """Nobody wants to know what was asked until now."""
        with self._lock:
            self._questions.forget_questions()
            self._answers.clear()

    def take_done(self) -> tuple[list[BlockTransfer], list[tuple[Identity, OffloadKey, bool]]]:
        """The blocks that were moved and the questions that were answered since the last call."""
        with self._lock:
            done, self._done = self._done, []
            answers, self._answers = self._answers, []
        return done, answers

    def wait_for_progress(self, timeout_s: float) -> None:
        """Waits until a block was moved or a question answered that nobody has taken yet, for `timeout_s` at most."""
        with self._lock:
            self._progress.wait_for(lambda: bool(self._done or self._answers), timeout_s)

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything queued to be stored or removed is. False if that took too long."""

        def is_idle() -> bool:
            return not (self._stores or self._num_moving[True] or self._questions.has_removals)

        with self._lock:
            return self._progress.wait_for(is_idle, timeout_s)

    # -- the threads that move -------------------------------------------------------------------------------

    def _run_moves(self, line: Line, loads_only: bool) -> None:
        use_every_core_of_this_process()
        while True:
            with self._lock:
                while not (run := self._next_run(loads_only)):
                    if self._stopping.is_set():
                        line.close()
                        return
                    self._work_ready.wait()
                overwrite = run[0].job.is_store and self._take_removals(run)
            stuck = self._move(line, run, overwrite)
            if stuck is None:
                self._hand_back(run)
            else:
                stuck.when_ended(partial(self._hand_back, run))
            del run

    def _next_run(self, loads_only: bool) -> list[BlockTransfer]:
        """The next blocks to move together, now marked as begun. Lock held."""
        if self._stopping.is_set():
            return []
        self._expire_queued()
        if self._loads:
            queue = self._loads
        elif self._stores and not loads_only and self._stores[0].key not in self._questions.removing:
            queue = self._stores
        else:
            return []
        share = -(-len(queue) // len(self._lines))
        run = [queue.popleft()]
        while queue and len(run) < min(share, self._limits.max_run_blocks):
            if queue[0].job is not run[0].job or queue[0].key in self._questions.removing:
                break
            run.append(queue.popleft())
        for block in run:
            block.began = True
        self._num_moving[run[0].job.is_store] += 1
        return run

    def _expire_queued(self) -> None:
        oldest_s = time.monotonic() - self._limits.queue_timeout_s
        for queue in (self._loads, self._stores):
            while queue and queue[0].queued_s < oldest_s:
                self._fail([queue.popleft()], "its turn did not come in time")

    def _take_removals(self, run: Sequence[BlockTransfer]) -> bool:
        """Whether blocks of this run are to be removed first: then they are overwritten instead. Lock held."""
        mine = [block for block in run if self._questions.take_back_removal(block.identity, block.key)]
        return bool(mine)

    def _hand_back(self, run: Sequence[BlockTransfer]) -> None:
        """Nothing touches these blocks any more. Also called by whatever was stuck."""
        with self._lock:
            self._num_moving[run[0].job.is_store] -= 1
            self._done += run
            self._progress.notify_all()

    def _move(self, line: Line, run: Sequence[BlockTransfer], overwrite: bool) -> StuckCall | None:
        begun_s = moving_s = time.monotonic()

        def operation(connection: StoreConnection, deadline_s: float) -> None:
            nonlocal moving_s
            moving_s = time.monotonic()  # there is a connection
            left = [block for block in run if not block.done]
            if left and left[0].job.is_store:
                self._compressor.before_stores(left, moving_s)
                connection.store(left, overwrite or all(block.is_new for block in left), deadline_s)
            elif left:
                connection.load(left, deadline_s)

        failure = line.run(operation, self._limits.transfer_timeout_s)
        ended_s = time.monotonic()
        for block in run:
            block.begun_s, block.ended_s = begun_s, ended_s
            if not block.done:
                block.fail(failure.reason if failure else "the store said nothing about it")
        if failure is None:
            self._note_use()
            self._compressor.after_moves(run, moving_s, ended_s)
        elif failure.timed_out:
            with self._lock:
                self._is_suspect = True
                self._asking_ready.notify()
        else:
            self._note_loss(failure.reason)
        return failure.stuck if failure else None

    # -- the thread that asks --------------------------------------------------------------------------------

    def _run_asking(self) -> None:
        use_every_core_of_this_process()
        while not self._stopping.is_set():
            if self._down_reason:
                self._stopping.wait(self._backoff_s * random.uniform(0.5, 1.0))
                limits = self._limits
                self._backoff_s = min(max(2 * self._backoff_s, limits.min_backoff_s), limits.max_backoff_s)
                self._reconnect()
                continue
            with self._lock:
                self._asking_ready.wait_for(self._has_questions)
                is_suspect, self._is_suspect = self._is_suspect, False
                batch = self._questions.next()
            self._work_off(batch, is_suspect)
        self._asking_line.close()

    def _has_questions(self) -> bool:
        return bool(self._questions or self._is_suspect or self._down_reason or self._stopping.is_set())

    def _work_off(self, batch: Batch, is_suspect: bool) -> None:
        if is_suspect:
            self._do(lambda connection, deadline_s: connection.ping(deadline_s))
        for group in batch.removals:
            self._do(partial(_remove, group))
        with self._lock:
            self._questions.removing.clear()
            self._work_ready.notify_all()
            self._progress.notify_all()
        for group in batch.questions:
            self._answer(group)
        for group in batch.touches:
            self._do(partial(_touch, group))

    def _answer(self, group: Keys) -> None:
        found: list[bool] = []

        def operation(connection: StoreConnection, deadline_s: float) -> None:
            found[:] = connection.lookup(group.identity, group.keys, self._limits.block_bytes, deadline_s)
            if len(found) != len(group.keys):
                raise StoreUnreachableError(f"the store gave {len(found)} answers to {len(group.keys)} questions")

        if self._do(operation):
            with self._lock:
                self._answers += [
                    (group.identity, key, is_there) for key, is_there in zip(group.keys, found, strict=True)
                ]
                self._progress.notify_all()

    def _do(self, operation: Callable[[StoreConnection, float], None]) -> bool:
        if self._down_reason:
            return False
        begun_s = time.monotonic()
        failure = self._asking_line.run(operation, self._limits.lookup_timeout_s)
        if failure:
            self._note_loss(failure.reason)
        else:
            self._compressor.note_round_trip(time.monotonic() - begun_s)
            self._backoff_s = 0.0
            self._note_use()
        return failure is None

    # -- up and down -----------------------------------------------------------------------------------------

    def _reconnect(self) -> None:
        """On the thread that asks, or before there is one."""
        failure = self._asking_line.connect()
        if failure:
            self._note_loss(failure.reason)
            return
        with self._lock:
            self._down_reason = ""
            self._num_connects += 1

    def _note_use(self) -> None:
        if self._loss_log.reason:
            with self._lock:
                if not self._down_reason:
                    self._loss_log.note_use()

    def _note_loss(self, reason: str) -> None:
        """The store is down: everything that waits for it fails now."""
        if self._stopping.is_set():
            return
        with self._lock:
            self._num_connection_losses += not self._down_reason
            self._down_reason = reason
            for queue in (self._loads, self._stores):
                self._fail(queue, reason)
                queue.clear()
            # unanswered: the caller knows that the store is down
            self._questions.clear()
            self._asking_ready.notify()
            self._progress.notify_all()
            self._loss_log.note_loss(reason)

    def _fail(self, blocks: Sequence[BlockTransfer] | deque[BlockTransfer], reason: str) -> None:
        """Lock held."""
        for block in blocks:
            block.fail(reason)
        self._done += blocks
        self._progress.notify_all()

    def _join(self, until_s: float) -> None:
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))


def _thread(name: str, target: Callable[[], None]) -> threading.Thread:
    return threading.Thread(target=target, name=name, daemon=True)


def _remove(group: Keys, connection: StoreConnection, deadline_s: float) -> None:
    connection.remove(group.identity, group.keys, deadline_s)


def _touch(group: Keys, connection: StoreConnection, deadline_s: float) -> None:
    connection.touch(group.identity, group.keys, deadline_s)
