"""Replays a trace through the production manager, for several policies and sizes, and sums up what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigurationError
from kvtier.manager import CPUOffloadingManager
from kvtier.policy import POLICIES
from kvtier.sim.hits import HitArray, count_hits
from kvtier.sim.optimum import optimal_hits
from kvtier.sim.serving import Serving, ServingModel, ServingResult, serve_with_hits
from kvtier.sim.stack import lru_runs
from kvtier.sim.traces import Trace

OPTIMUM = "min"
"""Name of the offline optimum among the policies."""
NO_TIER = "none"
"""Name of the run without a tier: every prompt is computed whole, but for what the engine itself still has."""
TARGET_BUSY_SHARE = 0.8
"""The prefill rate, unless it is given, keeps the engine so busy without any cache."""
NUM_BINS = 48


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """What to replay. `capacities` in blocks."""

    policies: Sequence[str]
    capacities: Sequence[int]
    model: ServingModel
    timed: bool = True
    chunk_blocks: int = 0
    """Untimed: a request's stores are offered so many blocks at a time; 0: all at once."""
    engine_blocks: int = 0
    """Timed: blocks of the engine's own prefix cache (LRU) in front of the tier."""
    store_threshold: int = 0


@dataclass(slots=True)
class Cell:
    """One policy at one size. Times in seconds; None where the run has no such figure."""

    policy: str
    capacity_blocks: int
    capacity_bytes: int
    block_hit_ratio: float
    token_hit_ratio: float
    tiers: dict[str, dict[str, float]]
    """Tier -> its block and token hit ratio and the bytes loaded from and stored to it."""
    gpu_saved_s: float
    deferred_requests: int | None = None
    failed_loads: int | None = None
    ttft_p50_s: float | None = None
    ttft_p90_s: float | None = None
    ttft_p99_s: float | None = None
    busy_share: float | None = None
    replay_s: float = 0.0
    """How long the replay itself took, wall time."""
    series: dict[str, list[float]] = field(default_factory=dict)
    """For plots: see `kvtier.sim.replay.SERIES`."""


SERIES = {
    "hours": "middle of each bin of the time of arrival, hours",
    "hit_ratio": "block hit ratio of the requests that arrived in each bin",
    "ttft_s": "the time to first token at each hundredth of the requests, from 0 to 100",
    "loaded_bytes": "bytes loaded in each bin",
    "stored_bytes": "bytes stored in each bin",
}


def check_policies(names: Sequence[str]) -> None:
    """Raises ConfigurationError for a name that is neither a policy nor the optimum, or that is given twice."""
    allowed = (*sorted(POLICIES), OPTIMUM)
    for name in names:
        if name not in allowed:
            raise ConfigurationError(f"--policy {name!r} is unknown; allowed: {', '.join(allowed)}")
        if list(names).count(name) > 1:
            raise ConfigurationError(f"--policy names {name!r} twice")


def default_prefill_rate(trace: Trace) -> float:
    """Tokens a second at which the trace's prompts, all computed, keep an engine busy for TARGET_BUSY_SHARE."""
    return trace.num_tokens / max(trace.duration_s, 1.0) / TARGET_BUSY_SHARE


def replay(
    trace: Trace, settings: ReplaySettings, on_progress: Callable[[int], object] = lambda num_requests: None
) -> Iterator[Cell]:
    """One cell for each policy at each size, and first, where it is timed, the run without a tier.

    `on_progress` is told of every request of every cell. Raises ConfigurationError for unknown policies.
    """
    check_policies(settings.policies)
    if settings.timed:
        began_s = time.perf_counter()
        result = Serving(trace, settings.model, None, _engine_cache(settings)).run(on_progress)
        yield _timed_cell(trace, settings, NO_TIER, 0, result=result, replay_s=time.perf_counter() - began_s)
    for policy in settings.policies:
        for capacity in settings.capacities:
            yield _replay_cell(trace, settings, policy, capacity, on_progress)


def num_steps(trace: Trace, settings: ReplaySettings) -> int:
    """How many requests `replay` will tell `on_progress` of."""
    return len(trace.requests) * (len(settings.policies) * len(settings.capacities) + settings.timed)


