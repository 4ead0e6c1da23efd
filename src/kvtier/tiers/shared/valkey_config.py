"""Where a Valkey or Redis server is, and how to log in: `valkey://HOST:PORT/DATABASE?OPTION=VALUE&...`.

Of a cluster several nodes may be named, `valkey://HOST:PORT,HOST:PORT/...`: one is enough, if that is up at the start.
Credentials stand in environment variables or files, never in the URL.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import unquote

from kvtier.errors import ConfigurationError
from kvtier.tiers.shared.urls import UrlKind, duration_s, filled, secret_in_env, secret_in_file, whole

DEFAULT_PORT = 6379
Address = tuple[str, int]
"""Host and port."""
_PREFIX = re.compile(r"[A-Za-z0-9_.:{}/-]{1,64}")
_PLACE = re.compile(
    r"(?P<before>(?P<scheme>[^/?#]*://)(?:[^/?#]*@)?)(?P<hosts>[^/?#@]*)(?P<behind>[/?#].*)?", re.DOTALL
)
_CREDENTIALS = "password_env=VARIABLE or password_file=PATH"


@dataclass(frozen=True, slots=True)
class ValkeyConfig:
    """A server or cluster, and what to keep there. Made by `parse_valkey_url`; no secret is in it."""

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
    more_addresses: tuple[Address, ...] = ()
    """Of further nodes of a cluster, any of which says where the others are."""

    @property
    def addresses(self) -> tuple[Address, ...]:
        """At least one."""
        return ((self.host, self.port), *self.more_addresses)

    @property
    def place(self) -> str:
        """For people. No credentials."""
        hosts = ",".join(map(shown, self.addresses))
        return f"{'valkeys' if self.tls else 'valkey'}://{hosts}/{self.database}"

    def password(self) -> str | None:
        """Reads it. None: there is none. Raises ConfigurationError if it cannot be read."""
        if self.password_env:
            return secret_in_env(self.password_env, "password_env")
        return secret_in_file(self.password_file, "password_file") if self.password_file else None


def parse_valkey_url(url: str) -> ValkeyConfig:
    """The server that `url` names. Contacts nobody; reads what holds the password, to see that it can.

    Raises ConfigurationError, in one line and without what could be a secret, for an unknown scheme or option, a bad
    number, a password in the URL, a variable that is not set, a file that cannot be read.
    """
    url, more_urls = _split_hosts(url)
    parts = _KIND.split(url)
    host, port = _KIND.host_and_port(parts, DEFAULT_PORT)
    values: dict[str, Any] = {"tls": parts.scheme in ("valkeys", "rediss"), "host": host, "port": port}
    values["more_addresses"] = tuple(_KIND.host_and_port(_KIND.split(more), DEFAULT_PORT) for more in more_urls)
    if parts.path not in ("", "/"):
        values["database"] = whole(parts.path[1:], "the database", 0, 1 << 20)
    if parts.username:
        values["username"] = unquote(parts.username)
    values.update(_KIND.values(parts.query))
    config = ValkeyConfig(**values)
    _check(config)
    config.password()
    return config


def shown(address: Address) -> str:
    """For people."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _split_hosts(url: str) -> tuple[str, list[str]]:
    """The URL with the first of its hosts alone, and URLs of the others, which are nothing but that."""
    if not (found := _PLACE.fullmatch(url)):
        return url, []
    first, *others = found["hosts"].split(",")
    return found["before"] + first + (found["behind"] or ""), [found["scheme"] + other for other in others]


def _check(config: ValkeyConfig) -> None:
    if config.password_env and config.password_file:
        raise ConfigurationError("password_env and password_file are both given; allowed: one of them")
    if config.username and not (config.password_env or config.password_file):
        raise ConfigurationError(f"user {config.username!r} has no password; allowed: {_CREDENTIALS}")
    for name in ("ca_file", "cert_file", "key_file"):
        path = getattr(config, name)
        if path and not config.tls:
            raise ConfigurationError(f"{name} is {path!r}; allowed: with valkeys:// or rediss://")
        if path and not os.access(path, os.R_OK):
            raise ConfigurationError(f"{name} is {path!r}: there is no such file, or this user may not read it")
    if config.key_file and not config.cert_file:
        raise ConfigurationError(f"key_file is {config.key_file!r}; allowed: together with cert_file")


def _prefix(text: str, name: str) -> str:
    if not _PREFIX.fullmatch(text):
        raise ConfigurationError(f"{name} is {text!r}; allowed: 1 to 64 letters, digits and _ . : / {{ }} -")
    return text if text.endswith(":") else text + ":"


_KIND = UrlKind(
    called="a Valkey URL",
    schemes=("valkey", "redis", "valkeys", "rediss"),
    form="HOST:PORT",
    credentials=_CREDENTIALS,
    options={
        "ttl": ("ttl_s", duration_s),
        "prefix": ("prefix", _prefix),
        **{name: (name, filled) for name in ("username", "password_env", "password_file")},
        **{name: (name, filled) for name in ("ca_file", "cert_file", "key_file")},
    },
)
assert {field for field, _ in _KIND.options.values()} <= {field.name for field in fields(ValkeyConfig)}
VALKEY_OPTIONS = frozenset(_KIND.options)
