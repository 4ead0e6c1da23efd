"""The settings of the disk tier: what they become, and what is refused in one line before anything starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtier.errors import ConfigurationError
from kvtier.runtime import check_folders, parse_config
from kvtier.runtime.disk import DiskSettings


def disk_of(**settings: object) -> DiskSettings:
    disk = parse_config({"ram": "1MiB", "disk": settings}).disk
    assert disk is not None
    return disk


def test_no_disk_unless_asked_for() -> None:
    assert parse_config({"ram": "1MiB"}).disk is None


def test_path_and_capacity_are_enough() -> None:
    disk = disk_of(path="/var/cache/kv", capacity="20GiB")
    assert disk.paths == ("/var/cache/kv",)
    assert disk.capacity_bytes == 20 << 30
    assert disk.min_free_bytes == 1 << 30
    assert disk.admission == "always"
    assert disk.direct is True
    assert disk.num_threads is None
    assert disk.stop_flush_s == 2.0
    assert disk.weights_id is None


def test_everything_can_be_set() -> None:
    disk = disk_of(
        path=["/a", "/b"],
        capacity=10**9,
        min_free=0,
        admission="reuse",
        direct=False,
        threads="4",
        stop_flush_s=0,
        weights_id="llama-3-rev-7",
    )
    assert disk == DiskSettings(("/a", "/b"), 10**9, 0, "reuse", False, 4, 0.0, "llama-3-rev-7")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("/var/cache/kv", ["disk is '/var/cache/kv'", "path", "capacity"]),
        ({"path": "/a"}, ["'disk.capacity' is missing", "20GiB"]),
        ({"capacity": "1GiB"}, ["'disk.path' is missing"]),
        ({"path": "/a", "capcity": "1GiB"}, ["'disk.capcity'", "'disk.capacity'"]),
        ({"path": "/a", "capacity": "plenty"}, ["disk.capacity is 'plenty'", "GiB"]),
        ({"path": "/a", "capacity": 0}, ["disk.capacity is 0"]),
        ({"path": "/a", "capacity": True}, ["disk.capacity is True"]),
        ({"path": "", "capacity": 1}, ["disk.path is ''"]),
        ({"path": [], "capacity": 1}, ["disk.path is []"]),
        ({"path": ["/a", 7], "capacity": 1}, ["disk.path is ['/a', 7]"]),
        ({"path": ["/a", "/b/../a"], "capacity": 1}, ["disk.path", "different folders"]),
        ({"path": "/a", "capacity": 1, "min_free": "-1"}, ["disk.min_free is '-1'"]),
        (
            {"path": "/a", "capacity": 1, "admission": "sometimes"},
            ["disk.admission is 'sometimes'", "always", "reuse", "ram_eviction"],
        ),
        ({"path": "/a", "capacity": 1, "direct": "yes"}, ["disk.direct is 'yes'", "true, false"]),
        ({"path": "/a", "capacity": 1, "threads": 0}, ["disk.threads is 0", "1 or more"]),
        ({"path": "/a", "capacity": 1, "stop_flush_s": -1}, ["disk.stop_flush_s is -1"]),
        ({"path": "/a", "capacity": 1, "weights_id": 7}, ["disk.weights_id is 7"]),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(settings: object, words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        parse_config({"ram": "1MiB", "disk": settings})
    message = str(refusal.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == []


def test_folders_that_can_be_made_are_not_made(tmp_path: Path) -> None:
    check_folders(disk_of(path=str(tmp_path / "new" / "deeper"), capacity=1))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigurationError, match=r"^disk\.path is .* is not a folder$"):
            check_folders(disk_of(path=str(path), capacity=1))


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sealed = tmp_path / "sealed"
    sealed.mkdir(mode=0o555)
    if os.geteuid() == 0:  # who may write anywhere
        may = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != sealed and may(path, mode))
    with pytest.raises(ConfigurationError, match=r"^disk\.path is .* is not writable by this user$"):
        check_folders(disk_of(path=[str(tmp_path), str(sealed / "below")], capacity=1))
