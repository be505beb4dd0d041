"""Keeps the links of one host's ranks, by process and rank, and sends messages to them (R4, R8, R15)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from memstore.core.arena.replica_index import IncomingReplica, StoredReplica
from memstore.core.arena.slot_table import Owner
from memstore.core.holder.state import HandOver
from memstore.core.wire.frame import Kind
from memstore.errors import TransportError
from memstore.shell.holder.chunk_notifier import ChunkNotifier
from memstore.shell.holder.context import HolderContext
from memstore.shell.net.channel import Channel
from recovery.inventory import ShardId

SEND_S = 10.0  # a rank that does not read for this long (frozen) loses its link, never its leases


@dataclass
class RankConnection:
    """One process of a rank (or a tool) on this host."""

    channel: Channel
    owner: Owner
    nonce: str = ""
    job: str = ""
    rank: int = -1
    attempt: int = 0
    parent: str = ""  # nonce of the rank's process, if this is a child of it (R20)
    pins: dict[int, Callable[[], None]] = field(default_factory=dict)  # what this reader holds -> how to let go of it
    handovers: queue.Queue[HandOver | None] = field(default_factory=queue.Queue)
    grants: threading.Lock = field(default_factory=threading.Lock)  # orders messages about a rank's leases
    is_retired: bool = False  # the same store came back on another link and sends again what was not sealed

    def send(self, body: dict[str, Any]) -> None:
        """Send one event; a link that cannot take it is closed and will come back."""
        try:
            self.channel.send(Kind.EVENT, 0, body, deadline_s=SEND_S)
        except TransportError:
            self.channel.close()


class RankConnections:
    """All links of one holder. `lock` guards the tables; it is taken before the replica store's."""

    def __init__(self, context: HolderContext) -> None:
        self.context, self.replicas = context, context.replicas
        self.lock = threading.RLock()
        self.links: dict[str, RankConnection] = {}  # by nonce
        self.owners: dict[str, Owner] = {}  # nonce -> process, kept until it is proved dead (R8)
        self.parents: dict[str, str] = {}  # nonce of a child among `owners` -> that of the rank's process
        self.committed: dict[str, dict[str, Any]] = {}  # job -> last commit sent, for links that come back

    # -- links --------------------------------------------------------------------------------

    def of_job(self, job: str) -> list[RankConnection]:
        """Return the links of a job's ranks on this host."""
        with self.lock:
            return [link for link in self.links.values() if link.job == job and link.rank >= 0]

    def current(self, link: RankConnection) -> RankConnection:
        """Return the link on which the same store is connected now."""
        with self.lock:
            now = self.links.get(link.nonce, link)
            return now if now.owner == link.owner else link

    def left(self, link: RankConnection) -> None:
        """Forget a process that sent `bye`, unless it has connected again, as another owner."""
        with self.lock:
            if self.links.get(link.nonce) is link:
                del self.links[link.nonce]
                self.owners.pop(link.nonce, None)
                self.parents.pop(link.nonce, None)

    def take_dead(self, is_alive: Callable[[Owner], bool]) -> dict[str, Owner]:
        """Forget the processes that are not alive, and return each with its nonce."""
        with self.lock:
            gone = [nonce for nonce, owner in self.owners.items() if not is_alive(owner)]
            dead = {nonce: self.owners.pop(nonce) for nonce in gone}
            self.parents = {nonce: parent for nonce, parent in self.parents.items() if nonce in self.owners}
            return dead

    def forget(self, link: RankConnection) -> bool:
        """Let go of a link that has ended; False if its store is connected by another one already."""
        with self.lock:
            if self.links.get(link.nonce) is not link:
                return False
            del self.links[link.nonce]
            return True

    # -- leases -------------------------------------------------------------------------------

    def grant_current(self, link: RankConnection) -> None:
        """Lease to a store whose put is over the slots that its share allows now."""
        self.grant(self.current(link))

    def grant(self, link: RankConnection) -> None:
        """Lease a rank the slots that its share allows, and send them; do nothing on a link that has ended."""
        with link.grants:
            with self.lock:
                if self.links.get(link.nonce) is not link or link.channel.is_closed:
                    return
                if not link.job or link.rank < 0 or link.attempt < self.context.fences.first(link.job) or link.parent:
                    return
                stand_ins_for = [self.owners[n] for n, parent in self.parents.items() if parent == link.nonce]
                slots = self.replicas.lease(link.owner, link.job, link.rank, link.attempt, stand_ins_for)
            if slots:
                link.send({"k": "grant", "slots": slots})

    def grant_job(self, job: str) -> None:
        """Lease a job's ranks the room that may have become free."""
        for link in self.of_job(job):
            self.grant(link)

    # -- outcomes of puts ---------------------------------------------------------------------

    def tell_level(self, link: RankConnection, attempt: int, step: int, level: str, reason: str) -> None:
        """Send a store the level of one of its tickets, on its newest link."""
        message = {"k": "level", "attempt": attempt, "step": step, "level": level, "reason": reason, "degraded": False}
        with self.lock:
            parent = self.links.get(link.parent)
        for each in (self.current(link), parent):
            if each is not None:
                each.send(message)

    def replicated(self, shard: ShardId) -> None:
        """Notify the rank that put a shard that every target has sealed it (R15)."""
        for link in self.of_job(shard.job):
            if (link.rank, link.attempt) == (shard.rank, shard.attempt):
                self.tell_level(link, shard.attempt, shard.step, "replicated", "")

    def level(self, body: dict[str, Any]) -> None:
        """Send a job's ranks the level of a step."""
        message = {
            "k": "level", "attempt": body["attempt"], "step": body["step"], "level": body["level"],
            "reason": body.get("reason", ""), "degraded": bool(body.get("degraded")),
        }  # fmt: skip
        if body["level"] in ("committed", "durable"):
            self.committed[body["job"]] = message
        for link in self.of_job(body["job"]):
            if link.attempt == body["attempt"]:
                link.send(message)

    def resume(self, body: dict[str, Any]) -> None:
        """Notify a job's ranks that a step was abandoned, and from which step all put again (R12)."""
        told = {key: body[key] for key in ("attempt", "step", "level", "reason", "resume")}
        for link in self.of_job(body["job"]):
            if link.attempt == body["attempt"]:
                link.send({"k": "level", "degraded": False, **told})

    # -- messages to ranks -------------------------------------------------------------------

    def room(self, job: str, done_bytes: int, wanted_bytes: int) -> None:
        """Send a job's ranks how far the room that they asked for has grown."""
        for link in self.of_job(job):
            link.send({"k": "room", "done_bytes": done_bytes, "wanted_bytes": wanted_bytes})

    def check(self, body: dict[str, Any], shelved: StoredReplica) -> None:
        """Let the rank compare `into=` with the manifest before anything is released (R26)."""
        for link in self.of_job(body["job"]):
            if link.rank == body["rank"]:
                link.send(
                    {
                        "k": "check",
                        "job": body["job"],
                        "round": body["round"],
                        "manifest": self.replicas.manifest(shelved),
                    }
                )

    def notifier(self, stream: Sequence[Any] | None, manifest: bytes, draft: IncomingReplica) -> ChunkNotifier | None:
        """Return the notifier of a reader on this host; `stream` is its nonce and its number of the read."""
        with self.lock:
            link = self.links.get(str(stream[0])) if stream else None
        return ChunkNotifier(link.send, int(stream[1]), manifest, draft) if link is not None and stream else None

    def tell_twin(self, shard: ShardId, event: dict[str, Any]) -> None:
        """Send an event to the process that put a shard, if it is still connected in that attempt."""
        for link in self.of_job(shard.job):
            if (link.rank, link.attempt) == (shard.rank, shard.attempt) and not link.parent:
                link.send(event)

    def fence(self, job: str, attempt: int, members: Collection[str] = ()) -> None:
        """Notify older processes that they are refused.

        A process of `members` goes on in the new attempt: it asked for it by a rewind (R22).
        """
        for link in self.of_job(job):
            if 0 < link.attempt < attempt and link.nonce not in members:
                self.send_fenced(link)

    def removed(self, job: str, attempt: int) -> None:
        """Notify a removed job's processes that it is gone, so that none waits for room."""
        for link in self.of_job(job):
            if 0 < link.attempt <= attempt:
                self.send_fenced(link)

    def send_fenced(self, link: RankConnection) -> None:
        """Send one process the first attempt that this host still serves."""
        fences = self.context.fences
        link.send({"k": "fenced", "attempt": fences.first(link.job), "is_removed": fences.is_removed(link.job)})
