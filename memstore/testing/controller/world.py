"""One real state machine among real holders (`holder.py`), on virtual time: seeded delays, crashes and returns.

`ControllerWorld` is a shell around `ControllerMachine.handle`, as the controller actor is. It delivers messages in
order per session, ticks, renews the lease, and starts a successor after a crash. It remembers the bytes of every
put, so that `check_restored` can compare.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from memstore.config import Config
from memstore.core.cluster.job import Job
from memstore.core.cluster.state import Rules
from memstore.core.controller.machine import ControllerMachine
from memstore.core.holder import ranks as links
from memstore.core.holder import succession
from memstore.core.journal.records import is_part, with_parts
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
    HostUp,
    LeaseRenewed,
    LogLine,
    SendOrder,
    Tick,
)
from memstore.core.wire.orders import decode_order
from memstore.core.wire.replies import status_fields
from memstore.testing.controller.holder import CHUNKS, DirectedHolder, DirectedRank, Durable
from memstore.testing.simulator.host.context import RankLink
from memstore.testing.simulator.host.virtual_io import finish
from memstore.testing.simulator.run.controller import decode_inventory, plain_event
from memstore.testing.simulator.world.memory import Memory
from memstore.testing.simulator.world.scenario import Scenario
from memstore.testing.simulator.world.virtual_time import Network, Thread, VirtualTime
from memstore.testing.simulator.world.world import AnySession
from recovery.inventory import ShardId, StepId

TICK_S = 0.2
BEAT_S = 0.5
LEASE_EVERY_S = 1.0
REAP_S = 0.5
JOB = "train"
CHUNK_BYTES = 64


class DirectedSession:
    """A session of the controller with one life of a holder."""

    def __init__(self, world: ControllerWorld, holder: DirectedHolder) -> None:
        self.world, self.holder, self.controller = world, holder, world
        self.clock_s = -math.inf  # the controller's clock, as it last sent it

    def report(self, event: Event) -> None:
        """Send an event."""
        self.world._send(self, event)

    def reset(self) -> None:
        """End it."""
        self.world._forget(self)

    replaced = reset


class ControllerWorld(VirtualTime):
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
        super().__init__(self._close)
        self.random = self.rng = random.Random(seed)
        self.scenario = Scenario(seed=1, hosts=0, job=JOB)
        self.ids = itertools.count(1)
        self.network = Network(random.Random(seed), self.at)
        self.memories: dict[str, Memory] = {}
        self.processes: dict[int, DirectedRank] = {}
        self.delay_s = (0.001, 0.02)  # of a message, least and most
        self.work_s = (0.01, 0.2)  # of a push or a staging, least and most
        fields = {"recovery_grace_s": 8.0, "lease_s": 1.0, "outlast_s": 1.0, "settle_s": 3.0}
        self.rules = Rules(**{**fields, **(rules or {})})
        self.config = Config(connect_timeout_s=20.0, **config).job_fields()
        self.durable = Durable()
        self.put_contents: dict[ShardId, list[bytes]] = {}
        self.notes: list[str] = []
        self.machine: ControllerMachine | None = None
        self.term = 0
        self.has_lease = True
        self.skew_s = 0.0  # how far the next controller's wall clock is ahead
        self.nonces = itertools.count(1)
        self._sent_s: dict[tuple[str, str], float] = {}  # (direction, host) -> when its last message arrives
        self._sessions: dict[str, DirectedSession] = {}
        names = [f"h{n}" for n in range(hosts)] if isinstance(hosts, int) else list(hosts)
        self.holders: dict[str, DirectedHolder] = {}
        for name in names:
            self.add_host(name, (labels or {}).get(name, {}))
        self.ranks: dict[tuple[str, int], DirectedRank] = {}
        self.start_controller()
        self.every(TICK_S, lambda: self._handle(Tick()))
        self.every(BEAT_S, self._beat)
        self.every(LEASE_EVERY_S, self._renew)
        self.every(REAP_S, self._reap)
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

    def journal_of(self, host: str) -> list[bytes]:
        """Return the records that a host's journal is to have, by what the controller knows."""
        return list(with_parts(self.served.parts.journal.log.entries, host))

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

    def _dial(self, holder: DirectedHolder) -> None:
        self.at(self.random.uniform(*self.delay_s), lambda: self._greet(holder))

    def _greet(self, holder: DirectedHolder) -> None:
        session = self._sessions.get(holder.host_id)
        if self.machine is None or not holder.is_serving or (session is not None and session.holder is holder):
            return
        session = DirectedSession(self, holder)
        if holder.accept(cast(AnySession, session)):
            self._sessions[holder.host_id] = session
            inventory = decode_inventory(encode(holder.hello()))
            session.report(HostUp.of(holder.host_id, inventory, self.now))
            holder.calls.ask_again()

    def _send(self, session: DirectedSession, event: Event) -> None:
        """Send an event from a holder to the controller, in order within the session."""
        if self._is_open(session):
            self._deliver("up", session.holder, lambda: self._receive(session, plain_event(event)))

    def _receive(self, session: DirectedSession, event: Event) -> None:
        if self._is_open(session):
            self._handle(event)

    def _is_open(self, session: DirectedSession) -> bool:
        return self._sessions.get(session.holder.host_id) is session

    def _forget(self, session: DirectedSession) -> None:
        if self._is_open(session):
            del self._sessions[session.holder.host_id]
        session.holder.sessions.end(cast(AnySession, session))

    def _deliver(self, way: str, holder: DirectedHolder, work: Callable[[], object]) -> None:
        place = (way, holder.host_id)
        arrives_s = max(self.now + self.random.uniform(*self.delay_s), self._sent_s.get(place, 0.0))
        self._sent_s[place] = arrives_s
        self.at(arrives_s - self.now, lambda: self._unless_frozen(way, holder, work))

    def _unless_frozen(self, way: str, holder: DirectedHolder, work: Callable[[], object]) -> None:
        if holder.is_frozen:
            self.at(0.1, lambda: self._deliver(way, holder, work))  # a frozen host's messages wait in the socket
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
            self._send_down(action)
        for host, session in list(self._sessions.items()):
            state = self.machine.hosts.states.get(host)
            if (
                state is not None
                and state.status == "dead"
                and state.info.incarnation == session.holder.info.incarnation
            ):
                self._forget(session)  # declared dead by silence: it needs a new session

    def _send_down(self, action: SendOrder | AnswerCall) -> None:
        session = self._sessions.get(action.host_id)
        if session is not None:
            self._deliver("down", session.holder, lambda: self._arrive(action, session))

    def _arrive(self, action: SendOrder | AnswerCall, session: DirectedSession) -> None:
        holder = session.holder
        if not self._is_open(session) or not holder.is_up:
            return
        if isinstance(action, SendOrder):
            holder.obey(decode_order(encode(action.order)))
        else:
            holder.answer(action.call_id, b"" if action.reply is None else encode(action.reply), action.error)

    def _beat(self) -> None:
        for host, holder in self.holders.items():
            session = self._sessions.get(host)
            if session is not None and session.holder is holder:
                if not holder.is_frozen:
                    session.report(HostBeat(host, clock_s=session.clock_s))
            elif holder.is_up:
                self._dial(holder)

    def _reap(self) -> None:
        for holder in self.holders.values():
            holder.reap()

    def _renew(self) -> None:
        if self.has_lease:
            self._handle(LeaseRenewed(self.now + 3.0))

    # -- hosts --------------------------------------------------------------------------------

    def add_host(self, name: str, labels: Mapping[str, str] | None = None) -> DirectedHolder:
        """Add a machine with empty memory."""
        info = HostInfo(
            name, 1, (Endpoint(f"10.0.0.{len(self.holders)}", 7000),), machine=f"m-{name}", labels=labels or {}
        )
        self.memories[name] = Memory(name, CHUNK_BYTES)
        holder = self.holders[name] = DirectedHolder(self, info, self.memories[name])
        if self.machine is not None:
            self._dial(holder)
        return holder

    def _close(self, work: Thread) -> None:
        """End a thread of a dead process: its clean-up code must not touch any memory."""
        states = [(m, m.is_cut) for m in self.memories.values()]
        for memory, _ in states:
            memory.is_cut = True
        try:
            work.close()
        finally:
            for memory, was_cut in states:
                memory.is_cut = was_cut

    def note(self, text: str) -> None:
        """Keep a line for the page of a failing test."""
        self.notes.append(f"{self.now:.2f} {text}")

    def is_alive(self, pid: int, start: int) -> bool:
        """Say whether a rank's process lives."""
        return pid in self.processes and not self.processes[pid].is_dead

    def take_incarnation(self, name: str, above: int = 0) -> int:
        """Return the number of the next life of a host's holder."""
        return succession.following(self.holders[name].info.incarnation, above)

    def kill_host(self, name: str, *, keep_memory: bool = False) -> None:
        """End a machine, or with `keep_memory` only its holder and ranks; connections reset at once."""
        for rank in self.processes.values():
            rank.is_dead = rank.is_dead or rank.host_id == name
        if self._end_holder(self.holders[name], keep_memory=keep_memory):
            self._handle(HostLost(name, "connection reset"))

    def _end_holder(self, holder: DirectedHolder, *, keep_memory: bool) -> bool:
        """End a holder's process; return whether it had a session."""
        holder.is_up, holder.memory.is_cut = False, True
        if not keep_memory:
            holder.memory.wipe()
        for other in self.holders.values():
            for shard, name, *_ in [key for key in other.replicas.index.incoming if key[1] == holder.host_id]:
                other.replicas.abort_incoming(name, shard)
        session = self._sessions.get(holder.host_id)
        if session is None:
            return False
        self._forget(session)
        return True

    def leave_to_late_host(self, name: str, known: int) -> None:
        """Let one host alone keep the facts after so many, and be away while a successor starts without it."""
        for other, holder in self.holders.items():
            ends = [0, *(at for at, record in enumerate(holder.journal, 1) if not is_part(record))]
            if other != name:
                del holder.journal[ends[known] :]
        self.kill_host(name, keep_memory=True)
        self.crash_controller()
        self.run(8.0)

    def return_host(self, name: str, *, keep_memory: bool = True, idle_s: float = 0.0) -> None:
        """Start a new holder on a host, with the memory that is left there, or with none; `idle_s`: none ran before."""
        former = self.holders[name]
        if former.is_up:
            self._end_holder(former, keep_memory=keep_memory)
        elif not keep_memory:
            former.memory.wipe()
        info = replace(former.info, incarnation=self.take_incarnation(name))
        self.holders[name] = DirectedHolder(self, info, former.memory, former)
        self.holders[name].state.idle_s = idle_s
        self._dial(self.holders[name])

    def silence(self, name: str) -> None:
        """Let a host hang: no message goes in or out, and no connection resets."""
        self.holders[name].is_frozen = True

    def thaw(self, name: str) -> None:
        """Let a host that hangs go on."""
        self.holders[name].is_frozen, self.holders[name].thawed_s = False, self.now

    # -- ranks --------------------------------------------------------------------------------

    def join(
        self, rank: int, world_size: int, key: str | None, *, host: str | None = None, job: str = JOB, **more: Any
    ) -> DirectedRank:
        """Start a process and let it connect; its answers come later."""
        name = host or sorted(h for h, x in self.holders.items() if x.is_up)[rank % self._up_count()]
        process = DirectedRank(self, job, rank, name, key)
        process.world_size = world_size
        self.ranks[job, rank] = process
        self.processes[process.pid] = process
        process.connect(self.holders[name])
        body = {
            "rank": rank,
            "world_size": world_size,
            "nonce": process.nonce,
            "key": key,
            "pid": 1000 + rank,
            "launcher": "launcher",
            "config": self.config,
            **more,
        }
        process.ask("join", **body)
        return process

    def _up_count(self) -> int:
        return sum(h.is_up for h in self.holders.values())

    def launch(self, world_size: int = 3, key: str | None = None, *, job: str = JOB, **more: Any) -> list[DirectedRank]:
        """Start all ranks of a launch, spread over the live hosts; return at their answers or after 15 s."""
        old = [self.ranks[k] for k in list(self.ranks) if k[0] == job]
        for rank in old:
            self.kill_rank(rank)
        key = key or f"key-{next(self.nonces)}"
        ranks = [self.join(r, world_size, key, job=job, **more) for r in range(world_size)]
        self.run_until(lambda: all(r.answers.get("join") or r.errors.get("join") for r in ranks), 15.0)
        return ranks

    def kill_rank(self, rank: DirectedRank, *, has_left: bool = False) -> None:
        """End a process; its holder proves that by the pid, or it said that it leaves and lives."""
        if rank.is_dead:
            return
        holder = self.holders[rank.host_id]
        if has_left:
            holder.spawn(self._leave(holder, rank))
            return
        rank.is_dead = True
        holder.reap()

    def _leave(self, holder: DirectedHolder, rank: DirectedRank) -> Thread:
        yield from finish(links.leave(holder.io, holder.state, cast(RankLink, rank.link), has_left=True))
        rank.is_dead = True

    def call(self, rank: DirectedRank, verb: str, /, **body: Any) -> None:
        """Send a rank's question to the controller."""
        rank.ask(verb, **body)

    def get(
        self,
        ranks: Sequence[DirectedRank],
        step: int | None = None,
        *,
        limit_s: float = 60.0,
        is_agreement: bool = False,
        from_job: str | None = None,
        is_trusted: bool = False,
    ) -> list[Body]:
        """Call get() or agree_on_step() on all ranks; return their answers, or the errors as {"error": text}."""
        before = [len(r.answers.get("get", ())) + len(r.errors.get("get", ())) for r in ranks]
        for rank in ranks:
            asked = {"from_job": from_job, "is_agreement": is_agreement, "is_trusted": is_trusted}
            self.call(rank, "get", step=step, timeout_s=limit_s, **asked)
        self.run_until(
            lambda: all(
                len(r.answers.get("get", ())) + len(r.errors.get("get", ())) > n and not (r.is_loading and r.loads)
                for r, n in zip(ranks, before, strict=True)
            ),
            limit_s,
        )
        return [{"error": r.error("get")} if r.errors.get("get") else _last(r.answers.get("get")) for r in ranks]

    def reserve(self, ranks: Sequence[DirectedRank]) -> None:
        """Do the collective reservation of the first put."""
        for rank in ranks:
            self.call(rank, "reserve", slots=CHUNKS)
        self.run_until(lambda: all(r.answers.get("reserve") or r.errors.get("reserve") for r in ranks), 30.0)
        for rank in ranks:
            rank.has_room = bool(rank.answers.get("reserve"))

    def put(self, rank: DirectedRank, step: int) -> None:
        """Let a rank hand a step over; below its resume step it skips by itself (R12)."""
        holder = self.holders[rank.host_id]
        if rank.is_dead or not holder.is_up or rank.is_fenced:
            return
        rank.tickets[step] = "pending"
        self.spawn(rank._put(step), rank)

    def put_all(
        self, ranks: Sequence[DirectedRank], step: int, *, until: str = "committed", limit_s: float = 20.0
    ) -> bool:
        """Put a step on all ranks, after a reservation if there is none; say whether every ticket came to `until`."""
        if not all(rank.has_room for rank in ranks):
            self.reserve(ranks)
        for rank in ranks:
            self.put(rank, step)
        return self.run_until(lambda: all(rank.tickets.get(step) == until for rank in ranks), limit_s)

    def skip(self, rank: DirectedRank, step: int, *, is_failed: bool = False) -> None:
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
        return sorted(h for h, x in self.holders.items() if x.is_up and shard in x.held and not x.held[shard].missing)

    def parity_on(self, step: StepId) -> dict[int, list[str]]:
        """Return, by rank, the live hosts that have its whole parity of a step in truth."""
        found: dict[int, list[str]] = {}
        for host, holder in sorted(self.holders.items()):
            for shard, copy in holder.held.items() if holder.is_up else ():
                if shard.is_parity and (shard.attempt, shard.step) == (step.attempt, step.step) and not copy.missing:
                    found.setdefault(shard.rank, []).append(host)
        return found

    def has_all_parity(self, step: StepId, world_size: int) -> bool:
        """Return whether every rank has its shard on its host, and its parity there and nowhere else."""
        hosts, parity = {rank.rank: rank.host_id for rank in self.ranks.values()}, self.parity_on(step)
        return all(hosts[r] in self.holders_of(step, r) and parity.get(r) == [hosts[r]] for r in range(world_size))

    def check_restored(self, answers: Sequence[Body]) -> None:
        """Raise AssertionError unless one step came back on all ranks with the bytes that were put (promise 3)."""
        found = {(a["attempt"], a["step"]) for a in answers if a.get("step") is not None}
        assert len(found) <= 1, f"a mixture of steps was restored: {found}"
        for answer in answers:
            if answer.get("step") is not None:
                job, attempt, step, rank = answer["shard"]
                assert answer["bytes"] == self.put_contents[ShardId(job, attempt, step, rank)]


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


# -- trained worlds -----------------------------------------------------------------------------------
# Worlds whose job has trained for some steps, the start of most tests.


def trained(
    hosts: int, world_size: int | None = None, last: int = 1, *, pause_s: float = 0.0, **config: Any
) -> tuple[ControllerWorld, list[DirectedRank]]:
    """Return a world whose job has committed steps 1 to `last`, and its ranks: one a host by default."""
    world = ControllerWorld(hosts, **config)
    ranks = world.launch(world_size or hosts)
    world.get(ranks)
    for step in range(1, last + 1):
        if not world.put_all(ranks, step):
            raise AssertionError(describe(world))
        world.run(pause_s)
    return world, ranks


def written(last: int = 1, **config: Any) -> tuple[ControllerWorld, list[DirectedRank]]:
    """Return a world whose job of two ranks has committed and durably written steps 1 to `last`, and its ranks."""
    return trained(2, last=last, pause_s=2.0, **{"durable": "/durable", "durable_every": 1, **config})
