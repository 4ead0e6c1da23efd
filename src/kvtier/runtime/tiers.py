"""The tiers below RAM by URL: what stands in the list `"tiers"` of the configuration, and the kinds of shared stores.

    "tiers": ["disk:///nvme/kv?capacity=200GiB", "valkey://cache:6379?ttl=1d&connections=8"]

A new kind of shared store is one entry of `STORES`.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import msgspec

from kvtier.errors import ConfigurationError
from kvtier.runtime.disk import ADMISSIONS, DISK_OPTIONS, DiskSettings, check_folders, parse_disk
from kvtier.runtime.values import Checks, checked, number, one_of, parse_size, whole
from kvtier.tiers.shared import (
    FolderStore,
    MooncakeStore,
    S3Store,
    SharedConfig,
    ValkeyStore,
    parse_folder_url,
    parse_mooncake_url,
    parse_s3_url,
    parse_valkey_url,
)
from kvtier.tiers.shared.compressor import MODES, check_compression
from kvtier.tiers.shared.config import MIN_ABSENT_S
from kvtier.tiers.shared.folder_config import FOLDER_OPTIONS
from kvtier.tiers.shared.mooncake_config import MOONCAKE_OPTIONS
from kvtier.tiers.shared.s3_config import S3_OPTIONS
from kvtier.tiers.shared.store import Store
from kvtier.tiers.shared.valkey_config import VALKEY_OPTIONS

DISK = "disk"
MAX_EPOCH = 2**32
"""Of what an operator may set: resets count on from there."""


@dataclass(frozen=True, slots=True)
class StoreKind:
    """A kind of shared store."""

    name: str
    """In metrics and in the log."""
    parse: Callable[[str], Any]
    """From a URL with the store's own options alone to the store's configuration, comparable by `==`. Contacts nobody.
    Raises ConfigurationError in one line, without what could be a secret."""
    make: Callable[[Any], Store]
    """From that configuration to the store. Contacts nobody. Raises ConfigurationError where a package is missing."""
    options: Collection[str]
    """Names of the store's own options."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `SharedConfig` that begin with another value for this kind."""


_VALKEY = StoreKind(
    name="valkey",
    parse=parse_valkey_url,
    make=ValkeyStore,
    options=VALKEY_OPTIONS,
)
_S3 = StoreKind(
    name="s3",
    parse=parse_s3_url,
    make=S3Store,
    options=S3_OPTIONS,
    # one request a block, each of which may take a tenth of a second
    defaults={
        "connect_timeout_s": 2.0,
        "lookup_timeout_s": 1.0,
        "transfer_timeout_s": 5.0,
        "queue_timeout_s": 10.0,
    },
)
_MOONCAKE = StoreKind(
    name="mooncake",
    parse=parse_mooncake_url,
    make=MooncakeStore,
    options=MOONCAKE_OPTIONS,
    # its client polls while it waits: each call takes a core
    defaults={"num_connections": 2},
)
_FOLDER = StoreKind(
    name="file",
    parse=parse_folder_url,
    make=FolderStore,
    options=FOLDER_OPTIONS,
    # one question a key
    defaults={"lookup_timeout_s": 2.0},
)
STORES: dict[str, StoreKind] = {
    **dict.fromkeys(("valkey", "valkeys", "redis", "rediss"), _VALKEY),
    "s3": _S3,
    "mooncake": _MOONCAKE,
    "file": _FOLDER,
}
"""By the scheme of their URLs."""


class SharedSettings(msgspec.Struct, frozen=True):
    """A shared tier, checked. Nothing in it is a secret."""

    scheme: str
    """Of `STORES`."""
    store: Any
    """What `StoreKind.parse` has made of the URL."""
    limits: Mapping[str, Any] = {}
    """Fields of `SharedConfig` that are not to have their defaults."""
    admission: str = "always"
    epoch: int = 0
    """Of the weights that the namespace names, on all machines: another one expires all that was stored."""
    stop_flush_s: float = 2.0

    def make_store(self) -> Store:
        """The store, not connected. Raises ConfigurationError where a package is missing."""
        return STORES[self.scheme].make(self.store)

    def config(self, namespace: bytes, element_bytes: int = 2) -> SharedConfig:
        """For a tier of this namespace, whose KV cache has elements of `element_bytes`."""
        limits = {**STORES[self.scheme].defaults, **self.limits}
        return SharedConfig(namespace, element_bytes=element_bytes, **limits)


TierSettings = DiskSettings | SharedSettings

_seconds = number("more than 0 seconds", lambda seconds: seconds > 0)
_LIMITS: Checks = {
    "connections": ("num_connections", whole(1)),
    **{f"{name}_timeout_s": (f"{name}_timeout_s", _seconds) for name in ("connect", "lookup", "transfer", "queue")},
    "present_s": ("present_s", _seconds),
    "absent_s": ("absent_s", number(f"{MIN_ABSENT_S} or more seconds", lambda seconds: seconds >= MIN_ABSENT_S)),
    "max_keys": ("max_keys", whole(1)),
    "max_storing": ("max_storing_bytes", parse_size),
    "compression": ("compression", one_of(MODES)),
}
_OTHERS: Checks = {
    "admission": ("admission", one_of(list(ADMISSIONS))),
    "epoch": ("epoch", whole(0, MAX_EPOCH)),
    "stop_flush_s": ("stop_flush_s", number("0 (write nothing) or more seconds", lambda seconds: seconds >= 0)),
}
SHARED_OPTIONS: Checks = {**_LIMITS, **_OTHERS}
"""What every shared tier can be told in its URL."""


