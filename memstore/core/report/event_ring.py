"""What happened to a store, in the order it happened, for people and metrics: a bounded memory, no decisions. Pure.

`memstore events` prints it, `metrics.py` counts it. These are not the events of `events.py`, which name what reaches
the machine. Nothing in the store depends on these, so a lost one costs a line, never a decision.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from memstore.core.wire.replies import Events
from memstore.core.wire.status_rows import EventRow

KEPT = 2048  # of the routine kinds, and as many of all others: a week of commits pushes no death of a host out
PAGE = 500  # in one answer
TERM_SEQ = 10**9  # a term's numbers begin at term * TERM_SEQ + 1: they grow over controllers too (R17)
ROUTINE = frozenset({"put", "commit", "durable", "rank_left"})  # one or two for every step; one for every rank
PROBLEMS = frozenset(
    {
        "skip", "degraded", "restore_failed", "retired", "rank_dead", "rank_ended", "host_suspect", "host_dead",
        "replicas_differ", "ended", "unchanged", "dropped", "durable_failed", "durable_abandoned",
        "not_expired", "scrub", "files_lost",
    }
)  # fmt: skip
KINDS = ROUTINE | PROBLEMS | {
    "redundant", "superseded", "whole", "restore", "attempt", "members", "closed", "removed", "branched", "pinned",
    "unpinned", "lifted", "host_joined", "host_live", "replicas_agree", "drain", "drained", "drain_over", "repair",
    "repaired", "term", "replaced", "recovered",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoreEvent:
    """One thing that happened; `seconds` by phase and everything else that only its kind has are in `fields`."""

    seq: int  # grows by one within a controller's term, and from term to term
    kind: str
    wall_s: float
    job: str = ""
    attempt: int | None = None
    step: int | None = None
    rank: int | None = None
    host: str = ""
    fields: dict[str, Any] = field(default_factory=dict)

    def row(self) -> EventRow:
        """Return the event as it travels."""
        return EventRow(
            seq=self.seq, event=self.kind, wall_s=round(self.wall_s, 3), job=self.job, attempt=self.attempt,
            step=self.step, rank=self.rank, host=self.host, fields=self.fields,
        )  # fmt: skip


class RecentEvents:
    """The newest store events of one controller's term."""

    def __init__(self, term: int) -> None:
        self.last_seq = term * TERM_SEQ
        self.unwritten_count = 0  # events that the shell could not log in time; it sets this
        self._first_seq = self.last_seq + 1
        self._routine: deque[StoreEvent] = deque(maxlen=KEPT)
        self._rare: deque[StoreEvent] = deque(maxlen=KEPT)
        self._forgotten_seq = 0  # the newest that was pushed out

    def add(
        self, kind: str, wall_s: float, *, job: str = "", attempt: int | None = None, step: int | None = None,
        rank: int | None = None, host: str = "", **fields: Any,
    ) -> None:  # fmt: skip
        """Note one thing that happened; ValueError if its kind has no name here."""
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is not one of the kinds of events: {sorted(KINDS)}")
        self.last_seq += 1
        ring = self._routine if kind in ROUTINE else self._rare
        if len(ring) == KEPT:
            self._forgotten_seq = max(self._forgotten_seq, ring[0].seq)
        ring.append(StoreEvent(self.last_seq, kind, wall_s, job, attempt, step, rank, host, fields))

    def since(self, seq: int) -> list[StoreEvent]:
        """Return the remembered events after `seq`, oldest first."""
        if seq >= self.last_seq:
            return []
        found: list[StoreEvent] = []
        for ring in (self._routine, self._rare):
            newer = []
            for event in reversed(ring):
                if event.seq <= seq:
                    break
                newer.append(event)
            found += newer
        return sorted(found, key=lambda event: event.seq)

    def page(self, since: int, job: str | None, wall_s: float) -> Events:
        """Answer `memstore events`: at most PAGE of them; `next` is the `since` of the page after it.

        Of one job: its own, and those of hosts and the store since its first one.

        `is_gap`: something after `since` was pushed out before it was asked for, or an earlier controller had it.
        """
        newer = self.since(since)
        first = next((event.seq for event in self._rare if event.job == job), 0)
        mine = [event for event in newer if job is None or event.job == job or (event.job == "" and event.seq > first)]
        shown = mine[:PAGE]
        return Events(
            events=[event.row() for event in shown],
            next=shown[-1].seq if len(mine) > PAGE else max(since, self.last_seq),
            has_more=len(mine) > PAGE,
            is_gap=since > 0 and (since < self._forgotten_seq or since < self._first_seq - 1),
            unwritten=self.unwritten_count,
            wall_s=wall_s,
        )
