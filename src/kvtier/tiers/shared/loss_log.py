"""`LossLog`: what people are told of a store that is down, and of its return."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger(__name__)

SAY_EVERY_S = 10.0
"""That the store is down is said no more often."""


class LossLog:
    """A reason is said once, until something has worked again: what takes connections may refuse all else. The caller
    sees to it that one thread is in here at a time."""

    def __init__(self, place: str) -> None:
        self.reason = ""
        """The last one said; empty since something has worked."""
        self._place = place
        self._said_s = -float("inf")

    def note_loss(self, reason: str) -> None:
        now_s = time.monotonic()
        if reason != self.reason and now_s - self._said_s >= SAY_EVERY_S:
            logger.warning("kvtier: %s cannot be used, its blocks are misses until it can: %s", self._place, reason)
            self.reason, self._said_s = reason, now_s

    def note_use(self) -> None:
        """Something has worked."""
        if self.reason:
            logger.info("kvtier: %s is there again", self._place)
            self.reason = ""
