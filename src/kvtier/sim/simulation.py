"""One seed, or many: the production manager and driver, an engine, workers and faults in simulated time.

The same seed gives the same events, byte for byte, on every machine and in every process.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random

from kvtier.errors import ConfigurationError, InvariantError, SimulationError
from kvtier.interfaces import OffloadingManager, Residency
from kvtier.keys import OffloadKey
from kvtier.manager import CPUOffloadingManager, FilterReusedOffloadingManager, RequestDriver
from kvtier.manager.breaker import CircuitBreaker
from kvtier.policy import POLICIES
from kvtier.sim.cascade import FIRST_JOB_ID, STAGING_BLOCKS, SimulatedCascade
from kvtier.sim.checks import Checks
from kvtier.sim.clock import SimulatedClock
from kvtier.sim.engine import SimulatedEngine
from kvtier.sim.faults import Faults, ReportChannel
from kvtier.sim.log import EventLog
from kvtier.sim.scenario import BREAKER_MAX_COOLDOWN_S, Scenario, draw_scenario
from kvtier.sim.workers import Copy, RankReport, SimulatedWorkers
from kvtier.sim.world import World
from kvtier.transfers.jobs import TransferOutcome

MIN_OPERATIONS = 1_000
"""A seed is at least so many calls of the driver."""
MAX_DRAIN_STEPS = 4_000
"""Without new requests and new faults, everything has ended after so many steps."""
DRAIN_STEP_S = 0.1
MAX_IDLE_S = 600.0
"""Longer than any stalls and delays of one job together: something happens within this time."""
THOROUGH_EVERY = 8

Write = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What a run was. `digest` is of every event, in order."""

    num_seeds: int
    num_operations: int
    faults: Counter[str]
    """By kind."""
    digest: bytes

    @property
    def num_faults(self) -> int:
        """Of all kinds."""
        return self.faults.total()

    def __str__(self) -> str:
        return (
            f"seeds={self.num_seeds} operations={self.num_operations} faults={self.num_faults} "
            f"digest={self.digest.hex()}"
        )


