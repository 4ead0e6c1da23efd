"""Who may use a RAM pool that has a name: one owner (an engine core) at a time, and that owner's ranks.

The locks belong to open files, so they end with the processes, however those end. The owner holds byte 0 of the file
for itself; each rank holds a share of byte 1. A new owner first takes both, so no rank of another one is left, and
writes a number of its own into the file; a rank that comes late finds another number than it was told.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct

from kvtier.errors import PoolError

OWNER_OFFSET_BYTES = 2048
"""In the file's first page, where the owner's number stands."""
NUMBER = struct.Struct("<Q")
_FLOCK = struct.Struct("@hhqqi4x")
_OWNER, _RANKS, _TO_THE_END = 0, 1, 0


def try_to_own(fd: int) -> bool:
    """Takes the file for this owner alone. False: an owner or a rank uses it. Raises OSError."""
    return _try_lock(fd, fcntl.F_WRLCK, _OWNER, _TO_THE_END)


def let_ranks_in(fd: int) -> None:
    """The owner has prepared the file, its number included: its ranks, who were told that, may attach. OSError."""
    _try_lock(fd, fcntl.F_UNLCK, _RANKS, _TO_THE_END)


def lock_as_rank(fd: int, owner: int) -> None:
    """Until `fd` is closed, nobody else can own the file. Raises PoolError if it is another owner's by now, OSError."""
    shared = _try_lock(fd, fcntl.F_RDLCK, _RANKS, 1)
    if not shared or os.pread(fd, NUMBER.size, OWNER_OFFSET_BYTES) != NUMBER.pack(owner):
        raise PoolError("cannot attach the named RAM pool: it belongs to another engine by now")


def unlock(fd: int) -> None:
    """Whatever was locked through this open file is not any more."""
    with contextlib.suppress(OSError):
        _try_lock(fd, fcntl.F_UNLCK, _OWNER, _TO_THE_END)


def _try_lock(fd: int, kind: int, start: int, length: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0))
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True
