"""A holder without an arena: it carries out the orders of core/wire/orders.py on plain values.

A copy is a statement about bytes (a shard, its digest, the chunks that it lacks). The holder also keeps a journal, and
hosts ranks that put, get and receive levels. The world delivers its messages; this file knows neither time nor
controller.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgpack
import xxhash
from msgspec import structs

from memstore.core.holder import succession
from memstore.core.journal.records import journal_after, whole_order
from memstore.core.wire import calls, orders, reports
from memstore.core.wire.calls import Called
from memstore.core.wire.codec import Decoder, encode, tag_of
from memstore.core.wire.ids import WireCopy, WireShard
from memstore.core.wire.messages import Body, Event, HostInfo, HostUp, Received
from memstore.core.wire.replies import GetAgain, HostVerified, Joined, ShardReady, Skipped, decode_passed
from memstore.core.wire.reports import FactsWritten
from memstore.core.wire.status_rows import HostStats
from memstore.testing.controller.durable import Durable, list_markers, persist
from memstore.testing.requests import reply_fields
from recovery.inventory import Copy, ShardId, ShardSpec

CHUNKS = 4  # of every shard
STAGE_TRIES = 100  # about 10 s: longer than it takes to declare a silent host dead
OneOrder = TypeVar("OneOrder")
decode_report: Decoder[reports.Report] = Decoder(reports.Report)
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
    answers: dict[str, list[Body]] = field(default_factory=dict)  # their fields
    last_reply: Any = None
    errors: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    tickets: dict[int, str] = field(default_factory=dict)
    degraded: dict[int, bool] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    resume_step: int = 0
    put_interval: tuple[int, int] = (0, 1)  # what commits brought
    into_error: tuple[str, str] | None = None
    loads: bool = True  # False: it is at it until the test says more
    is_loading: bool = False  # its get brought bytes, and is not over
    load_error: str | None = None  # why it cannot load what its next get() brings
    is_fenced: bool = False

    def raise_level(self, step: int, level: str, reason: str = "", *, is_degraded: bool = False) -> None:
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
        self.idle_s = 0.0
        self.durable_key = ""  # name of the key in its durable_key_file
        self._send, self._peer, self._later = send, peer, later
        self.copies: dict[ShardId, Copy] = {}
        self.journal: list[bytes] = []
        self.pages: list[bytes] = []  # pages of a journal order whose last page has not come
        self.term = 0
        self.clock_s = -math.inf  # the controller's clock, as it last sent it in this session
        self.fences: dict[str, int] = {}
        self.targets: dict[str, list[str]] = {}
        self.rank_targets: dict[str, dict[int, list[str]]] = {}  # job -> local rank -> targets of its own
        self.ranks: dict[str, FakeRank] = {}  # by nonce
        self.calls, self.calls_count = dict[int, tuple[str, calls.RankCall]](), 0
        self.is_up = True
        self.refuses_copies, self.refuses_room = "", ""  # why pushes, or orders of room, are refused
        self.is_room_fault = False  # it refuses for want of something else than room
        self.rooms: dict[str, orders.Reserve] = {}  # by job; without one no copy is taken from a peer
        self.staging_fails = ""
        self.orders: list[orders.Order] = []
        self.instead: dict[type[orders.Order], Callable[[Any], None]] = {}  # what a test does instead of an order

    @property
    def host_id(self) -> str:
        """The id of its host."""
        return self.info.host_id

    def hello(self) -> HostUp:
        """Return the first event of a session: inventory and journal."""
        self.pages.clear()
        alive = tuple(nonce for nonce, rank in self.ranks.items() if not rank.is_dead)
        seen = {"ranks": alive, "idle_s": self.idle_s}
        return HostUp(self.info, tuple(self.copies.values()), tuple(self.journal), **seen)  # type: ignore[arg-type]

    def restart(self, *, keep_memory: bool) -> None:
        """Let a new holder process take the host's memory over, or find none."""
        self.info = replace(self.info, incarnation=succession.following(self.info.incarnation, 0))
        self.targets, self.rank_targets, self.calls, self.ranks, self.is_up = {}, {}, {}, {}, True
        self.rooms = {}
        if not keep_memory:
            self.copies, self.journal, self.term, self.fences = {}, [], 0, {}

    # -- ranks --------------------------------------------------------------------------------

    def call(self, rank: FakeRank, request: calls.RankCall) -> None:
        """Send a rank's question to the controller; it is sent again in every session until it is answered."""
        self.calls_count += 1
        self.calls[self.calls_count] = (rank.nonce, request)
        self._send(self, Received(self.host_id, Called(id=self.calls_count, call=request)))

    def resend_calls(self) -> None:
        """Send every unanswered question again in a new session."""
        for call_id, (_, request) in sorted(self.calls.items()):
            self._send(self, Received(self.host_id, Called(id=call_id, call=request)))

    def answer(self, call_id: int, data: bytes, error: tuple[str, str] | None) -> None:
        """Pass an answer of the controller on to its rank."""
        nonce, request = self.calls.pop(call_id, ("", None))
        rank = self.ranks.get(nonce)
        if rank is None or request is None:
            return
        verb = tag_of(request)
        if error is not None:
            rank.errors.setdefault(verb, []).append((str(error[0]), str(error[1])))
            if isinstance(request, calls.ShardLoaded):
                rank.is_loading = False
                rank.errors.setdefault("get", []).append(rank.errors[verb][-1])
            return
        reply = rank.last_reply = decode_passed(request, data)
        fields = reply_fields(reply, data)
        if isinstance(reply, ShardReady):
            order = next(each for each in reversed(self.received(orders.Bring)) if each.read == reply.read)
            fields.update(shard=list(structs.astuple(order.shard)), digest=order.spec.digest)
        rank.answers.setdefault(verb, []).append(fields)
        if isinstance(reply, Joined):
            rank.attempt, rank.rank = reply.attempt, reply.rank
            rank.resume_step = max(rank.resume_step, reply.resume_step)
        elif isinstance(reply, Skipped):
            rank.resume_step = max(rank.resume_step, reply.resume)
        elif isinstance(reply, ShardReady) and reply.report is not None and isinstance(request, calls.Get):
            rank.is_loading = True
            self._load(rank, request, reply.report.round)
        elif isinstance(request, calls.ShardLoaded):
            rank.is_loading = isinstance(reply, GetAgain)
            if rank.is_loading:
                again = calls.Get(job=rank.job, attempt=rank.attempt, rank=rank.rank, step=None, timeout_s=60.0)
                self.call(rank, again)

    def _load(self, rank: FakeRank, request: calls.Get, number: int) -> None:
        if rank.is_dead or not rank.loads:
            return
        word = calls.ShardLoaded(
            job=rank.job,
            attempt=rank.attempt,
            rank=rank.rank,
            round=number,
            is_adopting=request.is_adopting,
            problem=rank.load_error,
        )
        self.call(rank, word)

    def seal(self, rank: FakeRank, step: int, spec: ShardSpec) -> None:
        """Report a step that a rank has submitted and push it to the targets (R13)."""
        shard = ShardId(rank.job, rank.attempt, step, rank.rank)
        if rank.attempt < self.fences.get(rank.job, 0):
            rank.raise_level(step, "failed", "fenced")
            return
        self.keep(Copy(shard, spec, self.host_id), reports.PutTimes(stall_s=rank.stall_s, age_s=rank.stall_s))
        rank.raise_level(step, "sealed")
        for target in self.rank_targets.get(rank.job, {}).get(rank.rank, self.targets.get(rank.job, ())):
            self._later(self, lambda t=target: self.push(shard, t))  # type: ignore[misc]

    def keep(self, copy: Copy, put: reports.PutTimes | None = None) -> None:
        """Store a copy and report it."""
        self.copies[copy.shard] = copy
        self.report(reports.Sealed(copy=WireCopy.of(copy), put=put))

    def report(self, report: reports.Report) -> None:
        """Send a report to the controller."""
        self._send(self, Received(self.host_id, report))

    def lose(self, *shards: ShardId) -> None:
        """Lose copies of a job, and report an inventory without them."""
        for shard in shards:
            del self.copies[shard]
        self._report_copies(shards[0].job, shards[0].attempt)

    def _report_copies(self, job: str, attempt: int) -> None:
        copies = tuple(WireCopy.of(copy) for shard, copy in self.copies.items() if shard.job == job)
        self.report(reports.Fenced(job=job, attempt=attempt, copies=copies))

    # -- orders -------------------------------------------------------------------------------

    def obey(self, order: orders.Order) -> None:
        """Carry out one order."""
        self.orders.append(order)
        self.instead.get(type(order), self.carry_out)(order)

    def received(self, kind: type[OneOrder]) -> list[OneOrder]:
        """Return the orders of one kind, in the order in which they came."""
        return [order for order in self.orders if isinstance(order, kind)]

    def carry_out(self, order: orders.Order) -> None:
        """Do what an order says."""
        match order:
            case orders.WriteJournal():
                if (whole := whole_order(self.pages, order)) is not None:
                    self.journal = journal_after(self.journal, whole)
                    self._send(self, Received(self.host_id, FactsWritten(seq=whole.seq)))
            case orders.EchoClock():
                self.clock_s = order.clock_s
            case orders.TakeIncarnation():
                self.info = replace(self.info, incarnation=succession.following(self.info.incarnation, order.above))
            case orders.Fence():
                self._fence(order)
            case orders.PushTargets():
                self.targets[order.job] = list(order.targets)
                self.rank_targets[order.job] = {row.rank: list(row.targets) for row in order.ranks}
            case orders.Reserve(
                is_claim=False
            ):  # copies of the job are accepted without a reservation; the real holder grows its arena
                self.rooms.setdefault(order.job, order)
            case orders.Reserve():
                why = self.refuses_room
                if not why:
                    self.rooms[order.job] = order
                self.report(
                    reports.Reserved(
                        job=order.job,
                        attempt=order.attempt,
                        number=order.number,
                        problem=why or None,
                        is_fault=bool(why) and self.is_room_fault,
                    )
                )
            case orders.PushCopy():
                self._later(self, lambda: self.push(order.shard.id, order.target))
            case orders.Bring():
                self._later(self, lambda: self._bring(order))
            case orders.StepLevel(level="skipped" | "superseded"):
                self._abandon(order)
            case orders.StepLevel():
                self._level(order)
            case orders.FreeCopies() | orders.DropJob():
                for shard in order.shards:
                    self.copies.pop(shard.id, None)
                self.report(reports.Freed(shards=order.shards, number=getattr(order, "number", None)))
            case orders.ListMarkers():
                list_markers(self, order)
            case orders.VerifyCopies():
                found = HostVerified(shards=0, chunks=0, damaged=0, damaged_manifests=0)
                self.report(reports.CopiesVerified(call=order.call, found=found, problem=""))
            case orders.HostNews():
                pass  # it needs no addresses
            case orders.CallAnswered():
                pass  # the world calls `answer`
            case _:  # of durable storage
                self._later(self, lambda: self._persist(order))

    def _fence(self, order: orders.Fence) -> None:
        job, attempt = order.job, order.attempt
        self.fences[job] = max(self.fences.get(job, 0), attempt)
        for rank in self.ranks.values():
            is_older = rank.job == job and 0 < rank.attempt < attempt and rank.nonce not in order.members
            rank.is_fenced = rank.is_fenced or is_older
        self._report_copies(job, attempt)

    def push(self, shard: ShardId, target: str) -> None:
        """Copy one shard to a peer, or report why not."""
        mine, other = self.copies.get(shard), self._peer(target)
        if mine is None:
            return
        fence = max(shard.attempt, self.fences.get(shard.job, 0))
        why = f"cannot reach {target}" if other is None else other.refusal(shard, fence)
        if why or other is None:
            self.report(reports.PushFailed(shard=WireShard.of(shard), target=target, why=why, is_final=True))
            return
        old = other.copies.get(shard)
        missing = mine.missing if old is None else mine.missing & old.missing
        other.keep(Copy(shard, mine.spec, target, missing))

    def refusal(self, shard: ShardId, fence: int) -> str:
        """Say why a peer's shard, which knows this fence, is not taken, or ""."""
        why = "" if shard in self.copies else self.refuses_copies or self._no_room(shard)
        return why or ("fenced" if fence < self.fences.get(shard.job, 0) else "")

    def _no_room(self, shard: ShardId) -> str:
        """Say why a peer's copy does not fit the reservation of its job, or ""; count as the real index does (R10)."""
        room = self.rooms.get(shard.job)
        if room is None:
            return f"no room is reserved for job {shard.job!r} here"
        ranks = room.ranks
        used = CHUNKS * sum(s.job == shard.job and s.rank not in ranks for s in self.copies)
        if shard.rank in ranks or used + CHUNKS <= room.peer_slots:
            return ""
        return f"peer share full: {used} of {room.peer_slots} slots used, {CHUNKS} needed"

    def _bring(self, order: orders.Bring, tries: int = 1) -> None:
        away = [str(run.source) for run in order.runs if run.tier == "peer" and self._peer(str(run.source)) is None]
        if away and tries < STAGE_TRIES:  # no evidence about bytes: it may be back, or be declared dead (R25)
            self._later(self, lambda: self._bring(order, tries + 1))
            return
        shard, spec = order.shard.id, order.spec.spec
        bad: dict[str, list[int]] = {}
        for run in order.runs:
            chunks = range(run.first, run.first + run.count)
            name = str(run.source) if run.tier != "durable" else "durable"
            lacking = [i for i in chunks if not self._has_chunk(run.tier, run.source, shard, spec, i)]
            if lacking and name not in away:
                bad.setdefault(name, []).extend(lacking)
        why = self.staging_fails or ("chunks damaged or missing" if bad else "")
        why = why or (f"cannot reach {', '.join(away)}" if away else "")
        tiers = {run.tier for run in order.runs}
        if not why and order.chunks is None and ("durable" in tiers or "peer" not in tiers):
            self.keep(Copy(shard, spec, self.host_id))  # else its reader fetches what is not here
        reader = self.ranks.get(order.reader) if order.use == "get" and not why else None
        self.report(
            reports.Brought(
                read=order.read,
                problem=why or None,
                refusal=reader.into_error if reader is not None else None,
                bad={source: tuple(indices) for source, indices in bad.items()},
            )
        )

    def _has_chunk(self, tier: str, source: str | None, shard: ShardId, spec: ShardSpec, index: int) -> bool:
        if tier == "durable":
            return self.durable.has_part(shard, spec)
        holder = self if tier == "local" else self._peer(str(source))
        copy = holder.copies.get(shard) if holder is not None else None
        return copy is not None and copy.spec == spec and index not in copy.missing

    def _level(self, order: orders.StepLevel) -> None:
        for rank in self._ranks_of(order):
            rank.put_interval = max(rank.put_interval, (order.put_from, order.put_steps))
            rank.raise_level(order.step, order.level, order.reason, is_degraded=order.degraded)
            if order.level == "committed":
                for step in [s for s in rank.tickets if s < order.step]:
                    if rank.tickets[step] in LEVELS[:3]:
                        rank.tickets[step] = "superseded"

    def _ranks_of(self, order: orders.StepLevel) -> list[FakeRank]:
        mine = (order.job, order.attempt)
        return [r for r in self.ranks.values() if (r.job, r.attempt) == mine and not r.is_dead]

    def _abandon(self, order: orders.StepLevel) -> None:
        key = (order.job, order.attempt, order.step)
        for shard in [s for s in self.copies if (s.job, s.attempt, s.step) == key]:
            del self.copies[shard]
        for rank in self._ranks_of(order):
            rank.raise_level(order.step, order.level, order.reason)
            rank.resume_step = max(rank.resume_step, order.resume)

    def _persist(self, order: orders.DurableOrder) -> None:
        persist(self, order)


def digest_of(*named: object) -> str:
    """Return a digest that stands for bytes by their name."""
    return xxhash.xxh3_128_hexdigest("-".join(map(str, named)).encode())


def host_stats(**counts: int) -> HostStats:
    """Return what a holder says of itself with a heartbeat: nothing but these counts."""
    fields = structs.fields(HostStats)
    empty: dict[str, Any] = {
        each.name: "" if each.type is str else False if each.type is bool else 0 for each in fields
    }
    return HostStats(**{**empty, **counts})


def plain(body: Body) -> Body:
    """Return a body as it comes off the wire: tuples become lists, and values that cannot travel raise here."""
    return dict(msgpack.unpackb(msgpack.packb(body), strict_map_key=False))


def plain_event(event: Event) -> Event:
    """Return the event as the controller reads it from a socket."""
    if isinstance(event, Received):
        return Received(event.host_id, decode_report(encode(event.message)))
    if isinstance(event, HostUp):
        return replace(event)
    return event
