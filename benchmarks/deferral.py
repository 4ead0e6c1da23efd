#!/usr/bin/env python3
"""CPU time a step of one deferred request with a long prefix, while other requests' transfers complete.

  benchmarks/deferral.py [--blocks 65536] [--rounds 5] [--json out.json]

The whole prefix is stored but for its last block, which somebody is writing. Every step another request's store is
prepared and completed, and then the waiting request is asked about again: kvtier through its request-level driver and
through `still_waiting` alone, and for a request behind another one's load; vLLM 0.32's manager looked up key by key
until the first miss, as its connector does. Only the asking is timed (with the timer's own cost, which is given too).
Figures are microseconds a step: the median over the rounds of a round's median step, and the least and largest
round. Without vLLM in the environment kvtier's own figures are printed alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import kvtier
from manager import make_keys, vllm_side

OTHER_BLOCKS = 16
NUM_OTHERS = 64
NEVER_S = 1e9
TARGET_US = 20.0


def others(manager, make_context: Callable, first_key: int) -> Iterator[None]:
    """Each `next` is what other requests do in one step: a store is prepared, one completes."""
    batches = [make_keys(first_key + i * OTHER_BLOCKS, OTHER_BLOCKS) for i in range(NUM_OTHERS)]
    number = 0
    while True:
        context = make_context(f"other-{number}")
        manager.on_new_request(context)
        granted = manager.prepare_store(batches[number % NUM_OTHERS], context)
        manager.complete_store(granted.keys_to_store, context)
        manager.on_request_finished(context)
        number += 1
        yield


def kvtier_waiting(keys: list[bytes]) -> tuple[kvtier.RequestDriver, Iterator[None]]:
    """A driver with a request that waits for the last of `keys`."""
    manager = kvtier.CPUOffloadingManager(2 * len(keys), deadline_s=NEVER_S, store_timeout_s=NEVER_S)
    driver = kvtier.RequestDriver(manager)
    driver.advance(1.0)
    driver.add_request("ready", keys[:-1])
    driver.report(driver.plan_store("ready", len(keys) - 1).job_id)
    driver.add_request("writer", keys[-1:])
    driver.plan_store("writer", 1)
    driver.add_request("waiting", keys)
    return driver, others(manager, kvtier.ReqContext, 10**6)


def stuck_block(keys: list[bytes]) -> tuple[Callable[[], object], Iterator[None]]:
    driver, step = kvtier_waiting(keys)
    assert driver.match("waiting") is None
    return lambda: driver.match("waiting"), step


def still_waiting(keys: list[bytes]) -> tuple[Callable[[], object], Iterator[None]]:
    driver, step = kvtier_waiting(keys)
    context = kvtier.ReqContext("waiting")
    assert driver.manager.lookup_prefix(keys, context).num_ready == len(keys) - 1
    assert driver.manager.still_waiting(context)
    return lambda: None if driver.manager.still_waiting(context) else 0, step


def behind_load(keys: list[bytes]) -> tuple[Callable[[], object], Iterator[None]]:
    driver, step = kvtier_waiting(keys)
    assert driver.match("ready") == len(keys) - 1
    driver.plan_load("ready", 0, len(keys) - 1)
    driver.add_request("behind", keys[:-1])
    assert driver.match("behind") is None
    return lambda: driver.match("behind"), step


def timer(keys: list[bytes]) -> tuple[Callable[[], object], Iterator[None]]:
    return lambda: None, iter(lambda: None, 0)


def vllm_manager(keys: list[bytes]) -> tuple[Callable[[], object], Iterator[None]] | None:
    """The look-up of vLLM's connector: key by key until a miss, pending ones counted as hits that defer."""
    side = vllm_side("lru")
    if side is None:
        return None
    from vllm.v1.kv_offload.base import LookupResult

    manager = side.make_manager(2 * len(keys))
    for name, part in (("ready", keys[:-1]), ("writer", keys[-1:])):
        context = side.make_context(name)
        manager.on_new_request(context)
        manager.prepare_store(part, context)
        if name == "ready":
            manager.complete_store(part, context)
    context = side.make_context("waiting")
    manager.on_new_request(context)
    hit, pending = LookupResult.HIT, LookupResult.HIT_PENDING

    def ask() -> object:
        deferred = False
        num_hits = 0
        for key in keys:
            result = manager.lookup(key, context)
            if result is pending:
                deferred = True
            elif result is not hit:
                break
            num_hits += 1
        return None if deferred else num_hits

    return ask, others(manager, side.make_context, 10**6)


ROWS = {
    "kvtier driver, stuck block": (stuck_block, 2000),
    "kvtier driver, behind a load": (behind_load, 2000),
    "kvtier still_waiting": (still_waiting, 2000),
    "the timer alone": (timer, 2000),
    "vLLM manager, key by key": (vllm_manager, 20),
}


def measure(ask: Callable[[], object], step: Iterator[None], num_steps: int) -> float:
    """-> CPU microseconds: the median step of `num_steps`."""
    spent = []
    for _ in range(num_steps):
        next(step)
        begin = time.thread_time_ns()
        answer = ask()
        spent.append(time.thread_time_ns() - begin)
        assert answer is None
    return statistics.median(spent) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=65536, help="length of the waiting request's prefix")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    keys = make_keys(0, arguments.blocks)
    figures: dict[str, list[float]] = {}
    for number in range(arguments.rounds):
        for name in list(ROWS) if number % 2 else reversed(ROWS):
            prepare, num_steps = ROWS[name]
            prepared = prepare(keys)
            if prepared is None:
                continue
            gc.collect()
            gc.disable()
            figures.setdefault(name, []).append(measure(*prepared, num_steps))
            gc.enable()
        print(f"round {number + 1} of {arguments.rounds} done", file=sys.stderr, flush=True)
    print(f"CPU us a step, one deferred request of {arguments.blocks} blocks, {arguments.rounds} rounds")
    for name in ROWS:
        if name in figures:
            least, most = min(figures[name]), max(figures[name])
            print(f"{name:30}{statistics.median(figures[name]):12.2f}  ({least:.2f}-{most:.2f})")
    ours = [name for name in figures if name.startswith("kvtier")]
    worst = max(statistics.median(figures[name]) for name in ours)
    print(f"target {TARGET_US:.0f} us: {'reached' if worst < TARGET_US else 'missed'} (largest median {worst:.2f} us)")
    if arguments.json:
        arguments.json.write_text(json.dumps({"blocks": arguments.blocks, "us_per_step": figures}, indent=1))


if __name__ == "__main__":
    main()
