"""One real state machine among fake holders, on virtual time: seeded delays, crashes and returns, no threads.

`ControllerWorld` is a shell around `ControllerMachine.handle`, as the controller actor is. It delivers messages in
order per session, ticks, renews the lease, and starts a successor after a crash. It remembers the digest of every put,
so that `check_restored` can compare.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from memstore.config import Config
from memstore.core.cluster.job import Job
from memstore.core.cluster.state import Rules
from memstore.core.controller.machine import ControllerMachine
from memstore.core.report.event_kinds import event_fields
from memstore.core.wire.codec import encode
from memstore.core.wire.ids import Endpoint
from memstore.core.wire.messages import (
    AnswerCall,
    Body,
    Event,
    HostBeat,
    HostInfo,
    HostLost,
    LeaseRenewed,
    LogLine,
    Received,
    SendOrder,
    Tick,
)
from memstore.core.wire.orders import TakeIncarnation, decode_order
from memstore.core.wire.replies import status_fields
from memstore.core.wire.reports import ProcessGone
from memstore.testing.controller.durable import Durable
from memstore.testing.controller.holder import CHUNKS, FakeHolder, FakeRank, digest_of, plain_event
from memstore.testing.event_queue import EventQueue
from memstore.testing.requests import request_of
from recovery.inventory import ShardId, ShardSpec, StepId

TICK_S = 0.2
BEAT_S = 0.5
LEASE_EVERY_S = 1.0
JOB = "train"


class ControllerWorld(EventQueue):
    """A cluster: hosts by id, ranks by (job, rank), and the controller if one is alive."""

    def __init__(
        self,
        hosts: int | Sequence[str] = 3,
        *,
        labels: Mapping[str, Mapping[str, str]] | None = None,
        seed: int = 0,
        rules: Mapping[str, Any] | None = None,
        **config: Any,
    ) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.delay_s = (0.001, 0.02)  # of a message, least and most
        self.work_s = (0.01, 0.2)  # of a push or a staging, least and most
        fields = {"recovery_grace_s": 8.0, "lease_s": 1.0, "outlast_s": 1.0, "settle_s": 3.0}
        self.rules = Rules(**{**fields, **(rules or {})})
        self.config = Config(connect_timeout_s=20.0, **config).job_fields()
        self.durable = Durable()
        self.put_digests: dict[ShardId, str] = {}
        self.notes: list[str] = []
        self.machine: ControllerMachine | None = None
        self.term = 0
        self.has_lease = True
        self.skew_s = 0.0  # how far the next controller's wall clock is ahead
        self.nonces = itertools.count(1)
        self._sent_s: dict[tuple[str, str], float] = {}  # (direction, host) -> when its last message arrives
        self._sessions: dict[str, tuple[int, int]] = {}  # host -> (term, incarnation)
        self._silent: set[str] = set()
        names = [f"h{n}" for n in range(hosts)] if isinstance(hosts, int) else list(hosts)
        self.holders: dict[str, FakeHolder] = {}
        for name in names:
            self.add_host(name, (labels or {}).get(name, {}))
        self.ranks: dict[tuple[str, int], FakeRank] = {}
        self.start_controller()
        self.every(TICK_S, lambda: self._handle(Tick()))
        self.every(BEAT_S, self._beat)
        self.every(LEASE_EVERY_S, self._renew)
        self.run_until(lambda: self.served.is_settled, 5.0)

    # -- time ---------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        """Let virtual time pass."""
        end_s = self.now + seconds
        while (work := self.next_event(end_s)) is not None:
            work()
        self.now = end_s

    def status(self) -> dict[str, Any]:
        """Return what `memstore status --json` prints of the served controller."""
        return status_fields(self.served.parts.status.answer())

    def events(self, job: str | None = None) -> list[dict[str, Any]]:
        """Return what `memstore events --json` prints of it, of one job or of all."""
        return list(map(event_fields, self.served.parts.recorder.recent_events.page(0, job, self.now).events))

    def run_until(self, is_done: Callable[[], bool], limit_s: float = 60.0) -> bool:
        """Let time pass until the condition holds; False if it did not within `limit_s`."""
        end_s = self.now + limit_s
        while not is_done():
            if (work := self.next_event(end_s)) is None:
                return False
            work()
        return True

    # -- controller ---------------------------------------------------------------------------

    def start_controller(self) -> None:
        """Start a controller of the next term: it knows which hosts were announced, and dials them all."""
        self.term += 1
        self.machine = ControllerMachine(
            term=self.term,
            now=self.now,
            wall_offset_s=1e9 + self.skew_s,
            rules=self.rules,
            expected_hosts=sorted(self.holders),
        )
        self._sessions.clear()
        for holder in self.holders.values():
            self._dial(holder)

    def crash_controller(self, *, restart_after_s: float | None = 0.5) -> None:
        """End the controller with all that it knew; messages on their way to it are lost."""
        self.machine = None
        self._sessions.clear()
        if restart_after_s is not None:
            self.at(restart_after_s, self.start_controller)

    def _dial(self, holder: FakeHolder) -> None:
        self.at(self.random.uniform(*self.delay_s), lambda: self._greet(holder))

    def _greet(self, holder: FakeHolder) -> None:
        if self.machine is None or not holder.is_up or holder.host_id in self._silent:
            return
        if self._sessions.get(holder.host_id) == (self.term, holder.info.incarnation):
            return
        self._sessions[holder.host_id] = (self.term, holder.info.incarnation)
        holder.term, holder.clock_s = self.term, -math.inf
        self._send(holder, replace(holder.hello(), asked_s=self.now))
        holder.resend_calls()

    def _send(self, holder: FakeHolder, event: Event) -> None:
        """Send an event from a holder to the controller, in order within the session."""
        host, session = holder.host_id, self._sessions.get(holder.host_id)
        if session is None or not holder.is_up:
            return
        self._deliver("up", host, lambda: self._receive(host, session, event))

    def _receive(self, host: str, session: tuple[int, int], event: Event) -> None:
        if self._sessions.get(host) == session:
            self._handle(plain_event(event))

    def _deliver(self, way: str, host: str, work: Callable[[], object]) -> None:
        arrives_s = max(self.now + self.random.uniform(*self.delay_s), self._sent_s.get((way, host), 0.0))
        self._sent_s[way, host] = arrives_s
        self.at(arrives_s - self.now, lambda: self._unless_silent(way, host, work))

    def _unless_silent(self, way: str, host: str, work: Callable[[], object]) -> None:
        if host in self._silent:
            self.at(0.1, lambda: self._deliver(way, host, work))  # a frozen host's messages wait in the socket
        else:
            work()

    def _handle(self, event: Event) -> None:
        if self.machine is None:
            return
        actions = self.machine.handle(self.now, event)
        assert not self.machine.parts.recorder.problem, self.machine.parts.recorder.problem
        for action in actions:
            if isinstance(action, LogLine):
                self.notes.append(f"{self.now:.2f} {action.text}")
                continue
            host, session = action.host_id, self._sessions.get(action.host_id)
            if session is None:
                continue
            self._deliver("down", host, lambda a=action, h=host, s=session: self._arrive(a, h, s))  # type: ignore[misc]
        for host in [h for h in self._sessions if h in self.machine.hosts.states]:
            state = self.machine.hosts.states[host]
            if state.status == "dead" and state.info.incarnation == self._sessions[host][1]:
                del self._sessions[host]  # declared dead by silence: it needs a new session

    def _arrive(self, action: SendOrder | AnswerCall, host: str, session: tuple[int, int]) -> None:
        holder = self.holders[host]
        if self._sessions.get(host) != session or not holder.is_up:
            return
        if isinstance(action, SendOrder):
            holder.obey(decode_order(encode(action.order)))
            if isinstance(action.order, TakeIncarnation):
                del self._sessions[host]  # the holder ends it, to begin again
        else:
            holder.answer(action.call_id, b"" if action.reply is None else encode(action.reply), action.error)

    def _beat(self) -> None:
        for host, holder in self.holders.items():
            if host in self._sessions and host not in self._silent:
                self._send(holder, HostBeat(host, clock_s=holder.clock_s))
            elif holder.is_up:
                self._dial(holder)

    def _renew(self) -> None:
        if self.has_lease:
            self._handle(LeaseRenewed(self.now + 3.0))

    # -- hosts --------------------------------------------------------------------------------

    def add_host(self, name: str, labels: Mapping[str, str] | None = None) -> FakeHolder:
        """Add a machine with empty memory."""
        info = HostInfo(
            name, 1, (Endpoint(f"10.0.0.{len(self.holders)}", 7000),), machine=f"m-{name}", labels=labels or {}
        )
        holder = FakeHolder(info, self.durable, send=self._send, peer=self._reachable, later=self._later)
        self.holders[name] = holder
        if self.machine is not None:
            self._dial(holder)
        return holder

    def _reachable(self, host: str) -> FakeHolder | None:
        holder = self.holders.get(host)
        return holder if holder is not None and holder.is_up and host not in self._silent else None

    def _later(self, holder: FakeHolder, work: Callable[[], None]) -> None:
        life = holder.info.incarnation

        def unless_dead() -> None:
            if holder.is_up and holder.info.incarnation == life:
                work()

        self.at(self.random.uniform(*self.work_s), unless_dead)

    def kill_host(self, name: str, *, keep_memory: bool = False) -> None:
        """End a machine, or with `keep_memory` only its holder and ranks; connections reset at once."""
        holder = self.holders[name]
        holder.is_up = False
        for rank in holder.ranks.values():
            rank.is_dead = True
        if not keep_memory:
            holder.copies, holder.journal, holder.fences, holder.term = {}, [], {}, 0
        if self._sessions.pop(name, None) is not None:
            self._handle(HostLost(name, "connection reset"))

    def return_host(self, name: str) -> None:
        """Start a new holder on a host, with the memory that is left there."""
        self.holders[name].restart(keep_memory=True)
        self._dial(self.holders[name])

    def silence(self, name: str) -> None:
        """Let a host hang: no message goes in or out, and no connection resets."""
        self._silent.add(name)

    def thaw(self, name: str) -> None:
        """Let a host that hangs go on."""
        self._silent.discard(name)

    # -- ranks --------------------------------------------------------------------------------

    def join(
        self, rank: int, world_size: int, key: str | None, *, host: str | None = None, job: str = JOB, **more: Any
    ) -> FakeRank:
        """Start a process and let it connect; its answers come later."""
        name = host or sorted(h for h, x in self.holders.items() if x.is_up)[rank % self._up_count()]
        process = FakeRank(job, rank, name, f"n{next(self.nonces)}", key)
        self.ranks[job, rank] = process
        self.holders[name].ranks[process.nonce] = process
        body = {
            "job": job,
            "rank": rank,
            "world_size": world_size,
            "nonce": process.nonce,
            "key": key,
            "pid": 1000 + rank,
            "launcher": "launcher",
            "config": self.config,
            **more,
        }
        self.holders[name].call(process, request_of("join", body))
        return process

    def _up_count(self) -> int:
        return sum(h.is_up for h in self.holders.values())

    def launch(self, world_size: int = 3, key: str | None = None, *, job: str = JOB, **more: Any) -> list[FakeRank]:
        """Start all ranks of a launch, spread over the live hosts; return at their answers or after 15 s."""
        old = [self.ranks[k] for k in list(self.ranks) if k[0] == job]
        for rank in old:
            self.kill_rank(rank)
        key = key or f"key-{next(self.nonces)}"
        ranks = [self.join(r, world_size, key, job=job, **more) for r in range(world_size)]
        self.run_until(lambda: all(r.answers.get("join") or r.errors.get("join") for r in ranks), 15.0)
        return ranks

    def kill_rank(self, rank: FakeRank, *, has_left: bool = False) -> None:
        """End a process; its holder proves that by the pid, or it said that it leaves and lives."""
        if rank.is_dead:
            return
        rank.is_dead = True
        holder = self.holders[rank.host_id]
        for call_id in [c for c, (nonce, _) in holder.calls.items() if nonce == rank.nonce]:
            del holder.calls[call_id]
        self._send(holder, Received(rank.host_id, ProcessGone(nonce=rank.nonce, has_left=has_left)))

    def call(self, rank: FakeRank, verb: str, **body: Any) -> None:
        """Send a rank's question to the controller."""
        base = {"job": rank.job, "attempt": rank.attempt, "rank": rank.rank}
        self.holders[rank.host_id].call(rank, request_of(verb, base, **body))

    def get(
        self,
        ranks: Sequence[FakeRank],
        step: int | None = None,
        *,
        limit_s: float = 60.0,
        is_agreement: bool = False,
        from_job: str | None = None,
    ) -> list[Body]:
        """Call get() or agree_on_step() on all ranks; return their answers, or the errors as {"error": text}."""
        before = [len(r.answers.get("get", ())) + len(r.errors.get("get", ())) for r in ranks]
        for rank in ranks:
            self.call(rank, "get", step=step, from_job=from_job, timeout_s=limit_s, is_agreement=is_agreement)
        self.run_until(
            lambda: all(
                len(r.answers.get("get", ())) + len(r.errors.get("get", ())) > n and not (r.is_loading and r.loads)
                for r, n in zip(ranks, before, strict=True)
            ),
            limit_s,
        )
        return [{"error": r.error("get")} if r.errors.get("get") else _last(r.answers.get("get")) for r in ranks]

    def reserve(self, ranks: Sequence[FakeRank]) -> None:
        """Do the collective reservation of the first put."""
        for rank in ranks:
            self.call(rank, "reserve", slots=CHUNKS)
        self.run_until(lambda: all(r.answers.get("reserve") or r.errors.get("reserve") for r in ranks), 30.0)
        for rank in ranks:
            rank.has_room = bool(rank.answers.get("reserve"))

    def put(self, rank: FakeRank, step: int) -> None:
        """Let a rank hand a step over; below its resume step it skips by itself (R12)."""
        holder = self.holders[rank.host_id]
        if rank.is_dead or not holder.is_up or rank.is_fenced:
            return
        rank.tickets[step] = "pending"
        if step < rank.resume_step:
            rank.tickets[step] = "skipped"
            return
        shard = ShardId(rank.job, rank.attempt, step, rank.rank)
        digest = digest_of(rank.job, rank.attempt, step, rank.rank, rank.nonce)
        self.put_digests.setdefault(shard, digest)
        join = rank.answers["join"][-1]
        holder.seal(rank, step, ShardSpec(digest, CHUNKS * 64, 64, CHUNKS, int(join["world_size"])))

    def put_all(self, ranks: Sequence[FakeRank], step: int, *, until: str = "committed", limit_s: float = 20.0) -> bool:
        """Put a step on all ranks, after a reservation if there is none; say whether every ticket came to `until`."""
        if not all(rank.has_room for rank in ranks):
            self.reserve(ranks)
        for rank in ranks:
            self.put(rank, step)
        return self.run_until(lambda: all(rank.tickets.get(step) == until for rank in ranks), limit_s)

    def skip(self, rank: FakeRank, step: int, *, is_failed: bool = False) -> None:
        """Let a rank skip a step, because it has no room or its put failed."""
        rank.tickets[step] = "skipped"
        self.call(rank, "skip", step=step, is_failed=is_failed, why="its state was changed" if is_failed else "no room")

    # -- what is true -------------------------------------------------------------------------

    @property
    def served(self) -> ControllerMachine:
        """The state machine of the controller that lives; LookupError if none does."""
        if self.machine is None:
            raise LookupError("no controller is alive")
        return self.machine

    def job(self, name: str = JOB) -> Job:
        """Return what the controller knows of a job."""
        return self.served.jobs[name]

    def holders_of(self, step: StepId, rank: int, job: str = JOB) -> list[str]:
        """Return the live hosts that have a whole copy in truth."""
        shard = ShardId(job, step.attempt, step.step, rank)
        return sorted(
            h for h, x in self.holders.items() if x.is_up and shard in x.copies and not x.copies[shard].missing
        )

    def check_restored(self, answers: Sequence[Body]) -> None:
        """Raise AssertionError unless one step came back on all ranks with the bytes that were put (promise 3)."""
        found = {(a["attempt"], a["step"]) for a in answers if a.get("step") is not None}
        assert len(found) <= 1, f"a mixture of steps was restored: {found}"
        for answer in answers:
            if answer.get("step") is not None:
                job, attempt, step, rank = answer["shard"]
                put = self.put_digests[ShardId(job, attempt, step, rank)]
                assert answer["digest"] == put, f"rank {rank} got {answer['digest']}, put {put}"


def describe(world: ControllerWorld) -> str:
    """Return a page about a world, for a failing test."""
    rows = [f"t={world.now:.2f} term={world.term}"]
    for name, job in world.served.jobs.items():
        newest = job.newest
        rows.append(f"{name}: attempt {newest.attempt_number if newest else None}, commits {sorted(job.commits)}")
        rows += [f"  {(a.attempt_number, a.phase, a.parent, a.parent_step, a.steps)}" for a in job.attempts.values()]
    return "\n".join([*rows, *world.notes[-20:]])


def _last(found: Sequence[Body] | None) -> Body:
    return found[-1] if found else {"error": "no answer"}
