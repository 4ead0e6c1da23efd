"""One folder of a disk tier: its files, opened and brought back to a state that can be served."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.errors import TierError
from kvtier.tiers.disk.filesystem import FileSystem, read_fully
from kvtier.tiers.disk.layout import (
    PAGE_BYTES,
    SLAB_NAME,
    TABLE_NAME,
    Header,
    cache_bytes,
    places_within,
    table_bytes,
)
from kvtier.tiers.disk.space import SpaceLimits, folder_lock, make_room, own_cache, room_for, write_owner
from kvtier.tiers.disk.table import SlotTable


@dataclass(frozen=True, slots=True)
class Claim:
    """A cache folder that this process owns, and how many places it may have there."""

    root: str
    path: str
    lock_fd: int
    num_places: int


class Volume:
    """The open files of one cache folder."""

    def __init__(
        self, files: FileSystem, claim: Claim, header: Header, limits: SpaceLimits, *, table_fd: int, slab_fd: int
    ) -> None:
        self.path = claim.path
        self.header = header
        self.table_fd = table_fd
        self.slab_fd = slab_fd
        self.direct = False
        self.table = SlotTable(files, table_fd, header, claim.num_places)
        self.places: npt.NDArray[np.int64] = np.empty(0, np.int64)
        """The places that held blocks when it was opened, ascending."""
        self._files = files
        self._root = claim.root
        self._lock_fd = claim.lock_fd
        self._limits = limits
        self._num_places = claim.num_places
        self._num_allocated = 0
        self._growing = threading.Lock()

    def vanished(self) -> bool:
        """Whether somebody has deleted the files: what is written now, nobody will find. Raises OSError."""
        return not (self._files.has_name(self.slab_fd) and self._files.has_name(self.table_fd))

    def has_space(self) -> bool:
        """Whether the filesystem has as much free as it must keep. Raises OSError."""
        return self._files.free_bytes(self.path) >= self._limits.min_free_bytes

    def recover(self) -> None:
        """Reads what is there, keeps what is of this header, and fits the files to their limits. Raises OSError."""
        files, header, num_places = self._files, self.header, self._num_places
        self._num_allocated = min(num_places, files.size_bytes(self.slab_fd) // header.place_bytes)
        more_bytes = table_bytes(num_places) - files.size_bytes(self.table_fd)
        if not self._may_take(self._num_allocated, more_bytes):
            raise OSError(errno.ENOSPC, "free space is, or would fall, below its floor")
        found = read_header(files, self.table_fd)
        if found is not None and _same_cache(found, header):
            self.places = self.table.recover(self._num_allocated)
            # records go before their bytes do
            files.truncate(self.table_fd, min(files.size_bytes(self.table_fd), table_bytes(num_places)))
            self.table.write_blanks()
            files.fdatasync(self.table_fd)
        else:
            self.table.format()
        if files.size_bytes(self.slab_fd) != self._num_allocated * header.place_bytes:
            files.truncate(self.slab_fd, self._num_allocated * header.place_bytes)
        files.allocate(self.table_fd, table_bytes(num_places))

    def ensure(self, num_places: int) -> None:
        """Makes the slab long enough for its first `num_places` places, with every byte reserved where that works.

        Raises OSError, ENOSPC if the filesystem would have less free than it must keep.
        """
        if num_places <= self._num_allocated:
            return
        with self._growing:
            if num_places <= self._num_allocated:
                return
            place_bytes = self.header.place_bytes
            step = self._limits.grow_bytes // place_bytes
            for target in (min(self._num_places, max(num_places, self._num_allocated + step)), num_places):
                if self._may_take(target, (target - self._num_allocated) * place_bytes):
                    self._files.allocate(self.slab_fd, target * place_bytes)
                    self._num_allocated = target
                    return
            raise OSError(errno.ENOSPC, "free space is, or would fall, below its floor")

    def _may_take(self, num_allocated: int, more_bytes: int) -> bool:
        """Whether a slab of so many places is within all limits. Caches that may go make room for it."""
        place_bytes = self.header.place_bytes
        own_bytes = cache_bytes(self._num_places, place_bytes) - (self._num_places - num_allocated) * place_bytes
        with folder_lock(self._files, self._root):
            if not make_room(self._files, self._root, self.path, own_bytes, self._limits):
                return False
        return more_bytes <= 0 or self._files.free_bytes(self.path) - more_bytes >= self._limits.min_free_bytes

    def open_direct(self) -> None:
        """Replaces the slab's descriptor by one past the page cache, where the filesystem has that. Raises OSError."""
        try:
            fd = self._files.open(os.path.join(self.path, SLAB_NAME), direct=True)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return
        try:
            memory = np.empty(2 * PAGE_BYTES, np.uint8)
            start = -memory.ctypes.data % PAGE_BYTES
            self._files.preadv(fd, [memory[start : start + PAGE_BYTES]], 0)
        except OSError as error:
            self._files.close(fd)
            if error.errno != errno.EINVAL:
                raise
            return
        self._files.close(self.slab_fd)
        self.slab_fd, self.direct = fd, True

    def close(self) -> None:
        """Gives everything back, the cache's ownership last."""
        for fd in (self.table_fd, self.slab_fd, self._lock_fd):
            with contextlib.suppress(OSError):
                self._files.close(fd)


