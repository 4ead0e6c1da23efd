"""From a job's block ids and slots to the addresses that a copier needs. Checks every range first."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.errors import TransferError
from kvtier.transfers.jobs import GroupCopy, TransferJob
from kvtier.transfers.kernels import AddressArray, SizeArray
from kvtier.transfers.layout import PageRef, SlotLayout

Bytes2D = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]


class Fragments(NamedTuple):
    """What to copy, by address. All (n,) and C-contiguous."""

    dst_addresses: AddressArray
    src_addresses: AddressArray
    sizes: SizeArray

    def cut(self, slice_bytes: int) -> list[Fragments]:
        """Consecutive pieces of about `slice_bytes` bytes, at least one fragment each. Views."""
        if not len(self.sizes):
            return []
        ends = np.cumsum(self.sizes)
        num_slices = max(1, -(-int(ends[-1]) // slice_bytes))
        targets = np.arange(1, num_slices) * (int(ends[-1]) / num_slices)
        cuts = [0, *np.unique(np.searchsorted(ends, targets, side="left") + 1).tolist(), len(ends)]
        return [
            Fragments(self.dst_addresses[a:b], self.src_addresses[a:b], self.sizes[a:b])
            for a, b in itertools.pairwise(cuts)
            if a < b
        ]


class _GroupPages(NamedTuple):
    """One group's pages, one entry a tensor. All int64."""

    bases: Ids
    row_strides: Ids
    slot_offsets: Ids
    slot_strides: Ids
    sizes: Ids
    num_blocks: int


