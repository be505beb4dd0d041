"""The newest store events of one controller's term, for people and metrics: a bounded memory, no decisions. Pure.

`memstore events` prints them, `metrics.py` counts them, the shell writes them to a log. Nothing in the store depends
on these, so a lost one costs a line, never a decision.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from msgspec import to_builtins

from memstore.core.report.event_kinds import KINDS, ROUTINE
from memstore.core.wire.replies import Events
from memstore.core.wire.status_rows import EventRow

KEPT = 2048  # of the routine kinds, and as many of all others: a week of commits pushes no death of a host out
PAGE = 500  # in one answer
TERM_SEQ = 10**9  # a term's numbers begin at term * TERM_SEQ + 1: they grow over controllers too (R17)
CHARS_MAX = 1000  # of a text in an event


class RecentEvents:
    """The newest store events of one controller's term."""

    def __init__(self, term: int) -> None:
        self.last_seq = term * TERM_SEQ
        self.unwritten_count = 0  # events that the shell could not log in time; it sets this
        self._first_seq = self.last_seq + 1
        self._routine: deque[EventRow] = deque(maxlen=KEPT)
        self._rare: deque[EventRow] = deque(maxlen=KEPT)
        self._forgotten_seq = 0  # the newest that was pushed out

    def add(
        self,
        kind: str,
        wall_s: float,
        *,
        job: str = "",
        attempt: int | None = None,
        step: int | None = None,
        rank: int | None = None,
        host: str = "",
        **fields: Any,
    ) -> EventRow:
        """Note one thing that happened; KeyError if its kind has no name."""
        ring = self._routine if KINDS[kind].level == ROUTINE else self._rare
        self.last_seq += 1
        if len(ring) == KEPT:
            self._forgotten_seq = max(self._forgotten_seq, ring[0].seq)
        row = EventRow(
            seq=self.last_seq,
            event=kind,
            wall_s=round(wall_s, 3),
            job=job,
            attempt=attempt,
            step=step,
            rank=rank,
            host=host,
            fields=_plain(to_builtins(fields)),
        )
        ring.append(row)
        return row

    def since(self, seq: int) -> list[EventRow]:
        """Return the remembered events after `seq`, oldest first."""
        if seq >= self.last_seq:
            return []
        found: list[EventRow] = []
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
        return Events(
            events=mine[:PAGE],
            next=mine[PAGE - 1].seq if len(mine) > PAGE else max(since, self.last_seq),
            has_more=len(mine) > PAGE,
            is_gap=since > 0 and (since < self._forgotten_seq or since < self._first_seq - 1),
            unwritten=self.unwritten_count,
            wall_s=wall_s,
        )


def _plain(value: Any) -> Any:
    """Return a value as it travels: seconds to the microsecond, texts of at most CHARS_MAX, lists for tuples."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return list(value)
    return round(value, 6) if isinstance(value, float) else value[:CHARS_MAX] if isinstance(value, str) else value
