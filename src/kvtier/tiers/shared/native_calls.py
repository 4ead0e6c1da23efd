"""Calls into a library that may never return: each on a thread that can be left behind.

A call that is given up goes on. It may still read and write the memory that it was given, so whoever asked for it has
to know when that is over (`NativeCall.when_ended`), and so many of them are borne (`LeftCalls`).
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from kvtier.tiers.shared.store import StoreTimeoutError, StoreUnreachableError

Result = TypeVar("Result")
CLOSE_S = 0.5
"""How long to wait for a thread that has nothing to do but to end."""
EXIT_S = 5.0
"""How long an interpreter that exits waits for calls: one that returns after it has gone aborts the process."""
_running: set[NativeCall[Any]] = set()
_changed = threading.Condition()
_exiting = threading.Event()


class LeftCalls:
    """Counts the calls that were given up and have not ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: set[NativeCall[Any]] = set()

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: NativeCall[Any]) -> None:
        """Until it has ended."""
        with self._lock:
            self._calls.add(call)
        call.when_ended(lambda: self._discard(call))

    def _discard(self, call: NativeCall[Any]) -> None:
        with self._lock:
            self._calls.discard(call)


class NativeCall(Generic[Result]):
    """One call. A `StuckCall` once it was given up."""

    def __init__(self, function: Callable[[], Result], ended: Callable[[Result, float], bool] | None) -> None:
        """`ended` says of a result and the seconds that it took whether all is over with it; None: it always is."""
        self._function = function
        self._ended = ended
        self._changed = threading.Condition()
        self._is_aborted = False
        self._is_over = False
        self._error: BaseException | None = None
        self._results: list[Result] = []
        self._after: list[Callable[[], None]] = []
        self.goes_on = True
        """Something of it may go on; also after it has returned."""

    def run(self) -> None:
        """On the thread that may be left behind. Raises nothing."""
        with _changed:
            _running.add(self)
        begun_s, begun_wall_s = time.monotonic(), time.time()
        goes_on = False
        try:
            result = self._function()
            # a library may go by the wall clock, which jumps, and stands still for no sleeping machine
            took_s = max(time.monotonic() - begun_s, time.time() - begun_wall_s)
            self._results.append(result)
            goes_on = self._ended is not None and not self._ended(result, took_s)
        except BaseException as error:  # whoever waits gets it
            self._error = error
        with self._changed:
            self._is_over, self.goes_on = True, goes_on
            after, self._after = self._after, []
            self._changed.notify_all()
        if not goes_on:
            for then in after:
                then()
        with _changed:
            _running.discard(self)
            _changed.notify_all()

    def abort(self) -> None:
        """Whoever waits for the result waits no longer."""
        with self._changed:
            self._is_aborted = True
            self._changed.notify_all()

    def when_ended(self, then: Callable[[], None]) -> None:
        with self._changed:
            if self.goes_on:
                self._after.append(then)
                return
        then()

    def wait(self, deadline_s: float) -> bool:
        """Whether it has returned by then. False at once where it is aborted."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._is_aborted, max(0.0, deadline_s - time.monotonic()))
            return self._is_over

    def result(self) -> Result:
        """After `wait`. Raises what the call has raised."""
        if self._error is not None:
            raise self._error
        return self._results[0]


class CallThread:
    """Makes one call after the other, and is of no use any more once one of them was given up."""

    def __init__(self, name: str, left: LeftCalls) -> None:
        self._left = left
        self._queue: queue.SimpleQueue[NativeCall[Any] | None] = queue.SimpleQueue()
        self._current: NativeCall[Any] | None = None
        self._is_aborted = False
        self._is_left = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, function: Callable[[], Result]) -> NativeCall[Result]:
        """Begins a call without waiting for it."""
        call = NativeCall(function, None)
        self._queue.put(call)
        return call

    def call(
        self,
        function: Callable[[], Result],
        deadline_s: float,
        ended: Callable[[Result, float], bool] | None = None,
    ) -> Result:
        """What `function` returns; raises what it raises. Raises StoreTimeoutError at `deadline_s`, and
        StoreUnreachableError where it was aborted: as stuck, for the call goes on. So may one that has returned."""
        call = NativeCall(function, ended)
        self._current = call
        if self._is_aborted or _exiting.is_set():
            raise StoreUnreachableError("broken off")
        self._queue.put(call)
        is_over = call.wait(deadline_s)
        self._current = None
        if is_over and not call.goes_on:
            return call.result()
        self._is_left = True
        self._left.add(call)
        if self._is_aborted:
            raise StoreUnreachableError("broken off", stuck=call)
        raise StoreTimeoutError("the client did not answer in time", stuck=call)

    def abort(self) -> None:
        """From another thread: what runs is given up."""
        self._is_aborted = True
        call = self._current
        if call is not None:
            call.abort()

    def close(self, wait_s: float = 0.0) -> None:
        """The thread ends after what it is at. Waits for that so long, unless it was left behind."""
        self._queue.put(None)
        if wait_s and not self._is_left:
            self._thread.join(wait_s)

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            call.run()
            del call


@atexit.register
def _wait_for_calls() -> None:
    _exiting.set()
    with _changed:
        _changed.wait_for(lambda: not _running, EXIT_S)
