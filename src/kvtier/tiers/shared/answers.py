"""`AnswerBook`: what a shared store is known to have, and for how long that is believed. No I/O, no clock.

Used by the tier's caller alone, from one thread; time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtier.errors import InvariantError
from kvtier.interfaces import Residency
from kvtier.keys import OffloadKey


class AnswerBook:
    """Keys that are there, keys that are not, and questions that are on their way, each with its time.

    Every key is in one of the three at most, except that one that was there is asked for again when that was long ago.
    `max_keys` bounds each of the three: of those there and not there the oldest are forgotten, and what cannot be
    asked is absent.
    """

    def __init__(self, present_s: float, absent_s: float, ask_s: float, max_keys: int) -> None:
        self._present_s = present_s
        self._absent_s = absent_s
        self._ask_s = ask_s
        self._max_keys = max_keys
        # insertion order is order of time in all three: what is renewed is taken out first
        self._present: dict[OffloadKey, float] = {}
        self._absent: dict[OffloadKey, float] = {}
        self._asked: dict[OffloadKey, float] = {}
        self._denied: dict[OffloadKey, float] = {}
        """Of those absent: the ones of which the store itself has said so."""
        self.num_shed = 0
        """Look-ups that were answered with absent because too many were on their way."""

    @property
    def num_present(self) -> int:
        return len(self._present)

    @property
    def num_asked(self) -> int:
        return len(self._asked)

    def is_present(self, key: OffloadKey) -> bool:
        """Whether the key was there when that was last heard, however long ago. O(1)."""
        return key in self._present

    def is_ready(self, key: OffloadKey, now_s: float) -> bool:
        """Whether the key is believed to be there. O(1)."""
        return self._present.get(key, now_s) > now_s

    def is_denied(self, key: OffloadKey, now_s: float) -> bool:
        """Whether the store itself has said not long ago that the key is absent. O(1)."""
        return self._denied.get(key, now_s) > now_s

    def present_keys(self) -> list[OffloadKey]:
        """The caller owns the list. O(present)."""
        return list(self._present)

    def lookup(
        self, keys: Sequence[OffloadKey], now_s: float, asking_s: float
    ) -> tuple[list[Residency], list[OffloadKey]]:
        """What to answer at `now_s`, and which keys are to be asked for: these are noted as asked at `asking_s`, which
        is not before. O(keys)."""
        answers, to_ask = [], []
        present, absent, asked = self._present, self._absent, self._asked
        for key in keys:
            if present.get(key, now_s) > now_s:
                answers.append(Residency.READY)
            elif key in asked:
                answers.append(Residency.UNKNOWN)
            elif absent.get(key, now_s) > now_s:
                answers.append(Residency.ABSENT)
            elif len(asked) >= self._max_keys:
                self.num_shed += 1
                answers.append(Residency.ABSENT)
            else:
                absent.pop(key, None)
                asked[key] = asking_s + self._ask_s
                to_ask.append(key)
                answers.append(Residency.UNKNOWN)
        return answers, to_ask

    def note_answer(self, key: OffloadKey, is_there: bool, now_s: float) -> bool:
        """The store has answered. True if a key that was there has left. What nobody waits for is ignored. O(1)."""
        if self._asked.pop(key, None) is None:
            return False
        if is_there:
            self.note_present(key, now_s)
            return False
        return self.note_absent(key, now_s)

    def note_present(self, key: OffloadKey, now_s: float) -> None:
        """The block was stored, or loaded, just now. O(1)."""
        self._asked.pop(key, None)
        self._absent.pop(key, None)
        self._denied.pop(key, None)
        self._present.pop(key, None)
        self._present[key] = now_s + self._present_s
        _bound(self._present, self._max_keys)

    def note_absent(self, key: OffloadKey, now_s: float, is_told: bool = True) -> bool:
        """The block is not there, as the store has said, or does by our own order; not `is_told`: as far as anybody
        knows. True if it was. O(1)."""
        self._asked.pop(key, None)
        self._absent.pop(key, None)
        self._absent[key] = now_s + self._absent_s
        _bound(self._absent, self._max_keys)
        self._denied.pop(key, None)
        if is_told:
            self._denied[key] = now_s + self._absent_s
            _bound(self._denied, self._max_keys)
        return self._present.pop(key, None) is not None

    def expire(self, now_s: float) -> list[OffloadKey]:
        """Questions that were not answered in time are answered with absent. Returns those that were there before.

        O(expired).
        """
        lost = [key for key in _due(self._asked, now_s) if self.note_absent(key, now_s, is_told=False)]
        for times in (self._absent, self._denied):
            for key in _due(times, now_s):
                del times[key]
        return lost

    def doubt_everything(self, now_s: float) -> None:
        """The connection was lost, and questions with it; the store may be another one than before. What was there is
        to be asked for again; what was only asked for is absent. O(keys)."""
        lost = [key for key in self._asked if key not in self._present]
        self._asked.clear()
        self._absent.clear()
        self._denied.clear()
        for key in lost:
            self.note_absent(key, now_s, is_told=False)
        self._present = dict.fromkeys(self._present, float("-inf"))

    def clear(self) -> None:
        """Nothing is known any more."""
        self._present.clear()
        self._absent.clear()
        self._asked.clear()
        self._denied.clear()

    def check_invariants(self) -> None:
        """Raises InvariantError on a mismatch. O(keys)."""
        if both := self._absent.keys() & (self._present.keys() | self._asked.keys()):
            raise InvariantError(f"{len(both)} keys are absent, and present or asked for as well")
        if both := self._denied.keys() & self._present.keys():
            raise InvariantError(f"the store has denied {len(both)} keys that are present")
        for name, times in (
            ("present", self._present),
            ("absent", self._absent),
            ("asked", self._asked),
            ("denied", self._denied),
        ):
            if len(times) > self._max_keys:
                raise InvariantError(f"{len(times)} keys are {name}; allowed: {self._max_keys}")
            if _is_out_of_order(times.values()):
                raise InvariantError(f"the keys that are {name} are out of order")


def _bound(times: dict[OffloadKey, float], max_keys: int) -> None:
    while len(times) > max_keys:
        del times[next(iter(times))]


def _due(times: dict[OffloadKey, float], now_s: float) -> list[OffloadKey]:
    due = []
    for key, until_s in times.items():
        if until_s > now_s:
            break
        due.append(key)
    return due


def _is_out_of_order(times: Iterable[float]) -> bool:
    last_s = float("-inf")
    for time_s in times:
        if time_s < last_s:
            return True
        last_s = time_s
    return False
