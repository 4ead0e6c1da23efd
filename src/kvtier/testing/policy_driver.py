"""One eviction policy, driven as the manager drives it, with every promise of `CachePolicy` checked at each call."""

from __future__ import annotations

import copy
import gc
import hashlib
import random
import sys
import types
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from kvtier.interfaces import CachePolicy
from kvtier.keys import OffloadKey
from kvtier.testing.observe import make_keys

_T = TypeVar("_T")
_LINES_PER_CALL = 50_000
"""Lines of Python that one call on a small cache may run: one that runs more is taken to run for ever."""


class Opaque:
    """A container that can answer `in` and nothing else, as the contract allows."""

    def __init__(self, keys: Iterable[OffloadKey]) -> None:
        self._keys = frozenset(keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys


class PolicyDriver:
    """Keeps the set of keys that must be resident. AssertionError where the policy says or does anything else."""

    def __init__(self, policy: CachePolicy, capacity: int) -> None:
        self.policy = policy
        self.capacity = capacity
        self.resident: set[OffloadKey] = set()
        self.victims: list[OffloadKey] = []
        """Everything evicted so far, in order."""

    def store(self, keys: Sequence[OffloadKey], protected: Sequence[Container[OffloadKey]] = ()) -> list[OffloadKey]:
        """Offers distinct keys for storing, in prefix order. What was inserted: the leading new ones that fit."""
        new = [key for key in keys if key not in self.resident]
        missing = len(self.resident) + len(new) - self.capacity
        if missing > 0:
            protected = [*protected, set(keys)]
            victims = self.evict_for(new, missing, protected)
            if victims is None:
                evictable = self._num_evictable(protected)
                fitting = len(new) - missing + evictable
                victims = self.evict_for(new[:fitting], evictable, protected)
                assert victims is not None
                missing = evictable
                self._decline(new[fitting:])
                new = new[:fitting]
            kept = len(new) - missing + len(victims)
            self._decline(new[kept:])
            new = new[:kept]
        if new:
            bounded(self.policy.insert, new)
            self.resident.update(new)
        self.check()
        return new

    def evict(self, count: int, protected: Sequence[Container[OffloadKey]] = ()) -> list[OffloadKey] | None:
        """Exactly `count` victims that may go; or, where there are too few, None with nothing changed."""
        return self._evict(lambda policy: policy.evict(count, protected), count, protected, may_decline=False)

    def evict_for(
        self, newcomers: Sequence[OffloadKey], count: int, protected: Sequence[Container[OffloadKey]] = ()
    ) -> list[OffloadKey] | None:
        """As `evict`, or fewer where the policy declines newcomers."""
        may_decline = type(self.policy).evict_for is not CachePolicy.evict_for
        return self._evict(
            lambda policy: policy.evict_for(newcomers, count, protected), count, protected, may_decline=may_decline
        )

    def _evict(
        self,
        evict: Callable[[CachePolicy], list[OffloadKey] | None],
        count: int,
        protected: Sequence[Container[OffloadKey]],
        *,
        may_decline: bool,
    ) -> list[OffloadKey] | None:
        enough = self._num_evictable(protected) >= count
        before = None if enough else copy.deepcopy(self.policy)
        victims = bounded(evict, self.policy)
        if not enough:
            assert victims is None, f"asked for {count} victims, of which there are fewer: {victims}"
            assert before is not None
            assert behaviour(self.policy) == behaviour(before), "an eviction that failed has changed something"
            self.check()
            return None
        assert victims is not None, f"there are {count} that may be evicted, but the policy found none"
        assert len(victims) == count or (may_decline and len(victims) < count), f"{len(victims)} victims for {count}"
        assert len(set(victims)) == len(victims), f"a victim is named twice: {victims}"
        for key in victims:
            assert key in self.resident, f"a victim that was not there: {key!r}"
            assert not any(key in container for container in protected), f"a protected victim: {key!r}"
        self.resident.difference_update(victims)
        self.victims += victims
        self.check()
        return list(victims)

    def touch(self, keys: Sequence[OffloadKey], first_use: Container[OffloadKey] = ()) -> None:
        bounded(self.policy.touch, iter(keys), first_use)
        self.check()

    def settle(self, keys: Sequence[OffloadKey], first_use: Container[OffloadKey] = ()) -> None:
        bounded(self.policy.settle, iter(keys), first_use)
        self.check()

    def decline(self, keys: Sequence[OffloadKey]) -> None:
        """Those that are not resident were offered and are not stored."""
        self._decline([key for key in keys if key not in self.resident])
        self.check()

    def _decline(self, keys: Sequence[OffloadKey]) -> None:
        if keys:
            bounded(self.policy.decline, keys)

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Those that are resident go without having been evicted."""
        going = [key for key in keys if key in self.resident]
        bounded(self.policy.remove, iter(going))
        self.resident.difference_update(going)
        self.check()

    def clear(self) -> None:
        bounded(self.policy.clear)
        self.resident.clear()
        self.check()

    def check(self) -> None:
        """The policy holds exactly the resident keys."""
        held = list(self.policy)
        assert len(held) == len(set(held)), "the policy names a key twice"
        assert set(held) == self.resident, f"held {sorted(held)}; resident are {sorted(self.resident)}"
        assert len(self.policy) == len(held), f"length {len(self.policy)} with {len(held)} keys"
        assert all(key in self.policy for key in held), "a key that the policy names is not in it"

    def _num_evictable(self, protected: Sequence[Container[OffloadKey]]) -> int:
        return sum(not any(key in container for container in protected) for key in self.resident)


def bounded(call: Callable[..., _T], *arguments: Any) -> _T:
    """Calls, and raises AssertionError in the middle of it if it runs for ever in Python."""
    left = _LINES_PER_CALL

    def count(frame: types.FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise AssertionError(f"{call!r} does not end: {_LINES_PER_CALL} lines have run")
        return count

    tracer = sys.gettrace()
    sys.settrace(count)
    try:
        return call(*arguments)
    finally:
        sys.settrace(tracer)


def behaviour(policy: CachePolicy) -> list[Any]:
    """What the policy would do from here on, as far as a few probes show. The policy itself is not changed."""
    in_order = copy.deepcopy(policy)
    in_use = copy.deepcopy(policy)
    size, resident = len(policy), sorted(policy)
    found: list[Any] = [resident, [bounded(in_order.evict, 1) for _ in range(size)]]
    bounded(in_use.touch, resident[::2])
    bounded(in_use.settle, resident[1::3], set(resident[1::6]))
    for _ in range(3):
        victims = bounded(in_use.evict, max(1, size // 2))
        found.append(victims)
        if victims:
            bounded(in_use.insert, victims)
    return found


def victims_of_script(policy: CachePolicy, capacity: int, num_requests: int = 200) -> str:
    """Digest of all that is evicted over fixed traffic: shared prefixes, loops, reuse, pins, failures. In hex."""
    draw = random.Random(5)
    driver = PolicyDriver(policy, capacity)
    prompts = [make_keys(draw.randint(1, 9), f"prompt{number}-") for number in range(12)]
    for number in range(num_requests):
        keys = draw.choice(prompts) + make_keys(draw.randint(0, 4), f"turn{draw.randint(0, 30)}-")
        pinned = set(draw.sample(sorted(driver.resident), min(2, len(driver.resident))))
        stored = driver.store(keys, [pinned, {}])
        if number % 7 == 3:
            driver.remove(stored[-1:])
        if number % 5:
            driver.settle(keys[::-1], set(stored))
        else:
            driver.touch(keys[::-1], set(stored))
        driver.evict(draw.randint(0, 2), [pinned])
    return hashlib.sha256(b"\0".join(driver.victims)).hexdigest()


def deep_size_bytes(policy: CachePolicy) -> int:
    """Bytes of everything that the policy holds on to, keys included, but for classes, functions and modules."""
    skipped = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
    total, seen, waiting = 0, {id(policy)}, [policy]
    while waiting:
        thing: Any = waiting.pop()
        total += sys.getsizeof(thing)
        for referent in gc.get_referents(thing):
            if id(referent) not in seen and not isinstance(referent, skipped):
                seen.add(id(referent))
                waiting.append(referent)
    return total


def requests_of_new_keys(length: int) -> Iterator[list[OffloadKey]]:
    """Requests of so many keys each, none of which ever returns."""
    number = 0
    while True:
        yield make_keys(length, f"never-{number}-")
        number += 1


def some_container(kind: int, keys: Collection[OffloadKey]) -> Container[OffloadKey]:
    """The keys in one of the containers that a policy may be handed."""
    makers: list[Callable[[Collection[OffloadKey]], Container[OffloadKey]]] = [set, list, dict.fromkeys, Opaque]
    return makers[kind % len(makers)](keys)
