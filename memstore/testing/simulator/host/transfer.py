"""Pushes of the simulation: requests to the real peer server, chunk by chunk, each step at its own time.

It mirrors shell/peer/client.py and push.py, which block in threads; here every wait is a yield, so that anything
can happen between an offer, its chunks and its seal.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from memstore.core.arena.replica_index import Shelved
from memstore.core.wire import codec
from memstore.core.wire.error_message import ErrorMessage
from memstore.core.wire.frame import Kind
from memstore.core.wire.ids import WireShard
from memstore.core.wire.messages import shard_to_wire
from memstore.core.wire.peer_messages import (
    Abort,
    ChunkBatch,
    ChunkRun,
    ChunksMissing,
    ChunksWanted,
    HasCopy,
    NoDraft,
    Offer,
    OfferedChunk,
    Refused,
    Seal,
    decode_request,
)
from memstore.errors import MemstoreError, PeerRefused, PeerUnreachable, TransportError
from memstore.shell.arena.replica_store import PIN_S
from memstore.shell.net.channel import Frame
from memstore.testing.simulator.host.context import HostContext
from memstore.testing.simulator.world.memory import Crashed
from memstore.testing.simulator.world.virtual_time import Thread, Wait
from recovery.inventory import ShardId

R = TypeVar("R")
BATCH_CHUNKS = 2
RETRY_S, ROOM_WAIT_S = 0.1, 10.0
SEAL_ROUNDS_MAX = 3


class Request:
    """What the real peer server takes for a channel: one request, whose chunks it pulls from the sender's slots."""

    authenticated = True

    def __init__(self, sender: HostContext, target: HostContext, source: Fresh | Shelved | None = None) -> None:
        self.sender, self.target, self.source = sender, target, source
        self.peer = f"simulated:{sender.host_id}"
        self.sent: list[tuple[Kind, codec.Message, bytes]] = []
        self.lack: list[int] = []
        self.is_cut = source is not None and sender.world.network.take("resets")
        self._bulk = b""

    def ask(self, request: codec.Request[R]) -> R:
        """Let the server answer; its errors are raised here, and its death is a lost connection."""
        try:
            decoded = decode_request(codec.encode(request))
            self.target.peer_server._answer(self, 1, decoded)  # type: ignore[arg-type]
        except Crashed as crash:
            if crash.memory is not self.target.memory:
                raise
            self.sender.world.note(f"holder {self.target.host_id} died at a write")
            self.sender.world.kill_holder(self.target.host_id)
            raise PeerUnreachable(f"host {self.target.host_id} died", host=self.target.host_id) from crash
        _, answer, _ = self.sent[-1]
        if isinstance(answer, ErrorMessage):
            raise answer.rebuilt()
        return codec.decode_reply(request, codec.encode(answer))

    def chunks(self) -> list[bytes]:
        """The chunks the server sent, in the order asked for; b"" for one it lacks."""
        found = []
        for _, message, data in self.sent:
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
        self.sent.append((kind, message, data))
        if isinstance(message, ChunksWanted):
            self.lack = list(message.chunks)

    def recv(self, *, timeout_s: float | None) -> Frame:
        """The next chunk the server lacks, as it is in the sender's slots now; cut off after the first if so drawn."""
        index = self.lack.pop(0)
        if isinstance(self.source, Fresh):
            self.target.twins.travels(self.source.shard, index)
        if self.is_cut and not self.lack:
            raise PeerUnreachable("the simulated connection was reset in mid-batch", peer=self.peer)
        view = _view(self.sender, self.source, index)
        self._bulk = bytes(view) if view is not None else bytes(self.sender.memory.chunk_bytes)
        if self.sender.world.network.take("flips"):
            self._bulk = bytes([self._bulk[0] ^ 0x40]) + self._bulk[1:]
        return Frame(Kind.CHUNK, 1, codec.encode(ChunkRun(sizes=(len(self._bulk),))), len(self._bulk))

    def recv_bulk_into(
        self, view: memoryview, *, timeout_s: float, seen: Callable[[memoryview], object] | None = None
    ) -> None:
        """Copy it to where the server wants it."""
        view[:] = self._bulk
        if seen is not None:
            seen(view)
        self.target.memory.version += 1

    def skip_bulk(self, *, timeout_s: float) -> None:
        """The server has no room for the rest."""


