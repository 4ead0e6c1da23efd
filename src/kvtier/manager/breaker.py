"""A circuit breaker: a tier whose transfers keep failing is left alone for a while, then tried with one transfer.

Sans-I/O: time is an argument. One breaker belongs to one tier, whichever medium that is.
"""

from __future__ import annotations

import enum
import math
from collections import Counter

from kvtier.errors import ConfigurationError
from kvtier.interfaces import BreakerState

DEFAULT_FAILURES = 5
DEFAULT_COOLDOWN_S = 1.0
DEFAULT_MAX_COOLDOWN_S = 60.0


class Transfer(enum.Enum):
    """The two kinds of transfers, which can fail apart from each other."""

    LOAD = "load"
    STORE = "store"


class CircuitBreaker:
    """Opens after `failures` failed transfers of one kind in a row, for `cooldown_s`.

    After the cool-down one transfer is let through. If it fails, or has not ended `max_cooldown_s` later, the breaker
    is open again for twice as long, `max_cooldown_s` at most. If it succeeds the breaker is closed, on trial: the
    next failure of the kind that had opened it opens it at once and for twice as long; the first success of that kind
    ends the trial. (A tier from which nothing can be loaded may still take stores, and where nothing is stored no
    load can show whether it is well.)

    Before the time is first told it never opens: it could not close again. Every method is O(1).
    Raises ConfigurationError for values outside what is said here.
    """

    def __init__(
        self,
        failures: int = DEFAULT_FAILURES,
        cooldown_s: float = DEFAULT_COOLDOWN_S,
        max_cooldown_s: float = DEFAULT_MAX_COOLDOWN_S,
    ) -> None:
        if failures < 1:
            raise ConfigurationError(f"failures is {failures}; allowed: 1 or more")
        if not 0 < cooldown_s < math.inf:
            raise ConfigurationError(f"cooldown_s is {cooldown_s}; allowed: more than 0 seconds")
        if not cooldown_s <= max_cooldown_s < math.inf:
            raise ConfigurationError(f"max_cooldown_s is {max_cooldown_s}; allowed: cooldown_s ({cooldown_s}) or more")
        self.failures = failures
        self.cooldown_s = cooldown_s
        self.max_cooldown_s = max_cooldown_s
        self.state = BreakerState.CLOSED
        self.is_shut = False
        """Nothing is let through now: it is open, or its probe is on the way."""
        self.num_openings = 0
        """How often it has opened, failed probes included."""
        self.until_s = -math.inf
        """While shut: the time at which that ends by itself, if nothing else happens."""
        self._now_s = -math.inf
        self._in_a_row: Counter[Transfer] = Counter()
        self._culprit: Transfer | None = None
        """The kind that opened it, until that kind has succeeded again."""
        self._next_cooldown_s = cooldown_s

    def advance(self, now_s: float) -> None:
        """Tells the time (monotonic seconds)."""
        self._now_s = now_s
        if not self.is_shut or now_s < self.until_s:
            return
        if self.state is BreakerState.OPEN:
            self.state = BreakerState.HALF_OPEN
            self.is_shut = False
        else:  # the probe is lost
            self._open()

    def note_begun(self) -> None:
        """A transfer begins. In a half-open breaker the first one is its probe."""
        if self.state is BreakerState.HALF_OPEN and not self.is_shut:
            self.is_shut = True
            self.until_s = self._now_s + self.max_cooldown_s

    def note_success(self, kind: Transfer) -> None:
        """A transfer has ended well."""
        self._in_a_row[kind] = 0
        if self.state is BreakerState.OPEN:
            return  # it began before the trouble, perhaps
        if kind is self._culprit:
            self._culprit = None
            self._next_cooldown_s = self.cooldown_s
        self.state = BreakerState.CLOSED
        self.is_shut = False

    def note_failure(self, kind: Transfer, count: int = 1) -> None:
        """`count` transfers have failed, or have been given up."""
        self._in_a_row[kind] += count
        if self.state is BreakerState.OPEN or self._now_s == -math.inf:
            return  # what was under way when it opened says nothing new
        on_trial = self.state is BreakerState.HALF_OPEN or kind is self._culprit
        if on_trial or self._in_a_row[kind] >= self.failures:
            self._culprit = self._culprit or kind
            self._open()

    def _open(self) -> None:
        self.state = BreakerState.OPEN
        self.is_shut = True
        self.num_openings += 1
        self.until_s = self._now_s + self._next_cooldown_s
        self._next_cooldown_s = min(2 * self._next_cooldown_s, self.max_cooldown_s)
        self._in_a_row.clear()
