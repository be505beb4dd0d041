"""Carries out the controller's orders, each once, in the order in which they came (R12, R21, R23).

Work that can block runs in a thread of `workers`, or of the part that carries the order out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from memstore.core.wire.frame import unpack_body
from memstore.core.wire.ids import WireShard
from memstore.core.wire.orders import (
    AbandonStep,
    AllHosts,
    CallAnswered,
    CallRefused,
    DropJob,
    DropNumber,
    Fence,
    ForgetStory,
    FreeCopies,
    GiveUpFork,
    Grow,
    HostNews,
    JournalAppend,
    JournalKeep,
    JournalPage,
    JournalReplace,
    KeepStory,
    LookAtCopies,
    MakeFork,
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
    TellClock,
    VerifyCopies,
)
from memstore.core.wire.reports import CopiesLookedAt, CopiesVerified
from memstore.errors import InternalError, MemstoreError
from memstore.shell.arena.tombstones import Tombstones
from memstore.shell.holder.context import HolderContext
from memstore.shell.holder.fork import look, make
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
        self.context, self.vault, self.workers = context, context.vault, workers
        self.connections, self.ranks, self.rooms, self.twins = connections, ranks, rooms, twins
        self.pusher, self.sealer, self.stager, self.persister = pusher, sealer, stager, persister
        self.scrubber, self.trained, self.peer_server = scrubber, trained, peer_server
        self.tombstones, self.begin_again = tombstones, begin_again

    def obey(self, order: Order) -> None:
        """Carry out one order; work that can block is passed to another thread."""
        match order:
            case AllHosts() | HostNews():
                self.set_view(order)
                self.rooms.keep_jobs(order.jobs)
            case Fence():
                self.sealer.open_fence(order.job, order.attempt)
                self._later(self.sealer.fence, order.job, order.attempt, order.members)
            case PushTargets():
                self.twins.declare(order)
            case Reserve():
                self.rooms.reserve(order)
            case Grow():
                self.rooms.grow(order)
            case LookAtCopies():
                self._later(self._look, order)
            case MakeFork():
                self._later(self._make_fork, order)
            case PushCopy():
                self.pusher.order(order)
            case StageShard() | ReadShard() | ReadChunks():
                self.stager.order(order)
            case OrderCheck():
                self.stager.check(order)
            case RaiseLevel():
                self.connections.level(order)
            case AbandonStep():
                self._later(self._abandon, order)
            case FreeCopies():
                self._later(self._free, order)
            case DropJob():
                self._later(self._drop_job, order)
            case GiveUpFork():
                self._later(self._give_up_fork, order)
            case CallAnswered():
                self.ranks.answer(order.id, unpack_body(order.body), None)
            case CallRefused():
                self.ranks.answer(order.id, {}, [order.error, order.message])
            case VerifyCopies():
                self._later(self._verify, order)
            case KeepStory():
                self.tombstones.take(order.job, order.story)
            case ForgetStory():
                self.tombstones.take(order.job, "")
            case TakeIncarnation():
                self._later(self.begin_again, order.above)
            case JournalPage() | JournalAppend() | JournalReplace() | JournalKeep() | TellClock():
                raise InternalError(f"{type(order).__name__} is the session's")
            case _:
                self.persister.order(order)

    def _later(self, work: Callable[..., None], *args: Any) -> None:
        self.workers.submit(self.context.logged, work, *args)

    def set_view(self, view: AllHosts | HostNews) -> None:
        """Take the addresses of hosts (peer_table.py), and abort what hosts that are not among them were sending."""
        self.peer_server.keep_senders(self.context.peers.set_view(view))

    def _abandon(self, order: AbandonStep) -> None:
        """Forget an uncommitted step and tell its tickets (R12)."""
        job, attempt, step = order.job, order.attempt, order.step
        with self.vault.lock:
            keys = [*self.vault.shelf.shards, *((k[0], k[1]) for k in self.vault.shelf.drafts)]
            shards = {k[0] for k in keys if (k[0].job, k[0].attempt, k[0].step) == (job, attempt, step)}
            for key in [k for k in self.vault.shelf.drafts if k[0] in shards]:
                self.vault.shelf.abort_draft(key[1], key[0])
        for shard in shards:
            self.vault.drop(shard)
        self.connections.resume(order)
        self.connections.grant_job(job)

    def _free(self, order: FreeCopies) -> None:
        self._drop(order.shards, None, order.number)

    def _drop_job(self, order: DropJob) -> None:
        """Free all of a removed job up to an attempt, and tell its processes."""
        self._drop(order.shards, (order.job, order.attempt))
        self.twins.forget(order.job, order.attempt)
        self.trained.forget(order.job)
        self.context.fences.remove(order.job, order.attempt)
        self.connections.removed(order.job, order.attempt)

    def _give_up_fork(self, order: GiveUpFork) -> None:
        """Give back the room of a fork that was refused; its name is free again."""
        self._drop((), (order.job, order.attempt))
        self.twins.forget(order.job, order.attempt)

    def _drop(
        self, shards: tuple[WireShard, ...], removed: tuple[str, int] | None, number: DropNumber | None = None
    ) -> None:
        ids = [shard.id for shard in shards]
        try:
            self.vault.drop_all(ids, removed)
        finally:  # also where that failed
            self.context.freed(shards, number)
        for job in {shard.job for shard in ids}:
            self.connections.grant_job(job)

    def _look(self, order: LookAtCopies) -> None:
        """Look at copies that are to be forked (R32)."""
        shards = tuple(look(self.vault, order.shards))
        self.context.report(CopiesLookedAt(job=order.job, call=order.call, shards=shards))

    def _make_fork(self, order: MakeFork) -> None:
        """Make manifests of a new job over slots that are here (R32)."""
        for shelved in make(self.vault, order.shards):
            self.context.sealed(shelved)

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
