"""The plan's report: one HTML file with plots."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

import numpy as np

from kvtier.sim.page import PLAIN, STYLES, card, facts, page, table
from kvtier.sim.plan import GIB, Curve, Plan, PlanSettings
from kvtier.sim.sizes import format_bytes
from kvtier.sim.svg import Mark, Series, line_chart
from kvtier.sim.traces import Trace


def plan_report(trace: Trace, settings: PlanSettings, plan: Plan, transfer_config: Mapping[str, Any]) -> str:
    """A whole HTML document. `transfer_config`: what vLLM's --kv-transfer-config takes."""
    chosen = next(curve for curve in plan.curves if curve.policy == plan.recommended_policy)
    footprint = trace.num_unique_blocks * settings.block_bytes
    parts = [
        f"<h1>Capacity plan for {escape(trace.name)}</h1>",
        f'<p class="lead">{escape(_lead(settings, plan, chosen))}</p>',
        facts(
            [
                ("requests", f"{len(trace.requests):,}"),
                ("hours of traffic", f"{trace.duration_s / 3600:.2f}"),
                ("distinct blocks", f"{trace.num_unique_blocks:,}"),
                ("bytes of all distinct blocks", format_bytes(footprint)),
                ("best possible hit ratio", f"{plan.best_hit_ratio:.4f}"),
                ("recommended RAM", format_bytes(plan.recommended_bytes)),
            ]
        ),
        f'<div class="charts">{_hit_chart(settings, plan)}{_value_chart(settings, plan)}</div>',
        card(
            "Paste into vLLM",
            "The value of --kv-transfer-config.",
            f"<pre>{escape(json.dumps(transfer_config, indent=1))}</pre>",
        ),
        *(card(f"Sizes with {curve.policy}", _error_note(curve), table(*_rows(trace, curve))) for curve in plan.curves),
    ]
    if plan.disk:
        rows = [
            [format_bytes(point.capacity_bytes), f"{point.hit_ratio:.4f}", f"{point.saved_s:,.0f}"]
            for point in plan.disk
        ]
        headers = ["disk", "more block hits, from disk", "seconds saved, less reading"]
        note = f"With {format_bytes(plan.recommended_bytes)} of RAM in front."
        parts.append(card("A disk tier behind it", note, table(headers, rows)))
    return page(f"kvtier plan: {trace.name}", "".join(parts))


def _lead(settings: PlanSettings, plan: Plan, chosen: Curve) -> str:
    ratio = float(np.interp(plan.recommended_bytes / settings.block_bytes, chosen.fine_blocks, chosen.fine_hit_ratio))
    return (
        f"{format_bytes(plan.recommended_bytes)} of RAM with {plan.recommended_policy} finds {ratio:.1%} of the prompt "
        f"blocks, {ratio / max(plan.best_hit_ratio, 1e-12):.0%} of what an endless cache finds; beyond "
        f"{format_bytes(plan.enough_bytes)} next to nothing more is found."
    )


def _style(number: int) -> str:
    return STYLES[number % len(STYLES)]


def _hit_chart(settings: PlanSettings, plan: Plan) -> str:
    series = []
    for number, curve in enumerate(plan.curves):
        sizes = [int(blocks) * settings.block_bytes / GIB for blocks in curve.fine_blocks]
        looked_at = np.array([min(point.capacity_blocks, int(curve.fine_blocks[-1])) for point in curve.points])
        errors = np.interp(curve.fine_blocks, looked_at, [point.error for point in curve.points])
        series.append(
            Series(
                curve.policy,
                sizes,
                curve.fine_hit_ratio.tolist(),
                _style(number),
                low=np.maximum(curve.fine_hit_ratio - errors, 0).tolist() if errors.any() else (),
                high=(curve.fine_hit_ratio + errors).tolist() if errors.any() else (),
            )
        )
    ends = [series[0].xs[0], series[0].xs[-1]]
    series.append(Series("endless", ends, [plan.best_hit_ratio] * 2, PLAIN, dashed=True))
    chart = line_chart(
        series,
        title="Hit ratio by cache size",
        x_label="cache size, GiB (logarithmic)",
        y_label="block hit ratio",
        x_format="{:,g}".format,
        log_x=True,
        marks=[Mark(plan.recommended_bytes / GIB, f"recommended: {format_bytes(plan.recommended_bytes)}")],
    )
    return card("Hit ratio by size", "The bands are two standard errors of the sampling; LRU is exact.", chart)


def _value_chart(settings: PlanSettings, plan: Plan) -> str:
    series = []
    for number, curve in enumerate(plan.curves):
        points = [point for point in curve.points if point.saved_s_per_further_gib > 0]
        series.append(
            Series(
                curve.policy,
                [point.capacity_bytes / GIB for point in points],
                [point.saved_s_per_further_gib for point in points],
                _style(number),
                dots=True,
            )
        )
    chart = line_chart(
        series,
        title="Prefill seconds saved by each further GiB",
        x_label="cache size, GiB (logarithmic)",
        y_label="prefill seconds saved a further GiB",
        x_format="{:,.3g}".format,
        y_format="{:,.3g}".format,
        log_x=True,
        marks=[Mark(plan.recommended_bytes / GIB, "recommended")],
    )
    return card("What a further GiB is worth", "Prefill seconds that it saves over the trace.", chart)


def _error_note(curve: Curve) -> str:
    if any(point.error for point in curve.points):
        return "The error is twice the standard error of the sampling."
    return "Exact: no sampling."


def _rows(trace: Trace, curve: Curve) -> tuple[list[str], list[list[str]]]:
    headers = ["cache", "share of blocks", "block hits", "±", "prefill seconds saved", "seconds a further GiB"]
    rows = [
        [
            format_bytes(point.capacity_bytes),
            f"{point.capacity_blocks / trace.num_unique_blocks:.1%}",
            f"{point.hit_ratio:.4f}",
            f"{point.error:.4f}",
            f"{point.saved_s:,.0f}",
            f"{point.saved_s_per_further_gib:.3g}" if point.saved_s_per_further_gib else "-",
        ]
        for point in curve.points
    ]
    return headers, rows
