"""Deterministic simulation: simulated time, transfers and an engine around the production managers."""

from kvtier.sim.clock import Event, SimulatedClock
from kvtier.sim.transport import Disturbance, LinkSpeed, SimulatedTransport, TransportJob

__all__ = ["Disturbance", "Event", "LinkSpeed", "SimulatedClock", "SimulatedTransport", "TransportJob"]
