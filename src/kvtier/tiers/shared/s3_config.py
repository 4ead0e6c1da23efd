"""Where an S3 bucket is, what speaks S3, and how to log in: `s3://BUCKET/PREFIX?OPTION=VALUE&...`.

Credentials stand in environment variables or files, never in the URL. Where the URL names none, the usual `AWS_*`
variables or the machine's role are used, as obstore finds them.
"""

from __future__ import annotations

import configparser
import os
import re
from dataclasses import dataclass, fields
from urllib.parse import urlsplit

from kvtier.errors import ConfigurationError
from kvtier.tiers.shared.urls import UrlKind, filled, secret_in_env, secret_lines

DEFAULT_PREFIX = "kvtier"
DEFAULT_PROFILE = "default"
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
_SEGMENT = r"(?!\.\.?(?:/|$))[A-Za-z0-9_.=-]+"
_PREFIX = re.compile(rf"(?=.{{1,256}}$){_SEGMENT}(?:/{_SEGMENT})*")
_REGION = re.compile(r"[A-Za-z0-9-]{1,64}")
_CREDENTIALS = "access_key_env=VARIABLE and secret_key_env=VARIABLE, or credentials_file=PATH"


@dataclass(frozen=True, slots=True)
class S3Credentials:
    """What requests are signed with. Secret: `repr` shows nothing of it."""

    access_key: str
    secret_key: str
    session_token: str | None = None

    def __repr__(self) -> str:
        return "S3Credentials(...)"


@dataclass(frozen=True, slots=True)
class S3Config:
    """A bucket, and what to keep there. Made by `parse_s3_url`; `repr` shows no secret, for none is in it."""

    bucket: str
    prefix: str = DEFAULT_PREFIX
    """What the names of all objects begin with, before a slash. Nothing else in the bucket is touched."""
    region: str = ""
    """Empty: that of the environment, else `us-east-1`."""
    endpoint: str = ""
    """`http://HOST:PORT` or `https://HOST`; empty: that of the environment, else Amazon's for the region."""
    access_key_env: str = ""
    """Names of the environment variables that have the access key, its secret, and the token of a session."""
    secret_key_env: str = ""
    session_token_env: str = ""
    credentials_file: str = ""
    """A file as `~/.aws/credentials`. Read anew for every connection, so it may change."""
    profile: str = DEFAULT_PROFILE
    """The section of `credentials_file` to use."""
    ca_file: str = ""
    """Certificates that the server's may come from, besides those of the system."""

    @property
    def place(self) -> str:
        """For people. No credentials."""
        where = f" at {self.endpoint}" if self.endpoint else ""
        return f"s3://{self.bucket}/{self.prefix}{where}"

    @property
    def names_credentials(self) -> bool:
        """Whether obstore is not to find some."""
        return bool(self.access_key_env or self.credentials_file)

    def credentials(self) -> S3Credentials | None:
        """Reads them. None: obstore is to find some. Raises ConfigurationError if they cannot be read."""
        if self.access_key_env:
            token = secret_in_env(self.session_token_env, "session_token_env") if self.session_token_env else None
            return S3Credentials(
                secret_in_env(self.access_key_env, "access_key_env"),
                secret_in_env(self.secret_key_env, "secret_key_env"),
                token,
            )
        return self._credentials_in_file() if self.credentials_file else None

    def certificates(self) -> bytes | None:
        """Reads `ca_file`, if there is one. Raises ConfigurationError if it cannot be read."""
        if not self.ca_file:
            return None
        try:
            with open(self.ca_file, "rb") as file:
                return file.read()
        except OSError as error:
            raise ConfigurationError(f"ca_file is {self.ca_file!r}: {error.strerror}") from None

    def _credentials_in_file(self) -> S3Credentials:
        where = f"credentials_file is {self.credentials_file!r}"
        parser = configparser.RawConfigParser()
        try:
            parser.read_string("\n".join(secret_lines(self.credentials_file, "credentials_file")))
        except configparser.Error:  # its text has lines of the file
            raise ConfigurationError(f"{where}: it is not a file of credentials, as ~/.aws/credentials") from None
        if not parser.has_section(self.profile):
            raise ConfigurationError(f"{where}: it has no profile {self.profile!r}")
        section = parser[self.profile]
        for name in ("aws_access_key_id", "aws_secret_access_key"):
            if not section.get(name):
                raise ConfigurationError(f"{where}: profile {self.profile!r} has no {name}")
        return S3Credentials(
            section["aws_access_key_id"], section["aws_secret_access_key"], section.get("aws_session_token") or None
        )


