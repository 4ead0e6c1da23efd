"""Request traces: what is read from files and what the simulator and the planner work on.

Two formats, told apart by their fields. Mooncake's (FAST 2025): one id for each 512 tokens of the prompt, the last
one perhaps of a partial block, times in milliseconds. Bailian's: one id for each 16 tokens, times in seconds,
conversations named. In a `Trace` an id stands for its block and everything before it, whatever the file said.
"""

from __future__ import annotations

import gzip
import importlib
import io
import lzma
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Annotated, Any, cast

import msgspec

from kvtier.errors import ConfigurationError
from kvtier.keys import OffloadKey, make_offload_key

MOONCAKE_BLOCK_TOKENS = 512
BAILIAN_BLOCK_TOKENS = 16
_HASH_BYTES = 32
_NonNegative = Annotated[int, msgspec.Meta(ge=0)]
_Time = Annotated[float, msgspec.Meta(ge=0)]
_SHOWN_CHARACTERS = 40


class TraceRequest(msgspec.Struct, frozen=True):
    """One request: arrival in milliseconds, lengths in tokens, prefix blocks shallowest first. A Mooncake line."""

    timestamp_ms: _Time = msgspec.field(name="timestamp")
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: _NonNegative
    hash_ids: Annotated[tuple[int, ...], msgspec.Meta(min_length=1)]


