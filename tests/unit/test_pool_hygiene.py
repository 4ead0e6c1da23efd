"""Starts that are interrupted, processes that are killed, neighbours on one host: nothing stays, nothing collides."""

from __future__ import annotations

import base64
import os
import pickle
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.errors import PoolError
from kvtier.tiers import ram
from kvtier.tiers.ram import PoolHandle, RamPool

MIB = 1 << 20
NO_UNNAMED_FILES = """
import errno
real_open = os.open
def no_unnamed(path, flags, *args, **kwargs):
    if flags & os.O_TMPFILE == os.O_TMPFILE:
        raise OSError(errno.EOPNOTSUPP, "not here")
    return real_open(path, flags, *args, **kwargs)
os.open = no_unnamed
"""
CHILD = """
import base64, os, pickle, signal, sys
from kvtier.errors import PoolError
from kvtier.tiers import ram
from kvtier.tiers.ram import RamPool

def say(text):
    print(text, flush=True)

def show(handle):
    say(base64.b64encode(pickle.dumps(handle)).decode())
"""
SERVE = """
pool = RamPool.create(64, 1 << 20, pool_dir=sys.argv[1] or None, private=sys.argv[2] == "private")
pool.slots()[:] = int(sys.argv[3])
show(pool.handle)
sys.stdin.readline()
say(f"{pool.slots().min()} {pool.slots().max()}")
sys.stdin.read()
"""


@pytest.fixture
def start() -> Iterator[object]:
    """Starts a process that runs `code`; whatever happens, none is left after the test."""
    started: list[subprocess.Popen[str]] = []

    def run(code: str, *args: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD + code, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], 60)[0], "nothing was said"
    return process.stdout.readline().strip()


def handle_of(process: subprocess.Popen[str]) -> PoolHandle:
    handle = pickle.loads(base64.b64decode(read_line(process)))
    assert isinstance(handle, PoolHandle)
    return handle


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


