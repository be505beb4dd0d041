"""A holder without an arena: it carries out the orders of core/wire/messages.py on plain values.

A copy is a statement about bytes (a shard, its digest, the chunks that it lacks). The holder also keeps a journal, and
hosts ranks that put, get and receive levels. The world delivers its messages; this file knows neither time nor
controller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack

from memstore.core.journal.records import journal_after, whole_order
from memstore.core.wire.messages import (
    Body,
    Event,
    FactAck,
    HostInfo,
    HostUp,
    RankCall,
    Report,
    copy_to_wire,
    shard_from_wire,
    shard_to_wire,
    spec_from_wire,
)
from memstore.testing.controller.catalog_durable import Durable, list_markers, persist
from memstore.testing.controller.catalog_room import guest_refusal
from recovery.inventory import Copy, ShardId, ShardSpec

CHUNKS = 4  # of every shard
STAGE_TRIES = 100  # about 10 s: longer than it takes to declare a silent host dead
LEVELS = ("pending", "sealed", "replicated", "committed", "durable")


@dataclass
class FakeRank:
    """One training process, with the answers and levels that it received."""

    job: str
    rank: int
    host_id: str
    nonce: str
    key: str | None
    attempt: int = 0
    is_dead: bool = False
    stall_s: float = 0.0  # how long each of its puts blocks
    has_room: bool = False  # its reservation was granted
    answers: dict[str, list[Body]] = field(default_factory=dict)
    errors: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    tickets: dict[int, str] = field(default_factory=dict)
    degraded: dict[int, bool] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    resume_step: int = 0
    into_error: tuple[str, str] | None = None
    is_fenced: bool = False

    def rise(self, step: int, level: str, reason: str = "", *, is_degraded: bool = False) -> None:
        """Set the level of a ticket; levels only grow, and a ticket that has ended stays as it is (R15)."""
        now = self.tickets.get(step, "pending")
        if now not in LEVELS or step not in self.tickets:
            return
        if level not in LEVELS or LEVELS.index(level) >= LEVELS.index(now):
            self.tickets[step], self.reasons[step], self.degraded[step] = level, reason, is_degraded

    def error(self, verb: str) -> str:
        """Return the last error of a verb as "Class: message", or "" if it never failed."""
        found = self.errors.get(verb)
        return ": ".join(found[-1]) if found else ""


class FakeHolder:
    """One host; `send` takes events for the controller, `peer` finds another live holder, `later` delays work."""

    def __init__(
        self,
        info: HostInfo,
        durable: Durable,
        *,
        send: Callable[[FakeHolder, Event], None],
        peer: Callable[[str], FakeHolder | None],
        later: Callable[[FakeHolder, Callable[[], None]], None],
    ) -> None:
        self.info, self.durable = info, durable
        self.durable_problem = ""  # of this host alone
        self.idle_s, self.stories = 0.0, dict[str, str]()
        self.durable_key = ""  # name of the key in its durable_key_file
        self._send, self._peer, self._later = send, peer, later
        self.copies: dict[ShardId, Copy] = {}
        self.journal: list[bytes] = []
        self.pages: list[bytes] = []  # pages of a journal order whose last page has not come
        self.term = 0
        self.clock_s = -math.inf  # the controller's clock, as it last sent it in this session
        self.fences: dict[str, int] = {}
        self.targets: dict[str, list[str]] = {}
        self.copiers: dict[str, dict[int, list[str]]] = {}  # job -> local copier -> targets
        self.ranks: dict[str, FakeRank] = {}  # by nonce
        self.calls, self.calls_count = dict[int, tuple[str, str, Body]](), 0
        self.is_up = True
        self.refuses_copies, self.refuses_room = "", ""  # why pushes, or orders of room, are refused
        self.rooms: dict[str, Body] = {}  # job -> its reservation; without one no copy is taken from a peer
        self.staging_fails = ""
        self.checks_lost = 0  # so many of the next check orders find the rank's link broken
        self.orders: list[tuple[str, Body]] = []

    @property
    def host_id(self) -> str:
        """The id of its host."""
        return self.info.host_id

    def hello(self) -> HostUp:
        """Return the first event of a session: inventory and journal."""
        self.pages.clear()
        seen = {"idle_s": self.idle_s, "dropped": dict(self.stories)}
        return HostUp(self.info, tuple(self.copies.values()), tuple(self.journal), **seen)  # type: ignore[arg-type]

    def restart(self, *, keep_memory: bool) -> None:
        """Let a new holder process take the host's memory over, or find none."""
        self.info = replace(self.info, incarnation=self.info.incarnation + 1)
        self.targets, self.copiers, self.calls, self.ranks, self.is_up = {}, {}, {}, {}, True
        self.rooms = {}
        if not keep_memory:
            self.copies, self.journal, self.term, self.fences = {}, [], 0, {}

    # -- ranks --------------------------------------------------------------------------------

    def call(self, rank: FakeRank, verb: str, body: Body) -> None:
        """Send a rank's question to the controller; it is sent again in every session until it is answered."""
        self.calls_count += 1
        self.calls[self.calls_count] = (rank.nonce, verb, body)
        self._send(self, RankCall(self.host_id, self.calls_count, verb, dict(body)))

    def resend_calls(self) -> None:
        """Send every unanswered question again in a new session."""
        for call_id, (_, verb, body) in sorted(self.calls.items()):
            self._send(self, RankCall(self.host_id, call_id, verb, dict(body)))

    def answer(self, call_id: int, body: Body, error: tuple[str, str] | None) -> None:
        """Pass an answer of the controller on to its rank."""
        nonce, verb, _ = self.calls.pop(call_id, ("", "", {}))
        rank = self.ranks.get(nonce)
        if rank is None:
            return
        if error is not None:
            rank.errors.setdefault(verb, []).append((str(error[0]), str(error[1])))
            return
        rank.answers.setdefault(verb, []).append(body)
        if verb in ("join", "rewind", "mesh_order"):
            rank.attempt, rank.rank = int(body["attempt"]), int(body["rank"])
            rank.resume_step = max(rank.resume_step, int(body["resume_step"]))
        elif verb == "skip":
            rank.resume_step = max(rank.resume_step, int(body["resume"]))

    def seal(self, rank: FakeRank, step: int, spec: ShardSpec) -> None:
        """Report a step that a rank has handed over and push it to the targets (R13)."""
        shard = ShardId(rank.job, rank.attempt, step, rank.rank)
        if rank.attempt < self.fences.get(rank.job, 0):
            rank.rise(step, "failed", "fenced")
            return
        self.keep(Copy(shard, spec, self.host_id), {"put": {"stall_s": rank.stall_s, "age_s": rank.stall_s}})
        rank.rise(step, "sealed")
        for target in self.copiers.get(rank.job, {}).get(rank.rank, self.targets.get(rank.job, ())):
            self._later(self, lambda t=target: self.push(shard, t))  # type: ignore[misc]

    def keep(self, copy: Copy, more: Body | None = None) -> None:
        """Store a copy and report it."""
        self.copies[copy.shard] = copy
        self.report("sealed", {"copies": [copy_to_wire(copy)], **(more or {})})

    def report(self, kind: str, body: Body) -> None:
        """Send a report to the controller."""
        self._send(self, Report(self.host_id, kind, body))

    def lose(self, *shards: ShardId) -> None:
        """Lose copies of a job, and report an inventory without them."""
        for shard in shards:
            del self.copies[shard]
        job, attempt = shards[0].job, shards[0].attempt
        left = [copy_to_wire(copy) for shard, copy in self.copies.items() if shard.job == job]
        self.report("fenced", {"job": job, "attempt": attempt, "copies": left})

    # -- orders -------------------------------------------------------------------------------

    def obey(self, kind: str, body: Body) -> None:
        """Carry out one order."""
        self.orders.append((kind, body))
        getattr(self, f"_on_{kind}")(body)

    def _on_journal(self, body: Body) -> None:
        if (whole := whole_order(self.pages, body)) is not None:
            self.journal = journal_after(self.journal, whole)
            self._send(self, FactAck(self.host_id, int(whole["seq"])))

    def _on_clock(self, body: Body) -> None:
        self.clock_s = body["clock_s"]

    def _on_view(self, body: Body) -> None:
        pass

    def _on_dropped(self, body: Body) -> None:
        self.stories = {k: v for k, v in {**self.stories, body["job"]: body["story"]}.items() if v}

    def _on_outdated(self, body: Body) -> None:
        self.info = replace(self.info, incarnation=int(body["above"]) + 1)

    def _on_fence(self, body: Body) -> None:
        job, attempt = body["job"], int(body["attempt"])
        self.fences[job] = max(self.fences.get(job, 0), attempt)
        for rank in self.ranks.values():
            is_older = rank.job == job and 0 < rank.attempt < attempt and rank.nonce not in body["members"]
            rank.is_fenced = rank.is_fenced or is_older
        copies = [copy_to_wire(c) for c in self.copies.values() if c.shard.job == job]
        self.report("fenced", {"job": job, "attempt": attempt, "copies": copies})

    def _on_targets(self, body: Body) -> None:
        self.targets[body["job"]] = list(body["targets"])
        self.copiers[body["job"]] = {rank: list(targets) for rank, targets, _ in body["copiers"]}

    def _on_grow(self, body: Body) -> None:
        """Accept copies of the job although no reservation was made; the real holder grows its arena."""
        self.rooms.setdefault(body["job"], body)

    def _on_reserve(self, body: Body) -> None:
        why = self.refuses_room
        if not why:
            self.rooms[body["job"]] = body
        self.report("reserved", {**{key: body[key] for key in ("job", "attempt", "call")}, "ok": not why, "why": why})

    def _on_fork(self, body: Body) -> None:
        self._later(self, lambda: self._fork(body))

    def _fork(self, body: Body) -> None:
        """Make copies of a new job over the same chunks: their digest follows from the origin's and the new id."""
        looked: list[list[Any]] = []
        for item, digest, renamed in body["shards"]:
            mine, new = self.copies.get(shard_from_wire(item)), shard_from_wire(renamed)
            is_here = mine is not None and mine.spec.digest == digest
            looked.append([new.rank, f"{digest} as {new.job}", len(mine.missing) if is_here and mine else -1])
            if mine is not None and is_here and body["what"] == "make":
                self.keep(Copy(new, replace(mine.spec, digest=f"{digest} as {new.job}"), self.host_id, mine.missing))
        if body["what"] == "look":
            self.report("forked", {"job": body["job"], "call": body["call"], "shards": looked})

    def _on_push(self, body: Body) -> None:
        shard = shard_from_wire(body["shard"])
        self._later(self, lambda: self.push(shard, str(body["target"])))

    def push(self, shard: ShardId, target: str) -> None:
        """Copy one shard to a peer, or report why not."""
        mine, other = self.copies.get(shard), self._peer(target)
        if mine is None:
            return
        why = f"cannot reach {target}"
        if other is not None:
            is_known = other.copies.get(shard) is not None
            why = (
                ""
                if is_known
                else other.refuses_copies or guest_refusal(other.rooms.get(shard.job), other.copies, shard, CHUNKS)
            )
            if not why and max(shard.attempt, self.fences.get(shard.job, 0)) < other.fences.get(shard.job, 0):
                why = "fenced"
        if why or other is None:
            body = {"shard": shard_to_wire(shard), "target": target, "why": why, "is_final": True}
            self.report("push_failed", body)
            return
        old = other.copies.get(shard)
        missing = mine.missing if old is None else mine.missing & old.missing
        other.keep(Copy(shard, mine.spec, target, missing))

    def _on_stage(self, body: Body) -> None:
        self._later(self, lambda: self._stage(body))

    def _stage(self, body: Body, tries: int = 1) -> None:
        away = [str(s) for tier, s, _, _ in body["runs"] if tier == "peer" and self._peer(str(s)) is None]
        if away and tries < STAGE_TRIES:  # no evidence about bytes: it may be back, or be declared dead (R25)
            self._later(self, lambda: self._stage(body, tries + 1))
            return
        shard, spec = shard_from_wire(body["shard"]), spec_from_wire(body["spec"])
        bad: dict[str, list[int]] = {}
        for tier, source, first, count in body["runs"]:
            chunks = range(int(first), int(first) + int(count))
            name = str(source) if tier != "durable" else "durable"
            lacking = [i for i in chunks if not self._has_chunk(tier, source, shard, spec, i)]
            if lacking and name not in away:
                bad.setdefault(name, []).extend(lacking)
        why = self.staging_fails or ("chunks damaged or missing" if bad else "")
        why = why or (f"cannot reach {', '.join(away)}" if away else "")
        if not why:
            self.keep(Copy(shard, spec, self.host_id))
        report = {
            "job": body["job"], "round": body["round"], "rank": body["rank"], "ok": not why, "why": why, "bad": bad,
            "shard": body["shard"], "digest": spec.digest,
        }  # fmt: skip
        self.report("staged", report)

    def _has_chunk(self, tier: str, source: str | None, shard: ShardId, spec: ShardSpec, index: int) -> bool:
        if tier == "durable":
            return self.durable.has_part(shard, spec)
        holder = self if tier == "local" else self._peer(str(source))
        copy = holder.copies.get(shard) if holder is not None else None
        return copy is not None and copy.spec == spec and index not in copy.missing

    def _on_check(self, body: Body) -> None:
        if self.checks_lost > 0:
            self.checks_lost -= 1
            return
        for rank in self.ranks.values():
            if rank.job == body["job"] and rank.rank == body["rank"] and not rank.is_dead:
                error = list(rank.into_error) if rank.into_error else None
                reply = {"job": body["job"], "round": body["round"], "rank": rank.rank, "ok": not error, "error": error}
                self.report("checked", reply)

    def _on_level(self, body: Body) -> None:
        for rank in self._ranks_of(body):
            rank.rise(int(body["step"]), body["level"], body["reason"], is_degraded=bool(body["degraded"]))
            rank.resume_step = max(rank.resume_step, int(body.get("resume", 0)))
            if body["level"] == "committed":
                for step in [s for s in rank.tickets if s < int(body["step"])]:
                    if rank.tickets[step] in LEVELS[:3]:
                        rank.tickets[step] = "superseded"

    def _ranks_of(self, body: Mapping[str, Any]) -> list[FakeRank]:
        mine = (body["job"], body["attempt"])
        return [r for r in self.ranks.values() if (r.job, r.attempt) == mine and not r.is_dead]

    def _on_abandon(self, body: Body) -> None:
        key = (body["job"], int(body["attempt"]), int(body["step"]))
        for shard in [s for s in self.copies if (s.job, s.attempt, s.step) == key]:
            del self.copies[shard]
        for rank in self._ranks_of(body):
            rank.rise(int(body["step"]), body["level"], body["reason"])
            rank.resume_step = max(rank.resume_step, int(body["resume"]))

    def _on_drop(self, body: Body) -> None:
        for item in body["shards"]:
            self.copies.pop(shard_from_wire(item), None)
        self.report("freed", {"shards": body["shards"], "number": body.get("number")})

    def _on_persist(self, body: Body) -> None:
        self._later(self, lambda: self._persist(body))

    def _persist(self, body: Body) -> None:
        persist(self, body)

    def _on_markers(self, body: Body) -> None:
        list_markers(self, body)

    def _on_ask(self, body: Body) -> None:
        self.report("answer", {"ask": body["ask"], "ok": True, "why": "", "value": {}})


def plain(body: Body) -> Body:
    """Return a body as it comes off the wire: tuples become lists, and values that cannot travel raise here."""
    return dict(msgpack.unpackb(msgpack.packb(body), strict_map_key=False))


def plain_event(event: Event) -> Event:
    """Return the event as the controller reads it from a socket."""
    if isinstance(event, Report):
        return Report(event.host_id, event.kind, plain(event.body))
    if isinstance(event, HostUp):
        return replace(event)
    return event
