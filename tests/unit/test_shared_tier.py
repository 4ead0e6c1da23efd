"""The base of the shared tiers over a store in memory, whose every answer the test can hold back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.errors import ConfigurationError, ManagerUsageError
from kvtier.interfaces import Residency
from kvtier.keys import OffloadKey
from kvtier.testing import TierDriver, make_keys
from kvtier.tiers.memory import MemoryEpochStore
from kvtier.tiers.shared import SharedConfig, SharedTier
from kvtier.tiers.shared.envelope import Identity
from kvtier.tiers.shared.store import (
    BlockTransfer,
    StoreConnection,
    StoreRefusedError,
    StoreTimeoutError,
    StoreUnreachableError,
)

NAMESPACE = bytes(32)
SLOT_BYTES = 64
GIVE_UP_S = 30.0
READY, UNKNOWN, ABSENT = Residency.READY, Residency.UNKNOWN, Residency.ABSENT


class FakeStore:
    """Blocks in a dictionary. `gate` holds back whatever is asked while it is closed; `errors` has, by operation,
    what is raised in turn."""

    medium = "FAKE"
    place = "fake://"
    supports_compression = False

    def __init__(self) -> None:
        self.blocks: dict[tuple[Identity, OffloadKey], bytes] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.held: set[str] | None = None
        """Which operations the gate is for; None: all."""
        self.refuses = False
        self.lets_go = True
        self.errors: dict[str, list[Exception]] = {}
        self.num_lost_answers = 0
        """So many are missing from the next reply to a look-up."""
        self.asked: list[list[OffloadKey]] = []
        self.calls: list[str] = []

    def attach(self, pool: npt.NDArray[np.uint8]) -> None:
        self.calls.append("attach")

    def detach(self, deadline_s: float) -> bool:
        self.calls.append("detach")
        return self.lets_go

    def connect(self, deadline_s: float) -> StoreConnection:
        self.calls.append("connect")
        if self.refuses:
            raise StoreUnreachableError("nobody is there")
        return FakeConnection(self)


class FakeConnection:
    def __init__(self, store: FakeStore) -> None:
        self._store = store
        self._aborted = threading.Event()

    def _begin(self, name: str, deadline_s: float) -> None:
        self._store.calls.append(name)
        until_s = min(deadline_s, time.monotonic() + GIVE_UP_S)
        held = self._store.held
        while not self._store.gate.wait(0.002) and (held is None or name in held):
            if self._aborted.is_set():
                raise StoreUnreachableError("aborted")
            if time.monotonic() > until_s:
                raise StoreTimeoutError("too late")
        if self._store.errors.get(name):
            raise self._store.errors[name].pop(0)

    def ping(self, deadline_s: float) -> None:
        self._begin("ping", deadline_s)

    def lookup(self, identity: Identity, keys: Sequence[OffloadKey], block_bytes: int, deadline_s: float) -> list[bool]:
        self._store.asked.append(list(keys))
        self._begin("lookup", deadline_s)
        found = [(identity, key) in self._store.blocks for key in keys]
        num_lost, self._store.num_lost_answers = self._store.num_lost_answers, 0
        return found[: len(found) - num_lost]

    def load(self, blocks: Sequence[BlockTransfer], deadline_s: float) -> None:
        self._begin("load", deadline_s)
        for block in blocks:
            data = self._store.blocks.get((block.identity, block.key))
            if data is None:
                block.miss()
            else:
                block.buffer[:] = np.frombuffer(data, np.uint8)
                block.succeed(len(data))

    def store(self, blocks: Sequence[BlockTransfer], overwrite: bool, deadline_s: float) -> None:
        self._begin("store", deadline_s)
        for block in blocks:
            if (block.identity, block.key) in self._store.blocks and not overwrite:
                block.succeed(0)
                continue
            self._store.blocks[block.identity, block.key] = block.buffer.tobytes()
            block.succeed(block.buffer.nbytes)

    def remove(self, identity: Identity, keys: Sequence[OffloadKey], deadline_s: float) -> None:
        self._begin("remove", deadline_s)
        for key in keys:
            self._store.blocks.pop((identity, key), None)

    def touch(self, identity: Identity, keys: Sequence[OffloadKey], deadline_s: float) -> None:
        self._begin("touch", deadline_s)

    def abort(self) -> None:
        self._aborted.set()

    def close(self) -> None:
        pass


class Clock:
    """Stands still unless the test moves it. Only the tier's own; its threads have the real one."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def open_driver(store: FakeStore, clock: Clock | None = None, **settings: float) -> TierDriver:
    config = SharedConfig(NAMESPACE, **settings)  # type: ignore[arg-type]
    tier = SharedTier(config, store, MemoryEpochStore(), clock=clock or Clock())
    return TierDriver(tier, 16, SLOT_BYTES, answers_at_once=False)


