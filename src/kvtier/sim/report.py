"""The replay's report: one HTML file with plots."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from kvtier.sim.hits import best_possible_hits
from kvtier.sim.page import PLAIN, STYLES, card, facts, page, table, tabs
from kvtier.sim.replay import NO_TIER, NUM_BINS, OPTIMUM, Cell, ReplaySettings
from kvtier.sim.sizes import format_bytes
from kvtier.sim.svg import Series, bar_chart, line_chart
from kvtier.sim.traces import Trace

_PREFERRED_SHARE = 0.1
"""The size that is shown first: the one nearest to this share of the distinct blocks."""


def replay_report(trace: Trace, settings: ReplaySettings, cells: Sequence[Cell]) -> str:
    """A whole HTML document. `cells` as `replay` gave them."""
    style_of = _styles(settings)
    parts = [
        f"<h1>Replay of {escape(trace.name)}</h1>",
        f'<p class="lead">{escape(_lead(trace, settings, cells))}</p>',
        facts(_facts(trace, settings)),
        _by_size(trace, settings, cells, style_of),
        _size_tabs(trace, settings, cells, style_of),
        card("All figures", "One row a policy and size.", table(*_rows(trace, settings, cells))),
        f"<footer>{escape(_assumptions(settings))}</footer>",
    ]
    return page(f"kvtier replay: {trace.name}", "".join(parts))


def _styles(settings: ReplaySettings) -> dict[str, str]:
    styles = {NO_TIER: PLAIN, OPTIMUM: PLAIN}
    for policy in settings.policies:
        styles.setdefault(policy, STYLES[(len(styles) - 2) % len(STYLES)])
    return styles


def _real(cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.policy not in (NO_TIER, OPTIMUM)]


def _lead(trace: Trace, settings: ReplaySettings, cells: Sequence[Cell]) -> str:
    real = _real(cells)
    if not real:
        return "The offline optimum alone: what no policy can exceed."
    capacity = settings.capacities[_preferred(trace, settings)]
    best = max((cell for cell in real if cell.capacity_blocks == capacity), key=lambda cell: cell.token_hit_ratio)
    text = (
        f"With {format_bytes(best.capacity_bytes)} of RAM, {best.policy} serves {best.token_hit_ratio:.1%} of the "
        f"prompt tokens from the cache and saves {best.gpu_saved_s:,.0f} GPU seconds of prefill in "
        f"{trace.duration_s / 3600:.1f} hours of traffic."
    )
    without = next((cell for cell in cells if cell.policy == NO_TIER), None)
    if without is not None and without.ttft_p50_s and best.ttft_p50_s is not None and best.ttft_p90_s is not None:
        text += (
            f" The median time to first token is {best.ttft_p50_s:.2f} s instead of {without.ttft_p50_s:.2f} s, "
            f"the 90th percentile {best.ttft_p90_s:.2f} s instead of {without.ttft_p90_s:.2f} s."
        )
    return text


def _facts(trace: Trace, settings: ReplaySettings) -> list[tuple[str, str]]:
    footprint = trace.num_unique_blocks * settings.model.block_bytes
    return [
        ("requests", f"{len(trace.requests):,}"),
        ("hours of traffic", f"{trace.duration_s / 3600:.2f}"),
        ("prompt tokens", f"{trace.num_tokens / 1e6:,.1f} M"),
        (f"blocks of {trace.block_tokens} tokens", f"{trace.num_blocks:,}"),
        ("distinct blocks", f"{trace.num_unique_blocks:,}"),
        ("bytes of all distinct blocks", format_bytes(footprint)),
    ]


def _by_size(trace: Trace, settings: ReplaySettings, cells: Sequence[Cell], style_of: dict[str, str]) -> str:
    series = []
    for policy in settings.policies:
        own = [cell for cell in cells if cell.policy == policy]
        series.append(
            Series(
                policy,
                [cell.capacity_bytes / 2**30 for cell in own],
                [cell.block_hit_ratio for cell in own],
                style_of[policy],
                dashed=policy == OPTIMUM,
                dots=True,
            )
        )
    best = float(best_possible_hits([request.hash_ids for request in trace.requests]).sum()) / max(1, trace.num_blocks)
    sizes = [capacity * settings.model.block_bytes / 2**30 for capacity in settings.capacities]
    series.append(Series("endless", sizes, [best] * len(sizes), PLAIN, dashed=True))
    chart = line_chart(
        series,
        title="Hit ratio by policy and cache size",
        x_label="cache size, GiB (logarithmic)",
        y_label="block hit ratio",
        x_format=_thousands,
        log_x=True,
    )
    return card(
        "Hit ratio by policy and size",
        "Share of all prompt blocks that came from the cache; an endless cache finds what any earlier prompt had.",
        chart,
    )


def _thousands(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"


def _size_tabs(trace: Trace, settings: ReplaySettings, cells: Sequence[Cell], style_of: dict[str, str]) -> str:
    without = [cell for cell in cells if cell.policy == NO_TIER]
    panels = []
    for capacity in settings.capacities:
        own = [cell for cell in cells if cell.capacity_blocks == capacity]
        size = format_bytes(capacity * settings.model.block_bytes)
        label = f"{size} ({capacity / trace.num_unique_blocks:.1%})"
        panels.append((label, f'<div class="charts">{"".join(_charts(own, without, style_of, size))}</div>'))
    return tabs("size", panels, _preferred(trace, settings))


def _preferred(trace: Trace, settings: ReplaySettings) -> int:
    """Number of the capacity that is shown first."""
    shares = [abs(capacity / trace.num_unique_blocks - _PREFERRED_SHARE) for capacity in settings.capacities]
    return shares.index(min(shares))


def _charts(own: Sequence[Cell], without: Sequence[Cell], style_of: dict[str, str], size: str) -> list[str]:
    def lines(cells: Sequence[Cell], x: str | None, y: str) -> list[Series]:
        return [
            Series(
                "no cache" if cell.policy == NO_TIER else cell.policy,
                cell.series[y] if x is None else cell.series[x],
                [i / 100 for i in range(101)] if x is None else cell.series[y],
                style_of[cell.policy],
                dashed=cell.policy == OPTIMUM,
            )
            for cell in cells
            if y in cell.series
        ]

    over_time = line_chart(
        lines(own, "hours", "hit_ratio"),
        title=f"Hit ratio over time with {size}",
        x_label="hours since the first request",
        y_label="block hit ratio",
        y_high=1.0 if max(max(cell.series["hit_ratio"], default=0) for cell in own) > 0.75 else None,
    )
    parts = [card("Hit ratio over time", f"By time of arrival, with {size}.", over_time)]
    timed = [cell for cell in (*own, *without) if "ttft_s" in cell.series]
    if timed:
        ttft = line_chart(
            lines([cell for cell in timed if max(cell.series["ttft_s"]) > 0], None, "ttft_s"),
            title=f"Time to first token with {size}",
            x_label="time to first token, seconds (logarithmic)",
            y_label="share of requests that were faster",
            log_x=True,
            y_high=1.0,
            legend=True,
        )
        parts.append(card("Time to first token", "Cumulative: further left is faster.", ttft))
        loads = [sum(cell.series.get("loaded_bytes", ())) for cell in own]
        stores = [sum(cell.series.get("stored_bytes", ())) for cell in own]
        moved = bar_chart(
            [cell.policy for cell in own],
            [("loaded from RAM", loads, "s0"), ("stored to RAM", stores, "s1")],
            title=f"Bytes moved with {size}",
            value_format=format_bytes,
        )
        parts.append(card("Bytes moved", "Over the whole trace; the optimum's stores are not counted.", moved))
        parts.append(
            card(
                "Bytes moved over time",
                f"Loads from RAM, the time cut into {NUM_BINS} parts.",
                _bytes_chart(own, style_of),
            )
        )
    return parts


def _bytes_chart(own: Sequence[Cell], style_of: dict[str, str]) -> str:
    series = [
        Series(
            cell.policy,
            cell.series["byte_hours"],
            [num_bytes / 2**30 for num_bytes in cell.series["loaded_bytes"]],
            style_of[cell.policy],
            dashed=cell.policy == OPTIMUM,
        )
        for cell in own
        if "loaded_bytes" in cell.series
    ]
    return line_chart(
        series,
        title="Bytes loaded over time",
        x_label="hours since the first request",
        y_label="GiB loaded",
        y_format="{:,g}".format,
    )


def _rows(trace: Trace, settings: ReplaySettings, cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    headers = ["policy", "cache", "share of blocks", "block hits", "token hits", "GPU seconds saved"]
    if settings.timed:
        headers += ["TTFT p50, s", "p90, s", "p99, s", "busy", "deferred", "failed loads"]
    rows = []
    for cell in cells:
        size = format_bytes(cell.capacity_bytes) if cell.capacity_blocks else "-"
        share = f"{cell.capacity_blocks / trace.num_unique_blocks:.1%}" if cell.capacity_blocks else "-"
        name = "no cache" if cell.policy == NO_TIER else cell.policy
        row = [
            name,
            size,
            share,
            f"{cell.block_hit_ratio:.4f}",
            f"{cell.token_hit_ratio:.4f}",
            f"{cell.gpu_saved_s:,.0f}",
        ]
        if settings.timed:
            row += [
                f"{value:.3f}" for value in (cell.ttft_p50_s, cell.ttft_p90_s, cell.ttft_p99_s) if value is not None
            ]
            row += [f"{cell.busy_share:.0%}", str(cell.deferred_requests), str(cell.failed_loads)]
        rows.append(row)
    return headers, rows


def _assumptions(settings: ReplaySettings) -> str:
    model = settings.model
    if not settings.timed:
        return "Hit ratios alone: each request is over before the next begins. Made by kvtier replay."
    return (
        f"Assumed: prefill {model.prefill_tokens_per_s:,.0f} tokens/s, one prompt at a time; RAM "
        f"{model.load_speed.bytes_per_s / 1e9:g} GB/s after {model.load_speed.latency_s * 1000:g} ms; "
        f"{format_bytes(model.block_bytes)} a block; a request waits at most {model.deadline_s:g} s for the cache. "
        "Made by kvtier replay."
    )
