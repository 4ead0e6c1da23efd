"""`kvtier doctor`: why two engines share blocks, or do not."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtier.cli.options import AsJSON, print_json
from kvtier.errors import ConfigurationError
from kvtier.runtime.identity_record import LINE_PREFIX, IdentityRecord, differences, read_record

EXAMPLES = (
    "kvtier doctor vllm.log",
    "journalctl -u vllm | kvtier doctor - --json > here.json",
    "kvtier doctor here.json there.json",
)
FAILED = 1
STDIN = "-"
MAX_SAVED_CHARACTERS = 16 << 20
"""Of a file that is no log. Of a log only the lines count that say an identity."""
_MIN_WIDTH = 100
_MAY_CHANGE = "is made to be given other weights while it runs (weight_transfer_config), so it shares with nobody"
_MEANINGS = {
    "weights": "the weight files by content, or weights_id",
    "model": "the model's own settings",
    "max_model_len": "only where positions depend on it",
    "layout": "of the KV cache, and the attention backend",
    "groups": "KV groups: layers, block size, heads",
    "ranks": "parallel layout",
    "lora": "how adapters are applied; which one is in the keys",
    "hash": "of blocks; the seed is PYTHONHASHSEED",
    "engine": "another release may lay blocks out differently",
    "device": "what decides how a block is laid out",
    "blocks_per_chunk": "engine blocks in one offloaded block",
    "slot_bytes": "of one offloaded block, all ranks",
    "epochs": "of the weights, in the URLs of shared tiers",
    "kvtier": "how kvtier makes the digest",
}


def doctor(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="ENGINE [OTHER]",
            help="The log of an engine with a tier below RAM, - for the standard input, or what --json has saved.",
            show_default=False,
        ),
    ],
    *,
    as_json: AsJSON = False,
) -> None:
    """Show whose blocks an engine makes, or what keeps two engines from sharing them.

    An engine with a tier below RAM says at its start, in one line of its log (at level INFO), the namespace of its
    blocks and all that goes into it. Exit code 1: a tier that the settings ask for is off, or the two do not share
    blocks. 2: there is no such line in the file.
    """
    if len(sources) > 2 or sources.count(STDIN) > 1:
        raise ConfigurationError(f"{len(sources)} files; allowed: one, or two to compare, of which one may be -")
    records = [_read(source) for source in sources]
    is_fine = _show(records[0], as_json) if len(records) == 1 else _compare(sources, records, as_json)
    if not is_fine:
        raise typer.Exit(FAILED)


def _read(source: str) -> IdentityRecord:
    try:
        with _lines(source) as lines:
            return read_record(_identity_or_all(lines), source)
    except OSError as error:
        raise ConfigurationError(f"{source}: cannot be read: {error.strerror or error}") from None


@contextmanager
def _lines(source: str) -> Iterator[Iterable[str]]:
    if source == STDIN:
        yield sys.stdin
    else:
        with open(source, encoding="utf-8", errors="replace") as file:
            yield file


def _identity_or_all(lines: Iterable[str]) -> str:
    """The last identity line of a log, however long the log is; the text, where there is none."""
    found, text, num_characters = "", [], 0
    for line in lines:
        if LINE_PREFIX in line:
            found = line
        elif not found and num_characters < MAX_SAVED_CHARACTERS:
            text.append(line)
            num_characters += len(line)
    return found or "".join(text)


def _show(record: IdentityRecord, as_json: bool) -> bool:
    if as_json:
        print_json(msgspec.to_builtins(record))
        return record.is_well
    table = _table("field", "value", "what it is")
    seen = ""
    for path, value in record.flat_fields.items():
        name = path.partition(".")[0].partition("[")[0]
        table.add_row(path, _shown(value), _MEANINGS.get(name, "") if name != seen else "")
        seen = name
    if record.namespace is not None:
        _print(table)
    _print(Text(f"model      {record.model}, kvtier {record.kvtier}, data-parallel rank {record.rank}"))
    _print(Text(f"namespace  {record.namespace or 'none: ' + (record.reason or 'nobody has said why')}"))
    if record.weights_may_change:
        _print(Text(f"sharing    none: {_MAY_CHANGE}"))
    for tier in record.wanted_tiers:
        off = "off: " + (record.reason or "the engine's log says why")
        _print(Text(f"{tier:9}  {'on' if tier in record.tiers else off}"))
    return record.is_well


def _compare(names: list[str], records: list[IdentityRecord], as_json: bool) -> bool:
    one, other = records
    both = one.namespace is not None and other.namespace is not None
    rows = differences(one, other) if both else []
    may_change = [record.weights_may_change for record in records]
    same = both and not rows and one.namespace == other.namespace and not any(may_change)
    if as_json:
        print_json(
            {
                "same": same,
                "namespaces": [record.namespace for record in records],
                "reasons": [record.reason for record in records],
                "weights_may_change": may_change,
                "different": [{"field": path, "values": values} for path, *values in rows],
            }
        )
        return same
    for name, record in zip(names, records, strict=True):
        if record.namespace is None:
            _print(Text(f"{name} has no namespace, so no tier below RAM: {record.reason or 'nobody has said why'}"))
        if record.weights_may_change:
            _print(Text(f"{name} {_MAY_CHANGE}"))
    if rows:
        table = _table("field", *names)
        for path, *values in rows:
            table.add_row(path, *map(_shown, values))
        _print(table)
        _print(Text(f"{len(rows)} fields differ: these engines never find each other's blocks"))
    elif same:
        _print(Text(f"same namespace {one.namespace}: these engines find each other's blocks"))
    return same


def _table(*columns: str) -> Table:
    table = Table(show_header=True)
    for column in columns:
        table.add_column(Text(column), overflow="fold", no_wrap=column == "field")
    return table


def _shown(value: Any) -> Text:
    if isinstance(value, list) and len(value) > 4:
        return Text(f"{value[0]} ... {value[-1]} ({len(value)})")
    return Text("none" if value is None else str(value))


def _print(what: Any) -> None:
    Console(width=max(_MIN_WIDTH, Console().width), highlight=False, soft_wrap=isinstance(what, Text)).print(what)
