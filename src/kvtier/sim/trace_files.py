"""Writes traces in the Mooncake format."""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Iterable
from pathlib import Path

from kvtier.errors import ConfigurationError
from kvtier.runtime.recorder import TraceLine, encode_line
from kvtier.sim.traces import TraceRequest, zstandard_for


def encode_requests(requests: Iterable[TraceRequest]) -> bytes:
    """The requests as lines, times rounded to milliseconds. O(blocks)."""
    return b"".join(
        encode_line(
            TraceLine(round(request.timestamp_ms), request.input_length, request.output_length, list(request.hash_ids))
        )
        for request in requests
    )


def write_trace(requests: Iterable[TraceRequest], path: Path) -> None:
    """Writes a trace, compressed if `path` ends in .gz, .xz or .zst. Equal requests give equal bytes.

    Raises ConfigurationError if the file cannot be written.
    """
    content = encode_requests(requests)
    if path.suffix == ".gz":
        content = gzip.compress(content, mtime=0)
    elif path.suffix == ".xz":
        content = lzma.compress(content)
    elif path.suffix == ".zst":
        content = zstandard_for(path).compress(content)
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from error
