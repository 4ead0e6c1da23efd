"""Hundreds of requests while everything goes wrong at once: right answers, bounded waits, nothing left over.

`KVTIER_SOAK=1` runs more seeds. A failure names its seed.
"""

from __future__ import annotations

import os, time
from bisect import bisect
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
from driven_process import SHARED_MEMORY, DrivenProcess, wait_until
from vllm_harness import BLOCK

NUM_REQUESTS = 320
AT_ONCE = 12
MOST_TOKENS = 16
NUM_KINDS_OF_FAULTS = 7
DEADLINE_S = 1.5
STORE_TIMEOUT_S = 2.0
SEEDS = range(2, 12) if os.environ.get("KVTIER_SOAK") else [2]
LEAST_LOAD_TIME_S = 1.0
"""However late in a request's deadline a load is planned, it may take this long to begin."""
STEPS_LATE = 3
"""Of the engine: one may have begun before, one finds the transfer to be over, one brings its result."""


@dataclass
class Request:
    prompt: list[int]
    max_tokens: int
    abort_after: int | None
    tokens: list[int] = field(default_factory=list)
    outcome: str = ""


class Traffic:
    """Prompts that share prefixes of several depths, some of them twice, some of them taken back."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        self.requests: list[Request] = []
        stems: list[list[int]] = []
        for _ in range(10):
            root = self._tokens(self._rng.randint(1, 4) * BLOCK)
            stems += [root, *(root + self._tokens(self._rng.randint(1, 3) * BLOCK) for _ in range(2))]
        for _ in range(NUM_REQUESTS):
            self.requests.append(Request(self._prompt(stems), self._rng.randint(1, MOST_TOKENS), self._abort_after()))
        self.resets = {self._rng.randrange(NUM_REQUESTS) for _ in range(3)}

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(3, 512) for _ in range(count)]

    def _prompt(self, stems: list[list[int]]) -> list[int]:
        if self.requests and self._rng.random() < 0.15:
            return self._rng.choice(self.requests).prompt
        return self._rng.choice(stems) + self._tokens(self._rng.choice((1, 5, 20, BLOCK, 40)))

    def _abort_after(self) -> int | None:
        return self._rng.choice((0, 1, 2, 3, 5, 8)) if self._rng.random() < 0.15 else None


def run(engine: DrivenProcess, traffic: Traffic) -> None:
    """All requests, `AT_ONCE` at a time, to their ends."""
    requests = traffic.requests
    num_sent = num_over = 0
    while num_over < len(requests):
        while num_sent < min(len(requests), num_over + AT_ONCE):
            if num_sent in traffic.resets:
                engine.send("reset")
            request = requests[num_sent]
            engine.send("ask", str(num_sent), request.prompt, request.max_tokens, request.abort_after)
            num_sent += 1
        answer = engine.read()
        assert answer is not None, f"the engine has died\n{engine.log_tail()}"
        kind, *rest = answer
        if kind == "tokens":
            request_id, tokens, _num_cached, finished = rest
            request = requests[int(request_id)]
            request.tokens = tokens
            if finished:
                request.outcome = "finished"
                num_over += 1
        elif kind == "aborted":
            requests[int(rest[0])].outcome = "aborted"
            num_over += 1
        else:
            assert kind == "reset"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("model_name", "num_blocks", "ram"), [("dense", 30, 5_000_000), ("hybrid", 60, 6_000_000)])
def test_chaos(model_name, num_blocks, ram, seed, request, tmp_path):
    model: Path = request.getfixturevalue(model_name)
    pool_dir = tmp_path / "pool"
    pool_dir.mkdir()
    before = set(os.listdir(SHARED_MEMORY))
    settings = {
        "ram": ram,
        "pool_dir": str(pool_dir),
        "deadline_s": DEADLINE_S,
        "store_timeout_s": STORE_TIMEOUT_S,
        "copy_threads": 3,
        "offload_prompt_only": False,
        "debug": True,
    }
    arguments = {"num_blocks": num_blocks, "max_model_len": 320, "max_num_batched_tokens": 512}
    engine = DrivenProcess(
        model,
        tmp_path / "log",
        settings=settings,
        connector="chaos_connector:ChaosConnector",
        multiprocess=True,
        **arguments,
    )
    try:
        T0 = time.monotonic()
        answers = answers_of_plain_vllm(model, tmp_path / "plain.log", Traffic(seed))
        print("A", time.monotonic() - T0) if "T0" in locals() else 0
        engine.wait_until_ready()
        print("R", time.monotonic() - T0) if "T0" in locals() else 0
        engine.probe("worker", "begin_faults", seed, DEADLINE_S)
        traffic = Traffic(seed)
        run(engine, traffic)
        print("ran", time.monotonic() - T0)
        engine.probe("worker", "end_faults")
        wait_until(lambda: engine.probe("scheduler", "num_open") == 0, f"seed {seed}: every transfer has ended")
        check_answers(traffic, answers, seed)
        check_report(engine.probe("scheduler", "scheduler_report"), engine.probe("worker", "worker_report"), seed)
        # the engine is as good as before
        again = Traffic(seed)
        again.requests = again.requests[:AT_ONCE]
        run(engine, again)
        check_answers(again, answers, seed)
        assert engine.close() == 0, f"seed {seed}\n{engine.log_tail()}"
    finally:
        engine.discard()
    assert os.listdir(pool_dir) == [], f"seed {seed}"
    left = set(os.listdir(SHARED_MEMORY)) - before
    assert not [name for name in left if "kvtier" in name], f"seed {seed}"


def answers_of_plain_vllm(model: Path, log: Path, traffic: Traffic) -> list[list[int]]:
    """The same requests without kvtier, without any cache, and nobody changes his mind."""
    engine = DrivenProcess(model, log, num_blocks=400, settings=None, core=1, enable_prefix_caching=False)
    try:
        print("A", time.monotonic() - T0) if "T0" in locals() else 0
        engine.wait_until_ready()
        print("R", time.monotonic() - T0) if "T0" in locals() else 0
        for request in traffic.requests:
            request.abort_after = None
        traffic.resets.clear()
        run(engine, traffic)
        engine.close()
    finally:
        engine.discard()
    return [request.tokens for request in traffic.requests]


def check_answers(traffic: Traffic, answers: list[list[int]], seed: int) -> None:
    for i, request in enumerate(traffic.requests):
        expected = answers[i][: request.max_tokens]
        if request.outcome == "aborted":
            expected = expected[: len(request.tokens)]
        assert request.tokens == expected, f"seed {seed}: request {i}, {request.outcome}"


def check_report(scheduler: dict[str, Any], workers: list[dict[str, Any]], seed: int) -> None:
    steps_s, loads, told_after_s = scheduler.pop("steps_s"), scheduler.pop("loads"), scheduler.pop("told_after_s")
    ends = [dict(worker.pop("loads")) for worker in workers]
    lateness = [steps_too_late(load, [of[load["job_id"]] for of in ends], steps_s) for load in loads]
    figures = {
        **scheduler,
        "workers": workers,
        "loads": len(loads),
        "loads that never began": sum(not ends[0][load["job_id"]][0] for load in loads),
        "longest load": max(load["ended_s"] - load["planned_s"] for load in loads),
        "steps too late": Counter(lateness),
        "latest": [(load, ends[0][load["job_id"]]) for load, steps in zip(loads, lateness, strict=True) if steps > STEPS_LATE],
        "told to wait": told_after_s[:5],
        "steps": len(steps_s),
    }
    print(f"seed {seed}: {figures}")
    say = f"seed {seed}: {figures}"
    assert scheduler["counters"]["errors"] == 0, say
    assert not any(scheduler["left_over"].values()), say
    assert told_after_s[0][0] < DEADLINE_S, say
    assert max(lateness) <= STEPS_LATE, say
    # else it was not chaos
    for worker in workers:
        assert len(worker["dealt"]) == NUM_KINDS_OF_FAULTS, say
    for name in ("loaded_blocks", "evicted_blocks", "failed_load_blocks", "failed_store_blocks", "reports_ignored"):
        assert scheduler["counters"].get(name, 0) > 0, f"{name}; {say}"
    assert scheduler["num_preempted"] > 0, say


def steps_too_late(load: dict[str, Any], ends: list[list[float]], steps_s: list[float]) -> int:
    """How many steps of the engine began between the last moment at which the load should have ended and its end.

    `ends` are, for each rank: for how long it copied, when it was done, and when it said so (injected faults delay
    that). Copying takes as long as it takes; what has not begun by the deadline must not.
    """
    deadline_s = max(load["since_s"] + DEADLINE_S, load["planned_s"] + LEAST_LOAD_TIME_S)
    allowed_s = max(deadline_s + duration_s + told_s - done_s for duration_s, done_s, told_s in ends)
    return max(0, bisect(steps_s, load["ended_s"]) - bisect(steps_s, allowed_s))
