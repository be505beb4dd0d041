"""Carries out the controller's orders, each once, in the order in which they came (R12, R21, R23).

Work that can block runs in a thread of `workers`, or of the part that carries the order out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from memstore.core.holder import drop, effects, fork, ranks, stage
from memstore.core.holder.effects import Steps
from memstore.errors import MemstoreError
from memstore.shell.arena.tombstones import Tombstones
from memstore.shell.holder.context import HolderContext
from memstore.shell.holder.persist import Persister
from memstore.shell.holder.push import Pusher
from memstore.shell.holder.rank_server import RankServer
from memstore.shell.holder.room_orders import RoomOrders
from memstore.shell.holder.runner import Runner
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
        self, context: HolderContext, runner: Runner, *, workers: ThreadPoolExecutor, rank_server: RankServer,
        rooms: RoomOrders, twins: Twins, pusher: Pusher, sealer: Sealer, stager: Stager,
        persister: Persister, scrubber: Scrubber, trained: TrainedSteps, peer_server: PeerServer,
        tombstones: Tombstones, begin_again: Callable[[int], None],
    ) -> None:  # fmt: skip
        """`begin_again`: takes an incarnation above the one that the controller names (R3)."""
        self.context, self.workers = context, workers
        self.runner = runner.extended({effects.ForgetJob: self._forget_job})
        self.rank_server, self.rooms, self.twins = rank_server, rooms, twins
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
            self._begin((fork.look if body["what"] == "look" else fork.make)(self.context.state, body))
        elif kind == "push":
            self.pusher.order(body)
        elif kind == "stage":
            self.stager.order(body)
        elif kind == "check":
            self.runner.run(stage.check(self.context.state, body))
        elif kind == "level":
            self.runner.run(ranks.tell_attempt(self.context.state, str(body["job"]), ranks.level_of(body)))
        elif kind == "abandon":
            self._begin(drop.abandon(self.context.state, body))
        elif kind == "drop":
            self._begin(drop.drop(self.context.state, body))
        elif kind == "persist":
            self.persister.order(body)
        elif kind == "markers":
            self.persister.markers(body)
        elif kind == "answer":
            self.rank_server.answer(int(body["id"]), body["body"], body["error"])
        elif kind == "ask":
            self._later(self._ask, body)
        elif kind == "dropped":
            self.tombstones.take(str(body["job"]), str(body["story"]))
        elif kind == "outdated":
            self._later(self.begin_again, int(body["above"]))

    def _later(self, work: Callable[..., None], *args: Any) -> None:
        self.workers.submit(self.context.logged, work, *args)

    def _begin(self, steps: Steps[None]) -> None:
        self._later(self.runner.run, steps)

    def _forget_job(self, effect: effects.ForgetJob) -> None:
        self.twins.forget(effect.job, effect.attempt)
        if not effect.is_refused_fork:
            self.trained.forget(effect.job)

    def set_view(self, rows: list[list[Any]], gone: list[str] | None) -> None:
        """Take the addresses of hosts (peer_table.py), and abort what hosts that are not among them were sending."""
        self.peer_server.keep_senders(self.context.peers.set_view(rows, gone))

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
