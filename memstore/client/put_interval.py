"""store.should_put(step): the same answer on every rank, from the interval that all ranks were sent (R33).

A rank asks in the background, some steps ahead, and sends its measurements; for the steps see
`core/schedule/put_interval.py`.
"""

from __future__ import annotations

import logging
import statistics
import time
from concurrent.futures import Future, wait

from memstore.client.puts import Puts
from memstore.core.schedule.put_interval import Schedule
from memstore.core.wire.replies import Joined, PutInterval
from memstore.intervals import parse_put_every

log = logging.getLogger("memstore")


class PutSchedule:
    """One store's schedule. Used by the training thread."""

    def __init__(self, puts: Puts, stall_budget_s: float) -> None:
        self._puts, self._budget_s = puts, stall_budget_s
        self._every = parse_put_every("step")
        self._answer: Future[PutInterval] | None = None
        self.restart(-1)

    def begin_attempt(self, joined: Joined) -> None:
        """Take the answer of a join or a rewind."""
        self._every = parse_put_every(joined.put_every)
        restored = joined.restored_step
        self.restart(-1 if restored is None else restored)

    def restart(self, base_step: int) -> None:
        """Note the step from which training goes on: of a get, or -1 if nothing was restored."""
        self._schedule = Schedule(self._every, base_step)
        if self._answer is not None:
            self._puts.forget_put_interval(self._answer)
        self._answer = None
        self._is_late = False  # a round was waited for in vain: not again
        self._since: tuple[int, float] | None = None  # step and time from which a step's time is taken

    def due(self, step: int) -> bool:
        """Do what `Store.should_put` promises."""
        schedule = self._schedule
        if schedule.is_fixed:
            return schedule.due(step)
        if self._since is None:
            if schedule.is_open(step):  # training begins further on, with nothing measured
                schedule = self._schedule = Schedule(self._every, step - 1)
            self._since = (step, time.monotonic())
        schedule.come_to(step)
        if step >= schedule.asks_at and self._answer is None:
            self._answer = self._puts.ask_put_interval(schedule.asks_at, self._measured(step))
        deadline_s = time.monotonic() + self._budget_s
        while schedule.is_open(step) and self._take(step, deadline_s):
            pass
        return schedule.due(step)

    def _take(self, step: int, deadline_s: float) -> bool:
        """Take the next round's answer, waiting for it if need be; False if there is none."""
        if self._answer is None:  # an answer that came late: the next round is under way already
            self._answer = self._puts.ask_put_interval(self._schedule.asks_at, self._measured(step))
        wait([self._answer], 0.0 if self._is_late else max(0.0, deadline_s - time.monotonic()))
        if not self._answer.done() or self._answer.exception() is not None:
            if not self._is_late:
                log.warning(
                    "memstore %s rank %d: no word on how often to put within %g s: step %d goes by the last one, and "
                    "other ranks may go by a newer one. Does every rank call should_put() for every step?",
                    self._puts.job, self._puts.rank, self._budget_s, step,
                )  # fmt: skip
            self._is_late = True
            if self._answer.done():  # refused: to be asked again
                self._answer = None
            return False
        self._schedule.take(self._answer.result().steps)
        self._answer, self._is_late = None, False
        self._since = (step, time.monotonic())
        return True

    def _measured(self, step: int) -> dict[str, float]:
        first, since_s = self._since or (step, time.monotonic())
        tickets = [t for t in self._puts.newest_first() if t.step >= first and t.stall_s > 0]
        stalls_s = sum(ticket.stall_s for ticket in tickets)
        commits_s = [ticket.committed_s for ticket in tickets if ticket.committed_s > 0]
        train_s = time.monotonic() - since_s - stalls_s
        return {
            "step_s": max(0.0, train_s) / (step - first) if step > first else 0.0,
            "stall_s": statistics.median([ticket.stall_s for ticket in tickets] or [0.0]),
            "commit_s": statistics.median(commits_s or [0.0]),
        }
