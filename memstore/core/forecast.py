"""How much of its time a job of many hosts would train, in simulated time: `memstore simulate`.

When which hosts fail, and what they take with them; what saves, losses and restores of each way of checkpointing cost;
and what a policy makes of a run's failures: time by cause, work done again, and steps that no memory has any more. One
step of the simulation for each failure, what lies between two is arithmetic, so a month of 131,072 hosts takes as long
as its fifteen thousand failures.

No part of a running store asks it. Randomness comes as a generator, `stepfun.json` as rows; the command line reads it.
Read `placement/rates.py` for the rates.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from memstore.core.schedule import optimal_every, optimal_interval_s
from memstore.intervals import Every
from placement import Bond, Host, Topology
from placement.bill import Scheme
from placement.rates import DAY_S, Rates

# -- failures ----------------------------------------------------------------------------------------


class HostFailure(NamedTuple):
    """What ends a job's processes at one moment."""

    at_s: float
    replaced: int  # hosts that others take the place of; none: all processes start again where they were
    lost: tuple[int, ...]  # the hosts among them whose memory is gone or cut off, by number


class FailureTrace(NamedTuple):
    """Failures that were seen: minutes since the row before, then hosts that kept all, lost a GPU, lost memory."""

    hosts: int
    days: float
    rows: Sequence[tuple[int, int, int, int]]


@dataclass(frozen=True, slots=True)
class JobHosts:
    """The hosts of a job, numbered rack by rack."""

    hosts: int
    hosts_per_rack: int = 0  # 0: no host is labelled
    is_burst_in_rack: bool = False  # the hosts of a burst are neighbours, else any

    def pick(self, count: int, rng: np.random.Generator) -> tuple[int, ...]:
        """Draw the hosts of a burst."""
        if count == 1:
            return (int(rng.integers(self.hosts)),)
        count = min(count, self.hosts)
        if not (self.is_burst_in_rack and self.hosts_per_rack):
            return tuple(rng.choice(self.hosts, count, replace=False).tolist())
        rack = int(rng.integers(self.hosts)) // self.hosts_per_rack
        first = min(rack * self.hosts_per_rack, self.hosts - count)
        return tuple(range(first, first + count))


def draw_failures(
    rates: Rates, site: JobHosts, duration_s: float, rng: np.random.Generator, trace: FailureTrace | None = None
) -> list[HostFailure]:
    """Draw the failures of one run, in order of time.

    Args:
        trace: What is replayed: each `trace.hosts` hosts go through it from a day of their own, in a circle.
    """
    if rates.is_replay:
        if trace is None:
            raise ValueError("these rates replay a trace, and none is given")
        return sorted(_replayed(trace, site, duration_s, rng))
    weights = np.array(rates.burst_weights) / sum(rates.burst_weights)
    hosts_mean = float(weights @ np.arange(1, len(weights) + 1))
    per_s = rates.failures_per_1000_host_days / 1000 * site.hosts / DAY_S / hosts_mean
    if not per_s:
        return []
    if rates.is_even:
        times = np.arange(rng.uniform(0.0, 1.0 / per_s), duration_s, 1.0 / per_s)
    else:  # the gaps come first: another rate with the same seed stretches the same gaps
        mean = per_s * duration_s
        times = np.cumsum(rng.exponential(size=int(mean + 10 * mean**0.5 + 50))) / per_s
        times = times[times < duration_s]
    sizes = rng.choice(len(weights), len(times), p=weights) + 1
    kinds = rng.random(len(times))
    return [
        HostFailure(
            at_s,
            min(size, site.hosts) if kind < 1.0 - rates.process_share else 0,
            site.pick(size, rng) if kind < rates.memory_share else (),
        )
        for at_s, size, kind in zip(times.tolist(), sizes.tolist(), kinds.tolist(), strict=True)
    ]


