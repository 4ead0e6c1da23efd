"""Admission by reuse: only blocks that were asked for at least `store_threshold` times are worth storing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from kvtier.errors import ConfigurationError
from kvtier.events import OffloadingEvent
from kvtier.interfaces import (
    LoadStoreSpec,
    ManagerStats,
    OffloadingManager,
    PrefixLookup,
    PrepareStoreOutput,
    ReqContext,
    Residency,
)
from kvtier.keys import OffloadKey


class _RequestCounts:
    """What one request has counted so far."""

    __slots__ = ("counted", "deferred")

    def __init__(self) -> None:
        self.counted: set[OffloadKey] = set()
        self.deferred = False


class ReuseFilter:
    """Counts how often each key was asked for, over at most `max_tracker_size` keys (LRU). About 150 bytes a key.

    The repeated look-ups of a deferred request count once: `note_deferred` and `note_prepared` bracket them.
    """

    def __init__(self, store_threshold: int, max_tracker_size: int) -> None:
        if store_threshold < 0:
            raise ConfigurationError(f"store_threshold is {store_threshold}; allowed: 0 (no filter) or more")
        if max_tracker_size < 1:
            raise ConfigurationError(f"max_tracker_size is {max_tracker_size}; allowed: 1 or more")
        self.store_threshold = store_threshold
        self.max_tracker_size = max_tracker_size
        self._counts: OrderedDict[OffloadKey, int] = OrderedDict()

    def count_lookups(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Each key was looked up, in this order."""
        request = self._request(req_context)
        for key in keys:
            if not (request.deferred and key in request.counted):
                self._count(key)
                request.counted.add(key)
        if len(request.counted) > 2 * self.max_tracker_size:  # a context that never ends
            request.counted.clear()

    def count_offers(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Each key was offered for storing: counted unless this request has counted it already.

        Deepest first, so that of an offer larger than the tracker the leading blocks stay.
        """
        counted = self._request(req_context).counted
        for key in reversed(keys):
            if key not in counted:
                self._count(key)
                counted.add(key)

    def admitted(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Those of `keys` that were seen often enough, in order."""
        counts, threshold = self._counts, self.store_threshold
        if threshold < 2:
            return list(keys)
        return [key for key in keys if counts.get(key, 0) >= threshold]

    def note_deferred(self, req_context: ReqContext) -> None:
        """The request was told to ask again: what it has counted is not to be counted anew."""
        self._request(req_context).deferred = True

    def note_prepared(self, req_context: ReqContext) -> None:
        """The request got on: it is not deferred any more."""
        request = req_context._states.get(self)
        if request is not None:
            request.deferred = False

    def forget(self, req_context: ReqContext) -> None:
        """The request has finished."""
        req_context._states.pop(self, None)

    def __len__(self) -> int:
        return len(self._counts)

    def _request(self, req_context: ReqContext) -> _RequestCounts:
        request: _RequestCounts | None = req_context._states.get(self)
        if request is None:
            request = req_context._states[self] = _RequestCounts()
        return request

    def _count(self, key: OffloadKey) -> None:
        counts = self._counts
        seen = counts.pop(key, 0)
        if not seen and len(counts) >= self.max_tracker_size:
            counts.popitem(last=False)
        counts[key] = seen + 1


class FilterReusedOffloadingManager(OffloadingManager):
    """Any manager behind a reuse filter: `prepare_store` passes on only keys looked up `store_threshold` times."""

    def __init__(self, backing: OffloadingManager, store_threshold: int = 2, max_tracker_size: int = 64_000) -> None:
        self._backing = backing
        self._filter = ReuseFilter(store_threshold, max_tracker_size)
        self._num_filtered = 0

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        self._filter.count_lookups((key,), req_context)
        answer = self._backing.lookup(key, req_context)
        if answer is None:
            self._filter.note_deferred(req_context)
        return answer

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrefixLookup:
        found = self._backing.lookup_prefix(keys, req_context)
        self._filter.count_lookups(keys[: found.num_ready + 1], req_context)
        if found.stopped_by in (Residency.ARRIVING, Residency.UNKNOWN):
            self._filter.note_deferred(req_context)
        return found

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        spec = self._backing.prepare_load(keys, req_context)
        self._filter.note_prepared(req_context)
        return spec

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        output = self._backing.prepare_store(self._passed_on(keys), req_context)
        if output is not None:
            self._filter.note_prepared(req_context)
        return output

    def prepare_store_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput:
        output = self._backing.prepare_store_prefix(self._passed_on(keys), req_context)
        self._filter.note_prepared(req_context)
        return output

    def _passed_on(self, keys: Collection[OffloadKey]) -> list[OffloadKey]:
        """What is admitted, and what is stored: it is an access, and the call must not evict it."""
        if len(set(keys)) < len(keys):
            return list(keys)  # for the backing manager to refuse
        admitted = set(self._filter.admitted(keys))
        residency = self._backing.residency
        passed_on = [key for key in keys if key in admitted or residency(key) is not Residency.ABSENT]
        self._num_filtered += len(keys) - len(passed_on)
        return passed_on

    def count_offers(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self._filter.count_offers(keys, req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._filter.forget(req_context)
        self._backing.on_request_finished(req_context)

    # -- the rest is the backing manager's -------------------------------------------------------------------

    def residency(self, key: OffloadKey) -> Residency:
        return self._backing.residency(key)

    def complete_load(
        self,
        keys: Collection[OffloadKey],
        req_context: ReqContext,
        success: bool = True,
        spec: LoadStoreSpec | None = None,
    ) -> None:
        self._backing.complete_load(keys, req_context, success, spec)

    def complete_store(
        self,
        keys: Collection[OffloadKey],
        req_context: ReqContext,
        success: bool = True,
        spec: LoadStoreSpec | None = None,
    ) -> None:
        self._backing.complete_store(keys, req_context, success, spec)

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self._backing.touch(keys, req_context)

    def still_waiting(self, req_context: ReqContext) -> bool:
        return self._backing.still_waiting(req_context)

    def worth_waiting(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> bool:
        return self._backing.worth_waiting(keys, req_context)

    def tell_recompute_rate(self, blocks_per_s: float | None) -> None:
        self._backing.tell_recompute_rate(blocks_per_s)

    def defer(self, req_context: ReqContext) -> bool:
        return self._backing.defer(req_context)

    def advance(self, now_s: float) -> None:
        self._backing.advance(now_s)

    def reset_cache(self) -> None:
        self._backing.reset_cache()

    def writers_died(self) -> None:
        self._backing.writers_died()

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._backing.take_events()

    def on_new_request(self, req_context: ReqContext) -> None:
        self._backing.on_new_request(req_context)

    def on_schedule_end(self) -> None:
        self._backing.on_schedule_end()

    def has_pending_work(self) -> bool:
        return self._backing.has_pending_work()

    def get_stats(self) -> ManagerStats:
        """The backing manager's, and how many blocks this filter has kept from it."""
        stats = self._backing.get_stats()
        return replace(stats, counters={**stats.counters, "filtered_blocks": self._num_filtered})

    def check_invariants(self) -> None:
        self._backing.check_invariants()

    def shutdown(self) -> None:
        self._backing.shutdown()
