"""`parse_s3_url`: what it takes, and the one line that says what it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.errors import ConfigurationError
from kvtier.tiers.shared import S3Config, parse_s3_url

SECRET = "hunter2/very+Secret"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket", S3Config("bucket")),
        ("s3://bucket/", S3Config("bucket")),
        ("s3://my.bucket-1/team-a", S3Config("my.bucket-1", "team-a")),
        ("s3://bucket/team_a/kv=1/", S3Config("bucket", "team_a/kv=1")),
        ("s3://bucket/a?region=eu-west-1", S3Config("bucket", "a", region="eu-west-1")),
        (
            "s3://bucket/a?endpoint=http://127.0.0.1:8333",
            S3Config("bucket", "a", endpoint="http://127.0.0.1:8333"),
        ),
        ("s3://bucket/a?endpoint=https://s3.example/", S3Config("bucket", "a", endpoint="https://s3.example")),
        ("s3://bucket/a?endpoint=http://[::1]:9000", S3Config("bucket", "a", endpoint="http://[::1]:9000")),
    ],
)
def test_what_it_takes(url: str, expected: S3Config) -> None:
    assert parse_s3_url(url) == expected


@pytest.mark.parametrize(
    ("url", "named", "allowed"),
    [
        ("s4://bucket", "'s4'", "s3"),
        ("bucket/prefix", "missing", "s3"),
        ("s3://", "''", "3 to 63"),
        ("s3://ab", "'ab'", "3 to 63"),
        ("s3://buck%20et", "'buck%20et'", "3 to 63"),
        ("s3://bucket:9000", "port", "endpoint="),
        ("s3://bucket/a//b", "'a//b'", "single slashes"),
        ("s3://bucket/../b", "'../b'", "single slashes"),
        ("s3://bucket/a/..", "'a/..'", "single slashes"),
        ("s3://bucket/a b", "'a b'", "single slashes"),
        ("s3://bucket/" + "a" * 257, "aaa", "1 to 256"),
        ("s3://bucket?regoin=eu", "'regoin'", "'region'"),
        ("s3://bucket?multipart=yes", "'multipart'", "credentials_file"),
        ("s3://bucket?region=a&region=b", "'region'", "once"),
        ("s3://bucket?region=", "''", "letters"),
        ("s3://bucket?endpoint=127.0.0.1:8333", "'127.0.0.1:8333'", "http://HOST:PORT"),
        ("s3://bucket?endpoint=ftp://host", "'ftp://host'", "http://HOST:PORT"),
        ("s3://bucket?endpoint=http://host:x", "malformed", "http://HOST:PORT"),
        ("s3://bucket?endpoint=http://host:0", "host:0", "http://HOST:PORT"),
        ("s3://bucket?endpoint=http://host/path", "path", "nothing behind it"),
        ("s3://bucket?access_key_env=HOME", "access_key_env", "both"),
        ("s3://bucket?secret_key_env=HOME", "secret_key_env", "both"),
        ("s3://bucket?session_token_env=HOME", "session_token_env", "access_key_env"),
        ("s3://bucket?access_key_env=KVTIER_NOT_SET&secret_key_env=HOME", "KVTIER_NOT_SET", "not set"),
        ("s3://bucket?access_key_env=HOME&secret_key_env=HOME&credentials_file=/a", "both", "one of them"),
        ("s3://bucket?credentials_file=/not/there", "/not/there", "No such file"),
        ("s3://bucket?credentials_file=", "credentials_file", "path"),
        ("s3://bucket?profile=mine", "'mine'", "credentials_file"),
        ("s3://bucket?ca_file=/not/there", "/not/there", "No such file"),
        ("s3://bucket?ca_file=/etc/hostname&endpoint=http://host", "ca_file", "https://"),
    ],
)
def test_what_it_does_not(url: str, named: str, allowed: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_s3_url(url)
    message = str(caught.value)
    assert named in message
    assert allowed in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "url",
    [
        f"s3://AKIA:{SECRET.replace('/', '%2F')}@bucket",
        "s3://hunter2@bucket",
        f"s3://bucket?secret_access_key={SECRET}",
        f"s3://bucket?endpoint=http://key:{SECRET.replace('/', '')}@host",
        f"s3://bucket?access_key_env=HOME&secret_key_env={SECRET}",
        "s3://bucket?access_key_env=HOME&secret_key_env=hunter2Secret",
    ],
)
def test_what_may_be_a_secret_is_not_repeated(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_s3_url(url)
    assert "hunter2" not in str(caught.value)
    assert "ecret" not in str(caught.value).replace("secret_", "")
    assert caught.value.__cause__ is None


def test_credentials_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "AKIA")
    monkeypatch.setenv("MY_SECRET", SECRET)
    monkeypatch.setenv("MY_TOKEN", "token")
    config = parse_s3_url("s3://bucket?access_key_env=MY_KEY&secret_key_env=MY_SECRET")
    credentials = config.credentials()
    assert credentials is not None
    assert (credentials.access_key, credentials.secret_key, credentials.session_token) == ("AKIA", SECRET, None)
    assert SECRET not in repr(config) + config.place + repr(credentials)
    credentials = parse_s3_url(
        "s3://bucket?access_key_env=MY_KEY&secret_key_env=MY_SECRET&session_token_env=MY_TOKEN"
    ).credentials()
    assert credentials is not None
    assert credentials.session_token == "token"
    assert parse_s3_url("s3://bucket").credentials() is None, "obstore finds them"


def test_credentials_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text(
        f"[default]\naws_access_key_id = A\naws_secret_access_key = {SECRET}%x\n"
        "[mine]\naws_access_key_id=B\naws_secret_access_key=s\naws_session_token=t\n[half]\naws_access_key_id=C\n"
    )
    config = parse_s3_url(f"s3://bucket?credentials_file={file}")
    credentials = config.credentials()
    assert credentials is not None
    assert (credentials.access_key, credentials.secret_key, credentials.session_token) == ("A", f"{SECRET}%x", None)
    credentials = parse_s3_url(f"s3://bucket?credentials_file={file}&profile=mine").credentials()
    assert credentials is not None
    assert (credentials.access_key, credentials.secret_key, credentials.session_token) == ("B", "s", "t")
    with pytest.raises(ConfigurationError, match="no aws_secret_access_key"):
        parse_s3_url(f"s3://bucket?credentials_file={file}&profile=half")
    with pytest.raises(ConfigurationError, match="no profile 'yours'"):
        parse_s3_url(f"s3://bucket?credentials_file={file}&profile=yours")
    file.write_text("[default]\naws_access_key_id = D\naws_secret_access_key = another\n")
    credentials = config.credentials()
    assert credentials is not None
    assert credentials.access_key == "D", "what was renewed is read again"
    file.write_text(f"{SECRET}\n")
    with pytest.raises(ConfigurationError, match="not a file of credentials") as caught:
        config.credentials()
    assert SECRET not in str(caught.value)
