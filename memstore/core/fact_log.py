"""The controller's journal: facts take effect only when enough holders have them (R16, R17). Pure.

    record --> waiting (no lease) --> sent --> spread on min(replicas, live) domains --> applied, in order

An entry is applied once, in sequence. A rebuilt log is the union of all surviving journals: each
journal of a term is a part of that term's one history, so equal (term, seq) means equal fact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from memstore.core.facts import Entry, Fact


class FactLog:
    """Sequence, acknowledgements and the order of application."""

    def __init__(self, term: int) -> None:
        self.term = term
        self.entries: list[Entry] = []  # applied and pending, in order
        self.waiting: list[Fact] = []  # decided without a lease: not yet an entry
        self.acked: dict[str, int] = {}  # host -> highest seq it has
        self.applied_seq = 0

    @property
    def last_seq(self) -> int:
        """The highest sequence number given out."""
        return self.entries[-1].seq if self.entries else 0

    @property
    def has_pending(self) -> bool:
        """True while some fact is decided but not yet applied."""
        return bool(self.waiting) or self.applied_seq < self.last_seq

    def adopt(self, journals: Iterable[Iterable[Entry]]) -> list[Fact]:
        """Rebuild from surviving journals; return every fact in order, all to be applied now."""
        union = {(entry.term, entry.seq): entry for journal in journals for entry in journal}
        self.entries = [union[key] for key in sorted(union)]
        # Sequence numbers grow across terms, so the newest entry bounds them all.
        self.applied_seq = self.last_seq
        return [entry.fact for entry in self.entries]

    def merge(self, journal: Iterable[Entry]) -> list[Fact]:
        """Take facts of a late host that this log lacks (terms before ours); return them to be applied."""
        known = {(entry.term, entry.seq) for entry in self.entries}
        missing = [entry for entry in journal if (entry.term, entry.seq) not in known and entry.term < self.term]
        if missing:
            self.entries = sorted([*self.entries, *missing], key=lambda entry: (entry.term, entry.seq))
        return [entry.fact for entry in sorted(missing, key=lambda entry: (entry.term, entry.seq))]

    def append(self, fact: Fact) -> Entry:
        """Give the fact its place; the caller sends it to every live holder."""
        entry = Entry(self.term, self.last_seq + 1, fact)
        self.entries.append(entry)
        return entry

    def ack(self, host_id: str, seq: int) -> None:
        """A holder's journal reaches `seq`."""
        self.acked[host_id] = max(self.acked.get(host_id, 0), seq)

    def forget(self, host_id: str) -> None:
        """A host died: what it acknowledged no longer counts."""
        self.acked.pop(host_id, None)

    def spread(self, is_enough: Callable[[list[str], Fact], bool]) -> list[Fact]:
        """Return the facts that have now spread, in order, marking them applied.

        `is_enough(hosts, fact)` decides whether those hosts cover the domains the fact needs.
        """
        ready: list[Fact] = []
        for entry in self.entries:
            if entry.seq <= self.applied_seq:
                continue
            hosts = [host for host, seq in self.acked.items() if seq >= entry.seq]
            if not is_enough(hosts, entry.fact):
                break
            self.applied_seq = entry.seq
            ready.append(entry.fact)
        return ready

    def compact(self, is_needed: Callable[[Fact], bool]) -> bool:
        """Forget applied facts that nothing needs; True if the journals should be rewritten."""
        kept = [entry for entry in self.entries if entry.seq > self.applied_seq or is_needed(entry.fact)]
        if kept and kept[-1].seq != self.last_seq:
            kept.append(self.entries[-1])  # the last one carries the sequence
        is_smaller = len(kept) < len(self.entries)
        self.entries = kept
        return is_smaller
