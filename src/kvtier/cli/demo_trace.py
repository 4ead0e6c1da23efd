"""Request traces in the Mooncake JSONL format, scaled down to a small model on a small machine.

A trace names each request's prefix blocks (512 tokens each) by ids; an id stands for its block and everything
before it. Here each id becomes one engine block of tokens that depend on the id alone, so that exactly the
prefixes that production requests shared are shared in the engine, at a sixteenth of the length.
"""

from __future__ import annotations

import gzip
import json
import lzma
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kvtier.errors import ConfigurationError

TRACE_BLOCK_TOKENS = 512
"""What one id of a trace stands for."""
MAX_OUTPUT_TOKENS = 64
_COMMON_SHARE = 0.02
"""A block in more of the requests than this is a shared system prompt: it does not make a conversation."""
_TOKENS = (1000, 40_000)
"""Range of the made-up token ids: ordinary words, no control tokens."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace: arrival in milliseconds, lengths in the trace's tokens."""

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScaledRequest:
    """One request of the demo: arrival in seconds after its start, tokens of the demo's model."""

    at_s: float
    prompt: list[int]
    output_tokens: int
    cut: bool
    """Whether the prompt was longer than the engine takes and lost its end."""


def read_trace(path: Path) -> list[TraceRequest]:
    """Every request of a trace, in order of arrival. Also reads .gz and .xz.

    Raises ConfigurationError that names the file, the line and what is wrong with it.
    """
    opener: Callable[..., IO[str]] = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)  # type: ignore[assignment]
    requests = []
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    requests.append(_parse(line, f"{path}, line {number}"))
    except FileNotFoundError:
        raise ConfigurationError(f"trace: {path} does not exist") from None
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError) as error:
        raise ConfigurationError(f"trace: {path} cannot be read: {error}") from error
    if not requests:
        raise ConfigurationError(f"trace: {path} holds no request")
    requests.sort(key=lambda request: request.timestamp_ms)
    return requests


def _parse(line: str, where: str) -> TraceRequest:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(fields, dict):
        raise ConfigurationError(f"{where}: {line.strip()[:40]!r} is not an object with the fields of a request")
    ids = _field(fields, "hash_ids", where)
    if not isinstance(ids, list) or not ids or not all(_is_int(block) for block in ids):
        raise ConfigurationError(f"{where}: hash_ids is {_short(ids)}, expected a list of at least one integer")
    input_length = _number(fields, "input_length", where, least=1, whole=True)
    needed = -(-input_length // TRACE_BLOCK_TOKENS)
    if len(ids) != needed:
        raise ConfigurationError(
            f"{where}: {len(ids)} hash_ids for input_length {input_length:g}, expected {needed:g} "
            f"(one for each {TRACE_BLOCK_TOKENS} tokens)"
        )
    return TraceRequest(
        timestamp_ms=_number(fields, "timestamp", where, least=0),
        input_length=int(input_length),
        output_length=int(_number(fields, "output_length", where, least=0, whole=True)),
        hash_ids=tuple(ids),
    )


def _field(fields: dict[str, Any], name: str, where: str) -> Any:
    try:
        return fields[name]
    except KeyError:
        raise ConfigurationError(f"{where}: {name} is missing") from None


def _number(fields: dict[str, Any], name: str, where: str, *, least: int, whole: bool = False) -> float:
    value = _field(fields, name, where)
    kind = "an integer" if whole else "a number"
    if not (_is_int(value) or (isinstance(value, float) and not whole)) or not least <= value < math.inf:
        raise ConfigurationError(f"{where}: {name} is {_short(value)}, expected {kind} of at least {least}")
    return float(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def sample_conversations(
    requests: Sequence[TraceRequest], count: int, window_s: float = math.inf
) -> list[TraceRequest]:
    """Up to `count` requests of the first `window_s` seconds: whole conversations, the same ones every time.

    The first requests of a trace are a few seconds of many users' traffic and share almost nothing. Fewer users over
    a longer time keep what matters to a cache: how much of a prompt comes back, and after how much else.
    """
    until_ms = requests[0].timestamp_ms + window_s * 1000
    requests = [request for request in requests if request.timestamp_ms <= until_ms]
    seen = Counter(block for request in requests for block in set(request.hash_ids))
    common = {block for block, times in seen.items() if times > max(2, _COMMON_SHARE * len(requests))}
    conversations: dict[int, list[int]] = defaultdict(list)
    for number, request in enumerate(requests):
        # a request of common blocks alone is a conversation of its own
        root = next((block for block in request.hash_ids if block not in common), -1 - number)
        conversations[root].append(number)
    roots = sorted(conversations)
    random.Random(0).shuffle(roots)
    picked: list[int] = []
    for root in roots:
        if len(picked) >= count:
            break
        picked += conversations[root]
    return [requests[number] for number in sorted(picked)[:count]]


def scale(requests: Sequence[TraceRequest], *, block_size: int, speed: float, max_prompt: int) -> list[ScaledRequest]:
    """What the engine is asked, with arrival times divided by `speed` and lengths by `512 / block_size`."""
    shrink = TRACE_BLOCK_TOKENS // block_size
    start_ms = requests[0].timestamp_ms
    scaled = []
    for request in requests:
        output = min(MAX_OUTPUT_TOKENS, max(1, round(request.output_length / shrink)))
        length = -(-request.input_length // shrink)
        prompt = [token for block in request.hash_ids for token in block_tokens(block, block_size)]
        at_s = (request.timestamp_ms - start_ms) / 1000 / speed
        scaled.append(ScaledRequest(at_s, prompt[: min(length, max_prompt)], output, length > max_prompt))
    return scaled


def block_tokens(block: int, block_size: int) -> list[int]:
    """The tokens that stand for one id. The same in every run and on every machine."""
    draw = random.Random(block)
    return [draw.randrange(*_TOKENS) for _ in range(block_size)]
