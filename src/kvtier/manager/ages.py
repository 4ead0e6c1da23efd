"""How long stores have been in flight, by when their slots were allocated."""

from __future__ import annotations

import math
from collections import deque


class StoreAges:
    """Tells which allocations are overdue. O(1) a call, amortised; one entry for each time at which stores began.

    Before the time is first told nothing ages; what was begun until then begins to age then.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._begun: deque[list[float]] = deque()
        """[time, generation of the last allocation until then], oldest first."""

    def note(self, now_s: float, generation: int) -> None:
        """A store has begun."""
        begun = self._begun
        if begun and begun[-1][0] == now_s:
            begun[-1][1] = generation
        else:
            begun.append([now_s, generation])

    def time_begins(self, now_s: float) -> None:
        """The time is told for the first time."""
        if self._begun and self._begun[0][0] == -math.inf:
            self._begun[0][0] = now_s

    def forget(self) -> None:
        """Nothing is in flight."""
        self._begun.clear()

    def last_overdue(self, now_s: float) -> float:
        """Stores of this generation or an older one are overdue; 0 if there are no new ones that are."""
        last = 0.0
        while self._begun and now_s - self._begun[0][0] >= self.timeout_s:
            last = self._begun.popleft()[1]
        return last
