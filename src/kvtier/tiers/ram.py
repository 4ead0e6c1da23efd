"""The RAM pool's life: created without a name, reserved whole, attached by file descriptor, gone with its users.

The pool is a file that no folder ever lists (a memory file, or an unnamed file in `pool_dir`). Nothing can outlive
the processes that use it, collide with another engine's, or be attached by mistake. The exception is a pool in a named
file, for users who asked for one: see `kvtier.tiers.ram_persist`, which opens it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import stat
import tempfile
import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigurationError, PoolError
from kvtier.tiers.memory_limits import HUGETLBFS, check_pool_dir, check_pool_size, filesystem_type
from kvtier.tiers.pool_owner import lock_as_rank, unlock

__all__ = ["PoolHandle", "RamPool", "check_pool_size"]

_MADV_POPULATE_WRITE = 23
_MFD_NOEXEC_SEAL = 0x8
_NAME_PREFIX = "kvtier-pool-"
"""Of files that have a name for an instant, where the filesystem has no unnamed ones."""
_POPULATE_STEP_BYTES = 1 << 30

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(frozen=True, slots=True)
class PoolHandle:
    """What another process needs to attach. Picklable; says nothing once the creator has closed the pool."""

    pid: int
    """Process that created the pool and holds its file open."""
    fd: int
    """File descriptor in that process; -1 for a private pool."""
    device: int
    inode: int
    """With `device`, the identity of the file: a reused pid or fd is noticed."""
    num_slots: int
    slot_bytes: int
    offset_bytes: int = 0
    """Of the first slot in the file."""
    owner: int = 0
    """Of a named file: the number that its owner has written into it. 0: the file has no name."""


class _Mapping:
    """One mapping of a pool into this process, shared by its `RamPool`s; unmapped with the last of them."""

    def __init__(self, handle: PoolHandle, memory: mmap.mmap, fd: int, where: str) -> None:
        self.handle = handle
        self.where = where
        self.num_users = 1
        self._fd = fd
        self._memory = memory
        size_bytes = handle.num_slots * handle.slot_bytes
        flat = np.frombuffer(memory, np.uint8, size_bytes, handle.offset_bytes)
        self.front: npt.NDArray[np.uint8] | None = np.frombuffer(memory, np.uint8, handle.offset_bytes)
        """What stands before the slots."""
        self.slots: npt.NDArray[np.uint8] | None = flat.reshape(handle.num_slots, handle.slot_bytes)
        self.address = int(flat.ctypes.data)

    def release(self) -> None:
        self.slots = self.front = None
        # a view that someone still holds keeps the memory mapped, and only that: unmapping would be a crash
        with contextlib.suppress(BufferError):
            self._memory.close()
        if self._fd >= 0:
            if self.handle.owner:
                # what keeps the memory mapped keeps the file open too: others need not wait for that
                unlock(self._fd)
            os.close(self._fd)
            self._fd = -1


_mappings: dict[PoolHandle, _Mapping] = {}
_mappings_lock = threading.Lock()
_private_ids = itertools.count(1)


class RamPool:
    """`num_slots` places of `slot_bytes` bytes in host memory. Made by `create` or `attach`, ended by `close`."""

    def __init__(self, mapping: _Mapping) -> None:
        """For `create` and `attach`."""
        self.handle = mapping.handle
        self._mapping: _Mapping | None = mapping

    @classmethod
    def create(cls, num_slots: int, slot_bytes: int, *, pool_dir: str | None = None, private: bool = False) -> RamPool:
        """A zeroed pool with every byte reserved: no later write can fail for want of memory.

        Other processes of the same user can attach it by `handle`, for as long as this one has it open.
        `pool_dir` puts it into a folder of another filesystem (one with huge pages, say), where no name is left.
        `private` makes it for this process alone, in huge pages where there are any. Takes some tenths of a
        second a GiB. Raises ConfigurationError (settings, size) or PoolError (the system refused); nothing is left
        behind.
        """
        if num_slots < 1 or slot_bytes < 1:
            raise ConfigurationError(f"a RAM pool needs slots and bytes, got {num_slots} slots of {slot_bytes} bytes")
        if private and pool_dir is not None:
            raise ConfigurationError(f"a private RAM pool is in no folder, got pool_dir {pool_dir!r}")
        size_bytes = num_slots * slot_bytes
        check_pool_size(size_bytes, pool_dir)
        mapping = _map_private(num_slots, slot_bytes) if private else _map_new_file(num_slots, slot_bytes, pool_dir)
        with _mappings_lock:
            _mappings[mapping.handle] = mapping
        return cls(mapping)

    @classmethod
    def of_file(
        cls, fd: int, num_slots: int, slot_bytes: int, *, offset_bytes: int, size_bytes: int, owner: int, where: str
    ) -> RamPool:
        """A pool in an open file that has a name and `size_bytes` bytes; its slots begin at `offset_bytes`.

        Reserves what is not yet. `fd` is the pool's from now on, whatever happens. Raises PoolError.
        """
        mapping = _map_file(fd, num_slots, slot_bytes, size_bytes, where, offset_bytes=offset_bytes, owner=owner)
        with _mappings_lock:
            _mappings[mapping.handle] = mapping
        return cls(mapping)

    @classmethod
    def attach(cls, handle: PoolHandle) -> RamPool:
        """The pool of `handle`: the same mapping in the process that created it, a new one anywhere else.

        Raises PoolError if the creator has closed it or ended, if it belongs to another user, or is private.
        """
        with _mappings_lock:
            mapping = _mappings.get(handle) if handle.pid == os.getpid() else None
            if mapping is not None:
                mapping.num_users += 1
        if mapping is None:
            mapping = _map_existing(handle)
        return cls(mapping)

    def slots(self) -> npt.NDArray[np.uint8]:
        """(num_slots, slot_bytes) uint8: the pool itself, writable. Must not be used after `close`."""
        if self._mapping is None or self._mapping.slots is None:
            raise PoolError("the RAM pool is closed")
        return self._mapping.slots

    def front(self) -> npt.NDArray[np.uint8]:
        """(offset_bytes,) uint8: what stands before the slots, writable. Must not be used after `close`."""
        if self._mapping is None or self._mapping.front is None:
            raise PoolError("the RAM pool is closed")
        return self._mapping.front

    def describe(self) -> str:
        """One line for a log: size, place, and the page size that the system shows (not what was asked for)."""
        handle = self.handle
        size = f"{handle.num_slots} slots of {handle.slot_bytes} bytes"
        total_bytes = handle.num_slots * handle.slot_bytes
        if self._mapping is None:
            return f"RAM pool, closed: {size}"
        pages = _page_sizes(self._mapping.address, total_bytes)
        return f"RAM pool of {total_bytes / 2**30:.2f} GiB ({size}) in {self._mapping.where}, {pages}"

    def close(self) -> None:
        """Gives the memory back once every process has. Idempotent. Views must not be used afterwards."""
        mapping, self._mapping = self._mapping, None
        if mapping is None:
            return
        with _mappings_lock:
            mapping.num_users -= 1
            if mapping.num_users:
                return
            if _mappings.get(mapping.handle) is mapping:
                del _mappings[mapping.handle]
        mapping.release()


def _map_private(num_slots: int, slot_bytes: int) -> _Mapping:
    size_bytes = num_slots * slot_bytes
    handle = PoolHandle(os.getpid(), -1, 0, next(_private_ids), num_slots, slot_bytes)
    try:
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as exc:
        raise PoolError(f"cannot map a private RAM pool of {size_bytes} bytes: {exc}") from exc
    mapping = _Mapping(handle, memory, -1, "private memory")
    try:
        _advise(mapping.address, size_bytes, mmap.MADV_HUGEPAGE)
        if not _populate(mapping.address, size_bytes):
            assert mapping.slots is not None
            mapping.slots.reshape(-1)[:: mmap.PAGESIZE] = 0
    except OSError as exc:
        mapping.release()
        raise PoolError(f"cannot reserve a private RAM pool of {size_bytes} bytes: {exc.strerror}") from exc
    return mapping


def _map_new_file(num_slots: int, slot_bytes: int, pool_dir: str | None) -> _Mapping:
    size_bytes = num_slots * slot_bytes
    where = f"an unnamed file in {pool_dir}" if pool_dir is not None else "an unnamed memory file"
    fd = -1
    try:
        if pool_dir is not None:
            fd = _open_unnamed(pool_dir)
            if filesystem_type(pool_dir) == HUGETLBFS:  # sizes there are whole huge pages
                page_bytes = os.statvfs(pool_dir).f_bsize
                size_bytes = -(-size_bytes // page_bytes) * page_bytes
            os.posix_fallocate(fd, 0, size_bytes)  # where huge pages are the mount's choice, this takes them
        else:
            fd = _open_memory_file()
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(
                fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
            )  # no process can cut it under another's copy
    except (OSError, ValueError, OverflowError) as exc:
        if fd >= 0:
            os.close(fd)
        raise PoolError(f"cannot reserve a RAM pool of {size_bytes} bytes in {where}: {exc}") from exc
    return _map_file(fd, num_slots, slot_bytes, size_bytes, where)


def _map_file(
    fd: int, num_slots: int, slot_bytes: int, size_bytes: int, where: str, *, offset_bytes: int = 0, owner: int = 0
) -> _Mapping:
    """The file `fd` of `size_bytes` bytes, present as a whole. Closes `fd` if it fails. Raises PoolError."""
    try:
        memory = mmap.mmap(fd, size_bytes)
    except (OSError, ValueError, OverflowError) as exc:
        os.close(fd)
        raise PoolError(f"cannot reserve a RAM pool of {size_bytes} bytes in {where}: {exc}") from exc
    status = os.fstat(fd)
    handle = PoolHandle(
        os.getpid(), fd, status.st_dev, status.st_ino, num_slots, slot_bytes, offset_bytes=offset_bytes, owner=owner
    )
    mapping = _Mapping(handle, memory, fd, where)
    try:
        _advise(mapping.address - offset_bytes, size_bytes, mmap.MADV_HUGEPAGE)
        if not _populate(mapping.address - offset_bytes, size_bytes):
            os.posix_fallocate(fd, 0, size_bytes)
    except OSError as exc:
        mapping.release()
        raise PoolError(f"cannot reserve a RAM pool of {size_bytes} bytes in {where}: {exc.strerror}") from exc
    return mapping


def _map_existing(handle: PoolHandle) -> _Mapping:
    if handle.fd < 0:
        raise PoolError(f"the RAM pool of process {handle.pid} is private to that process, or closed")
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as exc:
        raise PoolError(
            f"cannot attach the RAM pool of process {handle.pid} ({exc.strerror}): it must be running, under the "
            "same user and process namespace, with the pool open"
        ) from exc
    try:
        status = os.fstat(fd)
        size_bytes = handle.offset_bytes + handle.num_slots * handle.slot_bytes
        if (status.st_dev, status.st_ino) != (handle.device, handle.inode) or status.st_size < size_bytes:
            raise PoolError(f"cannot attach the RAM pool of process {handle.pid}: it was closed, this is another file")
        if handle.owner:
            lock_as_rank(fd, handle.owner)
        memory = mmap.mmap(fd, status.st_size)
    except (OSError, ValueError) as exc:
        os.close(fd)
        if isinstance(exc, PoolError):
            raise
        raise PoolError(f"cannot map the RAM pool of process {handle.pid}: {exc}") from exc
    if not handle.owner:
        os.close(fd)
        fd = -1
    mapping = _Mapping(handle, memory, fd, f"the memory of process {handle.pid}")
    _advise(mapping.address - handle.offset_bytes, status.st_size, mmap.MADV_HUGEPAGE)
    # only the page tables are missing: without them it works too, but the first copies are slow
    with contextlib.suppress(OSError):
        _populate(mapping.address - handle.offset_bytes, status.st_size)
    return mapping


def _open_memory_file() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("kvtier-pool", flags | _MFD_NOEXEC_SEAL)  # some systems allow no other kind
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        return os.memfd_create("kvtier-pool", flags)  # Linux before 6.3


def _open_unnamed(pool_dir: str) -> int:
    check_pool_dir(pool_dir)
    try:
        return os.open(pool_dir, os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        if exc.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
            raise
    _remove_left_over(pool_dir)
    fd, path = tempfile.mkstemp(prefix=_NAME_PREFIX, dir=pool_dir)
    with contextlib.suppress(FileNotFoundError):  # another process may have taken the name for left over: as well
        os.unlink(path)
    return fd


def _remove_left_over(pool_dir: str) -> None:
    """Unlinks what processes that were killed between naming a file and unlinking it have left in `pool_dir`.

    Such a file is empty, and whoever has it open wants its name gone: it does no harm to be early.
    """
    with contextlib.suppress(OSError), os.scandir(pool_dir) as entries:
        for entry in entries:
            if not entry.name.startswith(_NAME_PREFIX):
                continue
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and status.st_size == 0 and status.st_uid == os.geteuid():
                    os.unlink(entry.path)


def _advise(address: int, size_bytes: int, advice: int) -> bool:
    """madvise without the GIL, on whole pages; the answer to a hint may be no."""
    return bool(_libc.madvise(address, -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, advice) == 0)


def _populate(address: int, size_bytes: int) -> bool:
    """Makes every page present and writable. False where Linux (before 5.14) cannot; OSError if memory is out."""
    for offset in range(0, size_bytes, _POPULATE_STEP_BYTES):
        step_bytes = min(_POPULATE_STEP_BYTES, size_bytes - offset)
        while not _advise(address + offset, step_bytes, _MADV_POPULATE_WRITE):
            code = ctypes.get_errno()
            if code == errno.EINVAL and offset == 0:
                return False
            if code not in (errno.EINTR, errno.EAGAIN):
                raise OSError(code, os.strerror(code))
    return True


def _page_sizes(address: int, size_bytes: int) -> str:
    """What /proc/self/smaps shows for the mapping that begins at or before `address` and covers it."""
    fields: dict[str, int] = {}
    inside = False
    try:
        with open("/proc/self/smaps") as smaps:
            for line in smaps:
                head, _, rest = line.partition(" ")
                if not head.endswith(":"):  # "start-end perms ...": a new mapping
                    if inside:
                        break
                    start, _, end = head.partition("-")
                    inside = int(start, 16) <= address < int(end, 16)
                elif inside and rest.split()[1:] == ["kB"]:
                    fields[head[:-1]] = int(rest.split()[0])
    except OSError:
        return "page size unknown"
    huge_kb = sum(fields.get(name, 0) for name in ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped"))
    page_kb = fields.get("KernelPageSize", mmap.PAGESIZE // 1024)
    if not huge_kb:
        return f"{page_kb} KiB pages"
    if huge_kb * 1024 >= size_bytes:
        return "huge pages"
    return f"{huge_kb * 1024 / size_bytes:.0%} in huge pages, the rest in {page_kb} KiB pages"
