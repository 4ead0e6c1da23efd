"""Hits of LRU at every size from one pass: Mattson's stack algorithm (1970), on runs of blocks.

A prefix cache under LRU, tail first, is a stack: a cache of c blocks holds the c most recently used ones, of one
request the shallower before the deeper. So a block hits at every size from its place in the stack on. Blocks move in
runs: of those that a request was the last to use, the ones used again later are its leading ones, and what is left is
one run. A prompt therefore finds its prefix in a few runs, the most recently used first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
RUN_COLUMNS = ("request", "first", "end", "above", "last_user")
_CHUNK = 128
_REQUESTS_PER_STEP = 500


def lru_runs(
    requests: Sequence[Sequence[int]], on_progress: Callable[[int], object] = lambda num_requests: None
) -> IntArray:
    """-> (runs, 5) int64, in order of requests, of which each run is the blocks `first`..`end`-1.

    `above`: how many blocks stood above the first of them; `last_user`: the request that had used them last.

    `requests`: ids of prefix blocks (an id stands for its whole prefix), shallowest first. Every block that any
    earlier request had is in exactly one run. O(blocks + runs * sqrt(requests)).
    """
    last_user: dict[int, int] = {}
    num_left = [0] * len(requests)  # blocks of each request that no later one has used
    left_in_chunk = [0] * (len(requests) // _CHUNK + 1)
    runs: list[tuple[int, int, int, int, int]] = []
    for number, ids in enumerate(requests):
        users = list(map(last_user.get, ids))
        first, known = 0, _num_known(users)
        while first < known:
            user = users[first]
            assert user is not None
            end = _run_end(users, first, known)
            chunk = (user + 1) // _CHUNK
            above = sum(num_left[user + 1 : (chunk + 1) * _CHUNK]) + sum(left_in_chunk[chunk + 1 :])
            # what the request has used of itself until here stands on top of that
            runs.append((number, first, end, above + first, user))
            num_left[user] -= end - first
            left_in_chunk[user // _CHUNK] -= end - first
            first = end
        last_user.update(dict.fromkeys(ids, number))
        num_left[number] = len(ids)
        left_in_chunk[number // _CHUNK] += len(ids)
        if number % _REQUESTS_PER_STEP == _REQUESTS_PER_STEP - 1:
            on_progress(_REQUESTS_PER_STEP)
    on_progress(len(requests) % _REQUESTS_PER_STEP)
    return np.array(runs, dtype=np.int64).reshape(-1, len(RUN_COLUMNS))


def _num_known(users: Sequence[int | None]) -> int:
    """How many leading entries are not None: all before the first None, by bisection."""
    low, high = 0, len(users)
    while low < high:
        middle = (low + high) // 2
        if users[middle] is None:
            high = middle
        else:
            low = middle + 1
    return low


def _run_end(users: Sequence[int | None], first: int, known: int) -> int:
    """The end of the entries that equal the one at `first`: users only become older with depth."""
    user = users[first]
    if users[known - 1] == user:
        return known
    low, high = first + 1, known - 1
    while low < high:
        middle = (low + high) // 2
        if users[middle] == user:
            low = middle + 1
        else:
            high = middle
    return low


def hits_of_runs(runs: IntArray, capacity: int) -> IntArray:
    """-> (runs,): how many blocks of each run an LRU cache of `capacity` blocks finds, its leading ones."""
    hits: IntArray = np.clip(capacity - runs[:, 3], 0, runs[:, 2] - runs[:, 1])
    return hits


def lru_curve(runs: IntArray, num_unique: int) -> IntArray:
    """-> (num_unique + 1,): entry c is how many blocks an LRU cache of c blocks finds. O(runs + num_unique)."""
    steps = np.zeros(num_unique + 3, dtype=np.int64)
    np.add.at(steps, runs[:, 3] + 1, 1)
    np.add.at(steps, runs[:, 3] + 1 + runs[:, 2] - runs[:, 1], -1)
    curve: IntArray = np.cumsum(np.cumsum(steps[: num_unique + 1]))
    return curve


def known_blocks(runs: IntArray, num_requests: int) -> IntArray:
    """-> (num_requests,): leading blocks that any earlier request had: the hits of an endless cache."""
    known = np.zeros(num_requests, dtype=np.int64)
    np.maximum.at(known, runs[:, 0], runs[:, 2])
    return known
