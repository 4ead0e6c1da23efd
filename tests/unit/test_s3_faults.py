"""A real S3 server that dies, freezes, or is slow: no wrong byte, no waiting for ever, recovery.

Where a server never answers, that a test ends at all shows that the operation was given up.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
import weakref
from collections.abc import Iterator

import pytest

from kvtier.interfaces import Residency
from kvtier.keys import OffloadKey
from kvtier.testing import TierDriver, make_keys
from kvtier.tiers.shared import S3Store, SharedTier
from kvtier.tiers.shared.envelope import Identity
from s3_harness import NAMESPACE, AnsweringProxy, S3Server, drive, make_tier, unique_prefix
from valkey_harness import SlowProxy, wait_until

SLOT_BYTES = 256 << 10
QUICK = {"connect_timeout_s": 1.0, "lookup_timeout_s": 1.0, "transfer_timeout_s": 1.0, "queue_timeout_s": 2.0}
PATIENT = dict.fromkeys(QUICK, 30.0)
"""Where nothing stalls: this machine may be busy."""


def tier_of(driver: TierDriver) -> SharedTier:
    assert isinstance(driver.tier, SharedTier)
    return driver.tier


@pytest.fixture
def prefix() -> str:
    return unique_prefix()


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[SlowProxy]:
    proxy = SlowProxy(s3_server.port, bytes_per_s=1e9)
    yield proxy
    proxy.stop()


def check_loads(driver: TierDriver, keys: list[OffloadKey]) -> list[bool]:
    """Loads; what succeeded has the right bytes."""
    outcome = driver.load(keys)
    for slot, (key, success) in enumerate(zip(keys, outcome.succeeded, strict=True)):
        assert not success or driver.loaded_version(key, slot) == 0
    return list(outcome.succeeded)


def wait_until_up(driver: TierDriver) -> None:
    wait_until(driver, lambda: not tier_of(driver).down_reason, "the tier does not come back")


def wait_until_down(driver: TierDriver) -> None:
    wait_until(driver, lambda: tier_of(driver).down_reason, "the tier does not notice that the server is down")


def store_all(driver: TierDriver, keys: list[OffloadKey]) -> None:
    wait_until(driver, lambda: driver.store(keys) and driver.ready(keys) == keys, "it does not store")


# -- the server goes and comes ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("is_store", [True, False], ids=["store", "load"])
def test_killed_in_mid_transfer_and_restarted(
    s3_server: S3Server, proxy: SlowProxy, prefix: str, is_store: bool
) -> None:
    driver = drive(make_tier(s3_server.config(prefix, proxy.port), dict(PATIENT)), 32, SLOT_BYTES)
    keys = make_keys(24)
    if not is_store:
        store_all(driver, keys)
        proxy.bytes_per_s = 1e6
    passed = proxy.passed_bytes
    job = driver.submit_store(keys) if is_store else driver.submit_load(keys)
    wait_until(driver, lambda: proxy.passed_bytes > passed + SLOT_BYTES // 2, "nothing moves")
    s3_server.kill()
    outcome = driver.finish(job)
    for slot, (key, success) in enumerate(zip(keys, outcome.succeeded, strict=True)):
        assert is_store or not success or driver.loaded_version(key, slot) == 0
    assert is_store or not outcome.success, "the kill came too late to test anything"
    driver.tier.lookup(make_keys(1, "unknown"))
    wait_until_down(driver)
    assert driver.tier.lookup(keys) == [Residency.ABSENT] * len(keys)
    assert driver.submit_store(keys) == 0
    proxy.bytes_per_s = 1e9
    s3_server.start()
    wait_until_up(driver)
    check_loads(driver, driver.ready(keys))
    store_all(driver, keys)
    assert check_loads(driver, keys) == [True] * len(keys)
    driver.tier.check_invariants()
    driver.close()


@pytest.mark.slow
def test_not_there_at_the_start(s3_server: S3Server, prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    s3_server.kill()
    try:
        with caplog.at_level(logging.INFO, "kvtier"):
            driver = drive(make_tier(s3_server.config(prefix), dict(PATIENT)))
            keys = make_keys(3)
            assert driver.tier.lookup(keys) == [Residency.ABSENT] * 3
            assert driver.submit_store(keys) == 0
            assert check_loads(driver, keys) == [False] * 3
            s3_server.start()
            wait_until_up(driver)
            store_all(driver, keys)
    finally:
        if not s3_server.is_running:
            s3_server.start()
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings
    assert f"127.0.0.1:{s3_server.port}" in warnings[0]
    assert "no connection" in warnings[0]
    assert any("is there again" in record.getMessage() for record in caplog.records)
    driver.close()


@pytest.mark.slow
def test_frozen_is_down_until_it_thaws(s3_server: S3Server, prefix: str) -> None:
    driver = drive(make_tier(s3_server.config(prefix), dict(QUICK)), 32, SLOT_BYTES)
    keys = make_keys(24)
    store_all(driver, keys)
    s3_server.freeze()
    try:
        load = driver.submit_load(keys)
        unknown = make_keys(3, "unknown")
        assert driver.ready(unknown) == []
        assert not any(driver.finish(load).succeeded)
        wait_until_down(driver)
        assert driver.tier.lookup(keys) == [Residency.ABSENT] * 24
        assert driver.submit_store(unknown) == 0
    finally:
        s3_server.thaw()
    wait_until(driver, lambda: driver.ready(keys) == keys, "it does not come back")
    wait_until(driver, lambda: all(check_loads(driver, keys)), "it does not recover")
    driver.tier.check_invariants()
    driver.close()


@pytest.mark.parametrize("is_store", [True, False], ids=["store", "load"])
def test_closes_while_the_server_is_frozen(s3_server: S3Server, prefix: str, is_store: bool) -> None:
    proxy = AnsweringProxy(s3_server.port)
    settings = {**PATIENT, "transfer_timeout_s": 1000.0, "lookup_timeout_s": 1000.0}
    driver = drive(make_tier(s3_server.config(prefix, proxy.port), settings), 32, SLOT_BYTES)
    keys = make_keys(24)
    if not is_store:
        store_all(driver, keys)
    s3_server.freeze()
    try:
        proxy.answer = lambda method, path, headers: (404, b"") if method == "HEAD" else None
        num_seen = len(proxy.seen)
        job = driver.submit_store(keys) if is_store else driver.submit_load(keys)
        kind = "PUT" if is_store else "GET"
        wait_until(driver, lambda: kind in [method for method, _ in proxy.seen[num_seen:]], "nothing is moved")
        assert driver.tier.close(), "nothing may keep the pool mapped: what runs is broken off"
        assert not driver.finish(job).success
        memory = weakref.ref(driver.pool.base)
        del driver
        gc.collect()
        assert memory() is None, "somebody holds slots still"
    finally:
        s3_server.thaw()
        proxy.stop()


# -- the server is slow ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_slow_costs_misses_and_no_more_than_its_time(s3_server: S3Server, proxy: SlowProxy, prefix: str) -> None:
    keys = make_keys(12)
    patient = drive(make_tier(s3_server.config(prefix), dict(PATIENT)), 32, SLOT_BYTES)
    store_all(patient, keys)
    patient.close()
    driver = drive(make_tier(s3_server.config(prefix, proxy.port), dict(QUICK)), 32, SLOT_BYTES)
    wait_until(driver, lambda: driver.ready(keys) == keys, "look-ups are quick enough")
    proxy.bytes_per_s = 100e3  # 2.6 s a block, where one is allowed
    assert check_loads(driver, keys) == [False] * 12
    proxy.bytes_per_s = 1e9
    wait_until(driver, lambda: driver.ready(keys) and all(check_loads(driver, keys)), "it does not recover")
    driver.close()


@pytest.mark.slow
def test_look_ups_that_there_is_no_time_for_are_not_there_and_the_others_count(
    s3_server: S3Server, proxy: SlowProxy, prefix: str
) -> None:
    keys = make_keys(4000)
    patient = drive(make_tier(s3_server.config(prefix), dict(PATIENT)))
    store_all(patient, keys[:8])
    patient.close()
    proxy.bytes_per_s = 3e3  # of each of its connections: some 500 look-ups a second
    connection = S3Store(s3_server.config(prefix, proxy.port)).connect(time.monotonic() + 30.0)
    deadline_s = time.monotonic() + 4.0
    there = connection.lookup(Identity(NAMESPACE, 0), keys, 4096, deadline_s)
    assert time.monotonic() < deadline_s, "what comes after it is of no use: the tier waits no longer"
    assert there == [True] * 8 + [False] * 3992, "the first of a prompt are asked for first"
    connection.close()


@pytest.mark.slow
def test_what_is_far_too_large_is_not_read(s3_server: S3Server, proxy: SlowProxy, prefix: str) -> None:
    driver = drive(make_tier(s3_server.config(prefix, proxy.port), dict(PATIENT)), 32, SLOT_BYTES)
    keys = make_keys(2)
    store_all(driver, keys)
    (name,) = (name for name in s3_server.names(prefix) if name.endswith(keys[0].hex()))
    s3_server.client(prefix).put(name, bytes(64 << 20), use_multipart=False)
    passed = proxy.passed_bytes
    assert check_loads(driver, keys) == [False, True]
    driver.close()
    assert proxy.passed_bytes - passed < 32 << 20, "but for what was on its way already"


# -- the engine has a loop of its own --------------------------------------------------------------------------


def test_attached_on_a_thread_on_which_a_loop_runs(s3_server: S3Server, prefix: str) -> None:
    async def use() -> list[bool]:
        driver = drive(make_tier(s3_server.config(prefix), dict(PATIENT)))
        assert not tier_of(driver).down_reason
        store_all(driver, make_keys(3))
        loaded = check_loads(driver, make_keys(3))
        driver.close()
        return loaded

    assert asyncio.run(use()) == [True] * 3
