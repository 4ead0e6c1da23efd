"""What an engine says of its identity when it starts, in one line of its log; and what two of these differ in.

The engine says it itself, since it works much of it out while it starts (KV groups, layouts, attention backend): who
computed it once more from the same settings might come to another end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from kvtier.errors import ConfigurationError
from kvtier.runtime.identity import SCHEME, namespace_of

LINE_PREFIX = "kvtier: identity "
"""In the log, right before the record."""
ABSENT = "(absent)"
"""Stands for a field that one of two engines does not have."""


class IdentityRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose blocks one engine makes, as far as tiers below RAM ask."""

    namespace: str | None
    """64 hexadecimal digits; None: nobody could tell, and there are no tiers below RAM."""
    fields: dict[str, Any]
    """What `namespace` is the digest of."""
    reason: str | None = None
    """Why there is no namespace."""
    wanted_tiers: list[str]
    """Below RAM, by the settings."""
    tiers: list[str]
    """Those that are in use."""
    epochs: dict[str, int] = {}
    """Of the weights, for the shared ones, as the settings have them."""
    weights_may_change: bool = False
    """The engine is made to be given other weights while it runs: shared tiers share nothing with others."""
    model: str
    rank: int = 0
    """Among data-parallel engines."""
    kvtier: str
    """Version."""
    scheme: int = SCHEME
    """Of the digest."""

    def to_json(self) -> str:
        """One line."""
        return json.dumps(msgspec.to_builtins(self), separators=(",", ":"))

    @property
    def is_well(self) -> bool:
        """Whether all tiers are in use that the user wants."""
        return set(self.wanted_tiers) <= set(self.tiers)

    @property
    def flat_fields(self) -> dict[str, Any]:
        """Path of each single value that must be the same to share blocks, and the value. A path is, for example,
        `model.rope_parameters.rope_theta`."""
        epochs = {f"epochs.{name}": epoch for name, epoch in self.epochs.items()}
        return {"kvtier.scheme": self.scheme, **dict(_flatten("", self.fields)), **epochs}


def read_record(text: str, name: str) -> IdentityRecord:
    """The record in `text`: a record as JSON, or the log of an engine (the last one in it). `name` says where it is.

    Raises ConfigurationError, in one line, if there is none.
    """
    lines = [line for line in text.splitlines() if LINE_PREFIX in line]
    source = lines[-1].partition(LINE_PREFIX)[2] if lines else text
    try:
        value, _ = json.JSONDecoder().raw_decode(source.strip())
        record = msgspec.convert(value, IdentityRecord)
    except (ValueError, RecursionError) as error:  # msgspec's ValidationError is a ValueError
        what = "its identity line is broken" if lines else "neither a log with an identity line nor a saved identity"
        raise ConfigurationError(f"{name}: {what} ({_first_line(error)})") from None
    is_ours = record.scheme == SCHEME and record.namespace is not None
    if is_ours and namespace_of(record.fields).hex() != record.namespace:
        raise ConfigurationError(f"{name}: the namespace is not that of the fields: the file has been changed")
    return record


def differences(one: IdentityRecord, other: IdentityRecord) -> list[tuple[str, Any, Any]]:
    """(path, value of `one`, value of `other`) of what keeps two engines from sharing blocks, by path."""
    ours, theirs = one.flat_fields, other.flat_fields
    paths = dict.fromkeys([*ours, *theirs])
    for name in one.epochs.keys() ^ other.epochs.keys():
        del paths[f"epochs.{name}"]  # a tier that only one of them has
    pairs = ((path, ours.get(path, ABSENT), theirs.get(path, ABSENT)) for path in paths)
    return [(path, value, its) for path, value, its in pairs if value != its or type(value) is not type(its)]


def _flatten(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key in value:
            yield from _flatten(f"{path}.{key}" if path else str(key), value[key])
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for number, item in enumerate(value):
            yield from _flatten(f"{path}[{number}]", item)
    else:
        yield path, value


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
