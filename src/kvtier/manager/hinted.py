"""An eviction policy under the hints of requests: what they want kept stays, what they have done with goes first.

It stands in front of any policy, which need not know of hints. Made when the first hint comes: until then nothing of it
is there to cost anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import groupby, pairwise

from kvtier.errors import InvariantError
from kvtier.interfaces import CachePolicy
from kvtier.keys import OffloadKey
from kvtier.manager.hints import MAX_PRIORITY, Hints

_DONE = -MAX_PRIORITY - 1
"""Below every priority: blocks of conversations that have ended, and those whose time has passed."""
_NO_KEYS: dict[OffloadKey, int] = {}


class HintedPolicy(CachePolicy):
    """Evicts what goes first, then asks `inner`, sparing what is to leave later. `kept` is for the caller to protect.

    Its books hold resident keys only: some 100 bytes each, and some 300 each that a hint is about. `generation_of` says
    in which allocation a resident key came.
    """

    name = "hinted"

    def __init__(
        self,
        inner: CachePolicy,
        max_kept: int,
        generation_of: Callable[[OffloadKey], int],
        known_since: int,
    ) -> None:
        super().__init__(inner.cache_capacity)
        self.inner = inner
        self.max_kept = max_kept
        self.now_s = -math.inf
        self._generation_of = generation_of
        self._known_since = known_since
        """Of blocks that came earlier it is not known who shares them."""
        self._start()

    def _start(self) -> None:
        self.kept: dict[OffloadKey, int] = {}
        """Pinned by a hint -> the number of the call that pinned it."""
        self._level_of: dict[OffloadKey, int] = {}
        self._levels: dict[int, dict[OffloadKey, int]] = {}
        """Level -> its keys, first to go first, each with the number of the call that put it there. Not level 0."""
        self._ttl: dict[OffloadKey, tuple[float, float]] = {}
        """Key -> its time to live and its last use."""
        self._expiries: list[tuple[float, int, list[OffloadKey]]] = []
        """A heap: at this time, look at these keys. A key may have been used since."""
        self._num_expiring = 0
        self._next: dict[OffloadKey, OffloadKey] = {}
        """Key -> the one that was stored behind it."""
        self._forks: set[OffloadKey] = set()
        """Keys behind which different ones were stored: more than one conversation has used them."""
        self._num_calls = 0
        self._evicted_since_refresh = 0

    # -- hints -----------------------------------------------------------------------------------------------

    def note_access(self, hints: Hints, keys: Iterable[OffloadKey]) -> int:
        """A request with these hints uses resident keys, in prefix order. How many pins are beyond the share."""
        self._num_calls += 1
        refused = 0
        for key in keys:
            if hints.priority is not None:
                self._put(key, hints.priority)
            if hints.pin is False:
                self.kept.pop(key, None)
            elif hints.pin and key not in self.kept:
                if len(self.kept) < self.max_kept:
                    self.kept[key] = self._num_calls
                else:
                    refused += 1
        return refused

    def note_store(self, parent: OffloadKey | None, new: Sequence[OffloadKey]) -> None:
        """`new` are stored in continuation of the block `parent` (None: they begin a prompt)."""
        if parent is not None and self._next.setdefault(parent, new[0]) != new[0]:
            self._forks.add(parent)
        self._next.update(pairwise(new))

    def note_finished(self, hints: Hints, path: Sequence[OffloadKey]) -> None:
        """A request with these hints has ended, and was settled. `path`: what it used, in prefix order."""
        path = [key for key in path if key in self.inner]
        self._num_calls += 1
        if hints.priority is not None and hints.priority < 0:
            for key in reversed(path):  # what was put there as it came goes first now, the deepest before all
                self._put(key, hints.priority)
        if hints.ttl_s is not None and self.now_s > -math.inf:
            self._note_ttl(hints.ttl_s, path)
        if hints.ended:
            for key in reversed(path):
                if key in self._forks or self._generation_of(key) <= self._known_since:
                    break
                self._retire(key)

    def _note_ttl(self, ttl_s: float, path: list[OffloadKey]) -> None:
        due_s = self.now_s + ttl_s
        listed = []
        for key in path:
            if key not in self._ttl or due_s < self._due_s(key):
                listed.append(key)
            self._ttl[key] = (ttl_s, self.now_s)
        self._look_again(due_s, listed)
        if self._num_expiring > 4 * self.cache_capacity + 64:
            self._num_expiring, self._expiries = 0, []
            for due_s, keys in groupby(self._ttl, key=self._due_s):
                self._look_again(due_s, list(keys))

    def _due_s(self, key: OffloadKey) -> float:
        ttl_s, last_use_s = self._ttl[key]
        return last_use_s + ttl_s

    def _look_again(self, due_s: float, keys: list[OffloadKey]) -> None:
        if keys:
            self._num_calls += 1
            self._num_expiring += len(keys)
            heappush(self._expiries, (due_s, self._num_calls, keys))

    def _expire(self) -> None:
        """What has not been used for its time goes first from now on."""
        while self._expiries and self._expiries[0][0] <= self.now_s:
            _, _, keys = heappop(self._expiries)
            self._num_expiring -= len(keys)
            later: dict[float, list[OffloadKey]] = {}
            for key in reversed(keys):
                if key not in self._ttl:
                    continue
                due_s = self._due_s(key)
                if due_s <= self.now_s:
                    self._retire(key)
                else:
                    later.setdefault(due_s, []).append(key)
            for due_s, waiting in later.items():
                self._look_again(due_s, waiting[::-1])

    def _retire(self, key: OffloadKey) -> None:
        self.kept.pop(key, None)
        self._ttl.pop(key, None)
        self._put(key, _DONE)

    def _put(self, key: OffloadKey, level: int) -> None:
        before = self._level_of.pop(key, 0)
        if before:
            del self._levels[before][key]
        if level:
            self._level_of[key] = level
            self._levels.setdefault(level, {})[key] = self._num_calls

    def _forget(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            self.kept.pop(key, None)
            self._ttl.pop(key, None)
            self._next.pop(key, None)
            self._forks.discard(key)
            if key in self._level_of:
                self._put(key, 0)

    # -- the policy ------------------------------------------------------------------------------------------

    def insert(self, keys: Sequence[OffloadKey]) -> None:
        self.inner.insert(keys)

    def touch(self, keys: Iterable[OffloadKey], first_use: Container[OffloadKey] = ()) -> None:
        keys = list(keys)
        self._note_use(keys)
        self.inner.touch(keys, first_use)

    def settle(self, keys: Iterable[OffloadKey], first_use: Container[OffloadKey]) -> None:
        keys = list(keys)
        self._note_use(keys)
        self.inner.settle(keys, first_use)

    def _note_use(self, keys: list[OffloadKey]) -> None:
        if self._levels.get(_DONE):
            for key in keys:
                if self._level_of.get(key) == _DONE:
                    self._put(key, 0)
        if self._ttl:
            for key in filter(self._ttl.__contains__, keys):
                self._ttl[key] = (self._ttl[key][0], self.now_s)

    def evict(self, count: int, protected: Sequence[Container[OffloadKey]] = ()) -> list[OffloadKey] | None:
        return self._evict(count, protected, self.inner.evict)

    def evict_for(
        self, newcomers: Sequence[OffloadKey], count: int, protected: Sequence[Container[OffloadKey]] = ()
    ) -> list[OffloadKey] | None:
        return self._evict(count, protected, lambda rest, spared: self.inner.evict_for(newcomers, rest, spared))

    def _evict(
        self,
        count: int,
        protected: Sequence[Container[OffloadKey]],
        evict: Callable[[int, Sequence[Container[OffloadKey]]], list[OffloadKey] | None],
    ) -> list[OffloadKey] | None:
        self._expire()
        going = self._first_to_go(count, protected)
        victims: list[OffloadKey] | None = []
        if len(going) < count:
            victims = self._ask_inner(count - len(going), [*protected, going] if going else protected, evict)
            if victims is None:
                return None
        if going:
            self.inner.remove(going)
        leaving = [*going, *(victims or ())]
        self._forget(leaving)
        self._evicted_since_refresh += len(leaving)
        if 2 * self._evicted_since_refresh > self.cache_capacity:
            self._refresh()
        return leaving

    def _first_to_go(self, count: int, protected: Sequence[Container[OffloadKey]]) -> dict[OffloadKey, None]:
        going: dict[OffloadKey, None] = {}
        for level in range(_DONE, 0):
            for key in self._levels.get(level, _NO_KEYS):
                if len(going) == count:
                    return going
                if not any(key in container for container in protected):
                    going[key] = None
        return going

    def _ask_inner(
        self,
        count: int,
        protected: Sequence[Container[OffloadKey]],
        evict: Callable[[int, Sequence[Container[OffloadKey]]], list[OffloadKey] | None],
    ) -> list[OffloadKey] | None:
        """Victims of the policy's choice: of priority 0; where those are too few, of priorities 0 and 1, and so on."""
        spared = [keys for keys in map(self._levels.get, range(1, MAX_PRIORITY + 1)) if keys]
        while spared:
            if len(self.inner) - sum(map(len, spared)) >= count:
                victims = evict(count, [*protected, *spared])
                if victims is not None:
                    return victims
            del spared[0]
        return evict(count, protected)

    def _refresh(self) -> None:
        """Moves what the policy must pass over away from its next victims, so that passing over stays cheap."""
        self._evicted_since_refresh = 0
        for keys in (self.kept, *map(self._levels.get, range(1, MAX_PRIORITY + 1))):
            for _, group in groupby((keys or _NO_KEYS).items(), key=lambda item: item[1]):
                together = {key: None for key, _ in group}
                self.inner.touch(reversed(together), together)

    def decline(self, keys: Sequence[OffloadKey]) -> None:
        self.inner.decline(keys)

    def remove(self, keys: Iterable[OffloadKey]) -> None:
        keys = list(keys)
        self.inner.remove(keys)
        self._forget(keys)

    def clear(self) -> None:
        self.inner.clear()
        self._start()

    def __contains__(self, key: object) -> bool:
        return key in self.inner

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self.inner)

    def check_invariants(self) -> None:
        """Recounts the books. Raises InvariantError. O(capacity)."""
        resident = set(self.inner)
        if len(self.kept) > self.max_kept:
            raise InvariantError(f"{len(self.kept)} blocks are kept by hints; allowed: {self.max_kept}")
        books: dict[str, Iterable[OffloadKey]] = {"pins": self.kept, "levels": self._level_of, "lives": self._ttl}
        books.update({"order": self._next, "forks": self._forks})
        for name, keys in books.items():
            if strange := [key.hex() for key in keys if key not in resident]:
                raise InvariantError(f"hints: {name} of blocks that are not there: {strange}")
        listed = {key: level for level, keys in self._levels.items() for key in keys}
        if listed != self._level_of or sum(map(len, self._levels.values())) != len(listed):
            raise InvariantError(f"hints: levels {self._level_of} are listed as {listed}")
        expiring = {key for _, _, keys in self._expiries for key in keys}
        if not expiring >= self._ttl.keys() or self._num_expiring != sum(len(keys) for _, _, keys in self._expiries):
            raise InvariantError("hints: a time to live that nobody will look at")
