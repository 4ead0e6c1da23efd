"""Deterministic simulation: simulated time, transfers and an engine around the production managers."""

from kvtier.sim.clock import Event, SimulatedClock
from kvtier.sim.scenario import FaultRates, Scenario
from kvtier.sim.simulation import SimulationResult, replay_command, simulate
from kvtier.sim.transport import Disturbance, LinkSpeed, SimulatedTransport, TransportJob

__all__ = [
    "Disturbance",
    "Event",
    "FaultRates",
    "LinkSpeed",
    "Scenario",
    "SimulatedClock",
    "SimulatedTransport",
    "SimulationResult",
    "TransportJob",
    "replay_command",
    "simulate",
]
