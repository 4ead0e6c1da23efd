"""The handful of system calls that the disk tier makes, as one object: the seam for faults and simulated disks.

Everything raises OSError as the system does, and every call that may take long runs without the GIL.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

Buffer = npt.NDArray[np.uint8]
"""A flat, contiguous run of bytes."""

_LOCK = struct.Struct("@hhqqi4x")
"""struct flock: type, whence, start, length (0: to the end), pid."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class FileSystem:
    """The machine's filesystems. Files are descriptors; paths are absolute."""

    def open(self, path: str, *, create: bool = False, write: bool = True, direct: bool = False) -> int:
        """Opens a file; with `direct`, past the page cache: OSError EINVAL where the filesystem cannot."""
        flags = os.O_CLOEXEC | (os.O_RDWR if write else os.O_RDONLY) | (os.O_CREAT if create else 0)
        return os.open(path, flags | (os.O_DIRECT if direct else 0), 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Bytes read into `buffers`; fewer than they hold at the end of the file, or for no reason at all."""
        return os.preadv(fd, cast(Any, buffers), offset)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Bytes written from `buffers`; possibly fewer than they hold."""
        return os.pwritev(fd, cast(Any, buffers), offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def sync_folder(self, path: str) -> None:
        """Makes the names in the folder durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def truncate(self, fd: int, size_bytes: int) -> None:
        os.ftruncate(fd, size_bytes)

    def allocate(self, fd: int, size_bytes: int) -> bool:
        """Makes the file `size_bytes` long with every byte reserved. False: longer, but nothing reserved."""
        while _libc.fallocate(fd, 0, 0, size_bytes) != 0:
            code = ctypes.get_errno()
            if code in (errno.EOPNOTSUPP, errno.ENOSYS):
                os.ftruncate(fd, size_bytes)
                return False
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))
        return True

    def size_bytes(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def has_name(self, fd: int) -> bool:
        """False once the file has been deleted."""
        return os.fstat(fd).st_nlink > 0

    def lock(self, fd: int) -> bool:
        """Locks the file for this descriptor until it is closed. False if another descriptor has it locked.

        A lock of the open file description: a second one in the same process is refused too.
        """
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def is_locked(self, fd: int) -> bool:
        """Whether another descriptor has the file locked. Locks nothing; a descriptor for reading is enough."""
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        return bool(_LOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def replace(self, source: str, target: str) -> None:
        os.replace(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def make_folders(self, path: str) -> None:
        os.makedirs(path, mode=0o700, exist_ok=True)

    def remove_folder(self, path: str) -> None:
        os.rmdir(path)

    def list_folder(self, path: str) -> list[str]:
        return os.listdir(path)

    def free_bytes(self, path: str) -> int:
        """What this user may still write on the filesystem of `path`."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def used_bytes(self, path: str) -> int:
        """What the file takes on its medium."""
        return os.stat(path).st_blocks * 512

    def modified_s(self, path: str) -> float:
        """Unix time of the file's last change."""
        return os.stat(path).st_mtime


def read_fully(files: FileSystem, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
    """Fills `buffers` from `offset` on. Raises OSError, EIO if the file ends before they are full."""
    pending = list(buffers)
    while pending:
        count = files.preadv(fd, pending, offset)
        if count <= 0:
            raise OSError(errno.EIO, "the file ends before the data does")
        offset += count
        pending = _after(pending, count)


def write_fully(files: FileSystem, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
    """Writes all of `buffers` at `offset`. Raises OSError, EIO if the system takes no more bytes."""
    pending = list(buffers)
    while pending:
        count = files.pwritev(fd, pending, offset)
        if count <= 0:
            raise OSError(errno.EIO, "the system wrote nothing")
        offset += count
        pending = _after(pending, count)


def _after(buffers: list[Buffer], count: int) -> list[Buffer]:
    """What is left of `buffers` after their first `count` bytes."""
    while buffers and count >= len(buffers[0]):
        count -= len(buffers[0])
        buffers = buffers[1:]
    return [buffers[0][count:], *buffers[1:]] if buffers and count else buffers
