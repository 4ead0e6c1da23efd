"""The demo's numbers: from what every request saw to rows, a table and sentences. Pure: no engine, no files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

STORED = "vllm:kv_offload_store_bytes"
LOADED = "vllm:kv_offload_load_bytes"
DISK_LOADED = "vllm:kvtier_tier_loaded_bytes"
DEFERRED = "vllm:kvtier_deferred_requests"
RUNS = ("without", "with")
_SIDES = {"without": "off", "with": "on"}
_HEADERS = (
    "TTFT\np50",
    "TTFT\np95",
    "com-\nputed",
    "in\nengine",
    "from\nkvtier",
    "stored\nMiB",
    "loaded\nMiB",
    "disk\nMiB",
    "de-\nfer-\nred",
    "same\nout-\nput",
)


@dataclass(frozen=True, slots=True)
class Figures:
    """One run's figures for one group of requests. Times in seconds; None where the run has no such figure."""

    requests: int
    ttft_p50_s: float
    ttft_p95_s: float
    prompt_tokens: int
    computed_tokens: int
    engine_tokens: int
    loaded_tokens: int
    output_tokens: int
    stored_bytes: int | None
    loaded_bytes: int | None
    disk_bytes: int | None
    """Read from disk."""
    deferred_requests: int | None


@dataclass(frozen=True, slots=True)
class Row:
    """A group of requests in both runs."""

    name: str
    without: Figures
    with_kvtier: Figures
    identical: int
    """Requests whose output tokens are the same in both runs, every one of them."""


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank: a value that was seen. NaN without values."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def figures(
    requests: Sequence[dict[str, Any]], before: dict[str, float] | None, after: dict[str, float] | None
) -> Figures:
    """`before` and `after` are the engine's counters around these requests, where they belong to them alone."""

    def change(name: str) -> int | None:
        if before is None or after is None or name not in after:
            return None
        return int(after[name] - before.get(name, 0))

    def total(name: str) -> int:
        return sum(request[name] for request in requests)

    times = [request["ttft_s"] for request in requests if request["ttft_s"] is not None]
    return Figures(
        requests=len(requests),
        ttft_p50_s=percentile(times, 0.5),
        ttft_p95_s=percentile(times, 0.95),
        prompt_tokens=total("prompt_tokens"),
        computed_tokens=total("computed_tokens"),
        engine_tokens=total("engine_tokens"),
        loaded_tokens=total("loaded_tokens"),
        output_tokens=sum(len(request["output"]) for request in requests),
        stored_bytes=change(STORED),
        loaded_bytes=change(LOADED),
        disk_bytes=change(DISK_LOADED),
        deferred_requests=change(DEFERRED),
    )


def compare(without: dict[str, Any], with_kvtier: dict[str, Any], names: Sequence[str]) -> list[Row]:
    """A row for each phase, named by `names`, and a last one, "total"."""
    outputs = [{r["id"]: r["output"] for r in run["requests"]} for run in (without, with_kvtier)]

    def row(name: str, phase: int | None) -> Row:
        sides = []
        for run in (without, with_kvtier):
            asked = [r for r in run["requests"] if phase is None or r["phase"] == phase]
            marks = run["counters"]
            first, last = (0, len(marks) - 1) if phase is None else (phase, phase + 1)
            whole = phase is None or len(marks) == len(names) + 1
            sides.append(figures(asked, marks[first], marks[last]) if whole else figures(asked, None, None))
        ids = [r["id"] for r in without["requests"] if phase is None or r["phase"] == phase]
        identical = sum(outputs[0][i] == outputs[1].get(i) for i in ids)
        return Row(name, sides[0], sides[1], identical)

    return [*(row(name, phase) for phase, name in enumerate(names)), row("total", None)]


