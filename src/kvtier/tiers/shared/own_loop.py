"""`OwnLoop`: awaits what a library offers to asyncio, from a thread that has no use for asyncio itself."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from kvtier.tiers.shared.store import StoreTimeoutError, StoreUnreachableError

T = TypeVar("T")


class OwnLoop:
    """Used by one thread at a time, one on which no other loop runs (`on_a_thread`); `abort` is for others. Whatever
    is awaited is over by its deadline, or cancelled."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._task: asyncio.Task[Any] | None = None
        self._is_aborted = False

    def run(self, work: Callable[[], Coroutine[Any, Any, T]], deadline_s: float) -> T:
        """Waits for `work()`. Raises StoreTimeoutError past `deadline_s` (`time.monotonic`), StoreUnreachableError when
        aborted, and what `work` raises."""
        with self._lock:
            if self._is_aborted:
                raise StoreUnreachableError("the connection is closed")
            self._task = task = self._loop.create_task(_within(work, deadline_s))
        try:
            return self._loop.run_until_complete(task)
        except asyncio.CancelledError:
            raise StoreUnreachableError("the operation was broken off") from None
        finally:
            with self._lock:
                self._task = None

    def abort(self) -> None:
        """From another thread: what runs is cancelled, and so is all that comes."""
        with self._lock:
            self._is_aborted = True
            if self._task is not None:
                self._loop.call_soon_threadsafe(self._task.cancel)

    def close(self) -> None:
        with self._lock:
            self._is_aborted = True
        self._loop.close()


async def _within(work: Callable[[], Coroutine[Any, Any, T]], deadline_s: float) -> T:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise StoreTimeoutError("there was no time left")
    try:
        async with asyncio.timeout(left_s):
            return await work()
    except TimeoutError:
        raise StoreTimeoutError("the server did not answer in time") from None


def on_a_thread(work: Callable[[], T]) -> T:
    """The result of `work()`, or what it raises, on a thread that lives as long as that."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="kvtier-shared-once", daemon=True)
    thread.start()
    thread.join()
    for error in errors:
        raise error
    return results[0]


async def each(work: Callable[[T], Coroutine[Any, Any, None]], items: Sequence[T], parallel: int) -> None:
    """Awaits `work` of every item, in order, `parallel` of them at a time. The first error cancels the others."""
    left = iter(items)

    async def run() -> None:
        for item in left:
            await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(parallel, len(items))):
                group.create_task(run())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
