"""A holder of the simulation: the real replica store, peer server and procedures of core/holder, in virtual time.

It begins them when an order, a message of a rank or the time demands it, as shell/holder does on threads.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Generator
from dataclasses import replace
from functools import partial
from typing import cast

from msgspec import structs

from memstore.core.arena.claimed_memory import Limit
from memstore.core.arena.replica_store import ReplicaStore, Store
from memstore.core.holder import ranks
from memstore.core.holder.holder_io import Lane
from memstore.core.holder.inventory import inventory, report_copy
from memstore.core.holder.orders import obey
from memstore.core.holder.puts import equal_ranks, seal
from memstore.core.holder.puts.push import WHOLE_BYTES
from memstore.core.holder.reads import ready
from memstore.core.holder.sessions import JobFences, Sessions, read_journal
from memstore.core.holder.state import HolderState, Limits, SubmittedPut
from memstore.core.wire import calls, reports
from memstore.core.wire.calls import Called
from memstore.core.wire.messages import Event, HostInfo, Received
from memstore.core.wire.orders import EchoClock, HostNews, Order, TakeIncarnation, WriteJournal
from memstore.core.wire.rank_messages import PutReady
from memstore.core.wire.reports import FactsWritten
from memstore.shell.holder.pending_calls import Calls
from memstore.shell.holder.scrub import Scrubber
from memstore.shell.peer.chunk_frames import Damage
from memstore.shell.peer.outgoing_shard import OutgoingShards
from memstore.shell.peer.parity import ParityServer
from memstore.shell.peer.server import PeerServer
from memstore.testing.simulator.checks.checker import Checker
from memstore.testing.simulator.host.context import HostWorld, RankLink, hello_of, open_link
from memstore.testing.simulator.host.shared_shards import SharedShardHolder, SimSharedShards
from memstore.testing.simulator.host.virtual_io import VirtualIo, connect, finish
from memstore.testing.simulator.world.memory import MachineClock, Memory, MemoryArena, MemoryJournal, MemoryManifests
from memstore.testing.simulator.world.virtual_time import Thread, Wait
from memstore.testing.simulator.world.world import AnyRank, AnySession
from recovery.inventory import Copy, ShardId

REAP_S = 0.5
FENCE = Lane("fence")
SLOTS_MAX = 400


class SimHolder:
    """One life of a holder; the memory outlives it."""

    def __init__(self, world: HostWorld, checker: Checker, info: HostInfo, memory: Memory) -> None:
        self.world, self.checker = world, checker
        self.memory, self.host_id = memory, info.host_id
        self.is_up, self.is_frozen, self.thawed_s = True, False, -1.0
        self.fences = JobFences()
        term = read_journal(memory.journal, self.fences)
        self.sessions = Sessions[AnySession](term, MemoryJournal(memory), self._fact_written)
        self.view: set[str] = set()
        self.served_links: list[RankLink] = []  # that have not been seen to be closed: the newest of each process too
        self.link_orders = itertools.count()
        self.late_s = 0.0  # by which the thread that serves the next link is late
        self.calls = Calls(
            lambda number, request: self.send_event(Received(self.host_id, Called(id=number, call=request))),
            first=(info.incarnation << 32) % (1 << 60),
        )
        memory.is_cut, memory.crash_in = False, None
        self.replicas: Store = ReplicaStore(
            MemoryArena(memory, SLOTS_MAX),
            MemoryManifests(memory),
            chunk_bytes=memory.chunk_bytes,
            limit=Limit(SLOTS_MAX * memory.chunk_bytes),
            clock=MachineClock(memory, lambda: world.now),
            is_alive=world.is_alive,
            lock=contextlib.nullcontext(),
            room_lock=contextlib.nullcontext(),
            parity_lock=contextlib.nullcontext(),
        )
        self.peer_server = self._peer_server()
        self.shared_shards = SimSharedShards(self, world, checker.shared_shards)
        self.scrubber = Scrubber(self)  # type: ignore[arg-type]
        # By the moment: a holder whose number was lost may have a former one's.
        first_pin = random.Random(f"pins {world.scenario.seed} {self.host_id} {world.now}").getrandbits(60)
        self.state = HolderState(
            info,
            self.replicas,
            OutgoingShards(self.replicas).outgoing,
            Limits(
                world.rules.suspect_after_s,
                world.rules.dead_after_s,
                whole_bytes=WHOLE_BYTES if world.scenario.seed % 2 else 0,  # all its shards are small
            ),
            now=lambda: world.now,
            report=self.report,
            ask=self.calls.ask_own,
            is_stopping=lambda: not self.is_up,
            is_alive=lambda owner: world.is_alive(owner.pid, owner.start),
            pin_numbers=itertools.count(first_pin),
            fences=self.fences,
            shared_shards=self.shared_shards,
        )
        self.replicas.on_damaged = partial(report_copy, self.state)
        self.io = VirtualIo(self)
        checker.stored_bytes.adopted(self)

    def _peer_server(self) -> PeerServer:
        fenced, sealed = self.fences.is_fenced, self._copy_sealed
        reach = lambda host: connect(self, host)  # noqa: E731
        parity = ParityServer(
            self.replicas, self.host_id, is_fenced=fenced, on_sealed=sealed, damage=Damage(), reach=reach
        )
        return PeerServer(self.replicas, self.host_id, is_fenced=fenced, on_sealed=sealed, parity=parity)

    @property
    def is_serving(self) -> bool:
        """Return whether its process lives and runs."""
        return self.is_up and not self.is_frozen

    def spawn(self, work: Thread) -> None:
        """Run one of its threads."""
        self.world.spawn(work, self)

    # -- the controller's session ---------------------------------------------------------------

    def accept(self, session: AnySession) -> bool:
        """Use a session from now on; False if this holder obeys a controller of a higher term (R17)."""
        is_obeyed, old = self.sessions.begin(session, session.controller.term)
        if old is not None:
            old.replaced()
        return is_obeyed

    @property
    def session(self) -> AnySession | None:
        """Return the session that it obeys."""
        return self.sessions.current

    @property
    def term(self) -> int:
        """Return the highest term of a controller that it has obeyed."""
        return self.sessions.term

    def _fact_written(self, seq: int) -> None:
        self.checker.commits.journalled(self)
        self.send_event(Received(self.host_id, FactsWritten(seq=seq)))

    @property
    def info(self) -> HostInfo:
        """Return who it is."""
        return self.state.info

    def hello(self) -> reports.HostInventory:
        """Return what a new session begins with."""
        return inventory(self.state, self.memory.journal)

    def copies(self) -> list[Copy]:
        """Return every copy that it has."""
        return list(self.replicas.index.copies(self.host_id))

    def send_event(self, event: Event) -> None:
        """To the controller; without a session it is dropped: inventories replace it."""
        if self.session is not None and self.is_up:
            self.session.report(event)

    def report(self, report: reports.Report) -> None:
        """Report something done."""
        if isinstance(report, reports.Fenced):
            self.checker.fences.answered(self, report.job, report.attempt)
        self.send_event(Received(self.host_id, report))

    def _copy_sealed(self, copy: Copy) -> None:
        report_copy(self.state, copy)
        self.io.start(FENCE, equal_ranks.compare, self.state, copy.shard)

    def before_offer(self, shard: ShardId, sender: SharedShardHolder) -> Generator[Wait, None, bool]:
        """Wait until an offer of a new put may be answered; return whether time passed."""
        return self.shared_shards.watched(shard, sender, finish(equal_ranks.await_own(self.io, self.state, shard)))

    # -- ranks --------------------------------------------------------------------------------

    @property
    def links(self) -> list[RankLink]:
        """Return the links of its ranks."""
        return [cast(RankLink, link) for link in self.state.ranks.links.values()]

    def connected(self) -> list[AnyRank]:
        """Return the stores that it speaks to, on open links."""
        return [link.process for link in self.links if link.is_open]

    def join(self, rank: AnyRank) -> None:
        """Take a link, on which the process sends again what was not sealed or answered."""
        link, is_ours = open_link(rank, next(self.link_orders)), rank.mapping is self.memory.slots
        self.served_links.append(link)
        hello = hello_of(rank, self.replicas.arena_identity if is_ours else "")
        late_s, self.late_s = self.late_s, 0.0

        def serve() -> Thread:
            if late_s:
                yield late_s
            yield from finish(ranks.join(self.io, self.state, link, hello, rank.ended()))
            if link.is_open:
                rank.connected(self)

        self.spawn(serve())

    def leave(self, link: object) -> None:
        """Take the `bye` that came on a link."""
        if isinstance(link, RankLink):
            self.spawn(self._end(link))

    def _end(self, link: RankLink) -> Thread:
        yield from finish(ranks.leave(self.io, self.state, link))
        ranks.end(self.state, link)

    def call(self, rank: AnyRank, call_id: int, request: calls.RankCall) -> None:
        """Relay a question."""
        self.calls.ask(ranks.ForwardedCall(rank.owner, rank.nonce, call_id, request))

    def answer(self, number: int, data: bytes, error: tuple[str, str] | None) -> None:
        """Pass on what the controller answered."""
        call = self.calls.take(number)
        if call is not None:
            self.io.start(FENCE, ranks.pass_on, self.state, call, data, error)

    def take_over(self, rank: AnyRank, ready: PutReady) -> None:
        """A submission came completely: seal it under the fence that holds now (R21)."""
        if not isinstance(rank.link, RankLink):
            return
        # Its sample shows another arena.
        put = seal.add(self.state, rank.link, structs.replace(ready, arena=self.replicas.arena_identity))
        if put is not None:
            self.shared_shards.began(put.shard)
            self.spawn(self._seal(put))

    def _seal(self, put: SubmittedPut) -> Thread:
        yield from finish(seal.run(self.io, self.state, put))
        self.shared_shards.ended(put.shard)

    def reap(self) -> None:
        """Reclaim what processes leased that are proved dead; let go of what was kept too long (R7, R8)."""
        if not self.is_serving:
            return
        for link in self.served_links:
            if not link.is_open:
                ranks.end(self.state, link)
        self.served_links = [link for link in self.served_links if link.is_open]
        self.io.start(FENCE, ranks.reap, self.state)
        self.io.start(FENCE, ready.expire, self.state)
        self.peer_server.give_up_idle()
        self.sessions.facts.retry()

    def scrub(self) -> None:
        """Make one round of the real scrub (R30)."""
        for check in self.scrubber.checks() if self.is_serving else ():
            check()

    # -- orders -------------------------------------------------------------------------------

    def obey(self, order: Order) -> None:
        """Carry out one order."""
        match order:
            case WriteJournal():
                self.sessions.facts.take(order)
            case EchoClock():
                self.session.clock_s = order.clock_s  # type: ignore[union-attr]
            case TakeIncarnation():
                self.begin_again(order.above)
            case _:
                if isinstance(order, HostNews):
                    known = self.view.difference(order.gone) if order.gone is not None else set()
                    self.view = known | {row.host for row in order.hosts}
                    self.peer_server.keep_senders(self.view)
                at_once = obey(self.io, self.state, order)
                if at_once is not None:
                    self.spawn(finish(at_once))

    def begin_again(self, above: int) -> None:
        """Take an incarnation above one, and begin a new session (R3)."""
        self.state.info = replace(self.info, incarnation=self.world.take_incarnation(self.host_id, above))
        self.view.clear()
        if self.session is not None:
            self.session.reset()