def first_difference(without: dict[str, Any], with_kvtier: dict[str, Any]) -> str | None:
    """The first request whose output differs, and where."""
    other = {request["id"]: request["output"] for request in with_kvtier["requests"]}
    for request in without["requests"]:
        one, two = request["output"], other.get(request["id"], [])
        if one != two:
            at = next((i for i, pair in enumerate(zip(one, two, strict=False)) if pair[0] != pair[1]), None)
            place = f"from output token {at + 1} on" if at is not None else "in its length"
            return f"request {request['id']} differs {place}"
    return None


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as plain values."""
    return [
        {
            "name": row.name,
            "without": asdict(row.without),
            "with": asdict(row.with_kvtier),
            "identical_requests": row.identical,
        }
        for row in rows
    ]


def _seconds(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}" if value >= 0.095 else f"{value:.3f}"


def _bytes(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**20:,.0f}"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def render_table(rows: Sequence[Row], title: str) -> Table:
    """Two lines for each row, without and with kvtier. Fits into 80 columns."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=0)
    for header in ("", "kvtier"):
        table.add_column(header, no_wrap=True)
    for header in _HEADERS:
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        for run, side in zip(RUNS, (row.without, row.with_kvtier), strict=True):
            table.add_row(
                row.name if run == "without" else "",
                _SIDES[run],
                _seconds(side.ttft_p50_s),
                _seconds(side.ttft_p95_s),
                _count(side.computed_tokens),
                _count(side.engine_tokens),
                _count(side.loaded_tokens),
                _bytes(side.stored_bytes),
                _bytes(side.loaded_bytes),
                _bytes(side.disk_bytes),
                _count(side.deferred_requests),
                f"{row.identical}/{row.without.requests}" if run == "with" else "",
                style="bold" if row is rows[-1] else None,
                end_section=run == "with",
            )
    return table


def summary(rows: Sequence[Row], warm: Sequence[str], restarted: str | None = None) -> list[str]:
    """What the table says, in sentences. `warm` names the rows in which there was something to come back, `restarted`
    the one before which the engines were started again."""
    total = rows[-1]
    lines = []
    back = [row for row in rows if row.name in warm]
    for row in [row for row in back if row.name != restarted][-1:] + [row for row in back if row.name == restarted]:
        slow, fast = row.without.ttft_p50_s, row.with_kvtier.ttft_p50_s
        when = ", after the restart" if row.name == restarted else ""
        if fast and not math.isnan(slow / fast):
            lines.append(
                f"{row.name.capitalize()}{when}: the median first token after {_seconds(slow)} s without kvtier, "
                f"{_seconds(fast)} s with it ({slow / fast:.1f} times as fast)."
            )
    saved = total.without.computed_tokens - total.with_kvtier.computed_tokens
    if total.without.computed_tokens:
        lines.append(
            f"Prompt tokens computed: {total.without.computed_tokens:,} without, "
            f"{total.with_kvtier.computed_tokens:,} with kvtier "
            f"({saved / total.without.computed_tokens:.0%} less)."
        )
    if total.identical == total.without.requests:
        lines.append(
            f"All {total.without.output_tokens:,} output tokens of {total.without.requests} requests are identical "
            "in the two runs."
        )
    else:
        lines.append(
            f"The output of {total.without.requests - total.identical} of {total.without.requests} requests "
            "is NOT the same in the two runs."
        )
    return lines


def render_answers(requests: Sequence[dict[str, Any]], count: int) -> RenderableType:
    """A few of the model's answers in the run with kvtier: of different users, from different turns."""
    panels: list[RenderableType] = []
    by_user: dict[str, list[dict[str, Any]]] = {}
    for request in requests:
        if "user" in request:
            by_user.setdefault(request["user"], []).append(request)
    for number, (user, asked) in enumerate(list(by_user.items())[:count]):
        chosen = sorted(asked, key=lambda request: int(request["phase"]))
        request = chosen[number % len(chosen)]
        body = Text.assemble((request["question"], "bold"), "\n", request["text"].strip())
        panels.append(Panel(body, title=escape(f"{user}, turn {request['phase'] + 1}"), title_align="left"))
    return Group(*panels)