def parse_s3_url(url: str) -> S3Config:
    """The bucket that `url` names. Contacts nobody; reads what holds the credentials, to see that it can.

    Raises ConfigurationError, in one line and without what could be a secret, for an unknown scheme or option, a name
    that no bucket has, credentials in the URL, a variable that is not set, a file that cannot be read.
    """
    parts = _KIND.split(url)
    if "@" in parts.netloc:
        raise ConfigurationError(f"an s3:// URL has a user in it; allowed: {_CREDENTIALS}")
    if ":" in parts.netloc:
        raise ConfigurationError("an s3:// URL has a port in it; allowed: s3://BUCKET/PREFIX?endpoint=http://HOST:PORT")
    if not _BUCKET.fullmatch(parts.netloc):
        raise ConfigurationError(
            f"the bucket is {parts.netloc!r}; allowed: 3 to 63 letters, digits and . _ -, no . _ - at an end"
        )
    prefix = parts.path.strip("/") or DEFAULT_PREFIX
    if not _PREFIX.fullmatch(prefix):
        raise ConfigurationError(
            f"the prefix is {prefix!r}; allowed: 1 to 256 letters, digits and _ . = -, with single slashes between"
        )
    config = S3Config(parts.netloc, prefix, **_KIND.values(parts.query))
    _check(config)
    config.credentials()
    config.certificates()
    return config


def _check(config: S3Config) -> None:
    if bool(config.access_key_env) != bool(config.secret_key_env):
        given, other = ("access_key_env", "secret_key_env")[:: 1 if config.access_key_env else -1]
        raise ConfigurationError(f"{given} is given without {other}; allowed: both")
    if config.session_token_env and not config.access_key_env:
        raise ConfigurationError("session_token_env is given alone; allowed: with access_key_env and secret_key_env")
    if config.access_key_env and config.credentials_file:
        raise ConfigurationError("access_key_env and credentials_file are both given; allowed: one of them")
    if config.profile != DEFAULT_PROFILE and not config.credentials_file:
        raise ConfigurationError(f"profile is {config.profile!r}; allowed: together with credentials_file")
    if config.ca_file and config.endpoint.startswith("http:"):
        raise ConfigurationError(f"ca_file is {config.ca_file!r}; allowed: with an endpoint that is https://")


def _endpoint(text: str, name: str) -> str:
    allowed = "allowed: http://HOST:PORT or https://HOST:PORT"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ConfigurationError(f"{name} is malformed; {allowed}") from None
    if "@" in parts.netloc:
        raise ConfigurationError(f"{name} has a user in it; allowed: {_CREDENTIALS}")
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigurationError(f"{name} is {text!r}; {allowed}")
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ConfigurationError(f"{name} is {text!r}; {allowed}, with nothing behind it")
    return f"{parts.scheme}://{parts.netloc}"


def _region(text: str, name: str) -> str:
    if not _REGION.fullmatch(text):
        raise ConfigurationError(f"{name} is {text!r}; allowed: letters, digits and -")
    return text


def _variable(text: str, name: str) -> str:
    """Not repeated if it may be the secret itself, written here by mistake."""
    if os.environ.get(text) is None and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", text):
        raise ConfigurationError(f"{name} does not name an environment variable that is set; allowed: one that is")
    return text


_KIND = UrlKind(
    called="an S3 URL",
    schemes=("s3",),
    form="BUCKET/PREFIX",
    credentials=_CREDENTIALS,
    options={
        "region": ("region", _region),
        "endpoint": ("endpoint", _endpoint),
        **{name: (name, _variable) for name in ("access_key_env", "secret_key_env", "session_token_env")},
        **{name: (name, filled) for name in ("credentials_file", "profile", "ca_file")},
    },
)
assert {field for field, _ in _KIND.options.values()} <= {field.name for field in fields(S3Config)}
S3_OPTIONS = frozenset(_KIND.options)
