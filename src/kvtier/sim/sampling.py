"""Hits of any policy from a sample of the blocks: the real manager on a thinned trace, with a cache as much smaller.

Spatial sampling as in SHARDS (Waldspurger et al., FAST 2015) and in miniature simulations (ATC 2017): a block is in
the sample or not by its own number, wherever it appears, so every prompt keeps its shape and prefixes stay prefixes.
Two things make a small sample do. A sampled block stands for the blocks of its prompt that are nearest to it, as far
as any earlier prompt had them, which is known exactly. And LRU, whose hits are known exactly for the whole trace, runs
on the same sample: only the difference between the policy and LRU is estimated.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from kvtier.keys import OffloadKey, make_offload_key
from kvtier.manager import CPUOffloadingManager
from kvtier.sim.hits import count_hits
from kvtier.sim.stack import IntArray, hits_of_runs, lru_runs

_GOLDEN = 2654435761
"""2**32 over the golden ratio (Knuth's multiplicative hash): spreads consecutive numbers evenly."""
_MODULUS = 1 << 32

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class BlockSample:
    """The sampled blocks of a trace, request by request; requests without any are left out."""

    requests: list[list[OffloadKey]]
    starts: IntArray
    """(requests,): where in `weights` each request's blocks begin."""
    block_numbers: IntArray
    """(sampled blocks,): which distinct block each is."""
    weights: FloatArray
    """(sampled blocks,): how many known blocks of its prompt each stands for."""
    scale: float
    """Distinct blocks in the sample, as a share of all."""
    runs: IntArray
    """LRU's, of the sample."""

    def lru_hits(self, capacity: int) -> FloatArray:
        """-> (sampled blocks,): the weight of each if LRU finds it in a cache of `capacity` sampled blocks, else 0."""
        hits = np.zeros(len(self.starts), dtype=np.int64)
        np.add.at(hits, self.runs[:, 0], hits_of_runs(self.runs, capacity))
        return self._weights_of_leading(hits)

    def policy_hits(self, policy: str, capacity: int) -> FloatArray:
        """As `lru_hits`, by running the manager with the policy of this name."""
        return self._weights_of_leading(count_hits(CPUOffloadingManager(capacity, policy), self.requests))

    def capacity_of(self, capacity: int) -> int:
        """The sample's share of a cache of `capacity` blocks."""
        return max(1, round(capacity * self.scale))

    def _weights_of_leading(self, hits: IntArray) -> FloatArray:
        depth = np.arange(len(self.weights)) - np.repeat(self.starts, np.diff(self.starts, append=len(self.weights)))
        is_hit = depth < np.repeat(hits, np.diff(self.starts, append=len(self.weights)))
        chosen: FloatArray = np.where(is_hit, self.weights, 0.0)
        return chosen


def number_blocks(requests: Sequence[Sequence[int]], num_blocks: int) -> IntArray:
    """-> (num_blocks,): every block of every request as a number from 0, by first appearance. O(blocks)."""
    ids = dict.fromkeys(chain.from_iterable(requests))
    number_of = dict(zip(ids, range(len(ids)), strict=True))
    flat = map(number_of.__getitem__, chain.from_iterable(requests))
    return np.fromiter(flat, dtype=np.int64, count=num_blocks)


def sample_blocks(numbers: IntArray, lengths: IntArray, known: IntArray, *, rate: float, seed: int) -> BlockSample:
    """Chooses about `rate` of the distinct blocks, the same ones for the same seed.

    `numbers` as `number_blocks` gives them, `lengths` and `known` (requests,): blocks, and leading blocks that any
    earlier request had. O(blocks) at C speed and O(sampled blocks).
    """
    ends = np.cumsum(lengths)
    places = (numbers * _GOLDEN + (seed * 40503 + 7919) * 65537) % _MODULUS
    at = np.flatnonzero(places < rate * _MODULUS)
    request = np.searchsorted(ends, at, side="right")
    position = at - (ends - lengths)[request]
    weights = _weights(request, position, known[request])
    _, starts, counts = np.unique(request, return_index=True, return_counts=True)
    chosen = numbers[at]
    distinct, row = np.unique(chosen, return_inverse=True)
    keys = [_key(number) for number in distinct.tolist()]
    flat_keys = [keys[i] for i in row.tolist()]
    flat_ids = chosen.tolist()
    bounds = list(zip(starts.tolist(), (starts + counts).tolist(), strict=True))
    return BlockSample(
        requests=[flat_keys[start:end] for start, end in bounds],
        starts=starts.astype(np.int64),
        block_numbers=row.astype(np.int64),
        weights=weights,
        scale=len(distinct) / max(1, int(numbers.max()) + 1),
        runs=lru_runs([flat_ids[start:end] for start, end in bounds]),
    )


def _key(number: int) -> OffloadKey:
    """Random to a policy that samples by key, as block hashes are."""
    return make_offload_key(hashlib.sha256(number.to_bytes(8, "big")).digest(), 0)


def _weights(request: IntArray, position: IntArray, known: IntArray) -> FloatArray:
    """Each sampled block stands for the positions that are nearer to it than to the next one of its request, from 0
    to the last known one."""
    same = request[1:] == request[:-1]
    middle = (position[1:] + position[:-1] + 1) / 2
    low, high = np.zeros(len(request)), known.astype(np.float64)
    low[1:][same] = middle[same]
    high[:-1][same] = np.minimum(middle[same], known[:-1][same])
    weights: FloatArray = np.maximum(high - low, 0.0)
    return weights


def standard_error(sample: BlockSample, differences: FloatArray) -> float:
    """Of the sum of `differences` (sampled blocks,), from which blocks happened to be sampled.

    The Horvitz-Thompson estimate for independent choices. What it leaves out is that a small cache may behave
    otherwise than a large one.
    """
    per_block = np.bincount(sample.block_numbers, weights=differences)
    return math.sqrt(float((per_block**2).sum()) * (1.0 - sample.scale))
