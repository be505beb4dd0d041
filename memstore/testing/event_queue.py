"""A clock that stands still until work is due on it."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class EventQueue:
    """Work at moments of virtual time; what is due at one moment is done in the order in which it was added."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events_count = 0
        self._order = itertools.count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, delay_s: float, work: Callable[[], None]) -> None:
        """Do something after a delay."""
        heapq.heappush(self._queue, (self.now + delay_s, next(self._order), work))

    def every(self, every_s: float, work: Callable[[], object]) -> None:
        """Do something again and again."""

        def again() -> None:
            self.at(every_s, again)
            work()

        self.at(every_s, again)

    def next_event(self, until_s: float) -> Callable[[], None] | None:
        """Advance to the next event and return its work; None if none is due by a moment."""
        if not self._queue or self._queue[0][0] > until_s:
            return None
        self.now, _, work = heapq.heappop(self._queue)
        self.events_count += 1
        return work
