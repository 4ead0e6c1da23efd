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
_OWNER_BYTES = 64


@dataclass(frozen=True, slots=True)
class SpaceLimits:
    """What a tier may take in one folder."""

    cap_bytes: int
    """All caches in the folder together."""
    share_bytes: int
    """Of that, the tier's own one at most."""
    keep_others: bool
    """Whether caches that nobody owns are left alone."""
    min_free_bytes: int
    """What stays free on the filesystem."""
    grow_bytes: int
    """The slab grows by so much at a time."""


@dataclass(frozen=True, slots=True)
class CacheFolder:
    """One cache among those in a folder."""

    path: str
    used_bytes: int
    """On the medium, folder and lock file included."""
    modified_s: float
    """Unix time of the last change to its table; 0.0 without one."""
    claimed_bytes: int
    """What the process that owns it may make of it; 0 if nobody owns it."""

    @property
    def is_live(self) -> bool:
        """Whether a process owns it."""
        return self.claimed_bytes > 0

    @property
    def counted_bytes(self) -> int:
        """What it takes of the cap of all caches in the folder."""
        return max(self.used_bytes, self.claimed_bytes)


@contextlib.contextmanager
def folder_lock(files: FileSystem, root: str) -> Iterator[None]:
    """Held by whoever opens, grows or removes caches in `root`. Waits for others for some seconds; raises TierError."""
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
            owner = _read_owner(files, fd)[0]
            raise TierError(f"the disk cache in {path} is in use by another process ({owner})")
    except BaseException:
        files.close(fd)
        raise
    return fd


def write_owner(files: FileSystem, lock_fd: int, claimed_bytes: int) -> None:
    """Says in the lock file who owns the cache and how large it may become. Raises OSError."""
    content = f"process {os.getpid()} {claimed_bytes}\n".encode().ljust(_OWNER_BYTES)
    write_fully(files, lock_fd, [np.frombuffer(content, np.uint8)], 0)


def list_caches(files: FileSystem, root: str) -> list[CacheFolder]:
    """The caches in `root`, the one unchanged for longest first. Raises OSError if `root` cannot be read."""
    caches = []
    for name in files.list_folder(root):
        if name.startswith(CACHE_PREFIX):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # it has just been removed
                caches.append(_describe(files, os.path.join(root, name)))
    return sorted(caches, key=lambda cache: (cache.modified_s, cache.path))


def remove_cache(files: FileSystem, path: str) -> bool:
    """Removes a cache that nobody owns. False if somebody does. Under `folder_lock`. Raises OSError."""
    if _claimed_bytes(files, path):
        return False
    # the table first: a removal that is interrupted leaves nothing to serve
    first = (TABLE_NAME, SLAB_NAME, EPOCH_NAME)
    others = [name for name in files.list_folder(path) if name not in first]
    for name in (*first, *others):
        with contextlib.suppress(FileNotFoundError):
            files.unlink(os.path.join(path, name))
    files.remove_folder(path)
    return True


def room_for(files: FileSystem, root: str, own_path: str, limits: SpaceLimits) -> int:
    """How large the cache in `own_path` may become beside the other caches in `root`.

    Caches that nobody owns are in the way only if they are to be kept. Under `folder_lock`. Raises OSError.
    """
    others = [cache for cache in list_caches(files, root) if cache.path != own_path]
    taken_bytes = sum(cache.counted_bytes for cache in others if limits.keep_others or cache.is_live)
    return min(limits.share_bytes, limits.cap_bytes - taken_bytes)


def make_room(files: FileSystem, root: str, own_path: str, own_bytes: int, limits: SpaceLimits) -> bool:
    """Whether `own_bytes` and the other caches are within the cap, after removing what may go, oldest first.

    Under `folder_lock`. Raises OSError.
    """
    others = [cache for cache in list_caches(files, root) if cache.path != own_path]
    total_bytes = own_bytes + sum(cache.counted_bytes for cache in others)
    for cache in others:
        if total_bytes <= limits.cap_bytes:
            break
        if not limits.keep_others and remove_cache(files, cache.path):
            total_bytes -= cache.counted_bytes
    return total_bytes <= limits.cap_bytes


def _describe(files: FileSystem, path: str) -> CacheFolder:
    used_bytes, modified_s = PAGE_BYTES, 0.0
    for name in files.list_folder(path):
        with contextlib.suppress(FileNotFoundError):
            used_bytes += files.used_bytes(os.path.join(path, name))
            if name == TABLE_NAME:
                modified_s = files.modified_s(os.path.join(path, name))
    return CacheFolder(path, used_bytes, modified_s, _claimed_bytes(files, path))


def _claimed_bytes(files: FileSystem, path: str) -> int:
    """What the owner of the cache claims; 0 if nobody owns it. Disturbs nobody."""
    try:
        fd = files.open(os.path.join(path, LOCK_NAME), write=False)
    except FileNotFoundError:
        return 0
    try:
        return max(1, _read_owner(files, fd)[1]) if files.is_locked(fd) else 0
    finally:
        files.close(fd)


def _read_owner(files: FileSystem, fd: int) -> tuple[str, int]:
    """Who the lock file says owns the cache, and what it claims."""
    content = np.zeros(_OWNER_BYTES, np.uint8)
    with contextlib.suppress(OSError):
        read_fully(files, fd, [content], 0)
    words = content.tobytes().decode(errors="replace").split()
    if len(words) == 3 and words[2].isdigit():
        return f"process {words[1]}", int(words[2])
    return "process unknown", 0