def wait_for(driver: TierDriver, condition: object) -> None:
    until_s = time.monotonic() + GIVE_UP_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until_s
        driver.poll()
        time.sleep(0.001)


# -- asking ----------------------------------------------------------------------------------------------------


def test_unknown_until_answered_and_asked_once_for_all() -> None:
    store = FakeStore()
    driver = open_driver(store)
    keys = make_keys(100)
    store.blocks[Identity(NAMESPACE, 0), keys[7]] = bytes(SLOT_BYTES)
    store.gate.clear()
    for _ in range(5):  # five requests, block by block
        for key in keys:
            assert driver.tier.lookup([key]) == [UNKNOWN]
        driver.poll()
    store.gate.set()
    expected = [READY if i == 7 else ABSENT for i in range(100)]
    assert driver.lookup(keys) == expected
    assert sorted(key for batch in store.asked for key in batch) == sorted(keys), "each key exactly once"
    assert driver.tier.lookup(keys) == expected
    driver.close()


def test_answers_are_believed_for_a_while() -> None:
    store, clock = FakeStore(), Clock()
    driver = open_driver(store, clock, present_s=10.0, absent_s=1.0)
    here, gone = make_keys(2)
    store.blocks[Identity(NAMESPACE, 0), here] = bytes(SLOT_BYTES)
    assert driver.lookup([here, gone]) == [READY, ABSENT]
    store.blocks = {(Identity(NAMESPACE, 0), gone): bytes(SLOT_BYTES)}
    clock.now_s += 0.9
    driver.poll()
    assert driver.tier.lookup([here, gone]) == [READY, ABSENT]
    clock.now_s += 0.2
    driver.poll()
    assert driver.tier.lookup([here, gone]) == [READY, UNKNOWN]
    assert driver.lookup([here, gone]) == [READY, READY]
    clock.now_s += 9.0
    driver.poll()
    assert driver.lookup([here, gone]) == [ABSENT, READY]
    assert driver.tier.take_removed() == [here]
    driver.close()


def test_no_answer_is_absent_when_its_time_is_over() -> None:
    store, clock = FakeStore(), Clock()
    driver = open_driver(store, clock, lookup_timeout_s=20.0)
    (key,) = make_keys(1)
    store.gate.clear()
    assert driver.tier.lookup([key]) == [UNKNOWN]
    clock.now_s += 19.9
    driver.poll()
    assert driver.tier.lookup([key]) == [UNKNOWN]
    clock.now_s += 0.2
    driver.poll()
    assert driver.tier.lookup([key]) == [ABSENT]
    store.gate.set()
    driver.close()


def test_questions_are_bounded() -> None:
    store = FakeStore()
    driver = open_driver(store, max_keys=10)
    store.gate.clear()
    answers = driver.tier.lookup(make_keys(15))
    assert answers == [UNKNOWN] * 10 + [ABSENT] * 5
    assert driver.tier.get_stats().counters["shed_lookups"] == 5
    store.gate.set()
    assert driver.lookup(make_keys(10)) == [ABSENT] * 10
    driver.tier.check_invariants()
    driver.close()


def test_an_answer_from_before_a_reset_counts_no_more() -> None:
    store = FakeStore()
    driver = open_driver(store)
    (key,) = make_keys(1)
    store.blocks[Identity(NAMESPACE, 0), key] = bytes(SLOT_BYTES)
    store.gate.clear()
    driver.tier.lookup([key])
    wait_for(driver, lambda: store.asked)
    driver.tier.reset(1)
    assert driver.tier.lookup([key]) == [UNKNOWN]
    store.gate.set()
    assert driver.lookup([key]) == [ABSENT]
    driver.close()


