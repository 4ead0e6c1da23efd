"""A real S3 server that refuses, is full, or has other objects than it should; where it cannot be made to answer that
way, a proxy before it does."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest

from kvtier.errors import ConfigurationError
from kvtier.interfaces import Residency
from kvtier.keys import OffloadKey
from kvtier.testing import TierDriver, make_keys
from kvtier.tiers.shared import S3Config, S3Store, SharedTier
from kvtier.tiers.shared.envelope import Identity
from lying_values import KEY, LIES, SLOT_BYTES, sealed
from s3_harness import KEYS, NAMESPACE, AnsweringProxy, S3Server, drive, error_answer, make_tier, unique_prefix
from valkey_harness import wait_until

PATIENT = {"connect_timeout_s": 30.0, "lookup_timeout_s": 30.0, "transfer_timeout_s": 30.0, "queue_timeout_s": 30.0}


@pytest.fixture
def prefix() -> str:
    return unique_prefix()


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[AnsweringProxy]:
    proxy = AnsweringProxy(s3_server.port)
    yield proxy
    proxy.stop()


def open_driver(config: S3Config) -> TierDriver:
    return drive(make_tier(config, dict(PATIENT)), 32, SLOT_BYTES)


def tier_of(driver: TierDriver) -> SharedTier:
    assert isinstance(driver.tier, SharedTier)
    return driver.tier


def name_of(key: OffloadKey) -> str:
    return f"v1/{NAMESPACE[:16].hex()}/0-0000000000000000/{key.hex()}"


def check_loads(driver: TierDriver, keys: list[OffloadKey]) -> list[bool]:
    """Loads; what succeeded has the right bytes."""
    outcome = driver.load(keys)
    for slot, (key, success) in enumerate(zip(keys, outcome.succeeded, strict=True)):
        assert not success or driver.loaded_version(key, slot) == 0
    return list(outcome.succeeded)


def store_all(driver: TierDriver, keys: list[OffloadKey]) -> None:
    outcome = driver.store(keys)
    assert outcome is not None
    assert outcome.success, outcome.reason


def wait_until_up(driver: TierDriver) -> None:
    wait_until(driver, lambda: not tier_of(driver).down_reason, "the tier does not come back")


# -- the server refuses ----------------------------------------------------------------------------------------


def test_wrong_secret_is_said_once_without_it(
    s3_server: S3Server, proxy: AnsweringProxy, prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id = engine\naws_secret_access_key = mistaken-secret\n")
    config = S3Config("kvtier-tests", prefix, endpoint=f"http://127.0.0.1:{proxy.port}", credentials_file=str(file))
    with caplog.at_level(logging.DEBUG):
        driver = open_driver(config)
        assert tier_of(driver).down_reason == "the server refuses the login: 403 SignatureDoesNotMatch"
        assert driver.tier.lookup(make_keys(2)) == [Residency.ABSENT] * 2
        wait_until(driver, lambda: len(proxy.seen) >= 4, "it does not keep trying")
        assert sum("refuses the login" in record.getMessage() for record in caplog.records) == 1
        assert "mistaken-secret" not in caplog.text + repr(driver.tier) + str(driver.tier.get_stats())
        file.write_text(f"[default]\naws_access_key_id = engine\naws_secret_access_key = {KEYS['engine']}\n")
        wait_until_up(driver)
        store_all(driver, make_keys(2))
    assert KEYS["engine"] not in caplog.text
    driver.close()


WHAT_IS_SAID = {
    "clock": error_answer(403, "RequestTimeTooSkewed"),
    "the login: 403": error_answer(403, "InvalidAccessKeyId"),
    "the login: 400": error_answer(400, "ExpiredToken"),
    "s3:ListBucket": error_answer(403, "AccessDenied"),
    "redirects to nowhere; allowed: region=REGION": error_answer(301, "PermanentRedirect"),
    "in another region": error_answer(400, "AuthorizationHeaderMalformed"),
    "503 SlowDown": error_answer(503, "SlowDown"),
    "502": (502, b"<html>bad gateway</html>"),
}


@pytest.mark.parametrize("said", WHAT_IS_SAID)
def test_what_else_is_said_at_the_start(
    s3_server: S3Server, proxy: AnsweringProxy, prefix: str, caplog: pytest.LogCaptureFixture, said: str
) -> None:
    proxy.answer = lambda method, path, headers: WHAT_IS_SAID[said]
    driver = open_driver(s3_server.config(prefix, proxy.port))
    assert said in tier_of(driver).down_reason
    assert "\n" not in tier_of(driver).down_reason
    assert driver.ready(make_keys(2)) == []
    assert driver.submit_store(make_keys(2)) == 0
    assert sum(said in record.getMessage() for record in caplog.records) == 1
    proxy.answer = lambda method, path, headers: None
    wait_until_up(driver)
    store_all(driver, make_keys(2))
    driver.close()


def test_a_bucket_that_is_not_there(s3_server: S3Server, prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    driver = open_driver(s3_server.config(prefix, user="admin", bucket="kvtier-nowhere"))
    assert "no bucket 'kvtier-nowhere'" in tier_of(driver).down_reason
    assert driver.ready(make_keys(2)) == []
    assert sum("no bucket" in record.getMessage() for record in caplog.records) == 1
    driver.close()


def test_whoever_may_only_read_reads(s3_server: S3Server, prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    keys = make_keys(6)
    writer = open_driver(s3_server.config(prefix))
    store_all(writer, keys[:3])
    writer.close()
    driver = open_driver(s3_server.config(prefix, user="reader"))
    assert driver.ready(keys) == keys[:3]
    assert check_loads(driver, keys[:3]) == [True] * 3
    outcome = driver.store(keys[3:])
    assert outcome is not None
    assert not any(outcome.succeeded)
    assert "s3:PutObject" in outcome.reason
    assert driver.submit_store(keys[3:]) == 0, "it is left alone for a while"
    assert check_loads(driver, keys[:3]) == [True] * 3
    assert not tier_of(driver).down_reason
    assert sum("s3:PutObject" in record.getMessage() for record in caplog.records) == 1
    driver.close()


def test_credentials_of_the_environment_unless_the_url_has_some(
    s3_server: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = f"http://127.0.0.1:{s3_server.port}"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "engine")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEYS["engine"])
    monkeypatch.setenv("AWS_BUCKET", "another-bucket")
    driver = open_driver(S3Config("kvtier-tests", prefix, endpoint=endpoint))
    store_all(driver, make_keys(2))
    driver.close()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody else")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of somebody else")
    driver = open_driver(s3_server.config(prefix))
    assert check_loads(driver, driver.ready(make_keys(2))) == [True] * 2
    driver.close()


def test_without_any_credentials(s3_server: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_WEB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")  # nobody is there
    driver = open_driver(S3Config("kvtier-tests", prefix, endpoint=f"http://127.0.0.1:{s3_server.port}"))
    assert "there are no credentials" in tier_of(driver).down_reason
    driver.close()


def test_without_obstore_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'kvtier\[s3\]'"):
        S3Store(S3Config("bucket"))


# -- the server has no room, or no time ------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["503 SlowDown", "507 InsufficientStorage", "500 InternalError", "400 EntityTooLarge"])
def test_full_sheds_stores_and_goes_on(s3_server: S3Server, proxy: AnsweringProxy, prefix: str, code: str) -> None:
    driver = open_driver(s3_server.config(prefix, proxy.port))
    keys = make_keys(8)
    store_all(driver, keys)
    status, name = code.split()
    proxy.answer = lambda method, path, headers: error_answer(int(status), name) if method == "PUT" else None
    before = len(proxy.seen)
    more = make_keys(8, "more")
    outcome = driver.store(more)
    assert outcome is not None
    assert not any(outcome.succeeded)
    assert code in outcome.reason
    puts = [path for method, path in proxy.seen[before:] if method == "PUT"]
    assert len(puts) == len(set(puts)), "nothing is tried twice"
    assert driver.ready(more) == []
    assert driver.submit_store(more) == 0, "a store that is full is left alone for a while"
    assert check_loads(driver, keys) == [True] * 8
    assert not tier_of(driver).down_reason
    driver.close()


def test_too_busy_for_loads_and_look_ups_costs_misses(s3_server: S3Server, proxy: AnsweringProxy, prefix: str) -> None:
    driver = open_driver(s3_server.config(prefix, proxy.port))
    keys = make_keys(8)
    store_all(driver, keys)
    refused = {name_of(key) for key in keys[4:]}
    proxy.answer = lambda method, path, headers: (
        error_answer(503, "SlowDown")
        if method in ("GET", "HEAD") and path.partition(f"{prefix}/")[2] in refused
        else None
    )
    before = len(proxy.seen)
    assert check_loads(driver, keys) == [True] * 4 + [False] * 4
    assert len(proxy.seen) == before + 8, "nothing is tried twice"
    other = open_driver(s3_server.config(prefix, proxy.port))
    assert other.ready(keys) == keys[:4]
    assert not tier_of(other).down_reason
    proxy.answer = lambda method, path, headers: None
    assert check_loads(driver, keys) == [True] * 8
    wait_until(other, lambda: other.ready(keys) == keys, "they are asked for again")
    driver.close()
    other.close()


# -- two who store one block -----------------------------------------------------------------------------------


def test_a_block_that_is_there_does_not_cross_the_network_again(
    s3_server: S3Server, proxy: AnsweringProxy, prefix: str
) -> None:
    keys = make_keys(4)
    first, second = (open_driver(s3_server.config(prefix, proxy.port)) for _ in range(2))
    store_all(first, keys)
    outcome = second.store(keys)
    assert outcome is not None
    assert outcome.success
    assert outcome.num_bytes == 0
    assert sum(method == "PUT" for method, _ in proxy.seen) == 4
    first.close()
    second.close()


def test_a_block_that_another_engine_stores_meanwhile_is_left_alone(
    s3_server: S3Server, proxy: AnsweringProxy, prefix: str
) -> None:
    keys = make_keys(2)
    first, second = (open_driver(s3_server.config(prefix, proxy.port)) for _ in range(2))
    store_all(first, keys)
    written = {name: s3_server.client(prefix).head(name)["last_modified"] for name in s3_server.names(prefix)}
    puts: list[str] = []

    def not_yet_there(method: str, path: str, headers: Message) -> tuple[int, bytes] | None:
        if method == "PUT":
            puts.append(path)
        return (404, b"") if method == "HEAD" and path not in puts else None

    proxy.answer = not_yet_there
    outcome = second.store(keys)
    assert outcome is not None
    assert outcome.success
    assert outcome.num_bytes == 0
    assert len(puts) == 2
    assert written == {name: s3_server.client(prefix).head(name)["last_modified"] for name in written}
    assert check_loads(second, keys) == [True] * 2
    first.close()
    second.close()


def test_a_conflict_is_a_failed_store(s3_server: S3Server, proxy: AnsweringProxy, prefix: str) -> None:
    """409 says that two have begun at once; neither may have been stored."""
    proxy.answer = lambda method, path, headers: (
        error_answer(409, "ConditionalRequestConflict") if method == "PUT" else None
    )
    driver = open_driver(s3_server.config(prefix, proxy.port))
    outcome = driver.store(make_keys(2))
    assert outcome is not None
    assert not any(outcome.succeeded)
    assert driver.ready(make_keys(2)) == []
    proxy.answer = lambda method, path, headers: None
    store_all(driver, make_keys(2))
    driver.close()


def test_a_server_without_conditions_is_stored_to_without(
    s3_server: S3Server, proxy: AnsweringProxy, prefix: str
) -> None:
    proxy.answer = lambda method, path, headers: (
        error_answer(501, "NotImplemented") if "If-None-Match" in headers else None
    )
    driver = open_driver(s3_server.config(prefix, proxy.port))
    keys = make_keys(4)
    store_all(driver, keys)
    assert check_loads(driver, keys) == [True] * 4
    driver.close()


# -- the bucket has other objects ------------------------------------------------------------------------------


@pytest.mark.parametrize("lie", LIES)
def test_altered_values_are_misses(s3_server: S3Server, prefix: str, lie: str) -> None:
    client = s3_server.client(prefix)
    driver = open_driver(s3_server.config(prefix))
    keys = make_keys(4)
    store_all(driver, keys)
    client.put(name_of(KEY), LIES[lie], use_multipart=False)
    assert check_loads(driver, keys) == [False, True, True, True], "only the altered one fails"
    assert driver.tier.get_stats().counters["corrupt_blocks"] == 1
    assert driver.tier.take_removed() == [KEY]
    assert driver.ready(keys) == keys[1:]
    assert driver.tier.flush(10.0)
    assert name_of(KEY) not in s3_server.names(prefix), "it is of no use to anybody"
    store_all(driver, keys)
    assert check_loads(driver, keys) == [True] * 4
    driver.close()


def test_the_right_value_from_another_client_is_a_hit(s3_server: S3Server, prefix: str) -> None:
    """The oracle of the lies: unaltered, the same value is taken."""
    s3_server.client(prefix).put(name_of(KEY), sealed(KEY))
    driver = open_driver(s3_server.config(prefix))
    assert driver.ready([KEY]) == [KEY]
    assert driver.load([KEY]).success
    assert (driver.pool[0] == 7).all()
    driver.close()


def test_values_that_are_not_whole_are_not_there(s3_server: S3Server, prefix: str) -> None:
    keys = make_keys(2)
    client = s3_server.client(prefix)
    client.put(name_of(keys[0]), sealed(keys[0])[:-1])
    client.put(name_of(keys[1]), sealed(keys[1]))
    driver = open_driver(s3_server.config(prefix))
    assert driver.ready(keys) == [keys[1]]
    stored = driver.store(keys[:1])
    assert stored is not None
    assert stored.num_bytes == SLOT_BYTES, "what is not whole is overwritten"
    assert check_loads(driver, keys[:1]) == [True]
    driver.close()


def test_truncated_on_the_way_is_a_miss(s3_server: S3Server, proxy: AnsweringProxy, prefix: str) -> None:
    driver = open_driver(s3_server.config(prefix, proxy.port))
    keys = make_keys(3)
    store_all(driver, keys)
    whole = bytes(s3_server.client(prefix).get(name_of(keys[1])).bytes())
    proxy.answer = lambda method, path, headers: (
        (200, whole[:100_000]) if method == "GET" and path.endswith(keys[1].hex()) else None
    )
    assert check_loads(driver, keys) == [True, False, True]
    driver.close()


def test_expired_by_a_rule_is_a_miss(s3_server: S3Server, prefix: str) -> None:
    driver = open_driver(s3_server.config(prefix))
    keys = make_keys(4)
    store_all(driver, keys)
    s3_server.client(prefix).delete(name_of(keys[2]))
    assert check_loads(driver, keys) == [True, True, False, True]
    assert driver.ready(keys) == [keys[0], keys[1], keys[3]]
    assert driver.tier.take_removed() == [keys[2]]
    assert driver.tier.get_stats().counters["corrupt_blocks"] == 0
    driver.close()


def test_nothing_outside_the_prefix_is_touched(s3_server: S3Server, proxy: AnsweringProxy, prefix: str) -> None:
    outside = s3_server.client("")
    somebody_s = [f"{folder}/{name_of(key)}" for folder in (f"{prefix}-2", f"{prefix}/v2") for key in make_keys(6)]
    for name in somebody_s:
        outside.put(name, b"own")
    driver = open_driver(s3_server.config(prefix, proxy.port))
    keys = make_keys(6)
    store_all(driver, keys)
    check_loads(driver, keys)
    driver.tier.touch(keys)
    driver.tier.drop(keys[:3])
    driver.tier.reset(1)
    store_all(driver, keys)
    assert driver.tier.flush(10.0)
    driver.close()
    assert [bytes(outside.get(name).bytes()) for name in somebody_s] == [b"own"] * 12
    asked_for = [path for method, path in proxy.seen if method != "POST"]
    assert all(path.startswith(f"/kvtier-tests/{prefix}/v1/") for path in asked_for)
    mine = s3_server.names(f"{prefix}/v1")
    assert {name.split("/")[-3] for name in mine} == {NAMESPACE[:16].hex()}
    epochs = sorted(name.split("/")[-2].split("-")[0] for name in mine)
    assert epochs == ["0"] * 3 + ["1"] * 6, "a rule by prefix can tell epochs"


def test_names_are_those_of_the_identity() -> None:
    identity = Identity(NAMESPACE, 0)
    assert name_of(KEY) == identity.path.decode().replace(":", "/") + KEY.hex()
