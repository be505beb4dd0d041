"""Keeps what procedures of core/holder ask for in virtual time: where the shell blocks, it waits.

A procedure is a thread of its holder: it ends with it, and anything may happen between two of its steps.
"""

from __future__ import annotations

import inspect
import math
import random
import types
from collections.abc import Callable, Collection, Coroutine, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from memstore.core.arena.replica_index import IncomingReplica, StoredReplica
from memstore.core.arena.slot_table import Owner, PeerShare
from memstore.core.durable.increments import Origins, part_names
from memstore.core.durable.slice_format import SliceHeader, slice_range
from memstore.core.format.manifest import Manifest, chunk_digest, decode_manifest, shard_digest
from memstore.core.holder import holder_io, ranks
from memstore.core.holder.holder_io import (
    CALL_TIMEOUT_S,
    HolderIo,
    Lane,
    Link,
    PushSource,
    Stop,
    Storage,
    StreamingSource,
    WholeReply,
)
from memstore.core.holder.puts import seal
from memstore.core.holder.reads import bring, ready
from memstore.core.schedule import take_turn
from memstore.core.wire import codec
from memstore.core.wire.calls import RankCall, ReadStep
from memstore.core.wire.codec import Request, reply_decoder
from memstore.core.wire.error_message import ErrorMessage
from memstore.core.wire.frame import Kind
from memstore.core.wire.ids import Endpoint, WireShard
from memstore.core.wire.orders import CallAnswered, DurablePlace, Lineage, StepLevel
from memstore.core.wire.peer_messages import (
    ChunkRun,
    ChunksLacking,
    FetchChunks,
    Offer,
    ParityOf,
    Refused,
    ShardHost,
    WholeShard,
    decode_request,
)
from memstore.core.wire.rank_messages import CheckInto, HolderEvent, IntoChecked, PutReady, SlotSample, SlotsLeased
from memstore.core.wire.replies import HostVerified, ShardPlaced, decode_pinned
from memstore.core.wire.reports import MarkersFound
from memstore.errors import (
    IntegrityError,
    MemstoreError,
    PeerRefused,
    PeerTimeout,
    PeerUnreachable,
    ProtocolError,
    TransportError,
)
from memstore.shell.durable.tier import PartsTier
from memstore.shell.net.channel import Frame
from memstore.shell.peer.outgoing_shard import OutgoingReplica, StreamingReplica
from memstore.shell.peer.patches import Blocks, offer_of, patch_runs
from memstore.testing.simulator.host.context import HostContext, RankLink
from memstore.testing.simulator.world.memory import Crashed
from memstore.testing.simulator.world.virtual_time import Thread, Wait
from memstore.testing.simulator.world.world import AnyRank, CallFailed, CopiedRead, Violation
from recovery.inventory import DurableMarker, ShardId, ShardSpec, SliceRef, StepId

# -- peer requests ------------------------------------------------------------------------------------
# Requests between simulated holders: each goes to the real peer server of the other, after the link's delay.


R = TypeVar("R")


