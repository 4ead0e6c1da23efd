"""The settings of the disk tier: what stands under `"disk"` in the configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from kvtier.errors import ConfigurationError
from kvtier.manager.cascade import CascadeWhen
from kvtier.runtime.values import Checks, checked, flag, number, one_of, parse_size, text, whole

ADMISSIONS = {"always": CascadeWhen.STORED, "reuse": CascadeWhen.REUSED, "ram_eviction": CascadeWhen.EVICTED}
"""What goes to the disk: every block that is stored, those that were loaded again, or those that leave RAM."""


class DiskSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the disk tier, checked."""

    paths: tuple[str, ...]
    """Folders, best on a device each; made where they are missing."""
    capacity_bytes: int
    """All that kvtier may take in `paths`, all data-parallel ranks and all models together."""
    min_free_bytes: int = 1 << 30
    """Nothing new is written while the filesystem has less than this free."""
    admission: str = "always"
    direct: bool = True
    """Past the page cache, where the filesystem has that."""
    num_threads: int | None = None
    """I/O threads; None: by the size of a block."""
    stop_flush_s: float = 2.0
    """How long a stop may take to write what is only in RAM."""
    weights_id: str | None = None
    """Says which weights these are, instead of a look at their files."""


def _paths(value: Any, key: str) -> tuple[str, ...]:
    paths = [value] if isinstance(value, str) else value
    if not isinstance(paths, list | tuple) or not paths or not all(isinstance(path, str) and path for path in paths):
        raise ConfigurationError(f"{key} is {value!r}; allowed: a folder, or a list of folders")
    if len(set(map(os.path.realpath, paths))) < len(paths):
        raise ConfigurationError(f"{key} is {value!r}; allowed: different folders")
    return tuple(paths)


def _size_or_nothing(value: Any, key: str) -> int:
    return 0 if value in (0, "0") and not isinstance(value, bool) else parse_size(value, key)


_KEYS: Checks = {
    "path": ("paths", _paths),
    "capacity": ("capacity_bytes", parse_size),
    "min_free": ("min_free_bytes", _size_or_nothing),
    "admission": ("admission", one_of(list(ADMISSIONS))),
    "direct": ("direct", flag),
    "threads": ("num_threads", whole(1)),
    "stop_flush_s": ("stop_flush_s", number("0 (write nothing) or more seconds", lambda seconds: seconds >= 0)),
    "weights_id": ("weights_id", text),
}

DISK_OPTIONS = frozenset(_KEYS)


def parse_disk(value: Any, key: str = "disk") -> DiskSettings:
    """The checked settings in the mapping `value` (not modified). Looks at no folder.

    Raises ConfigurationError for an unknown key, a bad value, and a missing path or capacity.
    """
    if not isinstance(value, Mapping):
        raise ConfigurationError(f'{key} is {value!r}; allowed: {{"path": FOLDER, "capacity": "20GiB"}}')
    fields = checked(value, _KEYS, f"{key}.")
    for name, example in (("path", "a folder"), ("capacity", 'a size such as "20GiB"')):
        if name not in value:
            raise ConfigurationError(f"the setting '{key}.{name}' is missing; allowed: {example}")
    return DiskSettings(**fields)


def check_folders(settings: DiskSettings, key: str = "disk") -> None:
    """Raises ConfigurationError if a folder is none, or can be neither written nor made. Changes nothing."""
    for path in settings.paths:
        existing = os.path.abspath(path)
        while not os.path.lexists(existing):
            existing = os.path.dirname(existing)
        if not os.path.isdir(existing):
            raise ConfigurationError(f"{key}.path is {path!r}: {existing} is not a folder")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise ConfigurationError(f"{key}.path is {path!r}: {existing} is not writable by this user")
