"""`kvtier plan`: how large the cache should be, and what a further GiB is worth."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier.cli.options import (
    AsJSON,
    BlockTokens,
    BytesPerToken,
    First,
    FullBlocks,
    Html,
    KVDtype,
    Model,
    PrefillRate,
    SkipBad,
    TracePath,
    load_trace,
    print_json,
    progress,
    split,
    token_bytes,
    write_text,
)
from kvtier.errors import ConfigurationError
from kvtier.policy import POLICIES
from kvtier.runtime import DEFAULT_POLICY, parse_size

if TYPE_CHECKING:
    from kvtier.sim.plan import Plan, PlanSettings
    from kvtier.sim.traces import Trace

EXAMPLES = (
    "kvtier plan conversation_trace.jsonl --model Qwen3-8B/config.json --prefill-rate 30000",
    "kvtier plan trace.jsonl.zst --bytes-per-token 131072 --ram 64GiB,128GiB,256GiB --html plan.html",
    "kvtier plan trace.jsonl --max-ram 256GiB --json",
)


def plan(
    trace: TracePath,
    *,
    policy: Annotated[
        str, typer.Option(help=f"Eviction policies to compare, by comma: {', '.join(sorted(POLICIES))}.")
    ] = DEFAULT_POLICY,
    ram: Annotated[
        str | None,
        typer.Option(
            help='Sizes to look at, by comma: "64GiB", "5%" of the distinct blocks. Default: ten up to all of them.',
            show_default=False,
        ),
    ] = None,
    max_ram: Annotated[
        str | None, typer.Option(help="Recommend no more than this, for example 256GiB.", show_default=False)
    ] = None,
    model: Model = None,
    bytes_per_token: BytesPerToken = None,
    kv_dtype: KVDtype = None,
    prefill_rate: PrefillRate = None,
    disk_gb_per_s: Annotated[float, typer.Option(help="Read speed of a disk tier, in GB/s.")] = 3.0,
    sample_rate: Annotated[float, typer.Option(help="Share of the blocks to sample; 1 for all.")] = 0.04,
    seed: Annotated[int, typer.Option(min=0, help="Another seed, another sample.")] = 0,
    full_blocks: FullBlocks = False,
    first: First = None,
    block_tokens: BlockTokens = None,
    skip_bad: SkipBad = False,
    as_json: AsJSON = False,
    html: Html = None,
) -> None:
    """Find how much RAM a trace is worth: hit ratio by size, the knee, and a configuration for vLLM."""
    from kvtier.cli.serve import connector_config
    from kvtier.sim import plan as planning
    from kvtier.sim.replay import default_prefill_rate, trace_facts
    from kvtier.sim.sizes import parse_capacity

    for name, value in (("--prefill-rate", prefill_rate), ("--disk-gb-per-s", disk_gb_per_s)):
        if value is not None and not value > 0:
            raise ConfigurationError(f"{name} is {value:g}; expected more than 0")
    loaded = load_trace(trace, block_tokens=block_tokens, skip_bad=skip_bad, full_blocks=full_blocks, first=first)
    block_bytes = token_bytes(model, bytes_per_token, kv_dtype) * loaded.block_tokens
    unique = loaded.num_unique_blocks
    sizes = split(ram, "--ram") if ram else [f"{100 * share:g}%" for share in planning.DEFAULT_SHARES]
    settings = planning.PlanSettings(
        policies=split(policy, "--policy"),
        capacities=sorted({parse_capacity(size, unique, block_bytes) for size in sizes}),
        block_bytes=block_bytes,
        prefill_tokens_per_s=prefill_rate or default_prefill_rate(loaded),
        sample_rate=sample_rate,
        seed=seed,
        max_ram_bytes=parse_size(max_ram, "--max-ram") if max_ram else math.inf,
        disk_bytes_per_s=disk_gb_per_s * 1e9,
    )
    with progress("planning", planning.num_steps(loaded, settings)) as on_progress:
        made = planning.make_plan(loaded, settings, on_progress)
    config = connector_config(planning.connector_settings(made))
    if html is not None:
        from kvtier.sim.plan_report import plan_report

        write_text(html, plan_report(loaded, settings, made, config))
    if as_json:
        result = {"trace": trace_facts(loaded), **planning.plan_as_json(settings, made)}
        result["recommended"]["kv_transfer_config"] = config
        print_json(result)
    else:
        print_plan(loaded, settings, made, config, html)


def print_plan(trace: Trace, settings: PlanSettings, made: Plan, config: dict[str, Any], html: Path | None) -> None:
    """The curves as tables on stdout, what is recommended, and what to paste."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from kvtier.sim.sizes import format_bytes

    console = Console(highlight=False)
    for curve in made.curves:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=curve.policy, title_justify="left")
        headers = ("cache", "of blocks", "block hits", "+-", "prefill s saved", "s a further GiB")
        for header in headers:
            table.add_column(header, justify="right", no_wrap=True)
        for point in curve.points:
            table.add_row(
                format_bytes(point.capacity_bytes),
                f"{point.capacity_blocks / trace.num_unique_blocks:.1%}",
                f"{point.hit_ratio:.4f}",
                f"{point.error:.4f}" if point.error else "exact",
                f"{point.saved_s:,.0f}",
                f"{point.saved_s_per_further_gib:.3g}" if point.saved_s_per_further_gib else "-",
            )
        console.print(table)
    for line in _sentences(trace, settings, made):
        console.print(line, soft_wrap=True)
    print(f"--kv-transfer-config '{json.dumps(config)}'")
    if html is not None:
        console.print(f"Report: {html}", soft_wrap=True)


def _sentences(trace: Trace, settings: PlanSettings, made: Plan) -> list[str]:
    from kvtier.sim.sizes import format_bytes

    lines = [
        f"{trace.name}: {len(trace.requests):,} requests in {trace.duration_s / 3600:.2f} h, "
        f"{trace.num_unique_blocks:,} distinct blocks of {format_bytes(settings.block_bytes)}; an endless cache "
        f"finds {made.best_hit_ratio:.4f}.",
        f"Recommended: {format_bytes(made.recommended_bytes)} of RAM with {made.recommended_policy}. Beyond "
        f"{format_bytes(made.enough_bytes)} next to nothing more is found.",
    ]
    if made.disk:
        last = made.disk[-1]
        verdict = "saves" if last.saved_s > 0 else "costs"
        lines.append(
            f"A disk of {format_bytes(last.capacity_bytes)} behind it would find {last.hit_ratio:.4f} more; at "
            f"{settings.disk_bytes_per_s / 1e9:g} GB/s that {verdict} {abs(last.saved_s):,.0f} s."
        )
    return lines
