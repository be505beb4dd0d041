"""The sessions of one holder with controllers: the newest of the highest term is obeyed (R16, R17).

begun, of the highest term so far --> obeyed --a newer one begins, or its connection ends--> over
  '--of a lower term--> refused
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from memstore.core.cluster.facts import AttemptOpened, JobRemoved
from memstore.core.journal.records import entries_of, journal_after, whole_order
from memstore.core.wire.orders import WriteJournal
from memstore.errors import CapacityError, IntegrityError

# -- journal writer -----------------------------------------------------------------------------------
# Writes facts into a holder's journal, and keeps those for which it has no room yet (R16).


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


# -- fences -------------------------------------------------------------------------------------------
# Remembers, for each job, the first attempt whose processes this host still serves (R21).


class JobFences:
    """The fences of one holder. They only rise; a job without one has none of its attempts refused."""

    def __init__(self) -> None:
        self._first: dict[str, int] = {}
        self._removed: dict[str, int] = {}  # job -> the fence that its removal set

    def first(self, job: str) -> int:
        """Return the job's first attempt that may be served; 0 if none was fenced."""
        return self._first.get(job, 0)

    def is_fenced(self, job: str, attempt: int) -> bool:
        """Return whether processes of an attempt are refused."""
        return attempt < self.first(job)

    def is_removed(self, job: str) -> bool:
        """Return whether the job's fence stands because the job was removed."""
        return job in self._removed and self._removed[job] == self.first(job)

    def open(self, job: str, attempt: int) -> None:
        """Refuse the processes of all attempts before this one."""
        self._first[job] = max(self.first(job), attempt)

    def remove(self, job: str, attempt: int) -> None:
        """Refuse this attempt of a removed job, and all before it."""
        self._removed[job] = attempt + 1
        self.open(job, attempt + 1)


# -- sessions -----------------------------------------------------------------------------------------


S = TypeVar("S")


def read_journal(records: Iterable[bytes], fences: JobFences) -> int:
    """Learn the fences from before, and return the highest term: nothing older is served meanwhile (R17, R21)."""
    term = 0
    for entry in entries_of("", records):
        term = max(term, entry.term)
        if isinstance(entry.fact, AttemptOpened):
            fences.open(entry.fact.job, entry.fact.attempt)
        elif isinstance(entry.fact, JobRemoved):
            fences.remove(entry.fact.job, entry.fact.attempt)
    return term


class Sessions(Generic[S]):
    """The session that is obeyed, and the writer of its facts. The caller lets one thread in at a time."""

    def __init__(self, term: int, journal: HostJournal, on_written: Callable[[int], None]) -> None:
        """`term`: the highest that the journal names; `on_written` gets the written order of facts."""
        self.term = term
        self.current: S | None = None
        self.facts = JournalWriter(journal, on_written)

    def begin(self, session: S, term: int) -> tuple[bool, S | None]:
        """Say whether a session is obeyed from now on, and return the one that it replaces."""
        if term < self.term:
            return False, None
        self.term = term
        replaced, self.current = self.current, session
        self.facts.forget()
        return True, replaced

    def end(self, session: S) -> None:
        """Note that a session is over."""
        if self.current is session:
            self.current = None