class PeerCall:
    """What the real peer server takes for a channel: one request, whose chunks it pulls from the sender's slots."""

    authenticated = True

    def __init__(
        self,
        sender: HostContext,
        target: HostContext,
        source: OutgoingReplica | None = None,
        blocks: Mapping[int, Blocks] | None = None,
    ) -> None:
        self.sender, self.target, self.source, self.blocks = sender, target, source, blocks or {}
        self.peer = f"simulated:{sender.host_id}"
        self.sent: list[tuple[codec.Message, bytes]] = []
        self.lack: list[int] = []
        self.patches: list[int] = []
        self.went_bad = ""  # why the sender has to give up in the middle
        self.is_cut = source is not None and sender.world.network.take("resets")
        self._bulk = b""
        self._whole: list[bytes] = []  # chunks that came with the request

    @property
    def bulk_left(self) -> int:
        """The bytes of chunks that came with the request and were not taken."""
        return sum(map(len, self._whole))

    def bring(self) -> None:
        """Have all chunks of the source come with the request, as they are in the sender's slots now."""
        assert self.source is not None
        for index in range(len(self.source.sizes)):
            view = self._checked(index)
            if view is None:
                raise PeerRefused(f"chunk {index} went bad here", is_final=True)
            self._whole.append(self._flipped(bytes(view)))

    def ask(self, request: codec.Request[R], *, is_reader: bool = False) -> R:
        """Let the server answer; its errors are raised here, and its death is a lost connection."""
        try:
            decoded = decode_request(codec.encode(request))
            self.target.peer_server._answer(self, 1, decoded, is_reader=is_reader)  # type: ignore[arg-type]
        except Crashed as crash:
            if crash.memory is not self.target.memory:
                raise
            self.sender.world.note(f"holder {self.target.host_id} died at a write")
            self.sender.world.kill_holder(self.target.host_id)
            raise PeerUnreachable(f"host {self.target.host_id} died", host=self.target.host_id) from crash
        except PeerUnreachable:
            if self.went_bad:
                raise PeerRefused(self.went_bad, is_final=True) from None
            raise
        answer, _ = self.sent[-1]
        if isinstance(answer, ErrorMessage):
            raise answer.rebuilt()
        return codec.decode_reply(request, codec.encode(answer))

    def chunks(self) -> list[bytes]:
        """The chunks the server sent, in the order asked for; b"" for one it lacks."""
        found = []
        for message, data in self.sent:
            for size in message.sizes if isinstance(message, ChunkRun) else ():
                found.append(data[:size])
                data = data[size:]
        return found

    def send(
        self,
        kind: Kind,
        request_id: int,
        message: codec.Message,
        bulk: Any = (),
        *,
        deadline_s: float,
        gate: object = None,
    ) -> None:
        """What the server sends: an answer, or chunks of its own."""
        data = b"".join(bytes(view) for view in bulk)
        if kind is Kind.CHUNK and data and self.sender.world.network.take("flips"):
            data = bytes([data[0] ^ 0x40]) + data[1:]
        self.sent.append((message, data))
        if isinstance(message, ChunksLacking):
            self.lack, self.patches = list(message.chunks), list(message.patches)

    def recv(self, *, timeout_s: float | None) -> Frame:
        """The next chunk the server lacks, as it is in the sender's slots now; cut off after the first if so drawn."""
        assert self.source is not None
        is_patch = not self.lack
        index = (self.patches if is_patch else self.lack).pop(0)
        if isinstance(self.source, StreamingReplica):
            self.target.shared_shards.travels(self.source.shard, index)
        if self.is_cut and not self.lack and not self.patches:
            raise PeerUnreachable("the simulated connection was reset in mid-batch", peer=self.peer)
        view = self._checked(index)
        if view is None:
            self.went_bad = f"chunk {index} went bad here"
            raise PeerUnreachable(self.went_bad, peer=self.peer)
        masks: list[bytes] = []
        if is_patch:
            [(views, masks)] = patch_runs(self.source, [index], self.blocks)
            view = views[0] or view
        self._bulk = self._flipped(bytes(view))
        run = ChunkRun(sizes=(len(self._bulk),), masks=tuple(masks))
        return Frame(Kind.CHUNK, 1, codec.encode(run), len(self._bulk))

    def _checked(self, index: int) -> memoryview | None:
        assert self.source is not None
        if self.source.stored is not None:
            self.sender.checker.stored_bytes.read(self.sender, self.source.stored, index)
        return self.source.view(index)

    def _flipped(self, data: bytes) -> bytes:
        return bytes([data[0] ^ 0x40]) + data[1:] if self.sender.world.network.take("flips") else data

    def recv_bulk_digests(
        self, chunks: Sequence[Sequence[memoryview]], digests: list[bytes], *, timeout_s: float
    ) -> None:
        """Copy them to where the server wants them; cut off before the last chunk of a request if so drawn."""
        for (view,) in chunks:
            if self.is_cut and len(self._whole) == 1:
                raise PeerUnreachable("the simulated connection was reset in mid-request", peer=self.peer)
            view[:] = self._whole.pop(0) if self._whole else self._bulk
            digests.append(chunk_digest(view))
            self.target.memory.version += 1

    def skip_bulk(self, *, timeout_s: float) -> None:
        """The server has no room for the rest."""
        self._whole = []


