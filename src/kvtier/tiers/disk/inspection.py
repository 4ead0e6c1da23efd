"""Looking into caches from outside, beside an engine that uses them: nothing here locks or writes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.errors import TierError
from kvtier.tiers.disk.epoch import FileEpochStore
from kvtier.tiers.disk.filesystem import Buffer, FileSystem, read_fully
from kvtier.tiers.disk.layout import (
    EPOCH_NAME,
    PAGE_BYTES,
    READY,
    RECORD,
    RECORD_BYTES,
    SLAB_NAME,
    TABLE_NAME,
    Header,
    Records,
    data_checksum,
    record_keys,
    record_offset,
    valid_places,
)
from kvtier.tiers.disk.space import CacheFolder, list_caches
from kvtier.tiers.disk.volume import read_header

_NUM_READERS = 4


@dataclass(frozen=True, slots=True)
class CacheContent:
    """What a cache's table says."""

    folder: CacheFolder
    header: Header
    places: npt.NDArray[np.int64]
    """(n,) ascending: the places that hold blocks."""
    records: Records
    """(n,) their records."""
    num_stale: int
    """Records of another weight epoch, or damaged: never served again, their places are reused."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What reading every block of a cache found."""

    good_blocks: int
    corrupt_places: tuple[int, ...]
    changed_blocks: int
    """Replaced by a running engine while they were read: neither good nor bad."""
    read_bytes: int


def find_roots(files: FileSystem, folder: str) -> list[str]:
    """The folders that hold caches: `folder` itself, or those right inside it (one a data-parallel rank, say).

    Raises TierError if there are none or `folder` cannot be read.
    """
    try:
        if list_caches(files, folder):
            return [folder]
        inside = [os.path.join(folder, name) for name in sorted(files.list_folder(folder))]
        roots = [path for path in inside if os.path.isdir(path) and list_caches(files, path)]
    except OSError as error:
        raise TierError(f"cannot look into {folder}: {error.strerror or error}") from error
    if not roots:
        raise TierError(f"there is no disk cache of kvtier in {folder}")
    return roots


def read_content(files: FileSystem, folder: CacheFolder) -> CacheContent | None:
    """What the cache holds, or None if it has no table that this version of kvtier wrote. Raises OSError."""
    try:
        fd = files.open(os.path.join(folder.path, TABLE_NAME), write=False)
    except FileNotFoundError:
        return None
    try:
        header = read_header(files, fd)
        if header is None:
            return None
        records: Records = np.zeros(max(0, files.size_bytes(fd) - PAGE_BYTES) // RECORD_BYTES, RECORD)
        if len(records):
            read_fully(files, fd, [records.view(np.uint8)], PAGE_BYTES)
    finally:
        files.close(fd)
    places = valid_places(records, header.namespace, _epoch_of(files, folder.path, header))
    num_stale = int((records["state"] == READY).sum()) - len(places)
    return CacheContent(folder, header, places, records[places], num_stale)


def verify(files: FileSystem, content: CacheContent, on_block: Callable[[int], None]) -> Verification:
    """Reads every block and checks it. `on_block(num_bytes)` is called after each, here. Raises OSError."""
    good, changed, corrupt = 0, 0, []
    table_fd = files.open(os.path.join(content.folder.path, TABLE_NAME), write=False)
    try:
        slab_fd = _open_for_reading(files, os.path.join(content.folder.path, SLAB_NAME))
        try:
            for place, verdict in _verdicts(files, content, table_fd, slab_fd):
                good += verdict == "good"
                changed += verdict == "changed"
                if verdict == "corrupt":
                    corrupt.append(place)
                on_block(content.header.block_bytes)
        finally:
            files.close(slab_fd)
    finally:
        files.close(table_fd)
    return Verification(good, tuple(corrupt), changed, len(content.places) * content.header.block_bytes)


def _verdicts(files: FileSystem, content: CacheContent, table_fd: int, slab_fd: int) -> Iterator[tuple[int, str]]:
    header = content.header
    records = dict(zip(content.places.tolist(), content.records, strict=True))
    found = record_keys(content.records["key"], content.records["key_bytes"])
    keys = dict(zip(content.places.tolist(), found, strict=True))

    def check(places: list[int]) -> list[tuple[int, str]]:
        block = _aligned_buffer(header.place_bytes)
        verdicts = []
        for place in places:
            try:
                read_fully(files, slab_fd, [block], place * header.place_bytes)
                epoch = int(records[place]["epoch"])
                checksum = data_checksum(block[: header.block_bytes], keys[place], header.namespace, epoch)
                good = checksum == records[place]["data_checksum"]
            except OSError:
                good = False
            # a place's record changes before its bytes do: bytes that do not match an unchanged record are bad
            unchanged = good or _generation(files, table_fd, place) == records[place]["generation"]
            verdicts.append((place, "good" if good else "corrupt" if unchanged else "changed"))
        return verdicts

    per_task = max(1, (8 << 20) // header.place_bytes)
    ordered = content.places.tolist()
    tasks = [ordered[start : start + per_task] for start in range(0, len(ordered), per_task)]
    with ThreadPoolExecutor(_NUM_READERS) as readers:
        for verdicts in readers.map(check, tasks):
            yield from verdicts


def _generation(files: FileSystem, table_fd: int, place: int) -> int:
    """Of the block that the table says is in a place now; -1 for none."""
    record: Records = np.zeros(1, RECORD)
    try:
        read_fully(files, table_fd, [record.view(np.uint8)], record_offset(place))
    except OSError:
        return -1
    return int(record["generation"][0]) if record["state"][0] == READY else -1


def _epoch_of(files: FileSystem, path: str, header: Header) -> int:
    """The epoch file's, where there is one (in a tier's first folder); otherwise what the header says."""
    epoch = FileEpochStore(os.path.join(path, EPOCH_NAME), files).read()
    return header.epoch if epoch is None else epoch


def _open_for_reading(files: FileSystem, path: str) -> int:
    try:
        return files.open(path, write=False, direct=True)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return files.open(path, write=False)


def _aligned_buffer(num_bytes: int) -> Buffer:
    memory = np.empty(num_bytes + PAGE_BYTES, np.uint8)
    start = -memory.ctypes.data % PAGE_BYTES
    return memory[start : start + num_bytes]
