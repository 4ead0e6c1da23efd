"""`DiskTier`: blocks in preallocated slabs on local disks, checked at every load, still there after a restart."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from kvtier.errors import InvariantError, ManagerUsageError, TierError
from kvtier.interfaces import Residency
from kvtier.keys import OffloadKey
from kvtier.policy import make_policy
from kvtier.tier_interfaces import (
    REASON_CANCELLED,
    REASON_CLOSED,
    REASON_RESET,
    EpochStore,
    Tier,
    TierOutcome,
    TierStats,
)
from kvtier.tiers.catalog import Place, TierCatalog
from kvtier.tiers.disk.config import DiskConfig
from kvtier.tiers.disk.filesystem import FileSystem
from kvtier.tiers.disk.layout import (
    MAX_KEY_BYTES,
    PAGE_BYTES,
    cache_bytes,
    round_up,
)
from kvtier.tiers.disk.opening import open_cache
from kvtier.tiers.disk.operations import BlockIo, BlockMover
from kvtier.tiers.disk.threads import IoThreads, sorted_for_device
from kvtier.tiers.disk.volume import Volume
from kvtier.tiers.jobs import ALREADY_STORING, NOT_THERE, OpenJob, check_pool, check_submission

logger = logging.getLogger(__name__)

MAX_RUN_BYTES = 2 << 20
"""Blocks in adjacent places are moved in one call up to this size."""
MAX_FAILURES = 3
"""So many stores failed one after the other: stores are refused for a while."""
PAUSE_S = 10.0
STOP_S = 0.8
"""How long `close` waits for threads, after the flush."""


class DiskTier(Tier):
    """See `Tier` for the contract and docs/decisions/disk-layout.md for what lies on the disk.

    `epoch_store` says which weight epoch holds when the tier is attached; whoever resets raises it there first. About
    500 bytes of memory a place. One process at a time: attaching a folder that another tier owns is a TierError.
    """

    medium = "DISK"

    def __init__(
        self,
        config: DiskConfig,
        epoch_store: EpochStore,
        *,
        files: FileSystem | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.config = config
        self.epoch_store = epoch_store
        self._files = files or FileSystem()
        self._clock = clock
        self._wall_clock = wall_clock
        self._catalog = TierCatalog(0, make_policy(config.policy, 1))
        self._volumes: Sequence[Volume] = ()
        self._threads = IoThreads(_move_nothing, lambda: True, 0, 1, 0.0)
        self._jobs: dict[int, OpenJob] = {}
        self._num_slots = 0
        self._block_bytes = 0
        self._epoch = 0
        self._first_generation = 1
        self._use_order = 0
        self._max_storing = 0
        self._num_failures = 0
        self._paused_until_s = -float("inf")
        self._closed_reason = "not attached"
        # set on the commit thread, read in the caller's
        self._num_durable = 0
        self._num_failed_commits = 0
        self._lost_reason = ""

    # -- life ------------------------------------------------------------------------------------------------

    def attach(self, pool: npt.NDArray[np.uint8]) -> None:
        check_pool(pool)
        if self._closed_reason != "not attached":
            raise ManagerUsageError("the disk tier has been attached already")
        try:
            self._open(pool)
        except BaseException as error:
            for volume in self._volumes:
                volume.close()
            self._volumes = ()
            if isinstance(error, TierError) or not isinstance(error, OSError):
                raise
            where = error.filename or ", ".join(self.config.paths)
            raise TierError(f"cannot use {where} for a disk tier: {error.strerror or error}") from error
        self._closed_reason = ""

    def describe(self) -> str:
        """One line for a log: sizes, place, and how it is read and written."""
        num_bytes = self._catalog.num_places * round_up(self._block_bytes)
        access = "past the page cache" if self._volumes and self._volumes[0].direct else "through the page cache"
        return (
            f"disk tier of {num_bytes / 2**30:.2f} GiB ({self._catalog.num_places} blocks of {self._block_bytes} "
            f"bytes, {self._catalog.num_ready} there) in {', '.join(self.config.paths)}, {access}"
        )

    def disable(self, reason: str) -> None:
        self._give_up(reason)
        for volume in self._volumes:
            try:
                volume.table.invalidate()
            except OSError as error:
                logger.error("kvtier: cannot empty the disk cache in %s (%s): remove it", volume.path, error.strerror)

    def flush(self, timeout_s: float) -> bool:
        return not self._closed_reason and self._threads.flush(timeout_s)

    def close(self, flush_s: float = 0.0) -> bool:
        if self._closed_reason == "not attached" or not self._volumes:
            self._closed_reason = self._closed_reason or REASON_CLOSED
            return True
        flushed = flush_s <= 0 or bool(self._closed_reason) or self._threads.flush(0.75 * flush_s)
        if not flushed:  # what was stored is made durable, even if not everything could be
            self._end_queued(REASON_CLOSED, lambda block: True)
            self._threads.flush(0.25 * flush_s)
        self._closed_reason = self._closed_reason or REASON_CLOSED
        self._end_queued(REASON_CLOSED, lambda block: True)
        if not self._threads.stop(STOP_S):
            return False  # the files stay open and owned as long as a thread may use them
        for volume in self._volumes:
            volume.close()
        self._volumes = ()
        return True

    # -- look-up and recency ---------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[OffloadKey]) -> list[Residency]:
        if self._closed_reason:
            return [Residency.ABSENT] * len(keys)
        return self._catalog.lookup(keys)

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        self._catalog.touch(keys)
        places = self._catalog.places_of(reversed(keys))
        if places and self._volumes:
            used = np.array(places, np.int64)
            orders = np.arange(self._use_order, self._use_order + len(used))
            self._use_order += len(used)
            now_s = self._wall_clock()
            for volume_idx, volume in enumerate(self._volumes):
                mine = used % len(self._volumes) == volume_idx
                volume.table.note_uses(used[mine] // len(self._volumes), orders[mine], now_s)

    # -- jobs ------------------------------------------------------------------------------------------------

    def submit_store(self, job_id: int, keys: Sequence[OffloadKey], slots: Sequence[int]) -> int:
        check_submission(job_id, keys, slots, self._jobs, self._num_slots)
        num_offered = len(keys)
        if self._closed_reason or self._clock() < self._paused_until_s:
            self._catalog.counters["shed_blocks"] += num_offered
            return 0
        keys = list(takewhile(lambda key: len(key) <= MAX_KEY_BYTES, keys))
        self._catalog.counters["shed_blocks"] += num_offered - len(keys)
        places = self._catalog.begin_store(keys, max(0, self._max_storing - self._catalog.num_storing))
        if not places:
            return 0
        job = self._jobs[job_id] = OpenJob(job_id, True, keys[: len(places)])
        blocks = []
        for position, place in enumerate(places):
            if isinstance(place, Place):
                blocks.append(self._block(job, position, place, slots[position]))
            else:
                job.end_block(position, place, reason=ALREADY_STORING)
        self._threads.submit(sorted_for_device(blocks))
        return len(places)

    def submit_load(self, job_id: int, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        check_submission(job_id, keys, slots, self._jobs, self._num_slots)
        job = self._jobs[job_id] = OpenJob(job_id, False, keys)
        blocks = []
        places = [None] * len(keys) if self._closed_reason else self._catalog.begin_load(keys)
        for position, place in enumerate(places):
            if place is None:
                job.end_block(position, False, reason=self._closed_reason or NOT_THERE)
            else:
                blocks.append(self._block(job, position, place, slots[position]))
        self._threads.submit(sorted_for_device(blocks))

    def poll(self) -> list[TierOutcome]:
        if self._lost_reason and not self._closed_reason:
            self._give_up(self._lost_reason)
        for block in self._threads.take_done():
            self._end(block)
        ended = [job for job in self._jobs.values() if not job.num_open]
        for job in ended:
            del self._jobs[job.job_id]
        return [job.outcome() for job in ended]

    @property
    def num_open_jobs(self) -> int:
        """Jobs whose outcome has not been polled. O(1)."""
        return len(self._jobs)

    def cancel(self, job_id: int) -> None:
        job = self._jobs.get(job_id)
        if job is not None:
            self._end_queued(REASON_CANCELLED, lambda block: block.job is job)

    def wait_for_outcome(self, timeout_s: float) -> None:
        if all(job.num_open for job in self._jobs.values()) and self._jobs:
            self._threads.wait_for_done(timeout_s)

    # -- leaving ---------------------------------------------------------------------------------------------

    def drop(self, keys: Sequence[OffloadKey]) -> None:
        self._free(self._catalog.drop(keys))

    def reset(self, epoch: int) -> list[OffloadKey]:
        ready = self._catalog.reset()
        self._epoch = epoch
        for volume in self._volumes:
            volume.table.set_epoch(epoch)
        for job in self._jobs.values():
            job.void(REASON_RESET)
        self._end_queued(REASON_RESET, lambda block: True)
        self._threads.note_change()
        return ready

    def take_removed(self) -> list[OffloadKey]:
        return self._catalog.take_removed()

    def get_stats(self) -> TierStats:
        catalog = self._catalog
        num_volumes = max(1, len(self.config.paths))
        return TierStats(
            medium=self.medium,
            capacity_blocks=catalog.num_places,
            capacity_bytes=num_volumes * cache_bytes(catalog.num_places // num_volumes, round_up(self._block_bytes)),
            ready_blocks=catalog.num_ready,
            storing_blocks=catalog.num_storing,
            loading_blocks=catalog.num_loading,
            closed_reason=self._closed_reason,
            counters={
                **catalog.counters,
                "durable_blocks": self._num_durable,
                "failed_commits": self._num_failed_commits,
            },
        )

    def check_invariants(self) -> None:
        self._catalog.check_invariants()
        for key in self._catalog.ready_keys() if self._volumes else ():
            (place,) = self._catalog.places_of((key,))
            volume = self._volumes[place % len(self._volumes)]
            if volume.table.expected(place // len(self._volumes))[0] != key:
                raise InvariantError(f"place {place} does not hold block {key.hex()}")

    # -- private ---------------------------------------------------------------------------------------------

    def _open(self, pool: npt.NDArray[np.uint8]) -> None:
        config, began_s = self.config, self._clock()
        self._num_slots, self._block_bytes = pool.shape
        aligned = pool.ctypes.data % PAGE_BYTES == 0 and self._block_bytes % PAGE_BYTES == 0
        cache = open_cache(
            self._files,
            config,
            self.epoch_store,
            block_bytes=self._block_bytes,
            direct=config.direct and aligned,
            now_s=self._wall_clock(),
        )
        self._volumes, self._epoch = cache.volumes, cache.epoch
        self._first_generation, self._use_order = cache.first_generation, cache.first_use_order
        self._catalog = TierCatalog(cache.num_places, make_policy(config.policy, cache.num_places))
        self._catalog.restore(cache.blocks, cache.reused)
        mover = BlockMover(
            self._files,
            self._volumes,
            pool,
            clock=self._clock,
            wall_clock=self._wall_clock,
        )
        num_threads = config.num_threads
        if num_threads is None:
            num_threads = 8 if self._block_bytes >= 1 << 20 else 12
        # blocks that are not whole pages are not adjacent
        max_run_blocks = max(1, MAX_RUN_BYTES // self._block_bytes) if self._block_bytes % PAGE_BYTES == 0 else 1
        self._max_storing = max(1, config.max_storing_bytes // self._block_bytes)
        self._threads = IoThreads(mover.move, self._commit, num_threads, max_run_blocks, config.commit_s)
        logger.info("kvtier: %s, opened in %.0f ms", self.describe(), 1000 * (self._clock() - began_s))
        if config.direct and not all(volume.direct for volume in self._volumes):
            why = "the filesystem has no O_DIRECT" if aligned else "the RAM pool's slots are not whole pages"
            logger.warning("kvtier: the disk tier goes through the page cache: %s", why)
        self._threads.start()
        if any(volume.table.needs_commit for volume in self._volumes):
            self._threads.note_change()

    def _block(self, job: OpenJob, position: int, place: Place, slot: int) -> BlockIo:
        volume_idx, local_place = place.index % len(self._volumes), place.index // len(self._volumes)
        self._use_order += job.is_store
        return BlockIo(
            job,
            position,
            place,
            slot,
            volume_idx,
            local_place,
            generation=self._first_generation + place.generation,
            epoch=self._epoch,
            use_order=self._use_order,
        )

    def _end(self, block: BlockIo) -> None:
        """A block that was moved, or never will be, leaves the books."""
        job, catalog = block.job, self._catalog
        success = block.success
        if job.is_store:
            success = catalog.end_store(block.place, success)
        else:
            current = catalog.end_load(block.place)
            if block.began and not block.success and current:
                catalog.counters["corrupt_blocks"] += block.corrupt
                self._free(catalog.drop((block.place.key,)))
            success = success and current
            catalog.counters["loaded_blocks" if success else "failed_load_blocks"] += 1
        if block.began:
            job.note_time(block.begun_s, block.ended_s)
            if job.is_store:
                self._note_store(block.success, block.reason)
        job.end_block(block.position, success, self._block_bytes, block.reason or NOT_THERE)

    def _note_store(self, success: bool, reason: str) -> None:
        self._num_failures = 0 if success else self._num_failures + 1
        if self._num_failures >= MAX_FAILURES:
            if self._paused_until_s == -float("inf"):
                logger.warning("kvtier: the disk tier stores nothing for a while: %s", reason)
            self._paused_until_s = self._clock() + PAUSE_S
            self._num_failures = MAX_FAILURES - 1  # one more failure is enough for the next pause
        elif success:
            self._paused_until_s = -float("inf")

    def _free(self, places: Sequence[int]) -> None:
        num_volumes = len(self._volumes)
        for place in places:
            self._volumes[place % num_volumes].table.free([place // num_volumes])
        if places:
            self._threads.note_change()

    def _end_queued(self, reason: str, wanted: Callable[[BlockIo], bool]) -> None:
        for block in self._threads.withdraw(wanted):
            block.reason = reason
            self._end(block)

    def _give_up(self, reason: str) -> None:
        """Serves nothing any more. What is on the disk stays."""
        if not self._closed_reason:
            logger.error("kvtier: the disk tier is off: %s", reason)
            self._closed_reason = reason
        self._catalog.drop(self._catalog.ready_keys())
        for job in self._jobs.values():
            job.void(reason)
        self._end_queued(REASON_CLOSED, lambda block: True)

    def _commit(self) -> bool:
        """On the commit thread. Whether all that was stored is durable now."""
        worked = True
        for volume in self._volumes:
            try:
                self._num_durable += volume.table.commit(volume.slab_fd)
                if volume.vanished():
                    self._lost_reason = f"{volume.path} has been deleted"
            except OSError as error:
                worked = False
                self._num_failed_commits += 1
                logger.debug("kvtier: commit in %s failed: %s", volume.path, error)
            except Exception:  # a bug: said, and no reason for what waits for a commit to wait for ever
                worked = False
                logger.exception("kvtier: commit in %s failed", volume.path)
        return worked


def _move_nothing(run: Sequence[BlockIo]) -> None:
    raise InvariantError("the disk tier is not attached")