@pytest.fixture
def on_old_filesystem(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, folders have no unnamed files."""
    real_open = os.open

    def no_unnamed(path, flags, *args, **kwargs):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "not here")
        return real_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(ram.os, "open", no_unnamed)


# -- interrupted starts


@pytest.mark.slow
@pytest.mark.parametrize("step", ["_map_new_file", "_populate", "mmap.mmap", "os.posix_fallocate", "os.fstat"])
@pytest.mark.parametrize("unnamed", [True, False], ids=["unnamed files", "no unnamed files"])
def test_a_start_that_is_killed_leaves_no_name(start, tmp_path, step, unnamed):
    """Killed before or right after each step of a start."""
    die = f"""
step = ram.{step}
def die(*args, **kwargs):
    if "{step}" != "_map_new_file":
        step(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGKILL)
ram.{step} = die
RamPool.create(64, 1 << 20, pool_dir=sys.argv[1])
"""
    process = start(("" if unnamed else NO_UNNAMED_FILES) + die, str(tmp_path))
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_an_interrupted_start_has_left_is_reclaimed(start, tmp_path, on_old_filesystem):
    """Killed in the one instant at which there is a name."""
    die = """
ram.os.unlink = lambda path: os.kill(os.getpid(), signal.SIGKILL)
RamPool.create(64, 1 << 20, pool_dir=sys.argv[1])
"""
    process = start(NO_UNNAMED_FILES + die, str(tmp_path))
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    pool = RamPool.create(4, 4096, pool_dir=str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    pool.close()


def test_a_crash_loop_does_not_pile_up(start, tmp_path, on_old_filesystem):
    die = """
ram.os.unlink = lambda path: os.kill(os.getpid(), signal.SIGKILL)
ram._remove_left_over = lambda pool_dir: None
RamPool.create(64, 1 << 20, pool_dir=sys.argv[1])
"""
    for _ in range(3):
        start(NO_UNNAMED_FILES + die, str(tmp_path)).communicate(timeout=60)
    assert len(list(tmp_path.iterdir())) == 3
    RamPool.create(4, 4096, pool_dir=str(tmp_path)).close()
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_ours_is_left_alone(tmp_path, on_old_filesystem):
    (tmp_path / "kvtier-pool-notes").write_text("mine")
    (tmp_path / "kvtier-pool-folder").mkdir()
    (tmp_path / "kvtier-pool-link").symlink_to(tmp_path / "somewhere")
    (tmp_path / "empty").touch()
    before = sorted(tmp_path.iterdir())
    RamPool.create(4, 4096, pool_dir=str(tmp_path)).close()
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_of_another_user_is_left_alone(tmp_path, on_old_filesystem, monkeypatch):
    (tmp_path / "kvtier-pool-theirs").touch()
    monkeypatch.setattr(ram.os, "geteuid", lambda: os.getuid() + 1)
    RamPool.create(4, 4096, pool_dir=str(tmp_path)).close()
    assert [path.name for path in tmp_path.iterdir()] == ["kvtier-pool-theirs"]


def test_a_start_whose_name_is_reclaimed_under_it_goes_on(start, tmp_path, on_old_filesystem):
    """Two engines start at once in one folder: one sees the other's file in the instant in which it has a name."""
    pause = """
unlink = os.unlink
def slow(path):
    say(path)
    sys.stdin.readline()
    unlink(path)
ram.os.unlink = slow
"""
    slow = start(NO_UNNAMED_FILES + pause + SERVE, str(tmp_path), "", "7")
    assert read_line(slow).startswith(str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 1
    own = RamPool.create(64, MIB, pool_dir=str(tmp_path))
    own.slots()[:] = 9
    assert list(tmp_path.iterdir()) == []
    slow.stdin.write("go on\n")
    slow.stdin.flush()
    other = RamPool.attach(handle_of(slow))
    assert (other.slots() == 7).all()
    assert (own.slots() == 9).all()
    other.close()
    own.close()


# -- neighbours


@pytest.mark.parametrize("folder", ["", "shared"], ids=["memory file", "pool_dir"])
def test_two_engines_with_the_same_settings_have_pools_of_their_own(start, tmp_path, folder):
    """So do two data-parallel ranks, which are started from one configuration: nothing in it names the pool."""
    pool_dir = str(tmp_path) if folder else ""
    engines = [start(SERVE, pool_dir, "", str(value)) for value in (1, 2)]
    handles = [handle_of(engine) for engine in engines]
    assert len({(handle.device, handle.inode) for handle in handles}) == 2
    for value, handle in enumerate(handles, start=1):
        pool = RamPool.attach(handle)
        assert (pool.slots() == value).all()
        pool.slots()[:] = 10 * value
        pool.close()
    for value, engine in enumerate(engines, start=1):
        engine.stdin.write("look\n")
        engine.stdin.flush()
        assert read_line(engine) == f"{10 * value} {10 * value}"
    assert list(tmp_path.iterdir()) == []


def test_the_end_of_one_engine_takes_nothing_from_the_other(start, tmp_path):
    killed, other = (start(SERVE, str(tmp_path), "", str(value)) for value in (1, 2))
    gone, there = handle_of(killed), handle_of(other)
    kill(killed)
    with pytest.raises(PoolError):
        RamPool.attach(gone)
    pool = RamPool.attach(there)
    assert (pool.slots() == 2).all()
    pool.close()


def test_a_handle_does_not_fit_a_neighbours_pool(start):
    """As if the process id and the descriptor had been given to another engine since."""
    one, two = (handle_of(start(SERVE, "", "", str(value))) for value in (1, 2))
    mixed = PoolHandle(two.pid, two.fd, one.device, one.inode, one.num_slots, one.slot_bytes)
    with pytest.raises(PoolError, match="another file"):
        RamPool.attach(mixed)


# -- kill -9 of everything


def holders_of(device: int, inode: int, folder: str = "") -> list[int]:
    """Processes that have the file mapped or open. With a `folder`, which it is or was in: on a disk, the number of a
    file that is gone is soon another one's."""
    numbers = [f"{os.major(device):02x}:{os.minor(device):02x}", str(inode)]

    def is_it(link: Path) -> bool:
        status = os.stat(link)
        return (status.st_dev, status.st_ino) == (device, inode) and folder in os.readlink(link)

    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            is_open = any(map(is_it, (entry / "fd").iterdir()))
            maps = (entry / "maps").read_text().splitlines()
        except OSError:
            continue
        if is_open or any(line.split()[3:5] == numbers and folder in line for line in maps):
            found.append(int(entry.name))
    return found


@pytest.mark.parametrize("folder", ["", "shared"], ids=["memory file", "pool_dir"])
def test_kill_9_of_all_processes_leaves_no_one_with_the_memory(start, tmp_path, folder):
    creator = start(SERVE, str(tmp_path) if folder else "", "", "1")
    handle = handle_of(creator)
    worker = start(
        "pool = RamPool.attach(pickle.loads(base64.b64decode(sys.argv[1]))); say('attached'); sys.stdin.read()",
        base64.b64encode(pickle.dumps(handle)).decode(),
    )
    assert read_line(worker) == "attached"
    folder = folder and str(tmp_path)
    assert set(holders_of(handle.device, handle.inode, folder)) == {creator.pid, worker.pid}
    kill(creator)
    kill(worker)
    # no process and no name: the kernel has nothing to keep it for
    assert holders_of(handle.device, handle.inode, folder) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_kill_9_gives_back_the_room_of_the_pools_folder(start, tmp_path):
    """Seen from the filesystem itself."""
    before = os.statvfs(tmp_path)
    for round_ in range(3):
        process = start(SERVE, str(tmp_path), "", str(round_ + 1))
        handle = handle_of(process)
        kill(process)
        assert holders_of(handle.device, handle.inode, str(tmp_path)) == []
    after = os.statvfs(tmp_path)
    # three pools of 64 MiB would be 192; others may write here too
    assert (before.f_bfree - after.f_bfree) * after.f_frsize < 150 * MIB
    assert list(tmp_path.iterdir()) == []


def test_a_private_pool_dies_with_its_process(start):
    process = start(SERVE, "", "private", "1")
    handle = handle_of(process)
    assert "kvtier-pool" not in Path(f"/proc/{process.pid}/maps").read_text()
    kill(process)
    with pytest.raises(PoolError):
        RamPool.attach(handle)
