"""What hints have pinned, as far as it can be told from outside."""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence

from kvtier.keys import OffloadKey
from kvtier.manager.hints import HintReader, Hints


class HintLedger:
    """`kept`: must not be evicted. `maybe`: may be pinned, or not any more. Both within `max_kept`, or the pins are."""

    def __init__(self, max_kept: int) -> None:
        self.max_kept = max_kept
        self.kept: set[OffloadKey] = set()
        self.maybe: set[OffloadKey] = set()
        self._expiring: set[OffloadKey] = set()
        self._reader = HintReader()

    def read(self, params: dict[str, object] | None) -> Hints:
        return self._reader.read(params) or Hints()

    def sync(self, resident: Container[OffloadKey]) -> None:
        """What has left has given its pin back."""
        for keys in (self.kept, self.maybe, self._expiring):
            keys.intersection_update([key for key in keys if key in resident])

    def note_access(self, hints: Hints, keys: Sequence[OffloadKey]) -> None:
        """A request has found or stored these blocks, in prefix order."""
        for key in keys:
            if hints.pin is False:
                self.kept.discard(key)
                self.maybe.discard(key)
            elif hints.pin and key not in self.kept and key not in self.maybe:
                if len(self.kept) + len(self.maybe) < self.max_kept and key not in self._expiring:
                    self.kept.add(key)
                elif len(self.kept) < self.max_kept:
                    self.maybe.add(key)

    def note_finished(self, hints: Hints, keys: Collection[OffloadKey]) -> None:
        """A request has ended that had used these blocks: it may have given up pins on them, its own or not."""
        if hints.ttl_s is not None:
            self._expiring.update(keys)
        if hints.ttl_s is not None or hints.ended:
            self.maybe.update(self.kept.intersection(keys))
            self.kept.difference_update(keys)
