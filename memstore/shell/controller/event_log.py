"""Writes events as JSON lines and passes them to the metrics, on a thread of its own.

Lines go through the logger `memstore.events`: INFO, but DEBUG for the one or two that every step leaves (put, commit,
durable), which would drown a console. MEMSTORE_EVENTS names a file that gets them all. The controller submits and
goes on: a disk that hangs costs lines, which are counted, never a decision.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
from collections.abc import Callable

from memstore.core.report.event_kinds import ROUTINE, event_fields, level_of
from memstore.core.report.recorder import RecentEvents
from memstore.core.wire.status_rows import EventRow

log = logging.getLogger("memstore.events")
WAITING_MAX = 4096
CLOSE_S = 2.0


class EventLog:
    """Follows the event ring of one controller, over all its terms."""

    def __init__(self, path: str | None = None) -> None:
        self.path = os.environ.get("MEMSTORE_EVENTS", "") if path is None else path
        self.dropped_count = 0  # came too fast for the writer
        self.failed_count = 0  # could not be written
        self.counters: list[Callable[[EventRow], None]] = []  # each gets every event that was not dropped
        self._seen_seq = 0
        self._problem = ""
        self._waiting: queue.Queue[EventRow | None] = queue.Queue(WAITING_MAX)
        self._thread = threading.Thread(target=self._run, name="memstore-events", daemon=True)
        self._thread.start()

    def take(self, recent_events: RecentEvents) -> None:
        """Queue new events, dropping those beyond the writer's backlog; never waits."""
        if recent_events.last_seq <= self._seen_seq:
            return
        for event in recent_events.since(self._seen_seq):
            try:
                self._waiting.put_nowait(event)
            except queue.Full:
                self.dropped_count += 1
        self._seen_seq = recent_events.last_seq
        recent_events.unwritten_count = self.dropped_count + self.failed_count

    def close(self) -> None:
        """Write what waits, as far as it can be written soon."""
        try:
            self._waiting.put(None, timeout=CLOSE_S)
        except queue.Full:
            return  # the writer hangs; it is a daemon
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (event := self._waiting.get()) is not None:
            for work in (self._write, *self.counters):
                try:
                    work(event)
                except Exception as exc:
                    self._complain(exc)

    def _write(self, event: EventRow) -> None:
        level = logging.DEBUG if level_of(event.event) == ROUTINE else logging.INFO
        if not self.path and not log.isEnabledFor(level):
            return
        line = json.dumps(event_fields(event), ensure_ascii=False, default=str)
        log.log(level, "%s", line)
        if self.path:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(line + "\n")

    def _complain(self, exc: Exception) -> None:
        """Log a fault once, not for every line."""
        self.failed_count += 1
        if str(exc) != self._problem:
            self._problem = str(exc)
            logging.getLogger("memstore").warning("an event could not be written or counted: %r", exc)
