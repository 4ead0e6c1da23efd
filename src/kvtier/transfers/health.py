"""One line for a log when transfers begin to fail, one when they are well again; none per job."""

from __future__ import annotations

WELL_AFTER = 16
"""Successes in a row that end an episode of failures: one that comes and goes is one episode."""


class FailureLog:
    """Says what to log about the outcomes of one kind of transfer, `what` (for example "loads")."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._num_failed = 0
        self._num_well = 0

    def note_success(self) -> str | None:
        """A transfer has ended well. What to log, or None. O(1)."""
        if not self._num_failed:
            return None
        self._num_well += 1
        if self._num_well < WELL_AFTER:
            return None
        num_failed, self._num_failed = self._num_failed, 0
        return f"{self._what} work again; {num_failed} had failed"

    def note_failure(self, reason: str) -> str | None:
        """A transfer has failed. What to log, or None. O(1)."""
        self._num_failed += 1
        self._num_well = 0
        if self._num_failed > 1:
            return None
        return f"{self._what} fail: {reason} (further ones are counted, not logged)"
