"""The context that all parts of one holder share.

It refers to no part, so parts cannot depend on one another through it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memstore.config import Config
from memstore.core.holder.fences import JobFences
from memstore.core.holder.state import HolderState
from memstore.core.wire.reports import Report
from memstore.shell.arena.arena import HostStore
from memstore.shell.holder.peer_table import PeerTable

log = logging.getLogger("memstore")


@dataclass
class HolderContext:
    """One holder's identity, memory and ways out: to its controller, to its peers, and to its end."""

    state: HolderState  # what the procedures of core/holder share
    config: Config
    folder: Path
    replicas: HostStore
    peers: PeerTable
    on_fatal: Callable[[str], None]
    stopping: threading.Event
    # The lock of `state`: held while a procedure runs, given up while a call of its port blocks; every step wakes all.
    # Locks are taken in this order: a claim of memory, a link's `grants`, this one, `replicas.lock`, single objects (a
    # channel, an outbox, SendGate). So the lock of SendGate may be taken under this one, and never this one under it.
    # What may take long is done without this lock: by calls of the port, and on the store by `on_store`.
    changed: threading.Condition = field(default_factory=lambda: threading.Condition(threading.RLock()))

    @property
    def host_id(self) -> str:
        """Return the name of the host."""
        return self.state.host_id

    @property
    def fences(self) -> JobFences:
        """Return the fences of the jobs here."""
        return self.state.fences

    def report(self, report: Report) -> None:
        """Queue a report to the controller; without a session it is dropped."""
        self.state.report(report)

    def logged(self, work: Callable[..., None], *args: Any) -> None:
        """Do some work; a failure is logged and ends nothing."""
        try:
            work(*args)
        except Exception:
            log.exception("host %s: order %s failed", self.host_id, work.__name__)
