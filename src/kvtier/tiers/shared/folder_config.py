"""A folder of a shared filesystem as a store: `file:///PATH?capacity=SIZE&...`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from urllib.parse import unquote

from kvtier.errors import ConfigurationError
from kvtier.tiers.shared.urls import UrlKind, size_bytes

MIN_CAPACITY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FolderConfig:
    """A folder, and how much of it. Made by `parse_folder_url`."""

    path: str
    """Absolute. The folder is made if missing, the one that it is in is not."""
    capacity_bytes: int
    """What all machines together may take there. Each keeps to what it was told."""
    min_free_bytes: int = 1 << 30
    """Nothing new is written while the filesystem has less than this free."""

    @property
    def place(self) -> str:
        """For people."""
        return f"file://{self.path}"


def parse_folder_url(url: str) -> FolderConfig:
    """The folder that `url` names. Touches nothing. Raises ConfigurationError, in one line, for an unknown scheme or
    option, a bad size, a path that is not absolute, no capacity."""
    parts = _URLS.split(url)
    if parts.netloc:
        raise ConfigurationError(f"a file:// URL names the host {parts.netloc!r}; allowed: file:///ABSOLUTE/PATH")
    path = unquote(parts.path).rstrip("/")
    if not path.startswith("/") or "\0" in path:
        raise ConfigurationError(f"the path of a file:// URL is {path!r}; allowed: file:///ABSOLUTE/PATH")
    values = _URLS.values(parts.query)
    if "capacity_bytes" not in values:
        raise ConfigurationError('a file:// URL has no capacity; allowed: capacity=SIZE, such as "200GiB"')
    return FolderConfig(path, **values)


def _capacity(text: str, name: str) -> int:
    size = size_bytes(text, name)
    if size < MIN_CAPACITY_BYTES:
        raise ConfigurationError(f"{name} is {text!r}; allowed: 1MiB or more")
    return size


_URLS = UrlKind(
    called="a file URL",
    schemes=("file",),
    form="/ABSOLUTE/PATH?capacity=SIZE",
    credentials="none, the filesystem knows who may",
    options={"capacity": ("capacity_bytes", _capacity), "min_free": ("min_free_bytes", size_bytes)},
)
FOLDER_OPTIONS = frozenset(_URLS.options)
"""What a URL may name behind its `?`."""
assert {field for field, _ in _URLS.options.values()} <= {field.name for field in fields(FolderConfig)}
