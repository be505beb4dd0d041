"""Carries out the controller's orders, each once, in the order in which they came (R12, R21, R23).

Work that can block runs in a thread of `workers`, or of the part that carries the order out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from memstore.core.wire.messages import shard_from_wire
from memstore.errors import MemstoreError
from memstore.shell.arena.tombstones import Tombstones
from memstore.shell.holder.context import HolderContext
from memstore.shell.holder.fork import forked_body, look, make
from memstore.shell.holder.persist import Persister
from memstore.shell.holder.push import Pusher
from memstore.shell.holder.rank_connections import RankConnections
from memstore.shell.holder.rank_server import RankServer
from memstore.shell.holder.room_orders import RoomOrders
from memstore.shell.holder.scrub import Scrubber
from memstore.shell.holder.seal import Sealer
from memstore.shell.holder.shared_shards import Twins
from memstore.shell.holder.stage import Stager
from memstore.shell.holder.trained_steps import TrainedSteps
from memstore.shell.peer.server import PeerServer

log = logging.getLogger("memstore")


class OrderRouter:
    """The orders of one holder's controller, each passed to the part that carries it out."""

    def __init__(
        self, context: HolderContext, *, workers: ThreadPoolExecutor, connections: RankConnections, ranks: RankServer,
        rooms: RoomOrders, twins: Twins, pusher: Pusher, sealer: Sealer, stager: Stager, persister: Persister,
        scrubber: Scrubber, trained: TrainedSteps, peer_server: PeerServer, tombstones: Tombstones,
        begin_again: Callable[[int], None],
    ) -> None:  # fmt: skip
        """`begin_again`: takes an incarnation above the one that the controller names (R3)."""
        self.context, self.replicas, self.workers = context, context.replicas, workers
        self.connections, self.ranks, self.rooms, self.twins = connections, ranks, rooms, twins
        self.pusher, self.sealer, self.stager, self.persister = pusher, sealer, stager, persister
        self.scrubber, self.trained, self.peer_server = scrubber, trained, peer_server
        self.tombstones, self.begin_again = tombstones, begin_again

    def obey(self, body: dict[str, Any]) -> None:
        """Carry out one order; work that can block is passed to another thread."""
        kind = body.pop("k", None)
        if kind == "view":
            self.set_view(body["hosts"], body["gone"])
            self.rooms.keep_jobs(body["jobs"])
        elif kind == "fence":
            job, attempt = str(body["job"]), int(body["attempt"])
            self.sealer.open_fence(job, attempt)
            self._later(self.sealer.fence, job, attempt, body.get("members", []))
        elif kind == "targets":
            self.twins.declare(str(body["job"]), int(body["attempt"]), body["targets"], body["copiers"])
        elif kind == "reserve":
            self.rooms.reserve(body)
        elif kind == "grow":
            self.rooms.grow(body)
        elif kind == "fork":
            self._later(self._fork, body)
        elif kind == "push":
            self.pusher.order(body)
        elif kind == "stage":
            self.stager.order(body)
        elif kind == "check":
            self.stager.check(body)
        elif kind == "level":
            self.connections.level(body)
        elif kind == "abandon":
            self._later(self._abandon, body)
        elif kind == "drop":
            self._later(self._drop, body)
        elif kind == "persist":
            self.persister.order(body)
        elif kind == "markers":
            self.persister.markers(body)
        elif kind == "answer":
            self.ranks.answer(int(body["id"]), body["body"], body["error"])
        elif kind == "ask":
            self._later(self._ask, body)
        elif kind == "dropped":
            self.tombstones.take(str(body["job"]), str(body["story"]))
        elif kind == "outdated":
            self._later(self.begin_again, int(body["above"]))

    def _later(self, work: Callable[..., None], *args: Any) -> None:
        self.workers.submit(self.context.logged, work, *args)

    def set_view(self, rows: list[list[Any]], gone: list[str] | None) -> None:
        """Take the addresses of hosts (peer_table.py), and abort what hosts that are not among them were sending."""
        self.peer_server.keep_senders(self.context.peers.set_view(rows, gone))

    def _abandon(self, body: dict[str, Any]) -> None:
        """Forget an uncommitted step and notify its tickets (R12)."""
        job, attempt, step = str(body["job"]), int(body["attempt"]), int(body["step"])
        with self.replicas.lock:
            keys = [*self.replicas.index.shards, *((k[0], k[1]) for k in self.replicas.index.drafts)]
            shards = {k[0] for k in keys if (k[0].job, k[0].attempt, k[0].step) == (job, attempt, step)}
            for key in [k for k in self.replicas.index.drafts if k[0] in shards]:
                self.replicas.index.abort_draft(key[1], key[0])
        for shard in shards:
            self.replicas.drop(shard)
        self.connections.resume(body)
        self.connections.grant_job(job)

    def _drop(self, body: dict[str, Any]) -> None:
        shards = [shard_from_wire(item) for item in body["shards"]]
        removed = body.get("removed")
        try:
            self.replicas.drop_all(shards, removed)
        finally:  # also where that failed
            self.context.freed(body)
        if removed is not None:
            self._removed(str(removed[0]), int(removed[1]), is_refused_fork=bool(body.get("is_refused_fork")))
        for job in {shard.job for shard in shards}:
            self.connections.grant_job(job)

    def _removed(self, job: str, attempt: int, *, is_refused_fork: bool) -> None:
        """Forget a removed job up to an attempt, and notify its processes; a refused fork's name is free again."""
        self.twins.forget(job, attempt)
        if not is_refused_fork:
            self.trained.forget(job)
            self.context.fences.remove(job, attempt)
            self.connections.removed(job, attempt)

    def _fork(self, body: dict[str, Any]) -> None:
        """Look at what is to be forked, or make manifests of the new job over the same slots (R32)."""
        if body["what"] == "look":
            self.context.report("forked", forked_body(body, look(self.replicas, body["shards"])))
        else:
            for shelved in make(self.replicas, body["shards"]):
                self.context.sealed(shelved)

    def _ask(self, body: dict[str, Any]) -> None:
        """Answer a question of the command line that needs this host's bytes."""
        reply: dict[str, Any] = {"ask": body["ask"], "ok": True, "why": "", "value": None}
        try:
            if body["what"] == "verify":
                reply["value"] = self.scrubber.verify_all(body.get("job"))
        except MemstoreError as exc:
            reply.update(ok=False, why=str(exc))
        except Exception as exc:
            log.exception("question %s", body["what"])
            reply.update(ok=False, why=repr(exc))
        self.context.report("answer", reply)
