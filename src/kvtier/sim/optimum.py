"""The most hits that any policy could have in a cache of a size: Belady's MIN (1966) for prefix caches, by runs.

Knowing the future, a cache keeps what is used again soonest and does not keep what never is. A block is used again no
later than any block behind it, so of the blocks that wait for one later request the deepest go first, and what is kept
for it is always one run: only its length has to be known.
"""

from __future__ import annotations

import heapq

import numpy as np

from kvtier.sim.stack import IntArray


def optimal_hits(runs: IntArray, num_requests: int, capacity: int) -> IntArray:
    """-> (num_requests,): leading blocks of each request found in a cache of `capacity` blocks under the optimum.

    `runs` as `kvtier.sim.stack.lru_runs` gives them. O(runs x log requests).
    """
    # a run is what one request was the last to use before another: the same pairs, in the order of the earlier one
    order = np.lexsort((runs[:, 0], runs[:, 4]))
    later = runs[order, 0].tolist()
    lengths = (runs[order, 2] - runs[order, 1]).tolist()
    bounds = np.searchsorted(runs[order, 4], np.arange(num_requests + 1)).tolist()
    kept_for = [0] * num_requests
    num_kept = 0
    latest_first: list[int] = []
    hits = []
    for number in range(num_requests):
        hits.append(kept_for[number])
        num_kept -= kept_for[number]
        kept_for[number] = 0
        for run in range(bounds[number], bounds[number + 1]):
            if not kept_for[later[run]]:
                heapq.heappush(latest_first, -later[run])
            kept_for[later[run]] += lengths[run]
            num_kept += lengths[run]
        while num_kept > capacity:
            waiting = -latest_first[0]
            cut = min(num_kept - capacity, kept_for[waiting])
            kept_for[waiting] -= cut
            num_kept -= cut
            if not kept_for[waiting]:
                heapq.heappop(latest_first)
    return np.array(hits, dtype=np.int64)
