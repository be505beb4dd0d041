"""What a policy makes of a run's failures: time by cause, work done again, and steps that no memory has any more.

One step of the simulation for each failure: what lies between two is arithmetic. So a month of 131,072 hosts takes as
long as its fifteen thousand failures.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from memstore.core.forecast.failures import HostFailure, JobHosts
from memstore.core.forecast.policies import Policy
from placement import Bond, Host, Topology
from placement.bill import Scheme

# Where the time goes; they add up to all of it. "redone" is training that a failure took, to be done again.
RECOVERY = ("detects", "waits", "restarts", "restores")
CAUSES = ("trains", "saves", "redone", *RECOVERY)
Fatal = Callable[[Collection[int]], bool]


@dataclass(frozen=True, slots=True)
class SpareHosts:
    """Hosts that stand ready. A replaced host is repaired and is one again; without one the provider is waited for."""

    count: int
    host_repair_s: float
    provider_s: float


@dataclass(frozen=True, slots=True)
class PlayedRun:
    """What became of one run."""

    spent_s: dict[str, float]
    failures: int
    unrecoverable: int  # times that memory had no committed step any more, and durable storage was read

    @property
    def share(self) -> float:
        """Return the effective training time as a share of all time."""
        return self.spent_s["trains"] / sum(self.spent_s.values())


def fatal_losses(site: JobHosts, scheme: Scheme, *, is_consecutive: bool = False) -> Fatal:
    """Return what says whether the loss of some hosts takes bytes that no other has: by the product's own placement.

    Args:
        is_consecutive: By Gemini's instead: copies within each `scheme.width` hosts in a row.

    Raises:
        ValueError: There are too few hosts, or racks, for the scheme.
    """
    if site.hosts < scheme.width:
        raise ValueError(f"{scheme.name} needs {scheme.width} hosts, there are {site.hosts}")
    names, rack = [f"h{number:07d}" for number in range(site.hosts)], site.hosts_per_rack
    if is_consecutive:
        runs = (frozenset(names[at : at + scheme.width]) for at in range(0, site.hosts, scheme.width))
        bonds = [Bond(each, scheme.spare) for each in runs]
    else:
        racks = ({"rack": f"r{number // rack:07d}"} if rack else {} for number in range(site.hosts))
        bonds = scheme.bonds(Topology.of(map(Host, names, racks)))
    if not bonds:
        raise ValueError(f"{scheme.name} does not fit: too few racks, or too many of the {site.hosts} hosts in one")
    bond_of = {host: bond for bond in bonds for host in bond.hosts}

    def is_fatal(lost: Collection[int]) -> bool:
        gone = frozenset(names[number] for number in lost)
        return any(bond_of[host].kills(gone) for host in gone)

    return is_fatal


def play(
    policy: Policy, failures: Sequence[HostFailure], duration_s: float, fatal: Fatal, spares: SpareHosts
) -> PlayedRun:
    """Play one run: train, save, fail, recover, from failure to failure until `duration_s`.

    A failure while the job recovers begins its recovery again; a host that is waited for meanwhile is not waited for
    twice. Hosts that are lost before the bytes of those lost before them lie on others again count as lost together.
    """
    spent = dict.fromkeys(CAUSES, 0.0)
    begun = durable = 0.0  # training that was done when training last went on; that durable storage has
    memory: float | None = 0.0  # training that memory has; None: nothing is committed there
    gone: set[int] = set()  # hosts whose bytes are not yet on others again
    repaired_at: list[float] = []
    down_s = resumed_s = ready_s = 0.0
    recovery: tuple[tuple[str, float], ...] = ()
    unrecoverable = 0
    for failure in (*failures, HostFailure(duration_s, 0, ())):
        now = failure.at_s
        _add(spent, recovery, now - down_s)
        ran_s = max(0.0, now - resumed_s)
        done, saved = policy.trained_s(ran_s), policy.saved_s(ran_s)
        spent["saves"] += ran_s - done
        spent["trains"] += done
        if now >= duration_s:
            break
        if policy.scheme is None:
            kept = begun + saved
        else:
            if ran_s >= policy.durable_lag_s:  # written at once, then each `durable_every_s`
                writes = (ran_s - policy.durable_lag_s) // policy.durable_every_s
                durable = begun + (policy.saved_s(writes * policy.durable_every_s) if writes else 0.0)
            memory = begun + saved if saved else memory
            if saved or ran_s > max(policy.peers_s, policy.lag_s):
                gone.clear()
            gone.update(failure.lost)
            if memory is not None and gone and fatal(gone):
                memory, unrecoverable = None, unrecoverable + 1
            kept = durable if memory is None else memory
        spent["trains"] -= begun + done - kept
        spent["redone"] += begun + done - kept
        begun = kept
        while repaired_at and repaired_at[0] <= now:
            heapq.heappop(repaired_at)
        for _ in range(failure.replaced):
            if len(repaired_at) < spares.count:
                heapq.heappush(repaired_at, now + spares.host_repair_s)
            else:
                ready_s = now + spares.provider_s
        source_s = policy.peers_s if failure.replaced or gone else policy.own_s
        if policy.scheme is None or memory is None:
            source_s, gone = policy.durable_s, set()
        waiting_s = max(0.0, ready_s - now - policy.detect_s)
        times_s = (policy.detect_s, waiting_s, policy.restart_s, source_s)
        recovery = tuple(zip(RECOVERY, times_s, strict=True))
        down_s, resumed_s = now, now + sum(times_s)
    return PlayedRun(spent, len(failures), unrecoverable)


def _add(spent: dict[str, float], recovery: Iterable[tuple[str, float]], passed_s: float) -> None:
    """Add the time that has passed of a recovery to its causes, in their order."""
    for cause, time_s in recovery:
        spent[cause] += min(time_s, passed_s)
        passed_s -= min(time_s, passed_s)


def best_interval_s(share: Callable[[float], float], guess_s: float) -> float:
    """Return the interval with the greatest share, within a factor of four of `guess_s`.

    The shares of intervals a quarter of an octave apart are noisy; a parabola through those within an octave of the
    best is not.
    """
    octaves = np.arange(-8, 9) / 4
    shares = np.array([share(guess_s * 2.0**octave) for octave in octaves.tolist()])
    best = float(octaves[shares.argmax()])
    near = np.abs(octaves - best) <= 1.0
    bend, slope, _ = np.polyfit(octaves[near] - best, shares[near], 2)
    shift = float(-slope / (2 * bend)) if bend < 0 else 0.0
    return float(guess_s * 2.0 ** (best + min(0.5, max(-0.5, shift))))


@dataclass(frozen=True, slots=True)
class Outlook:
    """What several runs of a policy came to; shares are of all time."""

    policy: Policy
    trains: float
    low: float  # one run of twenty trains less
    high: float  # one run of twenty trains more
    failures: float  # of a run
    shares: dict[str, float]  # by cause
    lost_steps: float  # of a run
    unrecoverable: float  # times in a run

    @classmethod
    def of(cls, policy: Policy, runs: Sequence[PlayedRun], step_s: float) -> Outlook:
        """Return the means of the runs, and the interval that nine of ten lie in."""
        count = len(runs)
        low, high = np.percentile([run.share for run in runs], [5, 95]).tolist()
        total_s = sum(sum(run.spent_s.values()) for run in runs)
        shares = {cause: sum(run.spent_s[cause] for run in runs) / total_s for cause in CAUSES}
        failures = sum(run.failures for run in runs) / count
        unrecoverable = sum(run.unrecoverable for run in runs) / count
        lost_steps = sum(run.spent_s["redone"] for run in runs) / count / step_s
        return cls(policy, shares["trains"], low, high, failures, shares, lost_steps, unrecoverable)


def compare(
    policies: Sequence[Policy],
    draw: Callable[[int], Sequence[HostFailure]],
    *,
    runs: Iterable[int],
    sample: Sequence[Sequence[HostFailure]],
    site: JobHosts,
    duration_s: float,
    spares: SpareHosts,
    step_s: float,
) -> list[Outlook]:
    """Play every policy on the same failures, run by run; the last one at the interval that is best in the sample.

    Args:
        policies: The saves of the last one are durable.
        draw: The failures of a run, by its number.
        runs: The numbers; what iterates sees how far it is.
    """

    def tried(every_s: float) -> float:
        policy = replace(policies[-1], every_s=every_s)
        return sum(play(policy, failures, duration_s, _never, spares).share for failures in sample)

    judge = functools.cache(functools.partial(fatal_losses, site))
    fatal = {
        each: _never if each.scheme is None else judge(each.scheme, is_consecutive=each.is_consecutive)
        for each in (*policies[:-1], replace(policies[-1], every_s=best_interval_s(tried, policies[-1].every_s)))
    }
    played: dict[Policy, list[PlayedRun]] = {each: [] for each in fatal}
    for run in runs:
        failures = draw(run)
        for each, done in played.items():
            done.append(play(each, failures, duration_s, fatal[each], spares))
    return [Outlook.of(each, done, step_s) for each, done in played.items()]


def _never(_lost: Collection[int]) -> bool:
    return False