def test_two_processes_with_equal_epochs_after_a_reset_do_not_meet() -> None:
    store = FakeStore()
    ours, theirs = open_driver(store), open_driver(store)
    keys = make_keys(3)
    assert ours.store(keys) is not None
    assert theirs.ready(keys) == keys, "before a reset the namespace says it all"
    for driver in (ours, theirs):
        driver.tier.reset(1)
    assert ours.store(keys) is not None
    assert ours.ready(keys) == keys
    assert theirs.ready(keys) == []
    for driver in (ours, theirs):
        driver.close()


# -- trouble ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_store", [True, False], ids=["store", "load"])
def test_what_broke_is_repeated_once(is_store: bool) -> None:
    store = FakeStore()
    driver = open_driver(store)
    keys = make_keys(2)
    if not is_store:
        driver.store(keys)
    store.errors = {"store" if is_store else "load": [StoreUnreachableError("broken")]}
    outcome = driver.store(keys) if is_store else driver.load(keys)
    assert outcome is not None
    assert outcome.success
    driver.poll()
    assert driver.tier.get_stats().counters["connection_losses"] == 0
    driver.close()


@pytest.mark.parametrize("error", [StoreTimeoutError("late"), StoreRefusedError("no"), RuntimeError("a bug")])
def test_nothing_else_is_repeated(error: Exception) -> None:
    store = FakeStore()
    driver = open_driver(store, num_connections=1)
    store.errors = {"store": [error]}
    store.calls.clear()
    outcome = driver.store(make_keys(2))
    assert outcome is not None
    assert outcome.succeeded == (False, False)
    assert str(error) in outcome.reason
    assert store.calls.count("store") == 1
    driver.tier.check_invariants()
    driver.close()


def test_down_answers_at_once_and_comes_back() -> None:
    store = FakeStore()
    driver = open_driver(store)
    keys = make_keys(4)
    driver.store(keys)
    store.refuses = True
    store.errors = {"lookup": [StoreUnreachableError("broken")]}
    driver.tier.lookup(make_keys(1, "unknown"))
    wait_for(driver, lambda: driver.tier.down_reason)  # type: ignore[attr-defined]
    store.gate.clear()
    assert driver.tier.lookup(keys) == [ABSENT] * 4
    assert driver.submit_store(make_keys(2, "more")) == 0
    outcome = driver.load(keys)
    assert not any(outcome.succeeded)
    assert outcome.reason == "nobody is there"
    store.gate.set()
    store.refuses = False
    wait_for(driver, lambda: not driver.tier.down_reason)  # type: ignore[attr-defined]
    assert driver.tier.lookup(keys) == [UNKNOWN] * 4, "it may be another server"
    assert driver.ready(keys) == keys
    driver.close()


def test_questions_that_were_lost_with_the_connection_are_answered() -> None:
    store, clock = FakeStore(), Clock()
    driver = open_driver(store, clock)
    (key,) = make_keys(1)
    store.errors = {"lookup": [StoreRefusedError("not these")]}
    assert driver.tier.lookup([key]) == [UNKNOWN]
    assert driver.lookup([key]) == [ABSENT], "the clock stands still: this is not the time that is over"
    clock.now_s += 2
    driver.poll()
    assert driver.tier.lookup([key]) == [UNKNOWN]
    driver.close()


def test_a_slow_store_is_asked_whether_it_lives_before_it_is_given_up() -> None:
    store = FakeStore()
    driver = open_driver(store)
    store.errors = {"store": [StoreTimeoutError("late")]}
    driver.store(make_keys(1))
    wait_for(driver, lambda: "ping" in store.calls)
    assert driver.ready(make_keys(1)) == []
    assert driver.tier.get_stats().counters["connection_losses"] == 0
    driver.close()


def test_stores_that_fail_again_and_again_pause_the_stores_alone() -> None:
    store, clock = FakeStore(), Clock()
    driver = open_driver(store, clock, num_connections=1)
    present = make_keys(1, "present")
    driver.store(present)
    for key in make_keys(3):
        store.errors = {"store": [StoreTimeoutError("late")]}
        assert driver.store([key]) is not None
    assert driver.submit_store(make_keys(1)) == 0
    assert driver.load(present).success
    clock.now_s += 11
    assert driver.store(make_keys(1)) is not None
    driver.close()


