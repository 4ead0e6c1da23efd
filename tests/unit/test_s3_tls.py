"""The S3 tier over TLS, by a proxy before the test server."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.testing import make_keys
from kvtier.tiers.shared import SharedTier
from s3_harness import S3Server, drive, make_tier, unique_prefix
from valkey_harness import TlsProxy, certificate_for


def test_blocks_over_tls(s3_server: S3Server, tmp_path: Path) -> None:
    certificate, key = certificate_for(tmp_path, "IP:127.0.0.1")
    proxy = TlsProxy(s3_server.port, certificate, key)
    config = s3_server.config(unique_prefix(), endpoint=f"https://127.0.0.1:{proxy.port}", ca_file=certificate)
    driver = drive(make_tier(config), 32, 300_001)
    keys = make_keys(8)
    stored = driver.store(keys)
    assert stored is not None
    assert stored.success
    assert driver.load(keys).success
    assert [driver.loaded_version(key, slot) for slot, key in enumerate(keys)] == [0] * 8
    driver.close()
    proxy.stop()


@pytest.mark.parametrize("wrong", ["name", "issuer"])
def test_a_server_that_is_not_the_one_is_refused(
    s3_server: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    certificate, key = certificate_for(tmp_path, "DNS:elsewhere" if wrong == "name" else "IP:127.0.0.1")
    proxy = TlsProxy(s3_server.port, certificate, key)
    ca_file = certificate if wrong == "name" else ""
    config = s3_server.config(unique_prefix(), endpoint=f"https://127.0.0.1:{proxy.port}", ca_file=ca_file)
    driver = drive(make_tier(config))
    assert isinstance(driver.tier, SharedTier)
    assert "certificate is not accepted" in driver.tier.down_reason
    assert driver.ready(make_keys(2)) == []
    assert sum("certificate is not accepted" in record.getMessage() for record in caplog.records) == 1
    driver.close()
    proxy.stop()
