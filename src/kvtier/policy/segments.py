"""Blocks with one history: what requests insert together and use together, until one of them uses only a part.

A prompt is a path through a tree of segments, as in a radix tree of prefixes, but found by who used what rather than by
comparing prefixes, so that blocks which are no prefixes of one another are served as well.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict

from kvtier.keys import OffloadKey
from kvtier.policy.survival import CLASSES, NUM_TABLED, age_class

_MAX_PERIODS = 64


class Segment:
    """`keys`, deepest first, at least one, were all used last at tick `last_use`, and `uses` times."""

    __slots__ = ("children", "ghost", "keys", "kind", "last_use", "parent", "period", "uses")

    def __init__(self, keys: list[OffloadKey], kind: int, uses: int, last_use: int) -> None:
        self.keys = keys
        self.kind = kind
        self.uses = uses
        self.last_use = last_use
        self.parent: Segment | None = None
        """The segment before this one in the prompt that used both last."""
        self.children = 0
        """Resident segments that have this one as parent: it is of use to them, and leaves after them."""
        self.period = -1
        """Where an `AgeQueue` has it; -1: nowhere."""
        self.ghost: Segment | None = None
        """Its deeper part that was evicted last."""


Priced = tuple[float, Segment | None]
_NOTHING: Priced = (float("inf"), None)


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
        self.cheapest: Priced | None = None
        """What `find_cheapest` found, until the queue changes or someone sets this to None."""

    def add(self, segment: Segment) -> None:
        """Takes in a segment that is in no queue."""
        self.cheapest = None
        period = segment.period = segment.last_use // self._width
        held = self._periods.get(period)
        if held is None:
            if len(self._order) == _MAX_PERIODS:
                self._widen()
                self.add(segment)
                return
            held = self._periods[period] = OrderedDict()
            if not self._order or period > self._order[-1]:
                self._order.append(period)
            else:
                insort(self._order, period)
        held[segment] = None

    def discard(self, segment: Segment) -> None:
        """Lets go of a segment that is in this queue. Call it before its last use changes."""
        self.cheapest = None
        held = self._periods[segment.period]
        del held[segment]
        if not held:
            del self._periods[segment.period]
            self._order.remove(segment.period)
        segment.period = -1

    def find_cheapest(self, worth: list[float], now: int) -> Priced:
        """Of those used least and most recently, the one worth less, by `worth[age class]`, and what it is worth."""
        order = self._order
        if not order:
            self.cheapest = _NOTHING
            return _NOTHING
        oldest = next(iter(self._periods[order[0]]))
        newest = next(reversed(self._periods[order[-1]]))
        age = now - newest.last_use
        worth_of_newest = worth[CLASSES[age] if age < NUM_TABLED else age_class(age)]
        age = now - oldest.last_use
        worth_of_oldest = worth[CLASSES[age] if age < NUM_TABLED else age_class(age)]
        found = (worth_of_newest, newest) if worth_of_newest < worth_of_oldest else (worth_of_oldest, oldest)
        self.cheapest = found
        return found

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
