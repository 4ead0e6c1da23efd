"""Chunks of several blocks, several KV groups, several ranks, prompts larger than the pool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_harness import BLOCK, Engine, Prompts

new_prompt = Prompts(seed=6)

DENSE_BLOCK_BYTES = 3 * 2 * 2 * 32 * 4 * BLOCK  # layers, K and V, heads, head size, float32
HYBRID_BLOCK_BYTES = 2 * 2 * 2 * 32 * 4 * BLOCK  # a group has two layers


@pytest.fixture(scope="module", params=["dense", "hybrid"])
def model(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module", params=[1, 4], ids=lambda size: f"chunks of {size}")
def blocks_per_chunk(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def engine(model: Path, blocks_per_chunk: int, start_engine: Callable[..., Engine]) -> Engine:
    return start_engine(model, num_blocks=130, settings={"blocks_per_chunk": blocks_per_chunk})


@pytest.mark.parametrize("num_tokens", [12 * BLOCK + 10, 12 * BLOCK, 12 * BLOCK + 1, 11 * BLOCK + 31, 5 * BLOCK])
def test_what_was_evicted_comes_back(engine, model, plain, blocks_per_chunk, num_tokens):
    prompt = new_prompt(num_tokens)
    expected = plain(model).answer(prompt, 40)
    chunk = blocks_per_chunk * BLOCK
    asks = [engine.ask_afresh(prompt, 40) for _ in range(3)]
    assert [ask.tokens for ask in asks] == [expected] * 3
    assert asks[0].num_cached == 0
    # the last token is always computed; a sliding window, which was passed while storing, may cost one chunk more
    assert asks[-1].num_cached >= (num_tokens - 1) // chunk * chunk - chunk
    assert asks[-1].num_cached > 0
    assert engine.counters["loaded_blocks"] > 0


@pytest.mark.parametrize("num_in_engine", [3, 5, 6, 8])
def test_an_engine_hit_that_ends_inside_a_chunk(engine, model, plain, num_in_engine):
    prompt = new_prompt(12 * BLOCK + 10)
    head = [*prompt[: num_in_engine * BLOCK], *new_prompt(7)]
    expected = plain(model).answer(prompt, 20)
    engine.ask(prompt)
    engine.ask_afresh(prompt)
    engine.ask_afresh(head)
    loaded_before = engine.counters["loaded_blocks"]
    ask = engine.ask(prompt, 20)
    assert ask.tokens == expected
    assert ask.num_cached == 12 * BLOCK
    assert engine.counters["loaded_blocks"] > loaded_before


def test_a_turn_that_grows_inside_a_chunk(engine, model, plain):
    prompt = new_prompt(6 * BLOCK + 3)
    for _ in range(4):
        expected = plain(model).answer(prompt, 6)
        assert engine.ask_afresh(prompt, 6).tokens == expected
        prompt = prompt + expected + new_prompt(BLOCK + 9)
    assert engine.counters["loaded_blocks"] > 0


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_prompt_of_twice_the_pool_leaves_a_usable_prefix(dense, policy, plain, start_engine):
    engine = start_engine(dense, settings={"ram": 6 * DENSE_BLOCK_BYTES, "policy": policy})
    assert engine.core.get_stats().capacity_blocks == 6
    prompt = new_prompt(12 * BLOCK + 10)
    asks = [engine.ask_afresh(prompt) for _ in range(4)]
    assert [ask.tokens for ask in asks] == [plain(dense).answer(prompt)] * 4
    assert [ask.num_cached for ask in asks] == [0, 6 * BLOCK, 6 * BLOCK, 6 * BLOCK]
    assert engine.counters["loaded_blocks"] == 18
    assert engine.counters["shed_blocks"] > 0


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_prompt_of_twice_the_pool_leaves_a_usable_prefix_in_every_group(hybrid, policy, plain, start_engine):
    # 4 blocks a step, and a hit may end after each: 4 blocks of full attention and 2 of each of two sliding windows
    settings = {"ram": 12 * HYBRID_BLOCK_BYTES, "policy": policy}
    step = {"max_num_batched_tokens": 4 * BLOCK, "prefix_cache_retention_interval": 4 * BLOCK}
    engine = start_engine(hybrid, num_blocks=130, settings=settings, **step)
    assert engine.core.get_stats().capacity_blocks == 12
    prompt = new_prompt(12 * BLOCK + 10)
    asks = [engine.ask_afresh(prompt) for _ in range(4)]
    assert [ask.tokens for ask in asks] == [plain(hybrid).answer(prompt)] * 4
    assert [ask.num_cached for ask in asks] == [0, 4 * BLOCK, 4 * BLOCK, 4 * BLOCK]
    assert engine.counters["loaded_blocks"] == 3 * 8
    assert engine.counters["shed_blocks"] > 0


def test_a_pool_that_is_always_too_small(model, plain, start_engine):
    """Everything is evicted all the time, several requests at once: answers stay right."""
    block_bytes, groups = (DENSE_BLOCK_BYTES, 1) if model.name.startswith("dense") else (HYBRID_BLOCK_BYTES, 3)
    engine = start_engine(model, num_blocks=130, settings={"ram": 10 * groups * block_bytes})
    prompts = [new_prompt(7 * BLOCK + i) for i in range(6)]
    expected = plain(model).answers(prompts)
    for _ in range(4):
        engine.drain()
        engine.forget()
        asks = [engine.submit(prompt) for prompt in prompts]
        engine.finish(*asks)
        assert [ask.tokens for ask in asks] == expected
        engine.core.check_invariants()
    assert engine.counters["evicted_blocks"] > 0
