"""`BlockIndex`: key -> slot for what is visible, and the life of every slot.

The state of a slot *is* the container that holds it, so a batch changes state by moving keys between containers
at C speed, and no flag can disagree with the container.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from kvtier.errors import InvariantError
from kvtier.index.states import TRANSITIONS, SlotEvent, SlotState
from kvtier.keys import OffloadKey


@dataclass(slots=True)
class CondemnedSlot:
    """An invisible slot that somebody still uses."""

    key: OffloadKey
    readers: int
    has_writer: bool


class BlockIndex:
    """Slots 0..num_slots-1 of one tier and the keys visible through them.

    Callers check that a batch is legal before they apply it: keys are distinct and in the state that the event
    starts from (a KeyError out of here is a bug of the caller). Batches cost O(keys) at C speed.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.ready: dict[OffloadKey, int] = {}
        self.in_flight: dict[OffloadKey, int] = {}
        self.restored: dict[OffloadKey, int] = {}
        """Blocks of an earlier process that nobody has checked yet."""
        self.condemned: dict[int, CondemnedSlot] = {}
        self.pins: dict[OffloadKey, int] = {}
        """Number of loads of each visible, pinned key; a key without loads is not in here."""
        self.generations = [0] * num_slots
        """Number of the allocation that each slot is, or was last, part of. Allocations count from 1."""
        self.num_allocations = 0
        self._condemned_of: dict[OffloadKey, list[int]] = {}
        self._freed: list[int] = []
        self._num_never_used = num_slots
        # the edges of the state machine, resolved once to the containers at their ends
        blocks = {
            SlotState.IN_FLIGHT: self.in_flight,
            SlotState.READY: self.ready,
            SlotState.RESTORED: self.restored,
        }
        self._allocate_to = blocks[TRANSITIONS[SlotEvent.ALLOCATE][1]]
        self._restore_to = blocks[TRANSITIONS[SlotEvent.RESTORE][1]]
        self._recall_to = blocks[TRANSITIONS[SlotEvent.RECALL][1]]
        self._check_from = blocks[TRANSITIONS[SlotEvent.CHECK][0]]
        self._check_to = blocks[TRANSITIONS[SlotEvent.CHECK][1]]
        self._forget_from = blocks[TRANSITIONS[SlotEvent.FORGET][0]]
        self._publish_from = blocks[TRANSITIONS[SlotEvent.PUBLISH][0]]
        self._publish_to = blocks[TRANSITIONS[SlotEvent.PUBLISH][1]]
        self._abandon_from = blocks[TRANSITIONS[SlotEvent.ABANDON][0]]
        self._drop_from = blocks[TRANSITIONS[SlotEvent.DROP][0]]
        self._condemn_write_from = blocks[TRANSITIONS[SlotEvent.CONDEMN_WRITE][0]]
        self._condemn_read_from = blocks[TRANSITIONS[SlotEvent.CONDEMN_READ][0]]

    # -- reading ---------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Slots that can be allocated now. O(1)."""
        return len(self._freed) + self._num_never_used

    def state_of(self, key: OffloadKey) -> SlotState | None:
        """The visible state of `key`, or None. O(1)."""
        if key in self.ready:
            return SlotState.READY
        if key in self.in_flight:
            return SlotState.IN_FLIGHT
        return SlotState.RESTORED if key in self.restored else None

    def condemned_slots(self, key: OffloadKey) -> Sequence[int]:
        """The condemned slots that once held `key`, oldest first. The caller does not change it."""
        return self._condemned_of.get(key, ())

    # -- batches ---------------------------------------------------------------------------------------------

    def allocate(self, keys: Sequence[OffloadKey]) -> tuple[dict[OffloadKey, int], list[int], int]:
        """FREE -> IN_FLIGHT for `len(keys)` slots: never-used ones ascending, then the last freed first.

        The caller guarantees `1 <= len(keys) <= num_free`. Returns key to slot, the slots in the order of `keys`, and
        their generation; the caller owns both containers.
        """
        count = len(keys)
        if self._num_never_used:
            slots = self._take_never_used(count)
            count -= len(slots)
            if count:
                slots += self._freed[: -count - 1 : -1]
        else:
            slots = self._freed[: -count - 1 : -1]
        if count:
            del self._freed[-count:]
        self.num_allocations = generation = self.num_allocations + 1
        generations = self.generations
        for slot in slots:
            generations[slot] = generation
        slot_of = dict(zip(keys, slots, strict=True))
        self._allocate_to.update(slot_of)
        return slot_of, slots, generation

    def restore(self, blocks: dict[OffloadKey, int]) -> None:
        """FREE -> READY for blocks that an earlier process stored: key to slot, each slot once. New indexes only.

        The slots that are left are handed out in ascending order.
        """
        self._restore_to.update(blocks)
        self._take_all_but(blocks)

    def recall(self, blocks: dict[OffloadKey, int]) -> None:
        """FREE -> RESTORED, otherwise as `restore`."""
        self._recall_to.update(blocks)
        self._take_all_but(blocks)

    def _take_all_but(self, blocks: dict[OffloadKey, int]) -> None:
        free = np.ones(self.num_slots, bool)
        free[np.fromiter(blocks.values(), np.int64, len(blocks))] = False
        self._freed = np.flatnonzero(free)[::-1].tolist()
        self._num_never_used = 0

    def check(self, keys: Sequence[OffloadKey]) -> tuple[list[int], int]:
        """RESTORED -> IN_FLIGHT: whoever checks these blocks is their writer.

        Returns the slots in the order of `keys`, and their new generation; the caller owns the list.
        """
        slots = list(map(self._check_from.pop, keys))
        self.num_allocations += 1
        generation = self.num_allocations
        for slot in slots:
            self.generations[slot] = generation
        self._check_to.update(zip(keys, slots, strict=True))
        return slots, generation

    def publish(self, keys: Collection[OffloadKey]) -> list[OffloadKey]:
        """IN_FLIGHT -> READY: the bytes are there. Keys that are not in flight are passed over.

        Returns those that became ready; the caller owns the list.
        """
        writes = self._publish_from
        if len(keys) == len(writes) and list(writes) == keys:
            # everything that is in flight
            self._publish_to.update(writes)
            writes.clear()
            return list(keys)
        slots = list(map(writes.pop, keys, repeat(-1)))
        arrived = list(keys)
        if -1 in slots:
            arrived = [key for key, slot in zip(keys, slots, strict=True) if slot >= 0]
            slots = [slot for slot in slots if slot >= 0]
        self._publish_to.update(zip(arrived, slots, strict=True))
        return arrived

    def abandon(self, keys: Collection[OffloadKey]) -> None:
        """IN_FLIGHT -> FREE: the write failed and its writer is done."""
        self._freed += map(self._abandon_from.pop, keys)

    def drop(self, keys: Collection[OffloadKey]) -> None:
        """READY -> FREE, for unpinned keys; RESTORED -> FREE too."""
        if self.restored:
            unchecked = [key for key in keys if key in self.restored]
            self._freed += map(self._forget_from.pop, unchecked)
            if unchecked:
                gone = set(unchecked)
                keys = [key for key in keys if key not in gone]
        self._freed += map(self._drop_from.pop, keys)

    def condemn_writes(self, keys: Collection[OffloadKey]) -> None:
        """IN_FLIGHT -> CONDEMNED: invisible from now on, free when the writer is known to be done."""
        for key in keys:
            slot = self._condemn_write_from.pop(key)
            self._condemn(slot, CondemnedSlot(key, readers=0, has_writer=True))

    def condemn_reads(self, keys: Collection[OffloadKey]) -> None:
        """READY -> CONDEMNED, for pinned keys: invisible from now on, free when the last reader leaves."""
        for key in keys:
            slot = self._condemn_read_from.pop(key)
            self._condemn(slot, CondemnedSlot(key, readers=self.pins.pop(key), has_writer=False))

    def pin(self, keys: dict[OffloadKey, int]) -> None:
        """One more load of each of these READY keys. Every value is 1."""
        pins = self.pins
        if not pins or pins.keys().isdisjoint(keys):
            pins.update(keys)
        else:
            for key in keys:
                pins[key] = pins.get(key, 0) + 1

    def unpin(self, keys: Collection[OffloadKey]) -> OffloadKey | None:
        """One load less of each of these READY keys, or nothing changed and the first that is not pinned."""
        pins = self.pins
        counts = list(map(pins.pop, keys, repeat(0)))
        if counts.count(1) == len(counts):
            return None
        missing = next((key for key, count in zip(keys, counts, strict=True) if not count), None)
        still_held = 0 if missing is not None else 1
        for key, count in zip(keys, counts, strict=True):
            if count > still_held:
                pins[key] = count - still_held
        return missing

    # -- condemned slots, one at a time (they are rare) --------------------------------------------------------

    def reader_left(self, slot: int) -> None:
        """One load less of a condemned slot."""
        entry = self.condemned[slot]
        entry.readers -= 1
        self._release_if_unused(slot, entry)

    def writer_left(self, slot: int) -> None:
        """The writer of a condemned slot is known to be done or dead."""
        entry = self.condemned[slot]
        entry.has_writer = False
        self._release_if_unused(slot, entry)

    def renew_free_order(self) -> None:
        """After a reset: with nothing in use, slots are handed out as if the index were new."""
        if self.num_free == self.num_slots:
            self._freed.clear()
            self._num_never_used = self.num_slots

    # -- private ---------------------------------------------------------------------------------------------

    def _take_never_used(self, count: int) -> list[int]:
        """`count` of them or all there are, ascending."""
        first = self.num_slots - self._num_never_used
        slots = list(range(first, min(first + count, self.num_slots)))
        self._num_never_used -= len(slots)
        return slots

    def _condemn(self, slot: int, entry: CondemnedSlot) -> None:
        self.condemned[slot] = entry
        self._condemned_of.setdefault(entry.key, []).append(slot)

    def _release_if_unused(self, slot: int, entry: CondemnedSlot) -> None:
        if entry.readers or entry.has_writer:
            return
        del self.condemned[slot]
        slots = self._condemned_of[entry.key]
        slots.remove(slot)
        if not slots:
            del self._condemned_of[entry.key]
        self._freed.append(slot)

    def check_invariants(self) -> None:
        """Recounts slots, pins and condemned bookkeeping. Raises InvariantError. O(num_slots)."""
        never_used = range(self.num_slots - self._num_never_used, self.num_slots)
        holders = Counter(self.ready.values())
        holders.update(self.in_flight.values())
        holders.update(self.restored.values())
        holders.update(list(self.condemned))
        holders.update(self._freed)
        holders.update(never_used)
        if len(holders) != self.num_slots or any(count != 1 for count in holders.values()):
            wrong = {slot: count for slot, count in holders.items() if count != 1}
            missing = set(range(self.num_slots)) - set(holders)
            raise InvariantError(f"slots are not a partition: held twice {wrong}, by nobody {missing}")
        visible = Counter([*self.ready, *self.in_flight, *self.restored])
        if both := [key.hex() for key, count in visible.items() if count > 1]:
            raise InvariantError(f"visible twice: {both}")
        if bad := [key.hex() for key, count in self.pins.items() if count < 1 or key not in self.ready]:
            raise InvariantError(f"pins on keys that are not ready, or below one: {bad}")
        for slot, entry in self.condemned.items():
            if entry.readers < 0 or not (entry.readers or entry.has_writer):
                raise InvariantError(f"condemned slot {slot} without a user: {entry}")
        listed = sorted(slot for slots in self._condemned_of.values() for slot in slots)
        if listed != sorted(self.condemned):
            raise InvariantError(f"condemned slots by key {listed} are not {sorted(self.condemned)}")
