"""The steps of a rank: which are to be put, their tickets, and giving one up on all ranks alike (R12, R15, R33)."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from concurrent.futures import Future
from typing import Any

from memstore.client.ticket import CATCHING_UP, TERMINAL, UNCOMMITTED, SkippedPuts, Ticket, check_step
from memstore.core.schedule import EarlyPut, Schedule
from memstore.core.wire.calls import AnswerPutEarly, ReportNonfinite, RetireStep, SkipStep
from memstore.core.wire.orders import PutEarly, StepLevel
from memstore.core.wire.rank_messages import StepTrained
from memstore.core.wire.replies import Joined
from memstore.errors import CommitError, ConfigError, StepConflict
from memstore.intervals import parse_put_every
from memstore.shell.rank.holder_link import HolderLink
from memstore.shell.threads import is_answered

log = logging.getLogger("memstore")
TICKETS_KEPT = 64
STEPS_GROW = (
    "Steps must strictly increase through the whole run: where a counter begins again in each epoch, put "
    "step + epoch * steps_per_epoch; to go back use store.rewind(step)"
)
SAY_S = 1.0  # between two words of what is trained
COMMIT_S = 10.0  # for a commit that a caller waits for


class Steps:
    """The newest steps of one store. Used by one thread, but for the events of the link."""

    def __init__(self, link: HolderLink) -> None:
        self._link = link
        self._lock = threading.RLock()  # of the tickets; a signal's handler may put
        self._tickets: dict[int, Ticket] = {}
        self._skipped = SkippedPuts(link)
        self._skipping: Future[Any] | None = None
        self._trained, self._said_s = (-1, -1), -SAY_S  # attempt and step that the holder was sent last, and when
        self._nonfinite: list[str] = []  # the tensors that the controller was sent last
        self.resume_step = 0  # no older one is put
        self.last = self._floor = -1

    def begin_attempt(self, joined: Joined) -> None:
        """Take the answer of a join or a rewind."""
        self.resume_step = joined.resume_step
        self._skipped.begin()
        self._nonfinite = []
        self._schedule, self._is_late = Schedule(parse_put_every(joined.put_every), None), False
        self._early, self._decided = EarlyPut(), threading.Event()
        self.last = self._floor = -1
        if joined.restored_step is not None:
            self.go_on_from(int(joined.restored_step))

    def go_on_from(self, step: int) -> None:
        """Note the step that a get restored."""
        self.last = self._floor = step
        self._schedule.go_on_from(step)

    def due(self, step: int, budget_s: float, is_epoch_end: bool | None = None) -> bool:
        """Do what `Store.should_put` promises. See `core/schedule.py`."""
        if self._schedule.is_epoch and is_epoch_end is None:
            raise ConfigError(
                f'job {self._link.job!r} has put_every="epoch", and should_put({step}) does not know where one ends: '
                "call should_put(step, is_epoch_end=...) on every rank for every step, or choose another put_every",
                field="put_every",
            )
        self.trained(step)
        until_s = time.monotonic() + budget_s
        is_early = self._is_early(step, until_s)
        while not self._is_late and (put := self._schedule.awaited(step, self._uncommitted())) is not None:
            try:
                with contextlib.suppress(CommitError):  # then it brings none
                    self.wait_committed(put, max(0.0, until_s - time.monotonic()))
            except TimeoutError:
                self._is_late = True  # not again until a commit comes
                log.warning(
                    "memstore %s rank %d: should_put(%d) waited %g s for the commit of step %d and goes by the last "
                    "distance; other ranks may go by a newer one. Does every rank ask it for every step, and put?",
                    self._link.job,
                    self._link.rank,
                    step,
                    budget_s,
                    put,
                )
        return self._schedule.due(step, is_epoch_end=bool(is_epoch_end)) or is_early

    def _is_early(self, step: int, until_s: float) -> bool:
        """Return whether all ranks put this step ahead of its turn; waits for the decision."""
        while True:
            self._decided.clear()
            with self._lock:
                is_early = self._early.asks(step)
                if is_early is None and time.monotonic() >= until_s:
                    self._early.give_up()
                    return False
            if is_early is not None:
                return is_early
            self._decided.wait(max(0.0, until_s - time.monotonic()))

    def on_put_early(self, event: PutEarly) -> None:
        """Take a question or a decision of the controller; on a thread of the link."""
        with self._lock:
            if event.is_agreed is not None:
                self._early.decided(event.step, is_agreed=event.is_agreed)
                self._decided.set()
                return
            is_possible = self._early.offered(event.step)
        self._link.call_soon(AnswerPutEarly(**self._link.who(), step=event.step, is_possible=is_possible))

    def trained(self, step: int) -> None:
        """Tell the holder, at most once a second, of a step that is trained and not put (R33).

        Its heartbeats pass it on. The steps since the last word are lost when this rank dies, so that every count of
        them is "at least".
        """
        now, what = time.monotonic(), (self._link.attempt, step)
        if what > self._trained and now - self._said_s >= SAY_S:
            self._trained, self._said_s = what, now
            self._link.notify(StepTrained(step=step))

    def _uncommitted(self) -> list[tuple[int, int]]:
        tickets = self.newest_first()[::-1]
        befores = [tickets[0].step - 1, *(ticket.step for ticket in tickets)] if tickets else []
        return [(t.step, before) for t, before in zip(tickets, befores, strict=False) if t.level in UNCOMMITTED]

    # -- tickets ------------------------------------------------------------------------------

    def newest_first(self) -> list[Ticket]:
        """Return the tickets kept."""
        with self._lock:
            return [ticket for _, ticket in sorted(self._tickets.items(), reverse=True)]

    def wait_committed(self, step: int, limit_s: float = COMMIT_S) -> None:
        """Wait for the commit of a step, if its ticket is known; CommitError, TimeoutError."""
        with self._lock:
            ticket = self._tickets.get(step)
        if ticket is not None:
            ticket.wait("committed", limit_s)

    def same(self, step: int) -> Ticket | None:
        """Return the ticket of the newest step, None for a newer one; StepConflict for an older one."""
        check_step(step)
        with self._lock:
            known = self._tickets.get(step) if step == self.last else None
        if known is None and step <= self.last:
            raise StepConflict(
                f"job {self._link.job!r} rank {self._link.rank}: step {step} does not follow step {self.last}. "
                f"{STEPS_GROW}",
                step=step,
                last_step=self.last,
            )
        return known

    def new(self, step: int, nbytes: int, began_s: float) -> Ticket:
        """Return a ticket that is not known yet."""
        return Ticket(step, nbytes, began_s, self._link.commands)

    def add(self, ticket: Ticket) -> Ticket:
        """Know a ticket, whose step is the newest."""
        with self._lock:
            self._tickets[ticket.step] = ticket
            for old in sorted(self._tickets)[:-TICKETS_KEPT]:
                del self._tickets[old]
        self.last = ticket.step
        return ticket

    def forget(self, step: int) -> None:
        """Know nothing of a step any more: its put has raised an error."""
        with self._lock:
            self._tickets.pop(step, None)
            self.last = max((s for s in self._tickets if s < step), default=self._floor)

    def on_level(self, event: StepLevel) -> None:
        """Raise a ticket; supersede older ones that can never rise."""
        step, level = event.step, event.level
        self._schedule.learn(event.put_from, event.put_steps)  # first: who waits for the level acts by it
        self._is_late = self._is_late and level not in ("committed", "durable")
        with self._lock:
            ticket = self._tickets.get(step)
            older = [t for s, t in self._tickets.items() if s < step]
        self.resume_step = max(self.resume_step, event.resume)
        if ticket is not None:
            ticket.digest = event.digest or ticket.digest
            if ticket.raise_level(level, event.reason, degraded=event.degraded) and level == "skipped":
                self._skipped.add(ticket)
            elif level == "skipped" and event.reason:
                self._skipped.why = event.reason  # of a step that this rank gave up itself: the controller knows more
        if level in ("committed", "durable"):
            self._skipped.committed()
            for old in older:
                if old.level not in ("committed", "durable"):
                    old.raise_level("superseded", f"step {step} was committed")

    def fail_all(self, why: str, *, forget: bool = False) -> None:
        """Fail all earlier puts: they can reach no level any more."""
        with self._lock:
            tickets = list(self._tickets.values())
            if forget:
                self._tickets = {}
        for ticket in tickets:
            ticket.raise_level("failed", why)

    # -- steps that are not put ---------------------------------------------------------------

    def catch_up(self, ticket: Ticket) -> None:
        """Skip a step that all ranks skip, since the controller has said from which one on they put again."""
        if ticket.step < self.resume_step:
            why = f"; the newest step was given up since {self._skipped.why}" if self._skipped.why else ""
            ticket.raise_level("skipped", f"{CATCHING_UP}: all ranks put again from step {self.resume_step}{why}")
            self._skipped.add(ticket)

    def slots_are_held_by(self, step: int) -> str:
        """Return what a step waits for that finds no free slots."""
        with self._lock:
            oldest = min((s for s, t in self._tickets.items() if s < step and t.level in UNCOMMITTED), default=None)
        if oldest is None:
            return "no older step of this rank waits for a commit: copies that are sent, read or written hold its slots"
        return f"step {oldest} is not committed yet"

    def skip(self, ticket: Ticket, why: str, level: str = "skipped") -> None:
        """Give a step up; collective: the controller abandons it everywhere (R12)."""
        if ticket.raise_level(level, why):
            self._skipped.add(ticket)

        def resume(future: Any) -> None:
            if future.exception() is None:
                self.resume_step = max(self.resume_step, future.result().resume)

        request = SkipStep(
            **self._link.who(),
            step=ticket.step,
            why=why,
            stall_s=time.monotonic() - ticket.began_s,
            is_failed=level == "failed",
        )
        self._skipping = self._link.call_soon(request, resume)

    def retire(self, ticket: Ticket, why: str) -> None:
        """Give up a step that is torn, and if it is committed, now or by then, have no get return it (R12, R25)."""
        if ticket.level in TERMINAL:
            return
        ticket.mark_torn(why)
        link, step = self._link, ticket.step
        log.error("memstore %s rank %d: step %d is torn and will not be restored: %s", link.job, link.rank, step, why)
        self.skip(ticket, why, "failed")
        link.call_soon(RetireStep(job=link.job, attempt=link.attempt, step=step, reason=why, is_torn=True))

    def looked(self, step: int, names: list[str], *, is_skipped: bool) -> None:
        """Say once which tensors of a put have numbers that are not finite, and once that all are finite again."""
        if names == self._nonfinite:
            return
        self._nonfinite, link = names, self._link
        if names:
            what = "so all ranks give the step up" if is_skipped else "and is stored as it is"
            words = "memstore %s rank %d: step %d has numbers that are not finite in %s, %s"
            log.warning(words, link.job, link.rank, step, ", ".join(names), what)
        link.call_soon(ReportNonfinite(**link.who(), step=step, names=tuple(names)))

    def give_up(self, step: int, why: str, limit_s: float) -> None:
        """Skip a step that this rank will not put, so that what other ranks put of it frees its slots (R12).

        Waits, at most `limit_s`, until the controller knows, else ranks that put the next step earlier would skip
        that one.
        """
        with contextlib.suppress(StepConflict):  # an older step takes no slots any more
            ticket = self.same(step) or self.add(self.new(step, 0, time.monotonic()))
            if not ticket.is_over:
                self.skip(ticket, why, "failed")
        if self._skipping is not None:
            is_answered(self._skipping, limit_s)
