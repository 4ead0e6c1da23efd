"""The RAM pool: reserved whole, shared by file descriptor, and nothing left of it when its processes are gone."""

from __future__ import annotations

import base64
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.errors import ConfigurationError, KVTierError, PoolError
from kvtier.tiers import memory_limits, ram
from kvtier.tiers.ram import PoolHandle, RamPool, check_pool_size

MIB = 1 << 20
CHILD = """
import base64, pickle, sys
from kvtier.errors import PoolError
from kvtier.tiers.ram import RamPool

def attach(text):
    return RamPool.attach(pickle.loads(base64.b64decode(text)))

def show(handle):
    print(base64.b64encode(pickle.dumps(handle)).decode(), flush=True)
"""


def start(code: str, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD + code, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def run(code: str, *args: str) -> str:
    done = subprocess.run([sys.executable, "-c", CHILD + code, *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def encode(handle: PoolHandle) -> str:
    return base64.b64encode(pickle.dumps(handle)).decode()


def shared_memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Shmem in /proc/meminfo")


@pytest.fixture(params=["memory", "folder", "private"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RamPool]:
    kwargs = {"memory": {}, "folder": {"pool_dir": str(tmp_path)}, "private": {"private": True}}[request.param]
    pool = RamPool.create(5, 3 * 4096, **kwargs)
    yield pool
    pool.close()


@pytest.fixture(params=[None, "folder"])
def pool_dir(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    return str(tmp_path) if request.param else None


def test_a_pool_is_slots_of_zeros(pool: RamPool) -> None:
    slots = pool.slots()
    assert slots.shape == (5, 3 * 4096)
    assert slots.flags.c_contiguous
    assert slots.flags.writeable
    assert not slots.any()
    slots[4, -1] = 7
    assert pool.slots()[4, -1] == 7


def test_every_byte_is_reserved_at_creation(pool_dir: str | None) -> None:
    pool = RamPool.create(64, MIB, pool_dir=pool_dir)
    assert os.stat(pool.handle.fd).st_blocks * 512 >= 64 * MIB
    pool.close()


def test_no_folder_lists_it(pool_dir: str | None, tmp_path: Path) -> None:
    in_shm = set(os.listdir("/dev/shm"))
    pool = RamPool.create(4, 4096, pool_dir=pool_dir)
    assert os.stat(pool.handle.fd).st_nlink == 0
    assert list(tmp_path.iterdir()) == []
    assert not [name for name in set(os.listdir("/dev/shm")) - in_shm if "kvtier" in name]
    pool.close()


def test_a_filesystem_without_unnamed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def no_unnamed(path, flags, *args, **kwargs):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return real_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(ram.os, "open", no_unnamed)
    pool = RamPool.create(4, 4096, pool_dir=str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    pool.slots()[:] = 1
    monkeypatch.undo()
    assert run("print(attach(sys.argv[1]).slots().sum())", encode(pool.handle)) == str(4 * 4096)
    pool.close()


def test_the_same_process_shares_the_mapping(pool: RamPool) -> None:
    other = RamPool.attach(pool.handle)
    assert other.slots() is pool.slots()
    pool.close()
    other.slots()[0] = 3  # the first one's close took nothing away
    assert (RamPool.attach(other.handle).slots()[0] == 3).all()
    other.close()


def test_another_process_reads_and_writes_it(pool_dir: str | None) -> None:
    pool = RamPool.create(4, 8192, pool_dir=pool_dir)
    pool.slots()[1] = 11
    code = """
pool = attach(sys.argv[1])
print(pool.slots().shape, int(pool.slots()[1].min()), int(pool.slots()[1].max()))
pool.slots()[2] = 22
pool.close()
"""
    assert run(code, encode(pool.handle)) == "(4, 8192) 11 11"
    assert (pool.slots()[2] == 22).all()
    assert not pool.slots()[3].any()
    pool.close()


def test_a_forked_process_attaches_too() -> None:
    code = """
import os
pool = RamPool.create(2, 4096)
child = os.fork()
if child == 0:
    other = RamPool.attach(pool.handle)
    other.slots()[1] = 5
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(int(pool.slots()[1].min()))
"""
    assert run(code) == "5"


def test_it_outlives_its_creator_only_where_it_is_attached(pool_dir: str | None, tmp_path: Path) -> None:
    creator = start(
        """
pool = RamPool.create(256, 1 << 20, pool_dir=sys.argv[1] or None)
pool.slots()[3] = 33
show(pool.handle)
sys.stdin.read()
""",
        pool_dir or "",
    )
    assert creator.stdout is not None
    handle = pickle.loads(base64.b64decode(creator.stdout.readline()))
    attached = RamPool.attach(handle)
    creator.send_signal(signal.SIGKILL)
    creator.communicate()
    assert (attached.slots()[3] == 33).all()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(PoolError, match=f"process {handle.pid}"):
        RamPool.attach(handle)
    attached.close()


def test_kill_9_of_every_process_gives_the_memory_back() -> None:
    size_bytes = 512 * MIB
    creator = start(
        """
pool = RamPool.create(512, 1 << 20)
show(pool.handle)
sys.stdin.read()
"""
    )
    assert creator.stdout is not None
    handle_text = creator.stdout.readline().strip()
    user = start("pool = attach(sys.argv[1]); print('attached', flush=True); sys.stdin.read()", handle_text)
    assert user.stdout is not None
    assert select.select([user.stdout], [], [], 60)[0]
    assert user.stdout.readline() == "attached\n"
    held_bytes = shared_memory_bytes()
    for process in (creator, user):
        process.send_signal(signal.SIGKILL)
        process.communicate()
    for _ in range(100):  # others on this machine use shared memory too; half of it back is ours
        if shared_memory_bytes() < held_bytes - size_bytes // 2:
            break
        time.sleep(0.1)
    assert shared_memory_bytes() < held_bytes - size_bytes // 2


def test_after_close_it_cannot_be_attached(pool: RamPool) -> None:
    handle = pool.handle
    pool.close()
    pool.close()
    with pytest.raises(PoolError, match="closed"):
        pool.slots()
    with pytest.raises(PoolError):
        RamPool.attach(handle)
    assert "closed" in pool.describe()


def test_a_descriptor_that_is_another_file_now_is_refused(tmp_path: Path) -> None:
    pool = RamPool.create(2, 4096)
    pool.close()
    fd = os.open(tmp_path / "other", os.O_CREAT | os.O_RDWR)
    os.ftruncate(fd, 2 * 4096)  # large enough: only its identity differs
    if fd != pool.handle.fd:
        os.dup2(fd, pool.handle.fd)
        os.close(fd)
    try:
        with pytest.raises(PoolError, match="another file"):
            RamPool.attach(pool.handle)
    finally:
        os.close(pool.handle.fd)


def test_a_handle_that_claims_more_than_there_is_is_refused() -> None:
    pool = RamPool.create(2, 4096)
    handle = pool.handle
    bigger = PoolHandle(handle.pid, handle.fd, handle.device, handle.inode, 3, 4096)
    with pytest.raises(PoolError):
        RamPool.attach(bigger)
    pool.close()


def test_a_private_pool_is_for_its_process() -> None:
    pool = RamPool.create(2, 4096, private=True)
    code = """
try:
    attach(sys.argv[1])
except PoolError as exc:
    print(exc)
"""
    assert "private" in run(code, encode(pool.handle))
    other = RamPool.create(2, 4096, private=True)
    assert other.handle != pool.handle
    other.close()
    pool.close()


def test_close_with_a_view_alive_is_safe(pool: RamPool) -> None:
    view = pool.slots()[1]
    pool.close()
    view[:] = 1  # not allowed, and still no crash
    assert view.all()


def test_nobody_can_shrink_a_memory_file() -> None:
    pool = RamPool.create(2, 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(pool.handle.fd, 0)
    pool.close()


def test_open_files_are_given_back(pool_dir: str | None) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        pool = RamPool.create(2, 4096, pool_dir=pool_dir)
        RamPool.attach(pool.handle).close()
        pool.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_describe_says_what_the_system_shows(pool: RamPool) -> None:
    text = pool.describe()
    assert "\n" not in text
    assert "5 slots of 12288 bytes" in text
    assert "pages" in text


def test_describe_reads_the_page_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pool = RamPool.create(4, MIB, private=True)
    address = pool.slots().ctypes.data
    smaps = tmp_path / "smaps"

    def show(huge_kb: int) -> str:
        smaps.write_text(
            f"{address - 4096:x}-{address:x} rw-p 0 00:00 0\nKernelPageSize: 64 kB\nAnonHugePages: 8192 kB\n"
            f"{address:x}-{address + 4 * MIB:x} rw-p 0 00:00 0\nSize: 4096 kB\nKernelPageSize: 4 kB\n"
            f"AnonHugePages: {huge_kb} kB\nVmFlags: rd wr\n"
            f"{address + 4 * MIB:x}-{address + 8 * MIB:x} rw-p 0 00:00 0\nAnonHugePages: 999 kB\n"
        )
        return pool.describe()

    real_open = open
    monkeypatch.setattr("builtins.open", lambda path, *a: real_open(smaps if path == "/proc/self/smaps" else path, *a))
    assert "4 KiB pages" in show(0)
    assert "50% in huge pages" in show(2048)
    assert show(4096).endswith("huge pages")
    pool.close()


# Refusals: one clear line, nothing left behind.


def check_refused(error: type[Exception], words: list[str], num_slots: int = 1, **kwargs: object) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(error) as caught:
        RamPool.create(num_slots, 4096, **kwargs)
    text = str(caught.value)
    assert "\n" not in text
    assert all(word in text for word in words), text
    assert len(os.listdir("/proc/self/fd")) == before


def test_sizes_that_are_none() -> None:
    check_refused(ConfigurationError, ["0 slots"], num_slots=0)
    with pytest.raises(ConfigurationError, match="-1"):
        RamPool.create(1, -1)
    with pytest.raises(ConfigurationError, match="0"):
        check_pool_size(0)


def test_folders_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check_refused(ConfigurationError, ["nowhere", "does not exist"], pool_dir=str(tmp_path / "nowhere"))
    check_refused(ConfigurationError, ["file", "not a folder"], pool_dir=str(tmp_path / "file"))
    check_refused(ConfigurationError, ["private", str(tmp_path)], pool_dir=str(tmp_path), private=True)


def test_a_folder_that_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limits.os, "access", lambda *args: False)
    check_refused(ConfigurationError, [str(tmp_path), "not writable"], pool_dir=str(tmp_path))


def test_a_folder_that_refuses_files() -> None:
    check_refused(KVTierError, ["/proc/self"], pool_dir="/proc/self")


@pytest.mark.parametrize("kwargs", [{}, {"private": True}, {"pool_dir": "folder"}])
def test_too_large_is_refused_before_anything_is_taken(kwargs: dict, tmp_path: Path) -> None:
    if kwargs.get("pool_dir"):
        kwargs = {"pool_dir": str(tmp_path)}
    check_refused(ConfigurationError, [str(2**50), "GiB", "leaves"], num_slots=2**38, **kwargs)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("private", [True, False])
def test_memory_that_runs_out_while_reserving(private: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(address: int, size_bytes: int) -> bool:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(ram, "_populate", no_memory)
    check_refused(PoolError, ["4096 bytes", "Cannot allocate memory"], private=private)


def test_a_folder_that_fills_up_while_reserving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ram.os, "posix_fallocate", full)
    check_refused(PoolError, [str(tmp_path), "No space left"], pool_dir=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("private", [True, False])
def test_systems_that_cannot_populate(private: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ram, "_populate", lambda *args: False)
    pool = RamPool.create(64, MIB, private=private)
    if not private:
        assert os.stat(pool.handle.fd).st_blocks * 512 >= 64 * MIB
    assert not pool.slots().any()
    pool.close()


# Limits, from files like those of real systems.


def fake_root(tmp_path: Path, files: dict[str, str]) -> str:
    for name, content in {"proc/meminfo": "MemTotal: 99 kB\nMemAvailable:    4096 kB\n", **files}.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return str(tmp_path / "root")


def limits(tmp_path: Path, files: dict[str, str]) -> dict[str, int]:
    root = fake_root(tmp_path, files)
    found = memory_limits.memory_limits(root=root)
    return {limit.name.replace(root, ""): limit.available_bytes for limit in found}


def test_mem_available(tmp_path: Path) -> None:
    assert limits(tmp_path, {}) == {"MemAvailable": 4096 * 1024}


def test_control_group_v2_own_and_parents(tmp_path: Path) -> None:
    group = "sys/fs/cgroup"
    found = limits(
        tmp_path,
        {
            "proc/self/cgroup": "0::/outer/inner\n",
            f"{group}/outer/inner/memory.max": "max\n",
            f"{group}/outer/inner/memory.current": "100\n",
            f"{group}/outer/memory.max": "5000\n",
            f"{group}/outer/memory.current": "3000\n",
            f"{group}/outer/memory.stat": "anon 1000\ninactive_file 500\nactive_file 9\n",
        },
    )
    assert found == {"MemAvailable": 4096 * 1024, "memory.max of control group /sys/fs/cgroup/outer": 2500}


def test_control_group_v2_in_a_container(tmp_path: Path) -> None:
    found = limits(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../../host/path\n",
            "sys/fs/cgroup/memory.max": "1000",
            "sys/fs/cgroup/memory.current": "1200",
        },
    )
    assert found["memory.max of control group /sys/fs/cgroup"] == 0


def test_control_group_v1(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/a"
    found = limits(
        tmp_path,
        {
            "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/a\n",
            f"{group}/memory.limit_in_bytes": "1000\n",
            f"{group}/memory.usage_in_bytes": "400\n",
            f"{group}/memory.stat": "total_inactive_file 100\n",
        },
    )
    assert found["memory.limit_in_bytes of control group /sys/fs/cgroup/memory/a"] == 700


def test_huge_page_filesystems_are_limited_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limits, "filesystem_type", lambda *args: "hugetlbfs")
    found = memory_limits.memory_limits(str(tmp_path), root=fake_root(tmp_path, {}))
    assert len(found) == 1
    assert str(tmp_path) in found[0].name


def test_the_smallest_limit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = memory_limits.Limit
    monkeypatch.setattr(memory_limits, "memory_limits", lambda *args: [limit("a lot", 99), limit("the least", 7)])
    check_pool_size(7)
    with pytest.raises(ConfigurationError, match=r"8 bytes .* the least leaves 7 bytes"):
        check_pool_size(8)


def test_filesystem_types() -> None:
    assert memory_limits.filesystem_type("/proc") == "proc"