def parse_tiers(value: Any, key: str = "tiers") -> tuple[TierSettings, ...]:
    """The checked settings in a list of URLs (not modified), the nearest tier first. Contacts nobody.

    Raises ConfigurationError, naming the entry and never repeating a URL, for what is no list of URLs, an unknown
    scheme or option, a bad value, two disks, and a store that stands twice.
    """
    if not isinstance(value, list | tuple) or not all(isinstance(url, str) for url in value):
        raise ConfigurationError(f'{key} is no list of URLs; allowed: for example ["valkey://HOST:PORT"]')
    tiers = tuple(_parse_url(url, f"{key}[{i}]") for i, url in enumerate(value))
    disks = [i for i, tier in enumerate(tiers) if isinstance(tier, DiskSettings)]
    if len(disks) > 1:
        raise ConfigurationError(
            f"{key}[{disks[1]}] is a second disk; allowed: one, which may have several folders (path=FOLDER, repeated)"
        )
    _refuse_twice(tiers, key)
    return tiers


def tier_names(tiers: Sequence[TierSettings]) -> list[str]:
    """Of each its kind, and a number from the second of a kind on. The caller owns the list."""
    seen: Counter[str] = Counter()
    names = []
    for tier in tiers:
        name = DISK if isinstance(tier, DiskSettings) else STORES[tier.scheme].name
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return names


def check_tiers(tiers: Iterable[TierSettings], disk_key: str = "disk") -> None:
    """Raises ConfigurationError for a folder that cannot be used, and where a store's package is missing. Changes
    nothing, contacts nobody."""
    for tier in tiers:
        if isinstance(tier, DiskSettings):
            check_folders(tier, disk_key)
        else:
            check_compression(tier.limits.get("compression", "off"), tier.make_store())


def _refuse_twice(tiers: tuple[TierSettings, ...], key: str) -> None:
    for i, tier in enumerate(tiers):
        for j, other in enumerate(tiers[:i]):
            if isinstance(tier, SharedSettings) and isinstance(other, SharedSettings) and tier.store == other.store:
                raise ConfigurationError(f"{key}[{j}] and {key}[{i}] are the same store; allowed: once")
            if tier.admission == other.admission == "ram_eviction":
                raise ConfigurationError(
                    f"{key}[{j}].admission and {key}[{i}].admission are 'ram_eviction'; allowed: of one tier"
                )


def _parse_url(url: str, key: str) -> TierSettings:
    scheme, has_scheme, rest = url.partition("://")
    if not has_scheme:
        raise ConfigurationError(f"{key} is no URL: it has no '://'; allowed: {_forms()}")
    if scheme == DISK:
        return _parse_disk_url(rest, key)
    kind = STORES.get(scheme)
    if kind is None:
        near = difflib.get_close_matches(scheme, [DISK, *STORES], n=1)
        hint = f"did you mean '{near[0]}://'?" if near else f"allowed: {_forms()}"
        raise ConfigurationError(f"{key} has the unknown scheme '{scheme}://'; {hint}")
    place, query, own, common = rest.partition("?")[0], rest.partition("?")[2], [], {}
    for part in query.split("&") if query else ():
        name, _, text = part.partition("=")
        if name in common:
            raise ConfigurationError(f"option {name!r} stands twice in {key}; allowed: once")
        if name in SHARED_OPTIONS:
            common[name] = unquote(text)
        elif name in kind.options:
            own.append(part)
        else:
            raise ConfigurationError(_unknown_option(part, {*SHARED_OPTIONS, *kind.options}, key))
    limits = checked({name: text for name, text in common.items() if name in _LIMITS}, _LIMITS, f"{key}.")
    others = checked({name: text for name, text in common.items() if name in _OTHERS}, _OTHERS, f"{key}.")
    try:
        store = kind.parse(f"{scheme}://{place}" + ("?" + "&".join(own) if own else ""))
    except ConfigurationError as error:
        raise ConfigurationError(f"{key}: {error}") from None
    return SharedSettings(scheme, store, limits, **others)


def _parse_disk_url(rest: str, key: str) -> DiskSettings:
    """`disk://` + `rest`: a folder, and the keys of "disk" as options; `path` may stand any number of times."""
    place, _, query = rest.partition("?")
    if place and not place.startswith("/"):
        raise ConfigurationError(
            f"{key} is a disk:// URL with two slashes before the folder; allowed: disk:///FOLDER, with three"
        )
    paths = [unquote(place)] if place else []
    settings: dict[str, Any] = {}
    for part in query.split("&") if query else ():
        name, text = part.partition("=")[0], unquote(part.partition("=")[2])
        if name not in DISK_OPTIONS:
            raise ConfigurationError(_unknown_option(part, DISK_OPTIONS, key))
        if name == "path":
            paths.append(text)
        elif name in settings:
            raise ConfigurationError(f"option {name!r} stands twice in {key}; allowed: once")
        else:
            settings[name] = {"true": True, "false": False}.get(text, text) if name == "direct" else text
    return parse_disk({**settings, "path": paths} if paths else settings, key)


def _unknown_option(part: str, options: Collection[str], key: str) -> str:
    name, has_value, _ = part.partition("=")
    near = difflib.get_close_matches(name, options, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(sorted(options))}"
    # what does not look like a name may be a piece of a secret
    shown = repr(name) if has_value and name.isidentifier() else "one that is no NAME=VALUE"
    return f"unknown option in {key}: {shown}; {hint}"


def _forms() -> str:
    return ", ".join(f"{scheme}://" for scheme in (DISK, *STORES))