def test_waiting_stores_are_bounded() -> None:
    store = FakeStore()
    driver = open_driver(store, max_storing_bytes=3 * SLOT_BYTES)
    store.gate.clear()
    job = driver.submit_store(make_keys(5))
    assert driver.tier.get_stats().storing_blocks == 3
    assert driver.tier.get_stats().counters["shed_blocks"] == 2
    assert driver.submit_store(make_keys(2, "more")) == 0
    store.gate.set()
    assert driver.finish(job).succeeded == (True,) * 3
    driver.close()


def test_removed_before_it_is_stored_again() -> None:
    store = FakeStore()
    driver = open_driver(store)
    keys = make_keys(2)
    driver.store(keys, version=1)
    store.gate.clear()
    driver.tier.drop(keys)
    wait_for(driver, lambda: "remove" in store.calls)
    job = driver.submit_store(keys, version=2)
    store.gate.set()
    assert driver.finish(job).success
    assert driver.tier.flush(GIVE_UP_S)
    assert driver.load(keys).success, "the removal has overtaken the store"
    assert [driver.loaded_version(key, slot) for slot, key in enumerate(keys)] == [2, 2]
    driver.close()


def test_what_waits_to_be_removed_is_overwritten_instead() -> None:
    store = FakeStore()
    driver = open_driver(store, lookup_timeout_s=GIVE_UP_S)
    keys = make_keys(2)
    driver.store(keys, version=1)
    store.held = {"lookup"}
    store.gate.clear()
    driver.tier.lookup(make_keys(1, "unknown"))
    wait_for(driver, lambda: store.asked)
    driver.tier.drop(keys)
    outcome = driver.store(keys, version=2)
    assert outcome is not None
    assert outcome.num_bytes == 2 * SLOT_BYTES
    store.gate.set()
    assert driver.tier.flush(GIVE_UP_S)
    assert driver.load(keys).success
    assert [driver.loaded_version(key, slot) for slot, key in enumerate(keys)] == [2, 2]
    driver.close()


def test_what_is_stored_after_a_reset_is_not_what_waits_to_be_removed() -> None:
    store = FakeStore()
    driver = open_driver(store, lookup_timeout_s=GIVE_UP_S)
    keys = make_keys(2)
    driver.store(keys)
    store.held = {"lookup"}
    store.gate.clear()
    driver.tier.lookup(make_keys(1, "unknown"))
    wait_for(driver, lambda: store.asked)
    driver.tier.drop(keys[:1])
    driver.tier.reset(1)
    assert driver.store(keys) is not None
    store.gate.set()
    assert driver.tier.flush(GIVE_UP_S)
    assert sorted((identity.epoch, key) for identity, key in store.blocks) == [(0, keys[1]), (1, keys[0]), (1, keys[1])]
    driver.close()


def test_asks_before_it_stores_unless_the_store_itself_has_just_denied_it() -> None:
    store, clock = FakeStore(), Clock()
    driver = open_driver(store, clock)
    denied, late, old = (make_keys(1, name) for name in ("denied", "late", "old"))
    assert driver.ready(old) == []
    clock.now_s += 1.1
    assert driver.ready(denied) == []
    store.gate.clear()
    driver.tier.lookup(late)
    wait_for(driver, lambda: late in store.asked)
    clock.now_s += 0.6
    driver.poll()
    assert driver.tier.lookup(late) == [ABSENT], "nobody has said so"
    store.gate.set()
    for key in (*denied, *late, *old):  # another engine has stored them
        store.blocks[Identity(NAMESPACE, 0), key] = bytes(SLOT_BYTES)
    outcomes = [driver.store(keys) for keys in (denied, late, old)]
    assert [outcome and outcome.num_bytes for outcome in outcomes] == [SLOT_BYTES, 0, 0]
    driver.close()


def test_close_breaks_off_what_hangs() -> None:
    store = FakeStore()
    driver = open_driver(store, transfer_timeout_s=1000.0, lookup_timeout_s=1000.0)
    driver.store(make_keys(4))
    before = threading.active_count()
    store.gate.clear()
    store.calls.clear()
    driver.submit_load(make_keys(1))
    driver.submit_store(make_keys(1, "more"), slots=[4])
    driver.tier.lookup(make_keys(3, "unknown"))
    wait_for(driver, lambda: {"load", "store", "lookup"} <= set(store.calls))
    assert driver.tier.close()
    assert threading.active_count() < before
    driver.finish_all()


