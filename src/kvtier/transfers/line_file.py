"""Lines to a file from a thread of their own: whoever hands one over never waits for the disk."""

from __future__ import annotations

import os
import queue
import threading
from pathlib import Path

_MAX_QUEUED = 10_000


class LineFile:
    """Appends whole lines to a new file that only its owner can read. Lines that find the queue full are dropped.

    A write that fails ends the file: what comes later is dropped too. `failure` says why, `num_dropped` how many.
    Raises OSError if the file exists or cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failure: OSError | None = None
        self.num_dropped = 0
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._queue: queue.Queue[bytes | None] = queue.Queue(_MAX_QUEUED)
        self._thread = threading.Thread(target=self._write_all, name="kvtier-lines", daemon=True)
        self._thread.start()

    def append(self, line: bytes) -> None:
        """Hands over one line, with its end. Never waits."""
        if self.failure is not None:
            self.num_dropped += 1
            return
        try:
            self._queue.put_nowait(line)
        except queue.Full:
            self.num_dropped += 1

    def close(self, wait_s: float = 2.0) -> bool:
        """Writes what is queued, for at most `wait_s`. Whether all of it was written. Idempotent."""
        try:
            self._queue.put(None, timeout=wait_s)
        except queue.Full:
            return False
        self._thread.join(wait_s)
        return not self._thread.is_alive() and self.failure is None

    def _write_all(self) -> None:
        try:
            while True:
                lines = [self._queue.get()]
                while lines[-1] is not None and len(lines) < _MAX_QUEUED:
                    try:
                        lines.append(self._queue.get_nowait())
                    except queue.Empty:
                        break
                self._write(b"".join(line for line in lines if line is not None))
                if lines[-1] is None:
                    return
        except OSError as error:
            self.failure = error
        finally:
            os.close(self._fd)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
