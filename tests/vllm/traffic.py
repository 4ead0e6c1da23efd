"""Requests that share prefixes, some of them taken back, and how an engine in a process of its own gets them."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from driven_process import DrivenProcess
from vllm_harness import BLOCK

LONGEST_PROMPT = 7 * BLOCK + 40


@dataclass
class Request:
    prompt: list[int]
    max_tokens: int
    abort_after: int | None
    tokens: list[int] = field(default_factory=list)
    outcome: str = ""
    """Empty, "finished" or "aborted"."""


class Traffic:
    """Prompts that share prefixes of several depths, some of them twice. The same for the same seed."""

    def __init__(self, seed: int, num_requests: int, most_tokens: int) -> None:
        self._rng = Random(seed)
        self.requests: list[Request] = []
        stems: list[list[int]] = []
        for _ in range(10):
            root = self._tokens(self._rng.randint(1, 4) * BLOCK)
            stems += [root, *(root + self._tokens(self._rng.randint(1, 3) * BLOCK) for _ in range(2))]
        for _ in range(num_requests):
            self.requests.append(Request(self._prompt(stems), self._rng.randint(1, most_tokens), self._abort_after()))
        self.resets = {self._rng.randrange(num_requests) for _ in range(3)}
        """Before which requests the caches are reset."""

    def undisturbed(self) -> Traffic:
        """The same without aborts and resets. Changes this object."""
        for request in self.requests:
            request.abort_after = None
        self.resets = set()
        return self

    def check(self, expected: list[list[int]], of: str) -> None:
        """Every token that has come is right, and all have come unless the request was aborted or is not over."""
        for i, (request, tokens) in enumerate(zip(self.requests, expected, strict=True)):
            right = tokens[: request.max_tokens]
            if request.outcome != "finished":
                right = right[: len(request.tokens)]
            said = f"{request.outcome or 'not over'}: {request.tokens} instead of {right}"
            assert request.tokens == right, f"{of}: request {i}, {said}"

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(3, 512) for _ in range(count)]

    def _prompt(self, stems: list[list[int]]) -> list[int]:
        if self.requests and self._rng.random() < 0.15:
            return self._rng.choice(self.requests).prompt
        return self._rng.choice(stems) + self._tokens(self._rng.choice((1, 5, 20, BLOCK, 40)))

    def _abort_after(self) -> int | None:
        return self._rng.choice((0, 1, 2, 3, 5, 8)) if self._rng.random() < 0.15 else None


class Run:
    """`traffic` on its way through an engine, `at_once` requests at a time."""

    def __init__(self, engine: DrivenProcess, traffic: Traffic, at_once: int) -> None:
        self._engine = engine
        self._traffic = traffic
        self._at_once = at_once
        self._num_sent = 0
        self._num_over = 0

    @property
    def is_over(self) -> bool:
        return self._num_over == len(self._traffic.requests)

    def to_the_end(self) -> None:
        """Until every request is over."""
        while not self.is_over:
            self.next_answer()

    def next_answer(self) -> None:
        """Hands in what may be, and takes one answer."""
        self._send()
        answer = self._engine.read()
        assert answer is not None, f"the engine has died\n{self._engine.log_tail()}"
        self._take(answer)

    def rest(self) -> None:
        """What a dead engine had said before."""
        while (answer := self._engine.read()) is not None:
            self._take(answer)

    def _send(self) -> None:
        requests = self._traffic.requests
        while self._num_sent < min(len(requests), self._num_over + self._at_once):
            if self._num_sent in self._traffic.resets:
                self._engine.send("reset")
            request = requests[self._num_sent]
            self._engine.send("ask", str(self._num_sent), request.prompt, request.max_tokens, request.abort_after)
            self._num_sent += 1

    def _take(self, answer: list[Any]) -> None:
        kind, *rest = answer
        if kind == "tokens":
            request_id, tokens, _num_cached, finished = rest
            request = self._traffic.requests[int(request_id)]
            request.tokens = tokens
            if finished:
                self._over(request, "finished")
        elif kind == "aborted":
            self._over(self._traffic.requests[int(rest[0])], "aborted")
        else:
            assert kind == "reset", answer

    def _over(self, request: Request, outcome: str) -> None:
        request.outcome = outcome
        self._num_over += 1
