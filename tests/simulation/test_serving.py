"""The engine in simulated time, against arithmetic: who waits for what, and for how long."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvtier.manager import CPUOffloadingManager
from kvtier.sim.serving import Serving, ServingModel, serve_with_hits
from kvtier.sim.traces import Trace, TraceRequest
from kvtier.sim.transport import LinkSpeed
from kvtier.sim.workload import generate

RATE = 1000.0
BLOCK_BYTES = 1000
LOAD = LinkSpeed(0.01, 100_000.0)
STORE = LinkSpeed(0.02, 50_000.0)


def model(**changes):
    fields = {
        "prefill_tokens_per_s": RATE,
        "block_bytes": BLOCK_BYTES,
        "load_speed": LOAD,
        "store_speed": STORE,
        "deadline_s": 5.0,
        **changes,
    }
    return ServingModel(**fields)


def trace_of(*requests):
    """(arrival in seconds, ids), full blocks of 100 tokens."""
    return Trace(
        "made up",
        100,
        [
            TraceRequest(timestamp_ms=at_s * 1000, input_length=100 * len(ids), output_length=10, hash_ids=tuple(ids))
            for at_s, ids in requests
        ],
    )


def serve(trace, manager=None, engine_cache=None, **changes):
    return Serving(trace, model(**changes), manager, engine_cache).run()


def test_without_a_tier_prompts_queue_for_the_engine():
    result = serve(trace_of((0, range(10)), (0.5, range(10)), (10, range(10))))
    assert result.ttft_s.tolist() == pytest.approx([1.0, 1.5, 1.0])
    assert result.busy_s == pytest.approx(3.0)
    assert result.makespan_s == pytest.approx(11.0)
    assert result.transfers == []


def test_a_prefix_is_stored_and_then_loaded_instead_of_computed():
    manager = CPUOffloadingManager(100)
    result = serve(trace_of((0, range(10)), (10, [*range(10), 50, 51])), manager)
    store_s = 0.02 + 10 * BLOCK_BYTES / 50_000
    load_s = 0.01 + 10 * BLOCK_BYTES / 100_000
    assert result.ttft_s.tolist() == pytest.approx([1.0, load_s + 0.2])
    assert result.loaded_blocks.tolist() == [0, 10]
    # the first store is over store_s after its prefill; the second one moves the two new blocks
    assert [(is_store, num_bytes) for _, is_store, num_bytes in result.transfers] == [
        (True, 10_000),
        (False, 10_000),
        (True, 2_000),
    ]
    assert result.transfers[0][0] == pytest.approx(1.0 + store_s)
    manager.check_invariants()
    assert manager.get_stats().pinned_blocks == 0


def test_a_request_whose_prefix_is_on_its_way_waits_for_it():
    # the second comes while the first one's blocks are being written, which takes until 1.22
    result = serve(trace_of((0, range(10)), (1.1, range(10))), CPUOffloadingManager(100))
    load_s = 0.01 + 10 * BLOCK_BYTES / 100_000
    assert result.num_deferred == 1
    assert result.loaded_blocks.tolist() == [0, 10]
    # an engine computes at least the last token itself
    assert result.ttft_s[1] == pytest.approx(0.12 + load_s + 1 / RATE)


def test_nobody_waits_past_the_deadline():
    slow = LinkSpeed(100.0, math.inf)
    result = serve(
        trace_of((0, range(10)), (1.1, range(10))),
        CPUOffloadingManager(100, deadline_s=2.0),
        store_speed=slow,
        deadline_s=2.0,
    )
    assert result.loaded_blocks.tolist() == [0, 0]
    assert result.ttft_s[1] == pytest.approx(2.0 + 1.0)


def test_a_load_that_cannot_begin_in_time_is_computed():
    # one transfer at a time: the load waits behind a store that takes for ever
    slow = LinkSpeed(60.0, math.inf)
    trace = trace_of((0, range(10)), (70, range(20, 30)), (71.5, range(10)))
    result = serve(trace, CPUOffloadingManager(100, deadline_s=2.0), store_speed=slow, deadline_s=2.0)
    assert result.num_failed_loads == 1
    assert result.loaded_blocks.tolist() == [0, 0, 0]
    assert result.ttft_s[2] == pytest.approx(2.0 + 1.0)


def test_the_engines_own_cache_comes_first():
    trace = trace_of((0, range(10)), (10, range(10)), (20, range(12)))
    result = serve(trace, CPUOffloadingManager(100), CPUOffloadingManager(4))
    assert result.engine_blocks.tolist() == [0, 4, 4]
    assert result.loaded_blocks.tolist() == [0, 6, 6]
    assert [num_bytes for _, is_store, num_bytes in result.transfers if not is_store] == [6000, 6000]


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("kind", ["chat", "tools"])
def test_made_up_traffic_is_served_whole_and_the_same_every_time(kind, policy):
    trace = generate(kind, 300, requests_per_s=3)
    speeds = {"prefill_tokens_per_s": 20_000.0, "load_speed": LinkSpeed(1e-4, 1e6), "store_speed": LinkSpeed(1e-4, 1e6)}
    runs = []
    for _ in range(2):
        manager = CPUOffloadingManager(trace.num_unique_blocks // 10, policy)
        runs.append(serve(trace, manager, **speeds))
        manager.check_invariants()
        stats = manager.get_stats()
        assert (stats.in_flight_blocks, stats.pinned_blocks, stats.condemned_blocks) == (0, 0, 0)
    first, again = runs
    assert np.isfinite(first.ttft_s).all()
    assert (first.ttft_s > 0).all()
    assert first.ttft_s.tolist() == again.ttft_s.tolist()
    assert first.transfers == again.transfers
    assert first.moved_bytes(stores=False) == first.loaded_blocks.sum() * BLOCK_BYTES > 0
    without = serve(trace, **speeds)
    assert first.ttft_s.sum() < without.ttft_s.sum()


def test_known_hits_take_their_time_too():
    trace = trace_of((0, range(10)), (10, range(10)))
    result = serve_with_hits(trace, model(), np.array([0, 10]))
    load_s = 0.01 + 10 * BLOCK_BYTES / 100_000
    assert result.ttft_s.tolist() == pytest.approx([1.0, load_s + 1 / RATE])
    assert result.moved_bytes(stores=False) == 10_000