class Simulation:
    """One seed. `policy` is used instead of the one that the seed draws; `write` gets every line of the log."""

    def __init__(self, seed: int, policy: str | None = None, write: Write | None = None) -> None:
        self.scenario = scenario = draw_scenario(Random(f"scenario {seed}"), policy)
        self._rng = Random(f"traffic {seed}")
        fault_rng = Random(f"faults {seed}")
        self.log = EventLog(seed, write)
        self.clock = SimulatedClock()
        breaker = _make_breaker(scenario)
        self.manager = CPUOffloadingManager(
            scenario.num_slots,
            scenario.policy,
            enable_events=True,
            store_threshold=0 if scenario.filter_outside else scenario.store_threshold,
            max_tracker_size=scenario.max_tracker_size,
            deadline_s=scenario.deadline_s,
            store_timeout_s=scenario.store_timeout_s,
            breaker=breaker,
        )
        front: OffloadingManager = self.manager
        if scenario.filter_outside:
            front = FilterReusedOffloadingManager(front, scenario.store_threshold, scenario.max_tracker_size)
        self.driver = RequestDriver(front, scenario.num_ranks)
        front.tell_recompute_rate(scenario.recompute_blocks_per_s)
        self.faults = Faults(scenario, fault_rng, self.log)
        self._channel = ReportChannel(self.faults, self.clock, fault_rng, self.log)
        self._workers = SimulatedWorkers(scenario, self.clock, self.faults.disturb, STAGING_BLOCKS)
        self._checks = Checks(scenario, self.manager, breaker)
        world = World(scenario, self.clock, self._workers, self._checks, self.log)
        self.engine = SimulatedEngine(world, self.driver)
        self.cascade = SimulatedCascade(world, front)
        self.log.say(f"scenario {_describe(scenario)}")

    def run(self, num_operations: int) -> None:
        """Steps until so many operations have been made, and then until everything has ended.

        Raises InvariantError, or whatever the simulated code raises.
        """
        made_before, made_s = 0, 0.0
        while self.num_operations < num_operations:
            if self.num_operations > made_before:
                made_before, made_s = self.num_operations, self.clock.now_s
            elif self.clock.now_s - made_s > MAX_IDLE_S:
                raise InvariantError(f"nothing has happened for {MAX_IDLE_S:g} s; {self._what_is_left()}")
            self._pass_time(self.faults.long_time_s() if self.faults.strikes("jump") else self.scenario.step_s)
            self._deliver()
            self._let_things_happen()
            self._step()
        self._drain()

    @property
    def num_operations(self) -> int:
        """Calls of the driver and the manager so far, without those that only tell the time or look."""
        return self.engine.num_operations + self.cascade.num_operations

    # -- one step --------------------------------------------------------------------------------------------

    def _pass_time(self, duration_s: float) -> None:
        self.log.step += 1
        self.clock.run_until(self.clock.now_s + duration_s)
        self.engine.tell_time()

    def _deliver(self) -> None:
        for report in self._workers.take_reports():
            self._channel.send(report)
        for report in self._channel.receive():
            receiver = self.cascade if report.outcome.job_id >= FIRST_JOB_ID else self.engine
            receiver.receive(report)

    def _let_things_happen(self) -> None:
        rng, engine, strikes = self._rng, self.engine, self.faults.strikes
        if strikes("lag"):
            self.driver.advance(self.clock.now_s - self.faults.long_time_s())
        if strikes("death"):
            self._die()
        for kind in ("reset", "new_weights"):
            if strikes(kind):
                engine.reset(new_weights=kind == "new_weights")
        if rng.random() < self.scenario.engine_forgets:
            engine.forget()
        requests = engine.requests
        if requests and strikes("abort"):
            engine.abort(rng.choice(requests), cancels=rng.random() < 0.5)
        if engine.running and strikes("preempt"):
            engine.preempt(rng.choice(engine.running))
        while len(engine.requests) < self.scenario.max_requests and rng.random() < self.scenario.arrivals:
            prompts = self.scenario.prompts
            path = prompts[int(len(prompts) * rng.random() ** 2)]
            path = path[: rng.randint(1, len(path))] if rng.random() < 0.3 else path
            engine.add(path, rng.randint(1, len(path)))
        if rng.random() < self.scenario.cascades:
            self.cascade.read(self._ready_part_of(rng.choice(self.scenario.prompts)), engine.weights)

    def _step(self) -> None:
        rng = self._rng
        cut_to = rng.randint(0, 3) if rng.random() < 0.1 else 1_000_000
        self.engine.step(lags=rng.random() < self.scenario.stores_lag, cut_to=cut_to)
        self.driver.manager.on_schedule_end()
        self._check(thorough=self.log.step % THOROUGH_EVERY == 0)

    @property
    def _open_copies(self) -> list[Copy]:
        return [*self.engine.copies.values(), *self.cascade.copies.values()]

    def _check(self, thorough: bool) -> None:
        self._checks.step_ended(self._open_copies, thorough)
        if len(self.driver.jobs) != len(self.engine.copies):
            raise InvariantError(
                f"the driver has {len(self.driver.jobs)} open jobs, the engine {len(self.engine.copies)}"
            )

    def _ready_part_of(self, prompt: Sequence[OffloadKey]) -> list[OffloadKey]:
        ready = [key for key in prompt if self.manager.residency(key) is Residency.READY]
        return ready[self._rng.randint(0, len(ready)) :]

    # -- the end of workers, and of the run ------------------------------------------------------------------

    def _die(self) -> None:
        """All workers die. The engine hears of lost loads and of some lost stores, sooner or later; others are reaped.

        Of a job that one rank had ended, the other ranks' reports say that it failed.
        """
        unfinished = self.engine.workers_died()
        self.engine.num_operations += 1
        self.driver.manager.writers_died()
        self._checks.writers_died(self._open_copies)
        for copy in unfinished:
            if copy.is_store and self._rng.random() < 0.5:
                continue
            delay_s = self.faults.long_time_s() if self._rng.random() < 0.5 else 0.0
            for rank in range(self.scenario.num_ranks):
                outcome = TransferOutcome(copy.job_id, copy.is_store, False, 0, 0.0, "worker died")
                self._channel.travel(RankReport(rank, outcome), delay_s)

    def _drain(self) -> None:
        """No more requests and faults. Raises InvariantError if it does not come to an end."""
        self.log.say("drains")
        self.faults.calm_down()
        for _ in range(MAX_DRAIN_STEPS):
            if self._is_idle():
                break
            self._pass_time(max(self.scenario.step_s, DRAIN_STEP_S))
            self._deliver()
            self.engine.step(lags=False, cut_to=1_000_000)
            self._check(thorough=False)
        else:
            raise InvariantError(f"no end after {MAX_DRAIN_STEPS} steps without faults; {self._what_is_left()}")
        self._pass_time(self.scenario.store_timeout_s)
        for _ in range(2):  # whatever the breaker waits for
            self._pass_time(BREAKER_MAX_COOLDOWN_S)
        self._check(thorough=True)
        self.engine.workers_died()
        self.driver.manager.writers_died()
        self._checks.writers_died(self._open_copies)
        self._check(thorough=True)
        self._checks.run_ended()
        self.log.say(f"ends after {self.num_operations} operations and {self.faults.dealt.total()} faults")

    def _what_is_left(self) -> str:
        requests = ", ".join(f"{request.req_id} {request.phase.value}" for request in self.engine.requests)
        return f"requests: {requests or 'none'}; open jobs: {sorted(copy.job_id for copy in self._open_copies)}"

    def _is_idle(self) -> bool:
        """Nothing is left but stores whose reports are lost."""
        return not (
            self.engine.requests
            or self._channel.num_on_the_way
            or self._workers.num_live
            or any(not copy.is_store for copy in self._open_copies)
        )


