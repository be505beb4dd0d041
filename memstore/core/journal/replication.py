"""Updates of the holders' journals: new facts, missing records, compacted ones. Pure (R16).

    decided --within the lease--> recorded
    recorded --at the end of the event, or before an answer goes out--> sent to all live holders
    a session begins --> what its journal lacks, or all of it
    half of the bytes are not needed --> holders are sent what to keep

Read `fact_log.py` for when a fact takes effect, `records.py` for the format.
"""

from __future__ import annotations

from collections.abc import Sequence

from memstore.core.cluster.effects import Effects
from memstore.core.cluster.facts import Fact
from memstore.core.cluster.state import ClusterState
from memstore.core.journal.fact_log import FactLog
from memstore.core.journal.lease import TermLease
from memstore.core.journal.records import Entry, paged
from memstore.core.wire.orders import TermNumber, WriteJournal


class Journal:
    """The facts of one controller term, and the copies of them that the holders keep."""

    def __init__(self, state: ClusterState, out: Effects, term: int) -> None:
        self.state, self.out = state, out
        self.log = FactLog(term)
        self.lease = TermLease(state, out)
        self.unsent: list[Entry] = []  # facts of this event: they go out together at its end
        out.before_answer = self.send_facts

    def record(self, fact: Fact) -> None:
        """Record a decision; it takes effect once it is replicated. Without a lease it waits for one."""
        if self.lease.may_record():
            self.unsent.append(self.log.append(fact))
        else:
            self.log.waiting.append(fact)

    def record_waiting(self) -> None:
        """Record the facts that were decided without a lease, now that there is one."""
        while self.log.waiting and self.lease.may_record():
            self.unsent.append(self.log.append(self.log.waiting.pop(0)))

    def send_facts(self) -> None:
        """Give all live holders the facts that they were not sent yet, in one message."""
        if not self.unsent:
            return
        order = WriteJournal(keep=None, records=tuple(entry.record for entry in self.unsent), seq=self.unsent[-1].seq)
        self.unsent = []
        for host in self.state.hosts.live_ids():
            self.out.send(host, order)

    def send(self, *hosts: str, have: Sequence[Entry] | None = None) -> None:
        """Give hosts the whole journal in place of their own, or what theirs lacks if it is the first part of it."""
        self.send_facts()
        log = self.log
        missing = log.missing(have) if have is not None else None
        *pages, last = paged(entry.record for entry in (log.entries if missing is None else missing))
        orders = [WriteJournal(keep=None, records=page, seq=log.last_seq, has_more=True) for page in pages]
        orders.append(WriteJournal(keep=() if missing is None else None, records=last, seq=log.last_seq))
        for order in orders:
            for host in hosts:
                self.out.send(host, order)

    def shorten(self) -> None:
        """Have all live holders reduce their journals to the log's records, which are not sent again."""
        self.send_facts()
        log = self.log
        order = WriteJournal(
            keep=tuple(TermNumber(entry.term, entry.seq) for entry in log.entries),
            records=tuple(log.shortened_records()),
            seq=log.last_seq,
        )
        for host in self.state.hosts.live_ids():
            self.out.send(host, order)
