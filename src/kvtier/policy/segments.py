"""Blocks with one history: what requests insert together and use together, until one of them uses only a part.

A prompt is a path through a tree of segments, as in a radix tree of prefixes, but found by who used what rather than by
comparing prefixes, so that blocks which are no prefixes of one another are served as well.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict

from kvtier.keys import OffloadKey

_MAX_PERIODS = 64


class Segment:
    """`keys`, deepest first, were all used last at tick `last_use`, and `uses` times. About 350 bytes."""

    __slots__ = ("children", "keys", "kind", "last_use", "parent", "period", "resident", "uses")

    def __init__(self, keys: list[OffloadKey], kind: int, uses: int, last_use: int) -> None:
        self.keys = keys
        self.kind = kind
        self.uses = uses
        self.last_use = last_use
        self.parent: Segment | None = None
        """The segment before this one in the prompt that used both last."""
        self.children = 0
        """Resident segments that have this one as parent: it is of use to them, and leaves after them."""
        self.resident = True
        self.period = -1
        """Where an `AgeQueue` has it; -1: nowhere."""


class AgeQueue:
    """Segments by last use, in periods of `width` ticks, the exact order within one being that of their arrival.

    Unlike in a list by recency, a segment may come in at any age. All operations are O(1) in the number of segments;
    there are never more than some 64 periods.
    """

    def __init__(self) -> None:
        self._width = 1
        self._periods: dict[int, OrderedDict[Segment, None]] = {}
        self._order: list[int] = []
        """Periods that are not empty, ascending."""

    def add(self, segment: Segment) -> None:
        """Takes in a segment that is in no queue."""
        period = segment.last_use // self._width
        held = self._periods.get(period)
        if held is None:
            if len(self._order) == _MAX_PERIODS:
                self._widen()
                self.add(segment)
                return
            held = self._periods[period] = OrderedDict()
            insort(self._order, period)
        held[segment] = None
        segment.period = period

    def discard(self, segment: Segment) -> None:
        """Lets go of a segment that is in this queue. Call it before its last use changes."""
        held = self._periods[segment.period]
        del held[segment]
        if not held:
            del self._periods[segment.period]
            self._order.remove(segment.period)
        segment.period = -1

    def oldest(self) -> Segment:
        """Of those used least recently. The queue is not empty."""
        return next(iter(self._periods[self._order[0]]))

    def newest(self) -> Segment:
        """Of those used most recently. The queue is not empty."""
        return next(reversed(self._periods[self._order[-1]]))

    def __bool__(self) -> bool:
        return bool(self._order)

    def _widen(self) -> None:
        self._width *= 2
        periods: dict[int, OrderedDict[Segment, None]] = {}
        for period in self._order:
            held = periods.setdefault(period // 2, OrderedDict())
            for segment in self._periods[period]:
                held[segment] = None
                segment.period = period // 2
        self._periods = periods
        self._order = list(periods)
