"""The holders and ranks of the controller's tests: the simulator's, on which the procedures of core/holder run.

A test says what its ranks do, and when. It sees the orders that a holder was sent, may do something in place of one,
and says what fails there.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, cast

from msgspec import structs

from memstore.core.arena.replica_index import IncomingReplica
from memstore.core.arena.slot_table import PeerShare
from memstore.core.durable.increments import Origins, part_names
from memstore.core.durable.markers import decode_marker, encode_marker
from memstore.core.format.manifest import Manifest, decode_manifest, shard_digest
from memstore.core.holder.holder_io import Lane, Stop, Storage
from memstore.core.holder.inventory import answer_fence
from memstore.core.wire import calls, orders
from memstore.core.wire.codec import Message, encode, tag_of
from memstore.core.wire.ids import Endpoint
from memstore.core.wire.messages import Body, HostInfo
from memstore.core.wire.orders import DurablePlace, PutEarly, StepLevel
from memstore.core.wire.peer_messages import Offer, PeerRequest, Refused, WholeShard
from memstore.core.wire.rank_messages import HolderEvent
from memstore.core.wire.replies import GetAgain, Joined, ShardPlaced, Skipped
from memstore.core.wire.reports import HostInventory, MarkersFound
from memstore.core.wire.status_rows import HostStats
from memstore.errors import CapacityError, TransportError
from memstore.shell.net.channel import Channel
from memstore.testing.requests import reply_fields
from memstore.testing.simulator.checks.checker import Checker
from memstore.testing.simulator.host.context import HostWorld
from memstore.testing.simulator.host.holder import SimHolder
from memstore.testing.simulator.host.virtual_io import VirtualIo, Waits, finish
from memstore.testing.simulator.rank.rank import SimRank, chunk_of
from memstore.testing.simulator.world.memory import DurableStorage, Memory
from memstore.testing.simulator.world.world import Answer, CallFailed, CopiedRead
from recovery.inventory import Copy, DurableMarker, ShardId, ShardSpec, StepId

CHUNKS = 4  # of every shard
WRITES = (orders.WriteSlices, orders.WriteMarker, orders.RemoveStep)  # to durable storage
OneOrder = TypeVar("OneOrder")


class NoChecks:
    """In place of the checks of random runs: here each test looks itself."""

    def __getattr__(self, name: str) -> NoChecks:
        return self

    def __call__(self, *given: object, **named: object) -> int:
        return 0


NO_CHECKS = cast(Checker, NoChecks())


@dataclass
class Durable(DurableStorage):
    """Durable storage, with what tests let fail there."""

    delay_s: float = 0.0  # beside `work_s`
    damaged: set[tuple[int, int]] = field(default_factory=set)  # (attempt, step) whose marker cannot be read
    discarded: list[tuple[str, int, int]] = field(default_factory=list)  # steps whose unfinished slices were removed
    lacks: str = ""  # what is missing of the step that a host is ordered to check
    problems: dict[str, str] = field(default_factory=dict)  # host -> why it alone cannot use it
    writers: dict[tuple[ShardId, int], list[str]] = field(default_factory=dict)  # slice -> hosts that wrote it

    def put_under(self, key: str) -> None:
        """Have all that is there lie under one key."""
        for (job, attempt, step), data in list(self.markers.items()):
            found, place = decode_marker(data), (job, attempt, step)
            old, new = found.marker, replace(found.marker, key=key)
            for rank in old.specs:
                for was, name in zip(part_names(old, rank), part_names(new, rank), strict=True):
                    self.slices[place][name] = self.slices[place].pop(was)
            self.markers[place] = encode_marker(job, new, found.lineage)

    def marker(self, job: str, attempt: int, step: int) -> DurableMarker:
        """Return what the marker of a step says."""
        return decode_marker(self.markers[job, attempt, step]).marker

    def key_of(self, place: DurablePlace, host: str) -> str:
        """Return the name of the key that a host has."""
        return self.keys.get(host, "")


class DirectedWorld(Protocol):
    """What holders and ranks use of the world besides what the simulator's do."""

    durable: Durable
    work_s: tuple[float, float]  # of a push, a read or a durable write, least and most
    put_contents: dict[ShardId, list[bytes]]


