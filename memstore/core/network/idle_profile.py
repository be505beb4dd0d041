"""When will a rank's network be idle, and for how long? Learned from marks of the last iterations. Pure.

    iteration --------------------------------------> iteration
    | idle 0 |#busy#| idle 1 |##busy##| idle 2 |#busy#| idle 3 |

A rank marks where its collectives begin and end and where an iteration begins. Spans are known by their place between
the marks, not by the clock, so a late iteration shifts nothing. Read `chunk_fit.py` next, which fills them.
Source: Gemini (SOSP 2023), section 5, online profiling; ours: it never ends, and a new pattern replaces the old one.
"""

from __future__ import annotations

import enum
import math
from collections import deque

WINDOW = 16  # iterations that the profile is taken from
LEARN_MIN = 3  # iterations of one pattern that make a profile
QUANTILE = 0.2  # of a span's lengths: four iterations in five have at least this much
BUSY_MAX_S = 10.0  # a collective that takes longer hangs, or its rank does: it moves no bytes
SPANS_MAX = 8192  # in one iteration; beyond it the loop marks no iterations, and there is nothing to learn


class Kind(enum.IntEnum):
    """What a mark says."""

    BUSY = 1  # a collective begins, and none was under way
    IDLE = 2  # the last one under way has ended
    ITERATION = 3  # the next iteration begins


class IdleSpans:
    """One rank's marks, in the order of their times, and what follows from them."""

    def __init__(self) -> None:
        self.is_busy = False
        self.since_s = -math.inf  # when the present span, busy or idle, began
        self.iteration_s: float | None = None  # when the present iteration began
        self.marked_s = -math.inf  # the last mark
        self.expected: tuple[float, ...] = ()  # lengths of the idle spans of an iteration, once learned
        self._lengths: list[float] = []  # of this iteration's idle spans that are over
        self._history: deque[tuple[float, ...]] = deque(maxlen=WINDOW)  # of past ones

    def mark(self, kind: Kind, at_s: float) -> None:
        """Take the next mark."""
        self.marked_s = at_s
        if kind is Kind.BUSY:  # again: the one before was given up
            if not self.is_busy:
                self._end_idle(at_s)
            self.is_busy, self.since_s = True, at_s
        elif kind is Kind.IDLE and self.is_busy:
            self.is_busy, self.since_s = False, at_s
        elif kind is Kind.ITERATION:
            self._end_iteration(at_s)

    def lose(self) -> None:
        """Marks are missing: the present iteration teaches nothing."""
        self.iteration_s, self._lengths = None, []

    def room_s(self, now: float, share: float = 1.0) -> float:
        """Return what is left now of this share of the present idle span: 0 if busy, inf if unknown.

        An idle span twice as long as the longest expected one belongs to no pattern: training pauses or has ended.
        """
        if self.is_busy:
            return 0.0
        if not self.expected or self.iteration_s is None:
            return math.inf
        idle_s, place = now - self.since_s, len(self._lengths)
        if idle_s > 2 * max(self.expected):
            return math.inf
        return max(0.0, share * self.expected[place] - idle_s) if place < len(self.expected) else 0.0

    def _end_idle(self, at_s: float) -> None:
        if self.iteration_s is not None and len(self._lengths) < SPANS_MAX:
            self._lengths.append(at_s - self.since_s)

    def _end_iteration(self, at_s: float) -> None:
        if not self.is_busy:
            self._end_idle(at_s)
            self.since_s = at_s
        if self.iteration_s is not None and 1 < len(self._lengths) < SPANS_MAX:
            self._history.append(tuple(self._lengths))
            self._learn()
        self.iteration_s, self._lengths = at_s, []

    def _learn(self) -> None:
        """Take a low quantile of every span over the recent iterations of the newest pattern."""
        newest = len(self._history[-1])
        alike = [row for row in self._history if len(row) == newest]
        if len(alike) < LEARN_MIN:
            self.expected = ()
            return
        place = int(QUANTILE * (len(alike) - 1))
        self.expected = tuple(sorted(lengths)[place] for lengths in zip(*alike, strict=True))