# -- calls that go on after they were given up -----------------------------------------------------------------


class StuckCall:
    """Goes on until it is ended."""

    def __init__(self) -> None:
        self._after: list[Callable[[], None]] = []

    def when_ended(self, then: Callable[[], None]) -> None:
        self._after.append(then)

    def end(self) -> None:
        for then in self._after:
            then()


@pytest.mark.parametrize("error", [StoreTimeoutError, StoreUnreachableError])
@pytest.mark.parametrize("is_store", [True, False], ids=["store", "load"])
def test_what_goes_on_keeps_its_slots_until_it_ends(error: type[StoreUnreachableError], is_store: bool) -> None:
    store = FakeStore()
    driver = open_driver(store, num_connections=1)
    keys, others = make_keys(2), make_keys(2, "other")
    assert driver.store(keys + others) is not None
    call = StuckCall()
    store.errors = {"store" if is_store else "load": [error("given up", call)]}
    store.calls.clear()
    job = driver.submit_store(make_keys(2, "new")) if is_store else driver.submit_load(keys)
    wait_for(driver, lambda: ("store" if is_store else "load") in store.calls)
    # others do not wait for it; what was believed before the connection was lost may have to be asked for again
    wait_for(driver, lambda: driver.ready(others) == others and driver.load(others).success)
    assert store.calls.count("load") == 1 + (not is_store), "nothing is repeated while it goes on"
    assert job not in driver.outcomes
    assert not driver.tier.flush(0.0) or not is_store
    assert not driver.tier.close()
    assert "detach" not in store.calls
    call.end()
    assert not any(driver.finish(job).succeeded)
    assert driver.tier.close()
    assert "detach" in store.calls
    driver.tier.check_invariants()


def test_the_pool_stays_while_the_store_does_not_let_go_of_it() -> None:
    store = FakeStore()
    driver = open_driver(store)
    assert store.calls[0] == "attach"
    store.lets_go = False
    assert not driver.tier.close()
    store.lets_go = True
    assert driver.tier.close()


# -- misuse ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"num_connections": 0},
        {"max_keys": 0},
        {"max_storing_bytes": 0},
        {"lookup_timeout_s": 0.0},
        {"transfer_timeout_s": float("nan")},
        {"absent_s": -1.0},
    ],
)
def test_settings_that_cannot_work(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        SharedConfig(NAMESPACE, **settings)  # type: ignore[arg-type]


def test_attached_twice() -> None:
    driver = open_driver(FakeStore())
    with pytest.raises(ManagerUsageError):
        driver.tier.attach(driver.pool)
    driver.close()


def test_a_removal_is_of_the_block_that_was_dropped_whatever_is_stored_under_its_key_since() -> None:
    """After a reset the key is that of another block."""
    store = FakeStore()
    driver = open_driver(store, lookup_timeout_s=GIVE_UP_S)
    keys = make_keys(3)
    driver.store(keys)
    store.held = {"lookup"}
    store.gate.clear()
    driver.tier.lookup(make_keys(1, "asked"))  # and the thread that removes waits for that
    wait_for(driver, lambda: store.asked)
    driver.tier.drop(keys[:2])
    driver.tier.reset(1)
    driver.store(keys)
    store.gate.set()
    assert driver.tier.flush(GIVE_UP_S)
    kept = {key for identity, key in store.blocks if identity == Identity(NAMESPACE, 0)}
    assert kept == {keys[2]}
    assert len(store.blocks) == 1 + 3
    driver.close()


def test_a_store_that_answers_half_is_asked_again() -> None:
    store = FakeStore()
    driver = open_driver(store)
    keys = make_keys(2)
    store.num_lost_answers = 1
    assert driver.tier.lookup(keys) == [UNKNOWN, UNKNOWN]
    wait_for(driver, lambda: driver.tier.lookup(keys) == [ABSENT, ABSENT])
    assert driver.store(keys)
    driver.tier.drop(keys)
    wait_for(driver, lambda: not store.blocks)  # somebody is still there who removes and asks
    driver.tier.close()
