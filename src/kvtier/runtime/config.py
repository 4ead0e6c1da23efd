"""The settings of kvtier, validated before anything starts.

They come as one flat mapping (vLLM's `kv_connector_extra_config`). vLLM's own keys mean here what they mean there;
ours come on top. Every mistake is one ConfigurationError that names the key, the value and what is allowed.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kvtier.errors import ConfigurationError
from kvtier.manager.breaker import DEFAULT_COOLDOWN_S, DEFAULT_FAILURES, DEFAULT_MAX_COOLDOWN_S
from kvtier.policy import POLICIES

DEFAULT_POLICY = "adaptive"
"""What adapters and the command line use unless told otherwise: see docs/decisions/eviction.md."""

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of one engine, checked."""

    ram_bytes: int
    """RAM for the blocks of one engine, all ranks together."""
    policy: str = DEFAULT_POLICY
    store_threshold: int = 0
    """A block is stored when it was offered this often; 0 and 1 store all."""
    max_tracker_size: int = 64_000
    """Keys that the reuse filter remembers."""
    blocks_per_chunk: int | None = None
    """Engine blocks in one offloaded block; None: one, or what `block_size` says."""
    block_size: int | None = None
    """Tokens in one offloaded block, instead of `blocks_per_chunk`."""
    offload_prompt_only: bool = True
    """Do not store what was generated."""
    deadline_s: float = 5.0
    """A request waits at most this long for the cache; 0: it never does."""
    store_timeout_s: float = 30.0
    """A store that takes longer is given up."""
    prefill_tokens_per_s: float | None = None
    """Prompt tokens that the engine computes a second; None: to be measured; 0: not to be compared with waiting."""
    breaker_failures: int = DEFAULT_FAILURES
    """Failed transfers in a row after which a tier is left alone for a while; 0: never."""
    breaker_cooldown_s: float = DEFAULT_COOLDOWN_S
    """How long, the first time; twice as long whenever the tier then fails again, up to a limit."""
    pool_dir: str | None = None
    """Folder of the filesystem to take the RAM from, for example one mounted with huge pages."""
    copy_threads: int = 2
    """Threads of one rank that copy."""
    record_trace: str | None = None
    """A file for the engine's traffic as a trace with salted ids: see `kvtier.runtime.recorder`."""
    debug: bool = False
    """Recount the books whenever no transfer is open."""


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


def _whole(minimum: int) -> Callable[[Any, str], int]:
    def check(value: Any, key: str) -> int:
        number = value
        if isinstance(number, str) and re.fullmatch(r"-?\d+", number):
            number = int(number)
        if isinstance(number, bool) or not isinstance(number, int) or number < minimum:
            raise ConfigurationError(f"{key} is {value!r}; allowed: a whole number of {minimum} or more")
        return number

    return check


def _number(allowed: str, is_allowed: Callable[[float], bool]) -> Callable[[Any, str], float]:
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


def _flag(value: Any, key: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{key} is {value!r}; allowed: true, false")
    return value


def _policy(value: Any, key: str) -> str:
    if value not in POLICIES:
        raise ConfigurationError(f"{key} is {value!r}; allowed: {', '.join(sorted(POLICIES))}")
    return str(value)


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"{key} is {value!r}; allowed: a path")
    return value


_KEYS: dict[str, tuple[str, Callable[[Any, str], Any]]] = {
    "ram": ("ram_bytes", parse_size),
    "cpu_bytes_to_use": ("ram_bytes", parse_size),
    "policy": ("policy", _policy),
    "eviction_policy": ("policy", _policy),
    "store_threshold": ("store_threshold", _whole(0)),
    "max_tracker_size": ("max_tracker_size", _whole(1)),
    "blocks_per_chunk": ("blocks_per_chunk", _whole(1)),
    "block_size": ("block_size", _whole(1)),
    "offload_prompt_only": ("offload_prompt_only", _flag),
    "deadline_s": ("deadline_s", _number("0 (never wait) or more seconds", lambda number: number >= 0)),
    "store_timeout_s": ("store_timeout_s", _number("more than 0 seconds", lambda number: number > 0)),
    "prefill_tokens_per_s": (
        "prefill_tokens_per_s",
        _number("0 (never compare) or more tokens a second", lambda number: number >= 0),
    ),
    "breaker_failures": ("breaker_failures", _whole(0)),
    "breaker_cooldown_s": (
        "breaker_cooldown_s",
        _number(
            f"more than 0 and at most {DEFAULT_MAX_COOLDOWN_S:g} seconds",
            lambda number: 0 < number <= DEFAULT_MAX_COOLDOWN_S,
        ),
    ),
    "pool_dir": ("pool_dir", _text),
    "copy_threads": ("copy_threads", _whole(1)),
    "record_trace": ("record_trace", _text),
    "debug": ("debug", _flag),
}
_EXCLUSIVE = (("ram", "cpu_bytes_to_use"), ("policy", "eviction_policy"), ("blocks_per_chunk", "block_size"))
_NOT_SETTINGS = frozenset({"spec_name", "spec_module_path", "self_describing_kv_events", "kvtier.one_process"})
"""Keys that pass through: vLLM's own, and what the connector tells its spec."""


def parse_config(settings: Mapping[str, Any]) -> Config:
    """The checked configuration in `settings` (not modified). Starts nothing.

    Raises ConfigurationError for an unknown key (with the nearest known one), a bad value, two keys that say the
    same thing, and a missing RAM size.
    """
    fields: dict[str, Any] = {}
    for key, value in settings.items():
        if key in _NOT_SETTINGS:
            continue
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(sorted(_KEYS))}"
            raise ConfigurationError(f"unknown setting {key!r}; {hint}")
        field, check = _KEYS[key]
        fields[field] = check(value, key)
    for one, other in _EXCLUSIVE:
        if one in settings and other in settings:
            raise ConfigurationError(f"{one!r} and {other!r} say the same thing; set one of them")
    if "ram_bytes" not in fields:
        raise ConfigurationError("the setting 'ram' is missing; allowed: a size such as \"8GiB\"")
    return Config(**fields)


def num_slots_for(config: Config, slot_bytes: int) -> int:
    """How many slots fit into the configured RAM. Raises ConfigurationError if not even one does."""
    num_slots = config.ram_bytes // slot_bytes
    if num_slots < 1:
        raise ConfigurationError(f"ram is {config.ram_bytes} bytes; one offloaded block needs {slot_bytes}")
    return num_slots
