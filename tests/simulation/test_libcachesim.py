"""Our policies beside those of libcachesim, the simulator of the caching literature, on one stream of single keys.

Driven as its caches are: one key at a time, no requests, nothing protected.
"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from test_shared_traces import load

from kvtier.policy import make_policy
from kvtier.sim.optimum import optimal_stream_hits

libcachesim = pytest.importorskip("libcachesim")

TOLERANCE = 0.002
THEIRS = {
    "arc": libcachesim.ARC,
    "lru": libcachesim.LRU,
    "min": libcachesim.Belady,
    "s3fifo": libcachesim.S3FIFO,
}


def our_ratio(name, stream, capacity):
    if name == "min":
        return optimal_stream_hits(stream, capacity) / len(stream)
    policy = make_policy(name, capacity)
    hits = 0
    for key in stream:
        if key in policy:
            policy.touch([key])
            hits += 1
            continue
        if len(policy) == capacity:
            assert len(policy.evict(1)) == 1
        policy.insert([key])
    return hits / len(stream)


def their_ratio(name, stream, capacity):
    number = {key: i for i, key in enumerate(dict.fromkeys(stream), start=1)}
    never = 2**63 - 1
    latest, next_use = {}, [never] * len(stream)
    for position in range(len(stream) - 1, -1, -1):
        next_use[position] = latest.get(stream[position], never)
        latest[stream[position]] = position
    cache = THEIRS[name](capacity, hashpower=18)
    request = libcachesim.Request()
    request.obj_size = 1
    request.op = libcachesim.ReqOp.OP_GET
    request.valid = True
    hits = 0
    for key, use in zip(stream, next_use, strict=True):
        request.obj_id = number[key]
        request.next_access_vtime = use
        hits += cache.get(request)
    return hits / len(stream)


@pytest.fixture(scope="module")
def made_up():
    """Popular keys whose popularity drifts, loops, and keys that never return."""
    draw = random.Random(11)
    stream = []
    for position in range(60_000):
        kind = draw.random()
        if kind < 0.6:
            key = f"popular {int(draw.paretovariate(0.7)) + position // 5_000 * 40}"
        elif kind < 0.8:
            key = f"loop {position % 700}"
        else:
            key = f"new {position}"
        stream.append(key.encode())
    return stream


@pytest.mark.parametrize("capacity", [7, 100, 1_000])
def test_same_hits_on_a_made_up_stream(made_up, capacity):
    names = sorted(THEIRS)
    if capacity < 10:
        names.remove("s3fifo")  # theirs has a small queue of no place then, and lets nothing in
    ours = {name: our_ratio(name, made_up, capacity) for name in names}
    theirs = {name: their_ratio(name, made_up, capacity) for name in names}
    assert ours == pytest.approx(theirs, abs=TOLERANCE)
    if capacity in (100, 1_000):  # and there is something to be told apart
        ratios = sorted(ours.values())
        assert min(high - low for low, high in pairwise(ratios)) > TOLERANCE, ours


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.01, 0.02, 0.05, 0.1, 0.2])
@pytest.mark.parametrize("name", sorted(THEIRS))
def test_same_hits_on_the_conversation_trace(name, share):
    trace = load("conversation_trace.jsonl")
    stream = [key for request in trace.keys for key in request]
    capacity = int(trace.num_unique_blocks * share)
    assert our_ratio(name, stream, capacity) == pytest.approx(their_ratio(name, stream, capacity), abs=TOLERANCE)
