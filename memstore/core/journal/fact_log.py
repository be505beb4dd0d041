"""The controller's journal: facts take effect only when enough holders have them (R16, R17). Pure.

    record --> waiting (no lease) --> sent --> spread on min(replicas, live) domains --> applied, in order

An entry is applied once, in sequence. A rebuilt log is the union of all surviving journals: each
journal of a term is a part of that term's one history, so equal (term, seq) means equal fact. What a fact says of each
rank is put together from the hosts that keep it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from memstore.core.cluster.facts import Fact, column_of
from memstore.core.journal.records import Entry, entries_of


class FactLog:
    """Sequence, acknowledgements and the order of application."""

    def __init__(self, term: int) -> None:
        self.term = term
        self.entries: list[Entry] = []  # applied and pending, in order
        self.waiting: list[Fact] = []  # decided without a lease: not yet an entry
        self.acked: dict[str, int] = {}  # host -> highest seq it has
        self.applied_seq = 0
        self.last_seq = 0  # the highest sequence number given out or received
        self._known: dict[tuple[int, int], Entry] = {}  # by place: entries of this log, and those that hosts showed it
        self._shortened: dict[tuple[int, int], Entry] = {}  # that hosts still have as they were
        self.journal_nbytes = 0  # of all records that the holders' journals have, needed or not

    @property
    def pending(self) -> list[Entry]:
        """Return this term's entries that are not replicated yet. Those of older terms were applied when they came."""
        found: list[Entry] = []
        for entry in reversed(self.entries):  # the newest are last; every event asks, so it must not walk the past
            if entry.term != self.term or entry.seq <= self.applied_seq:
                break
            found.append(entry)
        return found[::-1]

    def unapplied(self) -> list[Fact]:
        """Return every fact that is decided and not yet applied."""
        return [entry.fact for entry in self.pending] + self.waiting

    def at(self, place: tuple[int, int]) -> Entry | None:
        """Return the entry of a (term, seq), if it is known here."""
        return self._known.get(place)

    def read(self, host: str, records: Iterable[bytes]) -> list[Entry]:
        """Return the facts of a host's journal, and learn what that host keeps of them."""
        return entries_of(host, records, self._known)

    def adopt(self, journals: Iterable[Iterable[Entry]]) -> list[Fact]:
        """Rebuild from surviving journals; return every fact in order, all to be applied now.

        Of two forms of one fact the shorter one is newer.
        """
        union: dict[tuple[int, int], Entry] = {}
        for entry in chain.from_iterable(journals):
            known = union.setdefault((entry.term, entry.seq), entry)
            if known is not entry and len(entry.record) < len(known.record):
                union[entry.term, entry.seq] = entry
                continue
            column, other = column_of(known.fact), column_of(entry.fact)
            if column is not None and other is not None and column is not other and column == other:
                column.merge(other)
        self.entries = [union[key] for key in sorted(union)]
        self.last_seq = self.applied_seq = max((entry.seq for entry in self.entries), default=0)
        self.journal_nbytes = self.nbytes
        return [entry.fact for entry in self.entries]

    def merge(
        self, journal: Iterable[Entry], is_acceptable_late_fact: Callable[[Fact], bool] = lambda fact: True
    ) -> list[Fact]:
        """Take facts of a late host that this log lacks (terms before ours); return them to be applied.

        Facts that are refused are removed from all journals, or a successor would read them and decide otherwise. The
        check runs while all candidates are in the log. Sequence numbers of late facts may be those of entries of this
        term: only (term, seq) names an entry.
        """
        known = {(entry.term, entry.seq) for entry in self.entries}
        missing = [entry for entry in journal if (entry.term, entry.seq) not in known and entry.term < self.term]
        if not missing:
            return []
        before = self.entries
        self.entries = sorted([*before, *missing], key=_place)
        taken = sorted((entry for entry in missing if is_acceptable_late_fact(entry.fact)), key=_place)
        self.entries = sorted([*before, *taken], key=_place)
        return [entry.fact for entry in taken]

    def append(self, fact: Fact) -> Entry:
        """Give the fact its place; the caller sends it to every live holder."""
        self.last_seq += 1
        entry = Entry(self.term, self.last_seq, fact)
        self.entries.append(entry)
        self._known[entry.term, entry.seq] = entry
        self.journal_nbytes += len(entry.record)
        return entry

    def ack(self, host_id: str, seq: int) -> None:
        """Note that a holder's journal reaches `seq`."""
        self.acked[host_id] = max(self.acked.get(host_id, 0), seq)

    def forget(self, host_id: str) -> None:
        """Forget the acknowledgements of a dead host."""
        self.acked.pop(host_id, None)

    def replicated(self, is_enough: Callable[[list[str], Fact], bool]) -> list[Fact]:
        """Return the facts that are now replicated, in order, marking them applied.

        `is_enough(hosts, fact)` decides whether those hosts cover the domains the fact needs.
        """
        ready: list[Fact] = []
        for entry in self.pending:
            hosts = [host for host, seq in self.acked.items() if seq >= entry.seq]
            if not is_enough(hosts, entry.fact):
                break
            self.applied_seq = entry.seq
            ready.append(entry.fact)
        return ready

    def missing(self, journal: Sequence[Entry]) -> list[Entry] | None:
        """Return the records that a journal lacks at its end, or None if it is not the first part of this log.

        A journal is compared in its own order: one that is not in order of terms is replaced as a whole.
        """
        count = len(journal)
        return self.entries[count:] if list(journal) == self.entries[:count] else None

    @property
    def nbytes(self) -> int:
        """Return the total size of the retained records, in bytes."""
        return sum(len(entry.record) for entry in self.entries)

    def shorten(self, shorter: Callable[[Fact], Fact]) -> None:
        """Replace applied facts by the part of each that is still needed, in its place."""
        for at, entry in enumerate(self.entries):
            fact = shorter(entry.fact)
            if fact is not entry.fact:
                self.entries[at] = self._shortened[entry.term, entry.seq] = Entry(entry.term, entry.seq, fact)

    def shortened_records(self) -> list[bytes]:
        """Return the records that hosts are to have in place of longer ones, once."""
        found, self._shortened = self._shortened, {}
        kept = {(entry.term, entry.seq) for entry in self.entries}
        return [entry.record for place, entry in found.items() if place in kept]

    def compact(self, is_needed: Callable[[Fact], bool]) -> bool:
        """Forget applied facts that nothing needs; True if half of the journals' bytes are not needed: rewrite them.

        The journals' size counts, not the size here: with hundreds of hosts, each of them a fact that stays,
        the few that one commit makes needless are never half of all.
        """
        kept = [e for e in self.entries if (e.term == self.term and e.seq > self.applied_seq) or is_needed(e.fact)]
        if self.entries and (not kept or kept[-1] != self.entries[-1]):
            kept.append(self.entries[-1])  # the last one carries the sequence
        self.entries = kept
        self._known = {(e.term, e.seq): e for e in kept}
        if self.nbytes > self.journal_nbytes // 2:
            return False
        self.journal_nbytes = self.nbytes
        return True


def _place(entry: Entry) -> tuple[int, int]:
    return entry.term, entry.seq
