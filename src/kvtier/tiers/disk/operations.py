"""What the I/O threads do with blocks: runs of adjacent places, written or read and verified in one call."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.tiers.catalog import Place
from kvtier.tiers.disk.filesystem import FileSystem, read_fully, write_fully
from kvtier.tiers.disk.layout import data_checksum
from kvtier.tiers.disk.table import BlockRecord
from kvtier.tiers.disk.volume import Volume
from kvtier.tiers.jobs import OpenJob

REASON_CORRUPT = "the bytes are not those that were stored"
REASON_LOW_SPACE = "free space is, or would fall, below its floor"


@dataclass(slots=True, eq=False)
class BlockIo:
    """One block to be moved. Belongs to the I/O threads from its submission until it is taken back as done."""

    job: OpenJob
    position: int
    place: Place
    slot: int
    """In the RAM pool."""
    volume_idx: int
    local_place: int
    """Within the volume."""
    generation: int
    """For the record of a store."""
    epoch: int
    use_order: int = 0
    began: bool = False
    success: bool = False
    corrupt: bool = False
    reason: str = ""
    begun_s: float = 0.0
    ended_s: float = 0.0


class BlockMover:
    """Moves runs of blocks between the pool and the volumes. Used by all I/O threads at once."""

    def __init__(
        self,
        files: FileSystem,
        volumes: Sequence[Volume],
        pool: npt.NDArray[np.uint8],
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self.pool = pool
        self._files = files
        self._volumes = volumes
        self._clock = clock
        self._wall_clock = wall_clock

    def move(self, run: Sequence[BlockIo]) -> None:
        """Does what the run asks for and notes in each block how it went. Raises nothing."""
        begun_s = self._clock()
        try:
            if run[0].job.is_store:
                self._write(run)
            else:
                self._read(run)
        except OSError as error:
            _fail(run, f"{errno.errorcode.get(error.errno or 0, 'OSError')}: {error.strerror or error}")
        except BaseException as error:  # this thread has other blocks to move
            _fail(run, f"{type(error).__name__}: {error}")
        ended_s = self._clock()
        for block in run:
            block.begun_s, block.ended_s = begun_s, ended_s

    def _write(self, run: Sequence[BlockIo]) -> None:
        volume = self._volumes[run[0].volume_idx]
        if not volume.has_space():
            _fail(run, REASON_LOW_SPACE)
            return
        header = volume.header
        buffers = [self.pool[block.slot] for block in run]
        records = [
            BlockRecord(
                block.local_place,
                block.place.key,
                block.generation,
                block.epoch,
                data_checksum(buffer, block.place.key, header.namespace, block.epoch),
                block.use_order,
            )
            for block, buffer in zip(run, buffers, strict=True)
        ]
        volume.ensure(run[-1].local_place + 1)
        volume.table.begin_writes([block.local_place for block in run])
        write_fully(self._files, volume.slab_fd, buffers, run[0].local_place * header.place_bytes)
        volume.table.stage(records, self._wall_clock())
        for block in run:
            block.success = True

    def _read(self, run: Sequence[BlockIo]) -> None:
        volume = self._volumes[run[0].volume_idx]
        header = volume.header
        buffers = [self.pool[block.slot] for block in run]
        read_fully(self._files, volume.slab_fd, buffers, run[0].local_place * header.place_bytes)
        for block, buffer in zip(run, buffers, strict=True):
            key, checksum = volume.table.expected(block.local_place)
            block.success = key == block.place.key and checksum == data_checksum(
                buffer, key, header.namespace, block.epoch
            )
            if not block.success:
                block.corrupt, block.reason = True, REASON_CORRUPT


def _fail(run: Sequence[BlockIo], reason: str) -> None:
    for block in run:
        block.success, block.reason = False, reason
