"""The Valkey tier over TLS. The test server is built without, so a proxy speaks it for the server."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.testing import make_keys
from kvtier.tiers.shared import SharedTier
from valkey_harness import TlsProxy, ValkeyServer, certificate_for, drive, make_tier, wait_until

PATIENT = dict.fromkeys(("connect_timeout_s", "lookup_timeout_s", "transfer_timeout_s", "queue_timeout_s"), 30.0)


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    server = ValkeyServer(password="over TLS")
    yield server
    server.stop()


def test_blocks_over_tls(server: ValkeyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = certificate_for(tmp_path, "IP:127.0.0.1")
    proxy = TlsProxy(server.port, certificate, key)
    monkeypatch.setenv("KVTIER_TEST_PASSWORD", "over TLS")
    driver = drive(
        make_tier(proxy.port, tls=True, ca_file=certificate, password_env="KVTIER_TEST_PASSWORD"), 32, 300_001
    )
    keys = make_keys(20)
    stored = driver.store(keys)
    assert stored is not None
    assert stored.success
    assert driver.load(keys).success
    assert [driver.loaded_version(key, slot) for slot, key in enumerate(keys)] == [0] * 20
    driver.close()
    proxy.stop()


@pytest.mark.parametrize("wrong", ["name", "issuer"])
def test_a_server_that_is_not_the_one_is_refused(
    server: ValkeyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    certificate, key = certificate_for(tmp_path, "DNS:elsewhere" if wrong == "name" else "IP:127.0.0.1")
    proxy = TlsProxy(server.port, certificate, key)
    monkeypatch.setenv("KVTIER_TEST_PASSWORD", "over TLS")
    ca_file = certificate if wrong == "name" else ""
    driver = drive(make_tier(proxy.port, tls=True, ca_file=ca_file, password_env="KVTIER_TEST_PASSWORD"))
    assert isinstance(driver.tier, SharedTier)
    assert "certificate verify failed" in driver.tier.down_reason
    assert driver.ready(make_keys(2)) == []
    assert sum("certificate verify failed" in record.getMessage() for record in caplog.records) == 1
    assert "over TLS" not in caplog.text
    driver.close()
    proxy.stop()


def test_a_server_that_wants_a_certificate_gets_it(
    server: ValkeyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = certificate_for(tmp_path, "IP:127.0.0.1")
    mine, my_key = certificate_for(tmp_path, "DNS:an-engine")
    proxy = TlsProxy(server.port, certificate, key, clients=mine)
    monkeypatch.setenv("KVTIER_TEST_PASSWORD", "over TLS")
    config = {"tls": True, "ca_file": certificate, "password_env": "KVTIER_TEST_PASSWORD"}
    driver = drive(make_tier(proxy.port, **config))
    assert isinstance(driver.tier, SharedTier)
    assert driver.tier.down_reason, "it comes without one"
    assert driver.ready(make_keys(2)) == []
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert f"127.0.0.1:{proxy.port}" in warnings[0]
    assert "\n" not in warnings[0]
    assert "over TLS" not in caplog.text
    driver.close()
    driver = drive(make_tier(proxy.port, **config, cert_file=mine, key_file=my_key))
    assert driver.store(make_keys(20)) is not None
    assert driver.load(make_keys(20)).success
    driver.close()
    proxy.stop()


def test_a_cluster_over_tls(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of one node, which names the proxy as its address: every connection is checked, the one that it names too."""
    certificate, key = certificate_for(tmp_path, "IP:127.0.0.1")
    node = ValkeyServer(is_node=True)
    proxy = TlsProxy(node.port, certificate, key)
    with node.client() as client:
        client.config_set("cluster-announce-port", proxy.port)
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
    driver = drive(make_tier(proxy.port, dict(PATIENT), tls=True, ca_file=certificate))
    keys = make_keys(20)
    wait_until(driver, lambda: driver.store(keys) and driver.ready(keys) == keys, "its slots are not served")
    assert driver.load(keys).success
    assert [driver.loaded_version(key, slot) for slot, key in enumerate(keys)] == [0] * 20
    driver.close()
    another, another_key = certificate_for(tmp_path, "DNS:elsewhere")
    other = TlsProxy(node.port, another, another_key)
    with node.client() as client:
        client.config_set("cluster-announce-port", other.port)
    caplog.clear()
    driver = drive(make_tier(proxy.port, dict(PATIENT), tls=True, ca_file=certificate))
    assert driver.ready(keys) == [], "the node that the cluster names is not the one"
    outcome = driver.store(keys)
    assert outcome is None or not any(outcome.succeeded)
    assert sum("certificate verify failed" in record.getMessage() for record in caplog.records) == 1
    driver.close()
    for part in (proxy, other, node):
        part.stop()
