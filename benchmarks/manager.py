#!/usr/bin/env python3
"""CPU time of kvtier's manager beside vLLM's real CPUOffloadingManager: same keys, same calls, one process, one run.

  benchmarks/manager.py [--trace conversation_trace.jsonl] [--rounds 5] [--json out.json]

Operations: a full pool of 100k slots, batches of 64 blocks. Cycle: a trace in the Mooncake format replayed request by
request (look-up, load, complete, store, complete, finish), kvtier through its batch look-up. Every round runs all
managers in turn, the order reversed each time; figures are medians over the rounds, ratios medians of the ratios
within a round, and the spread (minimum to maximum of that ratio) says how noisy the machine was. Without vLLM in the
environment kvtier's own figures are printed alone.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvtier

POOL_BLOCKS = 100_000
BATCH_BLOCKS = 64
NUM_BATCHES = 400
OPERATIONS = ("lookup hit", "prepare_load", "complete_load", "prepare_store", "complete_store")


@dataclass(frozen=True)
class Side:
    """One kind of manager and how to drive it."""

    name: str
    make_manager: Callable[[int], Any]
    make_context: Callable[[str], Any]
    count_ready: Callable[[Any, Sequence[bytes], Any], int]


@contextlib.contextmanager
def cpu_time(into: dict[str, float], name: str) -> Iterator[None]:
    """Adds the CPU time of this thread inside the block to `into[name]`, seconds."""
    start = time.thread_time()
    yield
    into[name] = into.get(name, 0.0) + time.thread_time() - start


def kvtier_side(policy: str) -> Side:
    return Side(
        f"kvtier {policy}",
        lambda blocks: kvtier.CPUOffloadingManager(blocks, policy),
        kvtier.ReqContext,
        lambda manager, keys, context: manager.lookup_prefix(keys, context).num_ready,
    )


def vllm_side(policy: str) -> Side | None:
    """vLLM's manager without its metrics import chain; None where there is no usable vLLM."""

    class NoStats:
        set_gauge = observe_histogram = increase_counter = lambda *args, **kwargs: None

    root = "vllm.distributed.kv_transfer"
    for name in (root, f"{root}.kv_connector", f"{root}.kv_connector.v1", f"{root}.kv_connector.v1.offloading"):
        package = sys.modules.setdefault(name, types.ModuleType(name))
        package.__path__ = []
    metrics: Any = types.ModuleType(f"{root}.kv_connector.v1.offloading.metrics")
    metrics.OffloadingConnectorStats = NoStats
    sys.modules.setdefault(metrics.__name__, metrics)
    try:
        from vllm.v1.kv_offload.base import LookupResult, ReqContext
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
    except Exception as error:
        print(f"no vLLM rows: {error!r}"[:200], file=sys.stderr)
        return None

    def count_ready(manager: Any, keys: Sequence[bytes], context: Any) -> int:
        hit = LookupResult.HIT
        for ready, key in enumerate(keys):
            if manager.lookup(key, context) is not hit:
                return ready
        return len(keys)

    return Side(f"vLLM {policy}", lambda blocks: CPUOffloadingManager(blocks, policy), ReqContext, count_ready)


def make_keys(first: int, count: int) -> list[bytes]:
    keys = [kvtier.make_offload_key(hashlib.sha256(str(first + i).encode()).digest(), 0) for i in range(count)]
    for key in keys:
        hash(key)  # bytes remember their hash: nobody pays for it inside a measurement
    return keys


