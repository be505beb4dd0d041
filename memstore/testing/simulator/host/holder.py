"""A holder of the simulation: the real replica store, peer server and procedures of core/holder, in virtual time.

It mirrors what shell/holder/holder.py, orders.py and rank_server.py do around them: sessions, orders, ranks' links.
"""

from __future__ import annotations

import itertools
from typing import Any

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.arena.share import share_from_wire
from memstore.core.cluster.facts import AttemptOpened
from memstore.core.holder.fences import JobFences
from memstore.core.holder.push import Push
from memstore.core.holder.state import HolderState, Limits
from memstore.core.journal.records import entry_from_record, whole_order
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
from memstore.errors import CapacityError
from memstore.shell.arena.replica_store import ReplicaStore
from memstore.shell.holder.fork import drop_unknown_shares
from memstore.shell.holder.scrub import Scrubber
from memstore.shell.peer.outgoing_shard import OutgoingShards
from memstore.shell.peer.server import PeerServer
from memstore.testing.controller.catalog_holder import LEVELS
from memstore.testing.simulator.checks.checker import Checker
from memstore.testing.simulator.host import mapped_arena
from memstore.testing.simulator.host.context import HostWorld
from memstore.testing.simulator.host.driver import Driver
from memstore.testing.simulator.host.durable import Persister
from memstore.testing.simulator.host.fork import fork
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
LATE_DROPS_SHARE, LATE_DROP_MAX_S = 0.05, 5.0


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
        """Return whether its process lives and runs."""
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

    def report(self, kind: str, body: Body) -> None:
        """Report something done."""
        self.tell(Report(self.host_id, kind, body))

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
            self.tell(RankGone(self.host_id, nonce))
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

    def obey(self, kind: str, body: Body) -> None:
        """Carry out one order."""
        getattr(self, f"_on_{kind}")(body)

    def _on_journal(self, body: Body) -> None:
        if (whole := whole_order(self.pages, body)) is not None:
            self.memory.write_facts(whole)
            self.checker.commits.journalled(self)
            self.tell(FactAck(self.host_id, int(whole["seq"])))

    def _on_clock(self, body: Body) -> None:
        self.session.clock_s = body["clock_s"]  # type: ignore[union-attr]

    def _on_view(self, body: Body) -> None:
        known = set() if body["gone"] is None else self.view.difference(body["gone"])
        self.view = known | {str(row[0]) for row in body["hosts"]}
        self.peer_server.keep_senders(self.view)
        drop_unknown_shares(self.replicas, body["jobs"])

    def _on_fence(self, body: Body) -> None:
        job, attempt = str(body["job"]), int(body["attempt"])
        self.sealer.fence(job, attempt, body["members"])

    def _on_targets(self, body: Body) -> None:
        self.twins.declare(str(body["job"]), int(body["attempt"]), body["targets"], body["copiers"])

    def _on_grow(self, body: Body) -> None:
        """Time is all that it saves."""

    def _on_reserve(self, body: Body) -> None:
        job, share = str(body["job"]), share_from_wire(body)
        reply = {"job": job, "attempt": body["attempt"], "call": body["call"], "ok": True, "why": ""}
        try:
            self.replicas.claim(job, share)
        except CapacityError as exc:
            reply.update(ok=False, why=str(exc))
        self.report("reserved", reply)
        self.grant_job(job)

    def _on_fork(self, body: Body) -> None:
        self.spawn(fork(self, body))

    def _on_push(self, body: Body) -> None:
        is_repair = bool(body["is_repair"])
        self.pusher.submit(
            Push(shard_from_wire(body["shard"]), str(body["digest"]), str(body["target"]), is_repair=is_repair)
        )

    def _on_stage(self, body: Body) -> None:
        self.stager.order(body)

    def _on_check(self, body: Body) -> None:
        if not self.stager.has_staged(body):
            error = ["RecoveryError", "what was staged is gone: call get() again"]
            self.report("checked", {k: body[k] for k in ("job", "round", "rank")} | {"ok": False, "error": error})
            return
        for rank in self.ranks.values():
            if rank.job == body["job"] and rank.rank == body["rank"] and not rank.is_dead and not rank.is_frozen:
                why = rank.check(lambda: self.stager.manifest_of(body))
                reply = {"job": body["job"], "round": body["round"], "rank": rank.rank, "ok": not why}
                self.report("checked", {**reply, "error": ["ManifestMismatch", why] if why else None})

    def _on_level(self, body: Body) -> None:
        step, level = int(body["step"]), str(body["level"])
        for rank in self._ranks_of(body):
            if level in ("committed", "durable"):
                self.checker.commits.told_committed(rank, step, is_degraded=bool(body["degraded"]))
            rank.rise(step, level)
            rank.resume_step = max(rank.resume_step, int(body.get("resume", 0)))
            if level == "committed":
                for old in [s for s in rank.tickets if s < step and rank.tickets[s] in LEVELS[:3]]:
                    rank.tickets[old] = "superseded"

    def _ranks_of(self, body: Body) -> list[Rank]:
        mine = (body["job"], body["attempt"])
        return [r for _, r in sorted(self.ranks.items()) if (r.job, r.attempt) == mine and not r.is_dead]

    def _on_abandon(self, body: Body) -> None:
        key = (str(body["job"]), int(body["attempt"]), int(body["step"]))
        replica_index = self.replicas.index
        names = [*replica_index.shards, *((k[0], k[1]) for k in replica_index.drafts)]
        for shard in sorted({k[0] for k in names if (k[0].job, k[0].attempt, k[0].step) == key}):
            for draft in [k for k in replica_index.drafts if k[0] == shard]:
                replica_index.abort_draft(draft[1], draft[0])
            self.replicas.drop(shard)
        self.replicas.flush()
        for rank in self._ranks_of(body):
            rank.rise(int(body["step"]), str(body["level"]))
            rank.resume_step = max(rank.resume_step, int(body["resume"]))
        self.grant_job(key[0])

    def _on_drop(self, body: Body) -> None:
        self.spawn(self._drop(body))

    def _drop(self, body: Body) -> Thread:
        if self.world.rng.random() < LATE_DROPS_SHARE:  # the threads that drop are busy: a session may end meanwhile
            yield self.world.rng.uniform(0.0, LATE_DROP_MAX_S)
        shards, removed = [shard_from_wire(item) for item in body["shards"]], body.get("removed")
        self.replicas.drop_all(shards, removed)
        self.report("freed", {"shards": body["shards"], "number": body.get("number")})
        if removed:
            self.twins.forget(str(removed[0]), int(removed[1]))
        for job in sorted({shard.job for shard in shards}):
            self.grant_job(job)

    def _on_persist(self, body: Body) -> None:
        self.persister.order(body)

    def _on_markers(self, body: Body) -> None:
        self.persister.markers(body)

    def _on_ask(self, body: Body) -> None:
        self.report("answer", {"ask": body["ask"], "ok": True, "why": "", "value": {}})

    def _on_exit(self, body: Body) -> None:
        self.world.kill_holder(self.host_id)