def _replay_cell(
    trace: Trace, settings: ReplaySettings, policy: str, capacity: int, on_progress: Callable[[int], object]
) -> Cell:
    began_s = time.perf_counter()
    manager = None
    if policy != OPTIMUM:
        manager = CPUOffloadingManager(
            capacity, policy, store_threshold=settings.store_threshold, deadline_s=settings.model.deadline_s
        )
    if settings.timed:
        # the optimum is one of hits, with nothing ever in flight: only its loads and prefills take time
        if manager is None:
            result = serve_with_hits(trace, settings.model, _optimal_hits(trace, capacity))
            on_progress(len(trace.requests))
        else:
            result = Serving(trace, settings.model, manager, _engine_cache(settings)).run(on_progress)
        return _timed_cell(trace, settings, policy, capacity, result=result, replay_s=time.perf_counter() - began_s)
    if manager is None:
        hits, stored_blocks = _optimal_hits(trace, capacity), 0
        on_progress(len(trace.requests))
    else:
        hits = count_hits(manager, trace.keys, chunk_blocks=settings.chunk_blocks, on_progress=on_progress)
        stored_blocks = manager.get_stats().counters.get("stored_blocks", 0)
    replay_s = time.perf_counter() - began_s
    return _untimed_cell(trace, settings, policy, capacity, hits=hits, stored_blocks=stored_blocks, replay_s=replay_s)


def _engine_cache(settings: ReplaySettings) -> CPUOffloadingManager | None:
    return CPUOffloadingManager(settings.engine_blocks, "lru") if settings.engine_blocks else None


def _optimal_hits(trace: Trace, capacity: int) -> HitArray:
    runs = lru_runs([request.hash_ids for request in trace.requests])
    return optimal_hits(runs, len(trace.requests), capacity)


# -- summing up ----------------------------------------------------------------------------------------------


def hit_tokens(trace: Trace, first: HitArray, blocks: HitArray) -> HitArray:
    """-> (requests,): tokens in `blocks` blocks behind the `first` leading ones, a partial last block as it is."""
    lengths: HitArray = np.array([request.input_length for request in trace.requests], dtype=np.int64)
    tokens: HitArray = np.minimum((first + blocks) * trace.block_tokens, lengths) - np.minimum(
        first * trace.block_tokens, lengths
    )
    return tokens


def _tier(trace: Trace, first: HitArray, blocks: HitArray, loaded: int, stored: int) -> dict[str, float]:
    return {
        "block_hit_ratio": float(blocks.sum()) / max(1, trace.num_blocks),
        "token_hit_ratio": float(hit_tokens(trace, first, blocks).sum()) / max(1, trace.num_tokens),
        "loaded_bytes": loaded,
        "stored_bytes": stored,
    }


def _untimed_cell(
    trace: Trace,
    settings: ReplaySettings,
    policy: str,
    capacity: int,
    *,
    hits: HitArray,
    stored_blocks: int,
    replay_s: float,
) -> Cell:
    block_bytes = settings.model.block_bytes
    ram = _tier(trace, np.zeros_like(hits), hits, int(hits.sum()) * block_bytes, stored_blocks * block_bytes)
    cell = Cell(
        policy=policy,
        capacity_blocks=capacity,
        capacity_bytes=capacity * block_bytes,
        block_hit_ratio=ram["block_hit_ratio"],
        token_hit_ratio=ram["token_hit_ratio"],
        tiers={"ram": ram},
        gpu_saved_s=ram["token_hit_ratio"] * trace.num_tokens / settings.model.prefill_tokens_per_s,
        replay_s=replay_s,
    )
    cell.series.update(_hits_over_time(trace, hits))
    return cell


def _timed_cell(
    trace: Trace, settings: ReplaySettings, policy: str, capacity: int, *, result: ServingResult, replay_s: float
) -> Cell:
    nothing = np.zeros_like(result.engine_blocks)
    tiers: dict[str, dict[str, float]] = {}
    if settings.engine_blocks and policy != OPTIMUM:
        tiers["engine"] = _tier(trace, nothing, result.engine_blocks, 0, 0)
    if policy != NO_TIER:
        moved = result.moved_bytes(stores=False), result.moved_bytes(stores=True)
        # what a lower tier brought up lies behind what RAM had
        from_ram = result.loaded_blocks - sum(result.promoted_blocks.values(), nothing)
        tiers["ram"] = _tier(trace, result.engine_blocks, from_ram, *moved)
        first = result.engine_blocks + from_ram
        for stats in result.tier_stats:
            promoted = result.promoted_blocks[stats.medium]
            loaded, stored = (
                stats.counters.get(name, 0) * settings.model.block_bytes for name in ("loaded_blocks", "stored_blocks")
            )
            tiers[stats.medium.lower()] = _tier(trace, first, promoted, loaded, stored)
            first = first + promoted
    token_hit_ratio = sum(tier["token_hit_ratio"] for tier in tiers.values())
    p50, p90, p99 = (float(value) for value in np.percentile(result.ttft_s, (50, 90, 99)))
    cell = Cell(
        policy=policy,
        capacity_blocks=capacity,
        capacity_bytes=capacity * settings.model.block_bytes,
        block_hit_ratio=sum(tier["block_hit_ratio"] for tier in tiers.values()),
        token_hit_ratio=token_hit_ratio,
        tiers=tiers,
        gpu_saved_s=token_hit_ratio * trace.num_tokens / settings.model.prefill_tokens_per_s,
        deferred_requests=result.num_deferred,
        failed_loads=result.num_failed_loads,
        ttft_p50_s=p50,
        ttft_p90_s=p90,
        ttft_p99_s=p99,
        busy_share=result.busy_s / max(result.makespan_s, 1e-9),
        replay_s=replay_s,
    )
    cell.series.update(_hits_over_time(trace, result.engine_blocks + result.loaded_blocks))
    cell.series["ttft_s"] = np.percentile(result.ttft_s, np.arange(101)).round(6).tolist()
    cell.series.update(_bytes_over_time(trace, result))
    return cell


