"""Hit ratios alone: a trace through the production manager as fast as it goes, without transfers or waiting.

Every request is over before the next one begins: look-up, load, store, finish. What the timed replay
(`kvtier.sim.engine`) adds, blocks in flight and requests that overlap, is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.interfaces import OffloadingManager, ReqContext
from kvtier.keys import OffloadKey

HitArray = npt.NDArray[np.int64]
_REQUESTS_PER_STEP = 500


def count_hits(
    manager: OffloadingManager,
    requests: Sequence[Sequence[OffloadKey]],
    *,
    chunk_blocks: int = 0,
    on_progress: Callable[[int], object] = lambda num_requests: None,
) -> HitArray:
    """-> (len(requests),) int64: how many leading blocks of each request were ready when it came.

    Changes `manager`. `chunk_blocks`: a request's stores are offered so many at a time, as chunked prefill does; 0:
    all at once. `on_progress` is called now and then with how many more requests are done. O(blocks).
    """
    hits = np.zeros(len(requests), dtype=np.int64)
    for first in range(0, len(requests), _REQUESTS_PER_STEP):
        step = requests[first : first + _REQUESTS_PER_STEP]
        hits[first : first + len(step)] = _drive(manager, step, first, chunk_blocks)
        on_progress(len(step))
    return hits


def _drive(
    manager: OffloadingManager, requests: Sequence[Sequence[OffloadKey]], first: int, chunk_blocks: int
) -> list[int]:
    hits = []
    begin, look_up, offer, finish = (
        manager.on_new_request,
        manager.lookup_prefix,
        manager.count_offers,
        manager.on_request_finished,
    )
    prepare, complete = manager.prepare_store_prefix, manager.complete_store
    for number, keys in enumerate(requests, first):
        context = ReqContext(str(number))
        begin(context)
        num_ready = look_up(keys, context).num_ready
        hits.append(num_ready)
        if num_ready:
            ready = keys[:num_ready]
            manager.prepare_load(ready, context)
            manager.complete_load(ready, context)
        if num_ready < len(keys):
            rest = keys[num_ready:] if num_ready else keys
            for start in range(0, len(rest), chunk_blocks or len(rest)):
                offered = rest[start : start + chunk_blocks] if chunk_blocks else rest
                offer(offered, context)
                # by key, which is quicker than by spec and safe where no write is ever reaped
                stored = prepare(offered, context).keys_to_store
                if stored:
                    complete(stored, context)
        finish(context)
    return hits


def best_possible_hits(requests: Sequence[Sequence[int]]) -> HitArray:
    """-> (len(requests),) int64: leading blocks that any earlier request had: what no cache can exceed. O(blocks)."""
    seen: set[int] = set()
    hits = np.zeros(len(requests), dtype=np.int64)
    for number, ids in enumerate(requests):
        known = len(ids)
        for position, block in enumerate(ids):
            if block not in seen:
                known = position
                break
        hits[number] = known
        seen.update(ids)
    return hits
