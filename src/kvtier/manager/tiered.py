"""`TieredOffloadingManager`: RAM in front, any number of tiers behind it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import filterfalse

from kvtier.errors import ConfigurationError, KVTierError
from kvtier.events import OffloadingEvent
from kvtier.interfaces import (
    CPULoadStoreSpec,
    LoadStoreSpec,
    ManagerStats,
    OffloadingManager,
    PrefixLookup,
    PrepareStoreOutput,
    ReqContext,
    Residency,
)
from kvtier.keys import OffloadKey, is_private
from kvtier.manager.breaker import CircuitBreaker
from kvtier.manager.cascade import STEP_BLOCKS, CascadeQueue, CascadeWhen
from kvtier.manager.cpu import CPUOffloadingManager
from kvtier.manager.pace import TierPace
from kvtier.manager.promotions import PromotionPlanner, TieringLimits
from kvtier.manager.tier_transfers import TierTransfers
from kvtier.tier_interfaces import EpochStore, Tier, TierStats

_READY, _ARRIVING, _UNKNOWN, _ABSENT = Residency.READY, Residency.ARRIVING, Residency.UNKNOWN, Residency.ABSENT


class TieredOffloadingManager(OffloadingManager):
    """`ram` in front of `tiers`, the fastest first. See `OffloadingManager` for the contract.

    **Up.** A look-up that finds a block in a lower tier notes it and answers None, within the request's deadline.
    `on_schedule_end` plans promotions: stores into RAM whose writer is the tier. So a block on its way up is in flight
    like any other: visible to nobody before the tier has verified its bytes in the slot, brought up once whoever asks,
    reaped and fenced like a store of the engine. `limits` bounds what is on its way; what would take longer than
    recomputing (`tell_recompute_rate`) is not begun.

    **Down.** Blocks that were stored (or, with `cascade_when` "reused", loaded) are offered to every tier below, and
    pinned in RAM only while a tier that has accepted them reads them. A slow or full tier sheds. What came up from a
    tier is offered to those before it that want all that is stored. With "evicted", half of `cascading_share` is kept
    free in RAM: what would be evicted next leaves early, and is offered to the first tier that is meant. Nobody finds
    it on its way, and stores that take more room than that within a step evict what is lost. `cascade_when` is for all
    tiers, or one for each.

    A tier whose jobs keep failing is left alone for a while (`CircuitBreaker`). `epochs` has the weight epoch of each
    tier, in their order: `reset_cache` raises all, and closes a tier whose epoch it cannot raise; without it the tiers
    must keep nothing. The caller has attached the tiers to the pool whose slots `ram` counts, and closes them after
    `shutdown`; `ram` belongs to this manager, without a reuse filter of its own: wrap this manager in
    `FilterReusedOffloadingManager` instead.

    Raises ConfigurationError for values outside what is said here.
    """

    def __init__(
        self,
        ram: CPUOffloadingManager,
        tiers: Sequence[Tier],
        *,
        limits: TieringLimits | None = None,
        cascade_when: str | Sequence[str] = "stored",
        epochs: Sequence[EpochStore] | None = None,
        enable_events: bool = False,
    ) -> None:
        if ram.has_reuse_filter:
            raise ConfigurationError("ram has a reuse filter; allowed: none (wrap the tiered manager instead)")
        self.ram = ram
        self.limits = limits or TieringLimits()
        self._paces = [TierPace(tier) for tier in tiers]
        if isinstance(cascade_when, str):
            self._whens = [CascadeWhen.parse(cascade_when)] * len(tiers)
        else:
            self._whens = [CascadeWhen.parse(name) for name in cascade_when]
        for name, given in (("cascade_when", self._whens), ("epochs", tiers if epochs is None else epochs)):
            if len(given) != len(tiers):
                raise ConfigurationError(f"{name} has {len(given)} entries; allowed: {len(tiers)}, one for each tier")
        capacity = ram.get_stats().capacity_blocks
        self._queues = [CascadeQueue(capacity) for _ in tiers]
        self._max_cascading = max(1, int(capacity * self.limits.cascading_share))
        self._num_reserved = max(1, self._max_cascading // 2)
        """Slots that are kept free where blocks are written down before they are evicted."""
        self._epochs = None if epochs is None else list(epochs)
        self._events: list[OffloadingEvent] | None = [] if enable_events else None
        self._counters: Counter[str] = Counter()
        self._transfers = TierTransfers(ram, self._paces, self._counters, self._note_taken, self._note_arrived)
        self._promotions = PromotionPlanner(ram, self._paces, self._transfers, self.limits, self._counters)

    # -- look-up ---------------------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        if self._promotions.comes_too_slowly(key):
            return False
        answer = self.ram.lookup(key, req_context)
        if answer is not False or self.ram.residency(key) is not _ABSENT:
            return answer
        return False if self._promotions.ask(key, req_context) is _ABSENT else None

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrefixLookup:
        num_ready, stopped_by = self.ram.lookup_prefix(keys, req_context)
        if stopped_by is _ARRIVING and self._promotions.comes_too_slowly(keys[num_ready]):
            return PrefixLookup(num_ready, _ABSENT)
        if num_ready == len(keys) or (stopped_by is _ABSENT and self.ram.residency(keys[num_ready]) is not _ABSENT):
            return PrefixLookup(num_ready, stopped_by)
        # what is behind a block on its way is wanted as well, and can be brought up meanwhile
        for key in keys[num_ready:]:
            if self.ram.residency(key) is not _ABSENT:
                continue
            found = self._promotions.ask(key, req_context)
            if found is _ABSENT:
                break
            if stopped_by is _ABSENT:
                stopped_by = found
        return PrefixLookup(num_ready, stopped_by)

    def residency(self, key: OffloadKey) -> Residency:
        in_ram = self.ram.residency(key)
        return in_ram if in_ram is not _ABSENT else self._promotions.residency(key)[0]

    # -- transfers of the engine -------------------------------------------------------------------------------

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:
        spec = self.ram.prepare_load(keys, req_context)
        self._queue_down(spec.keys, CascadeWhen.REUSED)
        for pace in self._paces:
            pace.tier.touch(spec.keys)
        return spec

    def complete_load(
        self,
        keys: Collection[OffloadKey],
        req_context: ReqContext,
        success: bool = True,
        spec: LoadStoreSpec | None = None,
    ) -> None:
        self.ram.complete_load(keys, req_context, success, spec)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        return self.ram.prepare_store(keys, req_context)

    def prepare_store_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput:
        return self.ram.prepare_store_prefix(keys, req_context)

    def complete_store(
        self,
        keys: Collection[OffloadKey],
        req_context: ReqContext,
        success: bool = True,
        spec: LoadStoreSpec | None = None,
    ) -> None:
        keys = list(keys)
        self.ram.complete_store(keys, req_context, success, spec)
        if success and CascadeWhen.STORED in self._whens:
            self._queue_down([key for key in keys if self.ram.residency(key) is _READY], CascadeWhen.STORED)

    def writers_died(self) -> None:
        self.ram.writers_died()

    # -- recency and requests --------------------------------------------------------------------------------

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self.ram.touch(keys, req_context)
        for pace in self._paces:
            pace.tier.touch(keys)

    def count_offers(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self.ram.count_offers(keys, req_context)

    def on_new_request(self, req_context: ReqContext) -> None:
        self.ram.on_new_request(req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._promotions.forget(req_context)
        self.ram.on_request_finished(req_context)

    def on_schedule_end(self) -> None:
        self.ram.on_schedule_end()
        self._promotions.plan()
        if CascadeWhen.EVICTED in self._whens:
            self._evict_down(self._whens.index(CascadeWhen.EVICTED))
        for number, queue in enumerate(self._queues):
            if queue:
                self._cascade(number)

    def has_pending_work(self) -> bool:
        """Tiers never keep the engine stepping: what waits for them is a request, or can wait."""
        return self.ram.has_pending_work()

    # -- waiting and time ------------------------------------------------------------------------------------

    def still_waiting(self, req_context: ReqContext) -> bool:
        if self._promotions.is_wishing(req_context):
            return self.ram.defer(req_context)
        stuck_on = self.ram.stuck_on(req_context)
        return stuck_on is not None and not self._promotions.comes_too_slowly(stuck_on)

    def worth_waiting(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> bool:
        return self.ram.worth_waiting(keys, req_context)

    def tell_recompute_rate(self, blocks_per_s: float | None) -> None:
        self.ram.tell_recompute_rate(blocks_per_s)
        self._promotions.recompute_blocks_per_s = blocks_per_s

    def defer(self, req_context: ReqContext) -> bool:
        return self.ram.defer(req_context)

    def advance(self, now_s: float) -> None:
        """Tells the time, and takes what the tiers have done since the last call."""
        self.ram.advance(now_s)
        self._transfers.advance(now_s)
        for pace in self._paces:
            self._note_removed(pace.tier)

    # -- whole cache -----------------------------------------------------------------------------------------

    def reset_cache(self) -> None:
        """Everything becomes absent in every tier. Raises each tier's weight epoch durably, or closes that tier."""
        self.ram.reset_cache()
        for queue in self._queues:
            queue.clear()
        self._promotions.clear()
        for number, pace in enumerate(self._paces):
            self._note_removed(pace.tier)
            self._emit(self._reset_tier(number, pace.tier), pace.tier.medium, removed=True)

    def _reset_tier(self, number: int, tier: Tier) -> list[OffloadKey]:
        """Returns what has left the tier."""
        try:
            epoch = self._epochs[number].advance() if self._epochs is not None else 0
        except KVTierError as error:
            tier.disable(f"the weight epoch could not be raised: {error}")
            return tier.take_removed()
        return tier.reset(epoch)

    def take_events(self) -> Iterable[OffloadingEvent]:
        events = list(self.ram.take_events())
        if self._events:
            events += self._events
            self._events.clear()
        return events

    def get_stats(self) -> ManagerStats:
        """Of RAM, with this manager's own counters beside those of RAM; `tier_stats` has the tiers below."""
        stats = self.ram.get_stats()
        counters = {**stats.counters, **self._counters, "cascade_shed_blocks": sum(q.num_shed for q in self._queues)}
        return ManagerStats(
            capacity_blocks=stats.capacity_blocks,
            ready_blocks=stats.ready_blocks,
            in_flight_blocks=stats.in_flight_blocks,
            pinned_blocks=stats.pinned_blocks,
            condemned_blocks=stats.condemned_blocks,
            breaker_state=stats.breaker_state,
            counters=counters,
        )

    def tier_stats(self) -> list[TierStats]:
        """Of the tiers below RAM, in their order."""
        return [pace.tier.get_stats() for pace in self._paces]

    @property
    def breakers(self) -> list[tuple[str, CircuitBreaker]]:
        """Of the tiers below RAM, in their order: medium and breaker. The caller owns the list."""
        return [(pace.tier.medium, pace.breaker) for pace in self._paces]

    @property
    def num_cascading(self) -> int:
        """Blocks on their way down. O(1)."""
        return self._transfers.num_cascading

    @property
    def num_promoting(self) -> int:
        """Blocks on their way up. O(1)."""
        return self._transfers.num_promoting

    def brought_up(self, key: OffloadKey, req_context: ReqContext) -> str | None:
        """The medium below RAM that this block came from on behalf of this very request; None if none. O(1)."""
        number = self._promotions.brought_up(key, req_context)
        return None if number is None else self._paces[number].tier.medium

    def check_invariants(self) -> None:
        self.ram.check_invariants()
        for pace in self._paces:
            pace.tier.check_invariants()
        self._transfers.check_invariants()

    @property
    def awaited_tiers(self) -> list[Tier]:
        """Those that something is on its way up from, or that owe an answer that a request waits for. The caller owns
        the list. O(tiers)."""
        unanswered = self._promotions.unanswered
        return [pace.tier for number, pace in enumerate(self._paces) if pace.num_pending or number in unanswered]

    def flush_down(self, numbers: Collection[int] | None = None) -> int:
        """Before a stop: offers all of RAM to the tiers that do not have it and can be reached, whatever `cascade_when`
        says. `numbers`: to these alone; what waits for the others is forgotten.

        The caller goes on with `advance` and `on_schedule_end` until `num_to_flush` is 0 or its patience ends.
        Returns how many blocks wait. O(capacity).
        """
        ready = list(filterfalse(is_private, self.ram.ready_keys()))
        for number, (pace, queue) in enumerate(zip(self._paces, self._queues, strict=True)):
            stats = pace.tier.get_stats()
            if stats.closed_reason or stats.down_reason or (numbers is not None and number not in numbers):
                queue.clear()
                continue
            below = pace.tier.lookup(ready)
            queue.add(key for key, found in zip(ready, below, strict=True) if found is not _READY)
        return self.num_to_flush

    @property
    def num_to_flush(self) -> int:
        """Blocks that wait to go down, or are on their way. O(tiers)."""
        return self._transfers.num_cascading + sum(map(len, self._queues))

    def shutdown(self) -> None:
        """Cancels what lower tiers have not begun. The caller closes the tiers, then the pool."""
        self._transfers.cancel_all()
        self.ram.shutdown()

    # -- private ---------------------------------------------------------------------------------------------

    def _queue_down(self, keys: Sequence[OffloadKey], when: CascadeWhen, before: int | None = None) -> None:
        """To the tiers that want blocks then; `before`: to those above that one alone."""
        for queue, wanted in zip(self._queues[:before], self._whens, strict=False):
            if wanted is when:
                queue.add(keys)

    def _cascade(self, number: int) -> None:
        pace, queue = self._paces[number], self._queues[number]
        room = self._max_cascading - self._transfers.num_cascading
        if room < 1 or not pace.is_usable:
            return
        keys = queue.take(room, lambda key: self.ram.residency(key) is _READY)
        below = pace.tier.lookup(keys)
        # a tier that does not know yet finds out before it moves anything
        keys = [key for key, found in zip(keys, below, strict=True) if found is not _READY]
        if keys:
            queue.give_back(keys[self._transfers.take_down(number, keys) :])

    def _evict_down(self, number: int) -> None:
        """Keeps some slots free, by writing down what would be evicted next."""
        pace = self._paces[number]
        room = self._max_cascading - self._transfers.num_cascading
        count = min(self._num_reserved - self.ram.num_free, room, STEP_BLOCKS)
        if count > 0 and pace.is_usable:
            self._queues[number].num_shed += self._transfers.evict_down(number, count)

    def _note_taken(self, number: int, keys: list[OffloadKey]) -> None:
        self._emit(keys, self._paces[number].tier.medium, removed=False)

    def _note_arrived(self, number: int, keys: list[OffloadKey]) -> None:
        self._queue_down(keys, CascadeWhen.STORED, before=number)

    def _note_removed(self, tier: Tier) -> None:
        self._emit(tier.take_removed(), tier.medium, removed=True)

    def _emit(self, keys: list[OffloadKey], medium: str, removed: bool) -> None:
        if self._events is not None and keys:
            self._events.append(OffloadingEvent(keys, medium, removed))
