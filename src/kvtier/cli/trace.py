"""`kvtier trace`: what is in a trace, and traces for those who have none."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.options import AsJSON, BlockTokens, SkipBad, TracePath, examples, load_trace, print_json

app = typer.Typer(
    help="Request traces: describe one, or make one up.",
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples("kvtier trace info conversation_trace.jsonl", "kvtier trace generate --kind chat -o chat.jsonl"),
)


@app.command(epilog=examples("kvtier trace info conversation_trace.jsonl", "kvtier trace info trace.jsonl.zst --json"))
def info(
    trace: TracePath, *, block_tokens: BlockTokens = None, skip_bad: SkipBad = False, as_json: AsJSON = False
) -> None:
    """Describe a trace: requests, blocks, and the best hit ratio that any cache could have."""
    from kvtier.sim.hits import best_possible_hits
    from kvtier.sim.replay import trace_facts

    loaded = load_trace(trace, block_tokens=block_tokens, skip_bad=skip_bad)
    facts = trace_facts(loaded)
    hits = best_possible_hits([request.hash_ids for request in loaded.requests])
    facts["best_block_hit_ratio"] = float(hits.sum()) / max(1, loaded.num_blocks)
    if as_json:
        print_json(facts)
        return
    for name, value in facts.items():
        shown = f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
        print(f"{name.replace('_', ' '):22}{shown}")


@app.command(
    epilog=examples(
        "kvtier trace generate --kind chat --requests 5000 --rate 4 --seed 1 -o chat.jsonl.gz",
        "kvtier trace generate --kind tools --requests 1000 | head -3",
    )
)
def generate(
    *,
    kind: Annotated[
        str,
        typer.Option(
            help="chat (several turns), system (one call behind a shared system prompt), tools (loops of tool "
            "calls), rag (documents before a question), or mixed."
        ),
    ] = "mixed",
    requests: Annotated[int, typer.Option(min=1, help="How many requests.")] = 2000,
    rate: Annotated[float, typer.Option(help="Requests a second, about.")] = 2.0,
    seed: Annotated[int, typer.Option(help="Another seed, another trace; the same, the same bytes.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="File, also .gz, .xz or .zst. Default: stdout.", show_default=False),
    ] = None,
) -> None:
    """Make up traffic in the Mooncake format."""
    from kvtier.sim.trace_files import encode_requests, write_trace
    from kvtier.sim.workload import generate as make

    made = make(kind, requests, requests_per_s=rate, seed=seed)
    if output is None:
        sys.stdout.write(encode_requests(made.requests).decode())
        return
    write_trace(made.requests, output)
    print(
        f"{output}: {len(made.requests):,} requests, {made.num_blocks:,} blocks, {made.num_unique_blocks:,} of them "
        f"distinct, over {made.duration_s / 60:.1f} minutes",
        file=sys.stderr,
    )