@dataclass(frozen=True)
class PeerLink:
    """The connections of one holder to one life of another; they end with that life."""

    holder: HostContext
    peer: HostContext
    endpoints = (Endpoint("simulated", 1),)

    def ask(
        self,
        request: codec.Request[R],
        source: OutgoingReplica | None = None,
        blocks: Mapping[int, Blocks] | None = None,
        limit_s: float = CALL_TIMEOUT_S,
    ) -> Generator[Wait, None, R]:
        """Send a request after the link's delay; PeerUnreachable if it does not get through, or no answer back."""
        yield from self._travel(limit_s)
        fresh = request.shard.id if isinstance(request, Offer) and request.digest is None else None
        if fresh is not None and (yield from self.peer.before_offer(fresh, self.holder)):
            yield from self._travel()
        asked = PeerCall(self.holder, self.peer, source, blocks)
        if isinstance(request, WholeShard):
            asked.bring()
        return asked.ask(request)

    def fetch(self, request: FetchChunks, *, is_reader: bool = False) -> Generator[Wait, None, list[bytes]]:
        """Send a request for chunks and return them, b"" for one that the peer lacks; a reader is a rank."""
        yield from self._travel()
        asked = PeerCall(self.holder, self.peer)
        asked.ask(request, is_reader=is_reader)
        return asked.chunks()

    def fetch_bytes(self, request: FetchChunks) -> list[bytearray]:
        """Return chunks for a peer that decodes others with them; that takes no time here."""
        self._reached()
        asked = PeerCall(self.holder, self.peer)
        asked.ask(request)
        return [bytearray(chunk) for chunk in asked.chunks()]

    def call(self, request: Request[R]) -> R:
        """Ask a peer that has chunks which were decoded wrongly; that takes no time here."""
        self._reached()
        return PeerCall(self.holder, self.peer).ask(request)

    def _reached(self) -> None:
        if not self._is_open() or self.holder.world.network.is_silent(self.holder.host_id, self.peer.host_id):
            raise PeerUnreachable(f"host {self.peer.host_id} does not answer", host=self.peer.host_id)

    def _travel(self, limit_s: float = CALL_TIMEOUT_S) -> Generator[Wait, None, None]:
        world, me, host = self.holder.world, self.holder.host_id, self.peer.host_id
        yield world.network.delay(me, host)
        if world.network.is_silent(me, host):
            until_s = world.now + limit_s
            yield lambda: not (world.network.is_silent(me, host) and self._is_open()) or world.now >= until_s
            if world.now >= until_s:
                raise PeerTimeout(f"host {host} has not answered for {limit_s:g} s", host=host)
        if not self._is_open():
            raise PeerUnreachable(f"host {host} does not answer", host=host)

    def _is_open(self) -> bool:
        """Say whether the peer is there, and the controller takes it for alive."""
        world, me, host = self.holder.world, self.holder.host_id, self.peer.host_id
        is_there = world.holders.get(host) is self.peer and self.peer.is_serving
        return is_there and host in self.holder.view and world.network.talks(me, host)


def connect(holder: HostContext, host: str) -> PeerLink:
    """Return the connections to a host; PeerUnreachable if it is not in the controller's view."""
    peer = holder.world.holders.get(host)
    if peer is None or peer is holder or host not in holder.view:
        raise PeerUnreachable(f"host {host} is not in the store's view: it is dead or unknown", host=host)
    return PeerLink(holder, peer)


# -- readers ------------------------------------------------------------------------------------------
# Reads what was brought to a simulated holder for its ranks: copies it out, and digests it again (R23, R25).


READ_S = (0.0, 0.05)  # until a reader has copied what was staged for it
SLOW_SHARE, SLOW_S = 0.2, 2.0  # of readers that take longer than a broken link takes to come back