@dataclass
class Fresh:
    """A shard being digested; its pushes start before it is sealed (D25)."""

    holder: HostContext
    shard: ShardId
    slots: list[int]
    digests: list[bytes] = field(default_factory=list)
    shelved: Shelved | None = None
    why: str = ""
    readers: int = 0
    pins: list[int] = field(default_factory=list)

    def seal(self, shelved: Shelved) -> None:
        """It is stored: pinned for every push, in the same step."""
        self.pins = [self.holder.vault.shelf.pin(shelved, self.holder.world.now + PIN_S) for _ in range(self.readers)]
        self.shelved = shelved

    def add(self, digest: bytes) -> None:
        """The vault digests once more when it seals; what pushes use was digested step by step."""

    def is_settled(self) -> bool:
        """True once it is sealed or will never be."""
        return self.shelved is not None or bool(self.why)

    def release(self) -> None:
        """One push is over."""
        self.readers -= 1
        if self.pins and self.shelved is not None:
            self.holder.vault.unpin(self.shelved, self.pins.pop())


def _view(holder: HostContext, source: Fresh | Shelved | None, index: int) -> memoryview | None:
    if isinstance(source, Fresh):
        if source.shelved is None:
            return holder.vault.arena.view(source.slots[index], holder.memory.chunk_bytes)
        source = source.shelved
    if source is None:
        return None
    holder.checker.stored_bytes.read(holder, source, index)
    return holder.vault.chunk_view(source, index)


