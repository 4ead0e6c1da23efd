"""kill -9 at random moments, again and again: each start works as if nothing had been, and nothing is left of it.

`KVTIER_SOAK=1` kills more often. A failure names its seed.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from driven_process import (
    SHARED_MEMORY,
    START_PATIENCE_S,
    DrivenProcess,
    living_pids,
    pools_of,
    shared_memory_bytes,
    wait_until,
)
from traffic import LONGEST_PROMPT, Run, Traffic

SOAK = bool(os.environ.get("KVTIER_SOAK"))
NUM_REQUESTS = 60
AT_ONCE = 8
MOST_TOKENS = 8
POOL_BYTES = 256 << 20
OTHERS_BYTES = 2 * POOL_BYTES
"""What other programs may take of shared memory meanwhile. A pool that stays after each kill is more."""


@dataclass(frozen=True)
class Kill:
    """Whom, and in which stage of the engine's life."""

    victim: str
    stage: str = "working"


ONE_PROCESS = [Kill("all", "starting"), Kill("all"), Kill("all")]
THREE_PROCESSES = [Kill("one"), Kill("all")]
if SOAK:
    ONE_PROCESS = [Kill("all", stage) for stage in ("starting", "working", "working") * 4]
    THREE_PROCESSES = [Kill(victim) for victim in ("parent", "engine core", "worker", "all") * 2]


@pytest.fixture
def pool_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="pools-") as folder:
        yield Path(folder)


@pytest.fixture
def temporary() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="k-") as folder:
        yield Path(folder)


@pytest.mark.timeout(3600 if SOAK else 900)
@pytest.mark.parametrize(
    ("kills", "multiprocess", "seed"),
    [(ONE_PROCESS, False, 1), (THREE_PROCESSES, True, 2)],
    ids=["one process", "three processes"],
)
def test_killed_again_and_again(kills, multiprocess, seed, dense, plain, pool_dir, temporary, tmp_path):  # noqa: PLR0917
    rng = Random(seed)
    expected = plain(dense).answers([request.prompt for request in traffic(seed).requests], MOST_TOKENS)
    files_before = files(temporary)
    taken_before = shared_memory_bytes()
    log = tmp_path / "log"
    for kill in kills:
        what = f"seed {seed}, {kill}"
        with engine_of(dense, log, multiprocess, pool_dir, temporary) as engine:
            done = live_until_killed(engine, kill, seed, rng, pool_dir)
            done.check(expected, what)
            assert_nothing_is_left(pool_dir, temporary, files_before)
    with engine_of(dense, log, multiprocess, pool_dir, temporary) as engine:
        engine.wait_until_ready()
        done = traffic(seed)
        Run(engine, done, AT_ONCE).to_the_end()
        done.check(expected, f"seed {seed}, the last start")
        assert engine.close() == 0, engine.log_tail()
        assert_nothing_is_left(pool_dir, temporary, files_before)
    wait_until(
        lambda: shared_memory_bytes() < taken_before + OTHERS_BYTES,
        f"the memory of {len(kills)} pools of {POOL_BYTES} bytes is back",
    )


def traffic(seed: int) -> Traffic:
    return Traffic(seed, NUM_REQUESTS, MOST_TOKENS)


@contextlib.contextmanager
def engine_of(model: Path, log: Path, multiprocess: bool, pool_dir: Path, temporary: Path) -> Iterator[DrivenProcess]:
    settings = {"ram": POOL_BYTES, "offload_prompt_only": False, "debug": True}
    if not multiprocess:
        settings["pool_dir"] = str(pool_dir)  # else nobody could tell the pool from other memory of the process
    engine = DrivenProcess(
        model,
        log,
        num_blocks=30,
        max_model_len=LONGEST_PROMPT + MOST_TOKENS,
        max_num_batched_tokens=512,
        settings=settings,
        multiprocess=multiprocess,
        temporary=temporary,
    )
    try:
        yield engine
    finally:
        engine.discard()


def live_until_killed(engine: DrivenProcess, kill: Kill, seed: int, rng: Random, pool_dir: Path) -> Traffic:
    """Kills the engine. Returns what it had done by then. Nobody holds the memory of its pool any more."""
    done = traffic(seed)
    run = Run(engine, done, AT_ONCE)
    if kill.stage == "starting":
        wait_until(lambda: pools(engine, pool_dir), "there is a pool", START_PATIENCE_S)
    else:
        engine.wait_until_ready()
        for _ in range(rng.randint(1, 200)):
            run.next_answer()
        time.sleep(rng.uniform(0.0, 0.03))  # into the middle of whatever goes on then
    held = pools(engine, pool_dir)
    assert len(held) == 1
    chosen = victims(engine, kill.victim, rng)
    engine.kill(chosen)
    if chosen == [engine.process.pid]:
        # vLLM's engine core outlives its parent, with and without a connector; whoever supervises it ends it
        time.sleep(rng.uniform(0.0, 0.5))
        engine.kill(engine.pids())
    engine.wait_until_gone()
    run.rest()
    wait_until(
        lambda: not any(held & pools_of(pid, pool_dir) for pid in living_pids()), "no process holds the pool's memory"
    )
    return done


def pools(engine: DrivenProcess, pool_dir: Path) -> set[tuple[int, int]]:
    return set().union(*(pools_of(pid, pool_dir) for pid in engine.pids()))


def victims(engine: DrivenProcess, victim: str, rng: Random) -> list[int]:
    if victim == "one":
        victim = rng.choice(["parent", "engine core", "worker"])
    if victim == "all":
        return engine.pids()
    if victim == "parent":
        return [engine.process.pid]
    title = {"engine core": "EngineCore", "worker": "Worker"}[victim]
    pids = [pid for pid in engine.pids() if title in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(pids) == 1, f"{victim}: {pids}"
    return pids


def assert_nothing_is_left(pool_dir: Path, temporary: Path, before: set[Path]) -> None:
    assert os.listdir(pool_dir) == []
    assert not [path for path in files(temporary) - before if "kvtier" in path.name]


def files(temporary: Path) -> set[Path]:
    return {*SHARED_MEMORY.iterdir(), *temporary.rglob("*")}
