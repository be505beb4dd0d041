"""How long a step of training takes, from the first report of a rank at each. Pure (R12)."""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from statistics import median

PACE_STEPS = 9  # newest steps remembered: one pause among eight intervals moves the median little


class Pace:
    """The pace of one attempt, by the controller's monotonic clock."""

    def __init__(self) -> None:
        self._reached: deque[tuple[int, float]] = deque(maxlen=PACE_STEPS)  # step, when the first rank was there

    def reached(self, step: int, now: float) -> None:
        """Take that a rank is at a step now; only the first rank at a newer one than before counts."""
        if not self._reached or step > self._reached[-1][0]:
            self._reached.append((step, now))

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
