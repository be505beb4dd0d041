"""Virtual time: a queue of events, and threads that are generators."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Protocol

from memstore.testing.event_queue import EventQueue

Wait = float | Callable[[], bool]  # what a thread yields: seconds to sleep, or a condition to wait for
Thread = Generator[Wait, None, None]
POLL_S = 0.05


class SimProcess(Protocol):
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


class VirtualTime(EventQueue):
    """The clock of one simulation and the queue of its events."""

    def __init__(self, close: Callable[[Thread], None]) -> None:
        """Start at 0 s; `close` ends a thread whose process is dead."""
        super().__init__()
        self._close = close

    def spawn(self, work: Thread, process: SimProcess) -> None:
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
