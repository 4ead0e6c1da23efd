"""`PolicyConformance`: the contract of an eviction policy as tests. Whoever writes a policy subclasses it.

class TestMyPolicy(PolicyConformance):
    def make_policy(self, capacity):
        return MyPolicy(capacity)

It needs `hypothesis`. Keep the class at the top level of its module: one test makes it anew in another process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import islice

from kvtier.interfaces import CachePolicy
from kvtier.keys import OffloadKey
from kvtier.testing.observe import make_keys
from kvtier.testing.policy_driver import (
    PolicyDriver,
    behaviour,
    bounded,
    deep_size_bytes,
    requests_of_new_keys,
    victims_of_script,
)

_CHILD = """
import functools, importlib, sys
module, name, capacity = sys.argv[1:4]
sys.path[:0] = sys.argv[4:]
suite = functools.reduce(getattr, name.split("."), importlib.import_module(module))()
from kvtier.testing.policy_driver import victims_of_script
print(victims_of_script(suite.make_policy(int(capacity)), int(capacity)))
"""
_FIXED_BYTES = 64 * 1024


class PolicyConformance(ABC):
    """Every test makes its own policies with `make_policy`."""

    max_examples: int = 25
    """Runs of the state machine, of `num_steps` calls each."""
    num_steps: int = 30
    finds_the_shortest: bool = True
    """Of the runs that fail, look for the shortest: takes a while."""
    bytes_per_block: int = 4096
    """What the policy may hold on to, keys included, a block of capacity; and 64 KiB besides."""

    @abstractmethod
    def make_policy(self, capacity: int) -> CachePolicy:
        """The policy under test, new, for a cache of `capacity` blocks."""

    def open(self, capacity: int) -> PolicyDriver:
        """A new policy in the hands of a driver."""
        return PolicyDriver(self.make_policy(capacity), capacity)

    # -- any calls in any order ------------------------------------------------------------------------------

    def test_any_calls_in_any_order(self) -> None:
        """Holds exactly the resident keys, evicts nothing protected, all or nothing, and every call ends."""
        from hypothesis import HealthCheck, Phase, settings  # noqa: PLC0415 (whoever runs no suite needs none of it)
        from hypothesis.stateful import run_state_machine_as_test  # noqa: PLC0415

        from kvtier.testing.policy_machine import PolicyMachine  # noqa: PLC0415

        machine = type("Machine", (PolicyMachine,), {"make_policy": lambda _, capacity: self.make_policy(capacity)})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=self.max_examples,
                stateful_step_count=self.num_steps,
                deadline=None,
                derandomize=True,
                database=None,
                phases=[Phase.generate, Phase.shrink] if self.finds_the_shortest else [Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )

    def test_empty_calls_change_nothing(self) -> None:
        for capacity in (1, 4):
            driver = self.open(capacity)
            for keys in ([], make_keys(capacity)):
                driver.store(keys)
                before = behaviour(driver.policy)
                assert driver.evict(0) == []
                assert driver.evict(0, [set(keys)]) == []
                assert driver.evict_for([], 0) == []
                bounded(driver.policy.insert, [])
                driver.touch([])
                bounded(driver.policy.decline, [])
                driver.remove([])
                assert behaviour(driver.policy) == before

    def test_the_smallest_cache(self) -> None:
        driver = self.open(1)
        first, second = make_keys(2)
        driver.store([first])
        assert driver.evict(1, [{first}]) is None
        assert driver.store([second], [{first}]) == []
        assert driver.evict(1) == [first]
        assert driver.evict(1) is None
        assert driver.store([second]) == [second]
        for key in make_keys(50, "more"):
            driver.store([key])
            driver.settle([key], {key})
        assert len(driver.policy) == 1

    # -- eviction --------------------------------------------------------------------------------------------

    def test_protected_keys_stay_under_any_pressure(self) -> None:
        driver = self.open(8)
        pinned, in_flight = make_keys(3, "pinned"), make_keys(2, "in-flight")
        driver.store(pinned)
        driver.settle(pinned[::-1], set(pinned))
        driver.store(in_flight)
        for request in islice(requests_of_new_keys(5), 200):
            stored = driver.store(request, [dict.fromkeys(pinned), set(in_flight)])
            driver.settle(request[::-1], set(stored))
        assert driver.resident >= {*pinned, *in_flight}
        assert driver.evict(8, [set(pinned)]) is None
        assert driver.evict(5, [set(pinned)]) is not None
        assert driver.resident == set(pinned)

    def test_all_or_nothing(self) -> None:
        driver = self.open(12)
        keys = make_keys(12)
        driver.store(keys[:8])
        driver.settle(keys[7::-1], set(keys[:8]))
        driver.touch(keys[2:4])
        driver.evict(2)
        driver.store(keys[8:])
        driver.touch(keys[9:10])
        # the driver compares what the policy does afterwards with what it would have done
        assert driver.evict(13) is None
        kept = sorted(driver.resident)[::2]
        assert driver.evict(len(driver.resident) - len(kept) + 1, [set(kept)]) is None
        assert driver.evict_for(make_keys(20, "new"), 20) is None

    def test_everything_can_be_evicted(self) -> None:
        driver = self.open(20)
        keys = make_keys(20)
        driver.store(keys)
        driver.settle(keys[::-1], set(keys))
        for key in keys[3:7]:
            driver.touch([key])
        victims = driver.evict(20)
        assert victims is not None
        assert sorted(victims) == sorted(keys)
        assert driver.evict(0) == []

    def test_after_clear_as_if_new(self) -> None:
        policy = self.make_policy(20)
        victims = victims_of_script(policy, 20, num_requests=100)
        policy.clear()
        assert victims_of_script(policy, 20, num_requests=100) == victims

    # -- memory ----------------------------------------------------------------------------------------------

    def test_memory_is_bounded_when_no_key_returns(self) -> None:
        capacity = 40
        for length in (1, 7, 100):
            driver = self.open(capacity)
            self._stays_bounded(driver, _store_all(driver, length), f"requests of {length} new keys")

    def test_memory_is_bounded_when_nothing_is_stored(self) -> None:
        driver = self.open(40)
        driver.store(make_keys(40, "there"))
        self._stays_bounded(driver, _touch_and_decline(driver), "keys that are only asked for")

    def test_memory_is_bounded_when_every_store_fails(self) -> None:
        driver = self.open(40)
        self._stays_bounded(driver, _fail_all(driver), "stores that fail")

    def test_memory_is_bounded_under_reuse(self) -> None:
        driver = self.open(40)
        self._stays_bounded(driver, _use_again(driver), "keys used again and again")

    def _stays_bounded(self, driver: PolicyDriver, traffic: Iterator[int], what: str) -> None:
        """`traffic` yields how many keys it was about. The size up to 60 and 120 times the capacity of them."""
        limit = self.bytes_per_block * driver.capacity + _FIXED_BYTES
        largest = [0, 0]
        for half in range(2):
            seen = 0
            for until in range(40, 61, 2):
                while seen < until * driver.capacity:
                    seen += next(traffic)
                largest[half] = max(largest[half], deep_size_bytes(driver.policy))
        assert max(largest) <= limit, f"{what}: {max(largest)} bytes for {driver.capacity} blocks; allowed: {limit}"
        assert largest[1] <= 1.2 * largest[0] + 4096, f"{what}: grows from {largest[0]} to {largest[1]} bytes"

    # -- determinism -----------------------------------------------------------------------------------------

    def test_same_calls_same_victims(self) -> None:
        for capacity in (2, 20):
            digests = {victims_of_script(self.make_policy(capacity), capacity) for _ in range(2)}
            assert len(digests) == 1

    def test_same_victims_under_another_hash_seed(self) -> None:
        own_seed = os.environ.get("PYTHONHASHSEED")
        child = subprocess.run(
            [sys.executable, "-c", _CHILD, type(self).__module__, type(self).__qualname__, "20", *sys.path],
            env={**os.environ, "PYTHONHASHSEED": "2" if own_seed == "1" else "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert child.returncode == 0, child.stderr
        assert child.stdout.split()[-1] == victims_of_script(self.make_policy(20), 20)


def _store_all(driver: PolicyDriver, length: int) -> Iterator[int]:
    for request in requests_of_new_keys(length):
        stored = driver.store(request)
        driver.settle(request[::-1], set(stored))
        yield length


def _touch_and_decline(driver: PolicyDriver) -> Iterator[int]:
    for request in requests_of_new_keys(8):
        driver.touch(request)
        driver.decline(request)
        driver.settle(request[::-1])
        yield len(request)


def _fail_all(driver: PolicyDriver) -> Iterator[int]:
    for request in requests_of_new_keys(8):
        stored = driver.store(request)
        driver.remove(stored)
        driver.settle(request[::-1], set(stored))
        yield len(request)


def _use_again(driver: PolicyDriver) -> Iterator[int]:
    known: list[OffloadKey] = make_keys(60, "known")
    turn = 0
    while True:
        turn += 1
        keys = [known[(turn * 7 + i) % len(known)] for i in range(turn % 5 + 1)]
        stored = driver.store(keys)
        driver.settle(keys[::-1], set(stored))
        yield len(keys)
