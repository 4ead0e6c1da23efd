"""Made-up traffic for those who have no trace: four kinds of it, from a seed, the same on every machine.

Prompts are made of segments (a system prompt, a document, a turn) that requests share whole; blocks are cut from the
joined segments, so two prompts share their blocks exactly as far as their tokens are the same. Lengths and pauses are
log-normal, popularity is Zipf's: the shapes that production traces show, not the parameters of any of them.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvtier.errors import ConfigurationError
from kvtier.sim.traces import MOONCAKE_BLOCK_TOKENS, Trace, TraceRequest

NUM_SYSTEM_PROMPTS = 20
NUM_DOCUMENTS = 2000
MAX_PROMPT_TOKENS = 120_000


class Segment(NamedTuple):
    """A run of tokens that only this name stands for."""

    name: str
    num_tokens: int


class Turn(NamedTuple):
    """One request of a session: when after the session's start, what it asks, how much it gets."""

    after_s: float
    segments: list[Segment]
    output_tokens: int


class _Draw:
    """Random numbers in the shapes that traffic has."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def lognormal(self, median: float, sigma: float) -> float:
        return median * math.exp(self._random.gauss(0.0, sigma))

    def tokens(self, median: float, sigma: float) -> int:
        return max(1, round(self.lognormal(median, sigma)))

    def count(self, mean: float) -> int:
        """Geometric, from 1."""
        return 1 + int(math.log(1.0 - self._random.random()) / math.log(1.0 - 1.0 / mean)) if mean > 1 else 1

    def rank(self, count: int) -> int:
        """0..count-1, 0 the most popular: by inverting the integral of 1/x."""
        return min(count - 1, int(count ** self._random.random()) - 1)

    def pause_s(self, mean: float) -> float:
        return self._random.expovariate(1.0 / mean)

    def chance(self, share: float) -> bool:
        return self._random.random() < share


def _fixed_tokens(name: str, number: int, median: float, sigma: float) -> Segment:
    """A shared segment: its length depends on its name alone."""
    length = _Draw(number * 7919 + len(name)).tokens(median, sigma)
    return Segment(f"{name} {number}", length)


def _chat(draw: _Draw, session: str) -> Iterator[Turn]:
    """People who talk: a short question, an answer that becomes part of the next prompt, a minute between them."""
    segments = [_fixed_tokens("system", draw.rank(NUM_SYSTEM_PROMPTS), 700, 0.8)]
    if draw.chance(0.3):
        segments.append(Segment(f"{session} attachment", draw.tokens(6000, 0.9)))
    at_s = 0.0
    for turn in range(draw.count(4.0)):
        segments.append(Segment(f"{session} question {turn}", draw.tokens(80, 1.2)))
        output = draw.tokens(250, 0.8)
        yield Turn(at_s, list(segments), output)
        segments.append(Segment(f"{session} answer {turn}", output))
        at_s += output / 50 + draw.lognormal(60, 1.1)


def _system(draw: _Draw, session: str) -> Iterator[Turn]:
    """One call each, behind one of a few long shared system prompts."""
    system = _fixed_tokens("system", draw.rank(NUM_SYSTEM_PROMPTS), 3000, 0.6)
    yield Turn(0.0, [system, Segment(f"{session} input", draw.tokens(400, 1.0))], draw.tokens(150, 0.8))


def _tools(draw: _Draw, session: str) -> Iterator[Turn]:
    """A loop of tool calls: every result is appended and everything is asked again, seconds later."""
    segments = [
        _fixed_tokens("tools", draw.rank(5), 6000, 0.3),
        Segment(f"{session} task", draw.tokens(1500, 0.9)),
    ]
    at_s = 0.0
    for step in range(draw.count(18.0)):
        output = draw.tokens(150, 0.7)
        yield Turn(at_s, list(segments), output)
        segments.append(Segment(f"{session} call {step}", output))
        segments.append(Segment(f"{session} result {step}", draw.tokens(900, 1.1)))
        at_s += output / 50 + draw.lognormal(4, 1.0)


def _rag(draw: _Draw, session: str) -> Iterator[Turn]:
    """Documents in front of a question, the most popular first, so that their order is shared too."""
    documents = sorted({draw.rank(NUM_DOCUMENTS) for _ in range(1 + draw.count(3.0))})
    segments = [Segment("system rag", 600), *(_fixed_tokens("document", number, 1200, 0.6) for number in documents)]
    at_s = 0.0
    for turn in range(draw.count(1.5)):
        segments.append(Segment(f"{session} question {turn}", draw.tokens(60, 0.8)))
        output = draw.tokens(200, 0.7)
        yield Turn(at_s, list(segments), output)
        segments.append(Segment(f"{session} answer {turn}", output))
        at_s += output / 50 + draw.lognormal(45, 1.0)


def _mixed(draw: _Draw, session: str) -> Iterator[Turn]:
    """Half chats, a quarter documents, the rest single calls and a few tool loops."""
    if draw.chance(0.5):
        return _chat(draw, session)
    if draw.chance(0.5):
        return _rag(draw, session)
    return _tools(draw, session) if draw.chance(0.2) else _system(draw, session)


_KINDS: dict[str, tuple[Callable[[_Draw, str], Iterator[Turn]], float]] = {
    "chat": (_chat, 4.0),
    "system": (_system, 1.0),
    "tools": (_tools, 18.0),
    "rag": (_rag, 1.5),
    "mixed": (_mixed, 3.5),
}
"""Kind -> what makes a session's turns, and their mean number."""
KINDS = tuple(_KINDS)


