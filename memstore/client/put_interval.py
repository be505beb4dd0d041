"""store.should_put(step): the same answer on every rank, by distances that commits bring (R33).

For the steps see `core/schedule/put_interval.py`.
"""

from __future__ import annotations

import contextlib
import logging
import time

from memstore.client.puts import Puts
from memstore.client.ticket import UNCOMMITTED
from memstore.core.schedule.put_interval import Schedule
from memstore.core.wire.orders import StepLevel
from memstore.core.wire.replies import Joined
from memstore.errors import CommitError
from memstore.intervals import parse_put_every

log = logging.getLogger("memstore")


class PutSchedule:
    """One store's schedule. Used by the training thread, but for the events of the link."""

    def __init__(self, puts: Puts, stall_budget_s: float) -> None:
        self._puts, self._budget_s = puts, stall_budget_s

    def begin_attempt(self, joined: Joined) -> None:
        """Take the answer of a join or a rewind."""
        self._schedule = Schedule(parse_put_every(joined.put_every), joined.restored_step)
        self._is_late = False  # a commit was waited for in vain: not again until one comes

    def go_on_from(self, step: int) -> None:
        """Note the step that a get restored."""
        self._schedule.go_on_from(step)

    def learn(self, event: StepLevel) -> None:
        """Take the distance that a commit brings."""
        self._schedule.learn(event.put_from, event.put_steps)
        self._is_late = self._is_late and event.level not in ("committed", "durable")

    def due(self, step: int) -> bool:
        """Do what `Store.should_put` promises."""
        deadline_s = time.monotonic() + self._budget_s
        while not self._is_late and (put := self._schedule.awaited(step, self._uncommitted())) is not None:
            try:
                with contextlib.suppress(CommitError):  # then it brings none
                    self._puts.wait_committed(put, max(0.0, deadline_s - time.monotonic()))
            except TimeoutError:
                self._is_late = True
                log.warning(
                    "memstore %s rank %d: should_put(%d) waited %g s for the commit of step %d and goes by the last "
                    "distance; other ranks may go by a newer one. Does every rank ask it for every step, and put?",
                    self._puts.job, self._puts.rank, step, self._budget_s, put,
                )  # fmt: skip
        return self._schedule.due(step)

    def _uncommitted(self) -> list[tuple[int, int]]:
        tickets = self._puts.newest_first()[::-1]
        befores = [tickets[0].step - 1, *(ticket.step for ticket in tickets)] if tickets else []
        return [(t.step, before) for t, before in zip(tickets, befores, strict=False) if t.level in UNCOMMITTED]
