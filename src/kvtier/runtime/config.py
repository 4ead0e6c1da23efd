"""The settings of kvtier, validated before anything starts.

They come as one flat mapping (vLLM's `kv_connector_extra_config`). vLLM's own keys mean here what they mean there;
ours come on top. Every mistake is one ConfigurationError that names the key, the value and what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kvtier.errors import ConfigurationError
from kvtier.manager.breaker import DEFAULT_COOLDOWN_S, DEFAULT_FAILURES, DEFAULT_MAX_COOLDOWN_S
from kvtier.manager.hints import DEFAULT_PIN_SHARE
from kvtier.policy import POLICIES
from kvtier.runtime.disk import DiskSettings, parse_disk
from kvtier.runtime.tiers import SharedSettings, TierSettings, parse_tiers
from kvtier.runtime.values import checked, flag, name, number, one_of, parse_size, text, whole
from kvtier.tiers.ram_persist import slots_within

DEFAULT_POLICY = "adaptive"
"""What adapters and the command line use unless told otherwise: see docs/decisions/eviction.md."""


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
    pin_share: float = DEFAULT_PIN_SHARE
    """Of the blocks in RAM, that requests may pin by a hint."""
    pool_dir: str | None = None
    """Folder of the filesystem to take the RAM from, for example one mounted with huge pages."""
    ram_persist: str | None = None
    """Name of a file, in `pool_dir` or shared memory, that keeps the RAM's blocks for the next process."""
    copy_threads: int = 2
    """Threads of one rank that copy."""
    record_trace: str | None = None
    """A file for the engine's traffic as a trace with salted ids: see `kvtier.runtime.recorder`."""
    debug: bool = False
    """Recount the books whenever no transfer is open."""
    weights_id: str | None = None
    """Says which weights these are to the tiers that persist or are shared, instead of a look at their files."""
    tiers: tuple[TierSettings, ...] = ()
    """Behind the RAM, the nearest first; at most one of them is a disk."""

    @property
    def disk(self) -> DiskSettings | None:
        """The tier on disk, if there is one."""
        return next((tier for tier in self.tiers if isinstance(tier, DiskSettings)), None)

    @property
    def shared(self) -> tuple[SharedSettings, ...]:
        """The shared tiers, in their order."""
        return tuple(tier for tier in self.tiers if isinstance(tier, SharedSettings))


_KEYS: dict[str, tuple[str, Callable[[Any, str], Any]]] = {
    "ram": ("ram_bytes", parse_size),
    "cpu_bytes_to_use": ("ram_bytes", parse_size),
    "policy": ("policy", one_of(sorted(POLICIES))),
    "eviction_policy": ("policy", one_of(sorted(POLICIES))),
    "store_threshold": ("store_threshold", whole(0)),
    "max_tracker_size": ("max_tracker_size", whole(1)),
    "blocks_per_chunk": ("blocks_per_chunk", whole(1)),
    "block_size": ("block_size", whole(1)),
    "offload_prompt_only": ("offload_prompt_only", flag),
    "deadline_s": ("deadline_s", number("0 (never wait) or more seconds", lambda number: number >= 0)),
    "store_timeout_s": ("store_timeout_s", number("more than 0 seconds", lambda number: number > 0)),
    "prefill_tokens_per_s": (
        "prefill_tokens_per_s",
        number("0 (never compare) or more tokens a second", lambda number: number >= 0),
    ),
    "breaker_failures": ("breaker_failures", whole(0)),
    "breaker_cooldown_s": (
        "breaker_cooldown_s",
        number(
            f"more than 0 and at most {DEFAULT_MAX_COOLDOWN_S:g} seconds",
            lambda number: 0 < number <= DEFAULT_MAX_COOLDOWN_S,
        ),
    ),
    "pin_share": ("pin_share", number("0 (no hint pins) to 1 (all blocks)", lambda number: 0 <= number <= 1)),
    "pool_dir": ("pool_dir", text),
    "ram_persist": ("ram_persist", name),
    "copy_threads": ("copy_threads", whole(1)),
    "record_trace": ("record_trace", text),
    "debug": ("debug", flag),
    "disk": ("disk", parse_disk),
    "tiers": ("tiers", parse_tiers),
    "weights_id": ("weights_id", text),
}
_EXCLUSIVE = (("ram", "cpu_bytes_to_use"), ("policy", "eviction_policy"), ("blocks_per_chunk", "block_size"))
_NOT_SETTINGS = frozenset({"spec_name", "spec_module_path", "self_describing_kv_events"})
"""Keys of vLLM's own that pass through."""
_OWN_PREFIX = "kvtier."
"""Keys with this prefix pass through too: what an adapter tells itself."""


def parse_config(settings: Mapping[str, Any]) -> Config:
    """The checked configuration in `settings` (not modified). Starts nothing.

    Raises ConfigurationError for an unknown key (with the nearest known one), a bad value, two keys that say the
    same thing, and a missing RAM size.
    """
    passing = {key for key in settings if key in _NOT_SETTINGS or key.startswith(_OWN_PREFIX)}
    fields = checked({key: value for key, value in settings.items() if key not in passing}, _KEYS)
    for one, other in _EXCLUSIVE:
        if one in settings and other in settings:
            raise ConfigurationError(f"{one!r} and {other!r} say the same thing; set one of them")
    if "ram_bytes" not in fields:
        raise ConfigurationError("the setting 'ram' is missing; allowed: a size such as \"8GiB\"")
    _put_disk_among_tiers(fields)
    return Config(**fields)


def _put_disk_among_tiers(fields: dict[str, Any]) -> None:
    """`disk` is a short form of the first entry of `tiers`, and its `weights_id` is the engine's. Changes `fields`."""
    disk, tiers = fields.pop("disk", None), fields.get("tiers", ())
    if disk is not None:
        if any(isinstance(tier, DiskSettings) for tier in tiers):
            raise ConfigurationError("'disk' and a disk:// URL in 'tiers' say the same thing; set one of them")
        tiers = fields["tiers"] = (disk, *tiers)
        if [tier.admission for tier in tiers].count("ram_eviction") > 1:
            raise ConfigurationError("disk.admission and that of a tier in 'tiers' are 'ram_eviction'; allowed: of one")
    of_disk = next((tier.weights_id for tier in tiers if isinstance(tier, DiskSettings)), None)
    if of_disk is not None:
        if "weights_id" in fields:
            raise ConfigurationError("'weights_id' and that of the disk say the same thing; set one of them")
        fields["weights_id"] = of_disk


def num_slots_for(config: Config, slot_bytes: int) -> int:
    """How many slots fit into the configured RAM. Raises ConfigurationError if not even one does."""
    num_slots = config.ram_bytes // slot_bytes
    if config.ram_persist is not None:  # its records count too
        num_slots = slots_within(config.ram_bytes, slot_bytes)
    if num_slots < 1:
        raise ConfigurationError(f"ram is {config.ram_bytes} bytes; one offloaded block needs {slot_bytes}")
    return num_slots