class _BlockIds:
    """Numbers the blocks of prompts: equal prefixes, equal ids. One entry a distinct block."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._known: dict[tuple[object, ...], int] = {}

    def ids_of(self, segments: list[Segment]) -> tuple[int, ...]:
        """One id for each block of the joined segments, the last one perhaps partial. O(blocks + segments)."""
        ids: list[int] = []
        pieces: list[tuple[str, int, int]] = []
        missing = self._block_tokens
        above = -1
        for number, segment in enumerate(segments):
            offset = 0
            while offset < segment.num_tokens:
                taken = min(missing, segment.num_tokens - offset)
                pieces.append((segment.name, offset, taken))
                offset += taken
                missing -= taken
                ended = number == len(segments) - 1 and offset == segment.num_tokens
                if not missing or ended:
                    above = self._known.setdefault((above, *pieces), len(self._known))
                    ids.append(above)
                    pieces, missing = [], self._block_tokens
        return tuple(ids)


def generate(
    kind: str,
    num_requests: int,
    *,
    requests_per_s: float = 2.0,
    seed: int = 0,
    block_tokens: int = MOONCAKE_BLOCK_TOKENS,
) -> Trace:
    """`num_requests` requests of one of `KINDS`, arriving at about `requests_per_s` once it is under way.

    The same arguments give the same trace. Raises ConfigurationError for an unknown kind or numbers that make none.
    """
    if kind not in _KINDS:
        raise ConfigurationError(f"kind of traffic {kind!r} is unknown; allowed: {', '.join(KINDS)}")
    if num_requests < 1 or not 0 < requests_per_s < math.inf or block_tokens < 1:
        raise ConfigurationError(
            f"{num_requests} requests at {requests_per_s:g} a second in blocks of {block_tokens} tokens; "
            "allowed: more than 0 of each"
        )
    make_turns, turns_per_session = _KINDS[kind]
    draw = _Draw(seed)
    turns: list[tuple[float, int, Turn]] = []
    session_at_s, session = 0.0, 0
    later: list[float] = []
    """Times of turns that a session to come may still precede."""
    num_settled = 0
    while num_settled < num_requests:
        for turn in make_turns(draw, f"session {session}"):
            if sum(segment.num_tokens for segment in turn.segments) > MAX_PROMPT_TOKENS:
                break
            turns.append((session_at_s + turn.after_s, session, turn))
            heapq.heappush(later, turns[-1][0])
        session_at_s += draw.pause_s(turns_per_session / requests_per_s)
        session += 1
        while later and later[0] <= session_at_s:
            heapq.heappop(later)
            num_settled += 1
    turns.sort(key=lambda entry: entry[:2])
    blocks = _BlockIds(block_tokens)
    requests = [
        TraceRequest(
            timestamp_ms=round(at_s * 1000),
            input_length=sum(segment.num_tokens for segment in turn.segments),
            output_length=turn.output_tokens,
            hash_ids=blocks.ids_of(turn.segments),
        )
        for at_s, _, turn in turns[:num_requests]
    ]
    return Trace(f"{kind}, seed {seed}", block_tokens, requests)
