"""URLs that name a shared store, `SCHEME://PLACE?OPTION=VALUE&...`: what the kinds of them have in common.

Every error is a ConfigurationError in one line, without what could be a secret: a URL may have one in it by mistake.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlsplit

from kvtier.errors import ConfigurationError

Check = Callable[[str, str], Any]
"""Makes a value of the text of an option, whose name comes second. Raises ConfigurationError."""
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhdw]?)")
_UNITS = {"": 1, "B": 1, **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)}}
_UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([A-Za-z]*)")


@dataclass(frozen=True, slots=True)
class UrlKind:
    """The URLs of one kind of store."""

    called: str
    """With its article, for example `"a Valkey URL"`."""
    schemes: tuple[str, ...]
    form: str
    """What stands after `SCHEME://`, for example `"HOST:PORT"`."""
    credentials: str
    """How credentials are given, for example `"password_env=VARIABLE"`: in the URL itself a password is refused."""
    options: Mapping[str, tuple[str, Check]]
    """By name: the field that its value is for, and its check."""

    def split(self, url: str) -> SplitResult:
        """Raises ConfigurationError for another scheme, what is no URL, and a password in it."""
        scheme, has_scheme, _ = url.partition("://")
        if not has_scheme or scheme not in self.schemes:
            shown = repr(scheme) if has_scheme else "missing"
            raise ConfigurationError(f"the scheme of {self.called} is {shown}; allowed: {', '.join(self.schemes)}")
        try:
            parts = urlsplit(url)
        except ValueError:
            raise ConfigurationError(f"a {scheme}:// URL is malformed; allowed: {scheme}://{self.form}") from None
        if parts.password is not None:
            raise ConfigurationError(f"a {scheme}:// URL has a password in it; allowed: {self.credentials}")
        return parts

    def host_and_port(self, parts: SplitResult, default_port: int) -> tuple[str, int]:
        """Raises ConfigurationError where there is no host, or the port is not one."""
        scheme = parts.scheme
        if not parts.hostname:
            raise ConfigurationError(f"a {scheme}:// URL names no host; allowed: {scheme}://{self.form}")
        try:
            port = default_port if parts.port is None else parts.port
        except ValueError:
            raise ConfigurationError(f"the port in a {scheme}:// URL is not one; allowed: 1 to 65535") from None
        if not port:
            raise ConfigurationError(f"the port in a {scheme}:// URL is 0; allowed: 1 to 65535")
        return parts.hostname, port

    def values(self, query: str) -> dict[str, Any]:
        """The values of the options in `query`, by field. Raises ConfigurationError for an unknown option, one that
        stands twice, and what a check refuses."""
        values: dict[str, Any] = {}
        for name, text in parse_qsl(query, keep_blank_values=True):
            if name not in self.options:
                near = difflib.get_close_matches(name, self.options, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(sorted(self.options))}"
                raise ConfigurationError(f"unknown option {name!r} in {self.called}; {hint}")
            field, check = self.options[name]
            if field in values:
                raise ConfigurationError(f"option {name!r} stands twice in {self.called}; allowed: once")
            values[field] = check(text, name)
        return values


# -- checks of options -----------------------------------------------------------------------------------------


def whole(text: str, name: str, least: int, most: int) -> int:
    """A whole number."""
    if not re.fullmatch(r"\d{1,9}", text) or not least <= int(text) <= most:
        raise ConfigurationError(f"{name} is {text!r}; allowed: a whole number from {least} to {most}")
    return int(text)


def duration_s(text: str, name: str) -> int:
    """Seconds, rounded up; a letter behind the number says what it counts."""
    match = _DURATION.fullmatch(text)
    seconds = float(match[1]) * _SECONDS[match[2]] if match else math.nan
    if not 1 <= seconds <= 100 * 365 * 86400:
        raise ConfigurationError(f'{name} is {text!r}; allowed: 1 second or more, such as "3600", "90m", "12h", "1d"')
    return math.ceil(seconds)


def size_bytes(text: str, name: str) -> int:
    """Bytes, 0 allowed; a unit behind the number says what it counts."""
    match = _SIZE.fullmatch(text)
    if not match or match[2] not in _UNITS or float(match[1]) * _UNITS[match[2]] >= 2**63:
        raise ConfigurationError(f'{name} is {text!r}; allowed: bytes, or a size such as "512MiB", "8GiB", "20GB"')
    return int(float(match[1]) * _UNITS[match[2]])


def filled(text: str, name: str) -> str:
    """A name or path."""
    if not text:
        raise ConfigurationError(f"{name} is empty; allowed: a name or path")
    return text


# -- credentials -----------------------------------------------------------------------------------------------


def secret_in_env(variable: str, option: str) -> str:
    """The value of an environment variable, which `option` named. Raises ConfigurationError where there is none."""
    secret = os.environ.get(variable)
    if not secret:
        raise ConfigurationError(f"{option} is {variable!r}: that variable is not set")
    return secret


def secret_lines(path: str, option: str, most: int = 1000) -> list[str]:
    """The first lines of the file at `path`, which `option` named. Raises ConfigurationError if it cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            return [line.rstrip("\r\n") for line in islice(file, most)]
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigurationError(f"{option} is {path!r}: {why}") from None


def secret_in_file(path: str, option: str) -> str:
    """The first line of the file at `path`. Raises ConfigurationError where it cannot be read, or is empty."""
    secret = next(iter(secret_lines(path, option, 1)), "")
    if not secret:
        raise ConfigurationError(f"{option} is {path!r}: its first line is empty")
    return secret