class Readers:
    """The ranks of one holder, as far as they read."""

    def __init__(self, holder: HostContext) -> None:
        self.holder = holder
        self.slowness = random.Random(f"readers {holder.world.scenario.seed} {holder.host_id}")
        self.opened_s: dict[str, float] = {}  # when an incoming replica was opened, by its name: it is verified since

    def answer(self, link: RankLink, answer: CallAnswered) -> None:
        """Let a rank take an answer; if it is a read, on a thread of its own."""
        request = link.process.calls.get(answer.id)
        if answer.error is not None:
            link.process.answered(answer.id, CallFailed(": ".join(answer.error)))
        elif request is None:
            with suppress(ProtocolError):  # the answer to another call
                ready.give_back(link, decode_pinned(answer.reply).pin)  # its reader has given up
        else:
            reply = reply_decoder(type(request))(answer.reply)
            if isinstance(reply, ShardPlaced):
                self.holder.world.spawn(self._read(link, answer.id, request, reply), link.process)
            else:
                link.process.answered(answer.id, reply)

    def _read(self, link: RankLink, call_id: int, request: RankCall, placed: ShardPlaced) -> Thread:
        """Copy out what an answer names and digest it again, as a reader does; then let go of it (R7)."""
        holder, rank = self.holder, link.process
        is_whole = not isinstance(request, ReadStep) or request.chunks is None
        slow_s = self.slowness.uniform(0.0, SLOW_S) if self.slowness.random() < SLOW_SHARE else 0.0
        yield holder.world.network.rng.uniform(*READ_S) + slow_s
        wanted = [index for index, slot in enumerate(placed.slots) if slot is not None]
        manifest, slots = decode_manifest(placed.manifest), rank.read([placed.slots[index] for index in wanted])
        read = {i: data[: manifest.chunks[i].nbytes] for i, data in zip(wanted, slots, strict=True)}
        if rank.link is link and holder.is_up:
            holder.checker.restores.read_whole(rank, is_pinned=placed.pin in link.pins)
        fetched = yield from self._fetch(rank, placed)
        if isinstance(rank.link, RankLink) and rank.holder is not None and rank.holder.is_up:
            ready.give_back(rank.link, placed.pin)  # as a rank does, on the link that it has now
        good = {i: data for i, data in {**read, **fetched}.items() if chunk_digest(data) == manifest.chunks[i].digest}
        bad = [i for i in read if i not in good]
        if placed.report is not None and (bad or (is_whole and not placed.elsewhere and None in placed.slots)):
            here = [n for n in placed.slots if n is not None]
            holder.checker.restores.read_damaged(rank, here, self._staged_s(rank))  # a barrier said: good (R27)
        asked = set(range(len(placed.slots))) if is_whole else {*read, *_elsewhere(placed)}
        missing = sorted(asked - good.keys())
        if missing and not (isinstance(request, ReadStep) and request.is_repair):
            good.update((yield from rank.repair(manifest, missing)))
        if asked - good.keys():
            rank.answered(call_id, CallFailed("DigestMismatch: a chunk was damaged before it was read"))
            return
        rank.answered(call_id, CopiedRead(placed, dict(sorted(good.items()))))

    def _fetch(self, rank: AnyRank, placed: ShardPlaced) -> Generator[Wait, None, dict[int, bytes]]:
        """Fetch chunks from other holders as a rank does; those that do not come are left out."""
        found: dict[int, bytes] = {}
        manifest = decode_manifest(placed.manifest)
        digest = shard_digest(placed.manifest)
        for row in placed.elsewhere:
            indices = tuple(i for part in row.chunks for i in range(part.first, part.first + part.count))
            request = FetchChunks(shard=WireShard.of(manifest.shard), digest=digest, chunks=indices)
            with suppress(MemstoreError):
                chunks = yield from connect(self.holder, row.host).fetch(request, is_reader=True)
                found.update(zip(indices, chunks, strict=True))
                if placed.report is not None:
                    self._check_source(rank, manifest, digest, row.host, dict(zip(indices, chunks, strict=True)))
        return found

    def _check_source(
        self, rank: AnyRank, manifest: Manifest, digest: str, host: str, chunks: dict[int, bytes]
    ) -> None:
        """Look at what a source sent a rank of a round: what was bad there before it was staged was found (R23)."""
        stored = self.holder.world.holders[host].replicas.index.find(manifest.shard, digest)
        wrong = [i for i, data in chunks.items() if data and chunk_digest(data) != manifest.chunks[i].digest]
        slots = [stored.slots[i] for i in wrong] if stored is not None else []
        found = [n for n in slots if n is not None]
        self.holder.checker.restores.read_damaged(rank, found, self._staged_s(rank), host)

    def _staged_s(self, rank: AnyRank) -> float:
        """Return since when what was brought for a rank's get has been verified."""
        order = self.holder.state.reads.newest.get((rank.job, rank.rank))
        name = ready.name_of(order.read) if order is not None else ""
        return self.opened_s.get(name, self.holder.world.now)


def _elsewhere(placed: ShardPlaced) -> set[int]:
    parts = (part for row in placed.elsewhere for part in row.chunks)
    return {i for part in parts for i in range(part.first, part.first + part.count)}


# -- virtual io ---------------------------------------------------------------------------------------


