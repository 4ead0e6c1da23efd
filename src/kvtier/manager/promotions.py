"""Which blocks come up from lower tiers: wishes of waiting requests, and what of them is worth bringing.

Sans-I/O: time and rates are arguments.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvtier.errors import ConfigurationError
from kvtier.interfaces import ReqContext, Residency
from kvtier.keys import OffloadKey, is_private
from kvtier.manager.cpu import CPUOffloadingManager
from kvtier.manager.pace import PROBE_BLOCKS, TierPace
from kvtier.manager.tier_transfers import TierTransfers

_READY, _ARRIVING, _UNKNOWN, _ABSENT = Residency.READY, Residency.ARRIVING, Residency.UNKNOWN, Residency.ABSENT


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


class PromotionPlanner:
    """Takes down what waiting requests would like to have from lower tiers, and has it brought up, within `limits`.

    A tier that is slower than recomputing is not waited for; now and then it is tried again, with blocks that nobody
    waits for. `counters` are the caller's, and counted in.
    """

    def __init__(
        self,
        ram: CPUOffloadingManager,
        paces: list[TierPace],
        transfers: TierTransfers,
        limits: TieringLimits,
        counters: Counter[str],
    ) -> None:
        self.recompute_blocks_per_s: float | None = None
        """What the engine computes; None: not known, nothing is compared."""
        self._ram = ram
        self._paces = paces
        self._transfers = transfers
        self._counters = counters
        capacity = ram.get_stats().capacity_blocks
        self._requests_per_step = limits.requests_per_step
        self._max_promoting = max(1, int(capacity * limits.promoting_share))
        self._max_of_request = max(1, int(capacity * limits.request_share))
        self._wishes: dict[ReqContext, Wish] = {}
        """Of requests that wait for a promotion that has not begun, oldest first."""
        self._candidates: dict[int, list[OffloadKey]] = {}
        """Number of a slow tier -> blocks that were asked for: what it is tried with."""
        self.unanswered: set[int] = set()
        """Numbers of the tiers that somebody waits for an answer from, as of the last step."""
        self._unanswered_now: set[int] = set()

    # -- asked by look-ups -----------------------------------------------------------------------------------

    def residency(self, key: OffloadKey) -> tuple[Residency, int]:
        """What the first lower tier says that knows something of the block, and its number. O(tiers)."""
        if is_private(key):
            return _ABSENT, -1
        for number, pace in enumerate(self._paces):
            if pace.is_usable and (found := pace.tier.lookup((key,))[0]) is not _ABSENT:
                return (_ARRIVING if found is _READY else found), number
        return _ABSENT, -1

    def ask(self, key: OffloadKey, req_context: ReqContext) -> Residency:
        """What the request is told of a block that is not in RAM: notes the wish to have it there. O(tiers)."""
        wish: Wish | None = req_context._states.get(self)
        if wish is not None and wish.declined:
            return _ABSENT
        found, number = self.residency(key)
        if found is _ABSENT or not self._ram.defer(req_context):
            return _ABSENT
        if found is _UNKNOWN:
            self._unanswered_now.add(number)
            return _UNKNOWN
        if wish is None:
            wish = req_context._states[self] = Wish(req_context)
        if self._paces[number].is_slower(self.recompute_blocks_per_s):
            self._decline(wish)
            self._candidates.setdefault(number, []).append(key)
            return _ABSENT
        wish.keys[key] = number
        self._wishes.setdefault(req_context, wish)
        return _ARRIVING

    def comes_too_slowly(self, key: OffloadKey) -> bool:
        """Whether this block is on its way up, and computing it is quicker for who did not wait until now. O(1)."""
        number = self._transfers.source_of(key)
        return number is not None and self._paces[number].is_slower(self.recompute_blocks_per_s)

    def is_wishing(self, req_context: ReqContext) -> bool:
        """Whether the request waits for something to be begun. O(1)."""
        return req_context in self._wishes

    def brought_up(self, key: OffloadKey, req_context: ReqContext) -> int | None:
        """The number of the tier that this block came from for this very request; None if none. O(1)."""
        wish: Wish | None = req_context._states.get(self)
        return wish.brought.get(key) if wish is not None else None

    # -- told ------------------------------------------------------------------------------------------------

    def forget(self, req_context: ReqContext) -> None:
        """The request has finished."""
        self._wishes.pop(req_context, None)
        req_context._states.pop(self, None)

    def clear(self) -> None:
        """Nobody wishes for anything any more."""
        self._wishes.clear()
        self._candidates.clear()

    def plan(self) -> None:
        """At the end of a step: begins what is worth it. O(blocks wished for by `requests_per_step` requests)."""
        self.unanswered, self._unanswered_now = self._unanswered_now, set()
        for wish in list(self._wishes.values())[: self._requests_per_step]:
            if self._room < 1:
                break
            del self._wishes[wish.context]
            wanted, wish.keys = wish.keys, {}
            if self._ram.defer(wish.context):  # else its deadline has passed
                self._promote(wish, wanted)
        for number in list(self._candidates):
            self._probe(number)

    # -- private ---------------------------------------------------------------------------------------------

    @property
    def _room(self) -> int:
        return self._max_promoting - self._transfers.num_promoting

    def _promote(self, wish: Wish, wanted: dict[OffloadKey, int]) -> None:
        """Begins promotions for one request, tier by tier; what there is no room for is asked for again later.

        From then on the request waits for a block in flight in RAM, like any other.
        """
        for number, pace in enumerate(self._paces):
            keys = [k for k, n in wanted.items() if n == number and self._ram.residency(k) is _ABSENT]
            if not keys or not pace.is_usable:
                continue
            allowed = min(len(keys), self._room, self._max_of_request - wish.num_promoted)
            count = pace.num_worth_asking(allowed, self.recompute_blocks_per_s) if allowed > 0 else 0
            if count is None:
                wish.keys = wanted
                self._wishes[wish.context] = wish
                continue
            begun = self._transfers.bring_up(number, keys[:count]) if count else []
            if not begun:
                # its share is used up, or recomputing is sooner: waiting would be in vain
                self._decline(wish)
            wish.brought.update(dict.fromkeys(begun, number))
            wish.num_promoted += len(begun)
            if self._room < 1:
                break
        arriving = next((key for key in wanted if self._ram.residency(key) is _ARRIVING), None)
        if arriving is not None:
            if self.recompute_blocks_per_s is not None:
                # a tier that turns out to be slower than expected then costs about twice what not asking it would have
                self._ram.limit_wait(wish.context, len(wanted) / self.recompute_blocks_per_s)
            self._ram.lookup(arriving, wish.context)

    def _decline(self, wish: Wish) -> None:
        wish.declined = True
        self._counters["declined_promotions"] += 1

    def _probe(self, number: int) -> None:
        """Now and then brings up blocks from a slow tier, for nobody in particular."""
        self._candidates[number] = candidates = self._candidates[number][-PROBE_BLOCKS:]
        pace = self._paces[number]
        if not pace.needs_probe or self._room < 1:
            return
        del self._candidates[number]
        keys = [key for key in dict.fromkeys(candidates) if self._ram.residency(key) is _ABSENT]
        if keys and pace.is_usable:
            pace.begin_probe()
            self._transfers.bring_up(number, keys[: self._room])
