"""What happened in a round, in order, for a person: faults, observations, verdicts."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class BrokenPromise:
    """A promise that was broken."""

    kind: str
    at_s: float
    text: str


@dataclass
class Story:
    """The lines of a round, with the seconds since it began; every thread of the round may write."""

    began_s: float = field(default_factory=time.monotonic)
    lines: list[str] = field(default_factory=list)
    violations: list[BrokenPromise] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)  # gets, bytes, commits and the like
    faults: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def now_s(self) -> float:
        """Return the seconds since the round began."""
        return time.monotonic() - self.began_s

    def log(self, text: str) -> None:
        """Add a line."""
        with self.lock:
            self.lines.append(f"{self.now_s():8.2f}  {text}")

    def fault(self, kind: str, text: str) -> None:
        """Add a fault."""
        with self.lock:
            self.faults[kind] += 1
        self.log(f"FAULT {kind}: {text}")

    def violate(self, kind: str, text: str) -> None:
        """Note that a promise was broken; the round goes on, to show the consequences."""
        with self.lock:
            self.violations.append(BrokenPromise(kind, self.now_s(), text))
        self.log(f"VIOLATION {kind}: {text}")

    def add(self, what: str, count: int = 1) -> None:
        """Count something."""
        with self.lock:
            self.counts[what] += count
