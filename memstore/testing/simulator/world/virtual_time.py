"""Virtual time: a queue of events, and threads that are generators."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator
from typing import Protocol

Wait = float | Callable[[], bool]  # what a thread yields: seconds to sleep, or a condition to wait for
Thread = Generator[Wait, None, None]
POLL_S = 0.05


class Process(Protocol):
    """The owner of threads: they end when it dies, and wait while it is frozen."""

    @property
    def is_up(self) -> bool:
        """True until the process is dead."""

    @property
    def is_frozen(self) -> bool:
        """Return whether the process is stopped."""


class Endless:
    """A process that neither dies nor freezes, for the threads of the simulation itself."""

    is_up, is_frozen = True, False


class VirtualTime:
    """The clock of one simulation and the queue of its events."""

    def __init__(self, close: Callable[[Thread], None]) -> None:
        """Start at 0 s; `close` ends a thread whose process is dead."""
        self.now = 0.0
        self.events_count = 0
        self._close = close
        self._order = itertools.count()  # events of the same moment happen in the order in which they were added
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

    def spawn(self, work: Thread, process: Process) -> None:
        """Run a generator as a thread of a process."""

        def step() -> None:
            if not process.is_up:
                self._close(work)
                return
            if process.is_frozen:
                self.at(POLL_S, step)
                return
            try:
                wait = next(work)
            except StopIteration:
                return
            if callable(wait):
                poll(wait)
            else:
                self.at(wait, step)

        def poll(is_done: Callable[[], bool]) -> None:
            if process.is_up and (process.is_frozen or not is_done()):
                self.at(POLL_S, lambda: poll(is_done))
            else:
                step()

        self.at(0.0, step)

    def next_event(self, until_s: float) -> Callable[[], None] | None:
        """Advance to the next event and return its work; None if none is due by a moment."""
        if not self._queue or self._queue[0][0] > until_s:
            return None
        self.now, _, work = heapq.heappop(self._queue)
        self.events_count += 1
        return work
