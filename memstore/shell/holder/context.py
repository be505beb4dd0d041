"""The context that all parts of one holder share. No part is reachable from it, so none depends on another by it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memstore.config import Config
from memstore.core.arena.replica_index import StoredReplica
from memstore.core.holder.fences import JobFences
from memstore.core.holder.state import HolderState
from memstore.core.wire.messages import copy_to_wire
from memstore.shell.arena.idle_time import IdleTime
from memstore.shell.arena.replica_store import ReplicaStore
from memstore.shell.holder.peer_table import PeerTable
from recovery.inventory import Copy

log = logging.getLogger("memstore")


@dataclass
class HolderContext:
    """One holder's identity, memory and ways out: to its controller, to its peers, and to its end."""

    state: HolderState  # what the procedures of core/holder share
    config: Config
    folder: Path
    replicas: ReplicaStore
    idle: IdleTime
    peers: PeerTable
    on_fatal: Callable[[str], None]
    stopping: threading.Event

    @property
    def host_id(self) -> str:
        """Return the name of the host."""
        return self.state.host_id

    @property
    def fences(self) -> JobFences:
        """Return the fences of the jobs here."""
        return self.state.fences

    def report(self, kind: str, body: dict[str, Any]) -> None:
        """Queue a report to the controller; without a session it is dropped."""
        self.state.report(kind, body)

    def logged(self, work: Callable[..., None], *args: Any) -> None:
        """Do some work; a failure is logged and ends nothing."""
        try:
            work(*args)
        except Exception:
            log.exception("host %s: order %s failed", self.host_id, work.__name__)

    def ask(self, call_id: int, verb: str, body: dict[str, Any]) -> None:
        """Send the controller a rank's call, or one of the holder's own."""
        self.report("call", {"id": call_id, "verb": verb, "body": body})

    def sealed(self, copy: Copy | StoredReplica, put: dict[str, Any] | None = None) -> None:
        """Report a copy as it is now, whole or with the chunks it lacks; nothing if it was dropped meanwhile.

        Queued under the replica store's lock, as inventories and freed copies: the controller gets them in the order
        in which they were true.
        """
        self.idle.used()
        with self.replicas.lock:
            shelved = self.replicas.index.find(copy.shard, copy.spec.digest)
            if shelved is not None and not shelved.is_doomed:
                held = Copy(shelved.shard, shelved.spec, self.host_id, shelved.missing)
                body: dict[str, Any] = {"copies": [copy_to_wire(held)]}
                self.report("sealed", body if put is None else {**body, "put": put})

    def freed(self, order: dict[str, Any]) -> None:
        """Report that an order to drop copies was carried out."""
        with self.replicas.lock:
            self.report("freed", {"shards": order["shards"], "number": order.get("number")})
