"""Small pieces that policies share: passing over protected keys, and consuming iterators at C speed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import filterfalse
from typing import Any

from kvtier.keys import OffloadKey


def evictable(keys: Iterable[OffloadKey], protected: Sequence[Container[OffloadKey]]) -> Iterator[OffloadKey]:
    """`keys` without those in any of `protected`, lazily and in order."""
    candidates = iter(keys)
    for container in protected:
        candidates = filterfalse(container.__contains__, candidates)
    return candidates


consume: Callable[[Iterable[Any]], None] = deque[Any](maxlen=0).extend
"""Runs an iterator for its effects, without a Python frame."""
