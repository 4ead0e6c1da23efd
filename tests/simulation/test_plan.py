"""The planner against full replays of the same trace."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvtier.errors import ConfigurationError
from kvtier.manager import CPUOffloadingManager
from kvtier.runtime import parse_config, parse_size
from kvtier.sim.hits import best_possible_hits, count_hits
from kvtier.sim.plan import PlanSettings, connector_settings, make_plan, num_steps, plan_as_json, ram_setting
from kvtier.sim.workload import generate

BLOCK_BYTES = 2**26
RATE = 20_000.0


@pytest.fixture(scope="module")
def trace():
    return generate("mixed", 1500, requests_per_s=3, seed=5)


def plan_of(trace, *policies, shares=(0.02, 0.05, 0.1, 0.2, 0.4), **changes):
    capacities = [int(trace.num_unique_blocks * share) for share in shares]
    settings = PlanSettings(policies, capacities, BLOCK_BYTES, RATE, **changes)
    return settings, make_plan(trace, settings)


def replayed(trace, policy, capacity):
    return count_hits(CPUOffloadingManager(capacity, policy), trace.keys).sum() / trace.num_blocks


def test_lru_is_exact(trace):
    _, plan = plan_of(trace, "lru")
    for point in plan.curves[0].points:
        assert point.hit_ratio == pytest.approx(replayed(trace, "lru", point.capacity_blocks), abs=1e-12)
        assert point.error == 0
        assert point.capacity_bytes == point.capacity_blocks * BLOCK_BYTES
    best = best_possible_hits([request.hash_ids for request in trace.requests]).sum() / trace.num_blocks
    assert plan.best_hit_ratio == pytest.approx(best)


def test_a_sample_of_everything_is_exact_for_any_policy(trace):
    _, plan = plan_of(trace, "arc", sample_rate=1.0)
    for point in plan.curves[0].points:
        assert point.hit_ratio == pytest.approx(replayed(trace, "arc", point.capacity_blocks), abs=1e-9)
        assert point.error == pytest.approx(0, abs=1e-9)


def test_a_sample_comes_close_and_says_how_close(trace):
    errors, said = [], []
    for seed in range(4):
        _, plan = plan_of(trace, "arc", sample_rate=0.1, seed=seed)
        errors += [
            abs(point.hit_ratio - replayed(trace, "arc", point.capacity_blocks)) for point in plan.curves[0].points
        ]
        said += [point.error for point in plan.curves[0].points]
    assert max(errors) < 0.03
    # two standard errors: nearly all of them should be inside, and the words should not be empty either
    assert np.mean(np.array(errors) <= np.array(said)) >= 0.8
    assert np.median(said) < 0.02


def test_the_same_seed_gives_the_same_plan(trace):
    settings, one = plan_of(trace, "arc", "lru")
    _, two = plan_of(trace, "arc", "lru")
    assert plan_as_json(settings, one) == plan_as_json(settings, two)


def test_worth_adds_up(trace):
    _, plan = plan_of(trace, "lru")
    points = plan.curves[0].points
    for here, there in itertools.pairwise(points):
        gib = (there.capacity_bytes - here.capacity_bytes) / 2**30
        assert here.saved_s + here.saved_s_per_further_gib * gib == pytest.approx(there.saved_s)
    # what an endless cache saves is known: the tokens of the leading blocks that were there before
    hits = best_possible_hits([request.hash_ids for request in trace.requests])
    tokens = sum(min(int(hit) * 512, request.input_length) for hit, request in zip(hits, trace.requests, strict=True))
    _, all_of_it = plan_of(trace, "lru", shares=(1.0,))
    assert all_of_it.curves[0].points[0].saved_s == pytest.approx(tokens / RATE)


def test_the_recommendation_can_be_configured_and_is_within_the_limit(trace):
    _, plan = plan_of(trace, "lru", "arc")
    config = parse_config(connector_settings(plan))
    assert plan.recommended_bytes <= config.ram_bytes < plan.recommended_bytes + 2**30
    assert plan.recommended_bytes <= plan.enough_bytes
    limit = plan.recommended_bytes // 2
    _, limited = plan_of(trace, "lru", "arc", max_ram_bytes=limit)
    assert BLOCK_BYTES <= limited.recommended_bytes <= limit


def test_a_disk_behind_finds_what_a_larger_cache_would(trace):
    _, plan = plan_of(trace, "lru", disk_bytes_per_s=1e12)
    ram = plan.recommended_bytes // BLOCK_BYTES
    for point in plan.disk:
        both = replayed(trace, "lru", ram + point.capacity_bytes // BLOCK_BYTES)
        assert point.hit_ratio == pytest.approx(both - replayed(trace, "lru", ram), abs=0.01)
        assert point.saved_s > 0
    _, slow = plan_of(trace, "lru", disk_bytes_per_s=1e6)
    assert all(point.saved_s < 0 for point in slow.disk)


@pytest.mark.parametrize(("num_bytes", "text"), [(1, "1MiB"), (2**30, "1GiB"), (2**30 + 1, "2GiB"), (2**29, "512MiB")])
def test_sizes_are_rounded_up(num_bytes, text):
    assert ram_setting(num_bytes) == text
    assert parse_size(text) >= num_bytes


def test_progress_and_bad_settings(trace):
    told: list[int] = []
    settings = PlanSettings(("arc", "lru"), (100, 200), BLOCK_BYTES, RATE)
    make_plan(trace, settings, told.append)
    assert sum(told) == num_steps(trace, settings)
    with pytest.raises(ConfigurationError, match="'best' is unknown"):
        plan_of(trace, "best")
    with pytest.raises(ConfigurationError, match="--sample-rate is 0"):
        plan_of(trace, "lru", sample_rate=0.0)


def test_a_trace_without_any_reuse():
    nothing = generate("system", 3, seed=1)
    _, plan = plan_of(nothing, "arc", shares=(1.0,))
    assert plan.recommended_bytes >= BLOCK_BYTES