def claim_folders(
    files: FileSystem, roots: Sequence[str], folder: str, place_bytes: int, limits: SpaceLimits
) -> list[Claim]:
    """Owns the cache `folder` in every one of `roots`, with as many places in each as the fullest has room for.

    Raises TierError or OSError; nothing is left owned then.
    """
    claims: list[Claim] = []
    try:
        for root in roots:
            path = os.path.join(root, folder)
            files.make_folders(path)
            with folder_lock(files, root):
                lock_fd = own_cache(files, path)
                claims.append(Claim(root, path, lock_fd, 0))  # from here on it is given back with the others
                room_bytes = room_for(files, root, path, limits)
                num_places = places_within(room_bytes, place_bytes)
                if num_places < 1:
                    raise TierError(
                        f"no room for a disk cache in {root}: of {limits.cap_bytes} bytes, {max(0, room_bytes)} are "
                        "left beside the other caches there"
                    )
                write_owner(files, lock_fd, cache_bytes(num_places, place_bytes))
                claims[-1] = Claim(root, path, lock_fd, num_places)
    except BaseException:
        for claim in claims:
            files.close(claim.lock_fd)
        raise
    fewest = min(claim.num_places for claim in claims)
    return [Claim(claim.root, claim.path, claim.lock_fd, fewest) for claim in claims]


def open_volume(files: FileSystem, claim: Claim, header: Header, limits: SpaceLimits, want_direct: bool) -> Volume:
    """Opens table and slab, keeping what is of this `header`, and fits them to the claim. Raises OSError.

    Owns the claim from here on: an error gives it back.
    """
    opened = [claim.lock_fd]
    try:
        opened.append(files.open(os.path.join(claim.path, TABLE_NAME), create=True))
        opened.append(files.open(os.path.join(claim.path, SLAB_NAME), create=True))
        volume = Volume(files, claim, header, limits, table_fd=opened[1], slab_fd=opened[2])
        volume.recover()
        files.sync_folder(claim.path)
        if want_direct:
            volume.open_direct()
    except BaseException:
        for fd in opened:
            with contextlib.suppress(OSError):
                files.close(fd)
        raise
    return volume


def read_header(files: FileSystem, table_fd: int) -> Header | None:
    """The header of an open table, None if there is none that this version wrote. Raises OSError."""
    if files.size_bytes(table_fd) < PAGE_BYTES:
        return None
    page = np.zeros(PAGE_BYTES, np.uint8)
    read_fully(files, table_fd, [page], 0)
    return Header.unpack(page.tobytes())


def _same_cache(found: Header, wanted: Header) -> bool:
    return (found.block_bytes, found.namespace, found.epoch) == (wanted.block_bytes, wanted.namespace, wanted.epoch)
