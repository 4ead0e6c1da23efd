"""`kvtier inspect`, `verify` and `gc`: what a disk tier has left in a folder. All are safe beside a running engine."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from kvtier.cli.options import examples
from kvtier.errors import ConfigurationError, TierError
from kvtier.runtime import parse_size
from kvtier.tiers.disk.filesystem import FileSystem
from kvtier.tiers.disk.inspection import CacheContent, Verification, find_roots, read_content, verify
from kvtier.tiers.disk.space import CacheFolder, folder_lock, list_caches, remove_cache

FAILED = 1
_MIN_WIDTH = 110
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

Folder = Annotated[Path, typer.Argument(help="The disk tier's path.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def inspect(folder: Folder, *, as_json: AsJson = False) -> None:
    """Show the disk caches in a folder: namespaces, blocks, bytes, ages, uses."""
    rows = [_describe(cache, content) for cache, content in _contents(folder)]
    if as_json:
        print(json.dumps({"caches": rows}, indent=1))
        return
    table = Table(title=f"Disk caches in {folder}", title_justify="left")
    for name in ("namespace", "label", "in use"):
        table.add_column(name)
    for name in ("blocks", "stale", "on disk", "uses", "oldest", "newest"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["namespace"][:12],
            row["label"],
            "yes" if row["live"] else "no",
            str(row["blocks"]),
            str(row["stale_blocks"]),
            _size(row["used_bytes"]),
            str(row["uses"]),
            _age(row["oldest_stored_s_ago"]),
            _age(row["last_stored_s_ago"]),
        )
    Console(width=max(_MIN_WIDTH, Console().width)).print(table)


def verify_command(folder: Folder, *, as_json: AsJson = False) -> None:
    """Read every block of the disk caches in a folder and check it. Exit code 1 if one is damaged."""
    rows, started_s = [], time.monotonic()
    contents = [content for _, content in _contents(folder) if content is not None]
    total_bytes = sum(len(content.places) * content.header.block_bytes for content in contents)
    columns = (TextColumn("reading"), BarColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=as_json, transient=True) as progress:
        task = progress.add_task("reading", total=total_bytes)
        for content in contents:
            try:
                found = verify(FileSystem(), content, lambda num_bytes: progress.advance(task, num_bytes))
            except OSError as error:
                raise TierError(f"cannot read {content.folder.path}: {error.strerror or error}") from error
            rows.append(_verdict(content, found))
    took_s = max(1e-9, time.monotonic() - started_s)
    num_corrupt = sum(len(row["corrupt_places"]) for row in rows)
    if as_json:
        print(json.dumps({"caches": rows, "seconds": took_s, "bytes_per_s": total_bytes / took_s}, indent=1))
    else:
        for row in rows:
            print(
                f"{row['path']}: {row['good_blocks']} blocks good, {len(row['corrupt_places'])} damaged"
                + (f", {row['changed_blocks']} replaced meanwhile" if row["changed_blocks"] else "")
                + (f"; damaged places: {row['corrupt_places']}" if row["corrupt_places"] else "")
            )
        print(f"{_size(total_bytes)} in {took_s:.1f} s: {total_bytes / took_s / 1e6:.0f} MB/s")
    if num_corrupt:
        raise typer.Exit(FAILED)


def gc(
    folder: Folder,
    *,
    namespace: Annotated[
        list[str] | None, typer.Option(help="Remove the cache whose namespace begins so (hexadecimal). Repeatable.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(help="Remove caches that nothing was stored into for so long: 12h, 30d.")
    ] = None,
    max_size: Annotated[
        str | None, typer.Option(help="Remove the oldest until all together take no more than this: 50GiB.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove disk caches that no engine uses. Exit code 1 if one that was asked for is in use."""
    if not (namespace or older_than or max_size):
        raise ConfigurationError("gc needs at least one of --namespace, --older-than, --max-size")
    min_age_s = None if older_than is None else _duration_s(older_than)
    max_bytes = None if max_size is None else parse_size(max_size, "--max-size")
    files = FileSystem()
    removed: list[CacheFolder] = []
    in_use: list[CacheFolder] = []
    try:
        for root in find_roots(files, str(folder)):
            with folder_lock(files, root):
                for cache in _unwanted(list_caches(files, root), namespace or (), min_age_s, max_bytes):
                    free_to_go = not cache.is_live if dry_run else remove_cache(files, cache.path)
                    (removed if free_to_go else in_use).append(cache)
    except TierError:
        raise
    except OSError as error:
        raise TierError(f"cannot clean {folder}: {error.strerror or error}") from error
    freed_bytes = sum(cache.used_bytes for cache in removed)
    if as_json:
        paths = {"removed": [cache.path for cache in removed], "in_use": [cache.path for cache in in_use]}
        print(json.dumps({**paths, "freed_bytes": freed_bytes, "dry_run": dry_run}, indent=1))
    else:
        for cache in removed:
            print(f"{'would remove' if dry_run else 'removed'} {cache.path} ({_size(cache.used_bytes)})")
        for cache in in_use:
            print(f"in use, left alone: {cache.path}")
        print(f"{len(removed)} caches, {_size(freed_bytes)}")
    if in_use:
        raise typer.Exit(FAILED)


