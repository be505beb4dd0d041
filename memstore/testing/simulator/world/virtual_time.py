"""Virtual time: a queue of events, and threads that are generators."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Generator
from typing import Protocol


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


# -- network ------------------------------------------------------------------------------------------
# The simulated network: ordered streams with delays; links that are cut, slow, or flip a byte.
#
# A cut link loses nothing by itself. What was sent waits, as in a socket's buffer, until the link is healed or the
# stream is closed, as with TCP. Only a reset loses what is under way.


Schedule = Callable[[float, Callable[[], None]], None]
RETRY_S = 0.1


class Network:
    """All links: which are cut, how slow they are, and what is damaged on the way."""

    def __init__(self, rng: random.Random, schedule: Schedule) -> None:
        self.rng, self._schedule = rng, schedule
        self.delay_s = (0.001, 0.02)
        self.cut: set[tuple[str, str]] = set()  # (from, to): one direction each
        self.slow: dict[str, float] = {}  # host -> factor of every delay on its link
        self.silent: set[str] = set()  # hosts whose requests to peers, and those of peers to them, get no answer
        self.flips = 0  # so many of the next chunks arrive with a byte changed
        self.resets = 0  # so many of the next requests between hosts are cut off in the middle
        self.doubles = 0  # so many of the next reports arrive twice

    def reaches(self, source: str, target: str) -> bool:
        """Say whether what `source` sends arrives now."""
        return (source, target) not in self.cut

    def talks(self, a: str, b: str) -> bool:
        """Say whether a request and its answer get through."""
        return self.reaches(a, b) and self.reaches(b, a)

    def is_silent(self, a: str, b: str) -> bool:
        """Say whether a request between two hosts waits for its answer, although no connection is broken."""
        return a in self.silent or b in self.silent

    def split(self, left: list[str], right: list[str]) -> None:
        """Cut every link between two groups, both ways."""
        self.cut.update((a, b) for a in left for b in right)
        self.cut.update((b, a) for a in left for b in right)

    def heal(self) -> None:
        """End every fault of links."""
        self.cut.clear()
        self.slow.clear()
        self.silent.clear()
        self.flips = self.resets = self.doubles = 0

    def delay(self, a: str, b: str) -> float:
        """Draw the seconds that one message takes."""
        return self.rng.uniform(*self.delay_s) * max(self.slow.get(a, 1.0), self.slow.get(b, 1.0))

    def take(self, what: str) -> bool:
        """Use up one of the counted faults; return whether one was left."""
        left = int(getattr(self, what))
        setattr(self, what, max(0, left - 1))
        return left > 0


class Stream:
    """Messages from one process to another, in order, while `is_open`."""

    def __init__(self, network: Network, schedule: Schedule, source: str, target: str, reaches: Callable[[], bool]):
        self.network, self._schedule = network, schedule
        self.source, self.target, self._reaches = source, target, reaches
        self.is_open = True
        self._waiting: deque[Callable[[], None]] = deque()
        self._last_s = 0.0

    def send(self, now: float, work: Callable[[], None]) -> None:
        """Deliver `work` after the link's delay, after everything sent before it."""
        arrives_s = max(now + self.network.delay(self.source, self.target), self._last_s)
        self._last_s = arrives_s
        self._waiting.append(work)
        self._schedule(arrives_s - now, self._arrive)

    def _arrive(self) -> None:
        if not self.is_open or not self._waiting:
            return
        if not self.network.reaches(self.source, self.target) or not self._reaches():
            self._schedule(RETRY_S, self._arrive)
            return
        self._waiting.popleft()()
