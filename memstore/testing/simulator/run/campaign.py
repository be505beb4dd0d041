"""Campaigns: many seeds, played in processes and counted, with each failure shrunk to the faults that matter.

A run that ends early has failed: a broken rule counts by its name, any other exception by its class. A shrunk scenario
is printed with the command that plays it again.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from memstore.core.wire.messages import HostBeat
from memstore.testing.faults.catalogue import Fault
from memstore.testing.simulator.checks.copies import COMMITS_WANTED
from memstore.testing.simulator.host.holder import REAP_S, SimHolder
from memstore.testing.simulator.run.cluster import SimCluster
from memstore.testing.simulator.run.controller import DIAL_S, LEASE_S, SimController
from memstore.testing.simulator.run.faults import SimFaults
from memstore.testing.simulator.run.launcher import InPlaceLauncher, Launcher
from memstore.testing.simulator.world.memory import Crashed
from memstore.testing.simulator.world.scenario import Scenario, draw
from memstore.testing.simulator.world.virtual_time import Endless
from memstore.testing.simulator.world.world import Violation

# -- run ----------------------------------------------------------------------------------------------
# One run: a cluster, the launcher, the faults of a scenario, and what must hold in the end.
#
# After every event the checker looks at what has changed. When the scenario's time is over all faults are healed, and
# the store has `LIVENESS_S` to be whole again and to go on committing (I16).


T = TypeVar("T")
BEAT_S = 0.5
SCRUB_S = 4.0
LIVENESS_S = 45.0  # and the time between the steps that must be committed meanwhile
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
        limit_s = LIVENESS_S + (COMMITS_WANTED - 1) * self.scenario.step_s
        if not self._run_until(cluster.now + limit_s, checker.redundancy.is_live):
            why = checker.redundancy.why_not_live()
            raise Violation("I16", f"not whole {limit_s:g} s after the last fault: {why}")
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


# -- page ---------------------------------------------------------------------------------------------
# A page for people about a run that failed.


def describe(cluster: SimCluster, notes_count: int = 40) -> str:
    """Return a page: the scenario, the last notes, and each rank with its newest tickets."""
    rows: list[str] = [cluster.scenario.text(), "", *cluster.notes[-notes_count:]]
    for rank in cluster.ranks:
        state = "dead" if rank.is_dead else "frozen" if rank.is_frozen else "alive"
        rows.append(
            f"rank {rank.rank} on {rank.host_id}: {state} {rank.why} attempt {rank.attempt} {_last(rank.tickets)}"
        )
    return "\n".join(rows)


def _last(tickets: Mapping[int, str]) -> dict[int, Any]:
    return {step: tickets[step] for step in sorted(tickets)[-4:]}


# -- campaign -----------------------------------------------------------------------------------------


COMMAND = "python -m memstore.testing.simulator"
CHUNK_SEEDS = 8  # given to a process at a time
SHRINK_PLAYS_MAX, SHRINK_S = 60, 60.0
SHORT_S = (0.3, 1.0)  # durations that are tried in place of longer ones
ADDED_UP = ("seeds", "wall_s", "virtual_h", "events", "steps_put", "commits_acknowledged", "restores_checked")


@dataclass(frozen=True)
class RunOutcome:
    """The result of one run; `rule` is "" if everything held."""

    seed: int
    rule: str = ""
    why: str = ""
    page: str = ""
    fingerprint: str = ""
    virtual_s: float = 0.0
    events: int = 0
    steps_put: int = 0
    commits: int = 0
    restores: int = 0
    injected: dict[str, int] = field(default_factory=dict)


def play(scenario: Scenario) -> RunOutcome:
    """Run one scenario to its end or to its first failure; an exception becomes the outcome's rule."""
    simulation, rule, why = None, "", ""
    try:
        simulation = Simulation(scenario)
        simulation.run()
    except Violation as broken:
        rule, why = broken.rule, str(broken)
    except Exception as error:
        rule = type(error).__name__
        why = "".join(traceback.format_exception(type(error), error, error.__traceback__)[-6:])
    if simulation is None:
        return RunOutcome(scenario.seed, rule, why, scenario.text())
    cluster, observed = simulation.cluster, simulation.checker.observed
    return RunOutcome(
        scenario.seed,
        rule,
        why,
        describe(cluster) if rule else "",
        cluster.fingerprint,
        cluster.now,
        cluster.time.events_count,
        observed.steps_put,
        len(observed.acked),
        observed.restores,
        dict(observed.injected),
    )


