"""`kvtier inspect`, `verify` and `gc` on real folders, beside engines that use them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from disk_harness import KEYS, SLOT_BYTES
from kvtier.cli.main import BAD_INPUT, FAILED, run
from kvtier.testing import TierDriver, make_keys
from kvtier.tiers.disk import DiskConfig, DiskTier, FileEpochStore
from kvtier.tiers.disk.filesystem import FileSystem
from kvtier.tiers.disk.inspection import read_content, verify
from kvtier.tiers.disk.layout import PAGE_BYTES, RECORD_BYTES, cache_bytes, cache_folder
from kvtier.tiers.disk.space import list_caches

CAP_BYTES = cache_bytes(200, SLOT_BYTES)


def open_cache(folder: Path, name: str) -> TierDriver:
    config = DiskConfig(
        (str(folder),),
        CAP_BYTES * (3 if name == "c" else 1),
        name.encode() * 32,
        label=f"model {name}",
        min_free_bytes=0,
        grow_bytes=SLOT_BYTES,
    )
    return TierDriver(DiskTier(config, FileEpochStore(config.epoch_path)), 64, SLOT_BYTES)


def path_of(folder: Path, name: str) -> Path:
    return folder / cache_folder(name.encode() * 32)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Cache `a` with 4 blocks, used and an hour old; cache `b` with 6; cache `c` with 8, in use."""
    for name, count in (("a", 4), ("b", 6)):
        driver = open_cache(tmp_path, name)
        driver.store(KEYS[:count])
        driver.tier.touch(KEYS[:2])
        driver.close(10.0)
    hour_ago = path_of(tmp_path, "a").stat().st_mtime - 3600
    os.utime(path_of(tmp_path, "a") / "table", (hour_ago, hour_ago))
    live = open_cache(tmp_path, "c")
    live.store(KEYS[:8])
    live.tier.flush(10.0)
    yield tmp_path
    assert live.load(KEYS[:8]).success, "the running engine was disturbed"
    live.close()


def result(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_inspect(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(folder), "--json"]) == 0
    rows = {row["label"]: row for row in result(capsys)["caches"]}
    assert {label: (row["blocks"], row["uses"], row["live"]) for label, row in rows.items()} == {
        "model a": (4, 2, False),
        "model b": (6, 2, False),
        "model c": (8, 0, True),
    }
    assert rows["model a"]["namespace"] == (b"a" * 32).hex()
    assert rows["model a"]["block_bytes"] == SLOT_BYTES
    assert rows["model b"]["used_bytes"] >= 6 * SLOT_BYTES
    assert 0 <= rows["model b"]["oldest_stored_s_ago"] < 600
    assert run(["inspect", str(folder)]) == 0
    table = capsys.readouterr().out
    for word in ("model a", "model b", "model c", (b"a" * 6).hex()):
        assert word in table


def test_inspect_after_a_reset_that_no_tier_has_seen(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FileEpochStore(str(path_of(folder, "a") / "epoch")).advance()
    assert run(["inspect", str(folder), "--json"]) == 0
    (row,) = (row for row in result(capsys)["caches"] if row["label"] == "model a")
    assert (row["blocks"], row["stale_blocks"]) == (0, 4)


def test_a_folder_of_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(3):
        open_cache(tmp_path / f"rank-{rank}", "a").tier.close()
    assert run(["inspect", str(tmp_path), "--json"]) == 0
    assert len(result(capsys)["caches"]) == 3


def test_verify_finds_nothing_wrong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "MB/s" in out
    assert out.count("0 damaged") == 3


def test_verify_finds_every_damaged_block(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slab = path_of(folder, "b") / "slab"
    content = bytearray(slab.read_bytes())
    for place in (1, 4):
        content[place * SLOT_BYTES + 77] ^= 4
    slab.write_bytes(content[: 5 * SLOT_BYTES + 9])  # and the last one is cut off
    assert run(["verify", str(folder), "--json"]) == FAILED
    rows = {row["path"]: row for row in result(capsys)["caches"]}
    assert rows[str(path_of(folder, "b"))]["corrupt_places"] == [1, 4, 5]
    assert rows[str(path_of(folder, "b"))]["good_blocks"] == 3
    assert rows[str(path_of(folder, "a"))]["corrupt_places"] == []
    assert run(["verify", str(folder)]) == FAILED
    assert "[1, 4, 5]" in capsys.readouterr().out


def test_damaged_records_are_stale_not_wrong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = path_of(folder, "b") / "table"
    content = bytearray(table.read_bytes())
    content[PAGE_BYTES + 2 * RECORD_BYTES + 30] ^= 1
    table.write_bytes(content)
    assert run(["verify", str(folder), "--json"]) == 0
    assert run(["inspect", str(folder), "--json"]) == 0


def test_blocks_that_are_replaced_meanwhile_are_not_bad(folder: Path) -> None:
    files = FileSystem()
    driver = open_cache(folder / "other", "a")
    driver.store(make_keys(60, "old"))
    assert driver.tier.flush(10.0)
    (cache,) = list_caches(files, str(folder / "other"))
    before = read_content(files, cache)
    assert before is not None
    driver.tier.drop(make_keys(40, "old"))
    driver.store(make_keys(30, "new"))
    assert driver.tier.flush(10.0)
    found = verify(files, before, lambda num_bytes: None)
    assert found.corrupt_places == ()
    assert found.changed_blocks >= 30
    assert found.good_blocks >= 20
    assert found.good_blocks + found.changed_blocks == 60
    driver.close()


def remaining(folder: Path) -> str:
    return "".join(name for name in "abc" if path_of(folder, name).exists())


@pytest.mark.parametrize(
    ("options", "left", "code"),
    [
        (["--older-than", "30m"], "bc", 0),
        (["--older-than", "2h"], "abc", 0),
        (["--older-than", "0s"], "c", 0),
        (["--namespace", "6262"], "ac", 0),
        (["--namespace", "61", "--namespace", "62"], "c", 0),
        (["--namespace", "63"], "abc", FAILED),
        (["--max-size", "215KiB"], "bc", 0),
        (["--max-size", "1KiB"], "c", 0),
        (["--max-size", "1GiB"], "abc", 0),
        (["--max-size", "1KiB", "--dry-run"], "abc", 0),
    ],
)
def test_gc(folder: Path, options: list[str], left: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["gc", str(folder), *options, "--json"]) == code
    assert remaining(folder) == left
    answer = result(capsys)
    removed = set() if "--dry-run" in options else set("abc") - set(left)
    assert {Path(path) for path in answer["removed"]} == {path_of(folder, name) for name in removed} or answer[
        "dry_run"
    ]
    assert bool(answer["in_use"]) == (code == FAILED)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["gc", "{}"], BAD_INPUT, "--older-than"),
        (["gc", "{}", "--older-than", "soon"], BAD_INPUT, "30d"),
        (["gc", "{}", "--max-size", "huge"], BAD_INPUT, "--max-size"),
        (["inspect", "{}/nowhere"], FAILED, "nowhere"),
        (["verify", "{}/nowhere"], FAILED, "nowhere"),
        (["inspect"], BAD_INPUT, "folder"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], code: int, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([argument.format(folder) for argument in arguments]) == code
    line = capsys.readouterr().err
    assert said.lower() in line.lower()
    assert line.count("\n") == 1
