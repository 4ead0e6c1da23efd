"""What goes wrong, and when: drawn from one generator, in the order in which things happen."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

from kvtier.sim.clock import SimulatedClock
from kvtier.sim.log import EventLog
from kvtier.sim.scenario import FaultRates, Scenario
from kvtier.sim.transport import Disturbance
from kvtier.sim.workers import Copy, RankReport

CHECKSUM = "checksum"


class Faults:
    """Draws faults at the scenario's rates until `calm_down`, and counts those it has dealt, by kind."""

    def __init__(self, scenario: Scenario, rng: Random, log: EventLog) -> None:
        self._scenario = scenario
        self._rates = scenario.faults
        self._rng = rng
        self._log = log
        self._bad: set[tuple[int, int]] = set()
        """(slot, generation) whose bytes have gone bad."""
        self.dealt: Counter[str] = Counter()

    def calm_down(self) -> None:
        """Nothing more goes wrong. What has been corrupted stays so."""
        self._rates = FaultRates()

    def strikes(self, kind: str) -> bool:
        """Whether a fault of this kind happens here."""
        rate: float = getattr(self._rates, kind)
        if not rate or self._rng.random() >= rate:
            return False
        self.dealt[kind] += 1
        return True

    def long_time_s(self) -> float:
        """A duration that may matter: short, about a deadline, about a store's limit, or longer."""
        scenario = self._scenario
        unit_s = self._rng.choice((0.01, 0.3, scenario.deadline_s, scenario.store_timeout_s))
        return unit_s * self._rng.choice((0.5, 1.0, 1.5, 2.5))

    def disturb(self, copy: Copy) -> Disturbance:
        """What goes wrong with this job on one rank."""
        before_s = self.long_time_s() if self.strikes("stall_before") else 0.0
        during_s = self.long_time_s() if self.strikes("stall_during") else 0.0
        failure_before = "failed before" if self.strikes("fail_before") else ""
        failure = "failed" if self.strikes("fail_at_end") else ""
        places = list(zip(copy.slots, copy.generations, strict=True))
        if copy.is_store and self.strikes("corrupt"):
            self._bad.add(self._rng.choice(places))
        if not copy.is_store and not self._bad.isdisjoint(places):
            failure = CHECKSUM
        disturbance = Disturbance(before_s, during_s, failure_before, failure)
        if any(disturbance):
            self._log.say(f"disturbs {copy.job_id} {before_s:.6f} {during_s:.6f} {failure_before or failure or '-'}")
        return disturbance


class ReportChannel:
    """Brings what the workers say to the scheduler: late, twice, out of order, wrongly, or not at all."""

    def __init__(self, faults: Faults, clock: SimulatedClock, rng: Random, log: EventLog) -> None:
        self._faults = faults
        self._clock = clock
        self._rng = rng
        self._log = log
        self._arrived: list[RankReport] = []
        self.num_on_the_way = 0

    def send(self, report: RankReport) -> None:
        """One report sets out."""
        strikes, outcome = self._faults.strikes, report.outcome
        if outcome.is_store and strikes("drop"):
            self._log.say(f"drops report of {outcome.job_id} by rank {report.rank}")
            return
        if outcome.success and strikes("lie"):
            report = RankReport(report.rank, replace(outcome, success=False, reason="said to have failed"))
        self.travel(report, self._faults.long_time_s() if strikes("delay") else 0.0)
        if strikes("duplicate"):
            self.travel(report, self._faults.long_time_s() if self._rng.random() < 0.5 else 0.0)

    def receive(self) -> list[RankReport]:
        """What has arrived since the last call. The caller's list."""
        arrived, self._arrived = self._arrived, []
        if len(arrived) > 1 and self._faults.strikes("reorder"):
            self._rng.shuffle(arrived)
        return arrived

    def travel(self, report: RankReport, delay_s: float) -> None:
        """One report arrives after so long; nothing happens to it."""
        if not delay_s:
            self._arrived.append(report)
            return
        self.num_on_the_way += 1
        self._clock.after(delay_s, lambda: self._arrive(report))

    def _arrive(self, report: RankReport) -> None:
        self.num_on_the_way -= 1
        self._arrived.append(report)
