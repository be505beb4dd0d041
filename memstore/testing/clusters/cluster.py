"""What all clusters of this machine have in common: arenas by host, and the controller's answers through any holder.

The back ends are plain processes, also in network namespaces (`processes.py`), and raylets (`embedded.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from memstore.config import Config
from memstore.core.report.event_kinds import event_fields
from memstore.core.wire.calls import AskEvents, AskStatus
from memstore.core.wire.codec import Request
from memstore.core.wire.replies import host_fields, status_fields
from memstore.errors import MemstoreError
from memstore.shell.arena.folder import arena_folder
from memstore.shell.rank.admin_link import Tool
from memstore.testing.faults.processes import Started

R = TypeVar("R")
ANSWER_S = 30.0


class Cluster(Started):
    """A store whose hosts are on this machine."""

    config: Config
    labels: dict[str, dict[str, str]]  # by host

    def running(self) -> list[str]:
        """Return the hosts that may have a holder."""
        return list(self.labels)

    def arena(self, host: str) -> Path:
        """Return the arena folder of a host."""
        return arena_folder(self.config.arena_dir, store=self.config.store, host=host)

    def env(self, host: str) -> dict[str, str]:
        """Return the environment of a process that runs on a host."""
        return {**os.environ, "MEMSTORE_HOST": host}

    # -- questions ----------------------------------------------------------------------------

    def ask(self, request: Request[R], timeout_s: float = ANSWER_S) -> R:
        """Ask the controller through any holder that runs."""
        return ask_through(map(self.arena, self.running()), request, timeout_s)

    def status(self) -> dict[str, Any]:
        """Return the controller's status, as `memstore status --json` prints it."""
        return status_fields(self.ask(AskStatus()))

    def job(self, name: str) -> dict[str, Any] | None:
        """Return one job's status, or None."""
        return next((job for job in self.status()["jobs"] if job["job"] == name), None)

    def host_rows(self) -> list[dict[str, Any]]:
        """Return the hosts in the controller's status; empty while no controller answers."""
        try:
            return list(map(host_fields, self.ask(AskStatus(), timeout_s=2.0).hosts))
        except (MemstoreError, OSError):
            return []

    def host_status(self) -> dict[str, str]:
        """Return the status of each host; empty while no controller answers."""
        return {row["host"]: row["status"] for row in self.host_rows()}

    def host_events(self, *kinds: str) -> list[tuple[str, str]]:
        """Return the events of hosts so far, such as (host, "host_dead"), in order.

        A status shows one moment. It misses what happened between two of them, and on a busy machine any host may be
        suspect at that moment.
        """
        return [(row.host, row.event) for row in self.ask(AskEvents()).events if row.event in kinds]

    def events(self, job: str | None = None) -> list[dict[str, Any]]:
        """Return the events so far, of one job or of all, as `memstore events --json` prints them."""
        return list(map(event_fields, self.ask(AskEvents(job=job)).events))


def ask_through(folders: Iterable[Path], request: Request[R], timeout_s: float = ANSWER_S) -> R:
    """Ask the controller through the first holder that answers, of those that own these arena folders."""
    problems = []
    for folder in folders:
        if (folder / "holder.sock").exists():
            try:
                with Tool(folder) as tool:
                    return tool.ask(request, timeout_s)
            except (MemstoreError, OSError) as exc:
                problems.append(f"{folder.name}: {type(exc).__name__}: {exc}")
    raise MemstoreError(f"no holder answers: {problems}")