P = ParamSpec("P")
T = TypeVar("T")
Waits = Generator[Wait, None, T]
BATCH_CHUNKS = 2
VERIFY_S = (0.005, 0.05)  # to digest a replica again
DIGEST_S = 0.004  # a chunk
LATE_WELCOME_SHARE, LATE_WELCOME_MAX_S = 0.3, 1.0  # of welcomes: longer than a broken link takes to come back
LATE_DROP_SHARE, LATE_DROP_MAX_S = 0.05, 5.0  # of drops, which wait for a thread: a session may end meanwhile
FILE_S = 0.001  # to read a small file, or to look at a few slots


@types.coroutine
def _wait(wait: Wait) -> Generator[Wait, None, None]:
    yield wait


@types.coroutine
def _through(steps: Waits[T]) -> Waits[T]:
    return (yield from steps)


def finish(steps: Coroutine[Any, Any, T]) -> Waits[T]:
    """Run a procedure to its end as a part of a thread, and return its result."""
    return (yield from steps.__await__())


class Digested:
    """A fresh shard whose digests are known: the replica store digests it once more when it stores it."""

    def __init__(self, fresh: StreamingReplica) -> None:
        self.seal = fresh.seal

    def add(self, digest: bytes) -> None:
        """Pass over what is known."""


