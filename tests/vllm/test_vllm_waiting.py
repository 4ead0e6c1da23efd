"""Requests that meet a transfer of another request, or one that never ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_harness import BLOCK, Engine, PlainVLLM, Prompts

PREFIX = 6 * BLOCK
TAIL = 10
DEADLINE_S = 5.0

new_prompt = Prompts(seed=1)


@pytest.fixture(scope="module", params=["smollm2", "hybrid"])
def model(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture
def engine(model: Path, start_engine: Callable[..., Engine]) -> Engine:
    return start_engine(model, num_blocks=130, settings={"ram": "96MiB", "deadline_s": DEADLINE_S})


@pytest.fixture
def expected(model: Path, plain: Callable[[Path], PlainVLLM]) -> Callable[[list[int]], list[int]]:
    return plain(model).answer


def test_two_requests_with_one_evicted_prefix_load_it_once(engine, expected):
    prefix = new_prompt(PREFIX)
    one, two = prefix + new_prompt(TAIL), prefix + new_prompt(TAIL)
    engine.ask(one)
    alone = engine.ask_afresh(one)
    blocks_of_one_load = engine.counters["loaded_blocks"]
    assert blocks_of_one_load > 0

    engine.forget()
    with engine.holding("load") as held:
        first = engine.submit(one)
        engine.until(lambda: len(held) == 1, "the load has been submitted")
        second = engine.submit(two)
        engine.steps_without_answer(first, second)
        held.release()
        engine.finish(first, second)
    engine.drain()

    assert len(held) == 1
    assert engine.counters["loaded_blocks"] == 2 * blocks_of_one_load
    assert [first.tokens, second.tokens] == [expected(one), expected(two)]
    assert alone.tokens == first.tokens
    assert first.num_cached == second.num_cached == alone.num_cached > 0


def test_a_request_whose_prefix_is_being_stored_waits_and_then_loads(engine, expected):
    prompt = new_prompt(PREFIX + TAIL)
    with engine.holding("store") as held:
        writer = engine.submit(prompt)
        engine.finish(writer)
        engine.until(lambda: len(held) > 0, "the store has been submitted")
        engine.forget()
        reader = engine.submit(prompt)
        engine.steps_without_answer(reader)
        held.release()
        engine.finish(reader)
    engine.drain()
    assert reader.tokens == writer.tokens == expected(prompt)
    assert reader.num_cached == PREFIX
    assert engine.counters["loaded_blocks"] > 0
    assert engine.counters["deferred_requests"] == 1
    assert engine.counters["expired_requests"] == 0


def test_a_request_that_waits_asks_for_no_block_again_and_again(engine, monkeypatch):
    prompt = new_prompt(PREFIX + TAIL)
    num_lookups = 0
    lookup = engine.manager.lookup

    def counted(*arguments):
        nonlocal num_lookups
        num_lookups += 1
        return lookup(*arguments)

    monkeypatch.setattr(engine.manager, "lookup", counted)
    with engine.holding("store") as held:
        engine.finish(engine.submit(prompt))
        engine.until(lambda: len(held) > 0, "the store has been submitted")
        engine.forget()
        reader = engine.submit(prompt)
        engine.step()
        engine.step()
        num_lookups = 0
        engine.steps_without_answer(reader, count=200)
        assert num_lookups == 0
        held.release()
        engine.finish(reader)
    assert reader.num_cached == PREFIX


def test_a_request_does_not_wait_for_a_store_beyond_its_deadline(engine, expected):
    prompt = new_prompt(PREFIX + TAIL)
    with engine.holding("store") as held:
        engine.finish(engine.submit(prompt))
        engine.until(lambda: len(held) > 0, "the store has been submitted")
        engine.forget()
        reader = engine.submit(prompt)
        engine.steps_without_answer(reader)
        engine.clock.advance(DEADLINE_S - 1)
        engine.steps_without_answer(reader)
        engine.clock.advance(1.5)
        engine.finish(reader)
        assert reader.num_cached == 0
        assert reader.tokens == expected(prompt)
        held.release()
        engine.drain()
    assert engine.counters["expired_requests"] == 1
    # the late store is as good as any
    late = engine.ask_afresh(prompt)
    assert late.num_cached == PREFIX
    assert late.tokens == reader.tokens


def test_a_store_that_never_begins_is_cancelled_and_the_engine_comes_to_rest(engine, expected):
    prompt = new_prompt(PREFIX + TAIL)
    with engine.holding("store") as held:
        engine.finish(engine.submit(prompt))
        engine.until(lambda: len(held) > 0, "the store has been submitted")
        engine.clock.advance(60.0)
        engine.drain()  # the copy thread is still held
        stats = engine.core.get_stats()
        assert (stats.in_flight_blocks, stats.condemned_blocks) == (0, 0)
    again = engine.ask_afresh(prompt)
    assert again.num_cached == 0
    assert again.tokens == expected(prompt)


def test_a_store_that_never_ends_is_given_up_and_its_slots_come_back(engine, expected):
    prompt = new_prompt(PREFIX + TAIL)
    with engine.stuck_copies() as held:
        engine.finish(engine.submit(prompt))
        engine.until(lambda: len(held) > 0, "the copy has begun")
        engine.clock.advance(60.0)
        engine.step()
        stats = engine.core.get_stats()
        assert stats.in_flight_blocks == 0
        assert stats.condemned_blocks > 0  # somebody still writes there
        held.release()
        engine.drain()
    assert engine.core.get_stats().condemned_blocks == 0
    again = engine.ask_afresh(prompt)
    assert again.num_cached == 0
    assert again.tokens == expected(prompt)


def test_a_load_that_does_not_begin_by_the_deadline_is_recomputed(engine, expected):
    prompt = new_prompt(PREFIX + TAIL)
    engine.ask(prompt)
    engine.forget()
    with engine.holding("load") as held:
        reader = engine.submit(prompt)
        engine.until(lambda: len(held) == 1, "the load has been submitted")
        engine.steps_without_answer(reader)
        engine.clock.advance(DEADLINE_S + 1)
        engine.finish(reader)  # the load is still held
        assert reader.tokens == expected(prompt)
        assert reader.num_cached == 0
        engine.drain()
        assert engine.core.get_stats().pinned_blocks == 0
    assert engine.counters["failed_load_blocks"] > 0


def test_a_request_behind_a_stalled_load_is_let_go_too(engine, expected):
    prefix = new_prompt(PREFIX)
    one, two = prefix + new_prompt(TAIL), prefix + new_prompt(TAIL)
    engine.ask(one)
    engine.forget()
    with engine.holding("load") as held:
        first = engine.submit(one)
        engine.until(lambda: len(held) == 1, "the load has been submitted")
        second = engine.submit(two)
        engine.steps_without_answer(first, second)
        engine.clock.advance(DEADLINE_S + 1)
        engine.finish(first, second)
    assert [first.tokens, second.tokens] == [expected(one), expected(two)]


def test_a_request_behind_a_load_that_never_ends_is_let_go(engine, expected):
    """The load has begun, so it cannot be cancelled: its own request must wait, nobody else."""
    prefix = new_prompt(PREFIX)
    one, two = prefix + new_prompt(TAIL), prefix + new_prompt(TAIL)
    engine.ask(one)
    engine.forget()
    with engine.stuck_copies() as held:
        first = engine.submit(one)
        engine.until(lambda: len(held) > 0, "the load's copy has begun")
        second = engine.submit(two)
        engine.steps_without_answer(first, second)
        engine.clock.advance(DEADLINE_S + 1)
        engine.until(lambda: second.finished, "the second request has been answered")
        assert not first.tokens
        held.release()
        engine.finish(first)
    assert [first.tokens, second.tokens] == [expected(one), expected(two)]
    assert first.num_cached == PREFIX
    assert second.num_cached == 0


def test_with_a_deadline_of_zero_nobody_waits(hybrid, plain, start_engine):
    engine = start_engine(hybrid, num_blocks=130, settings={"ram": "96MiB", "deadline_s": 0})
    prompt = new_prompt(PREFIX + TAIL)
    with engine.holding("store") as held:
        engine.finish(engine.submit(prompt))
        engine.until(lambda: len(held) > 0, "the store has been submitted")
        engine.forget()
        reader = engine.submit(prompt)
        engine.finish(reader)
        assert reader.num_cached == 0
    assert reader.tokens == plain(hybrid).answer(prompt)
