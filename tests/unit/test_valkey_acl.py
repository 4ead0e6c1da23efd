"""Passwords and users of a real server: taken, refused, renewed, without rights; no secret is ever shown."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.interfaces import Residency
from kvtier.testing import TierDriver, make_keys
from kvtier.tiers.shared import SharedTier
from valkey_harness import ValkeyServer, drive, make_tier, wait_until

SLOT_BYTES = 4096
PATIENT = dict.fromkeys(("connect_timeout_s", "lookup_timeout_s", "transfer_timeout_s", "queue_timeout_s"), 30.0)
SECRET = "the-right-secret"
MISTAKE = "a-mistaken-secret"
USER = ("--user", "engine", "on", f">{SECRET}", "~kvtier:*", "+@read", "+@write", "+@connection", "-@dangerous")


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    server = ValkeyServer(*USER, password="of-the-administrator")
    yield server
    server.stop()


@pytest.fixture
def password_file(tmp_path: Path) -> Path:
    file = tmp_path / "password"
    file.write_text(SECRET + "\n")
    return file


def open_driver(server: ValkeyServer, password_file: Path, **config: object) -> TierDriver:
    tier = make_tier(server.port, dict(PATIENT), username="engine", password_file=str(password_file), **config)
    return drive(tier, 32, SLOT_BYTES)


def tier_of(driver: TierDriver) -> SharedTier:
    assert isinstance(driver.tier, SharedTier)
    return driver.tier


def check_works(driver: TierDriver, name: str) -> None:
    keys = make_keys(3, name)
    outcome = driver.store(keys)
    assert outcome is not None
    assert outcome.success, outcome.reason
    assert driver.ready(keys) == keys
    assert driver.load(keys).success
    assert [driver.loaded_version(key, slot) for slot, key in enumerate(keys)] == [0] * 3


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def check_nothing_shown(driver: TierDriver, caplog: pytest.LogCaptureFixture) -> None:
    tier = tier_of(driver)
    shown = [caplog.text, tier.down_reason, str(tier.get_stats()), *map(repr, (tier, tier._store, tier.config))]
    shown.append(repr(vars(tier._store)))
    for text in shown:
        assert SECRET not in text
        assert MISTAKE not in text


def test_a_user_with_few_rights_is_enough(
    server: ValkeyServer, password_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        driver = open_driver(server, password_file, ttl_s=3600)
        check_works(driver, "a")
        keys = make_keys(3, "a")
        driver.tier.touch(keys)
        driver.tier.drop(keys[:1])
        assert driver.tier.flush(10.0)
        with server.client() as client:
            wait_until(driver, lambda: "cmdstat_expire" in client.info("commandstats"), "a use does not count")
            assert client.info("commandstats")["cmdstat_expire"]["rejected_calls"] == 0
            assert client.dbsize() == 2
        assert warnings_in(caplog) == []
        check_nothing_shown(driver, caplog)
        driver.close()


def test_a_wrong_password_is_said_once_without_it(
    server: ValkeyServer, password_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    password_file.write_text(MISTAKE)
    with caplog.at_level(logging.DEBUG), server.client() as client:
        driver = open_driver(server, password_file)
        assert "refuses the login" in tier_of(driver).down_reason
        assert driver.tier.lookup(make_keys(2)) == [Residency.ABSENT] * 2
        assert driver.submit_store(make_keys(2)) == 0
        wait_until(driver, lambda: client.info("stats")["acl_access_denied_auth"] >= 4, "it does not keep trying")
        assert len(warnings_in(caplog)) == 1
        assert "refuses the login" in warnings_in(caplog)[0]
        check_nothing_shown(driver, caplog)
        password_file.write_text(SECRET)
        wait_until(driver, lambda: not tier_of(driver).down_reason, "a password that was put right is not read")
        check_works(driver, "a")
        driver.close()


def test_a_password_renewed_while_running(
    server: ValkeyServer, password_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """First for new connections, in the file a moment later."""
    with caplog.at_level(logging.DEBUG), server.client() as client:
        driver = open_driver(server, password_file)
        check_works(driver, "before")
        client.execute_command("ACL", "SETUSER", "engine", f"<{SECRET}", ">renewed-secret")
        client.execute_command("CLIENT", "KILL", "USER", "engine")
        driver.tier.lookup(make_keys(1, "unknown"))
        wait_until(driver, lambda: "refuses the login" in tier_of(driver).down_reason, "the old one still works")
        password_file.write_text("renewed-secret\n")
        wait_until(driver, lambda: not tier_of(driver).down_reason, "the new one is not read")
        assert driver.ready(make_keys(3, "before")) == make_keys(3, "before")
        check_works(driver, "after")
        assert "renewed-secret" not in caplog.text
        check_nothing_shown(driver, caplog)
        driver.close()


def test_a_password_file_that_is_gone_is_said(
    server: ValkeyServer, password_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver = open_driver(server, password_file)
    password_file.unlink()
    with server.client() as client:
        client.execute_command("CLIENT", "KILL", "USER", "engine")
    driver.tier.lookup(make_keys(1))
    wait_until(driver, lambda: "No such file" in tier_of(driver).down_reason, "it does not say so")
    assert len(warnings_in(caplog)) == 1
    password_file.write_text(SECRET)
    wait_until(driver, lambda: not tier_of(driver).down_reason, "it is not read again")
    check_works(driver, "a")
    driver.close()


@pytest.mark.slow
def test_no_rights_on_the_prefix_is_said_once(
    server: ValkeyServer, password_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvtier"), server.client() as client:
        driver = open_driver(server, password_file, prefix="not-allowed:")
        assert driver.ready(make_keys(2)) == []
        for number in range(2):
            wait_until(driver, lambda: not tier_of(driver).down_reason, "it does not try again")
            assert driver.ready(make_keys(2, str(number))) == [], "nothing is there for it"
        assert len(warnings_in(caplog)) == 1
        assert "NOPERM" in warnings_in(caplog)[0]
        assert not any("there again" in record.getMessage() for record in caplog.records)
        client.execute_command("ACL", "SETUSER", "engine", "~not-allowed:*")
        wait_until(driver, lambda: not tier_of(driver).down_reason and driver.store(make_keys(2)), "no recovery")
        check_works(driver, "a")
        assert any("there again" in record.getMessage() for record in caplog.records)
        check_nothing_shown(driver, caplog)
        driver.close()


@pytest.mark.slow
def test_the_rights_that_a_cluster_takes(password_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    node = ValkeyServer(*USER, password="of-the-administrator", is_node=True)
    with node.client() as client:
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        driver = open_driver(node, password_file)
        assert "NOPERM" in tier_of(driver).down_reason
        assert driver.ready(make_keys(2)) == []
        assert len(warnings_in(caplog)) == 1
        assert "who has which slot" in warnings_in(caplog)[0]
        client.execute_command("ACL", "SETUSER", "engine", "+cluster|slots")
        keys = make_keys(4)
        wait_until(driver, lambda: driver.store(keys) and driver.ready(keys) == keys, "it does not try again")
        check_works(driver, "a")
        check_nothing_shown(driver, caplog)
        driver.close()
    node.stop()