class VirtualIo:
    """The port of one simulated holder's procedures."""

    def __init__(self, holder: HostContext) -> None:
        self.holder, self.replicas, self.storage = holder, holder.replicas, holder.world.durable
        self.has_late_welcomes = any(fault.kind == "break-link" for fault in holder.world.scenario.faults)
        self.lateness = random.Random(f"welcomes {holder.world.scenario.seed} {holder.host_id}")
        self.readers = Readers(holder)
        self.free_s: dict[str, float] = {}  # job -> when its next slice may begin

    # -- procedures -----------------------------------------------------------------------------

    def start(
        self,
        lane: Lane,
        procedure: Callable[Concatenate[HolderIo, P], Coroutine[Any, Any, None]],
        *args: P.args,
        **named: P.kwargs,
    ) -> None:
        """As in HolderIo: a thread of the holder."""

        def thread() -> Waits[None]:
            if lane.kind == "drop" and self.holder.world.rng.random() < LATE_DROP_SHARE:
                yield self.holder.world.rng.uniform(0.0, LATE_DROP_MAX_S)
            yield from finish(procedure(self, *args, **named))

        self.holder.spawn(thread())

    # -- time -----------------------------------------------------------------------------------

    async def sleep(self, seconds: float) -> None:
        """As in HolderIo."""
        await _wait(seconds)

    async def wait_for(self, is_there: Callable[[], bool], limit_s: float | None = None) -> bool:
        """As in HolderIo."""
        until_s = math.inf if limit_s is None else self.holder.world.now + limit_s
        await _wait(lambda: is_there() or self.holder.world.now >= until_s)
        return is_there()

    async def together(self, work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """As in HolderIo: each as a thread."""
        ends: dict[int, tuple[T | None, MemstoreError | None]] = {}

        def child(number: int, steps: Coroutine[Any, Any, T]) -> Waits[None]:
            try:
                ends[number] = (yield from finish(steps)), None
            except MemstoreError as exc:
                ends[number] = None, exc

        for number, steps in enumerate(work):
            self.holder.spawn(child(number, steps))
        try:
            await _wait(lambda: len(ends) == len(work))
        finally:
            for steps in work:
                if inspect.getcoroutinestate(steps) == inspect.CORO_CREATED:  # the holder died before it began
                    steps.close()
        for _, error in (ends[number] for number in sorted(ends)):
            if error is not None:
                raise error
        return [cast(T, ends[number][0]) for number in sorted(ends)]

    # -- other holders --------------------------------------------------------------------------

    async def reach(self, host: str) -> PeerLink:
        """As in HolderIo."""
        return connect(self.holder, host)

    async def begin_connect(self, job: str) -> Callable[[], bool]:
        """As in HolderIo: time is all that it saves."""
        return lambda: True

    async def call_peer(self, peer: holder_io.Peer, request: Request[T], *, limit_s: float = CALL_TIMEOUT_S) -> T:
        """As in HolderIo."""
        return await _through(cast(PeerLink, peer).ask(request, limit_s=limit_s))

    async def send_chunks(
        self,
        peer: holder_io.Peer,
        source: PushSource,
        chunks: Sequence[int],
        *,
        base: Sequence[bytes],
        is_repair: bool,
        parity: ParityOf | None = None,
    ) -> None:
        """As in HolderIo."""
        shipment = cast(OutgoingReplica, source)
        for batch in [list(chunks[i : i + BATCH_CHUNKS]) for i in range(0, len(chunks), BATCH_CHUNKS)]:
            await _wait(lambda: shipment.has_digests(batch))  # noqa: B023
            request, blocks = offer_of(shipment, base, self.holder.host_id, batch, parity)
            reply = await _through(cast(PeerLink, peer).ask(request, shipment, blocks))
            if isinstance(reply, Refused):
                raise PeerRefused(reply.why, is_final=reply.is_final)

    async def send_whole(
        self, peer: holder_io.Peer, source: PushSource, request: WholeShard, *, is_repair: bool
    ) -> WholeReply:
        """As in HolderIo."""
        return await _through(cast(PeerLink, peer).ask(request, cast(OutgoingReplica, source)))

    async def decode_chunks(
        self, replica: IncomingReplica, digest: str, chunks: Sequence[int], others: tuple[ShardHost, ...]
    ) -> list[int]:
        """As in HolderIo."""
        await _wait(self.holder.world.network.delay(self.holder.host_id, self.holder.host_id))
        self.holder.memory.version += 1
        return self.holder.peer_server.parity.decode_into(replica, digest, chunks, others)

    async def receive_chunks(
        self,
        peer: holder_io.Peer,
        replica: IncomingReplica,
        digest: str,
        chunks: Sequence[int],
        others: tuple[ShardHost, ...] = (),
    ) -> list[int]:
        """As in HolderIo."""
        wanted = FetchChunks(shard=WireShard.of(replica.shard), digest=digest, chunks=tuple(chunks), others=others)
        found = await _through(cast(PeerLink, peer).fetch(wanted))
        return [index for index, data in zip(chunks, found, strict=True) if self._is_bad(replica, index, data)]

    def _is_bad(self, replica: IncomingReplica, index: int, data: bytes) -> bool:
        """Keep a chunk that came; True if it is not what the incoming replica expects, or nothing came."""
        if not data:
            return True
        number = self.replicas.take_slots_growing(1)[0]
        self.replicas.arena.view(number, len(data))[:] = data
        self.holder.memory.version += 1
        return bool(self.replicas.keep_chunks(replica, [(index, number, len(data), chunk_digest(data))]))

    # -- durable storage ------------------------------------------------------------------------

    async def read_durable_manifest(self, place: DurablePlace, shard: ShardId, spec: ShardSpec) -> bytes:
        """As in HolderIo."""
        return (await self._reached(place)).read_manifest(shard, spec)

    async def receive_durable(
        self, place: DurablePlace, replica: IncomingReplica, spec: ShardSpec, chunks: Sequence[int]
    ) -> list[int]:
        """As in HolderIo."""
        tier = await self._reached(place)
        return [index for index in chunks if self._is_bad(replica, index, _chunk(tier, replica.shard, spec, index))]

    async def _reached(self, place: DurablePlace) -> PartsTier:
        """Wait for durable storage, which is then read as an order says."""
        await _wait(self.storage.delay_s)
        if self.storage.problem:
            raise PeerUnreachable(self.storage.problem)
        own_key = self.storage.key_of(place, self.holder.host_id)  # unless the order names the step's
        return self.storage.tier(place.key if place.key is not None else own_key, place.tags)

    async def _travel(self) -> None:
        await _wait(self.storage.delay_s)
        if self.storage.problem:
            raise TransportError(self.storage.problem)

    async def open_durable(self, place: DurablePlace) -> PartsTier:
        """As in HolderIo."""
        return self.storage.tier(self.storage.key_of(place, self.holder.host_id))

    async def slice_turn(self, job: str, nbytes: int, bytes_per_s: int | None) -> float:
        """As in HolderIo."""
        return take_turn(self.free_s, job, self.holder.world.now, nbytes, bytes_per_s)

    async def copy_slice(self, stored: StoredReplica, number: int) -> tuple[list[bytes], int | None]:
        """As in HolderIo."""
        chunks: list[bytes] = []
        for index in slice_range(stored.spec, number):
            self.holder.checker.stored_bytes.read(self.holder, stored, index)
            view = self.replicas.chunk_view(stored, index)
            if view is None or chunk_digest(view) != stored.digests[index]:
                return [], index
            chunks.append(bytes(view))
        return chunks, None

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
        await self._travel()
        if stop.is_set:
            return False
        cast(PartsTier, storage).write_slice(
            shard, spec, number, manifest, chunks, should_stop=lambda: False, origins=origins
        )
        return True

    async def read_slice_headers(
        self, storage: Storage, shard: ShardId, spec: ShardSpec, number: int, ref: SliceRef
    ) -> dict[SliceRef, SliceHeader]:
        """As in HolderIo."""
        await self._travel()
        return cast(PartsTier, storage).read_headers(shard, spec, number, ref)

    async def store_marker(self, place: DurablePlace, job: str, marker: DurableMarker, lineage: Lineage) -> None:
        """As in HolderIo."""
        await self._travel()
        step, found = marker.step, self.storage.names(job, marker.step)
        for rank in marker.specs:  # every slice of every part must be there before the marker (R31)
            if not found.issuperset(part_names(marker, rank)):
                if (job, step.attempt, step.step) in self.storage.removed:  # a late order, as to a frozen holder
                    raise IntegrityError(f"{step} lacks the part of rank {rank}: no marker was written")
                raise Violation("R31", f"the marker of {step} was written before rank {rank}'s part under its key")
        self.storage.tier(marker.key).write_marker(job, marker, lineage)

    async def remove_durable(self, place: DurablePlace, job: str, step: StepId, *, only_unmarked: bool) -> None:
        """As in HolderIo."""
        await self._travel()
        self.storage.tier("").remove_step(job, step, only_unmarked=only_unmarked)
        self._check_bases(job)

    async def sweep_durable(self, place: DurablePlace, job: str, keep: Collection[StepId]) -> None:
        """As in HolderIo."""
        await self._travel()
        self.storage.tier("").sweep(job, keep)
        self._check_bases(job)

    def _check_bases(self, job: str) -> None:
        """Check that no marker reads what is gone: nothing but an order removes files here."""
        if lost := self.storage.lost(job):
            raise Violation("R31", f"{self.holder.host_id} removed what newer steps read: {lost}")

    async def read_markers(self, place: DurablePlace, job: str, check: StepId | None) -> MarkersFound:
        """As in HolderIo."""
        await self._travel()
        tier = self.storage.tier(self.storage.key_of(place, self.holder.host_id))
        records, damaged = tier.marker_records(job)
        lacks = "" if check is None else tier.lacks(job, check)
        rows = tuple(record.row for record in records)
        return MarkersFound(markers=rows, key=tier.key, damaged="; ".join(damaged), lacks=lacks)

    # -- this host's memory ---------------------------------------------------------------------

    async def on_store(self, call: Callable[[], T]) -> T:
        """As in HolderIo."""
        await _wait(FILE_S)
        return call()

    async def claim_room(self, job: str, share: PeerShare) -> None:
        """As in HolderIo."""
        self.replicas.claim(job, share)

    async def verify(self, stored: StoredReplica, chunks: frozenset[int] | None = None) -> list[int]:
        """As in HolderIo."""
        await _wait(self.holder.world.network.rng.uniform(*VERIFY_S))
        return self.replicas.verify(stored, map, chunks)

    async def verify_copies(self, job: str | None) -> HostVerified:
        """As in HolderIo."""
        return HostVerified(shards=0, chunks=0, damaged=0, damaged_manifests=0)

    async def open_incoming(
        self,
        name: str,
        shard: ShardId,
        digests: Sequence[bytes],
        sizes: Sequence[int],
        attempt: int,
        chunks: tuple[int, ...] | None = None,
    ) -> IncomingReplica:
        """As in HolderIo."""
        await _wait(FILE_S)
        self.readers.opened_s[name] = self.holder.world.now  # the first of its chunks is verified now
        return self.replicas.open_incoming(name, shard, digests, sizes, attempt, chunks)

    async def verify_slots(self, slots: Sequence[int]) -> None:
        """As in HolderIo."""
        await _wait(self.holder.world.network.rng.uniform(*VERIFY_S))
        self.replicas.verify_slots(slots)

    # -- what is sent ---------------------------------------------------------------------------

    async def read_manifest(self, source: PushSource) -> bytes:
        """As in HolderIo."""
        shipment = cast(OutgoingReplica, source)
        await _wait(shipment.is_settled)
        return shipment.manifest()

    async def await_digest(self, source: StreamingSource) -> str:
        """As in HolderIo."""
        await _wait(source.is_settled)
        return cast(StreamingReplica, source).sealed().spec.digest

    # -- puts -----------------------------------------------------------------------------------

    async def compare_sample(self, slots: Sequence[int], nbytes: int, seen: SlotSample) -> list[int]:
        """As in HolderIo: a sample is all bytes here."""
        here = b"".join(bytes(self.replicas.arena.view(number)) for number in slots)
        return [] if here == seen.digests else [0]

    async def open_fresh(
        self, shard: ShardId, slots: Sequence[int], sizes: Sequence[int], digests: Sequence[bytes] | None
    ) -> StreamingReplica:
        """As in HolderIo."""
        return StreamingReplica(self.replicas, shard, slots, sizes, digests)

    async def release_sends(self, shard: ShardId) -> None:
        """As in HolderIo: nothing is held back here."""

    async def digest_and_store(self, shard: ShardId, ready: PutReady, fresh: StreamingSource) -> StoredReplica:
        """As in HolderIo."""
        streaming, given = cast(StreamingReplica, fresh), seal.given_digests(ready)
        for slot, nbytes in zip(ready.slots, streaming.sizes, strict=True) if given is None else ():
            await _wait(DIGEST_S)
            streaming.add(chunk_digest(self.replicas.arena.view(slot, nbytes)))
        if given is not None:
            await _wait(DIGEST_S)
        stored = self.replicas.seal_local(
            shard,
            world_size=ready.terms.world_size,
            layout=ready.layout,
            nbytes=ready.nbytes,
            slots=ready.slots,
            attempt=shard.attempt,
            given=given,
            follower=Digested(streaming),
        )
        self.holder.checker.puts.sealed_here(self.holder, shard, stored.digests)
        return stored

    # -- ranks, and people ----------------------------------------------------------------------

    async def send_welcome(self, link: Link, stale: Sequence[int]) -> None:
        """As in HolderIo."""
        if self.has_late_welcomes and self.lateness.random() < LATE_WELCOME_SHARE:
            await _wait(self.lateness.uniform(0.0, LATE_WELCOME_MAX_S))
        to = cast(RankLink, link)
        if to.is_open:
            to.process.welcomed(self.holder, stale)

    async def send_to_rank(self, link: Link, message: HolderEvent) -> None:
        """As in HolderIo."""
        to = cast(RankLink, link)
        if not to.is_open:
            return
        if isinstance(message, CallAnswered):
            self.readers.answer(to, message)
        elif isinstance(message, CheckInto):
            self.holder.world.spawn(self._check(to, message), to.process)
        else:
            if isinstance(message, StepLevel) and message.level in ("committed", "durable"):
                self.holder.checker.commits.commit_reported(to.process, message.step, is_degraded=message.degraded)
            to.process.receive(message)

    def _check(self, link: RankLink, message: CheckInto) -> Waits[None]:
        rank = link.process
        yield lambda: not rank.is_frozen
        why = rank.check(decode_manifest(message.manifest))
        if link.is_open and self.holder.is_up:
            answer = IntoChecked(read=message.read, refusal=("ManifestMismatch", why) if why else None)
            bring.checked(self.holder.state, link, answer)

    async def grant(self, link: Link) -> None:
        """As in HolderIo."""
        if slots := ranks.lease(self.holder.state, link):
            cast(RankLink, link).process.receive(SlotsLeased(slots=tuple(slots)))

    async def close_link(self, link: Link) -> None:
        """As in HolderIo: its process gets nothing more on it, since it has another one, or is dead."""

    async def forget_process(self, owner: Owner) -> None:
        """As in HolderIo."""
        self.holder.calls.forget(owner)

    async def forget_job(self, job: str) -> None:
        """As in HolderIo: nothing here keeps trained steps."""

    async def warn(self, text: str) -> None:
        """As in HolderIo: nobody reads it."""

    async def unexpected(self, what: str, error: Exception) -> None:
        """As in HolderIo: the run has failed."""
        raise error


def _chunk(tier: PartsTier, shard: ShardId, spec: ShardSpec, index: int) -> bytes:
    """Return a chunk of durable storage, b"" if it is not there."""
    data = bytearray(spec.chunk_nbytes(index))
    try:
        tier.read_chunk_into(shard, spec, index, memoryview(data))
    except IntegrityError:
        return b""
    return bytes(data)
