"""What a way of checkpointing costs: memstore's, Gemini's, CheckFreq's, and durable storage alone.

Plain seconds, each from a measurement or a publication that is named. Read `runs.py` for what they add up to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from memstore.core.schedule import optimal_every, optimal_interval_s
from memstore.intervals import Every
from placement.bill import Scheme

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
