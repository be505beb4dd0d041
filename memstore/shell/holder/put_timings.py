"""Collects what this host's ranks measured of their puts, for metrics; no put waits for it (R11)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

KEPT = 4096  # puts that the metrics have not counted yet; without metrics they are never counted


@dataclass(frozen=True, slots=True)
class TimedPut:
    """One put of one rank, sealed here."""

    job: str
    stall_s: float
    nbytes: int


class PutMeter:
    """The puts since the last `take`; any thread may use it."""

    def __init__(self) -> None:
        self._puts: deque[TimedPut] = deque(maxlen=KEPT)

    def count(self, job: str, stall_s: float, nbytes: int) -> None:
        """Count a put that was sealed."""
        self._puts.append(TimedPut(job, stall_s, nbytes))

    def take(self) -> list[TimedPut]:
        """Return the puts since the last call."""
        taken = []
        while self._puts:
            taken.append(self._puts.popleft())
        return taken