class Pusher:
    """Outgoing copies of one holder (R13, R29)."""

    def __init__(self, holder: HostContext) -> None:
        self.holder = holder
        self.under_way: set[tuple[ShardId, str]] = set()

    def replicate(self, shard: ShardId, *, digest: str = "", fresh: Fresh | None = None) -> bool:
        """Push to every target; False if there are none."""
        targets = self.holder.twins.targets(shard)
        left = set(targets)
        for target in targets:
            self.submit(shard, target, digest=digest, fresh=fresh, left=left)
        return bool(targets)

    def submit(
        self, shard: ShardId, target: str, *, digest: str = "", fresh: Fresh | None = None, is_repair: bool = False,
        left: set[str] | None = None,
    ) -> None:  # fmt: skip
        """Start one push unless the same one is under way."""
        if (shard, target) not in self.under_way:
            self.under_way.add((shard, target))
            if fresh is not None:
                fresh.readers += 1
            self.holder.spawn(self._run(shard, target, digest, fresh, is_repair, left))

    def _run(
        self, shard: ShardId, target: str, digest: str, fresh: Fresh | None, is_repair: bool, left: set[str] | None
    ) -> Thread:
        holder = self.holder
        until_s = holder.world.now + ROOM_WAIT_S
        why = ""
        try:
            while True:
                why, is_final = "", False
                try:
                    if not (yield from self._push(shard, target, digest, fresh, is_repair)):
                        return  # it was dropped here meanwhile
                    if fresh is not None:
                        fresh.release()
                    break
                except PeerRefused as exc:
                    why, is_final = str(exc), bool(getattr(exc, "is_final", False))
                except TransportError as exc:
                    why = f"cannot reach {target}: {exc}"
                except MemstoreError as exc:
                    why = str(exc)
                    if fresh is not None:
                        fresh.release()
                    break
                if fresh is not None:
                    fresh.release()
                    yield fresh.is_settled
                    if fresh.shelved is None:
                        return
                    digest, fresh, is_final = fresh.shelved.spec.digest, None, False
                if is_final or holder.world.now > until_s:
                    break
                yield RETRY_S
        finally:
            self.under_way.discard((shard, target))
        if why:
            body = {"shard": shard_to_wire(shard), "target": target, "why": why, "is_final": True}
            holder.report("push_failed", body)
        elif left is not None:
            left.discard(target)
            for rank in holder.ranks.values():
                if not left and (rank.job, rank.rank, rank.attempt) == (shard.job, shard.rank, shard.attempt):
                    rank.rise(shard.step, "replicated")

    def _push(
        self, shard: ShardId, target: str, digest: str, fresh: Fresh | None, is_repair: bool
    ) -> Generator[Wait, None, bool]:
        """One try; PeerRefused or TransportError if it failed, False if there is nothing to push."""
        holder, world, pinned = self.holder, self.holder.world, None
        if fresh is None:
            pinned = holder.vault.pin(shard, digest)
            if pinned is None:
                return False
        source: Fresh | Shelved = fresh if fresh is not None else pinned[0]  # type: ignore[index]
        wire, sender = WireShard.of(shard), holder.host_id
        attempt = max(shard.attempt, holder.fences.get(shard.job, 0)) if is_repair else shard.attempt
        peer: HostContext | None = None
        try:
            peer = yield from self.reach(target)
            if fresh is not None and (yield from peer.twins.await_own_of(shard, holder)):
                peer = yield from self.reach(target, peer)
            count = len(fresh.slots) if fresh is not None else len(pinned[0].slots)  # type: ignore[index]
            offer = Offer(shard=wire, digest=digest or None, attempt=attempt, sender=sender, chunks_count=count)
            reply = Request(holder, peer).ask(offer)
            if isinstance(reply, Refused):
                raise PeerRefused(reply.why, is_final=reply.is_final)
            if isinstance(reply, HasCopy):
                return True
            return (yield from self._send_and_seal(peer, source, shard, count))
        except MemstoreError as exc:
            # As over real sockets: an abort if it gets through; a lost connection ends the draft at the peer (R13).
            if peer is not None and peer.is_serving and world.network.talks(holder.host_id, target):
                Request(holder, peer).ask(Abort(shard=wire, sender=sender))
            raise exc
        finally:
            if pinned is not None:
                holder.vault.unpin(*pinned)

    def _send_and_seal(
        self, peer: HostContext, source: Fresh | Shelved, shard: ShardId, count: int
    ) -> Generator[Wait, None, bool]:
        """Every chunk that the peer lacks, then the manifest; again what arrived damaged."""
        holder = self.holder
        wanted = list(range(count))
        for _ in range(SEAL_ROUNDS_MAX):
            for batch in [wanted[i : i + BATCH_CHUNKS] for i in range(0, len(wanted), BATCH_CHUNKS)]:
                yield from self._send(peer, source, shard, batch)
            yield lambda: not isinstance(source, Fresh) or source.is_settled()
            shelved = source.shelved if isinstance(source, Fresh) else source
            if shelved is None:
                raise PeerRefused("the put failed on its own host", is_final=True)
            peer = yield from self.reach(peer.host_id, peer)
            manifest = holder.vault.manifest(shelved)
            reply = Request(holder, peer).ask(Seal(shard=WireShard.of(shard), sender=holder.host_id, manifest=manifest))
            if isinstance(reply, Refused):
                raise PeerRefused(reply.why, is_final=reply.is_final)
            if not isinstance(reply, ChunksMissing):
                return True
            wanted = list(reply.chunks)
        raise PeerRefused("chunks arrived damaged too often", is_final=True)

    def reach(self, target: str, same: HostContext | None = None) -> Generator[Wait, None, HostContext]:
        """Wait for one message's delay; the target as it is then, PeerUnreachable if it cannot be reached."""
        world = self.holder.world
        yield world.network.delay(self.holder.host_id, target)
        peer = world.holders.get(target)
        is_there = peer is not None and peer.is_serving and world.network.talks(self.holder.host_id, target)
        if peer is None or not is_there or target not in self.holder.view or (same is not None and peer is not same):
            raise PeerUnreachable(f"host {target} does not answer", host=target)
        return peer

    def _send(self, peer: HostContext, source: Any, shard: ShardId, batch: list[int]) -> Thread:
        """One batch, as soon as its digests are known."""
        if isinstance(source, Fresh):
            yield lambda: len(source.digests) > max(batch) or bool(source.why)
            if source.why:
                raise PeerRefused(f"the put failed on its own host: {source.why}", is_final=True)
        digests = [source.digests[i] for i in batch]
        peer = yield from self.reach(peer.host_id, peer)
        size = self.holder.memory.chunk_bytes
        batch_of = ChunkBatch(
            shard=WireShard.of(shard), sender=self.holder.host_id,
            chunks=tuple(OfferedChunk(i, digest, size) for i, digest in zip(batch, digests, strict=True)),
        )  # fmt: skip
        if isinstance(Request(self.holder, peer, source).ask(batch_of), NoDraft):
            raise PeerRefused("no such draft", is_final=False)
