"""What every part of one simulated run shares."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.sim.checks import Checks
from kvtier.sim.clock import SimulatedClock
from kvtier.sim.log import EventLog
from kvtier.sim.scenario import Scenario
from kvtier.sim.workers import SimulatedWorkers


@dataclass(frozen=True, slots=True)
class World:
    """One of each in a run."""

    scenario: Scenario
    clock: SimulatedClock
    workers: SimulatedWorkers
    checks: Checks
    log: EventLog