class Planner:
    """Turns jobs into fragments for one rank.

    `engine_tensors` are (num_blocks, row_bytes) uint8, writable, rows contiguous but possibly further apart.
    The caller keeps them and the pool alive while anything planned here is copied. Raises TransferError if
    tensors, groups, layout and rank do not fit together.
    """

    def __init__(
        self,
        engine_tensors: Sequence[Bytes2D],
        group_refs: Sequence[Sequence[PageRef]],
        layout: SlotLayout,
        rank: int,
    ) -> None:
        if not 0 <= rank < layout.num_ranks:
            raise TransferError(f"rank {rank} is not in 0..{layout.num_ranks - 1}")
        if len(engine_tensors) != len(layout.page_bytes):
            raise TransferError(f"{len(engine_tensors)} tensors for a layout of {len(layout.page_bytes)}")
        for tensor_idx, tensor in enumerate(engine_tensors):
            _check_tensor(tensor_idx, tensor)
        self._layout = layout
        self._stripe_offset = rank * layout.stripe_bytes
        self._groups = [self._group_pages(engine_tensors, refs) for refs in group_refs]

    def _group_pages(self, tensors: Sequence[Bytes2D], refs: Sequence[PageRef]) -> _GroupPages:
        layout = self._layout
        for tensor_idx, page_bytes in refs:
            if not 0 <= tensor_idx < len(tensors):
                raise TransferError(f"tensor_idx {tensor_idx} is not in 0..{len(tensors) - 1}")
            room_bytes = min(layout.page_bytes[tensor_idx], tensors[tensor_idx].shape[1])
            if not 0 < page_bytes <= room_bytes:
                raise TransferError(f"page_bytes {page_bytes} of tensor {tensor_idx} is not in 1..{room_bytes}")

        def per_tensor(values: list[int]) -> Ids:
            return np.array(values, dtype=np.int64)[:, np.newaxis]

        indices = [ref.tensor_idx for ref in refs]
        return _GroupPages(
            bases=per_tensor([tensors[t].ctypes.data for t in indices]),
            row_strides=per_tensor([tensors[t].strides[0] for t in indices]),
            slot_offsets=per_tensor([self._stripe_offset + layout.tensor_offset(t) for t in indices]),
            slot_strides=per_tensor([layout.page_bytes[t] for t in indices]),
            sizes=per_tensor([ref.page_bytes for ref in refs]),
            num_blocks=min((tensors[t].shape[0] for t in indices), default=0),
        )

    def plan(self, job: TransferJob, pool: Bytes2D) -> Fragments:
        """The job's fragments in `pool`, tensor by tensor. Raises TransferError for a job that does not fit.

        O(fragments), a few array operations a group; the result is the caller's.
        """
        parts = [self._plan_group(group, pool) for group in job.groups]
        parts = [part for part in parts if len(part[2])]
        if not parts:
            nothing = np.empty(0, dtype=np.int64)
            return Fragments(nothing.view(np.uint64), nothing.view(np.uint64), nothing)
        engine, slots, sizes = parts[0] if len(parts) == 1 else (np.concatenate(p) for p in zip(*parts, strict=True))
        dst, src = (slots, engine) if job.is_store else (engine, slots)
        return Fragments(dst.view(np.uint64), src.view(np.uint64), sizes)

    def _plan_group(self, group: GroupCopy, pool: Bytes2D) -> tuple[Ids, Ids, Ids]:
        """(engine addresses, pool addresses, sizes), each (tensors * blocks,)."""
        if not 0 <= group.group_idx < len(self._groups):
            raise TransferError(f"group_idx {group.group_idx} is not in 0..{len(self._groups) - 1}")
        pages = self._groups[group.group_idx]
        per_chunk = self._layout.blocks_per_chunk
        first = group.first_sub_block
        if not 0 <= first < per_chunk:
            raise TransferError(f"first_sub_block {first} is not in 0..{per_chunk - 1}")
        blocks = _checked_ids("engine block", group.engine_blocks, pages.num_blocks)
        slots = _checked_ids("slot", group.slots, pool.shape[0])
        num_slots = -(-(first + len(blocks)) // per_chunk) if len(blocks) else len(slots)
        if len(slots) != num_slots:
            raise TransferError(f"{len(blocks)} blocks from sub-block {first} need {num_slots} slots, got {len(slots)}")
        positions: Ids = np.arange(first, first + len(blocks), dtype=np.int64)
        chunk_idx, sub_blocks = positions // per_chunk, positions % per_chunk
        engine = pages.bases + blocks * pages.row_strides
        slot_starts = pool.ctypes.data + slots[chunk_idx] * pool.strides[0]
        target = pages.slot_offsets + slot_starts + sub_blocks * pages.slot_strides
        flat = (engine.reshape(-1), target.reshape(-1), np.repeat(pages.sizes.reshape(-1), len(blocks)))
        if per_chunk == 1:
            return flat
        return _join_neighbours(*flat, np.tile(sub_blocks == 0, len(pages.sizes)))


def _join_neighbours(engine: Ids, target: Ids, sizes: Ids, starts_slot: npt.NDArray[np.bool_]) -> tuple[Ids, Ids, Ids]:
    """Joins fragments that follow each other on both sides, within a slot: longer ones could not be shared."""
    if len(sizes) < 2:
        return engine, target, sizes
    is_first = starts_slot.copy()
    is_first[0] = True
    is_first[1:] |= (engine[1:] != engine[:-1] + sizes[:-1]) | (target[1:] != target[:-1] + sizes[:-1])
    firsts = np.flatnonzero(is_first)
    return engine[firsts], target[firsts], np.add.reduceat(sizes, firsts)


def _check_tensor(tensor_idx: int, tensor: Bytes2D) -> None:
    if tensor.dtype != np.uint8 or tensor.ndim != 2 or 0 in tensor.shape:
        raise TransferError(
            f"engine tensor {tensor_idx} must be (blocks, row_bytes) uint8, got {tensor.shape} {tensor.dtype}"
        )
    if tensor.strides[1] != 1 or (tensor.shape[0] > 1 and tensor.strides[0] < tensor.shape[1]):
        raise TransferError(f"engine tensor {tensor_idx} has overlapping or scattered rows: strides {tensor.strides}")
    if not tensor.flags.writeable:
        raise TransferError(f"engine tensor {tensor_idx} is not writable")


def _checked_ids(what: str, ids: Ids, limit: int) -> Ids:
    array = np.asarray(ids)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise TransferError(f"{what} ids must be (n,) integers, got {array.shape} {array.dtype}")
    if len(array) and not (array.min() >= 0 and array.max() < limit):
        raise TransferError(f"{what} ids {array.min()}..{array.max()} are not all in 0..{limit - 1}")
    return array.astype(np.int64, copy=False)
