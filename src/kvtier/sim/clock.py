"""Simulated time and what is due at which time of it."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Event:
    """One action that is due. Made by `SimulatedClock`."""

    __slots__ = ("_action", "at_s")

    def __init__(self, at_s: float, action: Action) -> None:
        self.at_s = at_s
        self._action: Action | None = action

    def cancel(self) -> None:
        """It will not happen. Does nothing if it has happened or was cancelled before."""
        self._action = None

    def take(self) -> Action | None:
        """The action, once; None if it was cancelled or taken."""
        action, self._action = self._action, None
        return action


class SimulatedClock:
    """A `kvtier.clock.Clock` that stands still until it is told to run, and does what comes due meanwhile.

    Events happen in the order of their times, and at one time in the order in which they were asked for: a run
    depends on nothing else. An action may ask for more events, but not run the clock. Not thread-safe.
    """

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s
        self._due: list[tuple[float, int, Event]] = []
        self._num_asked = 0

    def __call__(self) -> float:
        return self.now_s

    def at(self, at_s: float, action: Action) -> Event:
        """`action()` will be called at this time; at once when time next runs, if it has passed. O(log events)."""
        event = Event(max(at_s, self.now_s), action)
        self._num_asked += 1
        heapq.heappush(self._due, (event.at_s, self._num_asked, event))
        return event

    def after(self, delay_s: float, action: Action) -> Event:
        """`action()` will be called when this much time has passed."""
        return self.at(self.now_s + delay_s, action)

    @property
    def next_at_s(self) -> float | None:
        """When something is due next; None: never. What was cancelled may count still. O(1)."""
        return self._due[0][0] if self._due else None

    def run_until(self, until_s: float) -> int:
        """Time runs to `until_s` (no further back than it is). Returns how many events have happened."""
        due = self._due
        num_happened = 0
        while due and due[0][0] <= until_s:
            at_s, _, event = heapq.heappop(due)
            action = event.take()
            if action is not None:
                self.now_s = at_s
                action()
                num_happened += 1
        self.now_s = max(self.now_s, until_s)
        return num_happened

    def run_next(self) -> bool:
        """Time runs to the next event, or stands still, and the answer is False, if nothing is due."""
        while self._due:
            if self.run_until(self._due[0][0]):
                return True
        return False
