"""Lists of keys by recency: what eviction policies are made of here.

An `OrderedDict` moves a key to its end at a third of what a plain dictionary needs to delete and insert it again, and
its front is always at hand. Its methods for one key are fast, its `update` and its views are not.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from itertools import filterfalse, islice, repeat, starmap
from typing import Any

from kvtier.keys import OffloadKey

RecencyQueue = OrderedDict[OffloadKey, None]
"""Distinct keys, the least recent first. About 200 bytes a key."""


consume: Callable[[Iterable[Any]], None] = deque[Any](maxlen=0).extend
"""Runs an iterator for its effects, without a Python frame."""


def append(queue: RecencyQueue, keys: Iterable[OffloadKey]) -> None:
    """New keys, the last one most recent. The caller guarantees that none is in the queue."""
    for key in keys:
        queue[key] = None


def discard(queue: RecencyQueue, keys: Iterable[OffloadKey]) -> None:
    """Removes those of `keys` that are in the queue."""
    consume(map(queue.pop, filter(queue.__contains__, keys)))


def pop_first(
    queue: RecencyQueue, count: int, protected: Sequence[Container[OffloadKey]] = ()
) -> list[OffloadKey] | None:
    """Removes and returns the first `count` keys; None, and nothing changed, if one is protected or there are fewer.

    At half the price of `least_recent` and removing its answer, and nearly always enough.
    """
    if count > len(queue):
        return None
    keys = [key for key, _ in starmap(queue.popitem, repeat((False,), count))]
    for container in protected:
        if any(map(container.__contains__, keys)):
            put_back(queue, keys)
            return None
    return keys


def put_back(queue: RecencyQueue, keys: Sequence[OffloadKey]) -> None:
    """Undoes `pop_first`."""
    for key in reversed(keys):
        queue[key] = None
        queue.move_to_end(key, last=False)


def least_recent(
    queue: Iterable[OffloadKey], count: int, protected: Sequence[Container[OffloadKey]] = ()
) -> list[OffloadKey]:
    """The first `count` keys that are in none of `protected`, or all there are. O(returned + passed over)."""
    keys: Iterable[OffloadKey] = queue
    for container in protected:
        keys = filterfalse(container.__contains__, keys)
    return list(islice(keys, max(0, count)))


def has_evictable(keys: Collection[OffloadKey], count: int, protected: Sequence[Container[OffloadKey]]) -> bool:
    """Whether at least `count` of `keys` are in none of `protected`. O(1) where their sizes alone say so."""
    try:
        if count + sum(map(len, protected)) <= len(keys):  # type: ignore[arg-type]
            return True
    except TypeError:  # a container that cannot tell its size
        pass
    return count <= len(keys) and len(least_recent(keys, count, protected)) == count
