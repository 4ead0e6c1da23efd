"""Blocks as files in the shards of a folder that several machines use at once, without a lock.

    kvtier-shards            how many shards there are, as text: said once, by whoever comes first
    000/ .. fff/             a shard: files that are whole, under their names; files on their way, as `.new-RANDOM`

A file is whole when it has its name: it is written under another one and renamed. A shard keeps to its share of the
capacity alone: keys are spread evenly, so nobody has to know the sum. Recency is the time of modification, which a use
renews. Nothing else in the folder is touched, and no link is followed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import xxhash

from kvtier.errors import KVTierError

MARKER = "kvtier-shards"
SHARD_BYTES = 256 << 20
"""A shard's share at least, where there is more than one."""
MAX_SHARDS = 4096
MAX_SCAN = 1 << 16
"""Files of a shard that are looked at, at most; one with more is as good as full."""
RESCAN_S = 10.0
RESCAN_SHARE = 32
"""What others have written into a shard goes unnoticed for so long at most, and while one writes less there than one
part in so many of its share."""
ABANDONED_S = 3600.0
"""A file that is on its way for so long was left there by a process that died."""
_NAME = re.compile(r"v\d+\.[0-9a-f]{32}\.[0-9a-f]{1,16}-[0-9a-f]{16}\.[0-9a-f]{2,128}")
_NEW = re.compile(r"\.new-[0-9a-f]{16}")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class FolderGoneError(KVTierError):
    """The folder is not what it was: not mounted, removed, emptied."""


@dataclass(slots=True)
class _Filled:
    """What is known of a shard."""

    num_bytes: int
    num_since_scan: int
    """Bytes that this process has written since."""
    scanned_s: float


