"""What one seed stands for: sizes, speeds, traffic and faults. Drawn for their corners, not for their averages."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from random import Random

from kvtier.keys import OffloadKey, make_offload_key
from kvtier.policy import POLICIES

BLOCK_BYTES = 1_000
"""What a block counts for in the speed of a transfer; the bytes that really move are fewer."""


Prompt = tuple[OffloadKey, ...]


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Probabilities. 0 everywhere: nothing goes wrong."""

    # of each job on each rank
    fail_before: float = 0.0
    fail_at_end: float = 0.0
    stall_before: float = 0.0
    stall_during: float = 0.0
    corrupt: float = 0.0
    """A stored slot goes bad: every load of it fails, as a checksum would make it, until it is written again."""
    # of each report of a rank
    delay: float = 0.0
    drop: float = 0.0
    """Stores only: that a load has ended is never lost while its worker lives."""
    duplicate: float = 0.0
    lie: float = 0.0
    """A success that is reported as a failure."""
    # of each step
    reorder: float = 0.0
    abort: float = 0.0
    preempt: float = 0.0
    reset: float = 0.0
    new_weights: float = 0.0
    """A reset after which the same keys stand for other bytes."""
    death: float = 0.0
    """All workers die, and new ones take their place."""
    lag: float = 0.0
    """Somebody tells the manager an earlier time than it knows."""
    jump: float = 0.0
    """Much time passes at once."""

    def scaled(self, factor: float) -> FaultRates:
        """Every rate times `factor`."""
        return FaultRates(**{field.name: getattr(self, field.name) * factor for field in fields(self)})


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that a seed decides before the first step."""

    policy: str
    num_slots: int
    store_threshold: int
    max_tracker_size: int
    filter_outside: bool
    """The reuse filter is `FilterReusedOffloadingManager` around the manager, instead of the manager's own."""
    deadline_s: float
    store_timeout_s: float
    recompute_blocks_per_s: float | None
    """What the manager is told of the engine's speed, so that it declines waits that are not worth it."""
    breaker_failures: int
    """Failures in a row that shut the tier off; 0: it has no circuit breaker."""
    breaker_cooldown_s: float
    num_ranks: int
    num_lanes: int
    slice_blocks: int
    load_latency_s: float
    store_latency_s: float
    load_bytes_per_s: float
    store_bytes_per_s: float
    step_s: float
    num_engine_blocks: int
    engine_forgets: float
    """Probability that other traffic takes the engine's idle blocks, each step."""
    blocks_per_step: int
    max_running: int
    max_requests: int
    arrivals: float
    """Probability of a new request, each step."""
    cascades: float
    """Probability that somebody else begins to read blocks of the tier, each step."""
    stores_lag: float
    """Probability that a step does not offer what it computed: the next one does."""
    flush_on_preempt: bool
    """The engine waits for a preempted request's stores, as vLLM does, instead of keeping their blocks."""
    prompts: tuple[Prompt, ...]
    """Paths through one tree of prefixes, the most popular first."""
    faults: FaultRates


_ALL_FAULTS = FaultRates(
    fail_before=0.03,
    fail_at_end=0.03,
    stall_before=0.03,
    stall_during=0.03,
    corrupt=0.03,
    delay=0.06,
    drop=0.02,
    duplicate=0.04,
    lie=0.02,
    reorder=0.2,
    abort=0.02,
    preempt=0.02,
    reset=0.004,
    new_weights=0.004,
    death=0.004,
    lag=0.01,
    jump=0.01,
)


_WORSE_TOGETHER = (
    ("delay", "death"),
    ("delay", "drop", "death", "duplicate"),
    ("stall_before", "stall_during", "jump"),
    ("stall_during", "reset", "new_weights"),
    ("delay", "new_weights", "abort", "reorder"),
    ("fail_at_end", "corrupt", "duplicate", "delay"),
    ("preempt", "abort", "stall_before", "delay"),
)
"""Kinds that need each other to do harm."""


BREAKER_MAX_COOLDOWN_S = 4.0


