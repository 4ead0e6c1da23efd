"""A tier that keeps failing is left alone, waiting that costs more than it saves is not done, and what is logged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_harness import BLOCK, Engine, Prompts

from kvtier.interfaces import BreakerState

IN_BLOCKS = 6 * BLOCK
LENGTH = IN_BLOCKS + 10
FAILURES = 2
COOLDOWN_S = 10.0

new_prompt = Prompts(seed=9)


@pytest.fixture(scope="module")
def model(hybrid: Path) -> Path:
    return hybrid


@pytest.fixture
def expected(model, plain):
    return plain(model).answer


@pytest.fixture
def engine(model: Path, start_engine: Callable[..., Engine]) -> Engine:
    settings = {"ram": "96MiB", "breaker_failures": FAILURES, "breaker_cooldown_s": COOLDOWN_S}
    engine = start_engine(model, num_blocks=130, settings=settings)
    engine.clock.advance(10 * 60.0)  # whatever the test before has opened is half-open again, and then closed
    engine.ask_afresh(prompt := new_prompt(LENGTH))
    engine.ask_afresh(prompt)
    assert engine.core.get_stats().breaker_state is BreakerState.CLOSED
    return engine


@pytest.fixture
def said(caplog, monkeypatch):
    """Every line that kvtier has logged."""
    monkeypatch.setattr(logging.getLogger("kvtier"), "propagate", True)
    caplog.set_level(logging.INFO, logger="kvtier")
    caplog.set_level(logging.INFO)
    return lambda: [record.getMessage() for record in caplog.records if record.name.startswith("kvtier")]


def stored(engine: Engine) -> list[int]:
    prompt = new_prompt(LENGTH)
    engine.ask(prompt)
    return prompt


@pytest.mark.parametrize("kind", ["load", "store"])
def test_a_tier_that_keeps_failing_is_left_alone_and_comes_back(engine, expected, said, kind):
    prompts = [stored(engine) for _ in range(6)]
    good = stored(engine)
    asked = prompts if kind == "load" else [new_prompt(LENGTH) for _ in range(6)]
    with engine.failing(kind) as failing:
        for prompt in asked:
            assert engine.ask_afresh(prompt).tokens == expected(prompt)
    assert failing.num_failed == FAILURES
    assert engine.core.get_stats().breaker_state is BreakerState.OPEN
    shut = engine.ask_afresh(good)
    assert shut.num_cached == 0
    assert shut.tokens == expected(good)
    assert engine.counters["breaker_openings"] == 1
    assert engine.counters["failed_jobs"] == FAILURES
    assert len(said()) == 2, said()  # transfers fail; the tier is not used

    engine.clock.advance(COOLDOWN_S)
    back = engine.ask_afresh(good)
    assert back.num_cached == IN_BLOCKS
    assert back.tokens == expected(good)
    assert engine.core.get_stats().breaker_state is BreakerState.CLOSED
    assert len(said()) == 4, said()  # it is tried; it is in use


def test_an_outage_is_a_few_lines_in_the_log(engine, expected, said):
    """Two minutes in which every copy fails, with a request a second."""
    prompts = [new_prompt(2 * BLOCK) for _ in range(4)]
    with engine.failing("store") as failing:
        for second in range(120):
            engine.clock.advance(1.0)
            engine.ask_afresh(prompts[second % 4], max_tokens=1)
    assert failing.num_failed <= FAILURES + 5
    assert len(said()) <= 1 + 2 * failing.num_failed
    assert engine.counters["errors"] == 0


def seconds_of_a_store(engine: Engine, seconds: float) -> None:
    """Lets the manager see one store of a whole prompt that takes this long."""
    prompt = new_prompt(LENGTH)
    with engine.holding("store") as held:
        engine.finish(engine.submit(prompt))
        engine.until(lambda: len(held) > 0, "the store has been submitted")
        for _ in range(4):
            engine.clock.advance(seconds / 4)
            engine.step()
        held.release()
        engine.drain()
    engine.clock.advance(0.001)


@pytest.mark.parametrize("tokens_per_s", [1_000_000, 1])
def test_waiting_is_compared_with_computing(model, start_engine, expected, tokens_per_s):
    settings = {"ram": "96MiB", "prefill_tokens_per_s": tokens_per_s}
    engine = start_engine(model, num_blocks=130, settings=settings)
    seconds_of_a_store(engine, 1.0)
    prompt = new_prompt(LENGTH)
    with engine.holding("store") as held:
        engine.finish(engine.submit(prompt))
        engine.until(lambda: len(held) > 0, "the store has been submitted")
        engine.forget()
        reader = engine.submit(prompt)
        if tokens_per_s == 1:
            engine.steps_without_answer(reader)
            held.release()
        engine.finish(reader)
    assert reader.num_cached == (IN_BLOCKS if tokens_per_s == 1 else 0)
    assert reader.tokens == expected(prompt)
    assert engine.counters["declined_waits"] == (0 if tokens_per_s == 1 else 1)
    assert engine.counters["expired_requests"] == 0


def test_the_engines_rate_is_measured(model, start_engine, expected):
    """A prompt of 1,000 tokens in steps of 128, two seconds each: computing 192 tokens takes three."""
    engine = start_engine(model, num_blocks=130, settings={"ram": "96MiB"}, max_num_batched_tokens=128)
    ask = engine.submit(new_prompt(1000))
    while not ask.finished:
        engine.step()
        engine.clock.advance(2.0)
    engine.drain()
    assert engine.manager._prefill_rate.tokens_per_s == pytest.approx(64, rel=0.1)

    for seconds, num_cached in ((1.0, IN_BLOCKS), (20.0, 0)):
        for _ in range(4):
            seconds_of_a_store(engine, seconds)
        prompt = new_prompt(LENGTH)
        with engine.holding("store") as held:
            engine.finish(engine.submit(prompt))
            engine.until(lambda held=held: len(held) > 0, "the store has been submitted")
            engine.forget()
            reader = engine.submit(prompt)
            if num_cached:
                engine.steps_without_answer(reader)
                held.release()
            engine.finish(reader)
        engine.drain()
        assert reader.num_cached == num_cached
        assert reader.tokens == expected(prompt)
    assert engine.counters["declined_waits"] == 1


def test_a_request_whose_own_stores_are_never_reported_is_let_go(model, start_engine, plain):
    """Preempted, it is not scheduled while vLLM knows of transfers of its own: until its deadline."""
    deadline_s = 5.0
    settings = {"ram": "96MiB", "offload_prompt_only": False, "deadline_s": deadline_s, "store_timeout_s": 600}
    engine = start_engine(model, num_blocks=42, max_model_len=10 * BLOCK, settings=settings)
    prompts = [new_prompt(70) for _ in range(6)]
    with engine.silent_worker():
        asks = [engine.submit(prompt, max_tokens=180) for prompt in prompts]
        engine.until(
            lambda: any(request.num_preemptions for request in engine.scheduler.requests.values()),
            "a request has been preempted",
        )
        while not all(ask.finished for ask in asks):
            engine.clock.advance(deadline_s / 100)
            engine.step()
            assert engine.num_steps < 10_000
        assert engine.counters["expired_requests"] > 0
    engine.drain()
    assert [ask.tokens for ask in asks] == plain(model).answers(prompts, 180)
