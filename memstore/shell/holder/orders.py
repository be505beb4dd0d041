"""Carries out the controller's orders, each once, in the order in which they came (R12, R21, R23).

Work that can block runs in a thread of `workers`, or of the part that carries the order out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from memstore.core.holder import drop, effects, ranks
from memstore.core.holder.effects import Procedure
from memstore.core.holder.reads import stage
from memstore.core.wire.orders import (
    AbandonStep,
    AllHosts,
    CallAnswered,
    CallRefused,
    DropJob,
    EchoClock,
    Fence,
    ForgetStory,
    FreeCopies,
    Grow,
    HostNews,
    JournalAppend,
    JournalKeep,
    JournalPage,
    JournalReplace,
    KeepStory,
    Order,
    OrderCheck,
    PushCopy,
    PushTargets,
    RaiseLevel,
    ReadChunks,
    ReadShard,
    Reserve,
    StageShard,
    TakeIncarnation,
    VerifyCopies,
)
from memstore.core.wire.reports import CopiesVerified
from memstore.errors import InternalError, MemstoreError
from memstore.shell.arena.tombstones import Tombstones
from memstore.shell.holder.context import HolderContext
from memstore.shell.holder.persist import Persister
from memstore.shell.holder.push import Pusher
from memstore.shell.holder.rank_server import RankServer
from memstore.shell.holder.room_orders import RoomOrders
from memstore.shell.holder.runner import Runner
from memstore.shell.holder.scrub import Scrubber
from memstore.shell.holder.seal import Sealer
from memstore.shell.holder.stage import Stager
from memstore.shell.holder.trained_steps import TrainedSteps
from memstore.shell.peer.server import PeerServer

log = logging.getLogger("memstore")


class OrderRouter:
    """The orders of one holder's controller, each passed to the part that carries it out."""

    def __init__(
        self, context: HolderContext, runner: Runner, *, workers: ThreadPoolExecutor, rank_server: RankServer,
        rooms: RoomOrders, pusher: Pusher, sealer: Sealer, stager: Stager,
        persister: Persister, scrubber: Scrubber, trained: TrainedSteps, peer_server: PeerServer,
        tombstones: Tombstones, begin_again: Callable[[int], None],
    ) -> None:  # fmt: skip
        """`begin_again`: takes an incarnation above the one that the controller names (R3)."""
        self.context, self.workers = context, workers
        self.runner = runner.extended({effects.ForgetJob: self._forget_job})
        self.rank_server, self.rooms = rank_server, rooms
        self.pusher, self.sealer, self.stager, self.persister = pusher, sealer, stager, persister
        self.scrubber, self.trained, self.peer_server = scrubber, trained, peer_server
        self.tombstones, self.begin_again = tombstones, begin_again

    def obey(self, order: Order) -> None:
        """Carry out one order; work that can block is passed to another thread."""
        state = self.context.state
        match order:
            case AllHosts() | HostNews():
                self.set_view(order)
                self.rooms.keep_jobs(order.jobs)
            case Fence():
                self.sealer.open_fence(order.job, order.attempt)
                self._later(self.sealer.fence, order.job, order.attempt, order.members)
            case PushTargets():
                with self.runner.state():
                    state.shared_shards.declare(order)
            case Reserve():
                self.rooms.reserve(order)
            case Grow():
                self.rooms.grow(order)
            case PushCopy():
                self.pusher.order(order)
            case StageShard() | ReadShard() | ReadChunks():
                self.stager.order(order)
            case OrderCheck():
                self.runner.run(stage.check(state, order))
            case RaiseLevel():
                self.runner.run(ranks.send_to_attempt(state, order.job, ranks.raised(order)))
            case AbandonStep():
                self._begin(drop.abandon(state, order))
            case FreeCopies():
                self._begin(drop.free(state, order))
            case DropJob():
                self._begin(drop.drop_job(state, order))
            case CallAnswered():
                self.rank_server.answer(order.id, order.reply, None)
            case CallRefused():
                self.rank_server.answer(order.id, None, (order.error, order.message))
            case VerifyCopies():
                self._later(self._verify, order)
            case KeepStory():
                self.tombstones.take(order.job, order.story)
            case ForgetStory():
                self.tombstones.take(order.job, "")
            case TakeIncarnation():
                self._later(self.begin_again, order.above)
            case JournalPage() | JournalAppend() | JournalReplace() | JournalKeep() | EchoClock():
                raise InternalError(f"{type(order).__name__} is the session's")
            case _:
                self.persister.order(order)

    def _later(self, work: Callable[..., None], *args: Any) -> None:
        self.workers.submit(self.context.logged, work, *args)

    def _begin(self, steps: Procedure[None]) -> None:
        self._later(self.runner.run, steps)

    def _forget_job(self, effect: effects.ForgetJob) -> None:
        self.trained.forget(effect.job)

    def set_view(self, view: AllHosts | HostNews) -> None:
        """Take the addresses of hosts (peer_table.py), and abort what hosts that are not among them were sending."""
        self.peer_server.keep_senders(self.context.peers.set_view(view))

    def _verify(self, order: VerifyCopies) -> None:
        """Digest what is here again, and report what was found (R30)."""
        found, problem = None, ""
        try:
            found = self.scrubber.verify_all(order.job)
        except MemstoreError as exc:
            problem = str(exc)
        except Exception as exc:
            log.exception("verify")
            problem = repr(exc)
        self.context.report(CopiesVerified(call=order.call, found=found, problem=problem))
