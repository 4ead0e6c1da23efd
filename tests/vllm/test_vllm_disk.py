"""A disk behind the RAM in the real vLLM: what comes back from it, in this process and in the next ones."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from driven_process import DrivenProcess, wait_until
from vllm_harness import BLOCK, Engine, PlainVLLM, Prompts

from kvtier.tiers.disk.filesystem import FileSystem
from kvtier.tiers.disk.inspection import read_content
from kvtier.tiers.disk.space import list_caches

BLOCK_BYTES = 3 * 2 * 2 * 32 * 4 * BLOCK  # of the dense model: layers, K and V, heads, head size, float32
NUM_USERS = 20
FIRST_TOKENS, MORE_TOKENS, ANSWER_TOKENS = 3 * BLOCK + 10, 20, 4
RAM_BLOCKS = 16

new_prompt = Prompts(seed=12)


def disk_settings(folder: Path, ram_blocks: int, **disk: Any) -> dict[str, Any]:
    """A tiny model computes faster than any disk reads: what waiting costs is not compared."""
    return {
        "ram": ram_blocks * BLOCK_BYTES,
        "deadline_s": 60,
        "prefill_tokens_per_s": 0,
        "disk": {"path": str(folder), "capacity": "64MiB", "min_free": 0, **disk},
    }


def blocks_on_disk(folder: Path) -> int:
    """What another process sees."""
    contents = [read_content(FileSystem(), cache) for cache in list_caches(FileSystem(), str(folder))]
    return sum(len(content.places) for content in contents if content is not None)


class Conversations:
    """Users who come back in turn, each with all that was said before."""

    def __init__(self, seed: int, oracle: PlainVLLM) -> None:
        self._new_tokens = Prompts(seed)
        self._oracle = oracle
        self._histories: list[list[int]] = [[] for _ in range(NUM_USERS)]

    @property
    def num_blocks(self) -> int:
        return sum(len(history) // BLOCK for history in self._histories)

    def turn(self, engine: Engine) -> tuple[int, int]:
        """Everybody asks once, the engine's own cache being empty. Returns the blocks that were known, and came back.

        Every answer is plain vLLM's.
        """
        num_known = num_back = 0
        for user, history in enumerate(self._histories):
            prompt = history + self._new_tokens(MORE_TOKENS if history else FIRST_TOKENS)
            expected = self._oracle.answer(prompt, ANSWER_TOKENS)
            ask = engine.ask_afresh(prompt, ANSWER_TOKENS)
            assert ask.tokens == expected
            # only the prompt was stored, in whole blocks
            num_known += max(0, len(history) - ANSWER_TOKENS) // BLOCK
            num_back += ask.num_cached // BLOCK
            self._histories[user] = prompt + ask.tokens
        return num_known, num_back


@pytest.fixture
def restart(_shelf: Any, dense: Path, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Stops the engine, where one runs, and starts a new one on the same disk: `restart(**disk)`."""
    started: list[Engine] = []

    def start(**disk: Any) -> Engine:
        if started:
            started[-1].check_nothing_leaked()
        _shelf.discard()
        started.append(_shelf.get(dense, settings=disk_settings(tmp_path / "kv", RAM_BLOCKS, **disk)))
        return started[-1]

    yield start
    if _shelf.engine in started:  # else the test has failed
        _shelf.engine.check_nothing_leaked()
        _shelf.discard()


def from_disk(engine: Engine) -> int:
    """Blocks that the disk has delivered, verified."""
    (tier,) = engine.core.tier_stats()
    return tier.counters.get("loaded_blocks", 0)


def test_conversations_that_ram_does_not_hold_and_restarts(dense, plain, restart):
    conversations = Conversations(seed=11, oracle=plain(dense))
    engine = restart()
    assert conversations.turn(engine) == (0, 0)
    for _ in range(2):
        before = from_disk(engine)
        num_known, num_back = conversations.turn(engine)
        assert num_back == num_known
        assert from_disk(engine) - before >= num_known - RAM_BLOCKS

    engine = restart()
    before = from_disk(engine)
    num_known, num_back = conversations.turn(engine)
    assert num_back == num_known, "after a clean stop the first turn hits as the last one before did"
    assert from_disk(engine) - before == num_back

    assert engine.reset()
    engine.drain()
    assert conversations.turn(engine)[1] == 0
    num_known, num_back = conversations.turn(engine)
    assert num_back == num_known, "what was stored after the reset is of use while the process runs"

    engine = restart()
    assert conversations.turn(engine)[1] == 0, "after a reset the weights may have been others than the files have"

    engine = restart(weights_id="of another name")
    assert conversations.turn(engine)[1] == 0
    assert conversations.num_blocks >= 10 * RAM_BLOCKS


