"""How often to put, and how all ranks come to the same steps. Pure (R33).

    controller   commit of S: `n` steps lie between puts from lead_end(S) on
    rank         put S ... put ... put ... put | lead_end(S): not without the commit of S

A distance is decided with a commit only, and holds from the step's lead on. A rank passes the lead of no put whose
commit it may have missed. So two ranks that have come to a step know the same distance for it, whatever was sent when.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from memstore.core.schedule.durable_interval import optimal_interval_s
from memstore.intervals import STEPS_MAX, Every

LEAD_PUTS = 4  # more than arenas have room for before a commit: no healthy rank waits
PUTS_MEASURED = 5  # committed at one distance before it changes: the first put costs more than others
PUTS_KEPT = 9  # newest ones that count
NOISE = 0.1  # of a step's time


@dataclass(frozen=True, slots=True)
class Measured:
    """What the slowest rank saw: medians, in seconds; 0 where nothing was seen."""

    step_s: float  # of training, without stalls
    stall_s: float  # that a put blocked
    commit_s: float  # from a put until its step was committed


class PutCosts:
    """What the puts of one attempt cost at the distance that holds, by the controller's monotonic clock."""

    def __init__(self, first: int = 0) -> None:
        self._first = first  # from this step on the distance holds
        self._open: dict[int, tuple[float, float]] = {}  # step -> when its first put began, its longest stall
        self._committed: deque[tuple[int, float, float, float]] = deque(maxlen=PUTS_KEPT)  # step, ..., to commit

    def put(self, step: int, began_s: float, stall_s: float) -> None:
        """Take one rank's put of a step."""
        first_s, longest_s = self._open.get(step, (began_s, 0.0))
        self._open[step] = (min(first_s, began_s), max(longest_s, stall_s))

    def committed(self, step: int, now: float) -> None:
        """Take a commit; puts before it come to nothing."""
        if step in self._open and step >= self._first:
            began_s, stall_s = self._open[step]
            self._committed.append((step, began_s, stall_s, now - began_s))
        self._open = {later: put for later, put in self._open.items() if later > step}

    def measured(self) -> Measured | None:
        """Return the medians, or None while there are too few puts."""
        if len(self._committed) < PUTS_MEASURED:
            return None
        steps_s = [(b[1] - a[1] - a[2]) / (b[0] - a[0]) for a, b in pairwise(self._committed)]
        _, _, stalls_s, commits_s = zip(*self._committed, strict=True)
        return Measured(*(max(0.0, statistics.median(each)) for each in (steps_s, stalls_s, commits_s)))


def decide_steps(every: Every, measured: Measured, mtbf_s: float, last: int = 1) -> int:
    """Return how many steps from one put to the next, by the slowest rank; never so few that commits lag behind.

    Seconds, percent and the optimum are rounded to the nearest step, up for percent: it is a budget. The `last`
    distance stays where nothing was measured that they need, or a step that is a `NOISE` longer or shorter has it.
    """
    if every.steps is not None:
        return every.steps
    if measured.step_s <= 0 or (every.interval_s is None and measured.stall_s <= 0):
        return last
    fewest, found, most = (
        _steps(every, measured, measured.step_s * part, mtbf_s) for part in (1 + NOISE, 1, 1 - NOISE)
    )
    return last if fewest <= last <= most else found


def _steps(every: Every, measured: Measured, step_s: float, mtbf_s: float) -> int:
    stall_s = measured.stall_s
    if every.interval_s is not None:
        steps = round(min(every.interval_s / step_s, STEPS_MAX))
    elif every.overhead is not None:
        steps = math.ceil(stall_s / (every.overhead * step_s))
    else:
        steps = round(optimal_interval_s(stall_s, mtbf_s) / step_s)
    return min(max(1, steps, math.ceil(measured.commit_s / step_s)), STEPS_MAX)


def lead_end(step: int, before: int, steps: int) -> int:
    """Return from which step on a decision with the commit of `step` counts.

    Args:
        step: That was put.
        before: The put before it, or an older one: where steps count samples, they are far apart.
        steps: The distance that holds at it.
    """
    return step + LEAD_PUTS * max(steps, step - before)


class Schedule:
    """One rank's due steps, by what it has learned. Used by the training thread, but for `learn`."""

    def __init__(self, every: Every, base_step: int | None) -> None:
        self.is_fixed = every.steps is not None
        self._known = (every.steps or 1, 0, every.steps or 1)  # the distance before a step, that step, and from it on
        self.go_on_from(base_step)

    def go_on_from(self, base_step: int | None) -> None:
        """Note the step that was restored; None: training goes on from the first step it comes to."""
        self._last_due, self._seen = base_step, -1 if base_step is None else base_step

    def learn(self, first: int, steps: int) -> None:
        """Take a distance and the step from which it holds; any thread. Old news changes nothing."""
        _, known_first, known_steps = self._known
        if first > known_first and not self.is_fixed:
            self._known = (known_steps, first, steps)

    def awaited(self, step: int, uncommitted: Iterable[tuple[int, int]]) -> int | None:
        """Return the put whose commit may have changed what holds at `step`, or None.

        Args:
            uncommitted: This rank's puts that may still be committed, or are and it does not know; each with the put
                before it.
        """
        _, first, steps = self._known
        if self.is_fixed:
            return None
        return next((put for put, before in uncommitted if put >= first and lead_end(put, before, steps) <= step), None)

    def due(self, step: int) -> bool:
        """Say whether the step is to be put: it is far enough from the last one that was."""
        if self._last_due is None:
            self._last_due = step - 1
        if step <= self._seen:
            return step <= self._last_due  # asked again; or it went back, and put() says so
        earlier, first, later = self._known
        self._seen = step
        if step < self._last_due + (later if step >= first else earlier):
            return False
        self._last_due = step
        return True
