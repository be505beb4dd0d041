"""Which step is being trained, although it is not put: a rank says it now and then, its holder remembers (R33).

rank --at most one message a second, of a step that should_put() or a skipped put names--> holder
holder --heartbeats--> controller

The steps since a rank's last report are lost when it dies, so that every count of them is "at least".
"""

from __future__ import annotations

import time

from memstore.core.wire.rank_messages import StepTrained
from memstore.shell.rank.holder_link import HolderLink

SAY_S = 1.0


class TrainedWord:
    """A rank's side. No round trip, and nothing is waited for."""

    def __init__(self, link: HolderLink) -> None:
        self._link = link
        self._said_s = -SAY_S
        self._said: tuple[int, int] = (-1, -1)  # attempt, step

    def say(self, step: int) -> None:
        """Note a step that is trained and not put."""
        now, what = time.monotonic(), (self._link.attempt, step)
        if what > self._said and now - self._said_s >= SAY_S:
            self._said, self._said_s = what, now
            self._link.notify(StepTrained(step=step))
