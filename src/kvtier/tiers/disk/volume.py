"""One folder of a disk tier: its files, opened and brought back to a state that can be served."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.errors import TierError
from kvtier.tiers.disk.filesystem import FileSystem, read_fully
from kvtier.tiers.disk.layout import (
    PAGE_BYTES,
    RECORD_BYTES,
    SLAB_NAME,
    TABLE_NAME,
    Header,
    cache_bytes,
    places_within,
    table_bytes,
)
from kvtier.tiers.disk.space import folder_lock, own_cache, room_beside_others
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

    def __init__(self, files: FileSystem, claim: Claim, header: Header, table_fd: int, slab_fd: int) -> None:
        self.path = claim.path
        self.header = header
        self.table_fd = table_fd
        self.slab_fd = slab_fd
        self.direct = False
        self.reserved = True
        """Whether the filesystem has set all bytes of the slab aside."""
        self.table = SlotTable(files, table_fd, header, claim.num_places)
        self.places: npt.NDArray[np.int64] = np.empty(0, np.int64)
        """The places that held blocks when it was opened, ascending."""
        self._files = files
        self._lock_fd = claim.lock_fd

    def vanished(self) -> bool:
        """Whether somebody has deleted the files: what is written now, nobody will find. Raises OSError."""
        return not (self._files.has_name(self.slab_fd) and self._files.has_name(self.table_fd))

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
            read_fully(self._files, fd, [memory[start : start + PAGE_BYTES]], 0)
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
    files: FileSystem,
    roots: Sequence[str],
    folder: str,
    *,
    place_bytes: int,
    capacity_bytes: int,
    min_free_bytes: int,
    keep_others: bool,
) -> list[Claim]:
    """Owns the cache `folder` in every one of `roots` and finds out how many places each may have there.

    Raises TierError or OSError; nothing is left owned then.
    """
    share_bytes = capacity_bytes // len(roots)
    wanted = places_within(share_bytes, place_bytes)
    claims: list[Claim] = []
    try:
        for root in roots:
            path = os.path.join(root, folder)
            files.make_folders(path)
            with folder_lock(files, root):
                lock_fd = own_cache(files, path)
                claims.append(Claim(root, path, lock_fd, 0))  # from here on it is closed with the others
                room_bytes = room_beside_others(
                    files,
                    root,
                    path,
                    wanted_bytes=cache_bytes(wanted, place_bytes),
                    cap_bytes=share_bytes,
                    keep=keep_others,
                )
                num_places = places_within(room_bytes, place_bytes)
                num_places = _within_free_space(files, path, num_places, place_bytes, min_free_bytes)
                claims[-1] = Claim(root, path, lock_fd, num_places)
                if num_places < 1:
                    raise TierError(
                        f"no room for a disk cache in {root}: {room_bytes} bytes are left beside other caches, "
                        f"{files.free_bytes(path)} bytes are free, {min_free_bytes} are to stay free"
                    )
    except BaseException:
        for claim in claims:
            files.close(claim.lock_fd)
        raise
    return claims


def open_volume(files: FileSystem, claim: Claim, header: Header, want_direct: bool) -> Volume:
    """Opens table and slab, keeping what is of this `header`, and fits them to the claim. Raises OSError.

    Owns the claim from here on: an error gives it back.
    """
    opened = [claim.lock_fd]
    try:
        opened.append(files.open(os.path.join(claim.path, TABLE_NAME), create=True))
        opened.append(files.open(os.path.join(claim.path, SLAB_NAME), create=True))
        volume = Volume(files, claim, header, opened[1], opened[2])
        _recover(files, volume, claim.num_places)
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


def _recover(files: FileSystem, volume: Volume, num_places: int) -> None:
    header, table = volume.header, volume.table
    slab_bytes = num_places * header.place_bytes
    found = read_header(files, volume.table_fd)
    if found is not None and _same_cache(found, header):
        num_whole = files.size_bytes(volume.slab_fd) // header.place_bytes
        volume.places = table.recover(min(num_places, num_whole))
        # records go before their bytes do
        files.truncate(volume.table_fd, min(files.size_bytes(volume.table_fd), table_bytes(num_places)))
        table.write_blanks()
    else:
        table.format()
    if files.size_bytes(volume.slab_fd) > slab_bytes:
        files.fdatasync(volume.table_fd)
        files.truncate(volume.slab_fd, slab_bytes)
    volume.reserved = files.allocate(volume.slab_fd, slab_bytes)
    files.allocate(volume.table_fd, table_bytes(num_places))


def _same_cache(found: Header, wanted: Header) -> bool:
    return (found.block_bytes, found.namespace, found.epoch) == (wanted.block_bytes, wanted.namespace, wanted.epoch)


def _within_free_space(files: FileSystem, path: str, num_places: int, place_bytes: int, min_free_bytes: int) -> int:
    """`num_places`, or as many as leave `min_free_bytes` free; places that exist take nothing new."""
    there_bytes = 0
    with contextlib.suppress(FileNotFoundError):
        there_bytes = files.used_bytes(os.path.join(path, SLAB_NAME))
    available_bytes = max(0, files.free_bytes(path) - min_free_bytes - (num_places * RECORD_BYTES + 8 * PAGE_BYTES))
    return min(num_places, (there_bytes + available_bytes) // place_bytes)
