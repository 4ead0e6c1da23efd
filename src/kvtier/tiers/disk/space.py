"""How the caches in one folder share its space: listing them, removing them, making room. And who owns one."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvtier.errors import TierError
from kvtier.tiers.disk.filesystem import FileSystem, read_fully, write_fully
from kvtier.tiers.disk.layout import (
    CACHE_PREFIX,
    EPOCH_NAME,
    LOCK_NAME,
    PAGE_BYTES,
    SLAB_NAME,
    TABLE_NAME,
)

_LOCK_TRIES = 100
_LOCK_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class CacheFolder:
    """One cache among those in a folder."""

    path: str
    used_bytes: int
    """On the medium, folder and lock file included."""
    modified_s: float
    """Unix time of the last change to its table; 0.0 without one."""


@contextlib.contextmanager
def folder_lock(files: FileSystem, root: str) -> Iterator[None]:
    """Held by whoever opens or removes caches in `root`. Waits for others for some seconds; raises TierError."""
    fd = files.open(os.path.join(root, LOCK_NAME), create=True)
    try:
        for _ in range(_LOCK_TRIES):
            if files.lock(fd):
                break
            time.sleep(_LOCK_PAUSE_S)
        else:
            raise TierError(f"another process is opening or removing a cache in {root}")
        yield
    finally:
        files.close(fd)


def own_cache(files: FileSystem, path: str) -> int:
    """Makes this descriptor the only owner of the cache in `path` until it is closed. Raises TierError, OSError."""
    fd = files.open(os.path.join(path, LOCK_NAME), create=True)
    try:
        if not files.lock(fd):
            raise TierError(f"the disk cache in {path} is in use by another process ({_owner(files, fd)})")
        owner = np.frombuffer(f"process {os.getpid()}\n".encode().ljust(32), np.uint8)
        write_fully(files, fd, [owner], 0)
    except BaseException:
        files.close(fd)
        raise
    return fd


def list_caches(files: FileSystem, root: str) -> list[CacheFolder]:
    """The caches in `root`, the one unchanged for longest first. Raises OSError if `root` cannot be read."""
    caches = []
    for name in files.list_folder(root):
        if name.startswith(CACHE_PREFIX):
            with contextlib.suppress(OSError):  # it has just been removed
                caches.append(_describe(files, os.path.join(root, name)))
    return sorted(caches, key=lambda cache: (cache.modified_s, cache.path))


def is_live(files: FileSystem, path: str) -> bool:
    """Whether a process owns the cache. Disturbs nobody. Raises OSError if the lock file cannot be opened."""
    try:
        fd = files.open(os.path.join(path, LOCK_NAME), write=False)
    except FileNotFoundError:
        return False
    try:
        return files.is_locked(fd)
    finally:
        files.close(fd)


def remove_cache(files: FileSystem, path: str) -> bool:
    """Removes a cache that nobody owns. False if somebody does. Under `folder_lock`. Raises OSError."""
    if is_live(files, path):
        return False
    # the table first: a removal that is interrupted leaves nothing to serve
    first = (TABLE_NAME, SLAB_NAME, EPOCH_NAME)
    others = [name for name in files.list_folder(path) if name not in first]
    for name in (*first, *others):
        with contextlib.suppress(FileNotFoundError):
            files.unlink(os.path.join(path, name))
    files.remove_folder(path)
    return True


def room_beside_others(
    files: FileSystem, root: str, own_path: str, *, wanted_bytes: int, cap_bytes: int, keep: bool
) -> int:
    """How much of `cap_bytes` the cache in `own_path` may take, at most `wanted_bytes`.

    What other caches in `root` take is not there for it. Unless `keep`, those that nobody owns are removed, oldest
    first, as far as that is needed. Under `folder_lock`. Raises OSError.
    """
    others = [cache for cache in list_caches(files, root) if cache.path != own_path]
    taken_bytes = sum(cache.used_bytes for cache in others)
    for cache in others:
        if keep or taken_bytes + wanted_bytes <= cap_bytes:
            break
        if remove_cache(files, cache.path):
            taken_bytes -= cache.used_bytes
    return min(wanted_bytes, cap_bytes - taken_bytes)


def _describe(files: FileSystem, path: str) -> CacheFolder:
    used_bytes, modified_s = PAGE_BYTES, 0.0
    for name in files.list_folder(path):
        with contextlib.suppress(FileNotFoundError):
            used_bytes += files.used_bytes(os.path.join(path, name))
            if name == TABLE_NAME:
                modified_s = files.modified_s(os.path.join(path, name))
    return CacheFolder(path, used_bytes, modified_s)


def _owner(files: FileSystem, fd: int) -> str:
    content = np.zeros(32, np.uint8)
    with contextlib.suppress(OSError):
        read_fully(files, fd, [content], 0)
    return content.tobytes().decode(errors="replace").strip() or "process unknown"
