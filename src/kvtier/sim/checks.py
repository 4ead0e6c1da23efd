"""What must hold, by the simulation's own books: kept from grants, reports and events, not from the manager's state."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain

from kvtier.errors import InvariantError
from kvtier.interfaces import ManagerStats, OffloadingManager, Residency
from kvtier.keys import OffloadKey
from kvtier.manager.breaker import CircuitBreaker
from kvtier.sim.scenario import Scenario
from kvtier.sim.workers import Copy

SHORTEST_LOAD_LIMIT_S = 1.0
"""A load may always wait this long to begin, however short the deadline."""


class Checks:
    """The books of one run. Every method raises InvariantError if a promise is broken.

    Slots in two hands and wrong bytes are found by the workers.
    """

    def __init__(self, scenario: Scenario, manager: OffloadingManager, breaker: CircuitBreaker | None = None) -> None:
        self._scenario = scenario
        self._breaker = breaker
        self._manager = manager
        self._universe = sorted(set(chain.from_iterable(scenario.prompts)))
        self._listed: set[OffloadKey] = set()
        """What the manager's events say is ready."""
        self._place_of: dict[OffloadKey, tuple[int, int]] = {}
        """Key -> (slot, generation) of its last grant."""
        self._resets_before: dict[tuple[int, int], int] = {}
        """(slot, generation) -> how often the cache had been reset when it was granted."""
        self._failed_places: set[tuple[int, int]] = set()
        """(slot, generation) of which a load has failed."""
        self.num_resets = 0
        self._num_granted = 0
        self._num_reaped = 0
        self._num_in_flight_at_resets = 0

    # -- waiting ---------------------------------------------------------------------------------------------

    def deferred(
        self, req_id: str, keys: Iterable[OffloadKey], since_s: float, now_s: float, copies: Iterable[Copy]
    ) -> None:
        """The request was told at `now_s` to ask again, and for the first time at `since_s`.

        `copies` are the driver's jobs without a report.
        """
        if now_s >= since_s + self._scenario.deadline_s:
            raise InvariantError(
                f"request {req_id} is deferred after {now_s - since_s:.6f} s; "
                f"its deadline is {self._scenario.deadline_s:g} s"
            )
        being_loaded = {key for copy in copies if not copy.is_store for key in copy.keys}
        if not any(key in being_loaded or self._manager.residency(key) is Residency.ARRIVING for key in keys):
            raise InvariantError(f"request {req_id} waits for nothing: none of its blocks is on its way")

    # -- grants ----------------------------------------------------------------------------------------------

    @property
    def is_shut(self) -> bool:
        """The tier's circuit breaker lets nothing through now."""
        return self._breaker is not None and self._breaker.is_shut

    def store_granted(self, copy: Copy, begin_by_s: float | None, was_shut: bool) -> None:
        """A store was planned; `was_shut` is what `is_shut` was before."""
        self._refuse_while_shut(copy, was_shut)
        if begin_by_s is not None and begin_by_s > copy.granted_s + self._scenario.store_timeout_s:
            raise InvariantError(f"store {copy.job_id} may begin until {begin_by_s}, when it was reaped already")
        if len(set(copy.slots)) < len(copy.slots):
            raise InvariantError(f"store {copy.job_id} was granted one slot twice: {list(copy.slots)}")
        self._num_granted += len(copy.keys)
        for key, place in zip(copy.keys, _places(copy), strict=True):
            if place in self._resets_before:
                raise InvariantError(f"slot {place[0]} was granted twice as generation {place[1]}")
            self._resets_before[place] = self.num_resets
            self._place_of[key] = place

    def load_granted(self, copy: Copy, begin_by_s: float | None, waits_since_s: float, was_shut: bool) -> None:
        """A load was planned, of a request that has waited since `waits_since_s`; `was_shut` as for stores."""
        self._refuse_while_shut(copy, was_shut)
        for key, place in zip(copy.keys, _places(copy), strict=True):
            what = f"load {copy.job_id} of block {key.hex()} was granted slot {place[0]}, generation {place[1]}"
            if self._place_of.get(key) != place:
                raise InvariantError(f"{what}; the block was stored in {self._place_of.get(key)}")
            if place in self._failed_places:
                raise InvariantError(f"{what}, though a load from there has failed")
            if self._resets_before[place] != self.num_resets:
                raise InvariantError(f"{what}, from before a reset of the cache")
        latest_s = max(waits_since_s + self._scenario.deadline_s, copy.granted_s + SHORTEST_LOAD_LIMIT_S)
        if begin_by_s is None or begin_by_s > latest_s:
            raise InvariantError(f"load {copy.job_id} may begin until {begin_by_s}; its request waits until {latest_s}")

    def load_failed(self, copy: Copy) -> None:
        """A failed load was reported: its blocks are absent at once."""
        for key, place in zip(copy.keys, _places(copy), strict=True):
            self._failed_places.add(place)
            if self._place_of[key] == place and self._manager.residency(key) is not Residency.ABSENT:
                raise InvariantError(f"block {key.hex()} is {self._manager.residency(key)} after a load of it failed")

    # -- whole cache -----------------------------------------------------------------------------------------

    def time_told(self, now_s: float, copies: Iterable[Copy]) -> None:
        """The manager was told the time. Gives up on the stores among `copies` that are overdue."""
        for copy in copies:
            if not copy.is_store or copy.given_up or now_s - copy.granted_s < self._scenario.store_timeout_s:
                continue
            copy.given_up = True
            if copy.num_resets == self.num_resets:
                self._num_reaped += len(copy.keys)

    def before_reset(self) -> None:
        """The cache is about to be reset."""
        self._read_events()
        self._num_in_flight_at_resets += self._manager.get_stats().in_flight_blocks
        self.num_resets += 1

    def after_reset(self) -> None:
        """The cache was reset: everything is absent."""
        stats = self._manager.get_stats()
        if stats.ready_blocks or stats.in_flight_blocks or stats.pinned_blocks:
            raise InvariantError(f"after a reset: {stats}")
        for key in self._universe:
            if self._manager.residency(key) is not Residency.ABSENT:
                raise InvariantError(f"block {key.hex()} is {self._manager.residency(key)} after a reset")

    def writers_died(self, copies: Iterable[Copy]) -> None:
        """The manager was told that all workers are dead; `copies` are the jobs without a report."""
        for copy in copies:
            if copy.is_store and (copy.given_up or copy.num_resets != self.num_resets):
                copy.freed_early = True

    def step_ended(self, copies: Collection[Copy], thorough: bool) -> None:
        """At the end of a step; `copies` are the jobs without a report."""
        self._manager.check_invariants()
        self._read_events()
        stats = self._manager.get_stats()
        self._check_counts(stats, copies)
        if thorough and not self.is_shut:
            ready = {key for key in self._universe if self._manager.residency(key) is Residency.READY}
            if ready != self._listed:
                differing = sorted(key.hex() for key in ready ^ self._listed)
                raise InvariantError(f"the events do not tell what is ready: {differing}")

    def run_ended(self) -> None:
        """Every request has ended, every worker is dead, and the manager knows."""
        stats = self._manager.get_stats()
        if stats.pinned_blocks or stats.in_flight_blocks or stats.condemned_blocks:
            raise InvariantError(f"slots are still held when everything has ended: {stats}")
        if self.is_shut:
            raise InvariantError("the tier's circuit breaker is still shut after a long time without failures")

    # -- private ---------------------------------------------------------------------------------------------

    def _refuse_while_shut(self, copy: Copy, was_shut: bool) -> None:
        if was_shut:
            raise InvariantError(f"job {copy.job_id} was granted while the tier's circuit breaker is shut")

    def _read_events(self) -> None:
        for event in self._manager.take_events():
            keys = set(event.keys)
            if event.removed != (keys <= self._listed) or (not event.removed and keys & self._listed):
                raise InvariantError(f"an event that does not fit those before it: {event}")
            self._listed = self._listed - keys if event.removed else self._listed | keys

    def _check_counts(self, stats: ManagerStats, copies: Collection[Copy]) -> None:
        if stats.ready_blocks != len(self._listed):
            raise InvariantError(f"{stats.ready_blocks} blocks are ready, and the events list {len(self._listed)}")
        if stats.ready_blocks + stats.in_flight_blocks + stats.condemned_blocks > self._scenario.num_slots:
            raise InvariantError(f"more blocks than there are slots: {stats}")
        reaped = stats.counters.get("reaped_blocks", 0)
        if reaped != self._num_reaped:
            raise InvariantError(f"{reaped} blocks were reaped; {self._num_reaped} were overdue")
        ended = stats.counters.get("stored_blocks", 0) + stats.counters.get("failed_store_blocks", 0) + reaped
        if self._num_granted != ended + self._num_in_flight_at_resets + stats.in_flight_blocks:
            raise InvariantError(
                f"of {self._num_granted} granted blocks {ended} were stored, failed or reaped, "
                f"{self._num_in_flight_at_resets} were in flight at a reset, {stats.in_flight_blocks} are"
            )
        in_hand = {slot for copy in copies if not copy.freed_early for slot in copy.slots}
        held = stats.in_flight_blocks + stats.condemned_blocks + stats.pinned_blocks
        if len(in_hand) != held:
            raise InvariantError(f"open jobs use {len(in_hand)} slots; the manager holds {held} for them: {stats}")


def _places(copy: Copy) -> Iterable[tuple[int, int]]:
    return zip(copy.slots, copy.generations, strict=True)
