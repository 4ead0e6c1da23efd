"""The engine's traffic as a trace file, if the setting `record_trace` names one."""

from __future__ import annotations

import os
import time
from pathlib import Path

from vllm.logger import init_logger
from vllm.v1.request import Request

from kvtier.clock import Clock
from kvtier.errors import ConfigurationError
from kvtier.runtime.recorder import SALT_BYTES, TraceRecorder
from kvtier.transfers.line_file import LineFile

logger = init_logger(__name__)

_MAX_FILES = 10_000


class Recording:
    """Writes one line for each request that ends. Nothing here raises, or waits for a disk, once it is made.

    An existing file is left alone: the next free number is put before the ending. Raises ConfigurationError if no
    file can be made.
    """

    def __init__(self, path: str, tokens_per_hash: int, clock: Clock = time.monotonic) -> None:
        self._recorder = TraceRecorder(os.urandom(SALT_BYTES), tokens_per_hash)
        self._clock = clock
        self._file = _new_file(Path(path))
        self._said_failure = False
        logger.info(
            "kvtier: recording the traffic to %s: lengths, times and salted ids of %d tokens each; no tokens, no text",
            self._file.path,
            self._recorder.block_tokens,
        )

    def arrived(self, request: Request) -> None:
        """A request is there."""
        self._recorder.arrived(request.request_id, self._clock())

    def finished(self, request: Request) -> None:
        """A request has ended, in whatever way."""
        try:
            line = self._recorder.finished(
                request.request_id, request.block_hashes, request.num_prompt_tokens, request.num_output_tokens
            )
        except Exception as error:
            self._say(f"a request could not be recorded: {error!r}")
            return
        if line is not None:
            self._file.append(line)
        if self._file.failure is not None:
            self._say(f"{self._file.path} could not be written any further: {self._file.failure}")

    def close(self) -> None:
        """Writes what is left."""
        if not self._file.close() or self._file.num_dropped:
            logger.warning("kvtier: %s is not complete; %d lines lost", self._file.path, self._file.num_dropped)

    def _say(self, message: str) -> None:
        if not self._said_failure:
            self._said_failure = True
            logger.error("kvtier: %s", message)


def _new_file(path: Path) -> LineFile:
    for number in range(1, _MAX_FILES):
        name = path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
        try:
            return LineFile(name)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigurationError(f"record_trace is {str(path)!r}: {error.strerror}") from error
    raise ConfigurationError(f"record_trace is {str(path)!r}: {_MAX_FILES} recordings are there already")