class BailianLine(msgspec.Struct, frozen=True):
    """A line of a Bailian trace. `timestamp` in seconds; -1 as `parent_chat_id` begins a conversation."""

    chat_id: int
    parent_chat_id: int
    timestamp: _Time
    type: str
    turn: int
    hash_ids: tuple[int, ...]
    input_length: _NonNegative | None = None
    output_length: _NonNegative = 0


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival. `num_skipped` lines of the file were bad; `first_skipped` says why the first."""

    name: str
    block_tokens: int
    requests: Sequence[TraceRequest]
    num_skipped: int = 0
    first_skipped: str = ""

    @cached_property
    def num_blocks(self) -> int:
        """Blocks of all prompts together. O(requests), once."""
        return sum(len(request.hash_ids) for request in self.requests)

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of all prompts together. O(requests), once."""
        return sum(request.input_length for request in self.requests)

    @cached_property
    def num_unique_blocks(self) -> int:
        """Distinct blocks: the trace's footprint. O(blocks), once."""
        return len(self._key_of)

    @cached_property
    def _key_of(self) -> dict[int, OffloadKey]:
        ids = dict.fromkeys(block for request in self.requests for block in request.hash_ids)
        return {block: make_offload_key(block.to_bytes(_HASH_BYTES, "big", signed=True), 0) for block in ids}

    @cached_property
    def keys(self) -> list[list[OffloadKey]]:
        """The manager's keys of each request's blocks. Equal blocks share one object. O(blocks), once."""
        key_of = self._key_of.__getitem__
        return [list(map(key_of, request.hash_ids)) for request in self.requests]

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last."""
        return (self.requests[-1].timestamp_ms - self.requests[0].timestamp_ms) / 1000

    def full_blocks_only(self) -> Trace:
        """Without the partial last block of each prompt: engines hash full blocks only."""
        requests = []
        for request in self.requests:
            num_full = request.input_length // self.block_tokens
            if num_full < len(request.hash_ids):
                request = msgspec.structs.replace(request, hash_ids=request.hash_ids[:num_full])  # noqa: PLW2901
            requests.append(request)
        return replace(self, requests=requests)

    def first(self, num_requests: int) -> Trace:
        """The first so many requests."""
        return replace(self, requests=self.requests[:num_requests])


def read_trace(path: Path, *, block_tokens: int | None = None, skip_bad: bool = False) -> Trace:
    """Reads a trace, plain or as .gz, .xz or .zst. `block_tokens`: tokens of one id, where it is not the format's.

    Raises ConfigurationError that names the file, the line and what is wrong with it; with `skip_bad` bad lines are
    counted instead. O(file), which is read line by line.
    """
    reader = _Reader(block_tokens)
    requests = []
    num_skipped, first_skipped = 0, ""
    try:
        with _open(path) as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    requests.append(reader.parse(line))
                except _BadLineError as error:
                    if not skip_bad:
                        raise ConfigurationError(f"{path}, line {number}: {error}") from None
                    num_skipped += 1
                    first_skipped = first_skipped or f"line {number}: {error}"
    except FileNotFoundError:
        raise ConfigurationError(f"trace: {path} does not exist") from None
    except _read_errors(path) as error:
        raise ConfigurationError(f"trace: {path} cannot be read: {error}") from error
    if not requests:
        skipped = f" ({num_skipped} bad lines; {first_skipped})" if num_skipped else ""
        raise ConfigurationError(f"trace: {path} holds no request{skipped}")
    requests.sort(key=lambda request: request.timestamp_ms)
    return Trace(path.name, reader.block_tokens or MOONCAKE_BLOCK_TOKENS, requests, num_skipped, first_skipped)


class _BadLineError(Exception):
    """What is wrong with one line."""


class _Reader:
    """Parses lines. The first line that is an object decides which format the file has."""

    def __init__(self, block_tokens: int | None) -> None:
        self.block_tokens = block_tokens
        self._parse: Callable[[bytes], TraceRequest] | None = None
        self._mooncake = msgspec.json.Decoder(TraceRequest)
        self._bailian = msgspec.json.Decoder(BailianLine)
        self._chained: dict[tuple[int, int], int] = {}

    def parse(self, line: bytes) -> TraceRequest:
        try:
            if self._parse is None:
                self._choose_format(line)
            assert self._parse is not None
            return self._parse(line)
        except msgspec.ValidationError as error:
            raise _BadLineError(_in_words(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _BadLineError(f"not JSON: {error}") from None

    def _choose_format(self, line: bytes) -> None:
        fields = msgspec.json.decode(line)
        if not isinstance(fields, dict):
            shown = line.decode(errors="replace").strip()[:_SHOWN_CHARACTERS]
            raise _BadLineError(f"{shown!r} is not an object with the fields of a request")
        is_bailian = "chat_id" in fields
        self._parse = self._parse_bailian if is_bailian else self._parse_mooncake
        self.block_tokens = self.block_tokens or (BAILIAN_BLOCK_TOKENS if is_bailian else MOONCAKE_BLOCK_TOKENS)

    def _parse_mooncake(self, line: bytes) -> TraceRequest:
        request = self._mooncake.decode(line)
        self._check_count(len(request.hash_ids), request.input_length)
        return request

    def _parse_bailian(self, line: bytes) -> TraceRequest:
        fields = self._bailian.decode(line)
        assert self.block_tokens is not None
        num_ids = len(fields.hash_ids)
        input_length = num_ids * self.block_tokens if fields.input_length is None else fields.input_length
        if not input_length:
            raise _BadLineError("neither hash_ids nor an input_length: an empty prompt")
        self._check_count(num_ids, input_length)
        return TraceRequest(
            timestamp_ms=fields.timestamp * 1000,
            input_length=input_length,
            output_length=fields.output_length,
            hash_ids=self._chain(fields.hash_ids),
        )

    def _check_count(self, num_ids: int, input_length: int) -> None:
        """A partial last block has an id in some traces and none in others."""
        assert self.block_tokens is not None
        expected = -(-input_length // self.block_tokens)
        if num_ids != expected and num_ids != input_length // self.block_tokens:
            raise _BadLineError(
                f"{num_ids} hash_ids for input_length {input_length}, expected {expected} "
                f"(one for each {self.block_tokens} tokens)"
            )

    def _chain(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Ids that stand for the whole prefix; where they did already, others for the same blocks."""
        chained, above = [], -1
        known = self._chained
        for block in ids:
            above = known.setdefault((above, block), len(known))
            chained.append(above)
        return tuple(chained)


def _in_words(error: msgspec.ValidationError) -> str:
    """msgspec's message with the field in front: "hash_ids[0]: expected int, got str"."""
    text = str(error).replace("`", "")
    what, _, where = text.partition(" - at $")
    what = what[:1].lower() + what[1:]
    if what.startswith("object missing required field "):
        return f"{what.removeprefix('object missing required field ')} is missing"
    return f"{where.lstrip('.')}: {what}" if where.lstrip(".") else what


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".zst":
        return io.BufferedReader(zstandard_for(path).open(path, "rb"))
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
    return cast("IO[bytes]", openers.get(path.suffix, open)(path, "rb"))


def zstandard_for(path: Path) -> Any:
    """The package that reads and writes .zst. Raises ConfigurationError, naming what to install, without it."""
    try:
        return importlib.import_module("zstandard")
    except ImportError:
        raise ConfigurationError(f"trace: {path} needs the package zstandard: pip install 'kvtier[traces]'") from None


def _read_errors(path: Path) -> tuple[type[Exception], ...]:
    errors: list[type[Exception]] = [OSError, EOFError, lzma.LZMAError]
    if path.suffix == ".zst":
        errors.append(zstandard_for(path).ZstdError)
    return tuple(errors)
