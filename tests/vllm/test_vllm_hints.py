"""Hints of requests, from vLLM's sampling parameters to what stays in RAM."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_harness import BLOCK, Ask, Engine, Prompts

DENSE_BLOCK_BYTES = 3 * 2 * 2 * 32 * 4 * BLOCK  # layers, K and V, heads, head size, float32

new_prompt = Prompts(seed=31)


@pytest.fixture(params=["lru", "arc"])
def engine(request, dense: Path, start_engine: Callable[..., Engine]) -> Engine:
    """Sixteen blocks in RAM, half of which may be pinned."""
    settings = {"ram": 16 * DENSE_BLOCK_BYTES, "policy": request.param, "pin_share": 0.5}
    return start_engine(dense, settings=settings)


def ask(engine: Engine, prompt: list[int], **hints: object) -> Ask:
    """One request that finds nothing in the engine's own cache."""
    engine.forget()
    params = {f"kvtier.{name}": value for name, value in hints.items()}
    ask = engine.submit(prompt, extra_args={"kv_transfer_params": params} if params else None)
    engine.finish(ask)
    engine.drain()
    engine.core.check_invariants()
    return ask


def test_a_pinned_prefix_survives_pressure(engine, dense, plain):
    pinned, other = new_prompt(4 * BLOCK + 9), new_prompt(4 * BLOCK + 9)
    ask(engine, pinned, pin=True)
    ask(engine, other)
    for _ in range(8):
        ask(engine, new_prompt(6 * BLOCK + 9))
    found = ask(engine, pinned + new_prompt(5))
    assert found.num_cached == 4 * BLOCK
    assert found.tokens == plain(dense).answer(found.prompt)
    assert ask(engine, other).num_cached == 0


def test_an_ended_conversation_goes_first(engine, dense, plain):
    shared = new_prompt(2 * BLOCK)
    ended, alive = shared + new_prompt(4 * BLOCK + 9), shared + new_prompt(4 * BLOCK + 9)
    ask(engine, new_prompt(BLOCK + 1), priority=0)
    ask(engine, alive)
    ask(engine, ended)
    ask(engine, ended + new_prompt(BLOCK), ended=True)
    # all but a few of the sixteen are used: what ended makes room, what others share stays
    ask(engine, new_prompt(7 * BLOCK + 1))
    assert engine.counters["evicted_blocks"] > 0
    found = ask(engine, alive)
    assert found.num_cached == 6 * BLOCK
    assert found.tokens == plain(dense).answer(alive)
    left = ask(engine, ended, no_store=True)
    assert left.num_cached < 6 * BLOCK
    assert left.tokens == plain(dense).answer(ended)


def test_no_store_and_malformed_hints(engine, dense, plain, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("kvtier"), "propagate", True)
    caplog.set_level(logging.WARNING)
    caplog.set_level(logging.WARNING, logger="kvtier")
    prompt = new_prompt(3 * BLOCK + 9)
    expected = plain(dense).answer(prompt)
    before = engine.core.get_stats().counters.get("ignored_hints", 0)
    for _ in range(2):
        found = ask(engine, prompt, no_store=True, priority="urgent", ttl_s=-5)
        assert (found.num_cached, found.tokens) == (0, expected)
    assert engine.counters["stored_blocks"] == 0
    assert engine.core.get_stats().counters["ignored_hints"] == before + 4
    # one line a kind; a record may reach the handler in two ways
    lines = list(
        {id(record): record.getMessage() for record in caplog.records if "hint" in record.getMessage()}.values()
    )
    assert len(lines) == 2, lines
    assert ask(engine, prompt).num_cached == 0
    assert ask(engine, prompt).num_cached == 3 * BLOCK
