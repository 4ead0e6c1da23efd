"""Production traces, where they are: in the folder that KVTIER_TRACES names, or beside the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtier.manager import CPUOffloadingManager
from kvtier.sim.hits import best_possible_hits, count_hits
from kvtier.sim.optimum import optimal_hits
from kvtier.sim.plan import PlanSettings, make_plan
from kvtier.sim.stack import lru_runs
from kvtier.sim.traces import Trace, read_trace

FOLDER = Path(os.environ.get("KVTIER_TRACES", Path(__file__).parents[2].parent / "shared" / "traces"))
FACTS = {
    "conversation_trace.jsonl": (12_031, 288_500, 182_790, 0.3664),
    "synthetic_trace.jsonl": (3_993, 121_877, 43_924, 0.6396),
    "agent_130sessions_512tok.jsonl.xz": (8_652, 2_049_134, 71_778, 0.9650),
}
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2)


def load(name: str) -> Trace:
    if not (FOLDER / name).is_file():
        pytest.skip(f"{FOLDER / name} is not there (KVTIER_TRACES names the folder)")
    return read_trace(FOLDER / name)


@pytest.mark.parametrize("name", FACTS)
def test_what_is_known_of_the_traces(name):
    trace = load(name)
    best = best_possible_hits([request.hash_ids for request in trace.requests]).sum() / trace.num_blocks
    assert (len(trace.requests), trace.num_blocks, trace.num_unique_blocks, round(best, 4)) == FACTS[name]


def test_the_optimum_of_the_conversation_trace():
    trace = load("conversation_trace.jsonl")
    runs = lru_runs([request.hash_ids for request in trace.requests])
    ratios = [
        optimal_hits(runs, len(trace.requests), int(share * trace.num_unique_blocks)).sum() / trace.num_blocks
        for share in SHARES
    ]
    assert ratios == pytest.approx([0.2464, 0.3142, 0.3664, 0.3664, 0.3664], abs=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("name", FACTS)
def test_the_plan_agrees_with_the_replay(name, policy):
    trace = load(name)
    capacities = [int(trace.num_unique_blocks * share) for share in SHARES]
    plan = make_plan(trace, PlanSettings((policy,), capacities, 2**26, 50_000.0))
    for point in plan.curves[0].points:
        hits = count_hits(CPUOffloadingManager(point.capacity_blocks, policy), trace.keys)
        assert point.hit_ratio == pytest.approx(hits.sum() / trace.num_blocks, abs=0.01)