def shrink(scenario: Scenario, rule: str, *, limit_s: float = SHRINK_S) -> tuple[Scenario, RunOutcome]:
    """Drop faults in halves and one by one, then shorten them, while the same rule still breaks.

    No run begins after `limit_s`, or after SHRINK_PLAYS_MAX runs.

    Returns:
        The scenario with the faults that are left, and the outcome of its run.
    """
    best: tuple[Scenario, RunOutcome] | None = None
    plays, until_s = 0, time.monotonic() + limit_s

    def breaks(faults: list[Fault]) -> bool:
        nonlocal best, plays
        plays += 1
        if plays > SHRINK_PLAYS_MAX or time.monotonic() > until_s:
            return False
        fewer = replace(scenario, faults=tuple(faults))
        outcome = play(fewer)
        if outcome.rule == rule:
            best = (fewer, outcome)
        return outcome.rule == rule

    kept = list(scenario.faults)
    size = len(kept)
    while size:
        at = 0
        while at < len(kept):
            fewer = kept[:at] + kept[at + size :]
            if breaks(fewer):
                kept = fewer
            else:
                at += size
        size = size // 2 if size > 1 else 0
    for index, fault in enumerate(kept):
        for for_s in SHORT_S:
            tried = [*kept[:index], replace(fault, for_s=for_s), *kept[index + 1 :]]
            if for_s < fault.for_s and breaks(tried):
                kept = tried
                break
    return best if best is not None else (scenario, play(scenario))


def replay_command(scenario: Scenario) -> str:
    """Return the command that plays a scenario again."""
    if scenario == draw(scenario.seed):
        return f"{COMMAND} --seed {scenario.seed}"
    return f"{COMMAND} --scenario '{scenario.to_json()}'"


def failure_text(scenario: Scenario, outcome: RunOutcome, *, limit_s: float = SHRINK_S) -> str:
    """Return a text for people: the shrunk scenario, what happened, the command that plays it again."""
    shrunk, last = shrink(scenario, outcome.rule, limit_s=limit_s)
    return (
        f"seed {outcome.seed} breaks {outcome.why}\nshrunk to:\n{last.page}\nthen: {last.why}\n\n"
        f"replay: {replay_command(shrunk)}"
    )


@dataclass
class Summary:
    """The numbers of a campaign."""

    seeds: int = 0
    first_seed: int = 0
    wall_s: float = 0.0
    virtual_h: float = 0.0
    events: int = 0
    steps_put: int = 0
    commits_acknowledged: int = 0
    restores_checked: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    violations: list[dict[str, Any]] = field(default_factory=list)

    def add(self, outcome: RunOutcome) -> None:
        """Count one run."""
        self.seeds += 1
        self.virtual_h += outcome.virtual_s / 3600
        self.events += outcome.events
        self.steps_put += outcome.steps_put
        self.commits_acknowledged += outcome.commits
        self.restores_checked += outcome.restores
        for kind, count in outcome.injected.items():
            self.faults[kind] = self.faults.get(kind, 0) + count
        if outcome.rule:
            last = outcome.why.strip().splitlines()[-1]
            self.violations.append({"seed": outcome.seed, "rule": outcome.rule, "why": last})

    def join(self, other: Summary) -> None:
        """Add what a later part of the same campaign did."""
        if not self.seeds:
            self.first_seed = other.first_seed
        for name in ADDED_UP:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for kind, count in other.faults.items():
            self.faults[kind] = self.faults.get(kind, 0) + count
        self.violations += other.violations

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as plain values."""
        faults = dict(sorted(self.faults.items()))
        return {**asdict(self), "faults": faults, "faults_injected": sum(faults.values())}

    def text(self) -> str:
        """Return the numbers as lines for people."""
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(self.faults.items()))
        return (
            f"{self.seeds:,} seeds from {self.first_seed}, {self.virtual_h:,.1f} simulated hours "
            f"in {self.wall_s:,.0f} s, {self.events:,} events\n"
            f"{sum(self.faults.values()):,} faults injected: {kinds}\n"
            f"{self.steps_put:,} shards put, {self.commits_acknowledged:,} commits acknowledged, "
            f"{self.restores_checked:,} restores checked\n"
            f"{len(self.violations):,} violations"
        )


def play_seeds(seeds: Sequence[int]) -> list[RunOutcome]:
    """Play a few seeds in this process."""
    return [play(draw(seed)) for seed in seeds]


def _outcomes(seeds: Iterable[int], jobs: int, is_late: Callable[[], bool]) -> Iterator[RunOutcome]:
    numbers = iter(seeds)
    if jobs == 1:
        for seed in numbers:
            if is_late():
                return
            yield play(draw(seed))
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        running: set[Future[list[RunOutcome]]] = set()
        while True:
            while len(running) < 2 * jobs and not is_late():
                chunk = list(itertools.islice(numbers, CHUNK_SEEDS))
                if not chunk:
                    break
                running.add(pool.submit(play_seeds, chunk))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield from future.result()


def run(
    first: int,
    count: int,
    *,
    jobs: int = 0,
    minutes: float | None = None,
    on_outcome: Callable[[RunOutcome], None] = lambda outcome: None,
) -> Summary:
    """Play seeds `first` to `first + count - 1`, or as many as begin within `minutes`.

    Args:
        jobs: Processes; 0 for one per core, 1 for none but this one.
        on_outcome: Called with the outcome of every run when it ends, in no order.
    """
    started_s = time.monotonic()
    jobs = jobs or len(os.sched_getaffinity(0))
    summary = Summary(first_seed=first)
    limit_s = float("inf") if minutes is None else minutes * 60
    for outcome in _outcomes(range(first, first + count), jobs, lambda: time.monotonic() - started_s > limit_s):
        summary.add(outcome)
        on_outcome(outcome)
    summary.wall_s = time.monotonic() - started_s
    summary.violations.sort(key=lambda row: int(row["seed"]))
    return summary
