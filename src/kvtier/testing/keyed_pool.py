"""A pool that remembers which block's bytes are where, for simulated workers that move real, keyed bytes."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.keys import OffloadKey

_TORN = b"torn"
"""What is in a slot while a store writes it, and after a store that failed midway."""


class KeyedPool:
    """One stripe of every slot a rank. Reading what is not the key's bytes is an AssertionError."""

    def __init__(self) -> None:
        self._content: dict[tuple[int, int], bytes] = {}
        """(slot, rank) -> the key whose bytes are there."""

    def begin_write(self, slots: Sequence[int], rank: int) -> None:
        """From now until `finish_write` nothing in the slots is of use."""
        self._content.update(((slot, rank), _TORN) for slot in slots)

    def finish_write(self, slots: Sequence[int], rank: int, keys: Sequence[OffloadKey]) -> None:
        """The last byte of `keys[i]` is in `slots[i]`."""
        self._content.update(((slot, rank), key) for slot, key in zip(slots, keys, strict=True))

    def read(self, slots: Sequence[int], rank: int, keys: Sequence[OffloadKey]) -> None:
        """A load: `slots[i]` must hold the bytes of `keys[i]`."""
        for slot, key in zip(slots, keys, strict=True):
            found = self._content.get((slot, rank))
            assert found == key, f"slot {slot} of rank {rank} holds {found!r} where {key!r} is looked for"

    def lose_everything(self) -> None:
        """The memory is gone, and with it all bytes."""
        self._content.clear()