def register(app: typer.Typer) -> None:
    """Adds the three subcommands."""
    app.command("inspect", epilog=examples("kvtier inspect /nvme/kv", "kvtier inspect /nvme/kv --json"))(inspect)
    app.command("verify", epilog=examples("kvtier verify /nvme/kv"))(verify_command)
    app.command("gc", epilog=examples("kvtier gc /nvme/kv --older-than 7d", "kvtier gc /nvme/kv --max-size 50GiB"))(gc)


def _contents(folder: Path) -> list[tuple[CacheFolder, CacheContent | None]]:
    files = FileSystem()
    caches = [cache for root in find_roots(files, str(folder)) for cache in list_caches(files, root)]
    try:
        return [(cache, read_content(files, cache)) for cache in caches]
    except OSError as error:
        raise TierError(f"cannot read the caches in {folder}: {error.strerror or error}") from error


def _describe(cache: CacheFolder, content: CacheContent | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "path": cache.path,
        "namespace": Path(cache.path).name.partition("-")[2],
        "label": "",
        "live": cache.is_live,
        "used_bytes": cache.used_bytes,
        "capacity_bytes": cache.claimed_bytes or None,
        "blocks": 0,
        "block_bytes": 0,
        "stale_blocks": 0,
        "uses": 0,
        "oldest_stored_s_ago": None,
        "last_stored_s_ago": None,
        "last_used_s_ago": None,
    }
    if content is not None:
        row |= {
            "namespace": content.header.namespace.hex(),
            "label": content.header.label,
            "blocks": len(content.places),
            "block_bytes": content.header.block_bytes,
            "stale_blocks": content.num_stale,
            "epoch": content.header.epoch,
            "created_s_ago": time.time() - content.header.created_at_s,
        }
        if len(content.places):
            stored, used = content.records["stored_at_s"], content.records["used_at_s"]
            row["uses"] = int(content.records["num_uses"].astype(np.int64).sum())
            row["blocks_never_used"] = int((content.records["num_uses"] == 0).sum())
            row["oldest_stored_s_ago"] = time.time() - int(stored.min())
            row["last_stored_s_ago"] = time.time() - int(stored.max())
            row["last_used_s_ago"] = time.time() - int(used.max())
    return row


def _verdict(content: CacheContent, found: Verification) -> dict[str, Any]:
    return {
        "path": content.folder.path,
        "namespace": content.header.namespace.hex(),
        "good_blocks": found.good_blocks,
        "corrupt_places": list(found.corrupt_places),
        "changed_blocks": found.changed_blocks,
    }


def _unwanted(
    caches: Sequence[CacheFolder], namespaces: Sequence[str], min_age_s: float | None, max_bytes: int | None
) -> list[CacheFolder]:
    """Those of `caches`, oldest first, that the options ask to remove."""
    unwanted = []
    left_bytes = sum(cache.used_bytes for cache in caches)
    for cache in caches:
        named = any(Path(cache.path).name.partition("-")[2].startswith(name.lower()[:32]) for name in namespaces)
        old = min_age_s is not None and not cache.is_live and time.time() - cache.modified_s > min_age_s
        excess = max_bytes is not None and not cache.is_live and left_bytes > max_bytes
        if named or old or excess:
            unwanted.append(cache)
            left_bytes -= cache.used_bytes
    return unwanted


def _duration_s(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if match is None:
        raise ConfigurationError(f"--older-than is {text!r}; allowed: a number with s, m, h or d, such as 12h or 30d")
    return float(match[1]) * _SECONDS[match[2]]


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"
