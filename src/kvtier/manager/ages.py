"""How long stores have been in flight, by when their slots were allocated."""

from __future__ import annotations

from collections import deque


class StoreAges:
    """Tells which allocations are overdue. O(1) a call, amortised; one entry for each time at which stores began."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._begun: deque[tuple[float, int]] = deque()
        """(time, generation of the last allocation until then), oldest first."""

    def note(self, begun_at_s: float, generation: int) -> None:
        """The stores that came after those noted last, up to this generation, began at this time."""
        if not self._begun or self._begun[-1][1] < generation:
            self._begun.append((begun_at_s, generation))

    def forget(self) -> None:
        """Nothing is in flight."""
        self._begun.clear()

    def last_overdue(self, now_s: float) -> int:
        """Stores of this generation or an older one are overdue; 0 if there are no new ones that are."""
        last = 0
        while self._begun and now_s - self._begun[0][0] >= self.timeout_s:
            last = self._begun.popleft()[1]
        return last
