"""How large a cache should be: hit ratio by size from one pass over a trace and a sample, and what it is worth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvtier.errors import ConfigurationError
from kvtier.policy import POLICIES
from kvtier.sim.sampling import FloatArray, number_blocks, sample_blocks, standard_error
from kvtier.sim.stack import IntArray, known_blocks, lru_curve, lru_runs
from kvtier.sim.traces import Trace

EXACT = "lru"
"""The policy whose hits are known without sampling."""
DEFAULT_SHARES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 1.0)
"""Sizes that are looked at, as shares of the trace's distinct blocks."""
ENOUGH_SHARE = 0.98
"""A cache is large enough when it finds this share of what an endless one finds."""
_CURVE_POINTS = 160
_MIN_SAMPLED_BLOCKS = 400
GIB = 2**30


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What to plan for. `capacities` in blocks, ascending; rates as in `kvtier.sim.serving`."""

    policies: Sequence[str]
    capacities: Sequence[int]
    block_bytes: int
    prefill_tokens_per_s: float
    sample_rate: float = 0.04
    seed: int = 0
    max_ram_bytes: float = math.inf
    disk_bytes_per_s: float = 3e9


@dataclass(frozen=True, slots=True)
class Point:
    """One cache size. `error` is twice the standard error of the hit ratio from sampling; 0: exact."""

    capacity_blocks: int
    capacity_bytes: int
    hit_ratio: float
    error: float
    saved_s: float
    """Prefill seconds saved over the whole trace."""
    saved_s_per_further_gib: float
    """What each GiB from here to the next size adds; 0 at the last."""


@dataclass(frozen=True)
class Curve:
    """Hit ratio of one policy by size: the sizes that were looked at, and a fine curve through them."""

    policy: str
    points: list[Point]
    fine_blocks: IntArray
    fine_hit_ratio: FloatArray
    knee_blocks: int


@dataclass(frozen=True, slots=True)
class DiskPoint:
    """A disk tier of this size behind the recommended RAM."""

    capacity_bytes: int
    hit_ratio: float
    """Of the blocks found on disk, beside those in RAM."""
    saved_s: float
    """Prefill seconds saved, less the time that reading takes."""


@dataclass(frozen=True)
class Plan:
    """All curves, and what to configure. Sizes in bytes."""

    curves: list[Curve]
    best_hit_ratio: float
    """Of an endless cache."""
    recommended_policy: str
    recommended_bytes: int
    enough_bytes: int
    """From here on more finds next to nothing more."""
    disk: list[DiskPoint]
    load_s_per_block: float
    prefill_s_per_block: float


def make_plan(
    trace: Trace, settings: PlanSettings, on_progress: Callable[[int], object] = lambda num_requests: None
) -> Plan:
    """The plan for a trace. `on_progress` is told of every request, once for the trace and once for every sampled size.

    Raises ConfigurationError for unknown policies. O(blocks + sampled blocks x sizes x policies).
    """
    for name in settings.policies:
        if name not in POLICIES:
            raise ConfigurationError(f"--policy {name!r} is unknown; allowed: {', '.join(sorted(POLICIES))}")
    if not 0 < settings.sample_rate <= 1:
        raise ConfigurationError(f"--sample-rate is {settings.sample_rate:g}; allowed: more than 0, at most 1")
    requests = [request.hash_ids for request in trace.requests]
    runs = lru_runs(requests, on_progress)
    known = known_blocks(runs, len(requests))
    lru = lru_curve(runs, trace.num_unique_blocks)
    found = _Found(trace, settings, lru, known)
    curves = [found.curve(policy, on_progress) for policy in settings.policies]
    return _recommend(trace, settings, curves, float(known.sum()) / trace.num_blocks)


def num_steps(trace: Trace, settings: PlanSettings) -> int:
    """How many requests `make_plan` will tell `on_progress` of."""
    num_sampled = sum(policy != EXACT for policy in settings.policies)
    return len(trace.requests) * (1 + num_sampled * len(settings.capacities))


class _Found:
    """What the pass over the trace has found, and the sample that is made when it is first needed."""

    def __init__(self, trace: Trace, settings: PlanSettings, lru: IntArray, known: IntArray) -> None:
        self._trace = trace
        self._settings = settings
        self._lru = lru
        self._known = known
        # a partial last block has fewer tokens than a block: what an endless cache saves says how many, on average
        lengths = np.array([request.input_length for request in trace.requests], dtype=np.int64)
        known_tokens = np.minimum(known * trace.block_tokens, lengths).sum()
        self._saved_s_per_hit = float(known_tokens) / max(1, int(known.sum())) / settings.prefill_tokens_per_s

    def curve(self, policy: str, on_progress: Callable[[int], object]) -> Curve:
        settings, num_blocks = self._settings, self._trace.num_blocks
        capacities = [min(capacity, self._trace.num_unique_blocks) for capacity in settings.capacities]
        if policy == EXACT:
            differences, errors = [0.0] * len(capacities), [0.0] * len(capacities)
        else:
            differences, errors = self._differences(policy, capacities, on_progress)
        hits = [float(self._lru[c]) + difference for c, difference in zip(capacities, differences, strict=True)]
        points = []
        for i, capacity in enumerate(settings.capacities):
            further = 0.0
            if i + 1 < len(hits) and settings.capacities[i + 1] > capacity:
                gib = (settings.capacities[i + 1] - capacity) * settings.block_bytes / GIB
                further = (hits[i + 1] - hits[i]) * self._saved_s_per_hit / gib
            points.append(
                Point(
                    capacity,
                    capacity * settings.block_bytes,
                    hits[i] / num_blocks,
                    errors[i] / num_blocks,
                    hits[i] * self._saved_s_per_hit,
                    further,
                )
            )
        fine, ratio = self._fine_curve(capacities, differences)
        return Curve(policy, points, fine, ratio, _knee(fine, ratio))

    def _differences(
        self, policy: str, capacities: Sequence[int], on_progress: Callable[[int], object]
    ) -> tuple[list[float], list[float]]:
        """Hits more than LRU's at each size, and twice the standard error of that."""
        trace, settings = self._trace, self._settings
        requests = [request.hash_ids for request in trace.requests]
        lengths = np.array([len(ids) for ids in requests], dtype=np.int64)
        numbers = number_blocks(requests, trace.num_blocks)
        rate = min(1.0, max(settings.sample_rate, _MIN_SAMPLED_BLOCKS / trace.num_unique_blocks))
        sample = sample_blocks(numbers, lengths, self._known, rate=rate, seed=settings.seed)
        total = float(sample.weights.sum())
        coverage = float(self._known.sum()) / total if total else 0.0
        differences, errors = [], []
        for capacity in capacities:
            small = sample.capacity_of(capacity)
            difference = (sample.policy_hits(policy, small) - sample.lru_hits(small)) * coverage
            differences.append(float(difference.sum()))
            errors.append(2 * standard_error(sample, difference))
            on_progress(len(requests))
        return differences, errors

    def _fine_curve(self, capacities: Sequence[int], differences: Sequence[float]) -> tuple[IntArray, FloatArray]:
        """LRU's exact curve plus the differences, which change slowly with the logarithm of the size."""
        unique = self._trace.num_unique_blocks
        sizes = np.unique(np.geomspace(max(1, unique // 1000), unique, _CURVE_POINTS).astype(np.int64))
        sizes = np.union1d(sizes, np.array(capacities, dtype=np.int64))
        at = np.log(np.array([1, *capacities, unique], dtype=np.float64))
        values = np.array([0.0, *differences, 0.0 if capacities[-1] < unique else differences[-1]])
        order = np.argsort(at, kind="stable")
        more = np.interp(np.log(sizes), at[order], values[order])
        ratio: FloatArray = (self._lru[sizes] + more) / self._trace.num_blocks
        return sizes, ratio


def _knee(sizes: IntArray, ratio: FloatArray) -> int:
    """The size from which on more brings less: the point furthest above the line from nothing to enough.

    Satopaa et al., "Finding a Kneedle in a Haystack", 2011, on the rising hull of the curve.
    """
    rising = np.maximum.accumulate(ratio)
    if rising[-1] <= 0:
        return int(sizes[0])
    end = int(np.argmax(rising >= ENOUGH_SHARE * rising[-1]))
    above = rising[: end + 1] / rising[end] - sizes[: end + 1] / sizes[end]
    return int(sizes[int(np.argmax(above))])


def _recommend(trace: Trace, settings: PlanSettings, curves: list[Curve], best: float) -> Plan:
    limit_blocks = settings.max_ram_bytes // settings.block_bytes

    def ratio_at(curve: Curve, blocks: float) -> float:
        return float(np.interp(blocks, curve.fine_blocks, np.maximum.accumulate(curve.fine_hit_ratio)))

    size = min(max(curve.knee_blocks for curve in curves), limit_blocks)
    chosen = max(curves, key=lambda curve: ratio_at(curve, size))
    ram_blocks = int(max(1, min(chosen.knee_blocks, limit_blocks)))
    rising = np.maximum.accumulate(chosen.fine_hit_ratio)
    enough = int(chosen.fine_blocks[int(np.argmax(rising >= ENOUGH_SHARE * rising[-1]))])
    load_s = settings.block_bytes / settings.disk_bytes_per_s
    prefill_s = trace.block_tokens / settings.prefill_tokens_per_s
    disk: list[DiskPoint] = []
    for factor in (1, 2, 4, 8, 16):
        disk_blocks = min(factor * ram_blocks, enough - ram_blocks)
        if disk_blocks <= 0 or (disk and disk_blocks * settings.block_bytes <= disk[-1].capacity_bytes):
            break
        more = ratio_at(chosen, ram_blocks + disk_blocks) - ratio_at(chosen, ram_blocks)
        saved_s = more * trace.num_blocks * (prefill_s - load_s)
        disk.append(DiskPoint(disk_blocks * settings.block_bytes, more, saved_s))
    return Plan(
        curves=curves,
        best_hit_ratio=best,
        recommended_policy=chosen.policy,
        recommended_bytes=ram_blocks * settings.block_bytes,
        enough_bytes=enough * settings.block_bytes,
        disk=disk,
        load_s_per_block=load_s,
        prefill_s_per_block=prefill_s,
    )


def ram_setting(num_bytes: int) -> str:
    """The size as kvtier's configuration takes it, rounded up to whole GiB (below one: MiB)."""
    if num_bytes >= GIB:
        return f"{math.ceil(num_bytes / GIB)}GiB"
    return f"{max(1, math.ceil(num_bytes / 2**20))}MiB"


def connector_settings(plan: Plan) -> dict[str, Any]:
    """What goes into `kv_connector_extra_config`."""
    return {"ram": ram_setting(plan.recommended_bytes), "policy": plan.recommended_policy}


def plan_as_json(settings: PlanSettings, plan: Plan) -> dict[str, Any]:
    """Everything but the fine curves, for `--json`."""
    return {
        "block_bytes": settings.block_bytes,
        "prefill_tokens_per_s": settings.prefill_tokens_per_s,
        "sample_rate": settings.sample_rate,
        "best_hit_ratio": plan.best_hit_ratio,
        "curves": [
            {
                "policy": curve.policy,
                "knee_bytes": curve.knee_blocks * settings.block_bytes,
                "points": [asdict(point) for point in curve.points],
            }
            for curve in plan.curves
        ],
        "recommended": {
            "ram_bytes": plan.recommended_bytes,
            "enough_bytes": plan.enough_bytes,
            "disk": [asdict(point) for point in plan.disk],
            "kv_connector_extra_config": connector_settings(plan),
        },
    }
