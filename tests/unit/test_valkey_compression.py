"""Engines that compress and engines that do not, over one real Valkey server."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from kvtier.errors import ConfigurationError
from kvtier.interfaces import Residency
from kvtier.keys import OffloadKey
from kvtier.testing import TierDriver, make_keys
from kvtier.tiers.memory import MemoryEpochStore
from kvtier.tiers.shared import SharedConfig, SharedTier, ValkeyConfig, ValkeyStore, codec
from kvtier.tiers.shared.envelope import Identity
from valkey_harness import NAMESPACE, SlowProxy, ValkeyServer, drive, make_tier, wait_until

SLOT_BYTES = 64 << 10
PATIENT = dict.fromkeys(("connect_timeout_s", "lookup_timeout_s", "transfer_timeout_s", "queue_timeout_s"), 30.0)


@pytest.fixture(scope="module")
def running() -> Iterator[ValkeyServer]:
    server = ValkeyServer()
    yield server
    server.stop()


@pytest.fixture
def server(running: ValkeyServer) -> ValkeyServer:
    with running.client() as client:
        client.flushall()
    return running


def open_driver(port: int, compression: str, **settings: object) -> TierDriver:
    return drive(make_tier(port, {**PATIENT, "compression": compression, **settings}), 32, SLOT_BYTES)


def name_of(key: OffloadKey) -> bytes:
    return b"kvtier:" + Identity(NAMESPACE, 0).path + key


def sizes(server: ValkeyServer, keys: list[OffloadKey]) -> list[int]:
    with server.client() as client:
        return [client.strlen(name_of(key)) for key in keys]


def counters(driver: TierDriver) -> dict[str, int]:
    return dict(driver.tier.get_stats().counters)


def check_loads(driver: TierDriver, keys: list[OffloadKey]) -> None:
    """All are there, to the byte."""
    assert driver.ready(keys) == keys
    outcome = driver.load(keys)
    assert outcome.success
    assert outcome.num_bytes == len(keys) * SLOT_BYTES
    assert [driver.loaded_version(key, slot) for slot, key in enumerate(keys)] == [0] * len(keys)


def test_engines_with_different_settings_share(server: ValkeyServer) -> None:
    engines = {
        "on": open_driver(server.port, "on"),
        "off": open_driver(server.port, "off"),
        "auto": open_driver(server.port, "auto"),
        # of elements that it takes for others
        "odd": open_driver(server.port, "on", element_bytes=4),
    }
    mine = {name: make_keys(8, name) for name in engines}
    for name, driver in engines.items():
        outcome = driver.store(mine[name])
        assert outcome is not None
        assert outcome.success
    assert max(sizes(server, mine["on"])) < 0.8 * SLOT_BYTES
    assert max(sizes(server, mine["odd"])) < SLOT_BYTES
    assert min(sizes(server, mine["off"])) > SLOT_BYTES
    for driver in engines.values():
        for keys in mine.values():
            check_loads(driver, keys)
        assert counters(driver)["corrupt_blocks"] == 0
    assert counters(engines["on"])["compressed_blocks"] == 8
    assert counters(engines["off"])["compressed_blocks"] == 0
    assert counters(engines["off"])["decompressed_blocks"] >= 16
    saved = sum(SLOT_BYTES - size for size in sizes(server, mine["on"]))
    assert 0 < saved < counters(engines["off"])["compression_saved_bytes"]
    assert [counters(engines[name])["compression_on"] for name in ("on", "off")] == [1, 0]
    for driver in engines.values():
        driver.tier.check_invariants()
        driver.close()


def test_what_another_engine_has_compressed_is_not_stored_again(server: ValkeyServer) -> None:
    keys = make_keys(4)
    writer, other = open_driver(server.port, "on"), open_driver(server.port, "off")
    writer.store(keys)
    before = sizes(server, keys)
    outcome = other.store(keys)
    assert outcome is not None
    assert (outcome.success, outcome.num_bytes) == (True, 0)
    assert sizes(server, keys) == before
    writer.close()
    other.close()


def test_damaged_on_the_server_it_is_a_miss_and_removed(server: ValkeyServer) -> None:
    keys = make_keys(20)
    driver = open_driver(server.port, "on")
    driver.store(keys)
    damaged = keys[1::2]
    with server.client() as client:
        for number, key in enumerate(damaged):
            value = bytearray(client.get(name_of(key)))
            value[number * len(value) // len(damaged)] ^= 1 << number % 8
            client.set(name_of(key), bytes(value))
    outcome = driver.load(keys)
    assert list(outcome.succeeded) == [True, False] * 10
    assert all(driver.loaded_version(key, slot) == 0 for slot, key in list(enumerate(keys))[::2])
    assert counters(driver)["corrupt_blocks"] == len(damaged)
    assert driver.tier.flush(30.0)
    assert sizes(server, damaged) == [0] * len(damaged)
    driver.close()


def test_an_engine_without_the_library_leaves_alone_what_it_cannot_read(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(4)
    writer = open_driver(server.port, "on")
    writer.store(keys)
    writer.close()
    compressed = sizes(server, keys)
    monkeypatch.setattr(codec, "zstandard", None)
    with pytest.raises(ConfigurationError, match=r"zstandard; install it with: pip install 'kvtier\[compression\]'"):
        open_driver(server.port, "auto")
    driver = open_driver(server.port, "off")
    assert driver.lookup(keys) == [Residency.ABSENT] * 4
    assert sizes(server, keys) == compressed
    driver.store(keys[:2])
    check_loads(driver, keys[:2])
    assert counters(driver)["corrupt_blocks"] == 0
    driver.close()
    monkeypatch.undo()
    reader = open_driver(server.port, "off")
    check_loads(reader, keys)
    reader.close()


def test_a_store_that_takes_blocks_as_they_are_refuses() -> None:
    class Registered(ValkeyStore):
        supports_compression = False

    store = Registered(ValkeyConfig("127.0.0.1"))
    SharedTier(SharedConfig(NAMESPACE), store, MemoryEpochStore())
    with pytest.raises(ConfigurationError, match=r"compression is 'on'; allowed: off, for valkey://127"):
        SharedTier(SharedConfig(NAMESPACE, compression="on"), store, MemoryEpochStore())


def test_auto_begins_to_compress_on_a_slow_link(server: ValkeyServer, caplog: pytest.LogCaptureFixture) -> None:
    """20 MB/s, where the codec does a hundred times as much."""
    caplog.set_level(logging.INFO)
    proxy = SlowProxy(server.port, bytes_per_s=20e6)
    driver = open_driver(proxy.port, "auto")
    first, then = make_keys(24), make_keys(8, "then")
    driver.store(first)

    def is_on() -> bool:
        for key in first:
            check_loads(driver, [key])
        driver.store(make_keys(1, f"look {driver.tier.get_stats().counters['loaded_blocks']}"))
        return counters(driver)["compression_on"] == 1

    wait_until(driver, is_on, "it is not switched on")
    driver.store(then)
    assert max(sizes(server, then)) < 0.8 * SLOT_BYTES
    check_loads(driver, then)
    assert counters(driver)["compression_changes"] == 1
    said = [message for message in caplog.messages if "compressed from now on" in message]
    assert len(said) == 1
    assert "a connection moves" in said[0]
    driver.close()
    proxy.stop()
