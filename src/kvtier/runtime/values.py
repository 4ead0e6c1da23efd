"""Checks of single values that a user has set. Each returns the value, or raises one ConfigurationError in one line
that names the key, the value and what is allowed."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvtier.errors import ConfigurationError

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(value: Any, key: str = "size") -> int:
    """Bytes in `value`: an integer, or a number with a unit such as "512MiB", "8GiB" or "20GB".

    Raises ConfigurationError, naming `key`, for anything else and for sizes that are not positive.
    """
    size = math.nan
    if isinstance(value, str) and (match := _SIZE.fullmatch(value)) and match[2] in _UNITS:
        size = float(match[1]) * _UNITS[match[2]]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        size = float(value)
    if not 0 < size < math.inf:
        raise ConfigurationError(f'{key} is {value!r}; allowed: bytes, or a size such as "512MiB", "8GiB", "20GB"')
    return int(size)


def whole(minimum: int, maximum: int | None = None) -> Callable[[Any, str], int]:
    """A whole number of `minimum` or more, and up to `maximum` where there is one; also as text."""
    allowed = f"of {minimum} or more" if maximum is None else f"from {minimum} to {maximum}"

    def check(value: Any, key: str) -> int:
        number = value
        if isinstance(number, str) and re.fullmatch(r"-?\d{1,20}", number):
            number = int(number)
        is_whole = isinstance(number, int) and not isinstance(number, bool)
        if not is_whole or number < minimum or (maximum is not None and number > maximum):
            raise ConfigurationError(f"{key} is {value!r}; allowed: a whole number {allowed}")
        return int(number)

    return check


def number(allowed: str, is_allowed: Callable[[float], bool]) -> Callable[[Any, str], float]:
    """A finite number for which `is_allowed` holds; `allowed` says so in words."""

    def check(value: Any, key: str) -> float:
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not (math.isfinite(number) and is_allowed(number)):
            raise ConfigurationError(f"{key} is {value!r}; allowed: {allowed}")
        return number

    return check


def flag(value: Any, key: str) -> bool:
    """True or false, and nothing that counts as either."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{key} is {value!r}; allowed: true, false")
    return value


def text(value: Any, key: str) -> str:
    """A text with something in it, for example a path."""
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"{key} is {value!r}; allowed: a path")
    return value


def name(value: Any, key: str) -> str:
    """What can be part of a file's name anywhere."""
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", value):
        raise ConfigurationError(
            f"{key} is {value!r}; allowed: a name of up to 64 letters, digits, '.', '_' and '-', not beginning with "
            "'.' or '-'"
        )
    return value


def one_of(allowed: Sequence[str]) -> Callable[[Any, str], str]:
    """One of these words."""

    def check(value: Any, key: str) -> str:
        if value not in allowed:
            raise ConfigurationError(f"{key} is {value!r}; allowed: {', '.join(allowed)}")
        return str(value)

    return check


Checks = Mapping[str, tuple[str, Callable[[Any, str], Any]]]
"""What the user calls a setting -> the field that it becomes, and its check."""


def checked(settings: Mapping[str, Any], checks: Checks, prefix: str = "") -> dict[str, Any]:
    """The fields that `settings` (not modified) stand for. `prefix` stands before each key in messages.

    Raises ConfigurationError for an unknown key, with the nearest known one, and for a value that its check refuses.
    """
    fields: dict[str, Any] = {}
    for key, value in settings.items():
        if key not in checks:
            near = difflib.get_close_matches(str(key), checks, n=1)
            hint = f"did you mean {prefix + near[0]!r}?" if near else f"allowed: {', '.join(sorted(checks))}"
            raise ConfigurationError(f"unknown setting {prefix + str(key)!r}; {hint}")
        field, check = checks[key]
        fields[field] = check(value, prefix + key)
    return fields
