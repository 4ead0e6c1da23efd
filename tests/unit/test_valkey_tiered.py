"""Two engines' managers over one real Valkey server: what one stores, the other finds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvtier import CPUOffloadingManager, RequestDriver, Residency, TieredOffloadingManager, make_offload_key
from kvtier.keys import OffloadKey
from kvtier.tiers.memory import MemoryEpochStore
from valkey_harness import GIVE_UP_S, ValkeyServer, make_tier

SLOT_BYTES = 8192


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    server = ValkeyServer()
    yield server
    server.stop()


def keys_of(name: str, count: int) -> list[OffloadKey]:
    return [make_offload_key(f"{name}-{i}".encode().ljust(32, b"."), 0) for i in range(count)]


def bytes_of(key: OffloadKey) -> bytes:
    return key.ljust(SLOT_BYTES, b"#")


class Engine:
    """One engine: a pool, a tier, a manager, and a clock of its own."""

    def __init__(self, server: ValkeyServer, ram_blocks: int = 16) -> None:
        self.pool = np.zeros((ram_blocks, SLOT_BYTES), np.uint8)
        self.tier = make_tier(server.port, {"lookup_timeout_s": GIVE_UP_S, "absent_s": 0.05})
        self.tier.attach(self.pool)
        ram = CPUOffloadingManager(ram_blocks, deadline_s=60.0)
        self.manager = TieredOffloadingManager(ram, [self.tier], epochs=[MemoryEpochStore()])
        self.driver = RequestDriver(self.manager)
        self.now_s = 0.0

    def step(self) -> None:
        self.manager.on_schedule_end()
        self.tier.wait_for_outcome(0.01)
        self.now_s += 0.001
        self.driver.advance(self.now_s)
        self.manager.check_invariants()

    def compute(self, name: str, keys: list[OffloadKey]) -> None:
        self.driver.add_request(name, keys)
        plan = self.driver.plan_store(name, len(keys))
        assert plan is not None
        for key, slot in zip(plan.spec.keys, plan.spec.slots, strict=True):
            self.pool[slot] = np.frombuffer(bytes_of(key), np.uint8)
        self.driver.report(plan.job_id)
        self.driver.finish(name)
        self.step()
        for _ in range(5000):
            if not self.manager.num_to_flush:
                return
            self.step()
        raise AssertionError("the blocks do not go down")

    def match(self, name: str, keys: list[OffloadKey]) -> int:
        """How many blocks it finds, once it knows; they are loaded and their bytes checked."""
        self.driver.add_request(name, keys)
        for _ in range(5000):
            found = self.driver.match(name)
            if found is not None:
                break
            self.step()
        else:
            raise AssertionError("no answer")
        if found:
            plan = self.driver.plan_load(name, 0, found)
            for key, slot in zip(plan.spec.keys, plan.spec.slots, strict=True):
                assert self.pool[slot].tobytes() == bytes_of(key)
            self.driver.report(plan.job_id)
        self.driver.finish(name)
        return found

    def close(self) -> None:
        self.manager.shutdown()
        self.tier.close()


def test_what_one_engine_stores_is_a_hit_for_the_other(server: ValkeyServer) -> None:
    first, second = Engine(server), Engine(server)
    keys = keys_of("a", 8)
    assert second.match("early", keys) == 0
    first.compute("writer", keys)
    while second.tier.lookup(keys[:1]) == [Residency.ABSENT]:  # so long it remembers that they were not there
        second.step()
    assert second.match("reader", keys) == 8
    second.compute("other", keys_of("b", 6))
    assert first.match("back", keys_of("b", 6)) == 6
    first.close()
    third = Engine(server)
    assert third.match("much later", keys) == 8
    second.close()
    third.close()


def test_a_reset_of_one_engine_is_its_own(server: ValkeyServer) -> None:
    first, second = Engine(server), Engine(server)
    keys = keys_of("a", 8)
    first.compute("writer", keys)
    first.manager.reset_cache()
    assert first.match("after", keys) == 0
    assert second.match("other", keys) == 8
    first.compute("again", keys)
    second.manager.reset_cache()
    assert second.match("after", keys) == 0, "the weights of the two may differ now, equal as their epochs are"
    first.close()
    second.close()


def test_a_server_that_dies_is_misses_until_it_is_back(server: ValkeyServer) -> None:
    first, second = Engine(server), Engine(server)
    keys = keys_of("a", 8)
    first.compute("writer", keys)
    server.kill()
    assert second.match("reader", keys) == 0
    server.start()
    for engine in (first, second):
        for _ in range(5000):
            if not engine.tier.down_reason:
                break
            engine.step()
    second.compute("again", keys)
    third = Engine(server)
    assert third.match("reader", keys) == 8
    for engine in (first, second, third):
        engine.close()
