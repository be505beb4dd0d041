"""Updates of the holders' journals: new facts, missing records, compacted ones. Pure (R16).

    decided --within the lease--> recorded
    recorded --at the end of the event, or before an answer goes out--> sent to all live holders
    a session begins --> what its journal lacks, or all of it
    half of the bytes are not needed --> holders are sent what to keep

`TermLease` says when a controller may record, `Waiters` who is answered then. Read `fact_log.py` for when a fact takes
effect, `records.py` for the format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from memstore.core.cluster.collective import job_removed
from memstore.core.cluster.effects import Effects
from memstore.core.cluster.facts import Fact, JobRemoved
from memstore.core.cluster.job import Call
from memstore.core.cluster.state import ClusterState
from memstore.core.journal.fact_log import FactLog
from memstore.core.journal.records import Entry, paged, with_parts
from memstore.core.wire.orders import EchoClock, TermNumber, WriteJournal
from memstore.core.wire.replies import Reply

# -- lease --------------------------------------------------------------------------------------------
# How long a controller may take itself for the newest one, and record facts (R17). Pure.


class TermLease:
    """The lease of one controller term."""

    def __init__(self, state: ClusterState, out: Effects) -> None:
        self.state, self.out = state, out
        self.until_s = state.now  # by the membership's confirmation
        self.is_outranked = False  # some holder obeys a higher term: nothing is recorded under this one any more
        self._asked_s = -math.inf

    def renew(self, until_s: float) -> None:
        """Extend the lease: the membership confirmed the term."""
        self.until_s = max(self.until_s, until_s)

    def may_record(self) -> bool:
        """Return whether the membership's confirmation holds, or every registered holder was here within a lease.

        A holder that fell silent may obey a newer controller on the far side of a partition; one that is gone does not.
        """
        if self.is_outranked:
            return False
        now = self.state.now
        return now <= self.until_s or self.state.hosts.was_with_all(now - self.state.rules.lease_s)

    def tick(self) -> None:
        """Have every host echo the present time while the membership lease is about to expire."""
        now, lease_s = self.state.now, self.state.rules.lease_s
        if now < self.until_s - lease_s / 2 or now < self._asked_s + lease_s / 6:
            return
        self._asked_s = now
        order = EchoClock(clock_s=now)
        for host in self.state.hosts.live_ids():
            self.out.send(host, order)


# -- replication --------------------------------------------------------------------------------------


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
        unsent, self.unsent = self.unsent, []
        order = WriteJournal(keep=None, records=tuple(entry.record for entry in unsent), seq=unsent[-1].seq)
        for host in self.state.hosts.live_ids():
            records = with_parts(unsent, host)
            self.out.send(host, replace(order, records=records) if len(records) > len(unsent) else order)

    def send(self, *hosts: str, have: Sequence[Entry] | None = None) -> None:
        """Give hosts the whole journal in place of their own, or what theirs lacks if it is the first part of it."""
        self.send_facts()
        log = self.log
        missing = log.missing(have) if have is not None else None
        entries = log.entries if missing is None else missing
        for host in hosts:
            *pages, last = paged(with_parts(entries, host))
            for page in pages:
                self.out.send(host, WriteJournal(keep=None, records=page, seq=log.last_seq, has_more=True))
            self.out.send(host, WriteJournal(keep=() if missing is None else None, records=last, seq=log.last_seq))

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


# -- waiters ------------------------------------------------------------------------------------------
# Calls that are answered once the fact that they led to is true. Pure (R16).


@dataclass(slots=True)
class Waiting:
    """One call, the fact that it waits for, and its answer."""

    fact: Fact
    call: Call[Any]
    reply: Reply
    is_done_by_removal: bool  # the end of its job is as good as the fact


class Waiters:
    """The calls that wait: few, and facts are compared, since one that holds a configuration has no hash."""

    def __init__(self, out: Effects) -> None:
        self.out = out
        self._waiting: list[Waiting] = []

    def add(self, fact: Fact, call: Call[Any], reply: Reply, *, is_done_by_removal: bool = False) -> None:
        """Answer a call once a fact that was recorded is true.

        Args:
            fact: Recorded by the caller.
            call: To be answered.
            reply: It may be filled until then.
            is_done_by_removal: Answer, rather than refuse, if the job is removed before.
        """
        self._waiting.append(Waiting(fact, call, reply, is_done_by_removal))

    def is_awaited(self, fact: Fact) -> bool:
        """Return whether some call waits for this very fact."""
        return any(waiting.fact == fact for waiting in self._waiting)

    def applied(self, fact: Fact) -> None:
        """Answer the calls that waited for a fact."""
        for waiting in self._taken(lambda awaited: awaited == fact):
            self.out.answer(waiting.call, waiting.reply)

    def fill(self, fact: Fact, **values: object) -> None:
        """Add late fields to the answers of the calls that wait for a fact."""
        for waiting in self._waiting:
            if waiting.fact == fact:
                waiting.reply = replace(waiting.reply, **values)

    def refuse(self, fact: Fact, error: str, message: str) -> None:
        """Refuse the calls that waited for a fact which will not be recorded."""
        for waiting in self._taken(lambda awaited: awaited == fact):
            self.out.refuse(waiting.call, error, message)

    def forget(self, name: str) -> None:
        """End the wait of every call about a job that was removed, but for those that asked for its removal."""
        for waiting in self._taken(lambda fact: getattr(fact, "job", "") == name and not isinstance(fact, JobRemoved)):
            if waiting.is_done_by_removal:
                self.out.answer(waiting.call, waiting.reply)
            else:
                self.out.refuse(waiting.call, *job_removed(name))

    def _taken(self, is_due: Callable[[Fact], bool]) -> list[Waiting]:
        """Take the calls out whose fact is due, in the order in which they came."""
        taken = [waiting for waiting in self._waiting if is_due(waiting.fact)]
        if taken:
            self._waiting = [waiting for waiting in self._waiting if not is_due(waiting.fact)]
        return taken
