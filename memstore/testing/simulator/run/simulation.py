"""One run: a cluster, the launcher, the faults of a scenario, and what must hold in the end.

After every event the checker looks at what has changed. When the scenario's time is over all faults are healed, and
the store has `LIVENESS_S` to be whole again and to go on committing (I16).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from memstore.core.wire.messages import HostBeat
from memstore.testing.simulator.host.holder import REAP_S, SimHolder
from memstore.testing.simulator.run.cluster import SimCluster
from memstore.testing.simulator.run.controller import DIAL_S, LEASE_S, SimController
from memstore.testing.simulator.run.faults import SimFaults
from memstore.testing.simulator.run.launcher import InPlaceLauncher, Launcher
from memstore.testing.simulator.world.memory import Crashed
from memstore.testing.simulator.world.scenario import Scenario
from memstore.testing.simulator.world.virtual_time import Endless
from memstore.testing.simulator.world.world import Violation

T = TypeVar("T")
BEAT_S = 0.5
SCRUB_S = 4.0
LIVENESS_S = 90.0
REFILL_S = 60.0  # the copies of a job without ranks are complete again within this
CALM_S = 10.0  # after the end of all ranks nothing happens any more within this


class Simulation:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.cluster = SimCluster(scenario)
        self.checker = self.cluster.checker
        self._start_periods()
        launcher = InPlaceLauncher(self.cluster) if scenario.is_in_place else Launcher(self.cluster)
        self.cluster.spawn(launcher.launches(), Endless())
        faults = SimFaults(self.cluster)
        for each in scenario.faults:
            self.cluster.at(each.at_s, lambda f=each: faults.inject(f))  # type: ignore[misc]

    def _start_periods(self) -> None:
        cluster, every = self.cluster, self.cluster.time.every
        every(DIAL_S, lambda: _each(cluster.controllers, SimController.tick))
        every(LEASE_S / 3, lambda: _each(cluster.controllers, SimController.renew))
        every(BEAT_S, lambda: _each(cluster.holders.values(), _beat))
        every(REAP_S, lambda: _each(cluster.holders.values(), SimHolder.reap))
        every(REAP_S, lambda: _each(cluster.holders.values(), cluster.see))
        every(SCRUB_S, lambda: _each(cluster.holders.values(), SimHolder.scrub))
        every(1.0, self.checker.redundancy.look_at_repair)
        if self.scenario.is_in_place:
            every(1.0, self.checker.generations.look_at_stores)

    def run(self) -> Simulation:
        """Play the scenario, heal, demand that the store lives, look at everything once more. Raises Violation."""
        cluster, checker = self.cluster, self.checker
        self._run_until(self.scenario.duration_s)
        cluster.heal()
        self._demand_copies()
        checker.observed.is_healed = True
        if not self._run_until(cluster.now + LIVENESS_S, checker.redundancy.is_live):
            why = checker.redundancy.why_not_live()
            raise Violation("I16", f"not whole {LIVENESS_S:g} s after the last fault: {why}")
        cluster.is_over = True
        for rank in [*cluster.ranks, *cluster.former]:
            cluster.kill_rank(rank, "the end")
        self._run_until(cluster.now + CALM_S)
        checker.at_the_end()
        return self

    def _run_until(self, end_s: float, is_done: Callable[[], bool] = lambda: False) -> bool:
        """Let time pass until a moment, or until a condition holds; return whether it does."""
        time = self.cluster.time
        while (work := time.next_event(end_s)) is not None:
            try:
                work()
            except Crashed as crash:
                self.cluster.note(f"holder {crash.memory.host_id} died at a write")
                self.cluster.kill_holder(crash.memory.host_id)
            self.checker.after_event()
            if is_done():
                return True
        time.now = end_s
        return is_done()

    def _demand_copies(self) -> None:
        """Demand all copies of kept steps while no rank is alive; then let the job be launched again (R29)."""
        why_not_kept = self.checker.redundancy.why_not_kept
        if self.cluster.is_job_over and not self._run_until(self.cluster.now + REFILL_S, lambda: not why_not_kept()):
            raise Violation("R29", f"{REFILL_S:g} s after the last fault, all ranks dead: {why_not_kept()}")
        self.cluster.is_job_over = False


def _each(those: Iterable[T], work: Callable[[T], None]) -> None:
    for one in list(those):
        work(one)


def _beat(holder: SimHolder) -> None:
    if holder.is_serving and holder.session is not None:
        holder.send_event(HostBeat(holder.host_id, clock_s=holder.session.clock_s))
