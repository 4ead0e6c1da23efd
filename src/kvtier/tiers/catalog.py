"""`TierCatalog`: which block is in which place of a tier, what may be read, written and evicted. No I/O.

The books of every tier that has places of one size. Changed by the tier's caller alone, from one thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

from kvtier.errors import InvariantError
from kvtier.index import BlockIndex
from kvtier.interfaces import CachePolicy, Residency
from kvtier.keys import OffloadKey


@dataclass(frozen=True, slots=True)
class Place:
    """One allocation of one place. While it is read or written, the place belongs to it."""

    key: OffloadKey
    index: int
    generation: int


class TierCatalog:
    """Keys, places 0..num_places-1, pins of loads in flight, and the eviction order."""

    def __init__(self, num_places: int, policy: CachePolicy) -> None:
        self.policy = policy
        self.counters: Counter[str] = Counter()
        self._index = BlockIndex(num_places)
        self._removed: list[OffloadKey] = []

    # -- reading ---------------------------------------------------------------------------------------------

    @property
    def num_places(self) -> int:
        return self._index.num_slots

    @property
    def num_ready(self) -> int:
        return len(self._index.ready)

    @property
    def num_storing(self) -> int:
        return len(self._index.in_flight)

    @property
    def num_loading(self) -> int:
        return len(self._index.pins)

    def lookup(self, keys: Sequence[OffloadKey]) -> list[Residency]:
        """`READY` or `ABSENT` for each key. O(keys) at C speed."""
        return [Residency.READY if found else Residency.ABSENT for found in map(self._index.ready.__contains__, keys)]

    def ready_keys(self) -> list[OffloadKey]:
        """Everything that could be loaded now. The caller owns the list. O(blocks)."""
        return list(self._index.ready)

    def places_of(self, keys: Iterable[OffloadKey]) -> list[int]:
        """The places of those of `keys` that are ready, in order. The caller owns the list."""
        return [place for place in map(self._index.ready.get, keys) if place is not None]

    # -- stores ----------------------------------------------------------------------------------------------

    def begin_store(self, keys: Sequence[OffloadKey], max_new: int) -> list[Place | bool]:
        """Places for the leading `keys` that there is room for, at most `max_new` of them new. Evicts where needed.

        For each accepted key its place, or, where nothing is to be written, whether the block is ready.
        """
        index = self._index
        new = [key for key in keys if key not in index.ready and key not in index.in_flight]
        granted = min(len(new), max_new)
        missing = granted - index.num_free
        if missing > 0:
            in_use = index.pins.keys() | filter(index.ready.__contains__, keys)
            num_victims = min(missing, len(index.ready) - len(in_use))
            granted -= missing - num_victims
            self._evict(num_victims, in_use)
        accepted = keys if granted == len(new) else keys[: keys.index(new[granted])]
        self.counters["shed_blocks"] += len(keys) - len(accepted)
        if not granted:
            return [key in index.ready for key in accepted]
        new = new[:granted]
        slot_of, _, generation = index.allocate(new)
        self.policy.insert(new)
        places = {key: Place(key, slot, generation) for key, slot in slot_of.items()}
        return [places.get(key) or key in index.ready for key in accepted]

    def end_store(self, place: Place, success: bool) -> bool:
        """The write is over. True if the block is ready now. (No write begins twice, so none ends twice.)"""
        index = self._index
        if index.in_flight.get(place.key) != place.index or index.generations[place.index] != place.generation:
            index.writer_left(place.index)  # reset, or dropped, under its writer
            return False
        if success:
            index.publish((place.key,))
            self.counters["stored_blocks"] += 1
        else:
            index.abandon((place.key,))
            self.policy.remove((place.key,))
            self.counters["failed_store_blocks"] += 1
        return success

    # -- loads -----------------------------------------------------------------------------------------------

    def begin_load(self, keys: Sequence[OffloadKey]) -> list[Place | None]:
        """Pins those of `keys` that are ready. For each key its place, or None."""
        index = self._index
        slots = list(map(index.ready.get, keys, repeat(None)))
        index.pin({key: 1 for key, slot in zip(keys, slots, strict=True) if slot is not None})
        return [
            None if slot is None else Place(key, slot, index.generations[slot])
            for key, slot in zip(keys, slots, strict=True)
        ]

    def end_load(self, place: Place) -> bool:
        """The read is over. True if the block is still what the load was begun for."""
        index = self._index
        if place.index in index.condemned:
            index.reader_left(place.index)
            return False
        index.unpin((place.key,))
        return True

    # -- leaving ---------------------------------------------------------------------------------------------

    def drop(self, keys: Iterable[OffloadKey]) -> list[int]:
        """Ready blocks become absent at once. Unknown keys are ignored. Returns their places."""
        index = self._index
        keys = list(filter(index.ready.__contains__, dict.fromkeys(keys)))
        places = [index.ready[key] for key in keys]
        pinned = [key for key in keys if key in index.pins]
        index.condemn_reads(pinned)
        index.drop([key for key in keys if key in index.ready])
        self.policy.remove(keys)
        self._removed += keys
        return places

    def reset(self) -> list[OffloadKey]:
        """Everything becomes absent at once; places in use are free when their last user leaves."""
        index = self._index
        ready = list(index.ready)
        index.condemn_writes(list(index.in_flight))
        index.condemn_reads(list(index.pins))
        index.drop(list(index.ready))
        index.renew_free_order()
        self.policy.clear()
        self.counters["resets"] += 1
        return ready

    def take_removed(self) -> list[OffloadKey]:
        removed, self._removed = self._removed, []
        return removed

    # -- recency and restart ---------------------------------------------------------------------------------

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """One use of each key, deepest (last) first, so that a prefix outlives its suffix."""
        self.policy.touch(reversed(keys), self._index.in_flight)

    def restore(self, blocks: dict[OffloadKey, int], reused: Iterable[OffloadKey]) -> None:
        """What an earlier process left: key to place, least recently used first; `reused` were used after their
        store, in the same order. New catalogs only."""
        self._index.restore(blocks)
        self.policy.insert(list(blocks))
        self.policy.touch(reused)

    def check_invariants(self) -> None:
        """Recounts. Raises InvariantError on a mismatch. O(num_places)."""
        self._index.check_invariants()
        resident = self._index.ready.keys() | self._index.in_flight.keys()
        if len(self.policy) != len(resident) or set(self.policy) != resident:
            raise InvariantError("the tier's policy does not hold exactly the resident keys")

    def _evict(self, count: int, in_use: set[OffloadKey]) -> None:
        victims = self.policy.evict(count, (self._index.in_flight, in_use)) if count else []
        if victims is None:
            raise InvariantError(f"{count} blocks can be evicted, but the policy does not find them")
        self._index.drop(victims)
        self._removed += victims
        self.counters["evicted_blocks"] += len(victims)
