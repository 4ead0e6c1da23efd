"""A RAM pool in a named file, for the next process to find: what lies where in it, and how it is opened.

    a header of 4 KiB | one record of 128 bytes a slot | one use counter of 8 bytes a slot | the slots

Records are those of the disk tier's table (`kvtier.tiers.disk.layout`): each carries a checksum over its other bytes
and its position, and one over the slot's bytes, seeded with the block's identity. The header says what all of them have
in common; without one that is whole, nothing in the file is believed. The file is memory: it survives the processes,
and a boot id in the header says when it has survived more than that.
"""

from __future__ import annotations

import os
import stat
import struct
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.errors import PoolError
from kvtier.tiers.disk.layout import PAGE_BYTES, RECORD, RECORD_BYTES, Records, round_up
from kvtier.tiers.memory_limits import HUGETLBFS, check_pool_size, filesystem_type
from kvtier.tiers.pool_owner import NUMBER, OWNER_OFFSET_BYTES, let_ranks_in, try_to_own
from kvtier.tiers.ram import RamPool

SHARED_MEMORY = "/dev/shm"
"""Where pools lie unless the user names a folder."""
FILE_PREFIX = "kvtier-ram-"

_MAGIC = b"kvtierR\n"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQQ32s36sQQ128s")
_HEADER_CHECKSUM = struct.Struct("<Q")
_USE_BYTES = 8
_MAX_ATTEMPTS = 10
"""To open a file that others may be removing."""


@dataclass(frozen=True, slots=True)
class PoolHeader:
    """What every block of a pool has in common."""

    num_slots: int
    slot_bytes: int
    namespace: bytes
    """32 bytes."""
    boot_id: str
    epoch: int
    """Random: what another file, or this one before it was emptied, had in its slots is never taken for its own."""
    created_at_s: int
    label: str = ""
    """For people: the model's name, say."""

    def pack(self) -> bytes:
        body = _HEADER.pack(
            _MAGIC,
            _VERSION,
            RECORD_BYTES,
            self.num_slots,
            self.slot_bytes,
            self.namespace,
            self.boot_id.encode(),
            self.epoch,
            self.created_at_s,
            self.label.encode()[:128],
        )
        return body + _HEADER_CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))

    @classmethod
    def unpack(cls, page: bytes) -> PoolHeader | None:
        """The header in `page`, or None for anything that `pack` of this version did not write."""
        body, rest = page[: _HEADER.size], page[_HEADER.size : _HEADER.size + _HEADER_CHECKSUM.size]
        if rest != _HEADER_CHECKSUM.pack(xxhash.xxh3_64_intdigest(body)):
            return None
        magic, version, record_bytes, num_slots, slot_bytes, namespace, boot_id, epoch, created, label = _HEADER.unpack(
            body
        )
        if (magic, version, record_bytes) != (_MAGIC, _VERSION, RECORD_BYTES):
            return None
        text = label.rstrip(b"\0").decode(errors="replace")
        boot = boot_id.rstrip(b"\0").decode(errors="replace")
        return cls(num_slots, slot_bytes, namespace, boot, epoch, created, text)


assert _HEADER.size + _HEADER_CHECKSUM.size <= OWNER_OFFSET_BYTES


@dataclass(frozen=True, slots=True)
class PersistedPool:
    """A pool in a named file, open and owned."""

    pool: RamPool
    header: PoolHeader
    path: str
    empty_since: str
    """Why nothing of what an earlier process left is used. Empty: it is."""

    def records(self) -> Records:
        """(num_slots,) of the disk tier's `RECORD`: the file's own, writable."""
        return np.frombuffer(self.pool.front(), RECORD, self.header.num_slots, PAGE_BYTES)

    def uses(self) -> npt.NDArray[np.uint64]:
        """(num_slots,): greater: used later. The file's own, writable."""
        offset = PAGE_BYTES + round_up(self.header.num_slots * RECORD_BYTES)
        return np.frombuffer(self.pool.front(), np.uint64, self.header.num_slots, offset)

    def magic(self) -> npt.NDArray[np.uint64]:
        """(1,): without it there is no header. The file's own, writable."""
        return np.frombuffer(self.pool.front(), np.uint64, 1)


def index_bytes(num_slots: int) -> int:
    """What stands before the slots."""
    return PAGE_BYTES + round_up(num_slots * RECORD_BYTES) + round_up(num_slots * _USE_BYTES)