def draw_scenario(rng: Random, policy: str | None = None) -> Scenario:
    """A scenario from `rng` (advanced); `policy` instead of the drawn one."""
    depth = rng.choice((3, 6, 12))
    prompts = _draw_prompts(rng, num_prompts=rng.randint(2, 30), depth=depth)
    num_slots = rng.choice((1, 2, 4, 8, 12, 16, 24, 32, 48, 64))
    return Scenario(
        num_slots=num_slots,
        store_threshold=rng.choice((0, 0, 0, 0, 2, 3)),
        max_tracker_size=rng.choice((4, 64, 64_000)),
        filter_outside=rng.random() < 0.3,
        deadline_s=rng.choice((0.0, 0.05, 0.3, 1.0, 5.0)),
        store_timeout_s=rng.choice((0.2, 0.5, 2.0, 30.0)),
        recompute_blocks_per_s=rng.choice((None, None, 10.0, 200.0)),
        breaker_failures=rng.choice((0, 0, 1, 3)),
        breaker_cooldown_s=rng.choice((0.05, 0.5)),
        num_ranks=rng.choice((1, 1, 2, 3)),
        num_lanes=rng.randint(1, 3),
        slice_blocks=rng.choice((1, 4, 1_000)),
        load_latency_s=rng.choice((0.0, 0.001, 0.02)),
        store_latency_s=rng.choice((0.0, 0.001, 0.05)),
        load_bytes_per_s=BLOCK_BYTES * rng.choice((20.0, 200.0, 5_000.0)),
        store_bytes_per_s=BLOCK_BYTES * rng.choice((10.0, 100.0, 5_000.0)),
        step_s=rng.choice((0.005, 0.02, 0.06)),
        num_engine_blocks=depth + rng.choice((0, 2, 6, 12, 12)),
        engine_forgets=rng.choice((0.0, 0.1, 0.4)),
        blocks_per_step=rng.choice((1, 2, 4, 100)),
        max_running=rng.randint(1, 6),
        max_requests=rng.choice((2, 6, 16)),
        arrivals=rng.choice((0.1, 0.4, 0.9)),
        cascades=rng.choice((0.0, 0.0, 0.05, 0.3)),
        stores_lag=rng.choice((0.0, 0.5)),
        flush_on_preempt=rng.random() < 0.5,
        prompts=prompts,
        faults=_draw_faults(rng),
        # last: another policy to draw from changes nothing else of a seed
        policy=policy or rng.choice(sorted(POLICIES)),
    )


def _draw_faults(rng: Random) -> FaultRates:
    """Calm, or all kinds lightly, or a few kinds heavily: rare kinds need seeds of their own to be met often."""
    mood = rng.choice(("calm", "all", "all", "few", "few", "together", "together"))
    if mood == "calm":
        return FaultRates(abort=_ALL_FAULTS.abort, preempt=_ALL_FAULTS.preempt)
    if mood == "all":
        return _ALL_FAULTS.scaled(rng.choice((0.3, 1.0, 2.0)))
    if mood == "few":
        chosen = tuple(rng.sample([field.name for field in fields(FaultRates)], k=rng.randint(1, 4)))
    else:
        chosen = rng.choice(_WORSE_TOGETHER)
    heavy = _ALL_FAULTS.scaled(rng.choice((2.0, 5.0)))
    return FaultRates(**{name: min(0.5, getattr(heavy, name)) for name in chosen})


def _draw_prompts(rng: Random, num_prompts: int, depth: int) -> tuple[Prompt, ...]:
    prompts: list[Prompt] = []
    for _ in range(num_prompts):
        shared: Prompt = ()
        if prompts and rng.random() < 0.8:
            shared = rng.choice(prompts)
            shared = shared[: rng.randint(0, len(shared))]
        path = list(shared)
        branch = len(prompts).to_bytes(4, "big")
        for _ in range(rng.randint(max(1, len(path)), depth) - len(path)):
            parent = path[-1] if path else b""
            path.append(make_offload_key(hashlib.blake2b(parent + branch, digest_size=16).digest(), 0))
        prompts.append(tuple(path))
    return tuple(prompts)
