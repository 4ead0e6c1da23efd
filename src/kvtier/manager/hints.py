"""What a request says about its own future, in `kv_transfer_params`: see docs/decisions/hints.md.

`kvtier.priority` (int, -3..3), `kvtier.ttl_s` (seconds), `kvtier.pin`, `kvtier.no_store`, `kvtier.ended` (booleans).
A hint that is unknown or malformed is ignored; the request is served as if it had not been given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "kvtier."
DEFAULT_PIN_SHARE = 0.25
"""Of the blocks, that hints may pin."""
MAX_PRIORITY = 3
MAX_TTL_S = 366 * 86_400.0
MAX_KINDS = 32
"""So many kinds of ignored hints are told of; the names come from clients."""
_SHOWN_LENGTH = 60


@dataclass(frozen=True, slots=True)
class Hints:
    """The valid hints of one request. What was not said is None or False."""

    priority: int | None = None
    """Of the blocks that it uses: higher ones leave later. 0 is what blocks without a hint have."""
    ttl_s: float | None = None
    """Once they have not been used for so long, its blocks go first."""
    pin: bool | None = None
    """True: they stay, as far as the share for pins goes. False: they are like others again."""
    no_store: bool = False
    """Nothing of it is stored."""
    ended: bool = False
    """Its conversation will not go on."""


def _is_priority(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -MAX_PRIORITY <= value <= MAX_PRIORITY


def _is_ttl(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 <= value <= MAX_TTL_S


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _shown(value: Any) -> str:
    """Short, whatever a client has sent."""
    if isinstance(value, str):
        return repr(value[:_SHOWN_LENGTH])
    if value is None or isinstance(value, float) or (isinstance(value, int) and value.bit_length() < 64):
        return repr(value)
    return f"of type {type(value).__name__}"


_KNOWN: dict[str, tuple[Callable[[Any], bool], str]] = {
    "priority": (_is_priority, f"a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}"),
    "ttl_s": (_is_ttl, f"a number of seconds from 0 to {MAX_TTL_S:.0f}"),
    "pin": (_is_flag, "true or false"),
    "no_store": (_is_flag, "true or false"),
    "ended": (_is_flag, "true or false"),
}


class HintReader:
    """Reads the hints of requests, and keeps what there is to say about those that it ignores: once a kind."""

    def __init__(self) -> None:
        self.num_ignored = 0
        self._told: set[str] = set()
        self._warnings: list[str] = []

    def read(self, params: Any) -> Hints | None:
        """The hints in a request's `kv_transfer_params`, None if there are none. Nothing a client sends raises."""
        if not isinstance(params, Mapping):
            return None
        found: dict[str, Any] = {}
        for key, value in params.items():
            if not isinstance(key, str) or not key.startswith(PREFIX):
                continue
            name = key[len(PREFIX) :]
            is_valid, allowed = _KNOWN.get(name, (None, ""))
            if is_valid is None:
                self._ignore(
                    f"hint {key[:_SHOWN_LENGTH]!r} is unknown; known: {', '.join(map(PREFIX.__add__, _KNOWN))}"
                )
            elif is_valid(value):
                found[name] = value
            else:
                self._ignore(f"hint {key!r} is {_shown(value)}; allowed: {allowed}", kind=name)
        return Hints(**found) if found else None

    def _ignore(self, warning: str, kind: str = "") -> None:
        self.num_ignored += 1
        kind = kind or warning
        if kind not in self._told and len(self._told) < MAX_KINDS:
            self._told.add(kind)
            self._warnings.append(warning)

    def take_warnings(self) -> list[str]:
        """Drains what has not been told yet. The caller owns the list."""
        if not self._warnings:
            return []
        warnings, self._warnings = self._warnings, []
        return warnings