class DirectedRank(SimRank):
    """One training process, with the answers and levels that it received."""

    def __init__(self, world: DirectedWorld, job: str, rank: int, host_id: str, key: str | None) -> None:
        super().__init__(cast(HostWorld, world), NO_CHECKS, rank, host_id, key or "")
        self.put_contents = world.put_contents
        self.job, self.chunks_count = job, CHUNKS
        self.has_room = False  # its reservation was granted
        self.answers: dict[str, list[Body]] = {}  # their fields
        self.last_reply: Any = None
        self.errors: dict[str, list[tuple[str, str]]] = {}
        self.degraded: dict[int, bool] = {}
        self.reasons: dict[int, str] = {}
        self.put_interval = (0, 1)  # what commits brought
        self.on_put_early: Callable[[PutEarly], object] = bool  # takes questions and decisions of R33.7; bool: nothing
        self.into_error = ""
        self.loads = True  # False: it is at it until the test says more
        self.is_loading = False  # its get brought bytes, and is not over
        self.load_error: str | None = None  # why it cannot load what its next get() brings

    @property
    def is_blocked(self) -> bool:
        """Return whether it is in a put, which it has not submitted."""
        pending = [step for step, level in self.tickets.items() if level == "pending"]
        return any((self.attempt, step) not in self.unsealed_puts for step in pending)

    def content(self, step: int) -> list[bytes]:
        """Return its state at a step: no two puts have the same."""
        name = f"{self.job} {self.attempt} {self.rank} {step} {self.nonce}"
        put = [chunk_of(f"{name} {index}") for index in range(CHUNKS)]
        return self.put_contents.setdefault(ShardId(self.job, self.attempt, step, self.rank), put)

    def check(self, manifest: Manifest) -> str:
        """Say why it cannot take the shard that was staged for it, or ""."""
        return self.into_error

    def receive(self, message: HolderEvent) -> None:
        """Take what the holder says."""
        before = dict(self.tickets)
        super().receive(message)
        if isinstance(message, PutEarly):
            self.on_put_early(message)
        if isinstance(message, StepLevel) and message.attempt == self.attempt:
            self.put_interval = max(self.put_interval, (message.put_from, message.put_steps))
            if self.tickets.get(message.step) == message.level != before.get(message.step):
                self.reasons[message.step], self.degraded[message.step] = message.reason, message.degraded

    def answered(self, call_id: int, answer: Answer) -> None:
        """Take an answer; what it brings to load is loaded at once, if the rank `loads`."""
        request = self.calls.pop(call_id, None)
        if isinstance(request, calls.ReadStep) and request.is_repair:
            self.replies[call_id] = answer
        elif request is not None and isinstance(answer, CallFailed):
            kind, _, text = answer.error.partition(": ")
            self.errors.setdefault(tag_of(request), []).append((kind, text))
            if isinstance(request, calls.ShardLoaded):
                self.is_loading = False
                self.errors.setdefault("get", []).append((kind, text))
        elif request is not None:
            self._succeeded(request, answer)

    def _succeeded(self, request: calls.RankCall, answer: Answer) -> None:
        reply = self.last_reply = answer.placed if isinstance(answer, CopiedRead) else answer
        fields = reply_fields(reply, encode(reply))
        if isinstance(answer, CopiedRead):
            shard, digest = decode_manifest(answer.placed.manifest).shard, shard_digest(answer.placed.manifest)
            fields |= {"shard": list(shard[:4]), "digest": digest, "bytes": answer.whole}
        self.answers.setdefault(tag_of(request), []).append(fields)
        if isinstance(reply, Joined):
            self.attempt, self.rank, self.place = reply.attempt, reply.rank, (reply.rank, reply.attempt)
            self.resume_step = max(self.resume_step, reply.resume_step)
        elif isinstance(reply, Skipped):
            self.resume_step = max(self.resume_step, reply.resume)
        elif isinstance(reply, ShardPlaced) and reply.report is not None and isinstance(request, calls.Get):
            self.is_loading = True
            if self.loads and not self.is_dead:
                number, is_adopting = reply.report.round, request.is_adopting
                self.ask("shard_loaded", round=number, is_adopting=is_adopting, problem=self.load_error)
        elif isinstance(request, calls.ShardLoaded):
            self.is_loading = isinstance(reply, GetAgain)
            if self.is_loading:
                self.ask("get", step=None, timeout_s=60.0)

    def error(self, verb: str) -> str:
        """Return the last error of a verb as "Class: message", or "" if it never failed."""
        found = self.errors.get(verb)
        return ": ".join(found[-1]) if found else ""


