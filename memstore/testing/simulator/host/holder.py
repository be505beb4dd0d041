"""A holder of the simulation: the real vault, peer server and procedures of core/holder, in virtual time.

It begins them when an order, a message of a rank or the time demands it, as shell/holder does on threads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.holder import drop, fork, partial_read, ranks, room, stage
from memstore.core.holder.effects import Steps
from memstore.core.holder.fences import JobFences
from memstore.core.holder.push import Push
from memstore.core.holder.sessions import Sessions, read_journal
from memstore.core.holder.state import HolderState, Limits
from memstore.core.wire import calls
from memstore.core.wire.messages import (
    Event,
    FactAck,
    HostInfo,
    HostUp,
    RankCall,
    RankGone,
    Report,
    copy_to_wire,
    shard_from_wire,
)
from memstore.core.wire.rank_messages import PutReady
from memstore.shell.arena.replica_store import ReplicaStore
from memstore.shell.holder.pending_calls import Call, Calls
from memstore.shell.holder.scrub import Scrubber
from memstore.shell.peer.outgoing_shard import OutgoingShards
from memstore.shell.peer.server import PeerServer
from memstore.testing.simulator.checks.checker import Checker
from memstore.testing.simulator.host.context import HostWorld
from memstore.testing.simulator.host.driver import Driver
from memstore.testing.simulator.host.durable import Persister
from memstore.testing.simulator.host.push import Pusher
from memstore.testing.simulator.host.rank_link import RankLink, hello_of, open_link
from memstore.testing.simulator.host.seal import Sealer
from memstore.testing.simulator.host.staging import Stager
from memstore.testing.simulator.host.twins import SimTwins
from memstore.testing.simulator.world.memory import (
    MachineClock,
    Memory,
    MemoryArena,
    MemoryJournal,
    MemoryManifests,
)
from memstore.testing.simulator.world.processes import Rank, Session
from memstore.testing.simulator.world.virtual_time import Thread
from recovery.inventory import Copy

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
        self.fences = JobFences()
        term = read_journal(memory.journal, self.fences)
        self.sessions = Sessions[Session](term, MemoryJournal(memory), self._fact_written)
        self.view: set[str] = set()
        self.calls = Calls(lambda *call: self.tell(RankCall(self.host_id, *call)), first=info.incarnation << 32)
        memory.is_cut, memory.crash_in = False, None
        self.replicas = ReplicaStore(
            MemoryArena(memory, SLOTS_MAX), MemoryManifests(memory), limit_bytes=SLOTS_MAX * memory.chunk_bytes,
            chunk_bytes=memory.chunk_bytes, clock=MachineClock(memory, lambda: world.now), is_alive=world.is_alive,
        )  # fmt: skip
        self.replicas.on_hurt = self.sealed
        self.peer_server = PeerServer(
            self.replicas, self.host_id, is_fenced=self.fences.is_fenced, on_sealed=self._copy_sealed,
        )  # fmt: skip
        self.twins = SimTwins(self, world, checker.shared_shards)
        self.scrubber = Scrubber(self)  # type: ignore[arg-type]
        self.state = HolderState(
            self.host_id, self.replicas, OutgoingShards(self.replicas).outgoing,
            Limits(world.rules.suspect_after_s, world.rules.dead_after_s), now=lambda: world.now, report=self.report,
            sealed=self.sealed, is_stopping=lambda: not self.is_up,
            is_alive=lambda owner: world.is_alive(owner.pid, owner.start), fences=self.fences,
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

    # -- the controller's session ---------------------------------------------------------------

    def accept(self, session: Session) -> bool:
        """Use a session from now on; False if this holder obeys a controller of a higher term (R17)."""
        is_obeyed, old = self.sessions.begin(session, session.controller.term)
        if old is not None:
            old.replaced()
        return is_obeyed

    @property
    def session(self) -> Session | None:
        """Return the session that it obeys."""
        return self.sessions.current

    @property
    def term(self) -> int:
        """Return the highest term of a controller that it has obeyed."""
        return self.sessions.term

    def _fact_written(self, seq: int) -> None:
        self.checker.commits.journalled(self)
        self.tell(FactAck(self.host_id, seq))

    def hello(self) -> HostUp:
        """What a new session begins with: inventory, journal, processes (R16)."""
        nonces = tuple(sorted(self.state.ranks.owners))
        seen = {"idle_s": self.memory.idle_s, "dropped": dict(self.memory.stories)}
        return HostUp(self.info, tuple(self.copies()), tuple(self.memory.journal), nonces, **seen)  # type: ignore[arg-type]

    def copies(self, job: str | None = None) -> list[Copy]:
        """The inventory."""
        return list(self.replicas.index.copies(self.host_id, job))

    def tell(self, event: Event) -> None:
        """To the controller; without a session it is dropped: inventories replace it."""
        if self.session is not None and self.is_up:
            self.session.report(event)

    def report(self, kind: str, body: Body) -> None:
        """Report something done."""
        is_gone = kind == "rank_gone"
        self.tell(RankGone(self.host_id, body["nonce"]) if is_gone else Report(self.host_id, kind, body))

    def sealed(self, copy: Copy | StoredReplica, put: Body | None = None) -> None:
        """Report a copy as it is now, whole or with the chunks it lacks; nothing if it was dropped meanwhile."""
        shelved = self.replicas.index.find(copy.shard, copy.spec.digest)
        if shelved is not None and not shelved.is_doomed:
            held = Copy(shelved.shard, shelved.spec, self.host_id, shelved.missing)
            body: Body = {"copies": [copy_to_wire(held)]}
            self.report("sealed", body if put is None else {**body, "put": put})

    def _copy_sealed(self, copy: Copy) -> None:
        self.sealed(copy)
        self.twins.sealed(copy.shard)

    # -- ranks --------------------------------------------------------------------------------

    @property
    def links(self) -> list[RankLink]:
        """Return the links of its ranks."""
        return [cast(RankLink, link) for link in self.state.ranks.links.values()]

    def join(self, rank: Rank) -> None:
        """Take a link, on which the process sends again what was not sealed or answered."""
        link, is_ours = open_link(rank), rank.mapping is self.memory.slots
        hello = hello_of(rank, self.replicas.arena_identity if is_ours else "")
        self.memory.idle_s = 0.0

        def serve() -> Thread:
            yield from self.driver.run(ranks.join(self.state, link, hello))
            if link.is_open:
                rank.connected(self)

        self.spawn(serve())

    def leave(self, rank: Rank) -> None:
        """Take a goodbye."""
        if isinstance(rank.link, RankLink):
            self.driver.start(ranks.leave(self.state, rank.link))

    def call(self, rank: Rank, call_id: int, request: calls.RankCall) -> None:
        """Relay a question."""
        self.calls.ask(Call(rank.owner, rank.nonce, call_id, request))

    def answer(self, number: int, body: Body, error: tuple[str, str] | None) -> None:
        """Pass on what the controller answered; with the place of the bytes if it is a read."""
        call = self.calls.take(number)
        link = next((link for link in self.links if call is not None and link.owner == call.owner), None)
        if call is None or link is None or not link.is_open:
            return
        if isinstance(call.request, calls.Join | calls.Rewind | calls.AssignRanks) and error is None:
            link.attempt, link.rank = int(body["attempt"]), int(body["rank"])
        if "shard" in body and error is None:
            self.world.spawn(self.stager.read(link, call.rank_id, body), link.process)
        else:
            link.process.answered(call.rank_id, body, error)

    def take_over(self, rank: Rank, ready: PutReady) -> None:
        """A hand-over came completely: seal it under the fence that holds now (R21)."""
        if isinstance(rank.link, RankLink):
            self.sealer.take_over(rank.link, ready)

    def reap(self) -> None:
        """Reclaim what processes leased that are proved dead; let go of what was kept too long (R7, R8)."""
        if not self.is_serving:
            return
        for link in self.links:
            if not link.is_open:
                ranks.end(self.state, link)
        self.driver.start(ranks.reap(self.state))
        self.replicas.expire_pins()
        partial_read.expire(self.state)
        self.peer_server.give_up_idle()
        self.sessions.facts.retry()

    def scrub(self) -> None:
        """Make one round of the real scrub (R30)."""
        for check in self.scrubber.checks() if self.is_serving else ():
            check()

    # -- orders -------------------------------------------------------------------------------

    def obey(self, kind: str, body: Body) -> None:
        """Carry out one order."""
        getattr(self, f"_on_{kind}")(body)

    def _on_journal(self, body: Body) -> None:
        self.sessions.facts.take(body)

    def _on_clock(self, body: Body) -> None:
        self.session.clock_s = body["clock_s"]  # type: ignore[union-attr]

    def _on_view(self, body: Body) -> None:
        known = set() if body["gone"] is None else self.view.difference(body["gone"])
        self.view = known | {str(row[0]) for row in body["hosts"]}
        self.peer_server.keep_senders(self.view)
        self.replicas.keep_shares(body["jobs"])

    def _on_fence(self, body: Body) -> None:
        job, attempt = str(body["job"]), int(body["attempt"])
        self.sealer.fence(job, attempt, body["members"])

    def _on_targets(self, body: Body) -> None:
        self.twins.declare(str(body["job"]), int(body["attempt"]), body["targets"], body["copiers"])

    def _on_grow(self, body: Body) -> None:
        self.driver.start(room.grow(self.state, body))

    def _on_reserve(self, body: Body) -> None:
        self.driver.start(room.reserve(self.state, body))

    def _on_fork(self, body: Body) -> None:
        self._later((fork.look if body["what"] == "look" else fork.make)(self.state, body))

    def _on_push(self, body: Body) -> None:
        is_repair = bool(body["is_repair"])
        self.pusher.submit(
            Push(shard_from_wire(body["shard"]), str(body["digest"]), str(body["target"]), is_repair=is_repair)
        )

    def _on_stage(self, body: Body) -> None:
        self.stager.order(body)

    def _on_check(self, body: Body) -> None:
        self.driver.start(stage.check(self.state, body))

    def _on_level(self, body: Body) -> None:
        self.driver.start(ranks.tell_attempt(self.state, str(body["job"]), ranks.level_of(body)))

    def _on_abandon(self, body: Body) -> None:
        self._later(drop.abandon(self.state, body))

    def _on_drop(self, body: Body) -> None:
        self._later(drop.drop(self.state, body))

    def _later(self, steps: Steps[None]) -> None:
        """Run a procedure on a thread that may be busy: a session may end meanwhile."""

        def late() -> Thread:
            if self.world.rng.random() < LATE_SHARE:
                yield self.world.rng.uniform(0.0, LATE_MAX_S)
            yield from self.driver.run(steps)

        self.spawn(late())

    def _on_persist(self, body: Body) -> None:
        self.persister.order(body)

    def _on_markers(self, body: Body) -> None:
        self.persister.markers(body)

    def _on_ask(self, body: Body) -> None:
        self.report("answer", {"ask": body["ask"], "ok": True, "why": "", "value": {}})

    def _on_dropped(self, body: Body) -> None:
        self.memory.stories[str(body["job"])] = str(body["story"])

    def _on_outdated(self, body: Body) -> None:
        self.info = replace(self.info, incarnation=self.world.take_incarnation(self.host_id, int(body["above"])))
        self.view.clear()
        if self.session is not None:
            self.session.reset()
