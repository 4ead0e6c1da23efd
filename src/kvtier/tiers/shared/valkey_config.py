"""Where a Valkey or Redis server is, and how to log in: `valkey://HOST:PORT/DATABASE?OPTION=VALUE&...`.

Credentials stand in environment variables or files, never in the URL.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from kvtier.errors import ConfigurationError

SCHEMES = ("valkey", "redis", "valkeys", "rediss")
DEFAULT_PORT = 6379
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhdw]?)")
_PREFIX = re.compile(r"[A-Za-z0-9_.:{}/-]{1,64}")


@dataclass(frozen=True, slots=True)
class ValkeyConfig:
    """A server, and what to keep there. Made by `parse_valkey_url`; `repr` shows no secret, for none is in it."""

    host: str
    port: int = DEFAULT_PORT
    tls: bool = False
    database: int = 0
    username: str = ""
    password_env: str = ""
    """Name of the environment variable that has the password."""
    password_file: str = ""
    """File whose first line is the password. Read anew for every connection, so it may change."""
    prefix: str = "kvtier:"
    """What the names of all keys begin with. Nothing else on the server is touched."""
    ttl_s: int = 0
    """The server forgets a block that was not used for so long; 0: when it wants to."""
    ca_file: str = ""
    """Certificates that the server's has to come from; empty: those of the system."""
    cert_file: str = ""
    key_file: str = ""

    @property
    def place(self) -> str:
        """For people. No credentials."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'valkeys' if self.tls else 'valkey'}://{host}:{self.port}/{self.database}"

    def password(self) -> str | None:
        """Reads it. None: there is none. Raises ConfigurationError if it cannot be read."""
        if self.password_env:
            password = os.environ.get(self.password_env)
            if not password:
                raise ConfigurationError(f"password_env is {self.password_env!r}: that variable is not set")
            return password
        if not self.password_file:
            return None
        try:
            with open(self.password_file, encoding="utf-8") as file:
                password = file.readline().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ConfigurationError(f"password_file is {self.password_file!r}: {why}") from None
        if not password:
            raise ConfigurationError(f"password_file is {self.password_file!r}: its first line is empty")
        return password


def parse_valkey_url(url: str) -> ValkeyConfig:
    """The server that `url` names. Contacts nobody; reads what holds the password, to see that it can.

    Raises ConfigurationError, in one line and without what could be a secret, for an unknown scheme or option, a bad
    number, a password in the URL, a variable that is not set, a file that cannot be read.
    """
    scheme, has_scheme, _ = url.partition("://")
    if not has_scheme or scheme not in SCHEMES:
        shown = repr(scheme) if has_scheme else "missing"
        raise ConfigurationError(f"the scheme of a Valkey URL is {shown}; allowed: {', '.join(SCHEMES)}")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigurationError(f"a {scheme}:// URL is malformed; allowed: {scheme}://HOST:PORT") from None
    if parts.password is not None:
        raise ConfigurationError(
            f"a {scheme}:// URL has a password in it; allowed: password_env=VARIABLE or password_file=PATH"
        )
    values: dict[str, Any] = {"tls": scheme in ("valkeys", "rediss"), "host": parts.hostname or ""}
    if not values["host"]:
        raise ConfigurationError(f"a {scheme}:// URL names no host; allowed: {scheme}://HOST:PORT")
    try:
        values["port"] = DEFAULT_PORT if parts.port is None else parts.port
    except ValueError:
        raise ConfigurationError(f"the port in a {scheme}:// URL is not one; allowed: 1 to 65535") from None
    if not values["port"]:
        raise ConfigurationError(f"the port in a {scheme}:// URL is 0; allowed: 1 to 65535")
    if parts.path not in ("", "/"):
        values["database"] = _whole(parts.path[1:], "the database", 0, 1 << 20)
    if parts.username:
        values["username"] = unquote(parts.username)
    values.update(_options(parts.query))
    config = ValkeyConfig(**values)
    _check(config)
    config.password()
    return config


def _options(query: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name not in _OPTIONS:
            near = difflib.get_close_matches(name, _OPTIONS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(sorted(_OPTIONS))}"
            raise ConfigurationError(f"unknown option {name!r} in a Valkey URL; {hint}")
        field, check = _OPTIONS[name]
        if field in values:
            raise ConfigurationError(f"option {name!r} stands twice in a Valkey URL; allowed: once")
        values[field] = check(text, name)
    return values


def _check(config: ValkeyConfig) -> None:
    if config.password_env and config.password_file:
        raise ConfigurationError("password_env and password_file are both given; allowed: one of them")
    if config.username and not (config.password_env or config.password_file):
        raise ConfigurationError(
            f"user {config.username!r} has no password; allowed: password_env=VARIABLE or password_file=PATH"
        )
    for name in ("ca_file", "cert_file", "key_file"):
        path = getattr(config, name)
        if path and not config.tls:
            raise ConfigurationError(f"{name} is {path!r}; allowed: with valkeys:// or rediss://")
        if path and not os.access(path, os.R_OK):
            raise ConfigurationError(f"{name} is {path!r}: there is no such file, or this user may not read it")
    if config.key_file and not config.cert_file:
        raise ConfigurationError(f"key_file is {config.key_file!r}; allowed: together with cert_file")


def _whole(text: str, name: str, least: int, most: int) -> int:
    if not re.fullmatch(r"\d{1,9}", text) or not least <= int(text) <= most:
        raise ConfigurationError(f"{name} is {text!r}; allowed: a whole number from {least} to {most}")
    return int(text)


def _duration(text: str, name: str) -> int:
    match = _DURATION.fullmatch(text)
    seconds = float(match[1]) * _SECONDS[match[2]] if match else math.nan
    if not 1 <= seconds <= 100 * 365 * 86400:
        raise ConfigurationError(f'{name} is {text!r}; allowed: 1 second or more, such as "3600", "90m", "12h", "1d"')
    return math.ceil(seconds)


def _prefix(text: str, name: str) -> str:
    if not _PREFIX.fullmatch(text):
        raise ConfigurationError(f"{name} is {text!r}; allowed: 1 to 64 letters, digits and _ . : / {{ }} -")
    return text if text.endswith(":") else text + ":"


def _text(text: str, name: str) -> str:
    if not text:
        raise ConfigurationError(f"{name} is empty; allowed: a name or path")
    return text


_OPTIONS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "ttl": ("ttl_s", _duration),
    "prefix": ("prefix", _prefix),
    **{name: (name, _text) for name in ("username", "password_env", "password_file")},
    **{name: (name, _text) for name in ("ca_file", "cert_file", "key_file")},
}
assert {field for field, _ in _OPTIONS.values()} <= {field.name for field in fields(ValkeyConfig)}
