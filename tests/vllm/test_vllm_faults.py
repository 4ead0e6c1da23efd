"""Transfers that fail: the answer is right all the same, and the engine goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_harness import BLOCK, Engine, PlainVLLM, Prompts

LENGTH = 6 * BLOCK + 10
IN_BLOCKS = 6 * BLOCK

new_prompt = Prompts(seed=3)


@pytest.fixture(scope="module", params=["smollm2", "hybrid"])
def model(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture
def engine(model: Path, start_engine: Callable[..., Engine]) -> Engine:
    return start_engine(model, num_blocks=130, settings={"ram": "96MiB"})


@pytest.fixture
def expected(model: Path, plain: Callable[[Path], PlainVLLM]) -> Callable[[list[int]], list[int]]:
    return plain(model).answer


def test_a_load_that_fails_once_is_recomputed(engine, expected):
    prompt = new_prompt(LENGTH)
    engine.ask(prompt)
    with engine.failing("load", times=1) as failing:
        failed = engine.ask_afresh(prompt)
    assert failing.num_failed == 1
    assert failed.num_cached == 0
    assert failed.tokens == expected(prompt)
    assert engine.counters["failed_load_blocks"] > 0
    # the bytes were not to be trusted: they are stored anew and found again
    engine.ask_afresh(prompt)
    found = engine.ask_afresh(prompt)
    assert found.num_cached == IN_BLOCKS
    assert found.tokens == expected(prompt)


def test_a_failed_load_takes_nobody_else_down(engine, expected):
    prompts = [new_prompt(LENGTH) for _ in range(4)]
    for prompt in prompts:
        engine.ask(prompt)
    engine.forget()
    with engine.failing("load", times=2) as failing:
        asks = [engine.submit(prompt) for prompt in prompts]
        engine.finish(*asks)
    assert failing.num_failed == 2
    assert [ask.tokens for ask in asks] == [expected(prompt) for prompt in prompts]
    assert sorted(ask.num_cached for ask in asks) == [0, 0, IN_BLOCKS, IN_BLOCKS]


def test_requests_that_share_a_load_that_fails(engine, expected):
    prefix = new_prompt(IN_BLOCKS)
    prompts = [prefix + new_prompt(10) for _ in range(3)]
    engine.ask(prompts[0])
    engine.forget()
    with engine.failing("load") as failing:
        asks = [engine.submit(prompt) for prompt in prompts]
        engine.finish(*asks)
    assert failing.num_failed >= 1
    assert [ask.tokens for ask in asks] == [expected(prompt) for prompt in prompts]


def test_loads_that_always_fail_neither_stop_the_engine_nor_go_round_in_circles(engine, expected):
    prompts = [new_prompt(LENGTH) for _ in range(3)]
    with engine.failing("load") as failing:
        for _ in range(4):
            for prompt in prompts:
                assert engine.ask_afresh(prompt).tokens == expected(prompt)
    assert 0 < failing.num_failed <= 9  # at most one attempt a request
    engine.clock.advance(60.0)  # the tier may have been shut off by then
    healed = [engine.ask_afresh(prompt) for prompt in prompts for _ in range(2)]
    assert healed[-1].num_cached == IN_BLOCKS
    assert healed[-1].tokens == expected(prompts[-1])


def test_a_store_that_fails_is_just_not_stored(engine, expected):
    prompt = new_prompt(LENGTH)
    with engine.failing("store") as failing:
        engine.ask(prompt)
    assert failing.num_failed > 0
    assert engine.core.get_stats().ready_blocks == 0
    again = engine.ask_afresh(prompt)
    assert again.num_cached == 0
    assert again.tokens == expected(prompt)
    found = engine.ask_afresh(prompt)  # the second request has stored it
    assert found.num_cached == IN_BLOCKS
    assert found.tokens == expected(prompt)
    assert engine.counters["failed_store_blocks"] > 0


def test_a_request_that_waits_for_a_store_that_fails_computes(engine, expected):
    prompt = new_prompt(LENGTH)
    with engine.holding("store") as held, engine.failing("store"):
        writer = engine.submit(prompt)
        engine.finish(writer)
        engine.until(lambda: len(held) > 0, "the store has been submitted")
        engine.forget()
        reader = engine.submit(prompt)
        engine.steps_without_answer(reader)
        held.release()
        engine.until(lambda: engine.counters["failed_store_blocks"] > 0, "the store has failed")
    engine.finish(reader)
    assert reader.num_cached == 0
    assert reader.tokens == writer.tokens == expected(prompt)
