"""Whose transfer has ended: completions that name a spec, or keys that more than one slot may stand for.

The manager's own hot path knows that nothing is condemned and that a completion by key means the current entry. All
the rest is here, one key at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from kvtier.errors import BlockNotPinnedError, DuplicateKeyError
from kvtier.index import BlockIndex
from kvtier.interfaces import CPULoadStoreSpec
from kvtier.keys import OffloadKey
from kvtier.manager.requests import RequestState


def end_load_by_spec(
    index: BlockIndex, keys: Iterable[OffloadKey], spec: CPULoadStoreSpec, request: RequestState
) -> tuple[list[OffloadKey], int]:
    """Ends the load by `spec` of these keys. Returns those that are visible, and how many did not match."""
    named = dict.fromkeys(keys)
    ending = [key for key in spec.keys if key in named and key not in spec.ended]
    num_late = len(named) - len(ending)
    spec.ended = {*spec.ended, *ending}
    if len(spec.ended) == len(spec.keys) and spec in request.loads:
        request.loads.remove(spec)
    if index.condemned:
        # a pinned slot is not handed out again, so a load that has not ended still has its slot
        slot_of = dict(zip(spec.keys, spec.slots, strict=True))
        condemned = [key for key in ending if slot_of[key] in index.condemned]
        ending = [key for key in ending if slot_of[key] not in index.condemned]
        for key in condemned:
            index.reader_left(slot_of[key])
    if not index.pins.keys() >= set(ending):
        # another request has completed by key what it had not pinned: its load is over, and this one's is late
        num_late += sum(key not in index.pins for key in ending)
        ending = [key for key in ending if key in index.pins]
    index.unpin(ending)
    return ending, num_late


def end_load_by_key(index: BlockIndex, keys: list[OffloadKey], request: RequestState) -> list[OffloadKey]:
    """As `end_load_by_spec`, by distinct keys while slots are condemned: the request's own oldest load comes first.

    Raises BlockNotPinnedError, and then has changed nothing.
    """
    visible: list[OffloadKey] = []
    condemned: list[int] = []
    for key in keys:
        slot = _pinned_slot(index, key, request)
        if slot is None:
            raise not_pinned(key)
        if slot in index.condemned:
            condemned.append(slot)
        else:
            visible.append(key)
    for slot in condemned:
        index.reader_left(slot)
    index.unpin(visible)
    request.load_ended(keys)
    return visible


def not_pinned(key: OffloadKey) -> BlockNotPinnedError:
    """The error that names `key`."""
    return BlockNotPinnedError(f"block {key.hex()} is not pinned by any load")


def named_twice(keys: Iterable[OffloadKey]) -> DuplicateKeyError:
    """The error that names the first key that is in `keys` more than once."""
    twice = next(key for key, count in Counter(keys).items() if count > 1)
    return DuplicateKeyError(f"block {twice.hex()} is named more than once in one call")


def writes_of(index: BlockIndex, keys: Collection[OffloadKey], spec: CPULoadStoreSpec) -> tuple[list[OffloadKey], int]:
    """The keys whose current write is the one of `spec`, and how many of `keys` have no such write any more.

    Lets writers of condemned slots go.
    """
    named = dict.fromkeys(keys)
    current: list[OffloadKey] = []
    num_late = 0
    for key, slot, generation in zip(spec.keys, spec.slots, spec.slot_generations, strict=True):
        if key not in named:
            continue
        entry = index.condemned.get(slot)
        if index.in_flight.get(key) == slot and index.generations[slot] == generation:
            current.append(key)
        elif entry is not None and entry.has_writer and index.generations[slot] == generation:
            index.writer_left(slot)
        else:
            num_late += 1
    return current, num_late


def writers_left_by_key(index: BlockIndex, keys: Iterable[OffloadKey]) -> None:
    """Writes of these keys are over: of each key that is not in flight, the oldest condemned one."""
    for key in keys:
        if key in index.in_flight:
            continue
        writing = [slot for slot in index.condemned_slots(key) if index.condemned[slot].has_writer]
        if writing:
            index.writer_left(writing[0])


def _pinned_slot(index: BlockIndex, key: OffloadKey, request: RequestState) -> int | None:
    """Which slot a completion by key means."""
    for spec in request.loads:
        if key in spec.keys and key not in spec.ended:
            return spec.slots[list(spec.keys).index(key)]
    if key in index.pins:
        return index.ready[key]
    return next((slot for slot in index.condemned_slots(key) if index.condemned[slot].readers), None)
