"""Writes facts into a holder's journal, and keeps those for which it has no room yet (R16).

If the file system is full, the session goes on: facts that cannot be written wait, in order, and are acknowledged once
they are written. Until then this host counts for no fact, and `problem` says why.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from memstore.core.journal.records import journal_after, whole_order
from memstore.core.wire.orders import WriteJournal
from memstore.errors import CapacityError, IntegrityError


class HostJournal(Protocol):
    """A host's journal (shell/arena/journal_file.py). Its writes need room: CapacityError, and it is as before."""

    dropped_nbytes: int  # of a damaged rest that was cut off

    def records(self) -> list[bytes]:
        """Return every record; a damaged rest is cut off first."""

    def append(self, records: Sequence[bytes]) -> None:
        """Write records behind those that are there."""

    def rewrite(self, records: Sequence[bytes]) -> None:
        """Write records in place of all that are there."""


class JournalWriter:
    """Writes what the controller sends, in its order. The caller keeps sessions apart: one thread at a time."""

    def __init__(self, journal: HostJournal, on_written: Callable[[int], None]) -> None:
        self.journal = journal
        self.problem = ""  # why the oldest that waits could not be written
        self._on_written = on_written
        self._waiting: deque[WriteJournal] = deque()
        self._pages: list[bytes] = []  # of an order whose end has not come

    def take(self, order: WriteJournal) -> None:
        """Write the facts of an order, or let them wait; those of before go first, unless it replaces them all.

        Raises:
            IntegrityError: Records to be kept are damaged: end the session, and show the next one the rest.
        """
        whole = whole_order(self._pages, order)
        if whole is None:
            return
        if whole.keep == ():
            self._waiting.clear()
        self._waiting.append(whole)
        self.retry()

    def retry(self) -> None:
        """Write what waits, as far as there is room now."""
        while self._waiting:
            order = self._waiting[0]
            try:
                self._write(order)
            except (
                CapacityError,
                FileNotFoundError,
                NotADirectoryError,
            ) as exc:  # no room, or no folder: `folder_guard` ends that
                self.problem = str(exc)
                return
            except IntegrityError:
                self._waiting.clear()
                raise
            self._waiting.popleft()
            self._on_written(order.seq)
        self.problem = ""

    def _write(self, order: WriteJournal) -> None:
        if order.keep is None:
            self.journal.append(order.records)
            return
        dropped_nbytes, there = self.journal.dropped_nbytes, self.journal.records() if order.keep else []
        if self.journal.dropped_nbytes > dropped_nbytes:
            raise IntegrityError("the journal was damaged: it lacks facts that are to be kept")
        self.journal.rewrite(journal_after(there, order))

    def forget(self) -> None:
        """Forget waiting records: another session begins, which sends the missing ones with its own numbers (R16)."""
        self._waiting.clear()
        self._pages.clear()
        self.problem = ""
