"""The sessions of one holder with controllers: the newest of the highest term is obeyed (R16, R17).

begun, of the highest term so far --> obeyed --a newer one begins, or its connection ends--> over
  '--of a lower term--> refused
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from memstore.core.cluster.facts import AttemptOpened, JobRemoved
from memstore.core.holder.fences import JobFences
from memstore.core.holder.journal_writer import HostJournal, JournalWriter
from memstore.core.journal.records import entry_from_record

S = TypeVar("S")


def read_journal(records: Iterable[bytes], fences: JobFences) -> int:
    """Learn the fences from before, and return the highest term: nothing older is served meanwhile (R17, R21)."""
    term = 0
    for record in records:
        entry = entry_from_record(record)
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