class Shards:
    """The folder at `path`, for all threads of a process. Every method may take as long as the filesystem does, and
    raises OSError where that fails."""

    def __init__(self, path: str, capacity_bytes: int) -> None:
        self._path = path
        self._capacity_bytes = capacity_bytes
        self._num_shards = 0
        """0: not seen yet."""
        self._filled: dict[str, _Filled] = {}
        self._real: set[str] = set()
        """Shards that were seen, and are no links."""
        self._lock = threading.Lock()

    def open(self) -> int:
        """A descriptor of the folder, which the caller owns. Makes the folder when this process first comes. Raises
        FolderGoneError if it was there before, and is not, or is another one."""
        if not self._num_shards:
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                os.mkdir(self._path)
        try:
            root = os.open(self._path, _FOLDER & ~os.O_NOFOLLOW)
        except FileNotFoundError:
            raise FolderGoneError(f"{self._path} is not there") from None
        try:
            self.check(root)
        except BaseException:
            os.close(root)
            raise
        return root

    def check(self, root: int) -> None:
        """Raises FolderGoneError unless this is the folder that it was."""
        num_shards = self._read_marker(root)
        if not num_shards and self._num_shards:  # what was mounted there is not: nothing may be written
            raise FolderGoneError(f"{self._path} has lost its file {MARKER!r}")
        if not num_shards:
            self._write_marker(root)
            num_shards = self._read_marker(root)
        if not 1 <= num_shards <= MAX_SHARDS or self._num_shards not in (0, num_shards):
            raise FolderGoneError(f"{self._path} has a file {MARKER!r} that says {num_shards}")
        self._num_shards = num_shards

    def path_of(self, root: int, name: str) -> str:
        """Of the file of this name, from the folder on. Raises FileNotFoundError or NotADirectoryError where its shard
        is not there, or is a link."""
        shard = self._shard_of(name)
        if shard not in self._real:
            os.close(os.open(shard, _FOLDER, dir_fd=root))
            self._real.add(shard)
        return f"{shard}/{name}"

    @contextmanager
    def writing(self, root: int, name: str, size: int) -> Iterator[int]:
        """A descriptor of a new file, which has its name and is whole when the block ends without an error. `size`
        bytes are made room for before: uses that are longest ago go."""
        shard = self._shard_of(name)
        folder = self._open_shard(root, shard)
        new = f".new-{secrets.token_hex(8)}"
        try:
            self._make_room(shard, folder, size)
            file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=folder)
            try:
                try:
                    yield file
                finally:
                    os.close(file)
                os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(new, dir_fd=folder)
                raise
        finally:
            os.close(folder)

    def free_bytes(self, root: int) -> int:
        """Of the filesystem."""
        figures = os.fstatvfs(root)
        return figures.f_bavail * figures.f_frsize

    # -- private ---------------------------------------------------------------------------------------------

    def _shard_of(self, name: str) -> str:
        return f"{xxhash.xxh3_64_intdigest(name.encode()) % self._num_shards:03x}"

    def _open_shard(self, root: int, shard: str) -> int:
        try:
            return os.open(shard, _FOLDER, dir_fd=root)
        except FileNotFoundError:
            self.check(root)
            with contextlib.suppress(FileExistsError):
                os.mkdir(shard, dir_fd=root)
            return os.open(shard, _FOLDER, dir_fd=root)

    def _make_room(self, shard: str, folder: int, size: int) -> None:
        share = self._capacity_bytes * 15 // 16 // self._num_shards
        now_s = time.monotonic()
        with self._lock:
            known = self._filled.get(shard)
            if (
                known
                and now_s - known.scanned_s < RESCAN_S
                and known.num_bytes + size <= share
                and known.num_since_scan + size <= share // RESCAN_SHARE
            ):
                known.num_bytes += size
                known.num_since_scan += size
                return
        total, files, is_all = _scan(folder)
        if not is_all:  # what the rest has nobody knows: with so many files the shard is full
            total = max(total, share)
        if total + size > share:
            # a bit more than needed, or every store would look at the whole shard
            goal = max(0, min(share - size, share * 7 // 8))
            for _, name, num_bytes in sorted(files):
                if total <= goal:
                    break
                with contextlib.suppress(FileNotFoundError):  # another machine was faster
                    os.unlink(name, dir_fd=folder)
                total -= num_bytes
        if total + size > share:
            raise OSError(f"a shard of {share} bytes has no room for {size} more")
        with self._lock:
            self._filled[shard] = _Filled(total + size, size, now_s)

    def _read_marker(self, root: int) -> int:
        """How many shards there are; 0: nobody has said so yet."""
        try:
            file = os.open(MARKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=root)
        except FileNotFoundError:
            return 0
        try:
            text = os.read(file, 100).strip()
        finally:
            os.close(file)
        return int(text) if text.isdigit() else -1

    def _write_marker(self, root: int) -> None:
        """Whole at once, and only once: whoever comes second finds the first one's."""
        num_shards = 1
        while num_shards < MAX_SHARDS and 2 * num_shards * SHARD_BYTES <= self._capacity_bytes:
            num_shards *= 2
        new = f".new-{secrets.token_hex(8)}"
        file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=root)
        try:
            os.write(file, b"%d\n" % num_shards)
            os.fsync(file)
        finally:
            os.close(file)
        try:
            with contextlib.suppress(FileExistsError):
                os.link(new, MARKER, src_dir_fd=root, dst_dir_fd=root, follow_symlinks=False)
        finally:
            os.unlink(new, dir_fd=root)


def _scan(folder: int) -> tuple[int, list[tuple[int, str, int]], bool]:
    """Bytes in a shard; of its whole files the time of the last use, name, bytes; whether that is all of them. Removes
    what was abandoned."""
    total, files = 0, []
    with os.scandir(folder) as entries:
        for entry in islice(entries, MAX_SCAN):
            try:
                status = os.stat(entry.name, dir_fd=folder, follow_symlinks=False)
                if _NEW.fullmatch(entry.name) and status.st_mtime < time.time() - ABANDONED_S:
                    os.unlink(entry.name, dir_fd=folder)
                    continue
            except FileNotFoundError:
                continue
            total += status.st_size
            if _NAME.fullmatch(entry.name) and stat.S_ISREG(status.st_mode):
                files.append((status.st_mtime_ns, entry.name, status.st_size))
        return total, files, next(entries, None) is None
