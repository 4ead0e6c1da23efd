"""`SimulatedFileSystem`: the disk tier's system calls over memory, with faults, kills and power losses at will.

After a power loss, of what was written since the last fdatasync any 512-byte sectors may be there and any others not;
of the names that were made, replaced or removed since their folder was synced, any first few are.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Sequence

import numpy as np

from kvtier.tiers.disk.filesystem import Buffer, FileSystem

SECTOR_BYTES = 512


class _File:
    """One file: what processes see, what the medium has, and which sectors differ."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.durable = b""
        self.unsynced: set[int] = set()
        self.modified_s = 0.0

    def resize(self, size_bytes: int) -> None:
        old = len(self.content)
        if size_bytes < old:
            del self.content[size_bytes:]
        else:
            self.content.extend(bytes(size_bytes - old))
        low, high = min(old, size_bytes), max(old, size_bytes)
        self.unsynced.update(range(low // SECTOR_BYTES, -(-high // SECTOR_BYTES)))

    def sync(self) -> None:
        self.durable = bytes(self.content)
        self.unsynced.clear()

    def lose_power(self, chance: random.Random) -> None:
        size_bytes = chance.choice((len(self.durable), len(self.content)))
        after = bytearray(self.durable[:size_bytes].ljust(size_bytes, b"\0"))
        for sector in sorted(self.unsynced):
            if chance.random() < 0.5:
                at = slice(sector * SECTOR_BYTES, min((sector + 1) * SECTOR_BYTES, size_bytes))
                written = bytes(self.content[at])
                after[at.start : at.start + len(written)] = written
        self.content = after[:size_bytes]
        self.sync()


class SimulatedFileSystem(FileSystem):
    """One device of `device_bytes`. Single-threaded use, or `DiskConfig(num_threads=0)`.

    `before_call(name, path)` is asked before every call and may raise an OSError; `calls` lists the calls so far.
    `kill` and `lose_power` end the process that uses it: its descriptors and locks are gone, and whatever is called
    before `restart` raises. Path of a call on a descriptor: the one that it was opened by.
    """

    def __init__(self, device_bytes: int = 1 << 30, *, has_direct: bool = True, has_allocate: bool = True) -> None:
        self.device_bytes = device_bytes
        self.has_direct = has_direct
        self.has_allocate = has_allocate
        self.before_call: Callable[[str, str], None] | None = None
        self.after_call: Callable[[], None] | None = None
        self.short_transfers = False
        """Reads and writes move one sector less than they could, if they move several."""
        self.calls: list[str] = []
        self._names: dict[str, _File] = {}
        self._folders: set[str] = {"/"}
        self._durable_names: dict[str, _File] = {}
        self._name_changes: list[tuple[str, _File | None]] = []
        self._open: dict[int, tuple[_File, str, bool]] = {}
        self._locks: dict[int, int] = {}  # id of the file -> descriptor
        self._next_fd = 1000
        self._ticks = 0.0
        self.is_dead = False
        """Between `kill` and `restart`."""

    # -- the world around ----------------------------------------------------------------------------------------

    def used(self) -> int:
        """Bytes of all files, deleted ones that are still open included."""
        files = {id(file): file for file in [*self._names.values(), *(entry[0] for entry in self._open.values())]}
        return sum(len(file.content) for file in files.values())

    def kill(self) -> None:
        """The process dies; what it wrote stays."""
        self._open.clear()
        self._locks.clear()
        self.is_dead = True

    def restart(self) -> None:
        """Another process comes. Faults that were asked for are forgotten."""
        self.is_dead = False
        self.before_call = self.after_call = None
        self.short_transfers = False
        self.calls.clear()

    def lose_power(self, chance: random.Random) -> None:
        """The machine dies."""
        self.kill()
        kept = chance.randint(0, len(self._name_changes))
        for path, file in self._name_changes[:kept]:
            self._apply(self._durable_names, path, file)
        self._name_changes.clear()
        self._names = dict(self._durable_names)
        for file in {id(file): file for file in self._names.values()}.values():
            file.lose_power(chance)

    def content(self, path: str) -> bytearray:
        """The file's bytes, to be looked at or damaged in place."""
        return self._names[path].content

    def paths(self) -> list[str]:
        """All files."""
        return sorted(self._names)

    def delete_folder(self, path: str) -> None:
        """As `rm -rf` by somebody else."""
        for name in [name for name in self._names if name.startswith(path + "/")]:
            self._rename(name, None)
        self._folders = {folder for folder in self._folders if folder != path and not folder.startswith(path + "/")}

    # -- the calls -----------------------------------------------------------------------------------------------

    def open(self, path: str, *, create: bool = False, write: bool = True, direct: bool = False) -> int:
        self._call("open", path)
        if direct and not self.has_direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        file = self._names.get(path)
        if file is None:
            if not create or os.path.dirname(path) not in self._folders:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
            file = _File()
            self._rename(path, file)
        self._next_fd += 1
        self._open[self._next_fd] = (file, path, direct)
        return self._next_fd

    def close(self, fd: int) -> None:
        file, path, _ = self._open.pop(fd, (None, "", False))
        if self._locks.get(id(file)) == fd:
            del self._locks[id(file)]
        self._call("close", path)  # an error says something about the data: closed it is
        if file is None:
            raise OSError(errno.EBADF, "Bad file descriptor")

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        file, _, direct = self._entry(fd, "preadv")
        self._check_alignment(direct, buffers, offset)
        moved = 0
        for buffer, count in self._portions(buffers):
            piece = file.content[offset + moved : offset + moved + count]
            buffer[: len(piece)] = np.frombuffer(piece, np.uint8)
            moved += len(piece)
        return moved

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        file, _, direct = self._entry(fd, "pwritev")
        self._check_alignment(direct, buffers, offset)
        moved = 0
        for buffer, count in self._portions(buffers):
            if offset + moved + count > len(file.content):
                self._require(offset + moved + count - len(file.content))
                file.resize(offset + moved + count)
            file.content[offset + moved : offset + moved + count] = buffer[:count].tobytes()
            moved += count
        if moved:
            file.unsynced.update(range(offset // SECTOR_BYTES, -(-(offset + moved) // SECTOR_BYTES)))
            self._touch(file)
        return moved

    def fdatasync(self, fd: int) -> None:
        self._entry(fd, "fdatasync")[0].sync()

    def sync_folder(self, path: str) -> None:
        self._call("sync_folder", path)
        if path not in self._folders:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        for name, file in self._name_changes:  # one journal: with one name, all before it
            self._apply(self._durable_names, name, file)
        self._name_changes.clear()

    def truncate(self, fd: int, size_bytes: int) -> None:
        file, _, _ = self._entry(fd, "truncate")
        self._require(size_bytes - len(file.content))
        file.resize(size_bytes)
        self._touch(file)

    def allocate(self, fd: int, size_bytes: int) -> bool:
        file, _, _ = self._entry(fd, "allocate")
        if size_bytes > len(file.content):
            self._require(size_bytes - len(file.content))
            file.resize(size_bytes)
        return self.has_allocate

    def size_bytes(self, fd: int) -> int:
        return len(self._entry(fd, "size_bytes")[0].content)

    def has_name(self, fd: int) -> bool:
        file = self._entry(fd, "has_name")[0]
        return any(named is file for named in self._names.values())

    def lock(self, fd: int) -> bool:
        file, _, _ = self._entry(fd, "lock")
        return self._locks.setdefault(id(file), fd) == fd

    def is_locked(self, fd: int) -> bool:
        file, _, _ = self._entry(fd, "is_locked")
        return self._locks.get(id(file), fd) != fd

    def replace(self, source: str, target: str) -> None:
        self._call("replace", target)
        file = self._names.get(source)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", source)
        self._rename(target, file)
        self._rename(source, None)

    def unlink(self, path: str) -> None:
        self._named(path, "unlink")
        self._rename(path, None)

    def make_folders(self, path: str) -> None:
        self._call("make_folders", path)
        while path not in self._folders:
            self._folders.add(path)
            path = os.path.dirname(path)

    def remove_folder(self, path: str) -> None:
        self._call("remove_folder", path)
        if self._inside(path):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", path)
        self._folders.discard(path)

    def list_folder(self, path: str) -> list[str]:
        self._call("list_folder", path)
        if path not in self._folders:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return self._inside(path)

    def free_bytes(self, path: str) -> int:
        self._call("free_bytes", path)
        return self.device_bytes - self.used()

    def used_bytes(self, path: str) -> int:
        return len(self._named(path, "used_bytes").content)

    def modified_s(self, path: str) -> float:
        return self._named(path, "modified_s").modified_s

    # -- private ---------------------------------------------------------------------------------------------------

    def _call(self, name: str, path: str) -> None:
        if self.is_dead:
            raise OSError(errno.EIO, "this process is dead")
        self.calls.append(name)
        if self.before_call is not None:
            self.before_call(name, path)
        if self.after_call is not None:
            self.after_call()

    def _named(self, path: str, name: str) -> _File:
        self._call(name, path)
        if path not in self._names:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return self._names[path]

    def _entry(self, fd: int, name: str) -> tuple[_File, str, bool]:
        entry = self._open.get(fd)
        self._call(name, entry[1] if entry else "")
        if entry is None:
            raise OSError(errno.EBADF, "Bad file descriptor")
        return entry

    def _portions(self, buffers: Sequence[Buffer]) -> list[tuple[Buffer, int]]:
        portions = [(buffer, len(buffer)) for buffer in buffers]
        if self.short_transfers and portions[-1][1] > SECTOR_BYTES:
            portions[-1] = (portions[-1][0], portions[-1][1] - SECTOR_BYTES)
        return portions

    def _check_alignment(self, direct: bool, buffers: Sequence[Buffer], offset: int) -> None:
        parts = [offset, *(len(buffer) for buffer in buffers), *(buffer.ctypes.data for buffer in buffers)]
        if direct and any(part % SECTOR_BYTES for part in parts):
            raise OSError(errno.EINVAL, "Invalid argument")

    def _require(self, num_bytes: int) -> None:
        if num_bytes > self.device_bytes - self.used():
            raise OSError(errno.ENOSPC, "No space left on device")

    def _touch(self, file: _File) -> None:
        self._ticks += 1.0
        file.modified_s = self._ticks

    def _inside(self, path: str) -> list[str]:
        start = path.rstrip("/") + "/"
        below = [*self._names, *self._folders]
        return sorted({name[len(start) :].split("/")[0] for name in below if name.startswith(start) and name != start})

    def _rename(self, path: str, file: _File | None) -> None:
        self._apply(self._names, path, file)
        self._name_changes.append((path, file))

    @staticmethod
    def _apply(names: dict[str, _File], path: str, file: _File | None) -> None:
        names.pop(path, None)
        if file is not None:
            names[path] = file
