"""Request traces in the Mooncake JSONL format, scaled down to a small model on a small machine.

A trace names each request's prefix blocks (512 tokens each) by ids; an id stands for its block and everything
before it. Here each id becomes one engine block of tokens that depend on the id alone, so that exactly the
prefixes that production requests shared are shared in the engine, at a sixteenth of the length.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import ConfigurationError
from kvtier.sim.traces import MOONCAKE_BLOCK_TOKENS as TRACE_BLOCK_TOKENS
from kvtier.sim.traces import TraceRequest, read_trace

MAX_OUTPUT_TOKENS = 64
_COMMON_SHARE = 0.02
"""A block in more of the requests than this is a shared system prompt: it does not make a conversation."""
_TOKENS = (1000, 40_000)
"""Range of the made-up token ids: ordinary words, no control tokens."""


@dataclass(frozen=True, slots=True)
class ScaledRequest:
    """One request of the demo: arrival in seconds after its start, tokens of the demo's model."""

    at_s: float
    prompt: list[int]
    output_tokens: int
    cut: bool
    """Whether the prompt was longer than the engine takes and lost its end."""


def read_demo_trace(path: Path) -> list[TraceRequest]:
    """Every request of a trace in 512-token blocks, in order of arrival. Raises ConfigurationError."""
    trace = read_trace(path)
    if trace.block_tokens != TRACE_BLOCK_TOKENS:
        raise ConfigurationError(
            f"trace: {path} has blocks of {trace.block_tokens} tokens; the demo needs {TRACE_BLOCK_TOKENS}"
        )
    return list(trace.requests)


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
