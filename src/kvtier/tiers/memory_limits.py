"""How much memory a RAM pool may take here, by every limit that applies. Reads /proc and /sys, changes nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from kvtier.errors import ConfigurationError

IN_MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})
HUGETLBFS = "hugetlbfs"


class Limit(NamedTuple):
    """One limit: what it is called and how many bytes it leaves."""

    name: str
    available_bytes: int


def check_pool_size(size_bytes: int, pool_dir: str | None = None) -> None:
    """Returns if a pool of `size_bytes` bytes fits now, in `pool_dir` or (None) in anonymous memory.

    Checked are MemAvailable, the memory limit of every control group that this process is in, and the free bytes
    of `pool_dir`'s filesystem. What a control group counts as inactive file cache can be dropped and is not held
    against the pool. Raises ConfigurationError naming the size, what is available and by which limit.
    """
    if size_bytes < 1:
        raise ConfigurationError(f"a RAM pool must have at least 1 byte, got {size_bytes}")
    if pool_dir is not None:
        check_pool_dir(pool_dir)
    limit = min(memory_limits(pool_dir), key=lambda limit: limit.available_bytes, default=None)
    if limit is not None and size_bytes > limit.available_bytes:
        where = f" in {pool_dir}" if pool_dir is not None else ""
        raise ConfigurationError(
            f"a RAM pool of {size_bytes} bytes ({size_bytes / 2**30:.2f} GiB){where} does not fit: {limit.name} "
            f"leaves {limit.available_bytes} bytes ({limit.available_bytes / 2**30:.2f} GiB)"
        )


def check_pool_dir(pool_dir: str) -> None:
    """Raises ConfigurationError if `pool_dir` is not a folder in which files can be made."""
    if not os.path.isdir(pool_dir):
        what = "is not a folder" if os.path.exists(pool_dir) else "does not exist"
        raise ConfigurationError(f"pool_dir {pool_dir!r} {what}")
    if not os.access(pool_dir, os.W_OK | os.X_OK):
        raise ConfigurationError(f"pool_dir {pool_dir!r} is not writable by this user")


def memory_limits(pool_dir: str | None = None, root: str = "/") -> list[Limit]:
    """Every limit that applies to a pool in `pool_dir` (None: anonymous memory). Files are read below `root`."""
    limits = []
    filesystem = None
    if pool_dir is not None:
        filesystem = filesystem_type(pool_dir, root)
        free = os.statvfs(pool_dir)
        limits.append(Limit(f"the {filesystem or 'filesystem'} of {pool_dir}", free.f_bavail * free.f_frsize))
    if filesystem != HUGETLBFS:  # its pages were set aside before and count nowhere else
        limits += _mem_available(root)
        limits += _cgroup_limits(root)
    return limits


def filesystem_type(path: str, root: str = "/") -> str | None:
    """The type of the filesystem that holds `path`, for example `"tmpfs"`; None if unknown."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in _read_lines(Path(root, "proc/self/mountinfo")):
        fields, _, kind = line.partition(" - ")
        if fields.split()[2:3] == [wanted] and kind:
            return kind.split()[0]
    return None


def _mem_available(root: str) -> list[Limit]:
    for line in _read_lines(Path(root, "proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return [Limit("MemAvailable", int(line.split()[1]) * 1024)]
    return []


def _cgroup_limits(root: str) -> list[Limit]:
    """Limits of this process's memory control groups, from its own up to the root, v1 and v2."""
    limits = []
    for line in _read_lines(Path(root, "proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            bases = [Path(root, "sys/fs/cgroup"), Path(root, "sys/fs/cgroup/unified")]
            names = ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            bases = [Path(root, "sys/fs/cgroup/memory")]
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for base in bases:
            # inside a container the path may be the host's: what is mounted at the base is then our own group
            for depth in range(len(parts), -1, -1):
                limits += _cgroup_limit(base.joinpath(*parts[:depth]), *names)
    return limits


def _cgroup_limit(folder: Path, max_name: str, current_name: str, cache_name: str) -> list[Limit]:
    maximum, current = _read_int(folder / max_name), _read_int(folder / current_name)
    if maximum is None or current is None:
        return []  # no limit ("max"), or no such group here
    cache = 0
    for line in _read_lines(folder / "memory.stat"):
        name, _, value = line.partition(" ")
        if name == cache_name:
            cache = int(value)
    return [Limit(f"{max_name} of control group {folder}", max(0, maximum - max(0, current - cache)))]


def _read_int(path: Path) -> int | None:
    lines = _read_lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
