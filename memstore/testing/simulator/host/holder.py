"""A holder of the simulation: the real vault, peer server and procedures of core/holder, in virtual time.

It mirrors what shell/holder/holder.py, orders.py and rank_server.py do around them: sessions, orders, ranks' links.
"""

from __future__ import annotations

import itertools
from typing import Any

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.cluster.facts import AttemptOpened
from memstore.core.holder import drop, fork, room, stage
from memstore.core.holder.effects import Steps
from memstore.core.holder.fences import JobFences
from memstore.core.holder.push import Push
from memstore.core.holder.state import HolderState, Limits
from memstore.core.journal.records import entry_from_record, whole_order
from memstore.core.wire import reports
from memstore.core.wire.ids import WireCopy
from memstore.core.wire.messages import (
    Event,
    FactAck,
    HostInfo,
    HostUp,
    RankCall,
    Report,
)
from memstore.core.wire.orders import (
    AbandonStep,
    AllHosts,
    CallAnswered,
    CallRefused,
    DropJob,
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
from memstore.core.wire.replies import HostVerified
from memstore.core.wire.reports import CopiesVerified, PutTimes, RankGone, Sealed
from memstore.errors import InternalError
from memstore.shell.arena.replica_store import ReplicaStore
from memstore.shell.holder.scrub import Scrubber
from memstore.shell.peer.outgoing_shard import OutgoingShards
from memstore.shell.peer.server import PeerServer
from memstore.testing.controller.catalog_holder import LEVELS
from memstore.testing.simulator.checks.checker import Checker
from memstore.testing.simulator.host import mapped_arena
from memstore.testing.simulator.host.context import HostWorld
from memstore.testing.simulator.host.driver import Driver
from memstore.testing.simulator.host.durable import Persister
from memstore.testing.simulator.host.push import Pusher
from memstore.testing.simulator.host.seal import Sealer
from memstore.testing.simulator.host.staging import Stager
from memstore.testing.simulator.host.twins import SimTwins
from memstore.testing.simulator.world.memory import MachineClock, Memory, MemoryArena, MemoryManifests
from memstore.testing.simulator.world.processes import Rank, Session
from memstore.testing.simulator.world.virtual_time import Thread
from recovery.inventory import Copy, ShardId

Body = dict[str, Any]
REAP_S = 0.5
SLOTS_MAX = 400
LATE_SHARE, LATE_MAX_S = 0.05, 5.0  # of orders that wait for a thread


class SimHolder:
    """One life of a holder; the memory outlives it."""

    def __init__(self, world: HostWorld, checker: Checker, info: HostInfo, memory: Memory) -> None:
        self.world, self.checker = world, checker
        self.info, self.memory, self.host_id = info, memory, info.host_id
        self.is_up, self.is_frozen, self.thawed_s = True, False, -1.0
        self.session: Session | None = None
        self.term, self.pages = 0, list[bytes]()  # pages of a journal order whose end has not come
        self.fences = JobFences()
        self.view: set[str] = set()
        self.ranks: dict[str, Rank] = {}
        self.calls: dict[int, tuple[Rank | None, int, str, Body]] = {}  # None: the holder's own question
        self.call_ids = itertools.count(info.incarnation << 32)  # as in shell/holder/pending_calls.py: of no life twice
        memory.is_cut, memory.crash_in = False, None
        self.replicas = ReplicaStore(
            MemoryArena(memory, SLOTS_MAX), MemoryManifests(memory), limit_bytes=SLOTS_MAX * memory.chunk_bytes,
            chunk_bytes=memory.chunk_bytes, clock=MachineClock(memory, lambda: world.now), is_alive=world.is_alive,
        )  # fmt: skip
        self.replicas.on_hurt = self.sealed
        self._read_journal()
        self.peer_server = PeerServer(
            self.replicas, self.host_id, is_fenced=self.fences.is_fenced, on_sealed=self._copy_sealed,
        )  # fmt: skip
        self.twins = SimTwins(self, world, checker.shared_shards)
        self.scrubber = Scrubber(self)  # type: ignore[arg-type]
        self.state = HolderState(
            self.host_id, self.replicas, OutgoingShards(self.replicas).outgoing,
            Limits(world.rules.suspect_after_s, world.rules.dead_after_s), now=lambda: world.now, report=self.report,
            sealed=self.sealed, is_stopping=lambda: not self.is_up, fences=self.fences,
        )  # fmt: skip
        self.driver = Driver(self)
        self.pusher = Pusher(self, self.state, self.driver)
        self.sealer = Sealer(self, self.state, self.driver, self.pusher)
        self.stager, self.persister = Stager(self, self.state, self.driver), Persister(self, self.state, self.driver)
        checker.stored_bytes.adopted(self)

    @property
    def is_serving(self) -> bool:
        """True if its process lives and runs."""
        return self.is_up and not self.is_frozen

    def spawn(self, work: Thread) -> None:
        """Run one of its threads."""
        self.world.spawn(work, self)

    def _read_journal(self) -> None:
        for record in self.memory.journal:
            entry = entry_from_record(record)
            self.term = max(self.term, entry.term)
            if isinstance(entry.fact, AttemptOpened):
                self.fences.open(entry.fact.job, entry.fact.attempt)

    # -- the controller's session ---------------------------------------------------------------

    def accept(self, session: Session) -> bool:
        """Obey the controller of the highest term only (R17)."""
        if session.controller.term < self.term:
            return False
        self.term = session.controller.term
        old, self.session = self.session, session
        self.pages.clear()
        if old is not None:
            old.replaced()
        return True

    def hello(self) -> HostUp:
        """What a new session begins with: inventory, journal, processes (R16)."""
        ranks = tuple(sorted(n for n, r in self.ranks.items() if not r.is_dead))
        seen = {"idle_s": self.memory.idle_s, "dropped": dict(self.memory.stories)}
        return HostUp(self.info, tuple(self.copies()), tuple(self.memory.journal), ranks, **seen)  # type: ignore[arg-type]

    def copies(self, job: str | None = None) -> list[Copy]:
        """The inventory."""
        return list(self.replicas.index.copies(self.host_id, job))

    def open_calls(self) -> list[tuple[int, str, Body]]:
        """Calls that no controller has answered yet."""
        return [(n, verb, body) for n, (_, _, verb, body) in sorted(self.calls.items())]

    def tell(self, event: Event) -> None:
        """To the controller; without a session it is dropped: inventories replace it."""
        if self.session is not None and self.is_up:
            self.session.report(event)

    def report(self, report: reports.Report) -> None:
        """Report something done."""
        self.tell(Report(self.host_id, report))

    def sealed(self, copy: Copy | StoredReplica, put: PutTimes | None = None) -> None:
        """Report a copy as it is now, whole or with the chunks it lacks; nothing if it was dropped meanwhile."""
        shelved = self.replicas.index.find(copy.shard, copy.spec.digest)
        if shelved is not None and not shelved.is_doomed:
            held = Copy(shelved.shard, shelved.spec, self.host_id, shelved.missing)
            self.report(Sealed(copy=WireCopy.of(held), put=put))

    def _copy_sealed(self, copy: Copy) -> None:
        self.sealed(copy)
        self.twins.sealed(copy.shard)

    # -- ranks --------------------------------------------------------------------------------

    def welcome(self, rank: Rank) -> list[int]:
        """Take a link; return the slots the rank holds that are not its own (R8)."""
        stale = mapped_arena.confirm(self, rank)
        self.replicas.flush()
        self.ranks[rank.nonce], self.memory.idle_s = rank, 0.0
        rank.is_fenced |= 0 < rank.attempt < self.fences.first(rank.job)
        return stale

    def call(self, rank: Rank, call_id: int, verb: str, body: Body) -> None:
        """Relay a question; asked again on a new link it is the same question."""
        known = next((n for n, (r, c, _, _) in self.calls.items() if r is rank and c == call_id), None)
        number = known or next(self.call_ids)
        self.calls[number] = (rank, call_id, verb, body)
        self.tell(RankCall(self.host_id, number, verb, dict(body)))

    def answer(self, number: int, body: Body, error: tuple[str, str] | None) -> None:
        """The controller answered; a get's answer carries the bytes' place, pinned."""
        rank, call_id, _, _ = self.calls.pop(number, (None, 0, "", {}))
        if rank is None or rank.is_dead:
            return
        if "excerpt" in body and error is None:
            body, error = self.stager.read_part(rank, body)
        elif "shard" in body and error is None:
            body, error = self.stager.read(rank, body)
        rank.answered(call_id, body, error)

    def take_over(self, rank: Rank, step: int, slots: list[int], body: Body) -> None:
        """A hand-over came completely: seal it under the fence that holds now (R21)."""
        self.sealer.take_over(rank, step, slots, body)

    def put_failed(self, shard: ShardId, body: Body) -> None:
        """Ask the controller to have the step given up on all ranks alike (R12)."""
        number = next(self.call_ids)
        self.calls[number] = (None, 0, "skip", body)
        self.tell(RankCall(self.host_id, number, "skip", body))

    def grant(self, rank: Rank) -> None:
        """Lease the rank what its share allows."""
        is_here = self.ranks.get(rank.nonce) is rank and rank.holder is self and not rank.is_dead
        if is_here and rank.attempt >= self.fences.first(rank.job):
            slots = self.replicas.lease(rank.owner, rank.job, rank.rank, rank.attempt)
            if slots:
                rank.granted(slots)

    def grant_job(self, job: str) -> None:
        """Room may have become free."""
        for _, rank in sorted(self.ranks.items()):
            if rank.job == job:
                self.grant(rank)

    def reap(self) -> None:
        """Reclaim what processes leased that are proved dead; let go of expired pins (R7, R8)."""
        if not self.is_serving:
            return
        for owner in [o for o in self.replicas.table.leases if not self.world.is_alive(o.pid, o.start)]:
            self.replicas.table.reclaim(owner)
        self.replicas.flush()
        for nonce in [n for n, r in self.ranks.items() if r.is_dead]:
            rank = self.ranks.pop(nonce)
            self.calls = {n: c for n, c in self.calls.items() if c[0] is not rank or c[1] == 0}
            self.report(RankGone(nonce=nonce))
        self.replicas.expire_pins()
        self.peer_server.give_up_idle()
        self.stager.expire_parts()
        for job in {r.job for r in self.ranks.values()}:
            self.grant_job(job)

    def scrub(self) -> None:
        """Make one round of the real scrub (R30)."""
        for check in self.scrubber.checks() if self.is_serving else ():
            check()

    # -- orders -------------------------------------------------------------------------------

    def obey(self, order: Order) -> None:
        """Carry out one order."""
        state = self.state
        match order:
            case JournalPage() | JournalAppend() | JournalReplace() | JournalKeep():
                if (whole := whole_order(self.pages, order)) is not None:
                    self.memory.write_facts(whole)
                    self.checker.commits.journalled(self)
                    self.tell(FactAck(self.host_id, whole.seq))
            case TellClock():
                self.session.clock_s = order.clock_s  # type: ignore[union-attr]
            case AllHosts() | HostNews():
                known = self.view.difference(order.gone) if isinstance(order, HostNews) else set()
                self.view = known | {row.host for row in order.hosts}
                self.peer_server.keep_senders(self.view)
                self.replicas.keep_shares(order.jobs)
            case Fence():
                self.sealer.fence(order.job, order.attempt, order.members)
            case PushTargets():
                self.twins.declare(order)
            case Reserve():
                self.driver.start(room.reserve(state, order))
            case Grow():
                self.driver.start(room.grow(state, order))
            case LookAtCopies():
                self._later(fork.look(state, order))
            case MakeFork():
                self._later(fork.make(state, order))
            case PushCopy():
                self.pusher.submit(Push(order.shard.id, order.digest, order.target, is_repair=True))
            case StageShard() | ReadShard() | ReadChunks():
                self.stager.order(order)
            case OrderCheck():
                self.driver.start(stage.check(state, order))
            case RaiseLevel():
                self._level(order)
            case AbandonStep():
                self._later(drop.abandon(state, order))
            case FreeCopies():
                self._later(drop.free(state, order))
            case DropJob():
                self._later(drop.drop_job(state, order))
            case GiveUpFork():
                self._later(drop.give_up_fork(state, order))
            case VerifyCopies():
                found = HostVerified(shards=0, chunks=0, damaged=0, damaged_manifests=0)
                self.report(CopiesVerified(call=order.call, found=found, problem=""))
            case KeepStory():
                self.memory.stories[order.job] = order.story
            case ForgetStory():
                self.memory.stories.pop(order.job, None)
            case TakeIncarnation() | CallAnswered() | CallRefused():
                raise InternalError(f"{type(order).__name__} is the session's")
            case _:
                self.persister.order(order)

    def _level(self, order: RaiseLevel) -> None:
        for rank in self.ranks_of(order):
            self.checker.commits.told_committed(rank, order.step, is_degraded=order.degraded)
            rank.rise(order.step, order.level)
            if order.level == "committed":
                for old in [s for s in rank.tickets if s < order.step and rank.tickets[s] in LEVELS[:3]]:
                    rank.tickets[old] = "superseded"

    def ranks_of(self, order: RaiseLevel | AbandonStep) -> list[Rank]:
        """Return the living ranks of the job and the attempt that an order names."""
        mine = (order.job, order.attempt)
        return [r for _, r in sorted(self.ranks.items()) if (r.job, r.attempt) == mine and not r.is_dead]

    def _later(self, steps: Steps[None]) -> None:
        """Run a procedure on a thread that may be busy: a session may end meanwhile."""

        def late() -> Thread:
            if self.world.rng.random() < LATE_SHARE:
                yield self.world.rng.uniform(0.0, LATE_MAX_S)
            yield from self.driver.run(steps)

        self.spawn(late())
