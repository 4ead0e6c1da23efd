"""The Valkey tier over TLS. The test server speaks none, so a proxy does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.testing import make_keys
from kvtier.tiers.shared import SharedTier
from valkey_harness import TlsProxy, ValkeyServer, certificate_for, drive, make_tier


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
