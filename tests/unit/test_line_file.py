"""Lines to a file from a thread: complete, in order, private, and never in the way."""

import errno
import os
import threading

import pytest

from kvtier.transfers.line_file import LineFile


def test_everything_in_order_and_for_the_owner_only(tmp_path):
    path = tmp_path / "lines"
    lines = LineFile(path)
    for number in range(5000):
        lines.append(b"%d\n" % number)
    assert lines.close()
    assert path.read_text().split() == [str(number) for number in range(5000)]
    assert path.stat().st_mode & 0o777 == 0o600
    assert lines.num_dropped == 0
    assert lines.close()


def test_an_existing_file_is_left_alone(tmp_path):
    path = tmp_path / "lines"
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        LineFile(path)
    assert path.read_text() == "mine"


def test_a_disk_that_is_full_costs_the_lines_and_nothing_else(tmp_path, monkeypatch):
    tried = threading.Event()

    def write(fd, data):
        tried.set()
        raise OSError(errno.ENOSPC, "no space")

    lines = LineFile(tmp_path / "lines")
    monkeypatch.setattr(os, "write", write)
    lines.append(b"1\n")
    assert tried.wait(10)
    lines._thread.join(10)
    lines.append(b"2\n")
    assert lines.failure.errno == errno.ENOSPC
    assert lines.num_dropped == 1
    assert not lines.close()


def test_a_disk_that_hangs_holds_nobody_up(tmp_path, monkeypatch):
    go_on = threading.Event()
    real = os.write

    def write(fd, data):
        go_on.wait(30)
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    lines = LineFile(tmp_path / "lines")
    for _ in range(30_000):
        lines.append(b"1\n")
    assert 0 < lines.num_dropped < 30_000
    go_on.set()
    assert lines.close(wait_s=30)
    assert len((tmp_path / "lines").read_bytes().split()) == 30_000 - lines.num_dropped
