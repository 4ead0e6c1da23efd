"""`kvtier replay`: a trace through the production manager, policies and sizes side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from kvtier.runtime import DEFAULT_POLICY

if TYPE_CHECKING:
    from kvtier.sim.replay import Cell, ReplaySettings
    from kvtier.sim.tier import CompressionModel, TierModel
    from kvtier.sim.traces import Trace
    from kvtier.sim.transport import LinkSpeed

EXAMPLES = (
    "kvtier replay conversation_trace.jsonl",
    f"kvtier replay conversation_trace.jsonl --policy lru,{DEFAULT_POLICY},min --ram 1%,5%,20% --html report.html",
    "kvtier replay trace.jsonl.xz --model Qwen3-8B/config.json --ram 64GiB,256GiB --prefill-rate 30000",
    "kvtier replay trace.jsonl --ram 2% --disk 50% --disk-gb-per-s 3.5,1.2",
    "kvtier replay trace.jsonl --ram 2% --disk 100% --disk-gb-per-s 0.125 --disk-compression auto",
    "kvtier replay trace.jsonl --untimed --json",
)


MIN_TABLE_WIDTH = 112
"""Columns: where a terminal has fewer, lines wrap, which is better than figures cut short."""


def replay(
    trace: TracePath,
    *,
    policy: Annotated[
        str, typer.Option(help=f"Eviction policies, by comma: {', '.join(sorted(POLICIES))}, min (the optimum).")
    ] = f"lru,{DEFAULT_POLICY}",
    ram: Annotated[
        str, typer.Option(help='Cache sizes, by comma: "64GiB", "5%" of the distinct blocks, or "2000blocks".')
    ] = "1%,5%,20%",
    model: Model = None,
    bytes_per_token: BytesPerToken = None,
    kv_dtype: KVDtype = None,
    prefill_rate: PrefillRate = None,
    ram_gb_per_s: Annotated[float, typer.Option(help="Speed of transfers to and from RAM, in GB/s.")] = 20.0,
    ram_latency_ms: Annotated[float, typer.Option(min=0, help="Time before a transfer moves its first byte.")] = 0.1,
    disk: Annotated[
        str | None,
        typer.Option(help="A disk tier behind RAM, as a size like --ram.", show_default=False),
    ] = None,
    disk_gb_per_s: Annotated[
        str, typer.Option(help="Speed of reads from the disk, or of reads and writes, by comma, in GB/s.")
    ] = "3,1.5",
    disk_latency_ms: Annotated[float, typer.Option(min=0, help="Time before a block from or to the disk moves.")] = 0.2,
    disk_compression: Annotated[
        str,
        typer.Option(help="Blocks on their way to and from the disk, or what is behind a slow link: off, auto, on."),
    ] = "off",
    disk_codec: Annotated[
        str | None,
        typer.Option(
            help='"RATIO,GB/S,GB/S": how much smaller, compressed and decompressed how quickly.',
            show_default="1.45,1.5,2, as measured on bf16",
        ),
    ] = None,
    deadline_s: Annotated[float, typer.Option(min=0, help="How long a request waits for a block on its way.")] = 5.0,
    engine_cache: Annotated[
        str | None,
        typer.Option(help="The engine's own prefix cache in front, as a size like --ram.", show_default=False),
    ] = None,
    store_threshold: Annotated[int, typer.Option(min=0, help="Store a block once so many requests had it.")] = 0,
    untimed: Annotated[
        bool, typer.Option("--untimed", help="Hit ratios alone: nothing waits, many times faster.")
    ] = False,
    chunk_blocks: Annotated[
        int, typer.Option(min=0, help="With --untimed: a request's stores are offered so many blocks at a time.")
    ] = 0,
    full_blocks: FullBlocks = False,
    first: First = None,
    block_tokens: BlockTokens = None,
    skip_bad: SkipBad = False,
    as_json: AsJSON = False,
    html: Html = None,
) -> None:
    """Replay a trace through the real manager in simulated time: hits, bytes moved, time to first token."""
    from kvtier.sim import replay as replaying
    from kvtier.sim.serving import ServingModel
    from kvtier.sim.sizes import parse_capacity
    from kvtier.sim.transport import LinkSpeed

    policies = split(policy, "--policy")
    replaying.check_policies(policies)
    for name, value in (("--prefill-rate", prefill_rate), ("--ram-gb-per-s", ram_gb_per_s)):
        if value is not None and not value > 0:
            raise ConfigurationError(f"{name} is {value:g}; expected more than 0")
    loaded = load_trace(trace, block_tokens=block_tokens, skip_bad=skip_bad, full_blocks=full_blocks, first=first)
    block_bytes = token_bytes(model, bytes_per_token, kv_dtype) * loaded.block_tokens
    codec = compression_model(disk_compression, disk_codec)
    speed = LinkSpeed(ram_latency_ms / 1000, ram_gb_per_s * 1e9)
    unique = loaded.num_unique_blocks
    settings = replaying.ReplaySettings(
        policies=policies,
        capacities=sorted({parse_capacity(size, unique, block_bytes) for size in split(ram, "--ram")}),
        model=ServingModel(
            prefill_tokens_per_s=prefill_rate or replaying.default_prefill_rate(loaded),
            block_bytes=block_bytes,
            load_speed=speed,
            store_speed=speed,
            deadline_s=deadline_s,
            lower_tiers=disk_tier(disk, speeds_of(disk_gb_per_s, disk_latency_ms / 1000), unique, block_bytes, codec),
        ),
        timed=not untimed,
        chunk_blocks=chunk_blocks,
        engine_blocks=parse_capacity(engine_cache, unique, block_bytes, "--engine-cache") if engine_cache else 0,
        store_threshold=store_threshold,
    )
    check_combination(settings)
    with progress("replaying", replaying.num_steps(loaded, settings)) as on_progress:
        cells = list(replaying.replay(loaded, settings, on_progress))
    if html is not None:
        from kvtier.sim.report import replay_report

        write_text(html, replay_report(loaded, settings, cells))
    if as_json:
        print_json(replaying.as_json(loaded, settings, cells))
    else:
        print_table(loaded, settings, cells, html)


def compression_model(mode: str, codec: str | None) -> CompressionModel | None:
    """How blocks are compressed, if they are. Raises ConfigurationError for what cannot be."""
    from kvtier.sim.tier import CompressionModel
    from kvtier.tiers.shared.compressor import MODES

    if mode not in MODES:
        raise ConfigurationError(f"--disk-compression is {mode!r}; allowed: {', '.join(MODES)}")
    if codec is None:
        return None if mode == "off" else CompressionModel(mode)
    numbers = _numbers(codec, "--disk-codec")
    if len(numbers) != 3 or not all(number > 0 for number in numbers) or numbers[0] < 1:
        raise ConfigurationError(
            f'--disk-codec is {codec!r}; allowed: a ratio of 1 or more and two speeds above 0, as in "1.45,1.5,2"'
        )
    if mode == "off":
        raise ConfigurationError("--disk-codec needs --disk-compression auto, or on")
    return CompressionModel(mode, numbers[0], numbers[1] * 1e9, numbers[2] * 1e9)


def _numbers(text: str, option: str) -> list[float]:
    """By comma; empty where any is none."""
    try:
        return [float(part) for part in split(text, option)]
    except ValueError:
        return []


def speeds_of(gb_per_s: str, latency_s: float) -> tuple[LinkSpeed, LinkSpeed]:
    """Of reads and of writes. Raises ConfigurationError for a speed that is none."""
    from kvtier.sim.transport import LinkSpeed

    speeds = _numbers(gb_per_s, "--disk-gb-per-s")
    if len(speeds) not in (1, 2) or not all(speed > 0 for speed in speeds):
        raise ConfigurationError(f'--disk-gb-per-s is {gb_per_s!r}; allowed: one or two speeds above 0, as in "3,1.5"')
    return LinkSpeed(latency_s, speeds[0] * 1e9), LinkSpeed(latency_s, speeds[-1] * 1e9)


def disk_tier(
    size: str | None,
    speeds: tuple[LinkSpeed, LinkSpeed],
    unique_blocks: int,
    block_bytes: int,
    compression: CompressionModel | None,
) -> tuple[TierModel, ...]:
    """The disk tier that was asked for, if any."""
    from kvtier.sim.sizes import parse_capacity
    from kvtier.sim.tier import TierModel

    if size is None:
        return ()
    capacity_blocks = parse_capacity(size, unique_blocks, block_bytes, "--disk")
    return (TierModel("DISK", capacity_blocks, *speeds, compression=compression),)


def check_combination(settings: ReplaySettings) -> None:
    """Raises ConfigurationError for options that do not go together."""
    if settings.timed and settings.chunk_blocks:
        raise ConfigurationError("--chunk-blocks needs --untimed")
    if settings.model.lower_tiers and not settings.timed:
        raise ConfigurationError("--disk needs simulated time: leave out --untimed")
    if settings.engine_blocks and not settings.timed:
        raise ConfigurationError("--engine-cache needs simulated time: leave out --untimed")


def print_table(trace: Trace, settings: ReplaySettings, cells: Sequence[Cell], html: Path | None) -> None:
    """The cells as a table on stdout, what they assume, and where the report is."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from kvtier.sim.sizes import format_bytes

    console = Console(highlight=False, width=max(Console().width, MIN_TABLE_WIDTH))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    headers = ["policy", "cache", "% of\nblocks", "block\nhits", "token\nhits", "GPU s\nsaved", "loaded", "stored"]
    if settings.engine_blocks:
        headers.insert(4, "of these\nin engine")
    if settings.model.lower_tiers:
        headers.insert(4, "of these\non disk")
    if settings.timed:
        headers += ["de-\nferred", "TTFT s\np50", "p90", "p99", "busy"]
    for number, header in enumerate(headers):
        table.add_column(header, justify="right" if number else "left", no_wrap=True)
    for cell in cells:
        ram = cell.tiers.get("ram", {})
        row = [
            cell.policy,
            format_bytes(cell.capacity_bytes) if cell.capacity_blocks else "-",
            f"{cell.capacity_blocks / trace.num_unique_blocks:.1%}" if cell.capacity_blocks else "-",
            f"{cell.block_hit_ratio:.4f}",
            f"{cell.token_hit_ratio:.4f}",
            f"{cell.gpu_saved_s:,.0f}",
            format_bytes(ram.get("loaded_bytes", 0)),
            format_bytes(ram.get("stored_bytes", 0)) if cell.policy != "min" else "-",
        ]
        if settings.engine_blocks:
            row.insert(4, f"{cell.tiers['engine']['block_hit_ratio']:.4f}" if "engine" in cell.tiers else "-")
        if settings.model.lower_tiers:
            row.insert(4, f"{cell.tiers['disk']['block_hit_ratio']:.4f}" if "disk" in cell.tiers else "-")
        if settings.timed:
            row += [str(cell.deferred_requests), *(f"{value:.2f}" for value in ttfts(cell)), f"{cell.busy_share:.0%}"]
        table.add_row(*row)
    console.print(table)
    console.print(
        f"{trace.name}: {len(trace.requests):,} requests, {trace.num_blocks:,} blocks of {trace.block_tokens} tokens "
        f"({format_bytes(settings.model.block_bytes)} each), {trace.num_unique_blocks:,} distinct; "
        f"prefill {settings.model.prefill_tokens_per_s:,.0f} tokens/s.",
        soft_wrap=True,
    )
    if html is not None:
        console.print(f"Report: {html}", soft_wrap=True)


def ttfts(cell: Cell) -> list[float]:
    """The times to first token of a timed cell."""
    return [value for value in (cell.ttft_p50_s, cell.ttft_p90_s, cell.ttft_p99_s) if value is not None]
