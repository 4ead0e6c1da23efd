"""`TieredOffloadingManager`: RAM in front, any number of tiers behind it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from kvtier.errors import ConfigurationError, InvariantError, KVTierError
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
from kvtier.keys import OffloadKey
from kvtier.manager.breaker import CircuitBreaker
from kvtier.manager.cascade import CascadeQueue, CascadeWhen
from kvtier.manager.cpu import CPUOffloadingManager
from kvtier.manager.promotions import TieringLimits, TierPace, Wish
from kvtier.tier_interfaces import EpochStore, Tier, TierOutcome, TierStats

_READY, _ARRIVING, _UNKNOWN, _ABSENT = Residency.READY, Residency.ARRIVING, Residency.UNKNOWN, Residency.ABSENT


class _TierContext(ReqContext):
    """Stands for a tier in the RAM manager's books, one for each job."""

    __slots__ = ()
    by_engine = False


@dataclass(slots=True)
class _Job:
    """A transfer between RAM slots and a tier that has not ended."""

    context: _TierContext
    spec: CPULoadStoreSpec
    keys: list[OffloadKey]
    """What the tier has accepted: of `spec.keys`, the leading ones."""
    tier_number: int
    is_promotion: bool
    begin_by_s: float
    is_cancelled: bool = False


class TieredOffloadingManager(OffloadingManager):
    """`ram` in front of `tiers`, the fastest first. See `OffloadingManager` for the contract.

    **Up.** A look-up that finds a block in a lower tier notes it and answers None, within the request's deadline.
    `on_schedule_end` plans promotions: stores into RAM whose writer is the tier. So a block on its way up is in flight
    like any other: visible to nobody before the tier has verified its bytes in the slot, brought up once whoever asks,
    reaped and fenced like a store of the engine. `limits` bounds what is on its way; what would take longer than
    recomputing (`tell_recompute_rate`) is not begun.

    **Down.** Blocks that were stored (or, with `cascade_when` "reused", loaded) are offered to every tier below, and
    pinned in RAM only while a tier that has accepted them reads them. A tier that is slow or full sheds.

    A tier whose jobs keep failing is left alone for a while (`CircuitBreaker`). `epochs` keeps the weight epoch:
    `reset_cache` raises it, and closes the tiers if that fails. The caller has attached the tiers to the pool whose
    slots `ram` counts, and closes them after `shutdown`; `ram` belongs to this manager, without a reuse filter of its
    own: wrap this manager in `FilterReusedOffloadingManager` instead.

    Raises ConfigurationError for values outside what is said here.
    """

    def __init__(
        self,
        ram: CPUOffloadingManager,
        tiers: Sequence[Tier],
        *,
        limits: TieringLimits | None = None,
        cascade_when: str = "stored",
        epochs: EpochStore | None = None,
        enable_events: bool = False,
    ) -> None:
        if ram.has_reuse_filter:
            raise ConfigurationError("ram has a reuse filter; allowed: none (wrap the tiered manager instead)")
        self.ram = ram
        self.limits = limits or TieringLimits()
        self._paces = [TierPace(tier) for tier in tiers]
        self._when = CascadeWhen.parse(cascade_when)
        capacity = ram.get_stats().capacity_blocks
        self._queues = [CascadeQueue(capacity) for _ in tiers]
        self._max_promoting = max(1, int(capacity * self.limits.promoting_share))
        self._max_of_request = max(1, int(capacity * self.limits.request_share))
        self._max_cascading = max(1, int(capacity * self.limits.cascading_share))
        self._epochs = epochs
        self._events: list[OffloadingEvent] | None = [] if enable_events else None
        self._jobs: dict[int, _Job] = {}
        self._next_job_id = 0
        self._num_promoting = 0
        self._num_cascading = 0
        self._wishes: dict[ReqContext, Wish] = {}
        """Of requests that wait for a promotion that has not begun, oldest first."""
        self._now_s = -math.inf
        self._recompute_blocks_per_s: float | None = None
        self._counters: Counter[str] = Counter()

    # -- look-up ---------------------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        answer = self.ram.lookup(key, req_context)
        if answer is not False or self.ram.residency(key) is not _ABSENT:
            return answer
        return False if self._ask_below(key, req_context) is _ABSENT else None

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrefixLookup:
        num_ready, stopped_by = self.ram.lookup_prefix(keys, req_context)
        if num_ready == len(keys) or (stopped_by is _ABSENT and self.ram.residency(keys[num_ready]) is not _ABSENT):
            return PrefixLookup(num_ready, stopped_by)
        # what is behind a block on its way is wanted as well, and can be brought up meanwhile
        for key in keys[num_ready:]:
            if self.ram.residency(key) is not _ABSENT:
                continue
            found = self._ask_below(key, req_context)
            if found is _ABSENT:
                break
            if stopped_by is _ABSENT:
                stopped_by = found
        return PrefixLookup(num_ready, stopped_by)

    def residency(self, key: OffloadKey) -> Residency:
        in_ram = self.ram.residency(key)
        return in_ram if in_ram is not _ABSENT else self._below(key)[0]

    # -- transfers of the engine -------------------------------------------------------------------------------

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:
        spec = self.ram.prepare_load(keys, req_context)
        if self._when is CascadeWhen.REUSED:
            self._queue_down(spec.keys)
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
        if success and self._when is CascadeWhen.STORED:
            self._queue_down(key for key in keys if self.ram.residency(key) is _READY)

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
        self._wishes.pop(req_context, None)
        req_context._states.pop(self, None)
        self.ram.on_request_finished(req_context)

    def on_schedule_end(self) -> None:
        self.ram.on_schedule_end()
        if self._wishes:
            self._plan_promotions()
        for number, queue in enumerate(self._queues):
            if queue:
                self._cascade(number)

    def has_pending_work(self) -> bool:
        """Tiers never keep the engine stepping: what waits for them is a request, or can wait."""
        return self.ram.has_pending_work()

    # -- waiting and time ------------------------------------------------------------------------------------

    def still_waiting(self, req_context: ReqContext) -> bool:
        if req_context in self._wishes:
            return self.ram.defer(req_context)
        return self.ram.still_waiting(req_context)

    def worth_waiting(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> bool:
        return self.ram.worth_waiting(keys, req_context)

    def tell_recompute_rate(self, blocks_per_s: float | None) -> None:
        self._recompute_blocks_per_s = blocks_per_s
        self.ram.tell_recompute_rate(blocks_per_s)

    def defer(self, req_context: ReqContext) -> bool:
        return self.ram.defer(req_context)

    def advance(self, now_s: float) -> None:
        """Tells the time, and takes what the tiers have done since the last call."""
        self.ram.advance(now_s)
        later = now_s > self._now_s
        if later:
            self._now_s = now_s
            self._cancel_late_promotions()
            for pace in self._paces:
                pace.breaker.advance(now_s)
        self._poll()
        if later:
            for pace in self._paces:
                pace.observe(now_s)

    # -- whole cache -----------------------------------------------------------------------------------------

    def reset_cache(self) -> None:
        """Everything becomes absent in every tier. Raises the weight epoch durably, or closes the tiers."""
        self.ram.reset_cache()
        for queue in self._queues:
            queue.clear()
        self._wishes.clear()
        failure = ""
        epoch = 0
        try:
            epoch = self._epochs.advance() if self._epochs is not None else 0
        except KVTierError as error:
            failure = f"the weight epoch could not be raised: {error}"
        for pace in self._paces:
            self._note_removed(pace.tier)
            if failure:
                removed = [*pace.tier.take_removed()]
                pace.tier.disable(failure)
                removed += pace.tier.take_removed()
            else:
                removed = pace.tier.reset(epoch)
            self._emit(removed, pace.tier.medium, removed=True)

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
        return self._num_cascading

    @property
    def num_promoting(self) -> int:
        """Blocks on their way up. O(1)."""
        return self._num_promoting

    def brought_up(self, key: OffloadKey, req_context: ReqContext) -> str | None:
        """The medium below RAM that this block came from on behalf of this very request; None if none. O(1)."""
        wish: Wish | None = req_context._states.get(self)
        number = wish.brought.get(key) if wish is not None else None
        return None if number is None else self._paces[number].tier.medium

    def check_invariants(self) -> None:
        self.ram.check_invariants()
        for pace in self._paces:
            pace.tier.check_invariants()
        promoting = sum(len(job.keys) for job in self._jobs.values() if job.is_promotion)
        cascading = sum(len(job.keys) for job in self._jobs.values() if not job.is_promotion)
        if (promoting, cascading) != (self._num_promoting, self._num_cascading):
            counted = f"{self._num_promoting} and {self._num_cascading}"
            raise InvariantError(f"{promoting} blocks on their way up and {cascading} down are counted as {counted}")

    def flush_down(self) -> int:
        """Before a stop: offers all of RAM to the tiers that do not have it, whatever `cascade_when` says.

        The caller goes on with `advance` and `on_schedule_end` until `num_to_flush` is 0 or its patience ends.
        Returns how many blocks wait. O(capacity).
        """
        ready = self.ram.ready_keys()
        for pace, queue in zip(self._paces, self._queues, strict=True):
            below = pace.tier.lookup(ready)
            queue.add(key for key, found in zip(ready, below, strict=True) if found is _ABSENT)
        return self.num_to_flush

    @property
    def num_to_flush(self) -> int:
        """Blocks that wait to go down, or are on their way. O(tiers)."""
        return self._num_cascading + sum(map(len, self._queues))

    def shutdown(self) -> None:
        """Cancels what lower tiers have not begun. The caller closes the tiers, then the pool."""
        for job_id, job in self._jobs.items():
            self._paces[job.tier_number].tier.cancel(job_id)
        self.ram.shutdown()

    # -- up --------------------------------------------------------------------------------------------------

    def _below(self, key: OffloadKey) -> tuple[Residency, int]:
        """What the first lower tier says that knows something of the block, and its number."""
        for number, pace in enumerate(self._paces):
            if pace.is_usable and (found := pace.tier.lookup((key,))[0]) is not _ABSENT:
                return (_ARRIVING if found is _READY else found), number
        return _ABSENT, -1

    def _ask_below(self, key: OffloadKey, req_context: ReqContext) -> Residency:
        """What the request is told of a block that is not in RAM: notes the wish to have it there."""
        wish: Wish | None = req_context._states.get(self)
        if wish is not None and wish.declined:
            return _ABSENT
        found, number = self._below(key)
        if found is _ABSENT or not self.ram.defer(req_context):
            return _ABSENT
        if found is _UNKNOWN:
            return _UNKNOWN
        if wish is None:
            wish = req_context._states[self] = Wish(req_context)
        wish.keys[key] = number
        self._wishes.setdefault(req_context, wish)
        return _ARRIVING

    def _plan_promotions(self) -> None:
        for wish in list(self._wishes.values())[: self.limits.requests_per_step]:
            room = self._max_promoting - self._num_promoting
            if room < 1:
                return
            del self._wishes[wish.context]
            wanted = wish.keys
            wish.keys = {}
            if not self.ram.defer(wish.context):
                continue  # its deadline has passed
            self._promote(wish, wanted, room)

    def _promote(self, wish: Wish, wanted: dict[OffloadKey, int], room: int) -> None:
        """Begins promotions for one request, tier by tier; what is beyond `room` is asked for again when that has come.

        From then on the request waits for a block in flight in RAM, like any other.
        """
        for number, pace in enumerate(self._paces):
            keys = [k for k, n in wanted.items() if n == number and self.ram.residency(k) is _ABSENT]
            if not keys or not pace.is_usable:
                continue
            allowed = min(len(keys), room, self._max_of_request - wish.num_promoted)
            count = pace.num_worth_asking(allowed, self._recompute_blocks_per_s) if allowed > 0 else 0
            begun = self._begin_promotion(number, keys[:count], wish) if count else 0
            if not begun:
                # its share is used up, or recomputing is sooner: waiting would be in vain
                wish.declined = True
                self._counters["declined_promotions"] += 1
            wish.num_promoted += begun
            room -= begun
            if room < 1:
                break
        arriving = next((key for key in wanted if self.ram.residency(key) is _ARRIVING), None)
        if arriving is not None:
            self.ram.lookup(arriving, wish.context)

    def _begin_promotion(self, number: int, keys: list[OffloadKey], wish: Wish) -> int:
        """Makes room in RAM and asks the tier for the leading `keys` that fit. Returns how many."""
        job_id = self._new_job_id()
        context = _TierContext(f"promotion-{job_id}")
        output = self.ram.prepare_store_prefix(keys, context)
        spec = cast(CPULoadStoreSpec, output.store_spec)
        if not output.keys_to_store:
            return 0
        pace = self._paces[number]
        begin_by_s = self._now_s + self.ram.deadline_s
        keys = output.keys_to_store
        self._jobs[job_id] = _Job(context, spec, keys, number, is_promotion=True, begin_by_s=begin_by_s)
        self._num_promoting += len(keys)
        wish.brought.update(dict.fromkeys(keys, number))
        pace.note_begun(len(keys), is_store=False)
        pace.tier.submit_load(job_id, keys, spec.slots)
        return len(keys)

    def _cancel_late_promotions(self) -> None:
        """What has not begun by the deadline of whoever asked for it is of no use to them any more."""
        if self._num_promoting:
            for job_id, job in self._jobs.items():
                if job.is_promotion and not job.is_cancelled and self._now_s >= job.begin_by_s:
                    job.is_cancelled = True
                    self._paces[job.tier_number].tier.cancel(job_id)

    # -- down ------------------------------------------------------------------------------------------------

    def _queue_down(self, keys: Iterable[OffloadKey]) -> None:
        keys = list(keys)
        for queue in self._queues:
            queue.add(keys)

    def _cascade(self, number: int) -> None:
        pace, queue = self._paces[number], self._queues[number]
        room = self._max_cascading - self._num_cascading
        if room < 1 or not pace.is_usable:
            return
        keys = queue.take(room, lambda key: self.ram.residency(key) is _READY)
        below = pace.tier.lookup(keys)
        keys = [key for key, found in zip(keys, below, strict=True) if found is _ABSENT]
        if not keys:
            return
        job_id = self._new_job_id()
        context = _TierContext(f"cascade-{job_id}")
        spec = self.ram.prepare_load(keys, context)
        num_accepted = pace.tier.submit_store(job_id, keys, spec.slots)
        if num_accepted < len(keys):
            self.ram.complete_load(keys[num_accepted:], context, spec=spec)
            queue.give_back(keys[num_accepted:])
        if num_accepted:
            accepted = keys[:num_accepted]
            self._jobs[job_id] = _Job(context, spec, accepted, number, is_promotion=False, begin_by_s=math.inf)
            self._num_cascading += num_accepted
            pace.note_begun(num_accepted, is_store=True)

    # -- what the tiers say ------------------------------------------------------------------------------------

    def _poll(self) -> None:
        for pace in self._paces:
            for outcome in pace.tier.poll():
                self._end(outcome, pace)
            self._note_removed(pace.tier)

    def _end(self, outcome: TierOutcome, pace: TierPace) -> None:
        job = self._jobs.pop(outcome.job_id, None)
        if job is None or len(outcome.succeeded) != len(job.keys):
            # a tier that breaks its contract costs hits; what it said of other slots is not to be believed
            self._counters["tier_reports_ignored"] += 1
            if job is not None:
                self._jobs[outcome.job_id] = job
            return
        pace.note_outcome(outcome, job.is_cancelled)
        keys, spec = job.keys, job.spec
        moved = [key for key, succeeded in zip(keys, outcome.succeeded, strict=True) if succeeded]
        if job.is_promotion:
            failed = [key for key, succeeded in zip(keys, outcome.succeeded, strict=True) if not succeeded]
            self._num_promoting -= len(keys)
            self.ram.complete_store(moved, job.context, spec=spec)
            self.ram.complete_store(failed, job.context, success=False, spec=spec)
            self.ram.on_request_finished(job.context)
            self._counters["promoted_blocks"] += len(moved)
            self._counters["failed_promotion_blocks"] += len(failed)
            return
        self._num_cascading -= len(keys)
        self.ram.complete_load(keys, job.context, spec=spec)
        self._counters["cascaded_blocks"] += len(moved)
        self._emit(moved, pace.tier.medium, removed=False)

    def _note_removed(self, tier: Tier) -> None:
        self._emit(tier.take_removed(), tier.medium, removed=True)

    def _emit(self, keys: list[OffloadKey], medium: str, removed: bool) -> None:
        if self._events is not None and keys:
            self._events.append(OffloadingEvent(keys, medium, removed))

    def _new_job_id(self) -> int:
        self._next_job_id += 1
        return self._next_job_id
