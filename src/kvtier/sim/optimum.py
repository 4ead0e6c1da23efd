"""The most hits that any policy could have in a cache of a size: Belady's MIN (1966) for prefix caches, by runs.

Knowing the future, a cache keeps what is used again soonest and does not keep what never is. A block is used again no
later than any block behind it, so of the blocks that wait for one later request the deepest go first, and what is kept
for it is always one run: only its length has to be known.

`optimal_stream_hits` is the plain form, for a stream of single keys that are no prefixes of one another.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence

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


def optimal_stream_hits(keys: Sequence[Hashable], capacity: int) -> int:
    """Hits of Belady's MIN on a stream of single keys, every one of which enters the cache. O(n log n)."""
    never = len(keys)
    next_use = [never] * len(keys)
    latest: dict[Hashable, int] = {}
    for position in range(len(keys) - 1, -1, -1):
        next_use[position] = latest.get(keys[position], never)
        latest[keys[position]] = position
    wanted_at: dict[Hashable, int] = {}
    latest_first: list[tuple[int, int]] = []
    hits = 0
    for position, key in enumerate(keys):
        if key in wanted_at:
            hits += 1
        elif len(wanted_at) >= capacity:
            while True:
                wanted, user = heapq.heappop(latest_first)
                # an entry is overtaken once its key was used after it was made
                if wanted_at.get(keys[user]) == -wanted:
                    del wanted_at[keys[user]]
                    break
        wanted_at[key] = next_use[position]
        heapq.heappush(latest_first, (-next_use[position], position))
    return hits
