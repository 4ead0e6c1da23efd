"""A real Valkey server that dies, freezes, fills up, refuses, or lies: no wrong byte, no waiting for ever, recovery.

Where a server never answers, that a test ends at all shows that the operation was given up.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from kvtier.interfaces import Residency
from kvtier.keys import OffloadKey
from kvtier.testing import TierDriver, make_keys
from kvtier.tiers.shared import SharedTier, valkey_node
from kvtier.tiers.shared.envelope import Identity
from lying_values import KEY, LIES, SLOT_BYTES, sealed
from valkey_harness import NAMESPACE, SlowProxy, ValkeyServer, drive, make_tier, wait_until

QUICK = {"connect_timeout_s": 1.0, "lookup_timeout_s": 1.0, "transfer_timeout_s": 1.0, "queue_timeout_s": 2.0}
PATIENT = dict.fromkeys(QUICK, 30.0)
"""Where nothing stalls: this machine may be busy."""


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    server = ValkeyServer()
    yield server
    server.stop()


def tier_of(driver: TierDriver) -> SharedTier:
    assert isinstance(driver.tier, SharedTier)
    return driver.tier


def open_driver(server: ValkeyServer, settings: dict[str, float] = PATIENT, **config: object) -> TierDriver:
    return drive(make_tier(server.port, dict(settings), **config), 32, SLOT_BYTES)


def name_of(key: OffloadKey) -> bytes:
    return b"kvtier:" + Identity(NAMESPACE, 0).path + key


def check_loads(driver: TierDriver, keys: list[OffloadKey], version: int = 0) -> list[bool]:
    """Loads; what succeeded has the right bytes."""
    outcome = driver.load(keys)
    for slot, (key, success) in enumerate(zip(keys, outcome.succeeded, strict=True)):
        assert not success or driver.loaded_version(key, slot) == version
    return list(outcome.succeeded)


def wait_until_up(driver: TierDriver) -> None:
    wait_until(driver, lambda: not tier_of(driver).down_reason, "the tier does not come back")


def wait_until_down(driver: TierDriver) -> None:
    wait_until(driver, lambda: tier_of(driver).down_reason, "the tier does not notice that the server is down")


# -- the server goes and comes ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("is_store", [True, False], ids=["store", "load"])
def test_killed_in_mid_transfer_and_restarted(server: ValkeyServer, is_store: bool) -> None:
    proxy = SlowProxy(server.port, bytes_per_s=1e9)
    driver = drive(make_tier(proxy.port, dict(PATIENT)), 32, SLOT_BYTES)
    keys = make_keys(24)
    if not is_store:
        assert driver.store(keys) is not None
        proxy.bytes_per_s = 1e6
    passed = proxy.passed_bytes
    job = driver.submit_store(keys) if is_store else driver.submit_load(keys)
    wait_until(driver, lambda: proxy.passed_bytes > passed + SLOT_BYTES // 2, "nothing moves")
    server.kill()
    outcome = driver.finish(job)
    for slot, (key, success) in enumerate(zip(keys, outcome.succeeded, strict=True)):
        assert is_store or not success or driver.loaded_version(key, slot) == 0
    assert is_store or not outcome.success, "the kill came too late to test anything"
    driver.tier.lookup(make_keys(1, "unknown"))
    wait_until_down(driver)
    assert driver.tier.lookup(keys) == [Residency.ABSENT] * len(keys)
    assert driver.submit_store(keys) == 0
    proxy.bytes_per_s = 1e9
    server.start()
    wait_until_up(driver)
    assert driver.ready(keys) == []
    stored = driver.store(keys, version=1)
    assert stored is not None
    assert stored.success
    assert check_loads(driver, keys, version=1) == [True] * len(keys)
    driver.tier.check_invariants()
    driver.close()
    proxy.stop()


@pytest.mark.slow
def test_slow_costs_misses_and_no_more_than_its_time(server: ValkeyServer) -> None:
    keys = make_keys(12)
    patient = open_driver(server)
    patient.store(keys)
    patient.close()
    proxy = SlowProxy(server.port, bytes_per_s=100e3)  # 2.6 s a block, where one is allowed
    driver = drive(make_tier(proxy.port, dict(QUICK)), 32, SLOT_BYTES)
    wait_until(driver, lambda: driver.ready(keys) == keys, "look-ups are quick enough")
    assert check_loads(driver, keys) == [False] * 12
    proxy.bytes_per_s = 1e9
    wait_until(driver, lambda: driver.ready(keys) and all(check_loads(driver, keys)), "it does not recover")
    driver.close()
    proxy.stop()


@pytest.mark.slow
def test_restarted_unnoticed_its_blocks_are_misses(server: ValkeyServer) -> None:
    driver = open_driver(server)
    keys = make_keys(4)
    driver.store(keys)
    server.kill()
    server.start()
    assert check_loads(driver, keys) == [False] * 4
    wait_until(driver, lambda: not driver.ready(keys), "the blocks are gone")
    wait_until_up(driver)
    assert driver.store(keys) is not None
    assert check_loads(driver, keys) == [True] * 4
    driver.close()


@pytest.mark.slow
def test_not_there_at_the_start(server: ValkeyServer, caplog: pytest.LogCaptureFixture) -> None:
    server.kill()
    with caplog.at_level(logging.INFO, "kvtier"):
        driver = open_driver(server)
        keys = make_keys(3)
        assert driver.tier.lookup(keys) == [Residency.ABSENT] * 3
        assert driver.submit_store(keys) == 0
        assert check_loads(driver, keys) == [False] * 3
        server.start()
        wait_until_up(driver)
        assert driver.store(keys) is not None
        assert driver.ready(keys) == keys
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert f"127.0.0.1:{server.port}" in warnings[0]
    assert any("is there again" in record.getMessage() for record in caplog.records)
    driver.close()


@pytest.mark.slow
def test_frozen_is_down_until_it_thaws(server: ValkeyServer) -> None:
    driver = open_driver(server, QUICK)
    keys = make_keys(24)
    wait_until(driver, lambda: driver.store(keys) and driver.ready(keys) == keys, "it does not store")
    server.freeze()
    load = driver.submit_load(keys)
    unknown = make_keys(3, "unknown")
    assert driver.tier.lookup(unknown) == [Residency.UNKNOWN] * 3
    assert driver.ready(unknown) == []
    assert not any(driver.finish(load).succeeded)
    wait_until_down(driver)
    assert driver.tier.lookup(keys) == [Residency.ABSENT] * 24
    assert driver.submit_store(unknown) == 0
    server.thaw()
    wait_until(driver, lambda: driver.ready(keys) == keys, "it does not come back")
    wait_until(driver, lambda: all(check_loads(driver, keys)), "it does not recover")
    driver.tier.check_invariants()
    driver.close()


@pytest.mark.slow
@pytest.mark.parametrize("is_connected", [True, False], ids=["loading", "connecting"])
def test_closes_while_the_server_is_frozen(server: ValkeyServer, is_connected: bool) -> None:
    settings = {**PATIENT, "transfer_timeout_s": 1000.0, "num_connections": 1, "connect_timeout_s": 1.0}
    driver = drive(make_tier(server.port, settings), 32, SLOT_BYTES)
    keys = make_keys(20)
    driver.store(keys)
    if not is_connected:
        tier_of(driver)._threads._lines[0].close()
    server.freeze()
    driver.submit_load(keys)
    wait_until(driver, lambda: len(tier_of(driver)._threads._loads) < 20, "nothing has begun")
    if is_connected:
        assert driver.tier.close(), "nothing may keep the pool mapped: what runs is broken off"
    else:
        driver.close()
    driver.finish_all()
    assert not driver.tier.get_stats().loading_blocks
    server.thaw()


# -- the server refuses ----------------------------------------------------------------------------------------


def test_full_without_eviction_sheds_stores_and_goes_on(server: ValkeyServer) -> None:
    driver = open_driver(server)
    keys = make_keys(8)
    driver.store(keys)
    with server.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", 1 << 20)
    more = make_keys(8, "more")
    outcome = driver.store(more)
    assert outcome is not None
    assert not any(outcome.succeeded)
    assert "OOM" in outcome.reason
    assert driver.ready(more) == []
    assert driver.submit_store(more) == 0, "a store that is full is left alone for a while"
    assert check_loads(driver, keys) == [True] * 8
    assert not tier_of(driver).down_reason
    driver.close()


def test_a_store_asks_only_for_what_is_not_known(server: ValkeyServer) -> None:
    driver = drive(make_tier(server.port, {**PATIENT, "absent_s": 30.0}), 32, SLOT_BYTES)
    known, unknown = make_keys(6), make_keys(4, "unknown")
    assert driver.ready(known) == []
    with server.client() as client:
        client.config_resetstat()
        for keys in (known, unknown):
            stored = driver.store(keys)
            assert stored is not None
            assert stored.num_bytes == len(keys) * SLOT_BYTES
        assert client.info("commandstats")["cmdstat_strlen"]["calls"] == len(unknown)
    driver.close()


def test_evicted_by_the_server_is_a_miss(server: ValkeyServer) -> None:
    driver = open_driver(server)
    keys = make_keys(4)
    driver.store(keys)
    with server.client() as client:
        client.delete(name_of(keys[2]))
    assert check_loads(driver, keys) == [True, True, False, True]
    assert driver.ready(keys) == [keys[0], keys[1], keys[3]]
    assert driver.tier.take_removed() == [keys[2]]
    assert driver.tier.get_stats().counters["corrupt_blocks"] == 0
    driver.close()


# -- the server has other values -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lying_server() -> Iterator[ValkeyServer]:
    server = ValkeyServer()
    yield server
    server.stop()


@pytest.mark.parametrize("lie", LIES)
def test_altered_values_are_misses(lying_server: ValkeyServer, lie: str) -> None:
    with lying_server.client() as client:
        client.flushall()
        driver = open_driver(lying_server)
        keys = make_keys(4)
        driver.store(keys)
        client.set(name_of(KEY), LIES[lie])
        assert check_loads(driver, keys) == [False, True, True, True], "only the altered one fails"
        assert driver.tier.get_stats().counters["corrupt_blocks"] == 1
        assert driver.tier.take_removed() == [KEY]
        assert driver.ready(keys) == keys[1:]
        assert driver.tier.flush(10.0)
        assert client.exists(name_of(KEY)) == 0, "it is of no use to anybody"
        assert driver.store(keys) is not None
        assert check_loads(driver, keys) == [True] * 4
        driver.close()


def test_the_right_value_from_another_client_is_a_hit(lying_server: ValkeyServer) -> None:
    """The oracle of the lies: unaltered, the same value is taken."""
    with lying_server.client() as client:
        client.flushall()
        client.set(name_of(KEY), sealed(KEY))
        driver = open_driver(lying_server)
        assert driver.ready([KEY]) == [KEY]
        assert driver.load([KEY]).success
        assert (driver.pool[0] == 7).all()
        driver.close()


def test_a_value_of_another_type_is_a_miss(lying_server: ValkeyServer) -> None:
    with lying_server.client() as client:
        client.flushall()
        driver = open_driver(lying_server)
        keys = make_keys(3)
        driver.store(keys)
        client.delete(name_of(keys[1]))
        client.rpush(name_of(keys[1]), b"a list")
        assert check_loads(driver, keys) == [True, False, True]
        driver.close()


def test_values_that_are_not_whole_are_not_there(lying_server: ValkeyServer) -> None:
    with lying_server.client() as client:
        client.flushall()
        keys = make_keys(3)
        client.set(name_of(keys[0]), sealed(keys[0])[:-1])
        client.rpush(name_of(keys[1]), b"a list")
        client.set(name_of(keys[2]), sealed(keys[2]))
        driver = open_driver(lying_server)
        assert driver.ready(keys) == [keys[2]]
        stored = driver.store(keys[:1])
        assert stored is not None
        assert stored.num_bytes == SLOT_BYTES, "what is not whole is overwritten"
        assert check_loads(driver, keys[:1]) == [True]
        driver.close()


def test_a_value_too_large_to_read_costs_one_block_and_a_connection(
    lying_server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(valkey_node, "MAX_SKIPPED_BYTES", 2 * SLOT_BYTES)
    with lying_server.client() as client:
        client.flushall()
        driver = open_driver(lying_server)
        keys = make_keys(4)
        driver.store(keys)
        client.set(name_of(keys[1]), bytes(3 * SLOT_BYTES))
        assert check_loads(driver, keys) == [True, False, True, True]
        assert check_loads(driver, keys[2:]) == [True, True]
        assert not tier_of(driver).down_reason
        driver.close()


@pytest.mark.slow
def test_blocks_expire_when_they_are_not_used(lying_server: ValkeyServer) -> None:
    with lying_server.client() as client:
        client.flushall()
        driver = open_driver(lying_server, ttl_s=3600)
        keys = make_keys(2)
        driver.store(keys)
        assert [0 < client.ttl(name_of(key)) <= 3600 for key in keys] == [True, True]
        for key in keys:
            client.expire(name_of(key), 100)
        driver.tier.touch(keys[:1])
        wait_until(driver, lambda: client.ttl(name_of(keys[0])) > 100, "a use does not count")
        assert client.ttl(name_of(keys[1])) <= 100
        driver.close()


def test_uses_are_told_to_the_server(lying_server: ValkeyServer) -> None:
    with lying_server.client() as client:
        client.flushall()
        driver = open_driver(lying_server)
        keys = make_keys(2)
        driver.store(keys)
        client.config_resetstat()
        driver.tier.touch([*keys, *make_keys(1, "unknown")])
        wait_until(driver, lambda: "cmdstat_touch" in client.info("commandstats"), "a use does not count")
        assert client.info("commandstats")["cmdstat_touch"]["calls"] == 2
        driver.close()


def test_nothing_outside_the_prefix_is_touched(lying_server: ValkeyServer) -> None:
    with lying_server.client() as client:
        client.flushall()
        client.set("somebody's", "own")
        driver = open_driver(lying_server, prefix="mine:")
        keys = make_keys(6)
        driver.store(keys)
        driver.tier.touch(keys)
        driver.tier.drop(keys[:3])
        driver.tier.reset(1)
        driver.store(keys)
        assert driver.tier.flush(10.0)
        driver.close()
        names = client.keys()
        assert client.get("somebody's") == b"own"
        assert len(names) == 1 + 3 + 6
        assert all(name.startswith(b"mine:v1:") for name in names if name != b"somebody's")
