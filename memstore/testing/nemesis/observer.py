"""A thread that asks for status twice a second, and notes in the ledger when hosts are live and copies complete."""

from __future__ import annotations

import threading
import time

from memstore.core.wire.calls import AskStatus
from memstore.core.wire.replies import Status
from memstore.core.wire.status_rows import AttemptStatus
from memstore.errors import MemstoreError
from memstore.testing.nemesis.hosts import Hosts
from memstore.testing.nemesis.story import Story

PERIOD_S = 0.5
SILENT_MAX_S = 1.0
SETTLED_S = 1.0  # a status this soon after a fault may not know of it yet


class Observer:
    """The thread that keeps the newest status, a context manager."""

    def __init__(self, hosts: Hosts, story: Story, job: str) -> None:
        self.hosts, self.story, self.job = hosts, story, job
        self.newest: Status | None = None
        self.newest_s = 0.0
        self.complete_s = 0.0  # when copies were last seen to be complete
        self._why = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nemesis-observer", daemon=True)

    def __enter__(self) -> Observer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(30)

    def _run(self) -> None:
        while not self._over.wait(PERIOD_S):
            began_s = time.monotonic()
            try:
                status = self.hosts.ask(AskStatus())
            except (MemstoreError, OSError) as exc:
                self._note(f"status: no answer ({type(exc).__name__})")
                continue
            self.take(status, began_s)

    def take(self, status: Status, asked_s: float) -> None:
        """Note in the ledger what one status shows."""
        self.newest, self.newest_s = status, asked_s
        live = self._live(status, asked_s)
        row = next((job.newest for job in status.jobs if job.job == self.job), None)
        why = incomplete(row, live, set(self.hosts))
        if not why and row is not None and row.committed_attempt is not None and row.committed_step is not None:
            self.complete_s = asked_s
            self.hosts.ledger.complete(row.committed_attempt, row.committed_step, asked_s)
        self._note(f"status: {why or 'copies complete'}")

    def _live(self, status: Status, asked_s: float) -> set[str]:
        """Return the hosts that are live, and end their absence in the ledger."""
        found = set()
        for row in status.hosts:
            host, harm = row.host, self.hosts.away.get(row.host)
            is_here = row.status == "live" and row.silent_s < SILENT_MAX_S
            is_held = host in self.hosts.stopped or host in self.hosts.down or self.hosts.holder(host) is None
            if not is_here or is_held or (harm is not None and asked_s < harm.at_s + SETTLED_S):
                continue
            found.add(host)
            if harm is not None and harm.until_s is None and host not in self.hosts.cut:
                harm.until_s = asked_s
        return found

    def _note(self, why: str) -> None:
        if why != self._why:
            self._why = why
            self.story.log(why)


def incomplete(newest: AttemptStatus | None, live: set[str], wanted: set[str]) -> str:
    """Return which copies of a job's newest attempt are missing, or ""."""
    if live != wanted:
        return f"hosts {', '.join(sorted(wanted - live))} are not live"
    if newest is None or newest.committed_step is None:
        return "nothing is committed"
    if newest.missing_copies or newest.short_shards:
        refusals = "; ".join(newest.refusals)
        return f"step {newest.committed_step}: {newest.missing_copies} copies missing ({refusals or 'no refusal'})"
    return ""
