"""`parse_valkey_url`: what it takes, and the one line that says what it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.errors import ConfigurationError
from kvtier.tiers.shared import ValkeyConfig, parse_valkey_url

SECRET = "hunter2-very-secret"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("valkey://cache", ValkeyConfig("cache")),
        ("redis://cache:7000", ValkeyConfig("cache", 7000)),
        ("valkeys://cache/3", ValkeyConfig("cache", tls=True, database=3)),
        ("rediss://cache/", ValkeyConfig("cache", tls=True)),
        ("valkey://[::1]:7000", ValkeyConfig("::1", 7000)),
        ("valkey://cache?ttl=1d", ValkeyConfig("cache", ttl_s=86400)),
        ("valkey://cache?ttl=90m&prefix=team-a", ValkeyConfig("cache", ttl_s=5400, prefix="team-a:")),
        ("valkey://cache?ttl=0.5h", ValkeyConfig("cache", ttl_s=1800)),
        ("valkey://cache?prefix=a:b:", ValkeyConfig("cache", prefix="a:b:")),
        ("valkey://cache?prefix={team}", ValkeyConfig("cache", prefix="{team}:")),
        ("valkey://a,b:7001,c", ValkeyConfig("a", more_addresses=(("b", 7001), ("c", 6379)))),
        (
            "valkeys://a:7000,[::1]:7001/?ttl=60",
            ValkeyConfig("a", 7000, True, ttl_s=60, more_addresses=(("::1", 7001),)),
        ),
        ("valkey://[::1],[::2]:7001", ValkeyConfig("::1", more_addresses=(("::2", 7001),))),
    ],
)
def test_what_it_takes(url: str, expected: ValkeyConfig) -> None:
    assert parse_valkey_url(url) == expected


@pytest.mark.parametrize(
    ("url", "named", "allowed"),
    [
        ("valky://cache", "'valky'", "valkey, redis, valkeys, rediss"),
        ("cache:6379", "missing", "valkey, redis, valkeys, rediss"),
        ("valkey://", "no host", "HOST:PORT"),
        ("valkey://[::1", "malformed", "HOST:PORT"),
        ("valkey://cache:x", "port", "65535"),
        ("valkey://cache:70000", "port", "65535"),
        ("valkey://cache:0", "0", "65535"),
        ("valkey://cache/one", "'one'", "whole number"),
        ("valkey://cache?tll=1d", "'tll'", "'ttl'"),
        ("valkey://cache?sentinel=yes", "'sentinel'", "password_env"),
        ("valkey://cache?ttl=soon", "'soon'", "1 second or more"),
        ("valkey://cache?ttl=0", "'0'", "1 second or more"),
        ("valkey://cache?ttl=-1", "'-1'", "1 second or more"),
        ("valkey://cache?ttl=1d&ttl=2d", "'ttl'", "once"),
        ("valkey://cache?prefix=", "''", "1 to 64"),
        ("valkey://cache?prefix=a%20b", "'a b'", "1 to 64"),
        ("valkey://cache?ca_file=/etc/hostname", "ca_file", "valkeys://"),
        ("valkeys://cache?ca_file=/not/there", "/not/there", "no such file"),
        ("valkeys://cache?key_file=/etc/passwd", "key_file", "cert_file"),
        ("valkey://cache?password_env=KVTIER_TEST_NOT_SET", "KVTIER_TEST_NOT_SET", "not set"),
        ("valkey://cache?password_file=/not/there", "/not/there", "No such file"),
        ("valkey://cache?password_file=/a&password_env=B", "both", "one of them"),
        ("valkey://someone@cache", "'someone'", "password_env"),
        ("valkey://a,", "no host", "HOST:PORT"),
        ("valkey://,a", "no host", "HOST:PORT"),
        ("valkey://a,b:x", "port", "65535"),
        ("valkey://a:x,b", "port", "65535"),
        ("valkey://a,someone@b", "'a,someone'", "password_env"),
        ("valkey://a/1,2", "'1,2'", "whole number"),
    ],
)
def test_what_it_does_not(url: str, named: str, allowed: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_valkey_url(url)
    message = str(caught.value)
    assert named in message
    assert allowed in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "url",
    [
        f"valkey://:{SECRET}@cache",
        f"valkey://someone:{SECRET}@cache:x",
        f"valkeys://someone:{SECRET}@cache?tll=1d",
        f"valkyrie://someone:{SECRET}@cache",
        f"valkey:/someone:{SECRET}@cache",
        f"valkey://someone:{SECRET}@a,b",
        f"valkey://someone:a,{SECRET}@a:x,b",
        f"valkey://a,someone:{SECRET}@b",
    ],
)
def test_a_password_in_it_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_valkey_url(url)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


def test_passwords_come_from_where_they_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_TEST_PASSWORD", SECRET)
    config = parse_valkey_url("valkey://someone@cache?password_env=KVTIER_TEST_PASSWORD")
    assert config.username == "someone"
    assert config.password() == SECRET
    assert SECRET not in repr(config) + config.place
    several = parse_valkey_url("valkeys://someone@a,[::1]:7001/?password_env=KVTIER_TEST_PASSWORD")
    assert several.place == "valkeys://a:6379,[::1]:7001/0"
    file = tmp_path / "password"
    file.write_text(f"{SECRET}\nmore\n")
    config = parse_valkey_url(f"valkeys://cache?username=someone&password_file={file}")
    assert config.password() == SECRET
    file.write_text("another\n")
    assert config.password() == "another", "a password that was renewed is read again"
    file.write_text("\n")
    with pytest.raises(ConfigurationError, match="first line is empty"):
        parse_valkey_url(f"valkey://cache?password_file={file}")