def slots_within(budget_bytes: int, slot_bytes: int) -> int:
    """The most slots of a pool in a named file that takes no more than `budget_bytes`; 0 if not even one fits."""
    num_slots = max(0, (budget_bytes - PAGE_BYTES) // (slot_bytes + RECORD_BYTES + _USE_BYTES))
    while num_slots and index_bytes(num_slots) + num_slots * slot_bytes > budget_bytes:
        num_slots -= 1
    return num_slots


def pool_path(name: str, pool_dir: str | None = None, rank: int = 0) -> str:
    """The file of this name. `rank` tells apart the data-parallel engines of one configuration; no name has a "+"."""
    return os.path.join(pool_dir or SHARED_MEMORY, FILE_PREFIX + name + (f"+rank{rank}" if rank else ""))


def boot_id() -> str:
    """Of the running kernel; "" where it does not say."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def open_persisted(path: str, num_slots: int, slot_bytes: int, namespace: bytes, label: str = "") -> PersistedPool:
    """The pool in the file `path`, as an earlier process left it, or empty where that was another one's or there is
    none. The file stays when the pool is closed.

    Raises PoolError, and has changed nothing, if another engine or a rank of an earlier one uses the file, or if it is
    not this user's own; PoolError or ConfigurationError if there is no room for it, and then the file is gone.
    """
    wanted = PoolHeader(
        num_slots, slot_bytes, namespace, boot_id(), int.from_bytes(os.urandom(8), "little"), int(time.time()), label
    )
    fd = _open_owned(path)
    try:
        found = PoolHeader.unpack(os.pread(fd, PAGE_BYTES, 0))
        size_bytes = _file_bytes(path, wanted)
        empty_since = _difference(found, wanted, os.fstat(fd).st_size, size_bytes)
        if empty_since:
            _empty(fd, path, size_bytes)
        header = wanted if empty_since or found is None else found
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError) and not isinstance(error, PoolError):
            raise PoolError(f"cannot use {path} for the RAM pool: {error.strerror or error}") from error
        raise
    owner = int.from_bytes(os.urandom(8), "little") | 1
    offset_bytes = index_bytes(num_slots)
    where = f"the file {path}"
    try:
        pool = RamPool.of_file(
            fd, num_slots, slot_bytes, offset_bytes=offset_bytes, size_bytes=size_bytes, owner=owner, where=where
        )
    except PoolError:
        if empty_since:  # else it is of use to a process that has more memory
            os.unlink(path)
        raise
    front = pool.front()
    front[OWNER_OFFSET_BYTES : OWNER_OFFSET_BYTES + NUMBER.size] = np.frombuffer(NUMBER.pack(owner), np.uint8)
    if empty_since:
        packed = np.frombuffer(header.pack(), np.uint8)
        front[: len(packed)] = packed
    let_ranks_in(fd)
    return PersistedPool(pool, header, path, empty_since)


def _open_owned(path: str) -> int:
    """The file, made if there is none, and nobody else's while the descriptor is open. Raises PoolError."""
    for _ in range(_MAX_ATTEMPTS):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise PoolError(f"cannot open {path} for the RAM pool: {error.strerror or error}") from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise PoolError(f"{path} is not a file of this user alone: it is not used for the RAM pool")
            if not try_to_own(fd):
                raise PoolError(f"{path} is in use by another engine, or by a worker that an earlier one has left")
            if _is_still(path, status):
                return fd
        except OSError as error:
            os.close(fd)
            if isinstance(error, PoolError):
                raise
            raise PoolError(f"cannot lock {path} for the RAM pool: {error.strerror or error}") from error
        os.close(fd)  # somebody has removed it meanwhile
    raise PoolError(f"{path} is being removed all the time")


def _is_still(path: str, status: os.stat_result) -> bool:
    """Whether the file of this status is the one that `path` names."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), status)
    except FileNotFoundError:
        return False


def _file_bytes(path: str, header: PoolHeader) -> int:
    size_bytes = index_bytes(header.num_slots) + header.num_slots * header.slot_bytes
    folder = os.path.dirname(path)
    if filesystem_type(folder) == HUGETLBFS:  # sizes there are whole huge pages
        page_bytes = os.statvfs(folder).f_bsize
        size_bytes = -(-size_bytes // page_bytes) * page_bytes
    return size_bytes


def _difference(found: PoolHeader | None, wanted: PoolHeader, found_bytes: int, wanted_bytes: int) -> str:
    """Why what was found cannot be used as what is wanted; "" if it can."""
    if not found_bytes:
        return "there is none of an earlier process"
    if found is None:
        return "it was reset, or never finished"
    if found.namespace != wanted.namespace:
        return f"it holds blocks of other weights or settings ({found.label})"
    if (found.num_slots, found.slot_bytes) != (wanted.num_slots, wanted.slot_bytes) or found_bytes != wanted_bytes:
        return f"it has {found.num_slots} slots of {found.slot_bytes} bytes"
    if found.boot_id != wanted.boot_id or not wanted.boot_id:
        return "the machine was started again"
    return ""


def _empty(fd: int, path: str, size_bytes: int) -> None:
    """The file holds nothing, and has its size. If there is no room for that, it is removed."""
    try:
        os.ftruncate(fd, 0)
        check_pool_size(size_bytes, os.path.dirname(path))
        os.posix_fallocate(fd, 0, size_bytes)
    except BaseException as error:
        os.unlink(path)
        if isinstance(error, OSError):
            raise PoolError(f"cannot reserve {size_bytes} bytes in {path}: {error.strerror or error}") from error
        raise