def measure_operations(side: Side, resident: Sequence[Sequence[bytes]], fresh: Sequence[Sequence[bytes]]) -> dict:
    """-> operation -> CPU microseconds a block, on a full pool."""
    manager = side.make_manager(POOL_BLOCKS)
    for number, batch in enumerate(resident):
        context = side.make_context(f"fill-{number}")
        manager.on_new_request(context)
        manager.complete_store(manager.prepare_store(batch, context).keys_to_store, context)
        manager.on_request_finished(context)
    spent: dict[str, float] = {}
    for number in range(NUM_BATCHES):
        # spread over the pool, so that no side works on what its last call left in the cache
        hits = resident[number * len(resident) // NUM_BATCHES]
        context = side.make_context(f"hit-{number}")
        manager.on_new_request(context)
        with cpu_time(spent, "lookup hit"):
            side.count_ready(manager, hits, context)
        with cpu_time(spent, "prepare_load"):
            manager.prepare_load(hits, context)
        with cpu_time(spent, "complete_load"):
            manager.complete_load(hits, context)
    for number, batch in enumerate(fresh[:NUM_BATCHES]):
        context = side.make_context(f"store-{number}")
        manager.on_new_request(context)
        with cpu_time(spent, "prepare_store"):
            output = manager.prepare_store(batch, context)
        with cpu_time(spent, "complete_store"):
            manager.complete_store(output.keys_to_store, context)
    return {name: seconds / (NUM_BATCHES * BATCH_BLOCKS) * 1e6 for name, seconds in spent.items()}


def measure_cycle(side: Side, requests: Sequence[Sequence[bytes]], pool_blocks: int) -> tuple[float, float]:
    """-> CPU microseconds a block of the trace, hit ratio."""
    manager = side.make_manager(pool_blocks)
    hits = total = 0
    start = time.thread_time()
    for number, keys in enumerate(requests):
        context = side.make_context(str(number))
        manager.on_new_request(context)
        ready = side.count_ready(manager, keys, context)
        if ready:
            manager.prepare_load(keys[:ready], context)
            manager.complete_load(keys[:ready], context)
        if ready < len(keys):
            output = manager.prepare_store(keys[ready:], context)
            if output is not None:
                manager.complete_store(output.keys_to_store, context)
        manager.on_request_finished(context)
        hits += ready
        total += len(keys)
    return (time.thread_time() - start) / total * 1e6, hits / total


def read_trace(path: Path) -> tuple[list[list[bytes]], int]:
    """-> the block keys of each request in order of time, number of unique blocks."""
    rows = sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda row: row["timestamp"])
    ids = sorted({block for row in rows for block in row["hash_ids"]})
    key_of = dict(zip(ids, make_keys(10**9, len(ids)), strict=True))
    return [[key_of[block] for block in row["hash_ids"]] for row in rows if row["hash_ids"]], len(ids)


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="a request trace in the Mooncake format for the cycle")
    parser.add_argument("--share", type=float, default=0.1, help="pool size of the cycle: share of the unique blocks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sides = [side for policy in ("lru", "arc") for side in (vllm_side(policy), kvtier_side(policy)) if side]
    resident_keys = make_keys(0, POOL_BLOCKS)
    resident = [resident_keys[i : i + BATCH_BLOCKS] for i in range(0, POOL_BLOCKS, BATCH_BLOCKS)]
    fresh_keys = make_keys(POOL_BLOCKS, NUM_BATCHES * BATCH_BLOCKS)
    fresh = [fresh_keys[i : i + BATCH_BLOCKS] for i in range(0, len(fresh_keys), BATCH_BLOCKS)]
    requests, unique = read_trace(arguments.trace) if arguments.trace else ([], 0)
    figures: dict[str, dict[str, list[float]]] = {side.name: {} for side in sides}
    for number in range(arguments.rounds):
        for side in sides if number % 2 else reversed(sides):
            gc.collect()
            gc.disable()
            for name, value in measure_operations(side, resident, fresh).items():
                figures[side.name].setdefault(name, []).append(value)
            if requests:
                gc.collect()
                cycle, hit_ratio = measure_cycle(side, requests, int(unique * arguments.share))
                figures[side.name].setdefault("cycle", []).append(cycle)
                figures[side.name].setdefault("cycle hit ratio", []).append(hit_ratio)
            gc.enable()
        print(f"round {number + 1} of {arguments.rounds} done", file=sys.stderr, flush=True)
    report(figures, [side.name for side in sides], arguments.json)


def report(figures: dict[str, dict[str, list[float]]], names: Sequence[str], json_path: Path | None) -> None:
    columns = [*OPERATIONS, *(["cycle"] if "cycle" in figures[names[0]] else [])]
    print(f"\nCPU us a block, medians of {len(figures[names[0]][columns[0]])} rounds")
    print(f"{'':14}" + "".join(f"{name:>18}" for name in columns))
    for name in names:
        print(f"{name:14}" + "".join(f"{statistics.median(figures[name][c]):18.3f}" for c in columns))
    ratios: dict[str, dict[str, list[float]]] = {}
    for policy in ("lru", "arc"):
        peer, ours = figures.get(f"vLLM {policy}"), figures[f"kvtier {policy}"]
        if peer:
            ratios[policy] = {c: [p / o for p, o in zip(peer[c], ours[c], strict=True)] for c in columns}
            print(f"{'x cheaper ' + policy:14}" + "".join(f"{spread(ratios[policy][c]):>18}" for c in columns))
    for name in names:
        if "cycle hit ratio" in figures[name]:
            print(f"{name}: hit ratio of the cycle {figures[name]['cycle hit ratio'][0]:.4f}")
    if json_path:
        json_path.write_text(json.dumps({"us_per_block": figures, "times_cheaper": ratios}, indent=1))


if __name__ == "__main__":
    main()
