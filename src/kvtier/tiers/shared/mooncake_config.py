"""Where a Mooncake Store is, and what this process adds to it: `mooncake://MASTER_HOST:PORT?OPTION=VALUE&...`."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from kvtier.errors import ConfigurationError
from kvtier.tiers.shared.urls import UrlKind, filled, size_bytes

DEFAULT_PORT = 50051
PROTOCOLS = ("tcp", "rdma")
P2P = "P2PHANDSHAKE"
MIN_SEGMENT_BYTES = 16 << 20
_HOST = re.compile(r"[A-Za-z0-9_.:\[\]-]{1,255}")


@dataclass(frozen=True, slots=True)
class MooncakeConfig:
    """A master, and how this process takes part. Made by `parse_mooncake_url`."""

    host: str
    """Of the master."""
    port: int = DEFAULT_PORT
    protocol: str = "tcp"
    """Over which blocks are moved: `"tcp"` or `"rdma"`."""
    metadata: str = P2P
    """The metadata server of Mooncake's transfer engine; `"P2PHANDSHAKE"`: none is needed."""
    local_host: str = ""
    """How others reach this machine; empty: by the address from which it reaches the master."""
    segment_bytes: int = 0
    """RAM that this process lends to the store, beside its own pool; 0: none."""
    buffer_bytes: int = 16 << 20
    """The client's own buffer. Blocks do not pass through it."""
    device: str = ""
    """RDMA devices, with commas between them; empty: Mooncake chooses."""

    @property
    def place(self) -> str:
        """For people."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"mooncake://{host}:{self.port}"


def parse_mooncake_url(url: str) -> MooncakeConfig:
    """The store that `url` names. Contacts nobody.

    Raises ConfigurationError, in one line, for an unknown scheme or option, a bad number, a password in the URL.
    """
    parts = _URLS.split(url)
    host, port = _URLS.host_and_port(parts, DEFAULT_PORT)
    if parts.path not in ("", "/"):
        raise ConfigurationError(f"a mooncake:// URL has the path {parts.path!r}; allowed: none")
    if parts.username is not None:
        raise ConfigurationError("a mooncake:// URL has a user in it; allowed: none, Mooncake has no login")
    return MooncakeConfig(host, port, **_URLS.values(parts.query))


def _protocol(text: str, name: str) -> str:
    if text not in PROTOCOLS:
        raise ConfigurationError(f"{name} is {text!r}; allowed: {', '.join(PROTOCOLS)}")
    return text


def _host(text: str, name: str) -> str:
    if not _HOST.fullmatch(text):
        raise ConfigurationError(f"{name} is {text!r}; allowed: a host name or address")
    return text


def _segment(text: str, name: str) -> int:
    size = size_bytes(text, name)
    if 0 < size < MIN_SEGMENT_BYTES:
        raise ConfigurationError(f"{name} is {text!r}; allowed: 0, or 16MiB or more")
    return size


_URLS = UrlKind(
    called="a Mooncake URL",
    schemes=("mooncake",),
    form="MASTER_HOST:PORT",
    credentials="none, Mooncake has no login",
    options={
        "protocol": ("protocol", _protocol),
        "metadata": ("metadata", filled),
        "local_host": ("local_host", _host),
        "segment": ("segment_bytes", _segment),
        "buffer": ("buffer_bytes", size_bytes),
        "device": ("device", filled),
    },
)
MOONCAKE_OPTIONS = frozenset(_URLS.options)
"""What a URL may name behind its `?`."""
assert {field for field, _ in _URLS.options.values()} <= {field.name for field in fields(MooncakeConfig)}
