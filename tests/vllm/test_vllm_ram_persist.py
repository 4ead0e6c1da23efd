"""A RAM pool that outlives the engine, in the real vLLM: what comes back from it after a stop, a kill and a reset."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driven_process import DrivenProcess, wait_until
from vllm_harness import BLOCK, Engine, Prompts

from kvtier.tiers.disk.layout import PAGE_BYTES, RECORD, valid_places
from kvtier.tiers.ram_persist import PoolHeader, open_persisted

BLOCK_BYTES = 3 * 2 * 2 * 32 * 4 * BLOCK  # of the dense model: layers, K and V, heads, head size, float32
LENGTH = 6 * BLOCK + 10
RAM_BLOCKS = 128
NAME = "test"

new_prompt = Prompts(seed=21)


def settings_in(folder: Path, **changes: Any) -> dict[str, Any]:
    """A tiny model computes faster than anything is checked: what waiting costs is not compared."""
    ram = RAM_BLOCKS * (BLOCK_BYTES + 256) + 4 * PAGE_BYTES
    persisted = {"pool_dir": str(folder), "ram_persist": NAME}
    return {"ram": ram, "deadline_s": 60, "prefill_tokens_per_s": 0, **persisted, **changes}


def file_in(folder: Path) -> Path:
    return folder / f"kvtier-ram-{NAME}"


def blocks_in(folder: Path) -> int:
    """Blocks that the next process will find."""
    data = file_in(folder).read_bytes()
    header = PoolHeader.unpack(data[:PAGE_BYTES])
    if header is None:
        return 0
    records = np.frombuffer(data, RECORD, header.num_slots, PAGE_BYTES)
    return len(valid_places(records, header.namespace, header.epoch))


@pytest.fixture
def restart(_shelf: Any, dense: Path, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Stops the engine, where one runs, and starts a new one with the same file: `restart(**settings)`."""
    started: list[Engine] = []

    def start(**changes: Any) -> Engine:
        if started:
            started[-1].check_nothing_leaked()
        _shelf.discard()
        started.append(_shelf.get(dense, settings=settings_in(tmp_path, **changes)))
        return started[-1]

    yield start
    if _shelf.engine in started:  # else the test has failed
        _shelf.engine.check_nothing_leaked()
        _shelf.discard()


def hits(engine: Engine, prompts: list[list[int]], answers: list[list[int]]) -> list[int]:
    """Blocks of each prompt that came back. Every answer is right."""
    num_back = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ask = engine.ask_afresh(prompt)
        assert ask.tokens == answer
        num_back.append(ask.num_cached // BLOCK)
    return num_back


def flip_a_bit(engine: Engine, folder: Path, slot: int) -> None:
    """In the bytes of a block that has its record."""
    assert engine.manager.stack.keeper.flush(60)
    handle = engine.manager.pool_handle
    with file_in(folder).open("r+b") as file:
        file.seek(handle.offset_bytes + slot * handle.slot_bytes + 1000)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def test_restarts_damage_and_a_reset(dense, plain, restart, tmp_path):
    prompts = [new_prompt(LENGTH) for _ in range(6)]
    answers = plain(dense).answers(prompts)
    engine = restart()
    assert hits(engine, prompts, answers) == [0] * 6

    engine = restart()
    assert engine.core.get_stats().counters["restored_blocks"] == 36
    assert engine.core.get_stats().ready_blocks == 0
    assert hits(engine, prompts[:4], answers[:4]) == [6] * 4, "the first turns after a restart hit"
    assert engine.counters["verified_blocks"] == engine.counters["loaded_blocks"] == 24
    flip_a_bit(engine, tmp_path, slot=2)

    engine = restart()
    assert hits(engine, prompts, answers) == [2, *[6] * 5], "what nobody asked for in between is there too"
    check_figures(engine)
    assert hits(engine, prompts, answers) == [6] * 6
    assert engine.reset()
    engine.drain()
    assert blocks_in(tmp_path) == 0
    assert hits(engine, prompts, answers) == [0] * 6
    assert hits(engine, prompts, answers) == [6] * 6, "what was stored after the reset is of use while the process runs"

    engine = restart()
    assert hits(engine, prompts, answers) == [0] * 6, "the weights may have been others than the files have"


def check_figures(engine: Engine) -> None:
    """Of the run with one damaged block: each is right, and declared."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import get_connector_metric_definitions

    from kvtier.adapters.vllm import KVTierOffloadingSpec
    from kvtier.adapters.vllm.metrics import MetricsReporter

    settings = engine.llm.vllm_config.kv_transfer_config.kv_connector_extra_config
    declared = {**KVTierOffloadingSpec.build_metric_definitions(settings), **get_connector_metric_definitions()}
    engine.manager._reporter = MetricsReporter(has_reuse_filter=False, has_tiers=False, has_persisted_ram=True)
    reported = engine.connector.get_kv_connector_stats().reduce()
    assert {name.removesuffix("_count").removesuffix("_sum") for name in reported} <= declared.keys()
    assert reported["vllm:kvtier_restored_blocks"] == 36
    assert reported["vllm:kvtier_verified_blocks"] == 35
    assert reported["vllm:kvtier_corrupt_blocks"] == 1


def test_a_file_in_use_costs_hits_and_nothing_else(dense, plain, restart, tmp_path):
    prompts = [new_prompt(LENGTH) for _ in range(2)]
    answers = plain(dense).answers(prompts)
    other = open_persisted(str(file_in(tmp_path)), 4, 4096, b"another engine".ljust(32))
    engine = restart()
    assert hits(engine, prompts, answers) == [0, 0]
    assert hits(engine, prompts, answers) == [6, 6]
    assert engine.manager.stack.keeper is None
    other.pool.close()


@pytest.fixture
def drive(dense: Path, tmp_path: Path) -> Iterator[Callable[..., DrivenProcess]]:
    """`drive(**changes)`: an engine in processes of its own, with the same file each time."""
    engines: list[DrivenProcess] = []

    def start(**changes: Any) -> DrivenProcess:
        settings = settings_in(tmp_path)
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


def test_kill_9_of_two_ranks_and_their_engine(dense, plain, drive, tmp_path):
    prompts = [new_prompt(LENGTH) for _ in range(6)]
    answers = plain(dense).answers(prompts)
    ranks = {"multiprocess": True, "tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    engine = drive(**ranks)
    assert ask_all(engine, prompts, answers) == 0
    wait_until(lambda: blocks_in(tmp_path) >= 36, "every block has its record")
    for i, prompt in enumerate(prompts):
        engine.send("ask", str(i), prompt[:BLOCK] + new_prompt(7 * BLOCK), 4, None)
    engine.expect("tokens")
    engine.kill(engine.pids())  # in the middle of stores
    engine.wait_until_gone()
    assert blocks_in(tmp_path) >= 36
    engine = drive(**ranks)
    assert ask_all(engine, prompts, answers) == 36
    assert engine.close() == 0, engine.log_tail()
