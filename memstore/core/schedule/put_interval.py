"""How often to put, and how all ranks come to the same answer for every step. Pure (R33).

    rounds   a0 ... e0 ..... a1 ... e1 ........ a2    every rank asks at a, and goes by the answer from e on
    distance 1      |  n0           |  n1

The steps at which ranks ask, and from which an answer holds, follow from the steps they come to alone. So two ranks
that have the same answers agree on every step, and one that lacks an answer at e knows that it does.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from dataclasses import dataclass

from memstore.intervals import STEPS_MAX, Every

FIRST_SPAN = 8  # steps until the first round: each of them is put, and measured
LEAD_STEPS = 4  # between asking and going by the answer: it is on its way meanwhile
SPAN_MAX = 1024  # steps from an answer to the next question
PRIOR_S = 86_400.0  # one failure a day, until failures were seen


@dataclass(frozen=True, slots=True)
class Measured:
    """What one rank saw: medians, in seconds; 0 where it saw nothing."""

    step_s: float  # of training, without stalls
    stall_s: float  # that a put blocked
    commit_s: float  # from a put until its step was committed


def optimal_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Return the time between checkpoints that wastes least: computing time, the checkpoint's own excluded.

    Args:
        cost_s: Seconds that one checkpoint stops training.
        mtbf_s: Mean seconds between failures, exponentially distributed.

    Source: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22 (2006),
    eq. 37; its first term is Young's, A first order approximation to the optimum checkpoint interval, CACM 17 (1974).
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def mean_time_between_failures_s(observed_s: float, failures_count: int) -> float:
    """Return the mean over what was observed and one failure a day before that (ours)."""
    return (observed_s + PRIOR_S) / (failures_count + 1)


def decide_steps(every: Every, measured: Iterable[Measured], mtbf_s: float, last: int = 1) -> int:
    """Return how many steps from one put to the next, by the slowest rank; never so few that commits lag behind.

    Seconds, percent and the optimum are rounded to the nearest step, up for percent: it is a budget. Where nothing
    was measured that they need, the `last` distance stays: no put in a long one says nothing about the cost of a put.
    """
    if every.steps is not None:
        return every.steps
    ranks = list(measured)
    step_s = max((m.step_s for m in ranks), default=0.0)
    stall_s = max((m.stall_s for m in ranks), default=0.0)
    if step_s <= 0 or (every.interval_s is None and stall_s <= 0):
        return last
    if every.interval_s is not None:
        steps = round(every.interval_s / step_s)
    elif every.overhead is not None:
        steps = math.ceil(stall_s / (every.overhead * step_s))
    else:
        steps = round(optimal_interval_s(stall_s, mtbf_s) / step_s)
    keep_up = math.ceil(max((m.commit_s for m in ranks), default=0.0) / step_s)
    return min(max(1, steps, keep_up), STEPS_MAX)


class Schedule:
    """One rank's due steps, from the step it goes on from; a step of its own is never due."""

    def __init__(self, every: Every, base_step: int) -> None:
        self.every, self.base_step = every, base_step
        self._starts = [base_step + 1]  # from where a distance holds
        self._steps = [every.steps or 1]
        self._firsts = [base_step + self._steps[0]]  # the first due step there
        self.asks_at = base_step + FIRST_SPAN  # the next round's step
        self._seen = base_step
        self._jumps: list[tuple[int, int]] = []  # from, to: wide enough to pass over a round that is to come

    @property
    def is_fixed(self) -> bool:
        """Return whether no round is ever needed."""
        return self.every.steps is not None

    @property
    def holds_from(self) -> int:
        """Return the step from which the next round's answer counts."""
        return self.asks_at + LEAD_STEPS

    def is_open(self, step: int) -> bool:
        """Return whether the answer for this step needs the next round first."""
        return not self.is_fixed and step >= self.holds_from

    def come_to(self, step: int) -> None:
        """The rank is at this step. A round that a jump passes over is asked where it lands, on all ranks alike."""
        if step - self._seen > LEAD_STEPS:
            self._jumps.append((self._seen, step))
            self._move_round()
        self._seen = step

    def _move_round(self) -> None:
        """By the steps alone: a rank that lacks an answer passed over the same rounds as the others."""
        self._jumps = [jump for jump in self._jumps if jump[1] >= self.holds_from]
        if self._jumps and self._jumps[0][0] < self.asks_at:
            self.asks_at = self._jumps.pop(0)[1]

    def take(self, steps: int) -> None:
        """The next round's answer."""
        start, last = self.holds_from, self._last_due_before(self.holds_from)
        self._starts.append(start)
        self._steps.append(steps)
        self._firsts.append(max(start, last + steps))
        self.asks_at = start + min(FIRST_SPAN << min(len(self._starts), 16), SPAN_MAX)
        self._move_round()

    def due(self, step: int) -> bool:
        """Whether the step is to be put, by the answers there are."""
        at = max(0, bisect.bisect_right(self._starts, step) - 1)
        past = step - self._firsts[at]
        return past >= 0 and past % self._steps[at] == 0

    def _last_due_before(self, end: int) -> int:
        for at in range(len(self._starts) - 1, -1, -1):
            first, steps = self._firsts[at], self._steps[at]
            if first < end:
                return first + (end - 1 - first) // steps * steps
            end = self._starts[at]  # none there: the distance was longer than the time it held
        return self.base_step