def test_where_a_hit_came_from_and_every_figure_is_declared(dense, restart):
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import get_connector_metric_definitions

    from kvtier.adapters.vllm import KVTierOffloadingSpec
    from kvtier.adapters.vllm.metrics import MetricsReporter

    engine = restart()
    prompts = [new_prompt(6 * BLOCK + 10) for _ in range(4)]
    for prompt in prompts:
        engine.ask(prompt)
    hits = engine.ask_afresh(prompts[0])
    assert hits.num_cached == 6 * BLOCK
    settings = engine.llm.vllm_config.kv_transfer_config.kv_connector_extra_config
    declared = {**KVTierOffloadingSpec.build_metric_definitions(settings), **get_connector_metric_definitions()}
    engine.manager._reporter = MetricsReporter(has_reuse_filter=False, has_tiers=True)  # the engine has had the rest
    reported = engine.connector.get_kv_connector_stats().reduce()
    names = {name.partition("(")[0].removesuffix(":").removesuffix("_count").removesuffix("_sum") for name in reported}
    assert names <= declared.keys()
    assert reported["vllm:kvtier_promoted_blocks"] == 6
    assert reported["vllm:kvtier_tier_loaded_bytes:('disk',)"] == 6 * BLOCK_BYTES
    assert reported["vllm:kvtier_tier_in_use:('disk',)"] == 1
    assert reported["vllm:kvtier_tier_ready_blocks:('disk',)"] == 24


def test_a_disk_that_fails_costs_hits_and_nothing_else(dense, plain, restart, monkeypatch):
    engine = restart()
    prompts = [new_prompt(6 * BLOCK + 10) for _ in range(8)]
    expected = plain(dense).answers(prompts)
    for prompt in prompts:
        engine.ask(prompt)
    (tier,) = engine.manager.stack.tiers

    def fail(*arguments: Any) -> int:
        raise OSError(errno.EIO, "injected fault")

    with monkeypatch.context() as faults:
        faults.setattr(tier._files, "preadv", fail)
        faults.setattr(tier._files, "pwritev", fail)
        for prompt, answer in zip(prompts[:6], expected, strict=False):  # the last ones are in RAM
            ask = engine.ask_afresh(prompt)
            assert ask.tokens == answer
            assert ask.num_cached == 0
    figures = tier.get_stats().counters
    assert figures["failed_load_blocks"] > 0
    assert figures["failed_store_blocks"] > 0
    assert engine.manager.counters["errors"] == 0
    engine.clock.advance(120.0)  # the breaker's cooling down
    tier._paused_until_s = 0.0
    for _ in range(2):
        for prompt, answer in zip(prompts, expected, strict=True):
            ask = engine.ask_afresh(prompt)
            assert ask.tokens == answer
    assert ask.num_cached == 6 * BLOCK
    assert from_disk(engine) > 0


@pytest.fixture
def drive(dense: Path, tmp_path: Path) -> Iterator[Callable[..., DrivenProcess]]:
    """`drive(admission=..., **changes)`: an engine in processes of its own, on the same disk each time."""
    engines: list[DrivenProcess] = []

    def start(admission: str = "always", **changes: Any) -> DrivenProcess:
        settings = disk_settings(tmp_path / "kv", RAM_BLOCKS * 4, admission=admission, stop_flush_s=4)
        engines.append(DrivenProcess(dense, tmp_path / "log", num_blocks=40, settings=settings, **changes))
        engines[-1].wait_until_ready()
        return engines[-1]

    yield start
    for engine in engines:
        engine.discard()


def ask_all(engine: DrivenProcess, prompts: list[list[int]], answers: list[list[int]]) -> int:
    """One after the other. Returns how many of their blocks came back; every answer is right."""
    num_back = 0
    for i, prompt in enumerate(prompts):
        engine.send("ask", str(i), prompt, len(answers[i]), None)
        finished = False
        while not finished:
            _, tokens, num_cached, finished = engine.expect("tokens")
        assert tokens == answers[i]
        num_back += num_cached // BLOCK
    return num_back


def test_kill_9_loses_no_more_than_the_last_moment(dense, plain, drive, tmp_path):
    prompts = [new_prompt(6 * BLOCK + 10) for _ in range(6)]
    answers = plain(dense).answers(prompts)
    engine = drive()
    assert ask_all(engine, prompts, answers) == 0
    wait_until(lambda: blocks_on_disk(tmp_path / "kv") >= 24, "a commit")
    for i, prompt in enumerate(prompts):
        engine.send("ask", str(i), prompt[:BLOCK] + new_prompt(7 * BLOCK), 4, None)
    engine.expect("tokens")
    engine.kill(engine.pids())  # in the middle of stores and writes
    engine.wait_until_gone()
    left = blocks_on_disk(tmp_path / "kv")
    assert left >= 24
    engine = drive()
    assert ask_all(engine, prompts, answers) >= 24


def test_vllm_leaves_the_time_to_flush_at_a_stop_with_several_processes(dense, plain, drive, tmp_path):
    prompts = [new_prompt(6 * BLOCK + 10) for _ in range(6)]
    answers = plain(dense).answers(prompts)
    ranks = {"multiprocess": True, "tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    engine = drive(admission="reuse", **ranks)
    assert ask_all(engine, prompts, answers) == 0
    assert blocks_on_disk(tmp_path / "kv") == 0
    assert engine.close() == 0, engine.log_tail()
    assert blocks_on_disk(tmp_path / "kv") == 36
    engine = drive(admission="reuse", **ranks)
    assert ask_all(engine, prompts, answers) == 36
