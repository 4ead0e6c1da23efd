"""Two tensor-parallel workers in processes of their own; one of them may fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from vllm_harness import BLOCK, Engine, Prompts

LENGTH = 6 * BLOCK + 10
IN_BLOCKS = 6 * BLOCK

TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}

new_prompt = Prompts(seed=7)


def fail_copies(worker: object, rank: int, kind: str | None) -> int:
    """Runs in every worker process. On `rank`, copies of this kind fail from now on. Returns its rank."""
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    def strike(job):
        if job.is_store == (kind == "store"):
            raise OSError("injected fault")

    own_rank = get_tensor_model_parallel_rank()
    if own_rank == rank:
        get_kv_transfer_group()._worker.transfers.before_copy = strike if kind else None
    return own_rank


@contextmanager
def failing_on(engine: Engine, rank: int, kind: str) -> Iterator[None]:
    ranks = engine.llm.collective_rpc(fail_copies, args=(rank, kind))
    assert sorted(ranks) == [0, 1]
    yield
    engine.llm.collective_rpc(fail_copies, args=(rank, None))


@pytest.fixture(scope="module", params=["dense", "hybrid"])
def model(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def engine(model, start_engine: Callable[..., Engine]) -> Engine:
    return start_engine(model, num_blocks=130, settings={"deadline_s": 600}, **TWO_RANKS)


@pytest.fixture
def expected(model, plain):
    return plain(model).answer


def test_two_ranks_store_and_load(engine, expected):
    prompts = [new_prompt(LENGTH) for _ in range(3)]
    for prompt in prompts:
        engine.ask(prompt)
    for prompt in prompts:
        ask = engine.ask_afresh(prompt)
        assert ask.num_cached == IN_BLOCKS
        assert ask.tokens == expected(prompt)
    assert engine.counters["loaded_blocks"] > 0
    both = [engine.ask(prompt) for prompt in prompts]
    assert [ask.tokens for ask in both] == [expected(prompt) for prompt in prompts]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_that_fails_on_one_rank_is_recomputed(engine, expected, rank):
    prompt = new_prompt(LENGTH)
    engine.ask(prompt)
    with failing_on(engine, rank, "load"):
        for _ in range(3):
            ask = engine.ask_afresh(prompt)
            assert ask.tokens == expected(prompt)
    assert engine.counters["failed_load_blocks"] > 0
    engine.ask_afresh(prompt)
    found = engine.ask_afresh(prompt)
    assert found.num_cached == IN_BLOCKS
    assert found.tokens == expected(prompt)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_fails_on_one_rank_is_not_stored(engine, expected, rank):
    prompt = new_prompt(LENGTH)
    with failing_on(engine, rank, "store"):
        engine.ask(prompt)
        assert engine.core.get_stats().ready_blocks == 0
    again = engine.ask_afresh(prompt)
    assert again.num_cached == 0
    assert again.tokens == expected(prompt)
    found = engine.ask_afresh(prompt)
    assert found.num_cached == IN_BLOCKS
    assert found.tokens == expected(prompt)


def test_reset_with_two_ranks(engine, expected):
    prompt = new_prompt(LENGTH)
    engine.finish(engine.submit(prompt))
    assert engine.reset()  # with the store perhaps in flight
    engine.drain()
    assert engine.core.get_stats().ready_blocks == 0
    ask = engine.ask_afresh(prompt)
    assert ask.num_cached == 0
    assert ask.tokens == expected(prompt)