class DirectedIo(VirtualIo):
    """The port of such a holder: work takes as long as the world says, and fails as the test says."""

    def __init__(self, holder: DirectedHolder) -> None:
        super().__init__(holder)
        self.host, self.durable = holder, holder.directed.durable

    def start(self, lane: Lane, procedure: Callable[..., Coroutine[Any, Any, None]], *args: Any, **named: Any) -> None:
        """As in HolderIo."""
        is_work = lane.kind in ("push", "repair", "read", "write")
        takes_s = self.host.world.rng.uniform(*self.host.directed.work_s) if is_work else 0.0

        def thread() -> Waits[None]:
            yield takes_s
            yield from finish(procedure(self, *args, **named))

        self.host.spawn(thread())

    async def _travel(self) -> None:
        await super()._travel()
        if problem := self.durable.problems.get(self.host.host_id):
            raise TransportError(problem)

    async def write_slice(
        self,
        storage: Storage,
        shard: ShardId,
        spec: ShardSpec,
        number: int,
        manifest: bytes,
        chunks: Sequence[bytes],
        stop: Stop,
        origins: Origins = (),
    ) -> bool:
        """As in HolderIo."""
        is_written = await super().write_slice(storage, shard, spec, number, manifest, chunks, stop, origins)
        if is_written:
            self.durable.writers.setdefault((shard, number), []).append(self.host.host_id)
        return is_written

    async def remove_durable(self, place: DurablePlace, job: str, step: StepId, *, only_unmarked: bool) -> None:
        """As in HolderIo."""
        if only_unmarked:
            self.durable.discarded.append((job, step.attempt, step.step))
        await super().remove_durable(place, job, step, only_unmarked=only_unmarked)

    async def read_markers(self, place: DurablePlace, job: str, check: StepId | None) -> MarkersFound:
        """As in HolderIo."""
        found = await super().read_markers(place, job, check)
        torn = [row for row in found.markers if (row.step.attempt, row.step.step) in self.durable.damaged]
        return structs.replace(
            found,
            markers=tuple(row for row in found.markers if row not in torn),
            damaged="; ".join(f"marker of step {row.step.step} is torn" for row in torn),
            lacks=self.durable.lacks if check is not None else "",
        )

    async def claim_room(self, job: str, share: PeerShare) -> None:
        """As in HolderIo."""
        if self.host.refuses_room:
            raise (RuntimeError if self.host.is_room_fault else CapacityError)(self.host.refuses_room)
        await super().claim_room(job, share)

    async def open_incoming(self, *given: Any, **named: Any) -> IncomingReplica:
        """As in HolderIo."""
        if self.host.staging_fails:
            raise CapacityError(self.host.staging_fails)
        return await super().open_incoming(*given, **named)

    async def unexpected(self, what: str, error: Exception) -> None:
        """As in HolderIo."""
        self.host.world.note(f"{self.host.host_id}: {what}: {error!r}")