def simulate(
    seeds: Iterable[int],
    num_operations: int = MIN_OPERATIONS,
    policy: str | None = None,
    write: Write | None = None,
    on_seed: Callable[[int, int], None] | None = None,
) -> SimulationResult:
    """Runs each seed for at least `num_operations` calls of the driver, and until all that it began has ended.

    `write` gets every line of the event log; `on_seed(seed, operations)` is told of each seed that has ended.
    Raises SimulationError for the first seed that breaks a promise, ConfigurationError for fewer operations than
    MIN_OPERATIONS or an unknown policy.
    """
    if num_operations < MIN_OPERATIONS:
        raise ConfigurationError(f"operations is {num_operations}; allowed: {MIN_OPERATIONS} or more a seed")
    if policy is not None and policy not in POLICIES:
        raise ConfigurationError(f"policy is {policy!r}; allowed: {', '.join(sorted(POLICIES))}")
    digest = hashlib.blake2b(digest_size=16)
    faults: Counter[str] = Counter()
    num_seeds = num_made = 0
    for seed in seeds:
        simulation = Simulation(seed, policy, write)
        try:
            simulation.run(num_operations)
        except OSError:  # of `write`
            raise
        except Exception as error:
            what = str(error) if isinstance(error, InvariantError) else f"{type(error).__name__}: {error}"
            command = replay_command(seed, num_operations, policy)
            raise SimulationError(seed, simulation.log.step, what, command) from error
        num_seeds += 1
        num_made += simulation.num_operations
        faults += simulation.faults.dealt
        digest.update(simulation.log.digest)
        if on_seed is not None:
            on_seed(seed, simulation.num_operations)
    return SimulationResult(num_seeds, num_made, faults, digest.digest())


def replay_command(seed: int, num_operations: int = MIN_OPERATIONS, policy: str | None = None) -> str:
    """The command that repeats one seed and shows its log."""
    operations = "" if num_operations == MIN_OPERATIONS else f" --operations {num_operations}"
    chosen = "" if policy is None else f" --policy {policy}"
    return f"kvtier simulate --seeds {seed}:{seed + 1}{operations}{chosen} --log -"


def _make_breaker(scenario: Scenario) -> CircuitBreaker | None:
    if not scenario.breaker_failures:
        return None
    return CircuitBreaker(scenario.breaker_failures, scenario.breaker_cooldown_s, BREAKER_MAX_COOLDOWN_S)


def _describe(scenario: Scenario) -> str:
    prompts = len(scenario.prompts)
    return f"{scenario!r}".replace(f"prompts={scenario.prompts!r}", f"prompts={prompts}")