def _replayed(trace: FailureTrace, site: JobHosts, duration_s: float, rng: np.random.Generator) -> list[HostFailure]:
    """Replay it, of the last hosts in proportion."""
    times, span_s = np.cumsum([row[0] for row in trace.rows]) * 60.0, trace.days * DAY_S
    found = []
    for first in range(0, site.hosts, trace.hosts):
        share, begin_s = (site.hosts - first) / trace.hosts, rng.uniform(0.0, span_s)
        for turn in range(int(duration_s // span_s) + 2):
            at_s = times - begin_s + turn * span_s
            for row in np.flatnonzero((at_s >= 0) & (at_s < duration_s) & (rng.random(len(times)) < share)).tolist():
                _, _, devices, lost = trace.rows[row]
                found.append(HostFailure(float(at_s[row]), devices + lost, site.pick(lost, rng) if lost else ()))
    return found


# -- policies ----------------------------------------------------------------------------------------
# Plain seconds, each from a measurement or a publication that is named.


# Until training goes on after a failure, without detection and restore. Wan et al., ByteRobust (SOSP 2025), 16,384
# GPUs: a job that is queued again takes 454 to 768 s, one with warm standbys 46 to 65 s.
REQUEUE_S, STANDBY_S = 454.0, 65.0
RAY_DETECTS_S = 15.0  # a host that is gone (Ray 2.60: 12 to 15 s)
MEMSTORE_DETECTS_S = 1.5  # a link that is cut; a killed host in 0.1 s: docs/reference/results.md
# Gemini's own simulation (artifact, AE_figures.ipynb): 9 min for each failure, every iteration at no cost, and every
# 3 h to durable storage.
GEMINI_RECOVERY_S, GEMINI_DURABLE_S = 540.0, 10_800.0
CHECKFREQ_SHARE = 0.035  # of the training time, that saves may take at most (CheckFreq, FAST 2021)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that a host's state takes: to be copied there, to be sent to a peer, to be written to durable storage."""

    step_s: float
    copy_s: float
    send_s: float
    write_s: float


@dataclass(frozen=True, slots=True)
class Policy:
    """When it saves, what that costs, and how training goes on after a failure."""

    name: str
    every_s: float  # of training, from one save to the next
    stall_s: float  # that each save stops training
    lag_s: float = 0.0  # from the end of that until the save counts
    detect_s: float = 0.0
    restart_s: float = 0.0
    own_s: float = 0.0  # restore, of every host from its own memory
    peers_s: float = 0.0  # restore, of replaced hosts from others' memory
    durable_s: float = 0.0  # restore, of all hosts from durable storage
    scheme: Scheme | None = None  # of redundancy in memory; None: saves are durable
    is_consecutive: bool = False  # hosts next to one another keep each other's copies, as in Gemini
    durable_every_s: float = math.inf  # beside what is in memory, from when training went on
    durable_lag_s: float = 0.0

    def trained_s(self, ran_s: float) -> float:
        """Return how much of the time since training went on was training, not saving."""
        cycles = ran_s // (self.every_s + self.stall_s)
        return cycles * self.every_s + min(ran_s - cycles * (self.every_s + self.stall_s), self.every_s)

    def saved_s(self, ran_s: float) -> float:
        """Return how much training the last save has that counts by now; 0: there was none since training went on."""
        return max(0.0, (ran_s - self.lag_s) // (self.every_s + self.stall_s)) * self.every_s


def policies(
    costs: Costs, mtbf_s: float, *, put_every: Every, durable_every: Every, scheme: Scheme
) -> tuple[Policy, ...]:
    """Return what is compared; the last is durable storage alone, with Daly's interval.

    Args:
        mtbf_s: Mean time between failures, a burst counted once.
        put_every: memstore's, in whole steps and no shorter than a commit takes (R33.5).
        durable_every: memstore's.
        scheme: memstore's; Gemini has two copies.
    """

    def steps_s(wished_s: float) -> float:
        return max(1, math.ceil(wished_s / costs.step_s - 1e-9)) * costs.step_s

    wished_s = put_every.interval_s or (put_every.steps or 0) * costs.step_s
    if put_every.overhead is not None:
        wished_s = costs.copy_s / put_every.overhead
    durable = optimal_every(costs.write_s, mtbf_s) if durable_every.is_optimal else durable_every
    ours = Policy(
        "memstore in place",
        steps_s(max(wished_s or optimal_interval_s(costs.copy_s, mtbf_s), costs.send_s * scheme.spare)),
        costs.copy_s,
        costs.send_s * scheme.spare,
        MEMSTORE_DETECTS_S,
        STANDBY_S,
        costs.copy_s,
        costs.send_s * scheme.data,
        costs.write_s,
        scheme,
        durable_every_s=durable.interval_s or (durable.steps or math.inf) * costs.step_s,
        durable_lag_s=costs.write_s,
    )
    gemini = replace(
        ours,
        name="Gemini",
        every_s=steps_s(costs.send_s),
        stall_s=0.0,
        lag_s=costs.send_s,
        detect_s=0.0,  # this and all of a restore from memory are in its nine minutes
        restart_s=GEMINI_RECOVERY_S,
        own_s=0.0,
        peers_s=0.0,
        scheme=Scheme(1, 1),
        is_consecutive=True,
        durable_every_s=GEMINI_DURABLE_S,
    )
    stored = Policy("durable only", 1.0, costs.write_s, 0.0, RAY_DETECTS_S, REQUEUE_S, durable_s=costs.write_s)
    checkfreq_s = steps_s(max(costs.write_s, costs.copy_s / CHECKFREQ_SHARE))
    return (
        ours,
        replace(ours, name="memstore restarted", restart_s=REQUEUE_S),
        gemini,
        replace(stored, name="CheckFreq", every_s=checkfreq_s, stall_s=costs.copy_s, lag_s=costs.write_s),
        replace(stored, every_s=steps_s(optimal_interval_s(costs.write_s, mtbf_s))),
    )


# -- runs --------------------------------------------------------------------------------------------


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
