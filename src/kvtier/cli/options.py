"""What the subcommands that work on traces share: options, loading, progress, output."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier.errors import ConfigurationError

if TYPE_CHECKING:
    from kvtier.sim.traces import Trace


def examples(*lines: str) -> str:
    """An epilog whose lines stay lines: the mark keeps the help from filling the paragraph."""
    return "\b\n" + "\n".join(("Examples:", *(f"  {line}" for line in lines)))


TracePath = Annotated[
    Path,
    typer.Argument(
        help="Request trace: Mooncake or Bailian JSONL, also as .gz, .xz or .zst.", show_default=False, metavar="TRACE"
    ),
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave malformed lines out and count them.")]
FullBlocks = Annotated[
    bool, typer.Option("--full-blocks", help="Drop the partial last block of each prompt: engines hash full blocks.")
]
First = Annotated[int | None, typer.Option(min=1, help="Only the first so many requests.", show_default=False)]
BlockTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens of one id of the trace. Default: the format's, 512 or 16.", show_default=False),
]
Model = Annotated[
    Path | None,
    typer.Option(help="Hugging Face config.json (or its folder): how many bytes a block has.", show_default=False),
]
BytesPerToken = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="KV bytes of one token, all layers and ranks. Default: 131072, an 8B model in bf16.",
        show_default=False,
    ),
]
KVDtype = Annotated[
    str | None, typer.Option(help="With --model: the KV cache's type, for example fp8.", show_default=False)
]
PrefillRate = Annotated[
    float | None,
    typer.Option(
        help="Prompt tokens that the engine computes in a second. Default: such that it is 80 % busy without a cache.",
        show_default=False,
    ),
]
AsJSON = Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")]
Html = Annotated[
    Path | None,
    typer.Option(help="Also write a report with plots, one file, to open in a browser.", show_default=False),
]


def load_trace(
    path: Path, *, block_tokens: int | None, skip_bad: bool, full_blocks: bool = False, first: int | None = None
) -> Trace:
    """Reads a trace and says on stderr what was skipped. Raises ConfigurationError."""
    from kvtier.sim.traces import read_trace

    trace = read_trace(path, block_tokens=block_tokens, skip_bad=skip_bad)
    if trace.num_skipped:
        print(f"kvtier: {trace.num_skipped} bad lines skipped; {trace.first_skipped}", file=sys.stderr)
    if first is not None:
        trace = trace.first(first)
    return trace.full_blocks_only() if full_blocks else trace


def token_bytes(model: Path | None, bytes_per_token: int | None, kv_dtype: str | None) -> int:
    """KV bytes of one token, from whichever option says it. Raises ConfigurationError."""
    from kvtier.sim.sizes import DEFAULT_BYTES_PER_TOKEN, kv_bytes_per_token

    if model is None:
        if kv_dtype is not None:
            raise ConfigurationError("--kv-dtype needs --model")
        return bytes_per_token or DEFAULT_BYTES_PER_TOKEN
    if bytes_per_token is not None:
        raise ConfigurationError("--model and --bytes-per-token say the same thing; give one of them")
    path = model / "config.json" if model.is_dir() else model
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--model: {path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigurationError(f"--model: {path} is not an object")
    return kv_bytes_per_token(config, kv_dtype)


def split(text: str, key: str) -> list[str]:
    """The parts of a list by commas. Raises ConfigurationError, naming `key`, if there are none."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ConfigurationError(f"{key} is {text!r}; expected names or sizes by comma")
    return parts


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], object]]:
    """A bar on stderr, where that is a terminal. Yields what is to be told of every so many steps done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    ) as bar:
        task = bar.add_task(label, total=total)
        yield lambda steps: bar.advance(task, steps)


def print_json(value: Any) -> None:
    """On stdout, indented."""
    print(json.dumps(value, indent=1))


def write_text(path: Path, text: str) -> None:
    """Raises ConfigurationError if the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from error
