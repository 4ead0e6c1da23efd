"""A Hypothesis state machine that does to an eviction policy whatever a manager may do (it needs `hypothesis`)."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvtier.interfaces import CachePolicy
from kvtier.keys import OffloadKey
from kvtier.testing.observe import make_keys
from kvtier.testing.policy_driver import PolicyDriver, some_container

KEYS = make_keys(16)
PROMPTS = [KEYS[:6], KEYS[:3] + KEYS[6:9], KEYS[:2] + KEYS[9:], KEYS[:1] + KEYS[4:12]]
"""They share prefixes, and some are longer than most of the caches."""

_prompts = st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(0, 3), st.integers(0, 14)).map(
    lambda drawn: PROMPTS[drawn[0]][drawn[1] : drawn[1] + drawn[2]]
)
_some_keys = st.lists(st.sampled_from(KEYS), max_size=8, unique=True)
_containers = st.builds(some_container, st.integers(0, 3), _some_keys)
_protected = st.lists(_containers, max_size=3)


class PolicyMachine(RuleBasedStateMachine):
    """Override `make_policy`. Every call is checked by `PolicyDriver`."""

    def make_policy(self, capacity: int) -> CachePolicy:
        """The policy under test, new, for a cache of `capacity` blocks."""
        raise NotImplementedError

    @initialize(capacity=st.sampled_from([1, 2, 3, 5, 9]))
    def begin(self, capacity: int) -> None:
        self.driver = PolicyDriver(self.make_policy(capacity), capacity)

    @rule(keys=_prompts, protected=_protected, settles=st.booleans())
    def request(self, keys: list[OffloadKey], protected: list[set[OffloadKey]], settles: bool) -> None:
        stored = self.driver.store(keys, protected)
        if settles:
            self.driver.settle(keys[::-1], dict.fromkeys(stored))

    @rule(keys=_some_keys, protected=_protected)
    def store(self, keys: list[OffloadKey], protected: list[set[OffloadKey]]) -> None:
        self.driver.store(keys, protected)

    @rule(count=st.integers(0, 10), protected=_protected)
    def evict(self, count: int, protected: list[set[OffloadKey]]) -> None:
        self.driver.evict(count, protected)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=8), first_use=_containers)
    def touch(self, keys: list[OffloadKey], first_use: set[OffloadKey]) -> None:
        """A key may be named twice."""
        self.driver.touch(keys, first_use)

    @rule(keys=_some_keys, first_use=_containers)
    def settle(self, keys: list[OffloadKey], first_use: set[OffloadKey]) -> None:
        self.driver.settle(keys, first_use)

    @rule(keys=_prompts)
    def decline(self, keys: list[OffloadKey]) -> None:
        self.driver.decline(keys)

    @rule(keys=_some_keys)
    def remove(self, keys: list[OffloadKey]) -> None:
        """A store or load that failed."""
        self.driver.remove(keys)

    @rule(really=st.integers(0, 5).map(lambda number: number == 3))
    def clear(self, really: bool) -> None:
        if really:
            self.driver.clear()
