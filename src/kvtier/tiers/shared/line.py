"""`Line`: a connection to a shared store that one thread uses, made when it is needed, and anew where it broke."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.tiers.shared.store import (
    Store,
    StoreConnection,
    StoreRefusedError,
    StoreTimeoutError,
    StoreUnreachableError,
    StuckCall,
)

logger = logging.getLogger(__name__)

REPEAT_PAUSE_S = 0.02
"""Before what broke is repeated: half of this to all of it."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an operation did not work."""

    reason: str
    timed_out: bool = False
    """The store may be well, and only slow."""
    stuck: StuckCall | None = None
    """What goes on nevertheless."""


class Line:
    """Used by one thread; `abort` is for others."""

    def __init__(self, store: Store, stopping: threading.Event, connect_timeout_s: float) -> None:
        self._store = store
        self._stopping = stopping
        self._connect_timeout_s = connect_timeout_s
        self._connection: StoreConnection | None = None

    def connect(self) -> Failure | None:
        """Makes a new connection. None, or why that did not work."""
        self.close()
        return self.run(lambda connection, deadline_s: None, self._connect_timeout_s, repeat=False)

    def run(
        self, operation: Callable[[StoreConnection, float], None], timeout_s: float, repeat: bool = True
    ) -> Failure | None:
        """Does something over the connection. None, or why that did not work: it is over within `timeout_s`.

        What broke is begun once more over a new connection, unless not `repeat`; what timed out, was refused, or goes
        on is not.
        """
        deadline_s = time.monotonic() + timeout_s
        failure: Failure | None = None
        for attempt in range(2 if repeat else 1):
            if attempt and self._stopping.wait(REPEAT_PAUSE_S * random.uniform(0.5, 1.0)):
                break
            try:
                if self._connection is None:
                    # not for as long as a transfer may take: this cannot be broken off
                    self._connection = self._store.connect(min(deadline_s, time.monotonic() + self._connect_timeout_s))
                if self._stopping.is_set():
                    self.close()
                    return Failure("the tier is being closed")
                operation(self._connection, deadline_s)
                return None
            except StoreTimeoutError as error:
                self.close()
                return Failure(str(error), timed_out=True, stuck=error.stuck)
            except StoreUnreachableError as error:
                self.close()
                failure = Failure(str(error), stuck=error.stuck)
                if error.stuck is not None:
                    break
            except StoreRefusedError as error:
                self.close()
                return Failure(str(error))
            except BaseException as error:  # a bug: said, and the thread has other things to do
                self.close()
                logger.exception("kvtier: an operation on %s failed", self._store.place)
                return Failure(f"{type(error).__name__}: {error}")
        return failure

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def abort(self) -> None:
        """From another thread: whatever runs on the connection fails now."""
        connection = self._connection
        if connection is not None:
            connection.abort()
