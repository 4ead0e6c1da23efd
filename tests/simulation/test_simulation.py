"""The simulation: the same every time, blind to nothing that it is there to see, and clean over many seeds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter

import pytest

from kvtier.errors import ConfigurationError, SimulationError
from kvtier.index import BlockIndex
from kvtier.manager import CPUOffloadingManager
from kvtier.manager.requests import RequestState
from kvtier.policy import POLICIES
from kvtier.sim import FaultRates, replay_command, simulate
from kvtier.sim.simulation import Simulation
from kvtier.sim.workers import SimulatedWorkers

CI_SEEDS = 500
CI_OPERATIONS = 500_000


def log_of(seed: int, policy: str | None = None) -> list[str]:
    lines: list[str] = []
    simulate([seed], policy=policy, write=lines.append)
    return lines


@pytest.mark.parametrize("seed", range(4))
def test_the_same_seed_gives_the_same_log(seed):
    first, second = log_of(seed), log_of(seed)
    assert first == second
    assert len(first) > 100


def test_the_log_is_the_same_in_every_process():
    program = "import sys; from kvtier.sim import simulate; print(simulate(range(6), write=sys.stdout.write))"

    def run(hash_seed: str) -> bytes:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True).stdout

    here: list[str] = []
    result = simulate(range(6), write=here.append)
    expected = "".join([*here, f"{result}\n"]).encode()
    assert run("1") == run("2") == expected


def test_different_seeds_differ():
    digests = {simulate([seed]).digest for seed in range(10)}
    assert len(digests) == 10


def test_the_digest_depends_on_the_log_and_not_on_who_reads_it():
    assert simulate(range(3)).digest == simulate(range(3), write=lambda line: None).digest
    assert simulate(range(3)).digest != simulate(range(1, 4)).digest


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_policy_can_be_chosen(policy):
    assert f"policy='{policy}'" in log_of(3, policy)[0]


def test_a_seed_makes_at_least_as_many_operations_as_asked_for():
    assert simulate([5]).num_operations >= 1000
    assert simulate([5], num_operations=3000).num_operations >= 3000


def test_what_cannot_be_run_is_refused():
    with pytest.raises(ConfigurationError, match="999"):
        simulate([0], num_operations=999)
    with pytest.raises(ConfigurationError, match="fifo"):
        simulate([0], policy="fifo")


def test_every_kind_of_fault_and_every_corner_is_met():
    """What is never met is never checked: the traffic that the seeds draw must reach all of it."""
    dealt: Counter[str] = Counter()
    counters: Counter[str] = Counter()
    said: Counter[str] = Counter()
    for seed in range(60):
        simulation = Simulation(seed, write=lambda line: said.update([line.split()[3]]))
        simulation.run(1000)
        dealt += simulation.faults.dealt
        counters.update(simulation.manager.get_stats().counters)
        said["unknown report"] += simulation.driver.jobs.num_unknown_reports
    assert {kind for kind in FaultRates.__dataclass_fields__ if not dealt[kind]} == set()
    for name in (
        *("stored_blocks", "evicted_blocks", "shed_blocks", "filtered_blocks", "reaped_blocks", "resets"),
        *("failed_store_blocks", "failed_load_blocks", "late_completions"),
        *("deferred_requests", "expired_requests", "declined_waits"),
    ):
        assert counters[name] > 0, name
    for event in ("load", "store", "cascade", "aborts", "preempts", "finishes", "unknown report"):
        assert said[event] > 0, event


def find(num_seeds: int = 30) -> SimulationError:
    with pytest.raises(SimulationError) as caught:
        simulate(range(num_seeds))
    return caught.value


def test_a_broken_promise_names_seed_and_step_and_the_command_that_repeats_it(monkeypatch):
    monkeypatch.setattr(RequestState, "may_wait", lambda *arguments: True)
    error = find()
    assert "deadline" in error.what
    assert error.command == f"kvtier simulate --seeds {error.seed}:{error.seed + 1} --log -"
    assert f"seed {error.seed}, step {error.step}: {error.what}" in str(error)
    assert error.command in str(error)
    with pytest.raises(SimulationError) as again:
        simulate([error.seed])
    assert (again.value.step, again.value.what) == (error.step, error.what)


def test_wrong_bytes_are_seen(monkeypatch):
    """Failed stores count as good ones: their slots hold half of what they should."""
    complete_store = CPUOffloadingManager.complete_store
    monkeypatch.setattr(
        CPUOffloadingManager,
        "complete_store",
        lambda self, keys, context, success=True, spec=None: complete_store(self, keys, context, True, spec),
    )
    assert "wrong bytes" in find().what


def test_a_slot_in_two_hands_is_seen(monkeypatch):
    """A slot is free as soon as its store is given up on, whoever still writes it."""
    monkeypatch.setattr(BlockIndex, "condemn_writes", BlockIndex.abandon)
    for seed in range(60):
        try:
            simulate([seed])
        except SimulationError as error:
            if "in two hands" in error.what:
                return
    pytest.fail("nothing of the kind was seen")


def test_a_run_in_which_nothing_moves_ends(monkeypatch):
    take_reports = SimulatedWorkers.take_reports
    monkeypatch.setattr(
        SimulatedWorkers,
        "take_reports",
        lambda self: [report for report in take_reports(self) if report.outcome.is_store],
    )
    what = find().what
    assert "nothing has happened" in what or "no end" in what
    assert re.search(r"requests: .*open jobs: \[\d+", what)


def test_an_exception_is_a_broken_promise(monkeypatch):
    def fail(*arguments, **options):
        raise KeyError("nobody expects this")

    monkeypatch.setattr(BlockIndex, "pin", fail)
    error = find()
    assert "KeyError" in error.what
    assert isinstance(error.__cause__, KeyError)


def test_a_failure_of_the_log_is_no_broken_promise():
    def write(line: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        simulate([0], write=write)


def test_the_replay_command_says_what_is_not_the_default():
    assert replay_command(7) == "kvtier simulate --seeds 7:8 --log -"
    assert replay_command(7, 2000, "arc") == "kvtier simulate --seeds 7:8 --operations 2000 --policy arc --log -"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_seeds():
    result = simulate(range(10_000, 10_000 + CI_SEEDS))
    assert result.num_operations >= CI_OPERATIONS
    assert result.num_faults > CI_SEEDS
