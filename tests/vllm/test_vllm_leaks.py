"""Aborts, preemptions, resets and repeated reports, in the middle of transfers: nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_harness import BLOCK, Ask, Engine, PlainVLLM, Prompts

LENGTH = 6 * BLOCK + 10
IN_BLOCKS = 6 * BLOCK
NUM_BLOCKS = 130

new_prompt = Prompts(seed=2)


@pytest.fixture(scope="module", params=["smollm2", "hybrid"])
def model(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture
def engine(model: Path, start_engine: Callable[..., Engine]) -> Engine:
    return start_engine(model, num_blocks=NUM_BLOCKS, settings={"ram": "96MiB"})


@pytest.fixture
def expected(model: Path, plain: Callable[[Path], PlainVLLM]) -> Callable[[list[int]], list[int]]:
    return plain(model).answer


def stored_prompt(engine: Engine) -> list[int]:
    """A prompt that kvtier has and the engine has not."""
    prompt = new_prompt(LENGTH)
    engine.ask(prompt)
    engine.forget()
    return prompt


def load_held(engine: Engine, prompt: list[int], held: Any) -> Ask:
    ask = engine.submit(prompt)
    engine.until(lambda: any(not job.is_store for job in held.jobs), "a load has been submitted")
    return ask


def store_held(engine: Engine, prompt: list[int], held: Any) -> Ask:
    ask = engine.submit(prompt)
    engine.finish(ask)
    engine.until(lambda: any(job.is_store for job in held.jobs), "a store has been submitted")
    return ask


# -- aborts --------------------------------------------------------------------------------------------------


def test_abort_in_the_middle_of_a_load(engine, expected):
    prompt = stored_prompt(engine)
    with engine.holding("load") as held:
        ask = load_held(engine, prompt, held)
        engine.abort(ask)
        for _ in range(20):
            engine.step()
        assert engine.core.get_stats().pinned_blocks > 0  # the copy could still be writing into the engine
        held.release()
        engine.drain()
    engine.check_nothing_leaked()
    assert not ask.tokens
    again = engine.ask_afresh(prompt)
    assert again.num_cached == IN_BLOCKS
    assert again.tokens == expected(prompt)


def test_abort_of_requests_that_were_never_scheduled(engine, expected):
    prompt = new_prompt(LENGTH)
    unborn = engine.submit(new_prompt(LENGTH))
    engine.abort(unborn)
    with engine.holding("store") as held:
        store_held(engine, prompt, held)
        engine.forget()
        deferred = engine.submit(prompt)
        engine.steps_without_answer(deferred)
        engine.abort(deferred)
        engine.step()
        held.release()
        engine.drain()
    engine.check_nothing_leaked()
    assert not unborn.tokens
    assert not deferred.tokens
    assert engine.ask_afresh(prompt).tokens == expected(prompt)


def test_abort_of_a_request_behind_another_requests_load(engine, expected):
    prompt = stored_prompt(engine)
    with engine.holding("load") as held:
        first = load_held(engine, prompt, held)
        second = engine.submit(prompt)
        engine.steps_without_answer(second)
        engine.abort(second)
        engine.step()
        held.release()
        engine.finish(first)
    assert first.tokens == expected(prompt)
    assert not second.tokens


def test_abort_while_the_requests_blocks_are_being_stored(engine, expected):
    prompt = new_prompt(LENGTH)
    with engine.holding("store") as held:
        ask = engine.submit(prompt, max_tokens=100)
        engine.until(lambda: len(held) > 0, "a store has been submitted")
        engine.abort(ask)
        for _ in range(20):
            engine.step()
        assert engine.core.get_stats().in_flight_blocks > 0
        held.release()
        engine.drain()
    engine.check_nothing_leaked()
    again = engine.ask_afresh(prompt)
    assert again.num_cached == IN_BLOCKS
    assert again.tokens == expected(prompt)


# -- preemption ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stores", ["held", "running"])
def test_preemption_with_stores_in_flight(model, start_engine, plain, stores):
    if model.name.startswith("smollm2"):
        num_prompts, prompt_length, answer_length, num_blocks = 3, LENGTH, 70, 26
    else:
        num_prompts, prompt_length, answer_length, num_blocks = 6, 70, 180, 42
    settings = {"ram": "96MiB", "offload_prompt_only": stores == "held"}
    engine = start_engine(model, num_blocks=num_blocks, max_model_len=10 * BLOCK, settings=settings)
    prompts = [new_prompt(prompt_length) for _ in range(num_prompts)]
    with engine.holding("store") as held:
        if stores == "running":
            held.release()
        asks = [engine.submit(prompt, max_tokens=answer_length) for prompt in prompts]
        engine.until(
            lambda: any(request.num_preemptions for request in engine.scheduler.requests.values()),
            "a request has been preempted",
        )
        assert held.jobs
        held.release()
        engine.finish(*asks)
    engine.check_nothing_leaked()
    assert [ask.tokens for ask in asks] == plain(model).answers(prompts, answer_length)


# -- reset ---------------------------------------------------------------------------------------------------


def assert_empty(engine: Engine, *prompts: list[int]) -> None:
    """After the drain every slot is free, and none of the prompts is found any more."""
    engine.drain()
    stats = engine.core.get_stats()
    assert (stats.ready_blocks, stats.in_flight_blocks, stats.pinned_blocks, stats.condemned_blocks) == (0, 0, 0, 0)
    engine.core.check_invariants()
    for prompt in prompts:
        assert engine.ask_afresh(prompt).num_cached == 0


def test_reset_leaves_nothing_to_hit(engine):
    prompts = [stored_prompt(engine) for _ in range(3)]
    assert engine.core.get_stats().ready_blocks > 0
    assert engine.reset()
    assert_empty(engine, *prompts)


def test_reset_without_the_connector_keeps_what_is_offloaded(engine, expected):
    prompt = stored_prompt(engine)
    ask = engine.ask_afresh(prompt)
    assert ask.num_cached == IN_BLOCKS
    assert ask.tokens == expected(prompt)


def test_reset_with_a_store_in_flight(engine):
    before, during = stored_prompt(engine), new_prompt(LENGTH)
    with engine.holding("store") as held:
        store_held(engine, during, held)
        assert engine.reset()
        for _ in range(10):
            engine.step()
        stats = engine.core.get_stats()
        assert stats.ready_blocks == 0
        assert stats.in_flight_blocks == 0
        held.release()
        assert_empty(engine, before, during)


def test_reset_with_a_load_in_flight(engine, expected):
    other, prompt = stored_prompt(engine), stored_prompt(engine)
    with engine.holding("load") as held:
        ask = load_held(engine, prompt, held)
        engine.reset()
        assert engine.core.get_stats().ready_blocks == 0
        held.release()
        engine.finish(ask)
    assert ask.tokens == expected(prompt)
    engine.drain()
    assert engine.core.get_stats().condemned_blocks == 0
    assert engine.ask_afresh(other).num_cached == 0
    engine.check_nothing_leaked()


def test_reset_with_stores_and_loads_in_flight_again_and_again(engine, expected):
    for _ in range(3):
        prompt = stored_prompt(engine)
        fresh = new_prompt(LENGTH)
        with engine.holding("store") as stores, engine.holding("load") as loads:
            reader = engine.submit(prompt)
            writer = engine.submit(fresh)
            engine.finish(writer)
            engine.until(lambda: loads.jobs and stores.jobs, "one load and one store held")
            engine.reset()
            stores.release()
            loads.release()
            engine.finish(reader)
        assert reader.tokens == expected(prompt)
        assert writer.tokens == expected(fresh)
        assert engine.reset()
        assert_empty(engine, fresh)


def test_reset_that_sends_running_requests_back_to_the_queue(engine, expected):
    other, prompt = stored_prompt(engine), new_prompt(LENGTH)
    with engine.holding("store") as held:
        ask = engine.submit(prompt, max_tokens=12)
        engine.until(lambda: len(held) > 0 and len(ask.tokens) > 2, "the request runs and its store has been submitted")
        assert not ask.finished
        assert engine.reset(running_requests=True)
        assert engine.core.get_stats().ready_blocks == 0
        held.release()
        engine.finish(ask)
    assert ask.tokens == expected(prompt, 12)
    engine.drain()
    assert engine.ask_afresh(other).num_cached == 0


def test_what_was_computed_before_a_reset_is_not_stored_after_it(engine, expected):
    prompt = new_prompt(LENGTH)
    ask = engine.submit(prompt, max_tokens=12)
    engine.until(lambda: len(ask.tokens) > 2, "the request runs")
    engine.reset()
    engine.finish(ask)
    assert ask.tokens == expected(prompt, 12)
    assert_empty(engine)
    assert engine.manager.begun_before_reset == set()


def test_what_is_stored_after_a_reset_is_found(engine, expected):
    prompt = stored_prompt(engine)
    assert engine.reset()
    first = engine.ask(prompt)
    second = engine.ask_afresh(prompt)
    assert (first.num_cached, second.num_cached) == (0, IN_BLOCKS)
    assert first.tokens == second.tokens == expected(prompt)


# -- reports that come twice ---------------------------------------------------------------------------------


@pytest.fixture
def reported_twice(engine, monkeypatch):
    """Every completion of the worker is reported again with the next ones, and once more after them."""
    worker = engine.worker
    get_finished = worker.get_finished
    past: list[Any] = []

    def again() -> list[Any]:
        results = get_finished()
        past.extend(results)
        return [*results, *past]

    monkeypatch.setattr(worker, "get_finished", again)
    return past


def test_completions_that_are_reported_again_change_nothing(engine, expected, reported_twice):
    prompts = [new_prompt(LENGTH) for _ in range(3)]
    for _ in range(3):
        for prompt in prompts:
            engine.forget()
            ask = engine.submit(prompt)
            engine.finish(ask)
            assert ask.tokens == expected(prompt)
            engine.step()
        engine.core.check_invariants()
    assert len(reported_twice) >= 9
    engine.check_nothing_leaked()
    assert engine.counters["loaded_blocks"] > 0


def test_completions_from_before_a_reset_that_are_reported_again_change_nothing(engine, expected, reported_twice):
    prompt = stored_prompt(engine)
    assert engine.reset()
    for _ in range(3):
        assert engine.ask_afresh(prompt).tokens == expected(prompt)
    engine.check_nothing_leaked()
