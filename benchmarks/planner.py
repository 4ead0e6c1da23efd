#!/usr/bin/env python3
"""The planner beside full replays: what it predicts, how far off that is, and what it costs.

  benchmarks/planner.py conversation_trace.jsonl [MORE.jsonl...] [--policy lru,arc] [--seeds 3] [--json out.json]

At five sizes (1, 2, 5, 10 and 20 % of the distinct blocks) each trace is replayed whole, hit ratios alone
(`kvtier replay --untimed`) and in simulated time (`kvtier replay`), and planned once for each seed. The planned hit
ratios are compared with the untimed replay's. Times are CPU time without reading the trace, which all of them need;
the ratio of the commands, reading included, is given too. Everything runs in one process, one after the other.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtier.runtime import DEFAULT_POLICY
from kvtier.sim.plan import PlanSettings, make_plan
from kvtier.sim.replay import ReplaySettings, default_prefill_rate, replay
from kvtier.sim.serving import ServingModel
from kvtier.sim.sizes import DEFAULT_BYTES_PER_TOKEN
from kvtier.sim.traces import Trace, read_trace
from kvtier.sim.transport import LinkSpeed

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """-> what `call` returns, CPU seconds of this thread."""
    gc.collect()
    start = time.thread_time()
    result = call()
    return result, time.thread_time() - start


def measure(trace: Trace, read_s: float, policy: str, seeds: int) -> dict[str, Any]:
    """One trace and policy."""
    capacities = [int(trace.num_unique_blocks * share) for share in SHARES]
    block_bytes = DEFAULT_BYTES_PER_TOKEN * trace.block_tokens
    rate = default_prefill_rate(trace)
    speed = LinkSpeed(1e-4, 20e9)
    settings = ReplaySettings((policy,), capacities, ServingModel(rate, block_bytes, speed, speed))
    untimed, untimed_s = timed(lambda: list(replay(trace, replace(settings, timed=False))))
    _, served_s = timed(lambda: list(replay(trace, settings)))
    full = [cell.block_hit_ratio for cell in untimed]
    errors, said, plan_s, planned = [], [], [], []
    for seed in range(seeds):
        plan_settings = PlanSettings((policy,), capacities, block_bytes, rate, seed=seed)
        plan, seconds = timed(lambda plan_settings=plan_settings: make_plan(trace, plan_settings))
        points = plan.curves[0].points
        planned.append([point.hit_ratio for point in points])
        errors.append([abs(point.hit_ratio - ratio) for point, ratio in zip(points, full, strict=True)])
        said.append([point.error for point in points])
        plan_s.append(seconds)
    median_s = statistics.median(plan_s)
    return {
        "trace": trace.name,
        "policy": policy,
        "replayed": full,
        "planned": planned,
        "largest_error": max(max(row) for row in errors),
        "largest_error_said": max(max(row) for row in said),
        "untimed_s": untimed_s,
        "served_s": served_s,
        "plan_s": plan_s,
        "share_of_untimed": median_s / untimed_s,
        "share_of_served": median_s / served_s,
        "share_of_served_with_reading": (median_s + read_s) / (served_s + read_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--policy", default=f"lru,arc,{DEFAULT_POLICY}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = []
    print(
        f"{'trace':26}{'policy':10}{'replayed at 1, 2, 5, 10, 20 %':>38}{'largest error':>15}{'said':>8}"
        f"{'untimed s':>11}{'timed s':>9}{'plan s':>8}{'of untimed':>12}{'of timed':>10}{'reading too':>13}"
    )
    for path in arguments.traces:
        trace, read_s = timed(lambda path=path: read_trace(path))
        _, keys_s = timed(lambda trace=trace: trace.keys)
        for policy in dict.fromkeys(arguments.policy.split(",")):
            result = measure(trace, read_s + keys_s, policy, arguments.seeds)
            results.append(result)
            replayed = " ".join(f"{ratio:.4f}" for ratio in result["replayed"])
            print(
                f"{trace.name[:25]:26}{policy:10}{replayed:>38}{result['largest_error']:15.4f}"
                f"{result['largest_error_said']:8.4f}{result['untimed_s']:11.2f}{result['served_s']:9.2f}"
                f"{statistics.median(result['plan_s']):8.3f}{result['share_of_untimed']:12.3f}"
                f"{result['share_of_served']:10.3f}{result['share_of_served_with_reading']:13.3f}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
