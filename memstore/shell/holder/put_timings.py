"""What this host's ranks measured of their puts, for the controller and for metrics. Never waited for (R11)."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from memstore.core.wire.measured import seconds

KEPT = 4096  # puts that nobody has counted yet; without metrics nobody ever does


@dataclass(frozen=True, slots=True)
class Put:
    """One put of one rank, sealed here."""

    job: str
    stall_s: float
    nbytes: int


class PutMeter:
    """Remembers the puts since the last `take`; any thread may."""

    def __init__(self) -> None:
        self._puts: deque[Put] = deque(maxlen=KEPT)

    def count(self, job: str, body: dict[str, Any]) -> None:
        """A hand-over was sealed."""
        self._puts.append(Put(job, seconds(body.get("stall_s")), int(body["nbytes"])))

    def take(self) -> list[Put]:
        """Return the puts since the last call."""
        taken = []
        while self._puts:
            taken.append(self._puts.popleft())
        return taken


def measured(body: dict[str, Any]) -> dict[str, float]:
    """Return what a seal tells the controller of its hand-over: seconds that put blocked, and since it began.

    The rank's monotonic clock is this host's, so its age needs no agreement between machines.
    """
    stall_s, began_s, now = seconds(body.get("stall_s")), seconds(body.get("began_s")), time.monotonic()
    return {"stall_s": stall_s, "age_s": now - began_s if 0.0 < began_s <= now else stall_s}
