"""Calls that may hang in a filesystem, made by who must not."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class _Call(Generic[T]):
    def __init__(self, function: Callable[[], T]) -> None:
        self.ended = threading.Event()
        self.result: T | None = None
        self.error: Exception | None = None
        self._function = function

    def make(self) -> None:
        try:
            self.result = self._function()
        except Exception as error:
            self.error = error
        self.ended.set()


class BoundedCalls(Generic[T]):
    """One thread, begun with the first call, that makes one call at a time. It does not keep the process alive.

    For one caller. A call that is given up goes on; until it has ended, others are refused at once.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._queue: queue.SimpleQueue[_Call[T] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._given_up: _Call[T] | None = None

    def __call__(self, function: Callable[[], T]) -> T:
        """What `function` returns or raises. Raises TimeoutError if it takes too long, or one before it still runs."""
        if self._given_up is not None and not self._given_up.ended.is_set():
            raise TimeoutError("an earlier call has not come back yet")
        self._given_up = None
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        call = _Call(function)
        self._queue.put(call)
        if not call.ended.wait(self._timeout_s):
            self._given_up = call
            raise TimeoutError(f"no answer in {self._timeout_s:g} s")
        if call.error is not None:
            raise call.error
        return call.result  # type: ignore[return-value]

    def close(self) -> None:
        """The thread ends after the call that it is in, if any. Nothing is called any more."""
        self._queue.put(None)

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            call.make()
