"""What became of one put: its level now, and a wait for the level one needs (R15)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from memstore.config import check_seconds, check_whole
from memstore.errors import ClosedError, CommitError, ConfigError, StepConflict
from memstore.shell.rank.holder_link import HolderLink
from memstore.shell.threads import LOOK_S, SafeCondition

LEVELS = ("pending", "sealed", "replicated", "committed", "durable")  # ordered
UNCOMMITTED = LEVELS[:3]
TERMINAL = ("skipped", "superseded", "failed")
SKIPS_WARN = 3  # in a row: one is an everyday thing under load
CATCHING_UP = "the store is catching up"
log = logging.getLogger("memstore")


def check_process(what: str, pid: int, instead: str = "") -> None:
    """Raise ClosedError in a process forked from the ticket's: the holder's events do not reach it."""
    if os.getpid() != pid:
        raise ClosedError(
            f"{what} is that of process {pid}, of which this one ({os.getpid()}) was forked: use it there{instead}"
        )


class Ticket:
    """Returned by put; `level` rises by itself.

    Attributes: step, nbytes, stall_s (seconds that put blocked, and a fence for its overlapped copy), level, degraded,
    reason.
    """

    def __init__(self, step: int, nbytes: int = 0, began_s: float = 0.0, commands: Callable[[str], str] = str) -> None:
        self.step, self.nbytes = step, nbytes
        self.began_s = began_s  # when its put began, monotonic
        self.stall_s = 0.0
        self.level = "pending"
        self.degraded = False
        self.reason = ""
        self.digest = ""  # of the shard, once its holder has sealed it
        self._torn = ""
        self._commands = commands  # names the store in an error's commands
        self._changed = SafeCondition()
        self._pid = os.getpid()

    def __repr__(self) -> str:
        note = f", degraded: {self.reason}" if self.degraded else f", {self.reason}" if self.reason else ""
        return f"Ticket(step={self.step}, {self.level}, {self.nbytes} bytes, stall {self.stall_s * 1e3:.1f} ms{note})"

    @property
    def is_over(self) -> bool:
        """Return whether by now the level cannot change any more."""
        return self.level in TERMINAL or self.level == "durable"

    def raise_level(self, level: str, reason: str = "", *, degraded: bool = False) -> bool:
        """Take a new level, and say if it is taken: levels never fall, and a terminal one is final.

        A commit always wins over a guess.
        """
        with self._changed:
            if self.level in TERMINAL or (level in TERMINAL and self.level in ("committed", "durable")):
                return False
            if level in LEVELS and LEVELS.index(level) < LEVELS.index(self.level):
                return False
            self.level, self.reason = level, self._torn or reason
            self.degraded = degraded if level in ("committed", "durable") else self.degraded
            self._changed.notify_all()
            return True

    def mark_torn(self, why: str) -> None:
        """Record that the stored bytes mix two moments (torn). Keep this as the reason from now on."""
        with self._changed:
            self._torn = self.reason = why

    def wait(self, level: str = "committed", timeout_s: float = 60.0) -> Ticket:
        """Wait until the step has reached `level`; return this ticket.

        Raises:
            CommitError: the level cannot be reached any more; the message has the reason.
            TimeoutError: it was not reached within `timeout_s`; the message has the level now.
            ClosedError: this process was forked from the one that put, and receives no levels.
        """
        if level not in LEVELS:
            raise ConfigError(f"level {level!r} is unknown: wait for one of {', '.join(LEVELS)}", field="level")
        check_process(f"the ticket of step {self.step}", self._pid)  # first: the lock may have been held at the fork
        timeout_s = check_seconds("timeout_s", timeout_s)
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                if self.level in LEVELS and LEVELS.index(self.level) >= LEVELS.index(level):
                    return self
                if self.level in TERMINAL:
                    raise CommitError(
                        f"step {self.step} was {self.level} and will not be {level}: {self.reason}",
                        step=self.step,
                        level=self.level,
                    )
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(
                        f"step {self.step} is {self.level} after {timeout_s:g} s, not yet {level}: see "
                        f"{self._commands('`memstore status`')}, or wait longer with timeout_s="
                    )
                self._changed.wait(min(left_s, LOOK_S))


class SkippedPuts:
    """This rank's puts in a row of which nothing came: the log has the third, the sixth, the twelfth and so on (D284).

    Commits in between end a row; as many of them as the next warning waits for make the log as quick to warn again.
    """

    def __init__(self, link: HolderLink) -> None:
        self._link = link
        self.begin()

    def begin(self) -> None:
        """Begin to count: an attempt begins."""
        self._skipped = self._committed = 0
        self.why, self._warn_at = "", SKIPS_WARN

    def committed(self) -> None:
        """End a row with a commit."""
        self._skipped, self._committed, self.why = 0, self._committed + 1, ""
        if self._committed >= self._warn_at:
            self._warn_at = SKIPS_WARN

    def add(self, ticket: Ticket) -> None:
        """Count a put that was skipped or failed; some reasons only say that others were."""
        self._skipped, self._committed = self._skipped + 1, 0
        if not ticket.reason.startswith(CATCHING_UP):
            self.why = ticket.reason
        if self._skipped >= self._warn_at:
            self._warn_at *= 2
            log.warning(
                "memstore %s rank %d: %d puts in a row were skipped, up to step %d, with no commit between them: %s",
                self._link.job,
                self._link.rank,
                self._skipped,
                ticket.step,
                self.why or ticket.reason,
            )


def check_step(step: int) -> int:
    """Return a step's number as a plain int, numpy's too; StepConflict if no step may have it."""
    try:
        return check_whole("step", step)
    except ConfigError as error:
        raise StepConflict(str(error)) from None
