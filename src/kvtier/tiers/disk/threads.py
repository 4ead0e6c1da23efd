"""The disk tier's threads: I/O threads that move blocks, and one that commits. All of its concurrency is in here."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from kvtier.tiers.disk.operations import BlockIo
from kvtier.transfers.affinity import use_every_core_of_this_process

IDLE_COMMIT_S = 30.0
"""How long uses alone wait for a commit."""
RETRY_COMMIT_S = 1.0
"""How long after a commit that failed the next one is tried, unless a flush wants it."""


class IoThreads:
    """Moves queued blocks, loads before stores, on `num_threads` threads; one thread more is for loads alone, so that
    stores that are stuck in a device hold up no load. With 0 threads everything happens in `take_done`.

    `move` takes a run of blocks of one job and volume in adjacent places, at most `max_run_blocks`, and raises
    nothing. `commit` makes durable what was moved; it may raise nothing either, and says whether it worked.
    """

    def __init__(
        self,
        move: Callable[[Sequence[BlockIo]], None],
        commit: Callable[[], bool],
        num_threads: int,
        max_run_blocks: int,
        commit_s: float,
    ) -> None:
        self._move = move
        self._commit = commit
        self._num_threads = num_threads
        self._max_run_blocks = max_run_blocks
        self._commit_s = commit_s
        self._lock = threading.Lock()
        self._work_ready = threading.Condition(self._lock)
        self._progress = threading.Condition(self._lock)
        self._commit_wanted = threading.Condition(self._lock)
        self._loads: deque[BlockIo] = deque()
        self._stores: deque[BlockIo] = deque()
        self._num_storing = 0
        self._done: list[BlockIo] = []
        self._dirty = False
        self._flush_requests = 0
        self._flush_answers = 0
        self._flush_worked = True
        self._stopping = False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        if not self._num_threads:
            return
        for i in range(self._num_threads):
            self._threads.append(_thread(f"kvtier-disk-{i}", self._run, False))
        self._threads.append(_thread("kvtier-disk-loads", self._run, True))
        self._threads.append(_thread("kvtier-disk-commit", self._run_commits))
        for thread in self._threads:
            thread.start()

    def submit(self, blocks: Sequence[BlockIo]) -> None:
        """Queues the blocks of one job, best sorted by volume and place."""
        if blocks:
            with self._lock:
                (self._stores if blocks[0].job.is_store else self._loads).extend(blocks)
                self._work_ready.notify_all()  # one alone may be the thread that takes no stores

    def withdraw(self, wanted: Callable[[BlockIo], bool]) -> list[BlockIo]:
        """Takes back those queued blocks of which nothing has begun. O(queued)."""
        withdrawn: list[BlockIo] = []
        with self._lock:
            for queue in (self._loads, self._stores):
                mine = [block for block in queue if wanted(block)]
                if mine:
                    withdrawn += mine
                    left = [block for block in queue if not wanted(block)]
                    queue.clear()
                    queue.extend(left)
        return withdrawn

    def note_change(self) -> None:
        """Something waits for a commit that no thread of this has seen."""
        with self._lock:
            self._dirty = True
            self._commit_wanted.notify()

    def take_done(self) -> list[BlockIo]:
        """The blocks that were moved since the last call. Without threads: moves them first, and commits."""
        if not self._num_threads:
            self._move_all(self._loads)
            self._move_all(self._stores)
            if self._dirty:
                self._dirty = not self._commit()
        with self._lock:
            done, self._done = self._done, []
        return done

    def wait_for_done(self, timeout_s: float) -> None:
        """Returns when a block was moved that nobody has taken yet, or after `timeout_s`."""
        if self._num_threads:
            with self._lock:
                self._progress.wait_for(lambda: bool(self._done), timeout_s)

    def flush(self, timeout_s: float) -> bool:
        """Waits until what is queued to be stored is stored and a commit that began after that has ended.

        False if that took too long or the commit failed.
        """
        if not self._num_threads:
            self._move_all(self._stores)
            self._dirty = not self._commit()
            return not self._dirty
        until_s = time.monotonic() + timeout_s
        with self._lock:
            if not self._progress.wait_for(lambda: not self._stores and not self._num_storing, timeout_s):
                return False
            self._flush_requests += 1
            mine = self._flush_requests
            self._commit_wanted.notify()
            answered = self._progress.wait_for(
                lambda: self._flush_answers >= mine, max(0.0, until_s - time.monotonic())
            )
            return answered and self._flush_worked

    def stop(self, timeout_s: float) -> bool:
        """Begins nothing more; waits for what runs. False if a thread is stuck in the device; it ends when it can."""
        with self._lock:
            self._stopping = True
            for condition in (self._work_ready, self._commit_wanted, self._progress):
                condition.notify_all()
        until_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    # -- on the threads --------------------------------------------------------------------------------------

    def _run(self, loads_only: bool) -> None:
        use_every_core_of_this_process()
        while True:
            with self._lock:
                while not (run := self._next_run(loads_only)):
                    if self._stopping:
                        return
                    self._work_ready.wait()
            is_store = run[0].job.is_store
            self._move(run)
            with self._lock:
                self._num_storing -= is_store
                self._done += run
                self._dirty |= is_store
                self._progress.notify_all()
                if is_store:
                    self._commit_wanted.notify()
            del run

    def _next_run(self, loads_only: bool) -> list[BlockIo]:
        """The next blocks to move together, now marked as begun. Lock held."""
        if self._stopping:
            return []
        if self._loads:
            queue = self._loads
        elif self._stores and not loads_only:
            queue = self._stores
        else:
            return []
        run = self._pop_run(queue, min(self._max_run_blocks, -(-len(queue) // max(1, self._num_threads))))
        self._num_storing += run[0].job.is_store
        return run

    def _pop_run(self, queue: deque[BlockIo], max_blocks: int) -> list[BlockIo]:
        run = [queue.popleft()]
        while queue and len(run) < max_blocks:
            last, following = run[-1], queue[0]
            adjacent = following.volume_idx == last.volume_idx and following.local_place == last.local_place + 1
            if following.job is not last.job or not adjacent:
                break
            run.append(queue.popleft())
        for block in run:
            block.began = True
        return run

    def _move_all(self, queue: deque[BlockIo]) -> None:
        while queue:
            run = self._pop_run(queue, self._max_run_blocks)
            self._move(run)
            self._done += run
            self._dirty |= run[0].job.is_store

    def _run_commits(self) -> None:
        use_every_core_of_this_process()
        worked = True
        while True:
            with self._lock:
                self._commit_wanted.wait_for(lambda: self._dirty or self._is_urgent(), IDLE_COMMIT_S)
                if self._dirty:  # gather a group
                    self._commit_wanted.wait_for(self._is_urgent, self._commit_s if worked else RETRY_COMMIT_S)
                if self._stopping:
                    return
                requests = self._flush_requests
                self._dirty = False
            worked = self._commit()
            with self._lock:
                self._dirty |= not worked
                self._flush_worked = worked
                self._flush_answers = requests
                self._progress.notify_all()

    def _is_urgent(self) -> bool:
        return self._stopping or self._flush_requests > self._flush_answers


def _thread(name: str, target: Callable[..., None], *args: object) -> threading.Thread:
    return threading.Thread(target=target, args=args, name=name, daemon=True)


def sorted_for_device(blocks: Iterable[BlockIo]) -> list[BlockIo]:
    """By volume and place, so that adjacent ones move together."""
    return sorted(blocks, key=lambda block: (block.volume_idx, block.local_place))
