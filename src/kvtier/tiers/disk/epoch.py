"""The weight epoch in a file: raised durably, and never back to where it was."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable

import numpy as np
import xxhash

from kvtier.errors import TierError
from kvtier.tier_interfaces import EpochStore
from kvtier.tiers.disk.filesystem import FileSystem, read_fully, write_fully

_EPOCH = struct.Struct("<8sQ")
_CHECKSUM = struct.Struct("<Q")
_MAGIC = b"kvtierE\n"
_FILE_BYTES = _EPOCH.size + _CHECKSUM.size


def _random_epoch() -> int:
    """Below 2**63, so that it can be raised as often as anybody likes."""
    return int.from_bytes(os.urandom(8), "little") >> 1


class FileEpochStore:
    """An `EpochStore` of one small file. A new file, or one that cannot be made out, begins at a random epoch: what
    was stored under an epoch that is no longer known is never served again.

    The constructor touches nothing; the file is read, or made with its folders, at the first call. `rank` tells apart
    processes that may write the same file at the same time.
    """

    def __init__(
        self,
        path: str,
        files: FileSystem | None = None,
        new_epoch: Callable[[], int] = _random_epoch,
        *,
        rank: int = 0,
    ) -> None:
        self.path = path
        self._rank = rank
        self._files = files or FileSystem()
        self._new_epoch = new_epoch
        self._current: int | None = None

    def current(self) -> int:
        """The epoch that holds. Raises TierError if the file can be neither read nor made."""
        if self._current is None:
            try:
                epoch = self.read()
                if epoch is None:
                    epoch = self._new_epoch()
                    self._write(epoch)
            except OSError as error:
                raise TierError(f"cannot read the weight epoch in {self.path}: {error.strerror or error}") from error
            self._current = epoch
        return self._current

    def advance(self) -> int:
        epoch = self.current() + 1
        try:
            # another rank may have raised it further: an epoch must never be current twice
            epoch = max(epoch, (self.read() or 0) + 1)
            self._write(epoch)
        except OSError as error:
            raise TierError(f"cannot raise the weight epoch in {self.path}: {error.strerror or error}") from error
        self._current = epoch
        return epoch

    def read(self) -> int | None:
        """What the file says now, or None if there is none or it cannot be made out. Writes nothing. Raises OSError."""
        files = self._files
        try:
            fd = files.open(self.path, write=False)
        except FileNotFoundError:
            return None
        try:
            content = np.zeros(_FILE_BYTES, np.uint8)
            if files.size_bytes(fd) != _FILE_BYTES:
                return None
            read_fully(files, fd, [content], 0)
        finally:
            files.close(fd)
        body, checksum = content.tobytes()[: _EPOCH.size], content.tobytes()[_EPOCH.size :]
        magic, epoch = _EPOCH.unpack(body)
        if magic != _MAGIC or checksum != _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body)):
            return None
        return int(epoch)

    def _write(self, epoch: int) -> None:
        files, folder = self._files, os.path.dirname(self.path)
        files.make_folders(folder)
        successor = f"{self.path}.new{self._rank or ''}"
        body = _EPOCH.pack(_MAGIC, epoch)
        content = np.frombuffer(body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body)), np.uint8)
        fd = files.open(successor, create=True)
        try:
            files.truncate(fd, 0)
            write_fully(files, fd, [content], 0)
            files.fdatasync(fd)
        finally:
            files.close(fd)
        files.replace(successor, self.path)
        files.sync_folder(folder)


class WeightEpochs:
    """The epochs of an engine whose weights are read from files when it starts, and perhaps replaced while it runs.

    A reset says that the weights may be others from now on. What is stored after one belongs to weights that no file
    of the namespace has, so the next process must not find it: epochs after a reset are odd, and whoever opens the
    cache moves on to an even one.
    """

    def __init__(self, store: EpochStore) -> None:
        """`store` belongs to this object from now on."""
        self._store = store
        self._opened = False

    def current(self) -> int:
        """See `EpochStore`. The first call is the opening, and may do one small write. Raises TierError."""
        epoch = self._store.current()
        if not self._opened and epoch % 2:
            epoch = self._store.advance()
        self._opened = True
        return epoch

    def advance(self) -> int:
        epoch = self._store.advance()
        return epoch if epoch % 2 else self._store.advance()
