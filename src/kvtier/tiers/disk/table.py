"""`SlotTable`: the records of one folder's places, in memory and in the table file.

The copy in memory is what holds; the file follows it in `commit`, in the order that a power loss demands: data,
fdatasync, record. A place's record is blank in the file before its bytes change, so that a process that dies, or one
that only reads beside this one, never finds a record over other bytes; after a power loss it is the checksum that
tells.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.keys import OffloadKey
from kvtier.tiers.disk.filesystem import FileSystem, read_fully, write_fully
from kvtier.tiers.disk.layout import (
    MAX_KEY_BYTES,
    PAGE_BYTES,
    READY,
    RECORD,
    RECORD_BYTES,
    Header,
    Records,
    namespace_tag,
    record_offset,
    seal,
    table_bytes,
    valid_places,
)

_MAX_GAP = 8
"""Records between two that changed which are rather written too than with a call more."""

_MAX_NOTES = 10_000


class BlockRecord(NamedTuple):
    """One block that was written: what its record will say."""

    place: int
    key: OffloadKey
    generation: int
    epoch: int
    data_checksum: int
    use_order: int


class SlotTable:
    """Records of `num_places` places. Thread-safe; `free`, `note_uses` and `set_epoch` wait for nothing."""

    def __init__(self, files: FileSystem, fd: int, header: Header, num_places: int) -> None:
        self.records: Records = np.zeros(num_places, RECORD)
        """Not to be changed from outside. A record of a place that is not being written or freed may be read."""
        self._files = files
        self._fd = fd
        self._header = header
        self._header_changed = False
        self._lock = threading.Lock()
        self._commit_lock = threading.Lock()
        self._staged: dict[int, int] = {}  # place -> generation: written, but not known to be on the medium
        self._changed: set[int] = set()  # places whose record the file does not have yet
        self._freed: deque[tuple[int, int]] = deque()
        # bounded for a device that stalls: what is forgotten costs the next process some recency
        self._uses: deque[tuple[Sequence[int], Sequence[int], int]] = deque(maxlen=_MAX_NOTES)
        self._is_dead = False
        self._unwritten: set[int] = set()  # written to the file, not known to be on the medium

    # -- opening ---------------------------------------------------------------------------------------------

    def format(self) -> None:
        """An empty table of this header, durable when this returns. Raises OSError."""
        self.records[:] = np.zeros((), RECORD)
        # the header last: until it is there, there is no table
        self._files.truncate(self._fd, 0)
        self._files.allocate(self._fd, table_bytes(len(self.records)))
        self._files.fdatasync(self._fd)
        self._write_header()
        self._files.fdatasync(self._fd)

    def recover(self, num_usable: int) -> npt.NDArray[np.int64]:
        """Reads the file. Returns the places, below `num_usable`, that hold a block; others are blank from now on.

        Ascending. Raises OSError.
        """
        num_there = max(0, self._files.size_bytes(self._fd) - PAGE_BYTES) // RECORD_BYTES
        found = self.records[: min(num_there, len(self.records))]
        if len(found):
            read_fully(self._files, self._fd, [found.view(np.uint8)], PAGE_BYTES)
        places = valid_places(found[:num_usable], self._header.namespace, self._header.epoch)
        blank = np.ones(len(found), bool)
        blank[places] = False
        self._blank(np.flatnonzero(blank & (found["state"] != 0)))
        return places

    def blank(self, places: Sequence[int]) -> None:
        """Forgets the blocks in these places; the file follows with the next commit. For opening."""
        self._blank(np.array(places, np.int64))

    def write_blanks(self) -> None:
        """Brings records that `recover` and `blank` made blank to the file. Raises OSError."""
        with self._lock:
            self._write_changes()

    # -- writing a block, on an I/O thread ---------------------------------------------------------------------

    def begin_writes(self, places: Sequence[int]) -> None:
        """Before the bytes of these adjacent places change: their records are blank, in the file too.

        Raises OSError.
        """
        first, last = places[0], places[-1]
        with self._lock:
            for place in places:
                self._staged.pop(place, None)
            if not self.records["state"][first : last + 1].any() and self._changed.isdisjoint(places):
                return  # blank in the file already
            self.records[first : last + 1] = np.zeros((), RECORD)
            blank = np.zeros(len(places) * RECORD_BYTES, np.uint8)
            write_fully(self._files, self._fd, [blank], record_offset(first))
            self._changed.difference_update(places)

    def stage(self, blocks: Sequence[BlockRecord], now_s: float) -> None:
        """The bytes of these places are written: the next commit makes them durable, then their records."""
        with self._lock:
            for block in blocks:
                if block.epoch != self._header.epoch:
                    continue
                self.records[block.place] = (
                    READY,
                    len(block.key),
                    0,
                    block.key.ljust(MAX_KEY_BYTES, b"\0"),
                    block.generation,
                    block.epoch,
                    block.data_checksum,
                    block.use_order,
                    int(now_s),
                    int(now_s),
                    namespace_tag(self._header.namespace),
                    0,
                )
                self._staged[block.place] = block.generation

    def expected(self, place: int) -> tuple[OffloadKey, int]:
        """Key and data checksum of the block in a place that nobody is writing."""
        record = self.records[place]
        return OffloadKey(record["key"].tobytes()[: record["key_bytes"]]), int(record["data_checksum"])

    # -- what the tier's caller says -----------------------------------------------------------------------------

    def free(self, places: Sequence[int]) -> None:
        """The blocks that these places hold now are gone. Their records are blank from the next commit on."""
        self._freed.extend((place, int(self.records["generation"][place])) for place in places)

    def note_uses(self, places: Sequence[int], orders: Sequence[int], now_s: float) -> None:
        """One use of the block in each of `places`, with its number in the order of all uses."""
        self._uses.append((places, orders, int(now_s)))

    def set_epoch(self, epoch: int) -> None:
        """Nothing of an earlier epoch is a block any more. The file follows with the next commit."""
        header = self._header
        self._header = Header(header.block_bytes, header.namespace, epoch, header.created_at_s, header.label)
        self._header_changed = True

    def invalidate(self) -> None:
        """Empties the file, durably, and lets no later commit write to it. Raises OSError."""
        self._is_dead = True
        locked = self._lock.acquire(timeout=1.0)  # a commit that is stuck in the device is not waited for
        try:
            self._files.truncate(self._fd, 0)
            self._files.fdatasync(self._fd)
        finally:
            if locked:
                self._lock.release()

    @property
    def needs_commit(self) -> bool:
        """Whether blocks, freed places or an epoch wait for a commit (uses alone can wait longer)."""
        return bool(self._staged or self._freed or self._changed or self._unwritten or self._header_changed)

    # -- commit --------------------------------------------------------------------------------------------------

    def commit(self, slab_fd: int) -> int:
        """Makes durable what was staged before, in order. Returns how many blocks. Raises OSError.

        After an error all of it comes again with the next commit.
        """
        with self._commit_lock:
            with self._lock:
                staged, self._staged = self._staged, {}
            if staged:
                try:
                    self._files.fdatasync(slab_fd)
                except OSError:
                    with self._lock:
                        self._staged = {**staged, **self._staged}
                    raise
            with self._lock:
                if self._is_dead:
                    return 0
                generations = self.records["generation"]
                durable = [place for place, number in staged.items() if generations[place] == number]
                self._changed.update(durable)
                self._apply_changes()
                if self._header_changed:
                    self._header_changed = False
                    self._blank(np.flatnonzero((self.records["state"] == READY) & self._outdated()))
                    self._unwritten.add(-1)
                self._write_changes()
                if not self._unwritten:
                    return len(durable)
                unwritten, self._unwritten = self._unwritten, set()
            try:
                self._files.fdatasync(self._fd)
            except OSError:
                with self._lock:  # the kernel may have dropped the pages: all of it once more
                    self._changed |= {place for place in unwritten if place >= 0 and place not in self._staged}
                    self._unwritten |= unwritten & {-1}
                raise
            return len(durable)

    def _outdated(self) -> npt.NDArray[np.bool_]:
        outdated: npt.NDArray[np.bool_] = self.records["epoch"] != self._header.epoch
        return outdated

    def _apply_changes(self) -> None:
        """What the caller said since the last commit. Lock held."""
        while self._freed:
            place, generation = self._freed.popleft()
            if self.records["generation"][place] == generation:
                self._blank(np.array([place]))
        while self._uses:
            places, orders, now_s = self._uses.popleft()
            used = np.array(places, np.int64)
            # a place that was given away meanwhile gets a use too many: only its rank in the next process is wrong
            self.records["num_uses"][used] += 1
            self.records["use_order"][used] = orders
            self.records["used_at_s"][used] = now_s
            ready = used[self.records["state"][used] == READY].tolist()
            self._changed.update(place for place in ready if place not in self._staged)

    def _blank(self, places: npt.NDArray[np.int64]) -> None:
        self.records[places] = np.zeros((), RECORD)
        for place in places.tolist():
            self._staged.pop(place, None)
            self._changed.add(place)

    def _write_changes(self) -> None:
        """The records that changed, to the file. Lock held. Raises OSError; what was not written stays to be."""
        if -1 in self._unwritten:
            self._write_header()
        places = sorted(self._changed)
        ready = np.array([place for place in places if self.records["state"][place] == READY], np.int64)
        records = self.records[ready]
        seal(records, ready)
        self.records[ready] = records
        start = 0
        for i in range(1, len(places) + 1):
            if (
                i < len(places)
                and places[i] - places[i - 1] <= _MAX_GAP
                and self._staged.keys().isdisjoint(range(places[i - 1] + 1, places[i]))
            ):
                continue
            run = places[start:i]
            content = self.records[run[0] : run[-1] + 1].view(np.uint8)
            write_fully(self._files, self._fd, [content], record_offset(run[0]))
            self._unwritten.update(run)
            self._changed.difference_update(run)
            start = i

    def _write_header(self) -> None:
        write_fully(self._files, self._fd, [np.frombuffer(self._header.pack(), np.uint8)], 0)
