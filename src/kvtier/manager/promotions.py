"""Which blocks come up from lower tiers: wishes of waiting requests, admission, and what a tier is known to deliver.

Sans-I/O: time, rates and outcomes are arguments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kvtier.errors import ConfigurationError
from kvtier.interfaces import ReqContext
from kvtier.keys import OffloadKey
from kvtier.manager.breaker import CircuitBreaker, Transfer
from kvtier.manager.waiting import Rate
from kvtier.tier_interfaces import Tier, TierOutcome

PROBE_BLOCKS = 16
"""As long as nobody knows how fast a tier is, no more than this is asked of it at once."""
PROBE_EVERY_S = 30.0
"""A tier that was slower than recomputing is tried again this often, with blocks that nobody waits for."""


@dataclass(frozen=True, slots=True)
class TieringLimits:
    """What tiers below RAM may take of RAM at most, as shares of its slots (at least one block each).

    Raises ConfigurationError for values that are not in (0, 1], or counts below 1.
    """

    promoting_share: float = 0.5
    """In flight upwards, all requests together: the rest is left to the stores of running requests."""
    request_share: float = 0.5
    """Brought up for one request in its life."""
    cascading_share: float = 0.125
    """Pinned while a lower tier reads them."""
    requests_per_step: int = 8
    """Waiting requests, oldest wish first, for which promotions are planned in one step."""

    def __post_init__(self) -> None:
        for name in ("promoting_share", "request_share", "cascading_share"):
            share = getattr(self, name)
            if not 0 < share <= 1:
                raise ConfigurationError(f"{name} is {share}; allowed: more than 0, up to 1")
        if self.requests_per_step < 1:
            raise ConfigurationError(f"requests_per_step is {self.requests_per_step}; allowed: 1 or more")


@dataclass(slots=True)
class Wish:
    """What one waiting request wants from lower tiers. Dies with the request, or when it need not wait any more."""

    context: ReqContext
    keys: dict[OffloadKey, int] = field(default_factory=dict)
    """Key -> number of the tier that has it, shallowest first as far as the engine asks in that order."""
    num_promoted: int = 0
    """Blocks brought up for the request so far."""
    brought: dict[OffloadKey, int] = field(default_factory=dict)
    """Those blocks, and which tier each came from."""
    declined: bool = False
    """Nothing more is brought up for it: waiting would cost more than it saves, or its share is used up."""


class TierPace:
    """What one lower tier delivers, and what it still owes. Decides whether asking it for more pays.

    The rate is of blocks that arrived while something was on its way, so it knows queues, latency and bandwidth as
    one; recent ones count most.
    """

    def __init__(self, tier: Tier, breaker: CircuitBreaker | None = None) -> None:
        self.tier = tier
        self.breaker = breaker or CircuitBreaker()
        self.num_pending = 0
        """Blocks on their way up."""
        self._rate = Rate()
        self._now_s = -math.inf
        self._num_arrived = 0
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
            self._rate.note(self._num_arrived, now_s - self._now_s)
        if self._num_arrived:
            self._progress_s = now_s
        self._num_arrived = 0
        self._now_s = now_s

    def note_begun(self, num_blocks: int, is_store: bool) -> None:
        """A job was handed to the tier."""
        self.breaker.note_begun()
        if not is_store:
            if not self.num_pending:
                self._progress_s = self._now_s
            self.num_pending += num_blocks
            self._asked_s = self._now_s

    def note_outcome(self, outcome: TierOutcome, was_cancelled: bool) -> None:
        """A job has ended. A block that is not there any more, or that we cancelled, is no failure of the tier."""
        num_arrived = sum(outcome.succeeded)
        if not outcome.is_store:
            self.num_pending -= len(outcome.succeeded)
            self._num_arrived += num_arrived
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
