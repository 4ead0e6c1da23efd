"""A real Mooncake master, and a process that lends it RAM, that die, freeze, fill up, or lie: no wrong byte, no waiting
for ever, recovery.

Where nobody ever answers, that a test ends at all shows that the operation was given up.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvtier.errors import ConfigurationError
from kvtier.interfaces import Residency
from kvtier.keys import OffloadKey
from kvtier.testing import TierDriver, make_keys
from kvtier.tiers.shared import MooncakeConfig, MooncakeStore, SharedTier, mooncake, tier
from kvtier.tiers.shared.envelope import BlockChecksum, Identity, header_of
from mooncake_harness import NAMESPACE, MooncakeMaster, SegmentOwner, drive, make_tier
from valkey_harness import GIVE_UP_S, wait_until

pytestmark = pytest.mark.slow

SLOT_BYTES = 256 << 10
QUICK: dict[str, object] = {
    "connect_timeout_s": 1.0,
    "lookup_timeout_s": 1.0,
    "transfer_timeout_s": 1.0,
    "queue_timeout_s": 2.0,
    "present_s": 0.5,
}
PATIENT: dict[str, object] = dict.fromkeys(
    ("connect_timeout_s", "lookup_timeout_s", "transfer_timeout_s", "queue_timeout_s"), 30.0
)
"""Where nothing stalls: this machine may be busy."""


@pytest.fixture(autouse=True)
def _short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """After stores that failed one after the other: until RAM is lent again, they do."""
    monkeypatch.setattr(tier, "PAUSE_S", 0.3)


@pytest.fixture
def master() -> Iterator[MooncakeMaster]:
    master = MooncakeMaster()
    yield master
    master.stop()


@pytest.fixture
def owner(master: MooncakeMaster) -> Iterator[SegmentOwner]:
    owner = SegmentOwner(master)
    yield owner
    owner.kill()


def tier_of(driver: TierDriver) -> SharedTier:
    assert isinstance(driver.tier, SharedTier)
    return driver.tier


def store_of(driver: TierDriver) -> Any:
    return tier_of(driver)._store


def open_driver(master: MooncakeMaster, settings: dict[str, object] = PATIENT, **config: object) -> TierDriver:
    return drive(make_tier(master.port, settings, **config), 32, SLOT_BYTES)


def check_loads(driver: TierDriver, keys: list[OffloadKey], version: int = 0) -> list[bool]:
    """Loads; what succeeded has the right bytes."""
    outcome = driver.load(keys)
    for slot, (key, success) in enumerate(zip(keys, outcome.succeeded, strict=True)):
        assert not success or driver.loaded_version(key, slot) == version
    return list(outcome.succeeded)


def works(driver: TierDriver, name: str) -> bool:
    """Whether blocks of that name can be stored, and come back."""
    keys = make_keys(4, name)
    stored = driver.store(keys)
    if stored is None or not stored.success:
        return False
    return driver.ready(keys) == keys and all(check_loads(driver, keys))


def wait_until_it_works(driver: TierDriver) -> None:
    wait_until(driver, lambda: works(driver, f"after {time.monotonic()}"), "it does not recover")


def wait_until_down(driver: TierDriver) -> None:
    wait_until(driver, lambda: tier_of(driver).down_reason, "the tier does not notice that the master is down")


class Client:
    """Mooncake's client, with something done before each call whose name ends so: as they come, what moves blocks."""

    def __init__(self, client: Any, before: Callable[[], object], ending: str = "multi_buffers") -> None:
        self._client = client
        self._before = before
        self._ending = ending

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        if not name.endswith(self._ending):
            return method

        def call(*arguments: Any) -> Any:
            self._before()
            return method(*arguments)

        return call


