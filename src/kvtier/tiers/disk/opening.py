"""From settings to open volumes and the blocks that an earlier process left in them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigurationError
from kvtier.keys import OffloadKey
from kvtier.tier_interfaces import EpochStore
from kvtier.tiers.disk.config import DiskConfig
from kvtier.tiers.disk.filesystem import FileSystem
from kvtier.tiers.disk.layout import Header, cache_bytes, places_within, record_keys, round_up
from kvtier.tiers.disk.space import SpaceLimits
from kvtier.tiers.disk.volume import Volume, claim_folders, open_volume


@dataclass(frozen=True, slots=True)
class OpenedCache:
    """A cache that this process owns. Place `p` of the tier is place `p // n` of volume `p % n`, of `n` volumes."""

    volumes: Sequence[Volume]
    num_places: int
    """Of all volumes together."""
    epoch: int
    blocks: dict[OffloadKey, int]
    """What is there: key to place, least recently used first."""
    reused: Sequence[OffloadKey]
    """Those of `blocks` that were used after their store, in the same order."""
    first_generation: int
    """Greater than any that a record has."""
    first_use_order: int


def open_cache(
    files: FileSystem, config: DiskConfig, epoch_store: EpochStore, *, block_bytes: int, direct: bool, now_s: float
) -> OpenedCache:
    """Opens the cache of `config` in all of its folders, making what is missing.

    Raises ConfigurationError if the capacity holds no block, TierError or OSError if a folder cannot be used; then
    nothing stays open.
    """
    place_bytes = round_up(block_bytes)
    share_bytes = config.capacity_bytes // len(config.paths) // config.num_ranks
    if places_within(share_bytes, place_bytes) < 1:
        shared = f" for {config.num_ranks} ranks" if config.num_ranks > 1 else ""
        raise ConfigurationError(
            f"the disk capacity is {config.capacity_bytes} bytes in {len(config.paths)} folders{shared}; a block takes "
            f"{place_bytes} bytes and each folder {cache_bytes(1, 0)} more"
        )
    limits = SpaceLimits(
        cap_bytes=config.capacity_bytes // len(config.paths),
        share_bytes=share_bytes,
        keep_others=config.keep_other_namespaces,
        min_free_bytes=config.min_free_bytes,
        grow_bytes=config.grow_bytes,
    )
    roots = [os.path.abspath(path) for path in config.paths]
    pending = claim_folders(files, roots, config.folder, place_bytes, limits)
    num_places = sum(claim.num_places for claim in pending)
    volumes: list[Volume] = []
    try:
        epoch = epoch_store.current()
        header = Header(block_bytes, config.namespace, epoch, int(now_s), config.label)
        while pending:
            volumes.append(open_volume(files, pending.pop(0), header, limits, direct))
        return _restore(volumes, num_places, epoch)
    except BaseException:
        for claim in pending:
            files.close(claim.lock_fd)
        for volume in volumes:
            volume.close()
        raise


def _restore(volumes: Sequence[Volume], num_places: int, epoch: int) -> OpenedCache:
    use_order = np.concatenate([volume.table.records["use_order"][volume.places] for volume in volumes])
    if not len(use_order):
        return OpenedCache(volumes, num_places, epoch, {}, (), 1, 1)
    order = np.argsort(use_order)

    def column(name: str) -> npt.NDArray[Any]:
        # one field at a time: 100,000 whole records are 13 MB
        fields: npt.NDArray[Any]
        if len(volumes) == 1:
            fields = volumes[0].table.records[name][volumes[0].places[order]]
        else:
            fields = np.concatenate([volume.table.records[name][volume.places] for volume in volumes])[order]
        return fields

    places = np.concatenate([volume.places * len(volumes) + i for i, volume in enumerate(volumes)])
    keys, place_list = record_keys(column("key"), column("key_bytes")), places[order].tolist()
    # a key twice was stored again before the record of the first was blank: one of them holds, the other is free
    blocks = dict(zip(keys, place_list, strict=True))
    reused = dict.fromkeys(map(keys.__getitem__, np.flatnonzero(column("num_uses")).tolist()))
    first_generation, first_order = int(column("generation").max()) + 1, int(use_order.max()) + 1
    return OpenedCache(volumes, num_places, epoch, blocks, list(reused), first_generation, first_order)
