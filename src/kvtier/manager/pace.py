"""How quick a lower tier is, from what it has delivered, and whether asking it for more is quicker than recomputing.

Sans-I/O: time, rates and outcomes are arguments.
"""

from __future__ import annotations

import math

from kvtier.manager.breaker import CircuitBreaker, Transfer
from kvtier.manager.waiting import Rate
from kvtier.tier_interfaces import Tier, TierOutcome

PROBE_BLOCKS = 16
"""As long as nobody knows how fast a tier is, no more than this is asked of it at once."""
PROBE_EVERY_S = 30.0
"""A tier that was slower than recomputing is tried again this often, with blocks that nobody waits for."""


class TierPace:
    """What one lower tier delivers, and what it still owes. Decides whether asking it for more pays.

    The rate is of blocks that arrived over the time in which something was on its way, so it knows queues, latency and
    bandwidth as one; recent ones count most. That time is known twice, and both are upper bounds: what passed here
    (which includes the rest of an engine's step, however long), and what the tier says that its jobs took (which counts
    jobs side by side one by one). The lesser holds.
    """

    def __init__(self, tier: Tier, breaker: CircuitBreaker | None = None) -> None:
        self.tier = tier
        self.breaker = breaker or CircuitBreaker()
        self.num_pending = 0
        """Blocks on their way up."""
        self._rate = Rate()
        self._now_s = -math.inf
        self._num_arrived = 0
        self._took_s = 0.0
        """By the tier's own account, all that has ended since the last look."""
        self._passed_s = 0.0
        """Here, with something on its way, since blocks arrived last."""
        self._asked_s = -math.inf
        self._progress_s = -math.inf
        """When the last block arrived, or the first of those pending was asked for."""
        self._is_probing = False

    @property
    def is_usable(self) -> bool:
        """Whether look-ups and stores go to this tier now. O(1)."""
        return not self.breaker.is_shut

    @property
    def blocks_per_s(self) -> float | None:
        """None: nothing was seen yet."""
        return self._rate.per_s

    def observe(self, now_s: float) -> None:
        """Tells the time, after the outcomes until then were noted. O(1)."""
        if self.num_pending + self._num_arrived and self._now_s > -math.inf:
            self._passed_s += now_s - self._now_s
        if self._num_arrived:
            self._rate.note(self._num_arrived, min(self._took_s or math.inf, self._passed_s))
            self._progress_s = now_s
            self._took_s = 0.0
            self._passed_s = 0.0
        self._num_arrived = 0
        self._now_s = now_s

    def note_begun(self, num_blocks: int, is_store: bool) -> None:
        """A job was handed to the tier."""
        self.breaker.note_begun()
        if not is_store:
            if not self.num_pending:
                self._progress_s = self._now_s
                self._took_s = 0.0
                self._passed_s = 0.0
            self.num_pending += num_blocks
            self._asked_s = self._now_s

    def note_outcome(self, outcome: TierOutcome, was_cancelled: bool) -> None:
        """A job has ended. A block that is not there any more, or that we cancelled, is no failure of the tier."""
        num_arrived = sum(outcome.succeeded)
        if not outcome.is_store:
            self.num_pending -= len(outcome.succeeded)
            self._num_arrived += num_arrived
            self._took_s += outcome.duration_s
            self._is_probing = False
        kind = Transfer.STORE if outcome.is_store else Transfer.LOAD
        if num_arrived:
            self.breaker.note_success(kind)
        elif not was_cancelled:
            self.breaker.note_failure(kind)

    def is_slower(self, recompute_blocks_per_s: float | None) -> bool:
        """Whether the engine recomputes quicker than this tier delivers, however little is asked of it. O(1).

        So it seems, too, once nothing has arrived for as long as recomputing all that is on its way would take.
        """
        if recompute_blocks_per_s is None:
            return False
        if self._is_probing:
            return True
        rate = self.blocks_per_s
        if rate is not None and rate <= recompute_blocks_per_s:
            return True
        return (self._now_s - self._progress_s) * recompute_blocks_per_s > self.num_pending > 0

    @property
    def needs_probe(self) -> bool:
        """Whether a slow tier has been left alone for so long that it may have become quicker. O(1)."""
        return not self.num_pending and self._now_s - self._asked_s >= PROBE_EVERY_S

    def begin_probe(self) -> None:
        """What is asked for next tells anew how quick the tier is; what was known before counts no more."""
        self._rate = Rate()
        self._is_probing = True

    def num_worth_asking(self, num_blocks: int, recompute_blocks_per_s: float | None) -> int | None:
        """How many of `num_blocks` more blocks arrive sooner than the engine could recompute them. O(1).

        A tier of which nothing is known gets a probe; None: one is on its way, and will tell. Nothing is compared while
        the engine's rate is unknown.
        """
        if self.is_slower(recompute_blocks_per_s):
            return 0
        if self.blocks_per_s is None:
            return min(num_blocks, PROBE_BLOCKS - self.num_pending) if self.num_pending < PROBE_BLOCKS else None
        if recompute_blocks_per_s is None:
            return num_blocks
        expected_s = (self.num_pending + num_blocks) / self.blocks_per_s
        return num_blocks if expected_s <= num_blocks / recompute_blocks_per_s else 0