# -- the master goes and comes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_store", [True, False], ids=["store", "load"])
def test_master_killed_in_mid_transfer_and_restarted(
    master: MooncakeMaster, owner: SegmentOwner, is_store: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_calls = threading.Semaphore(0)
    set_up = MooncakeStore._set_up
    monkeypatch.setattr(MooncakeStore, "_set_up", lambda *args: Client(set_up(*args), num_calls.release))
    driver = open_driver(master, {**PATIENT, "num_connections": 2})
    keys = make_keys(32)
    if not is_store:
        assert driver.store(keys) is not None
        while num_calls.acquire(blocking=False):
            pass
    job = driver.submit_store(keys) if is_store else driver.submit_load(keys)
    assert num_calls.acquire(timeout=GIVE_UP_S), "nothing moves"
    master.kill()
    outcome = driver.finish(job)
    for slot, (key, success) in enumerate(zip(keys, outcome.succeeded, strict=True)):
        assert is_store or not success or driver.loaded_version(key, slot) == 0
    driver.tier.lookup(make_keys(1, "unknown"))
    wait_until_down(driver)
    assert driver.tier.lookup(keys) == [Residency.ABSENT] * len(keys)
    assert driver.submit_store(keys) == 0
    master.start()
    wait_until_it_works(driver)
    assert driver.ready(keys) == [], "the master has forgotten them"
    driver.tier.check_invariants()
    driver.close()


def test_not_there_at_the_start(master: MooncakeMaster, caplog: pytest.LogCaptureFixture) -> None:
    master.kill()
    with caplog.at_level(logging.INFO, "kvtier"):
        driver = open_driver(master)
        keys = make_keys(3)
        assert driver.tier.lookup(keys) == [Residency.ABSENT] * 3
        assert driver.submit_store(keys) == 0
        assert check_loads(driver, keys) == [False] * 3
        master.start()
        owner = SegmentOwner(master)
        wait_until_it_works(driver)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert f"127.0.0.1:{master.port}" in warnings[0]
    assert any("is there again" in record.getMessage() for record in caplog.records)
    driver.close()
    owner.kill()


def test_frozen_master_is_down_until_it_thaws(master: MooncakeMaster, owner: SegmentOwner) -> None:
    driver = open_driver(master, QUICK)
    keys = make_keys(24)
    wait_until(driver, lambda: driver.store(keys) and driver.ready(keys) == keys, "it does not store")
    master.freeze()
    load = driver.submit_load(keys)
    unknown = make_keys(3, "unknown")
    assert driver.ready(unknown) == []
    assert not any(driver.finish(load).succeeded)
    wait_until_down(driver)
    assert driver.tier.lookup(keys) == [Residency.ABSENT] * 24
    assert driver.submit_store(unknown) == 0
    master.thaw()
    wait_until_it_works(driver)
    driver.tier.check_invariants()
    driver.close()


def test_a_frozen_master_at_the_start_freezes_nobody(
    master: MooncakeMaster, owner: SegmentOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mooncake's client, set up against a frozen master, holds the interpreter's lock: so it must not be tried."""
    set_up = MooncakeStore._set_up
    num_tries: list[str] = []
    monkeypatch.setattr(MooncakeStore, "_set_up", lambda *args: num_tries.append("") or set_up(*args))
    master.freeze()
    driver = open_driver(master, QUICK)
    assert "did not answer in time" in tier_of(driver).down_reason
    assert driver.tier.lookup(make_keys(3)) == [Residency.ABSENT] * 3
    assert not num_tries
    master.thaw()
    wait_until_it_works(driver)
    driver.close()


def test_closes_while_the_master_is_frozen(master: MooncakeMaster, owner: SegmentOwner) -> None:
    driver = open_driver(master, {**PATIENT, "transfer_timeout_s": 1000.0})
    keys = make_keys(24)
    driver.store(keys)
    master.freeze()
    driver.submit_load(keys)
    driver.close()
    driver.finish_all()
    assert not driver.tier.get_stats().loading_blocks
    master.thaw()


# -- who lends the RAM goes and comes --------------------------------------------------------------------------


def test_owner_killed_with_the_blocks(master: MooncakeMaster, owner: SegmentOwner) -> None:
    driver = open_driver(master)
    keys = make_keys(24)
    driver.store(keys)
    job = driver.submit_load(keys)
    owner.kill()
    outcome = driver.finish(job)
    for slot, (key, success) in enumerate(zip(keys, outcome.succeeded, strict=True)):
        assert not success or driver.loaded_version(key, slot) == 0
    assert check_loads(driver, keys) == [False] * 24
    assert not tier_of(driver).down_reason, "others may lend theirs"
    another = SegmentOwner(master)
    wait_until_it_works(driver)
    driver.tier.check_invariants()
    driver.close()
    another.kill()


def test_owner_frozen_costs_misses_until_it_thaws(master: MooncakeMaster, owner: SegmentOwner) -> None:
    driver = open_driver(master, QUICK)
    keys = make_keys(8)
    wait_until(driver, lambda: driver.store(keys) and driver.ready(keys) == keys, "it does not store")
    owner.freeze()
    assert check_loads(driver, keys) == [False] * 8, "and the slots were given back"
    unknown = make_keys(3, "unknown")
    assert driver.lookup(unknown) == [Residency.ABSENT] * 3
    owner.thaw()
    wait_until_it_works(driver)
    driver.tier.check_invariants()
    driver.close()


def test_closes_once_a_frozen_owner_is_given_up(master: MooncakeMaster, owner: SegmentOwner) -> None:
    driver = open_driver(master, {**PATIENT, "transfer_timeout_s": 1000.0})
    keys = make_keys(8)
    driver.store(keys)
    owner.freeze()
    job = driver.submit_load(keys)
    before = threading.active_count()
    driver.close()
    assert not any(driver.finish(job).succeeded)
    assert threading.active_count() < before


def test_lends_ram_while_it_is_there(master: MooncakeMaster) -> None:
    lender, borrower = open_driver(master, segment_bytes=16 << 20), open_driver(master)
    keys = make_keys(4)
    assert borrower.store(keys) is not None
    assert check_loads(borrower, keys) == [True] * 4
    assert lender.ready(keys) == keys
    assert check_loads(lender, keys) == [True] * 4
    lender.close()
    assert check_loads(borrower, keys) == [False] * 4
    borrower.close()


def test_full_sheds_stores_and_goes_on(master: MooncakeMaster) -> None:
    owner = SegmentOwner(master, 16 << 20)
    driver = open_driver(master)
    keys = make_keys(16)
    assert driver.store(keys) is not None
    for i in range(8):  # what was used in the last seconds is not evicted
        outcome = driver.store(make_keys(16, f"more {i}"))
        if outcome is None or not all(outcome.succeeded):
            break
    assert outcome is not None
    assert "no segment has room" in outcome.reason
    assert not tier_of(driver).down_reason
    assert any(check_loads(driver, keys)), "some may have been evicted"
    driver.tier.check_invariants()
    driver.close()
    owner.kill()


# -- the store has other values --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lying() -> Iterator[tuple[MooncakeMaster, Any]]:
    """A master with RAM, and an ordinary client of it."""
    master = MooncakeMaster()
    owner = SegmentOwner(master)
    client = master.client()
    yield master, client
    client.close()
    owner.kill()
    master.stop()


def name_of(key: OffloadKey) -> str:
    return mooncake._names(Identity(NAMESPACE, 0), [key])[0]


def _sealed(key: OffloadKey, namespace: bytes = NAMESPACE, epoch: int = 0, size: int = SLOT_BYTES) -> bytes:
    block = np.full(size, 7, np.uint8)
    header = header_of(Identity(namespace, epoch), key, size)
    checksum = BlockChecksum(header)
    checksum.update(block.data)
    return block.tobytes() + header + checksum.value()


def _flipped(value: bytes, at: int) -> bytes:
    return value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]


KEY = make_keys(1)[0]
LIES = {
    "magic": _flipped(_sealed(KEY), SLOT_BYTES),
    "version": _flipped(_sealed(KEY), SLOT_BYTES + 8),
    "codec": _flipped(_sealed(KEY), SLOT_BYTES + 10),
    "reserved": _flipped(_sealed(KEY), SLOT_BYTES + 11),
    "namespace": _sealed(KEY, namespace=bytes(32)),
    "epoch": _sealed(KEY, epoch=1),
    "another key": _sealed(make_keys(2)[1]),
    "length": b"x" + _sealed(KEY, size=SLOT_BYTES - 1),
    "checksum": _flipped(_sealed(KEY), len(_sealed(KEY)) - 1),
    "first byte of the block": _flipped(_sealed(KEY), 0),
    "last byte of the block": _flipped(_sealed(KEY), SLOT_BYTES - 1),
    "truncated": _sealed(KEY)[:-1],
    "a block alone": _sealed(KEY)[:SLOT_BYTES],
    "one byte": b"x",
    "longer": _sealed(KEY) + b"x",
    "huge": b"x" * (5 << 20),
}


@pytest.fixture(scope="module")
def lying_driver(lying: tuple[MooncakeMaster, Any]) -> Iterator[TierDriver]:
    driver = open_driver(lying[0])
    yield driver
    driver.close()


@pytest.mark.parametrize("lie", LIES)
def test_altered_values_are_misses(lying: tuple[MooncakeMaster, Any], lying_driver: TierDriver, lie: str) -> None:
    _, client = lying
    driver = lying_driver
    keys = make_keys(4)
    client.batch_remove([name_of(key) for key in keys], True)
    driver.tier.drop(keys)
    driver.tier.take_removed()
    assert driver.tier.flush(10.0)
    assert driver.store(keys) is not None
    corrupt = driver.tier.get_stats().counters["corrupt_blocks"]
    assert client.remove(name_of(KEY), True) == 0
    assert client.put(name_of(KEY), LIES[lie]) == 0
    assert check_loads(driver, keys) == [False, True, True, True], "only the altered one fails"
    assert driver.tier.get_stats().counters["corrupt_blocks"] == corrupt + 1
    assert driver.tier.take_removed() == [KEY]
    assert driver.ready(keys) == keys[1:]
    assert driver.tier.flush(10.0)
    assert client.is_exist(name_of(KEY)) == 0, "it is of no use to anybody"
    assert driver.store(keys) is not None
    assert check_loads(driver, keys) == [True] * 4


def test_the_right_value_from_another_client_is_a_hit(lying: tuple[MooncakeMaster, Any]) -> None:
    """The oracle of the lies: unaltered, the same value is taken."""
    master, client = lying
    client.remove(name_of(KEY), True)
    assert client.put(name_of(KEY), _sealed(KEY)) == 0
    driver = open_driver(master)
    assert driver.ready([KEY]) == [KEY]
    assert driver.load([KEY]).success
    assert (driver.pool[0] == 7).all()
    driver.close()


def test_evicted_by_the_store_is_a_miss(lying: tuple[MooncakeMaster, Any], lying_driver: TierDriver) -> None:
    driver = lying_driver
    keys = make_keys(4, "evicted")
    driver.store(keys)
    driver.tier.take_removed()
    corrupt = driver.tier.get_stats().counters["corrupt_blocks"]
    assert lying[1].remove(name_of(keys[2]), True) == 0
    assert check_loads(driver, keys) == [True, True, False, True]
    assert driver.ready(keys) == [keys[0], keys[1], keys[3]]
    assert driver.tier.take_removed() == [keys[2]]
    assert driver.tier.get_stats().counters["corrupt_blocks"] == corrupt


# -- calls that hang -------------------------------------------------------------------------------------------


def test_a_call_that_hangs_keeps_its_slots_and_nothing_else(lying: tuple[MooncakeMaster, Any]) -> None:
    driver = open_driver(lying[0], {**PATIENT, "transfer_timeout_s": 0.3, "num_connections": 2})
    keys, others = make_keys(2, "hangs"), make_keys(2, "goes on")
    wait_until(driver, lambda: driver.store(keys) and driver.ready(keys) == keys, "it does not store")
    gate = threading.Event()
    store = store_of(driver)
    client, store._client = store._client, None
    store._client = Client(client, lambda: gate.wait(GIVE_UP_S))
    tier_of(driver)._threads._lines[0].close()
    tier_of(driver)._threads._lines[1].close()
    job = driver.submit_load(keys, slots=[0, 1])
    wait_until(driver, lambda: len(store._left), "it is not given up")
    store._client = client
    wait_until(driver, lambda: driver.store(others) and driver.ready(others) == others, "others have to wait")
    loads = driver.submit_load(others, slots=[10, 11])
    assert driver.finish(loads).success
    driver.poll()
    assert job not in driver.outcomes, "its slots are still written"
    assert not driver.tier.close(), "and have to stay mapped"
    gate.set()
    assert not any(driver.finish(job).succeeded)
    driver.close()


def test_a_transfer_that_mooncake_gave_up_is_not_over(
    lying: tuple[MooncakeMaster, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = open_driver(lying[0], {**PATIENT, "num_connections": 1})
    (key,) = make_keys(1, "given up")
    driver.store([key])
    owner_of_lies = store_of(driver)._client
    monkeypatch.setattr(mooncake, "GIVES_UP_S", 0.0)

    class GivesUp:
        def __getattr__(self, name: str) -> Any:
            if name == "batch_get_into_multi_buffers":
                return lambda names, pointers, sizes: [-800] * len(names)
            return getattr(owner_of_lies, name)

    store_of(driver)._client = GivesUp()
    tier_of(driver)._threads._lines[0].close()
    job = driver.submit_load([key])
    wait_until(driver, lambda: len(store_of(driver)._left), "it is not given up")
    driver.poll()
    assert job not in driver.outcomes
    assert not driver.tier.close()
    assert not driver.tier.close()


def test_too_many_calls_that_hang_shut_the_store_off(
    lying: tuple[MooncakeMaster, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake, "MAX_LEFT_CALLS", 1)
    driver = open_driver(lying[0], {**PATIENT, "transfer_timeout_s": 0.2, "num_connections": 1})
    keys = make_keys(2, "hangs too")
    wait_until(driver, lambda: driver.store(keys) and driver.ready(keys) == keys, "it does not store")
    gate = threading.Event()
    store = store_of(driver)
    client = store._client
    store._client = Client(client, lambda: gate.wait(GIVE_UP_S))
    tier_of(driver)._threads._lines[0].close()
    first = driver.submit_load(keys[:1], slots=[0])

    def is_left() -> bool:
        nonlocal first
        # on a busy machine its time may be over before the call is made
        if first in driver.outcomes and driver.ready(keys[:1]):
            first = driver.submit_load(keys[:1], slots=[0])
        return len(store._left) > 0

    wait_until(driver, is_left, "it is not given up")
    second = driver.submit_load(keys[1:], slots=[1])
    assert "hang" in driver.finish(second).reason
    assert tier_of(driver).down_reason
    store._client = client
    gate.set()
    driver.finish(first)
    wait_until_it_works(driver)
    driver.close()


def test_a_look_up_that_hangs_keeps_the_client(lying: tuple[MooncakeMaster, Any]) -> None:
    driver = open_driver(lying[0], {**PATIENT, "lookup_timeout_s": 0.3})
    gate = threading.Event()
    store = store_of(driver)
    store._client = Client(store._client, lambda: gate.wait(GIVE_UP_S), "batch_is_exist")
    tier_of(driver)._threads._asking_line.close()
    assert driver.lookup(make_keys(2, "unknown")) == [Residency.ABSENT] * 2
    wait_until_down(driver)
    assert not driver.tier.close()
    gate.set()
    driver.close()


def test_closes_once_the_client_is_set_up(master: MooncakeMaster, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    set_up = MooncakeStore._set_up
    monkeypatch.setattr(MooncakeStore, "_set_up", lambda *args: gate.wait(GIVE_UP_S) and set_up(*args))
    driver = open_driver(master, QUICK)
    assert "not set up in time" in tier_of(driver).down_reason
    assert not driver.tier.close(), "it is about to register the pool"
    gate.set()
    driver.close()


def test_without_the_client_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ConfigurationError, match="mooncake-transfer-engine") as caught:
        MooncakeStore(MooncakeConfig("127.0.0.1"))
    assert "\n" not in str(caught.value)
