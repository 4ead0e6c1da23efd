"""Hit ratios: the production manager, LRU's stack and the optimum against oracles that know nothing of them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.manager import CPUOffloadingManager
from kvtier.policy import POLICIES
from kvtier.sim.hits import best_possible_hits, count_hits
from kvtier.sim.optimum import optimal_hits
from kvtier.sim.stack import known_blocks, lru_curve, lru_runs
from kvtier.sim.traces import Trace, TraceRequest
from kvtier.sim.workload import generate


def trace_of(prompts):
    """Prompts are tuples of words; a block's id stands for its prefix."""
    ids: dict[tuple, int] = {}
    requests = [
        TraceRequest(
            timestamp_ms=number * 1000,
            input_length=16 * max(1, len(words)),
            output_length=1,
            hash_ids=tuple(ids.setdefault(words[: depth + 1], len(ids)) for depth in range(len(words))),
        )
        for number, words in enumerate(prompts)
    ]
    return Trace("made up", 16, requests)


prompts_strategy = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple), min_size=1, max_size=25)


def naive_lru(trace, capacity):
    """Keeps a list, most recent first; a prompt goes to the front with its head first."""
    held: list[int] = []
    hits = []
    for request in trace.requests:
        hit = 0
        while hit < len(request.hash_ids) and request.hash_ids[hit] in held:
            hit += 1
        hits.append(hit)
        rest = [block for block in held if block not in request.hash_ids]
        held = (list(request.hash_ids) + rest)[:capacity]
    return hits


@given(prompts_strategy, st.integers(5, 20), st.integers(0, 3))
def test_the_manager_under_lru(prompts, capacity, chunk_blocks):
    trace = trace_of(prompts)
    hits = count_hits(CPUOffloadingManager(capacity, "lru"), trace.keys, chunk_blocks=chunk_blocks)
    assert hits.tolist() == naive_lru(trace, capacity)


@given(prompts_strategy)
def test_the_stack_knows_every_size_at_once(prompts):
    trace = trace_of(prompts)
    requests = [request.hash_ids for request in trace.requests]
    runs = lru_runs(requests)
    curve = lru_curve(runs, trace.num_unique_blocks)
    assert len(curve) == trace.num_unique_blocks + 1
    for capacity in range(5, trace.num_unique_blocks + 1):
        assert curve[capacity] == sum(naive_lru(trace, capacity))
    seen: set[int] = set()
    known = []
    for ids in requests:
        known.append(sum(1 for block in ids if block in seen))
        seen.update(ids)
    assert known_blocks(runs, len(requests)).tolist() == known == best_possible_hits(requests).tolist()
    assert curve[-1] == sum(known)


def exhaustive_optimum(trace, capacity):
    """The most hits over every possible choice of what to keep after each request."""
    best = {frozenset(): 0}
    for request in trace.requests:
        following: dict[frozenset, int] = {}
        for held, hits in best.items():
            gained = len(list(itertools.takewhile(held.__contains__, request.hash_ids)))
            candidates = held | set(request.hash_ids)
            for size in range(min(capacity, len(candidates)) + 1):
                for kept in itertools.combinations(sorted(candidates), size):
                    key = frozenset(kept)
                    following[key] = max(following.get(key, 0), hits + gained)
        best = following
    return max(best.values())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6), st.integers(1, 3)
)
def test_nothing_beats_the_optimum_and_something_reaches_it(prompts, capacity):
    trace = trace_of(prompts)
    runs = lru_runs([request.hash_ids for request in trace.requests])
    assert optimal_hits(runs, len(trace.requests), capacity).sum() == exhaustive_optimum(trace, capacity)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("kind", ["chat", "tools", "rag"])
def test_every_policy_stays_below_the_optimum(kind, policy):
    trace = generate(kind, 300, seed=3)
    runs = lru_runs([request.hash_ids for request in trace.requests])
    for share in (0.05, 0.2):
        capacity = int(trace.num_unique_blocks * share)
        most = optimal_hits(runs, len(trace.requests), capacity).sum()
        hits = count_hits(CPUOffloadingManager(capacity, policy), trace.keys).sum()
        assert 0 < hits <= most <= known_blocks(runs, len(trace.requests)).sum()


def test_progress_is_told_of_every_request():
    trace = generate("chat", 1203)
    told: list[int] = []
    count_hits(CPUOffloadingManager(100, "lru"), trace.keys, on_progress=told.append)
    assert sum(told) == 1203
    told.clear()
    lru_runs([request.hash_ids for request in trace.requests], told.append)
    assert sum(told) == 1203


def test_an_empty_prompt_is_no_trouble():
    trace = trace_of([(1, 2), (), (1, 2)])
    assert count_hits(CPUOffloadingManager(5, "lru"), trace.keys).tolist() == [0, 0, 2]
    runs = lru_runs([request.hash_ids for request in trace.requests])
    assert optimal_hits(runs, 3, 5).tolist() == [0, 0, 2]
    assert math.isclose(np.sum(lru_curve(runs, 2)), 3)
