"""How likely blocks are to be used again, by kind and by age, learned from those that were and those that were not.

A life begins with a use of a block. It ends with the next use, or is lost when the block has been forgotten. From the
ages at which lives end follows the chance of a use at each age (the actuarial estimate of survival analysis; Kaplan
and Meier, JASA 1958), and from it the *worth* of keeping a block of that age: the largest ratio, over all times until
which it might be kept, of the uses to expect to the time that it takes up. That is the Gittins index of the block
(Gittins, J. R. Stat. Soc. B 1979; a relative as a rank for caches: Beckmann et al., "LHD", NSDI 2018). Evicting what is
worth least yields most hits for the room, whether that is the oldest (chat that will not go on) or the newest (a loop
that is longer than the cache).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from kvtier.keys import OffloadKey

NUM_AGES = 40
"""Age classes from 0, 1, 2, 3, 5, 7, 11, 15, ... ticks on, two to each doubling; the last one is open."""
NUM_TABLED = 1 << 16
_PRIOR_USES = 0.025
"""Uses of a block within one age class before anything is known: the older, the fewer for the time."""
_HIGHEST_CHANCE = 0.99
_PRIOR_EVENTS = 4.0
"""As many uses or losses, of blocks together, must be seen until what was learned outweighs what was assumed."""


def _class_of(age: int) -> int:
    octave = (age + 1).bit_length() - 1
    if not octave:
        return 0
    upper_half = (age + 1) >> (octave - 1) & 1
    return min(2 * octave + upper_half - 1, NUM_AGES - 1)


CLASSES = bytes(map(_class_of, range(NUM_TABLED)))
"""`age_class` of the ages below `NUM_TABLED`, for those to whom a call is dear."""


def age_class(age: int) -> int:
    """The class of an age >= 0, in ticks."""
    return CLASSES[age] if age < NUM_TABLED else _class_of(age)


_FIRST_AGES = [0] + [
    (2 + upper_half << octave >> 1) - 1 for octave in range(1, NUM_AGES // 2 + 1) for upper_half in (0, 1)
]
_WIDTHS = [float(_FIRST_AGES[i + 1] - _FIRST_AGES[i]) for i in range(NUM_AGES)]


class Life(Protocol):
    """Blocks of one kind since they were used last."""

    kind: int
    last_use: int
    keys: list[OffloadKey]


class SurvivalModel:
    """Lives of blocks of `num_kinds` kinds, of which blocks that are used for the first time have one of `new_kinds`.

    `worth[kind][age_class(age)]`: expected uses a tick, replaced (never changed in place) by `refresh`.
    `worth_of_new`: that of a block at its first use, its kind not being known. Some 700 bytes a kind.
    """

    def __init__(self, num_kinds: int, new_kinds: Collection[int]) -> None:
        self._new_kinds = new_kinds
        self._used = [[0.0] * NUM_AGES for _ in range(num_kinds)]
        self._num_used = 1.0
        self._num_used_squared = 25.0
        """Sums, over uses of blocks together, of how many they were and of its square."""
        self._lost = [[0.0] * NUM_AGES for _ in range(num_kinds)]
        self.worth: list[list[float]] = []
        self.worth_of_new = 0.0
        self.refresh()

    def note_use(self, kind: int, age: int, num_blocks: int) -> None:
        """Blocks of this kind were used again at this age. O(1)."""
        self._used[kind][age_class(age)] += num_blocks
        self._num_used += num_blocks
        self._num_used_squared += num_blocks * num_blocks

    def note_loss(self, kind: int, age: int, num_blocks: int) -> None:
        """Blocks of this kind were not used until this age, and will be followed no longer. O(1)."""
        self._lost[kind][age_class(age)] += num_blocks

    def fade(self, factor: float) -> None:
        """What was learned weighs `factor` (0..1) times as much from here on."""
        self._num_used *= factor
        self._num_used_squared *= factor
        for table in (self._used, self._lost):
            for counts in table:
                counts[:] = [count * factor for count in counts]

    def refresh(self, now: int = 0, running: Iterable[Life] = (), weight: int = 1) -> None:
        """Computes `worth` from what is known now. O(kinds x age classes + running).

        `running`: lives that have not ended at tick `now`, each of which stands for `weight` of them. What a kind knows
        too little about is taken from all new kinds together, if it is one, or from all; and that from the prior
        assumption.
        """
        lost = [counts.copy() for counts in self._lost]
        for life in running:
            age = now - life.last_use
            lost[life.kind][CLASSES[age] if age < NUM_TABLED else _class_of(age)] += len(life.keys) * weight
        # blocks used together are one observation: as large as the one that an average block is part of
        prior = _PRIOR_EVENTS * self._num_used_squared / self._num_used
        chances = _chances(_sums(self._used), _sums(lost), [_PRIOR_USES] * NUM_AGES, prior)
        new_used = [self._used[kind] for kind in self._new_kinds]
        new_lost = [lost[kind] for kind in self._new_kinds]
        chances_of_new = _chances(_sums(new_used), _sums(new_lost), chances, prior)
        worth = []
        for kind, kind_used in enumerate(self._used):
            assumed = chances_of_new if kind in self._new_kinds else chances
            worth.append(_worth(_smooth(_chances(kind_used, lost[kind], assumed, prior))))
        self.worth = worth
        self.worth_of_new = _worth(_smooth(chances_of_new))[0]


def _sums(counts: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) for column in zip(*counts, strict=True)]


def _chances(used: list[float], lost: list[float], assumed: list[float], prior: float) -> list[float]:
    """For each age class, the chance of a use in it once it is reached; `assumed` weighs as much as `prior` lives."""
    chances = [0.0] * NUM_AGES
    alive = 0.0
    for i in range(NUM_AGES - 1, -1, -1):
        alive += used[i] + lost[i]
        chances[i] = (used[i] + prior * assumed[i]) / (alive + prior)
    return chances


def _smooth(chances: list[float]) -> list[float]:
    """Chances by tick instead of by class, each averaged with its neighbours."""
    rates = [chance / width for chance, width in zip(chances, _WIDTHS, strict=True)]
    rates = [rates[0], *rates, rates[-1]]
    return [
        min((rates[i] + 2 * rates[i + 1] + rates[i + 2]) / 4 * width, _HIGHEST_CHANCE)
        for i, width in enumerate(_WIDTHS)
    ]


def _worth(chances: list[float]) -> list[float]:
    """For each age class the largest slope from it of (time taken up, uses), both summed over the classes behind.

    `chances[i]`: of a use within class i, once it is reached. One pass backwards: `hull` holds the stretches that a
    block would be kept for, each with its uses and time for a life that reaches its beginning, steeper ones first.
    """
    worth = [0.0] * NUM_AGES
    hull: list[tuple[float, float, float]] = []
    for i in range(NUM_AGES - 1, -1, -1):
        chance = chances[i]
        uses, time, survives = chance, _WIDTHS[i] * (1.0 - chance / 2), 1.0 - chance
        while hull and uses * hull[-1][1] <= hull[-1][0] * time:
            more_uses, more_time, still_survives = hull.pop()
            uses, time, survives = uses + survives * more_uses, time + survives * more_time, survives * still_survives
        hull.append((uses, time, survives))
        worth[i] = uses / time
    return worth
