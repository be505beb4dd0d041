"""How long a step of training takes, how far apart puts are, and when they are late. Pure (R12, D283)."""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from statistics import median

PACE_STEPS = 9  # newest steps remembered: one pause among eight intervals moves the median little
MOMENTS = 64  # remembered to say since when some rank is beyond a step, at least MOMENTS_APART_S apart
MOMENTS_APART_S = 1.0
LATE_MIN_S, LATE_INTERVALS, LATE_PAUSES = 30.0, 3.0, 2.0
LATE_UNPACED_S = 600.0  # where nothing is known of the pace: a first compilation takes minutes
LAG_MIN_S, LAG_STEPS = 15.0, 10.0


class Pace:
    """The pace of one attempt, by the controller's monotonic clock."""

    def __init__(self) -> None:
        self._reached: deque[tuple[int, float]] = deque(maxlen=PACE_STEPS)  # step, when the first rank was there
        self._moments: deque[tuple[int, float]] = deque(maxlen=MOMENTS)  # some of these, over a longer time
        self._longest_s = 0.0  # between two of them, ever

    def reached(self, step: int, now: float) -> None:
        """Take that a rank is at a step now; only the first rank at a newer one than before counts."""
        if self._reached and step <= self._reached[-1][0]:
            return
        if self._reached:
            self._longest_s = max(self._longest_s, now - self._reached[-1][1])
        self._reached.append((step, now))
        if not self._moments or now - self._moments[-1][1] >= MOMENTS_APART_S:
            self._moments.append((step, now))

    @property
    def last(self) -> tuple[int, float] | None:
        """The newest step and when the first rank was there."""
        return self._reached[-1] if self._reached else None

    def passed_s(self, step: int, now: float) -> float | None:
        """Return for how long some rank has been beyond a step, to about a second; None if none is."""
        return next((now - at for seen, at in (*self._moments, *self._reached) if seen > step), None)

    def interval_s(self) -> float | None:
        """Return how far apart newer steps usually are reported."""
        intervals = [at - before_at for (_, before_at), (_, at) in pairwise(self._reached)]
        return median(intervals) if intervals else None

    def late_after_s(self) -> float:
        """Return after how many seconds without a newer step something is wrong.

        Three times the usual distance, and twice the longest pause so far: what pauses for an evaluation now and then
        may do so again. At least half a minute.

        >>> pace = Pace()
        >>> pace.late_after_s()
        600.0
        >>> for step, now in ((1, 0.0), (2, 20.0), (3, 40.0), (4, 110.0), (5, 130.0)):
        ...     pace.reached(step, now)
        >>> pace.late_after_s()
        140.0
        """
        interval_s = self.interval_s()
        if interval_s is None:
            return LATE_UNPACED_S
        return max(LATE_MIN_S, LATE_INTERVALS * interval_s, LATE_PAUSES * self._longest_s)

    def lags_after_s(self) -> float:
        """Return how long one rank may be behind another: the ranks of a launch train the same step."""
        step_s = self.step_s()
        return LATE_UNPACED_S if step_s is None else max(LAG_MIN_S, LAG_STEPS * step_s)

    def step_s(self) -> float | None:
        """Return how long a step takes, those without a put included; None until two were reported."""
        intervals = [(at - before_at) / (step - before) for (before, before_at), (step, at) in pairwise(self._reached)]
        return median(intervals) if intervals else None

    def steps_within(self, span_s: float) -> int | None:
        """Return how many steps last at least `span_s`; None while the pace is unknown.

        >>> pace = Pace()
        >>> pace.steps_within(60.0)
        >>> for step, now in ((10, 0.0), (11, 25.0), (13, 75.0)):
        ...     pace.reached(step, now)
        >>> pace.step_s(), pace.steps_within(60.0)
        (25.0, 3)
        """
        step_s = self.step_s()
        if step_s is None:
            return None
        return math.ceil(span_s / max(step_s, 1e-6))
