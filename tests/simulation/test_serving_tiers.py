"""The engine in simulated time with a tier below RAM: it helps where it is quick, and never harms where it is slow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvtier import CPUOffloadingManager, RequestDriver, TieredOffloadingManager, TieringLimits, make_offload_key
from kvtier.interfaces import Residency
from kvtier.sim.clock import SimulatedClock
from kvtier.sim.replay import ReplaySettings, default_prefill_rate, replay
from kvtier.sim.serving import Serving, ServingModel
from kvtier.sim.tier import CompressionModel, SimulatedTier, TierModel
from kvtier.sim.traces import Trace, TraceRequest
from kvtier.sim.transport import LinkSpeed
from kvtier.sim.workload import generate

RATE = 1000.0
BLOCK_BYTES = 1000
RAM = LinkSpeed(0.001, 1e6)
BYTES_PER_TOKEN = 131_072


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


def disk(bytes_per_s: float, capacity_blocks: int = 1000, latency_s: float = 0.0) -> TierModel:
    return TierModel("DISK", capacity_blocks, LinkSpeed(latency_s, bytes_per_s), LinkSpeed(latency_s, bytes_per_s))


def test_what_ram_has_lost_comes_back_from_the_disk_in_the_time_that_it_takes():
    # 10 blocks in RAM: the second prompt pushes the first out; a block computes in .1 s and is read in .01 s
    trace = trace_of((0, range(10)), (20, range(20, 30)), (40, [*range(4), 90, 91]))
    model = ServingModel(RATE, BLOCK_BYTES, RAM, RAM, lower_tiers=(disk(100_000.0),))
    ram = CPUOffloadingManager(10)
    result = Serving(trace, model, ram).run()
    assert result.loaded_blocks.tolist() == [0, 0, 4]
    assert result.promoted_blocks["DISK"].tolist() == [0, 0, 4]
    read_s, load_s, compute_s = 4 * 0.01, 0.001 + 4 * 0.001, 0.2
    assert result.ttft_s[2] == pytest.approx(read_s + load_s + compute_s, abs=0.003)  # and a step or two
    assert result.tier_stats[0].counters["stored_blocks"] == 22
    stats = ram.get_stats()
    assert (stats.pinned_blocks, stats.in_flight_blocks) == (0, 0)


def test_hits_are_told_apart_by_tier():
    trace = trace_of((0, range(10)), (20, range(20, 30)), (40, [*range(4), 90, 91]), (60, [*range(4), 90, 91]))
    model = ServingModel(RATE, BLOCK_BYTES, RAM, RAM, lower_tiers=(disk(100_000.0),))
    _, cell = replay(trace, ReplaySettings(["lru"], [10], model))
    assert cell.tiers["ram"]["block_hit_ratio"] == pytest.approx(6 / 32)
    assert cell.tiers["disk"]["block_hit_ratio"] == pytest.approx(4 / 32)
    assert cell.block_hit_ratio == pytest.approx(10 / 32)
    assert cell.tiers["disk"]["loaded_bytes"] == 4 * BLOCK_BYTES


@pytest.mark.parametrize("bytes_per_s", [50e6, 200e6, 1e9, 5e9])
@pytest.mark.parametrize(("kind", "times_quicker"), [("chat", 10.0), ("chat", 1.0), ("mixed", 3.0), ("rag", 1.0)])
def test_a_tier_of_any_speed_never_makes_the_first_token_later(kind, times_quicker, bytes_per_s):
    """Blocks of 64 MiB, hardly any RAM, and an engine that recomputes from 1 to 13 GB of them a second."""
    trace = generate(kind, 300, requests_per_s=3)
    rate = default_prefill_rate(trace) * times_quicker
    block_bytes = BYTES_PER_TOKEN * trace.block_tokens
    model = ServingModel(rate, block_bytes, LinkSpeed(1e-4, 20e9), LinkSpeed(1e-4, 20e9))
    without = Serving(trace, model, None).run()
    with_disk = replace(model, lower_tiers=(disk(bytes_per_s, trace.num_unique_blocks, 1e-3),))
    ram = CPUOffloadingManager(40)
    result = Serving(trace, with_disk, ram).run()
    assert result.ttft_s.mean() <= 1.02 * without.ttft_s.mean()
    assert np.median(result.ttft_s) <= 1.02 * np.median(without.ttft_s)
    stats = ram.get_stats()
    assert (stats.pinned_blocks, stats.in_flight_blocks, stats.condemned_blocks) == (0, 0, 0)


def test_a_quick_disk_makes_the_first_token_much_sooner():
    trace = generate("chat", 300, requests_per_s=3)
    block_bytes = BYTES_PER_TOKEN * trace.block_tokens
    model = ServingModel(default_prefill_rate(trace), block_bytes, LinkSpeed(1e-4, 20e9), LinkSpeed(1e-4, 20e9))
    without = Serving(trace, model, CPUOffloadingManager(40)).run()
    with_disk = replace(model, lower_tiers=(disk(5e9, trace.num_unique_blocks),))
    result = Serving(trace, with_disk, CPUOffloadingManager(40)).run()
    assert result.promoted_blocks["DISK"].sum() > 200
    assert result.ttft_s.mean() < 0.6 * without.ttft_s.mean()


@pytest.mark.parametrize("bytes_per_s", [1e3, 1e5, 1e9])
def test_waiting_requests_leave_the_reserved_room_to_running_ones(bytes_per_s):
    """Thirty waiting requests want 20 blocks each of a RAM of 100; half of it is not theirs."""
    clock = SimulatedClock()
    ram = CPUOffloadingManager(100)
    tier = SimulatedTier(clock, disk(bytes_per_s), BLOCK_BYTES, lambda: None)
    manager = TieredOffloadingManager(ram, [tier], limits=TieringLimits(promoting_share=0.5, cascading_share=0.1))
    driver = RequestDriver(manager)

    def key(name: str):
        return make_offload_key(name.encode().ljust(32, b"."), 0)

    def step(seconds: float = 0.001) -> None:
        manager.on_schedule_end()
        clock.run_until(clock.now_s + seconds)
        driver.advance(clock.now_s)

    step()
    cold = [[key(f"{name}-{depth}") for depth in range(20)] for name in range(30)]
    for number, keys in enumerate(cold):
        tier.submit_store(1000 + number, keys, range(20))
        clock.run_until(clock.now_s + 20 * BLOCK_BYTES / bytes_per_s + 1)
    tier.poll()
    assert all(found is Residency.READY for keys in cold for found in tier.lookup(keys))
    step()
    waiting = []
    most_promoting = 0
    for number, keys in enumerate(cold):
        driver.add_request(f"waiting-{number}", keys)
        waiting.append(f"waiting-{number}")
    for number in range(200):
        for name in list(waiting):
            found = driver.match(name)
            if found is not None:
                waiting.remove(name)
                driver.finish(name)
        # a running request of 5 blocks, whose store takes a step; ten of them are open at once at most
        name = f"running-{number}"
        driver.add_request(name, [key(f"{name}-{depth}") for depth in range(5)])
        plan = driver.plan_store(name, 5)
        assert plan is not None
        assert len(plan.blocks) == 5, "a running request's store was cut short"
        step()
        most_promoting = max(most_promoting, manager.num_promoting)
        driver.report(plan.job_id)
        driver.finish(name)
        manager.check_invariants()
    assert manager.get_stats().counters.get("shed_blocks", 0) == 0
    assert most_promoting <= 50
    assert most_promoting or manager.get_stats().counters["promoted_blocks"]


# -- a slow link -------------------------------------------------------------------------------------------------

GIGABIT, FAST = 0.125e9, 5e9
"""Bytes per second."""


def over_a_link(bytes_per_s: float, compression: CompressionModel | None) -> tuple[float, dict[str, int]]:
    """Median seconds to first token of sessions whose blocks, 64 MiB each, are behind a link of 100 us; and counters.

    A block computes in the time of one and a half over a gigabit link: worth loading, and worth shrinking.
    """
    prompts = [range(5 * number, 5 * number + 5) for number in range(20)]
    rounds = [(40.0 * turn, ids) for turn, ids in enumerate([*prompts, *prompts, *prompts])]
    block_bytes = 64 << 20
    rate = 100 / (1.5 * block_bytes / GIGABIT)
    tier = replace(disk(bytes_per_s, latency_s=100e-6), compression=compression)
    model = ServingModel(rate, block_bytes, LinkSpeed(1e-4, 20e9), LinkSpeed(1e-4, 20e9), lower_tiers=(tier,))
    result = Serving(trace_of(*rounds), model, CPUOffloadingManager(10)).run()
    return float(np.median(result.ttft_s)), dict(result.tier_stats[0].counters)


def test_compression_begins_by_itself_on_a_slow_link_and_brings_the_first_token_forward():
    off_s, _ = over_a_link(GIGABIT, None)
    auto_s, counters = over_a_link(GIGABIT, CompressionModel("auto"))
    on_s, _ = over_a_link(GIGABIT, CompressionModel("on"))
    assert counters["compression_on"] == 1
    assert counters["compression_changes"] == 1
    assert auto_s < 0.85 * off_s
    assert auto_s == pytest.approx(on_s, rel=0.05)


def test_compression_stays_off_on_a_fast_link():
    off_s, _ = over_a_link(FAST, None)
    auto_s, counters = over_a_link(FAST, CompressionModel("auto"))
    on_s, _ = over_a_link(FAST, CompressionModel("on"))
    assert (counters["compression_on"], counters["compression_changes"]) == (0, 0)
    assert auto_s == pytest.approx(off_s, rel=0.02)
    assert on_s > 1.1 * off_s


def test_what_a_compressed_block_costs():
    """Half the bytes, and the time that making them of it, and it of them, takes."""
    clock = SimulatedClock()
    tier_model = replace(disk(1000.0), compression=CompressionModel("on", 2.0, 10_000.0, 4000.0))
    tier = SimulatedTier(clock, tier_model, BLOCK_BYTES, lambda: None)
    key = make_offload_key(b"k" * 32, 0)
    tier.submit_store(1, [key], [0])
    clock.run_until(10.0)
    (stored,) = tier.poll()
    assert stored.duration_s == pytest.approx(0.5 + 0.1)
    tier.submit_load(2, [key], [0])
    clock.run_until(20.0)
    (loaded,) = tier.poll()
    assert loaded.duration_s == pytest.approx(0.5 + 0.25)
    assert loaded.num_bytes == BLOCK_BYTES
