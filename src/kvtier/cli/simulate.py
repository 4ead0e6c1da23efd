"""`kvtier simulate`: many seeds of the simulation, and one line that says what they came to."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress

from kvtier.errors import ConfigurationError
from kvtier.sim.simulation import SimulationResult, simulate


def parse_seeds(text: str) -> range:
    """The seeds A..B-1 of "A:B". Raises ConfigurationError for anything else, or if there is none."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not match or int(match[1]) >= int(match[2]):
        raise ConfigurationError(f"--seeds {text}: expected A:B, the seeds from A to B - 1, for example 0:100")
    return range(int(match[1]), int(match[2]))


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    seeds: range
    operations: int
    policy: str | None
    log: str | None
    as_json: bool
    timings: bool


def run(options: Options) -> None:
    """Prints what the seeds came to. Raises SimulationError for the first that breaks a promise."""
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    with _log_to(options.log) as write, _progress(len(options.seeds)) as on_seed:
        result = simulate(options.seeds, options.operations, options.policy, write, on_seed)
    took_s, took_cpu_s = time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
    if options.as_json:
        timings = {"wall_s": took_s, "cpu_s": took_cpu_s} if options.timings else {}
        print(json.dumps(_as_record(result) | timings))
        return
    if options.timings:
        print(f"{result.num_operations / took_s:.0f} operations/s, {took_s:.1f} s, {took_cpu_s:.1f} s of CPU time")
    for kind, count in sorted(result.faults.items()):
        print(f"  {kind} {count}")
    print(result)


def _as_record(result: SimulationResult) -> dict[str, Any]:
    return {
        "seeds": result.num_seeds,
        "operations": result.num_operations,
        "faults": result.num_faults,
        "faults_by_kind": dict(sorted(result.faults.items())),
        "digest": result.digest.hex(),
    }


@contextlib.contextmanager
def _log_to(target: str | None) -> Iterator[Callable[[str], object] | None]:
    if target is None:
        yield None
    elif target == "-":
        try:
            yield sys.stdout.write
            sys.stdout.flush()
        except BrokenPipeError:  # the reader has seen enough; what is left in the buffer is not to raise again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
    else:
        try:
            with Path(target).open("w", encoding="utf-8") as file:
                yield file.write
        except OSError as error:
            raise ConfigurationError(f"--log {target}: {error.strerror}") from error


@contextlib.contextmanager
def _progress(num_seeds: int) -> Iterator[Callable[[int, int], None] | None]:
    """For somebody who watches; nothing of it goes into a file or a pipe."""
    console = Console(stderr=True)
    if not sys.stderr.isatty() or not console.is_terminal:
        yield None
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("seeds", total=num_seeds)
        yield lambda seed, operations: progress.advance(task)