class DirectedHolder(SimHolder):
    """One life of a holder. What a test has said of its host holds for the next one too."""

    def __init__(
        self, world: DirectedWorld, info: HostInfo, memory: Memory, former: DirectedHolder | None = None
    ) -> None:
        super().__init__(cast(HostWorld, world), NO_CHECKS, info, memory)
        self.directed = world
        self.io = DirectedIo(self)
        self.refuses_copies: str = former.refuses_copies if former else ""  # why pushes are refused
        self.refuses_room: str = former.refuses_room if former else ""  # why orders of room are refused
        self.is_room_fault = False  # it refuses for want of something else than room
        self.staging_fails: str = former.staging_fails if former else ""
        self.orders: list[orders.Order] = former.orders if former else []
        self.instead: dict[type, Callable[[Any], None]] = former.instead if former else {}  # of carrying an order out
        self._reply, self.peer_server._reply = self.peer_server._reply, self._refuse  # type: ignore[method-assign]

    def _refuse(self, channel: Channel, request_id: int, request: PeerRequest, is_reader: bool) -> Message:
        if self.refuses_copies and isinstance(request, Offer | WholeShard) and request.shard.id not in self.held:
            return Refused(why=self.refuses_copies, is_final=True)
        return self._reply(channel, request_id, request, is_reader)

    def obey(self, order: orders.Order) -> None:
        """Carry out one order, unless the test does something else."""
        self.orders.append(order)
        self.instead.get(type(order), self.carry_out)(order)

    def carry_out(self, order: orders.Order) -> None:
        """Do what an order says."""
        super().obey(order)

    def delay(self, seconds: float, *kinds: type) -> None:
        """Carry out orders of these kinds so much later."""
        late = lambda order: self.world.at(seconds, lambda: self.carry_out(order))  # noqa: E731
        self.instead.update(dict.fromkeys(kinds, late))

    def received(self, kind: type[OneOrder]) -> list[OneOrder]:
        """Return the orders of one kind, in the order in which they came."""
        return [order for order in self.orders if isinstance(order, kind)]

    # -- what is here -------------------------------------------------------------------------

    @property
    def held(self) -> dict[ShardId, Copy]:
        """Return its copies, by shard."""
        return {copy.shard: copy for copy in self.copies()}

    @property
    def rooms(self) -> dict[str, PeerShare]:
        """Return what is reserved here, by job."""
        return self.replicas.index.shares

    @property
    def journal(self) -> list[bytes]:
        """Return the records of its journal."""
        return self.memory.journal

    def damage(self, shard: ShardId, *, is_found: bool = True) -> None:
        """Change a byte of a copy's second chunk; what digests it again finds that, as a scrub does at once."""
        stored = self.replicas.index.find(shard, self.held[shard].spec.digest)
        slot = stored.slots[1] if stored is not None else None
        assert slot is not None
        self.memory.spoil(slot, self.world.now)
        if is_found:
            self.replicas.verify_slots([slot])

    def forget(self, *shards: ShardId) -> None:
        """Lose copies without a word, also while no holder runs there."""
        was_cut, self.memory.is_cut = self.memory.is_cut, False
        self.replicas.drop_all(shards, None)
        self.memory.is_cut = was_cut

    def lose(self, *shards: ShardId) -> None:
        """Lose copies of a job, and report an inventory without them."""
        self.forget(*shards)
        answer_fence(self.state, shards[0].job, shards[0].attempt)


def empty_inventory(incarnation: int = 1, machine: str = "m") -> HostInventory:
    """Return that of a host that holds nothing."""
    return HostInventory(
        incarnation=incarnation,
        endpoints=(Endpoint("10.0.0.1", 7000),),
        machine=machine,
        is_explicit=False,
        labels={},
        limit_bytes=1,
        copies=(),
        journal=(),
        ranks=(),
        up_s=0.0,
        idle_s=0.0,
    )


def host_stats(**counts: int) -> HostStats:
    """Return what a holder says of itself with a heartbeat: nothing but these counts."""
    fields = structs.fields(HostStats)
    empty: dict[str, Any] = {
        each.name: "" if each.type is str else False if each.type is bool else 0 for each in fields
    }
    return HostStats(**{**empty, **counts})
