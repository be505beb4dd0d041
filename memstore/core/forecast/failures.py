"""When hosts fail, how many at once, and what they take with them: drawn from published rates, or replayed.

Read `placement/rates.py` for the rates, `runs.py` for what follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from placement.rates import DAY_S, Rates


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