def _arrivals_s(trace: Trace) -> npt.NDArray[np.float64]:
    times: npt.NDArray[np.float64] = np.array([request.timestamp_ms for request in trace.requests], dtype=np.float64)
    times -= times[0]
    return times / 1000.0


def _hits_over_time(trace: Trace, hits: HitArray) -> dict[str, list[float]]:
    times = _arrivals_s(trace)
    edges = np.linspace(0.0, max(float(times[-1]), 1e-9), NUM_BINS + 1)
    blocks = np.array([len(request.hash_ids) for request in trace.requests], dtype=np.int64)
    in_bin = np.histogram(times, edges, weights=blocks)[0]
    hit_in_bin = np.histogram(times, edges, weights=hits)[0]
    has_requests = in_bin > 0
    middles = (edges[:-1] + edges[1:]) / 2 / 3600
    return {
        "hours": middles[has_requests].round(5).tolist(),
        "hit_ratio": (hit_in_bin[has_requests] / in_bin[has_requests]).round(5).tolist(),
    }


def _bytes_over_time(trace: Trace, result: ServingResult) -> dict[str, list[float]]:
    end_s = max([float(_arrivals_s(trace)[-1]), 1e-9, *(at_s for at_s, _, _ in result.transfers[-1:])])
    edges = np.linspace(0.0, end_s, NUM_BINS + 1)
    series = {"byte_hours": ((edges[:-1] + edges[1:]) / 2 / 3600).round(5).tolist()}
    for name, wanted in (("loaded_bytes", False), ("stored_bytes", True)):
        chosen = [(at_s, num_bytes) for at_s, is_store, num_bytes in result.transfers if is_store is wanted]
        at, num = ([entry[column] for entry in chosen] for column in (0, 1))
        series[name] = np.histogram(at, edges, weights=num)[0].tolist() if chosen else [0.0] * NUM_BINS
    return series


def as_json(trace: Trace, settings: ReplaySettings, cells: Sequence[Cell]) -> dict[str, Any]:
    """Everything but the series, for `--json`."""
    model = settings.model
    return {
        "trace": trace_facts(trace),
        "model": {
            "block_bytes": model.block_bytes,
            "prefill_tokens_per_s": model.prefill_tokens_per_s,
            "ram_bytes_per_s": model.load_speed.bytes_per_s,
            "ram_latency_s": model.load_speed.latency_s,
            "deadline_s": model.deadline_s,
            "engine_blocks": settings.engine_blocks,
            "lower_tiers": [
                {
                    "medium": tier.medium,
                    "capacity_blocks": tier.capacity_blocks,
                    "load_bytes_per_s": tier.load_speed.bytes_per_s,
                    "store_bytes_per_s": tier.store_speed.bytes_per_s,
                    "latency_s": tier.load_speed.latency_s,
                    "policy": tier.policy,
                    "compression": None if tier.compression is None else asdict(tier.compression),
                }
                for tier in model.lower_tiers
            ],
            "timed": settings.timed,
        },
        "cells": [
            {name: getattr(cell, name) for name in Cell.__dataclass_fields__ if name != "series"} for cell in cells
        ],
    }


def trace_facts(trace: Trace) -> dict[str, Any]:
    """What a trace is, in numbers."""
    return {
        "name": trace.name,
        "requests": len(trace.requests),
        "blocks": trace.num_blocks,
        "unique_blocks": trace.num_unique_blocks,
        "block_tokens": trace.block_tokens,
        "input_tokens": trace.num_tokens,
        "duration_s": trace.duration_s,
        "skipped_lines": trace.num_skipped,
    }
