"""What waits to be asked of a shared store, removed from it, and told to it. No threads: whoever uses it has a lock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvtier.keys import OffloadKey
from kvtier.tiers.shared.envelope import Identity

MAX_BATCH_KEYS = 4096
"""Asked for in one round trip at most."""
MAX_TOUCHES = 16384
"""Uses that wait to be told; what comes on top is not told."""


@dataclass(slots=True)
class Keys:
    """Something to be done with many keys of one identity."""

    identity: Identity
    keys: list[OffloadKey] = field(default_factory=list)


@dataclass(slots=True)
class Batch:
    """What to do next, in this order."""

    removals: list[Keys]
    questions: list[Keys]
    touches: list[Keys]


class QuestionQueue:
    """Look-ups, removals and uses. Removals that are on their way are known, for nothing may overtake them."""

    def __init__(self) -> None:
        self.removing: set[OffloadKey] = set()
        """Taken to be removed, and not reported as removed yet."""
        self._questions: deque[tuple[Identity, OffloadKey]] = deque()
        self._removals: dict[tuple[Identity, OffloadKey], None] = {}
        self._touches: dict[OffloadKey, Identity] = {}

    def __bool__(self) -> bool:
        return bool(self._questions or self._removals or self._touches)

    @property
    def has_removals(self) -> bool:
        """Whether something is to be removed, or just being removed."""
        return bool(self._removals or self.removing)

    def ask(self, identity: Identity, keys: Iterable[OffloadKey]) -> None:
        self._questions.extend((identity, key) for key in keys)

    def remove(self, identity: Identity, keys: Iterable[OffloadKey]) -> None:
        self._removals.update(dict.fromkeys((identity, key) for key in keys))

    def touch(self, identity: Identity, keys: Sequence[OffloadKey]) -> None:
        if len(self._touches) + len(keys) <= MAX_TOUCHES:
            self._touches.update(dict.fromkeys(keys, identity))

    def take_back_removal(self, identity: Identity, key: OffloadKey) -> bool:
        """Whether this block waited to be removed. It does no more."""
        waited = (identity, key) in self._removals
        self._removals.pop((identity, key), None)
        return waited

    def next(self) -> Batch:
        """Takes what is to be done next: uses only when nobody waits for an answer. O(batch)."""
        count = min(len(self._questions), MAX_BATCH_KEYS)
        questions = [self._questions.popleft() for _ in range(count)]
        removals, self._removals = self._removals, {}
        self.removing = {key for _, key in removals}
        touches: dict[OffloadKey, Identity] = {}
        if not self._questions:
            touches, self._touches = self._touches, {}
        return Batch(_grouped(removals), _grouped(questions), _grouped(_pairs(touches)))

    def forget_questions(self) -> None:
        """Nobody wants to know any more. Removals stay."""
        self._questions.clear()
        self._touches.clear()

    def clear(self) -> None:
        """Nothing waits any more."""
        self.forget_questions()
        self._removals.clear()


def _pairs(keys: dict[OffloadKey, Identity]) -> list[tuple[Identity, OffloadKey]]:
    return [(identity, key) for key, identity in keys.items()]


def _grouped(pairs: Iterable[tuple[Identity, OffloadKey]]) -> list[Keys]:
    groups: dict[Identity, Keys] = {}
    for identity, key in pairs:
        groups.setdefault(identity, Keys(identity)).keys.append(key)
    return list(groups.values())
