"""Requests between simulated holders: each goes to the real peer server of the other, after the link's delay."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from memstore.core.format.manifest import chunk_digest
from memstore.core.holder.holder_io import CALL_TIMEOUT_S
from memstore.core.wire import codec
from memstore.core.wire.error_message import ErrorMessage
from memstore.core.wire.frame import Kind
from memstore.core.wire.ids import Endpoint
from memstore.core.wire.peer_messages import ChunkRun, ChunksLacking, FetchChunks, Offer, WholeShard, decode_request
from memstore.errors import PeerRefused, PeerTimeout, PeerUnreachable
from memstore.shell.net.channel import Frame
from memstore.shell.peer.outgoing_shard import OutgoingReplica, StreamingReplica
from memstore.testing.simulator.host.context import HostContext
from memstore.testing.simulator.world.memory import Crashed
from memstore.testing.simulator.world.virtual_time import Wait

R = TypeVar("R")


class PeerCall:
    """What the real peer server takes for a channel: one request, whose chunks it pulls from the sender's slots."""

    authenticated = True

    def __init__(self, sender: HostContext, target: HostContext, source: OutgoingReplica | None = None) -> None:
        self.sender, self.target, self.source = sender, target, source
        self.peer = f"simulated:{sender.host_id}"
        self.sent: list[tuple[codec.Message, bytes]] = []
        self.lack: list[int] = []
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
            self.lack = list(message.chunks)

    def recv(self, *, timeout_s: float | None) -> Frame:
        """The next chunk the server lacks, as it is in the sender's slots now; cut off after the first if so drawn."""
        assert self.source is not None
        index = self.lack.pop(0)
        if isinstance(self.source, StreamingReplica):
            self.target.shared_shards.travels(self.source.shard, index)
        if self.is_cut and not self.lack:
            raise PeerUnreachable("the simulated connection was reset in mid-batch", peer=self.peer)
        view = self._checked(index)
        if view is None:
            self.went_bad = f"chunk {index} went bad here"
            raise PeerUnreachable(self.went_bad, peer=self.peer)
        self._bulk = self._flipped(bytes(view))
        return Frame(Kind.CHUNK, 1, codec.encode(ChunkRun(sizes=(len(self._bulk),))), len(self._bulk))

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
        self, request: codec.Request[R], source: OutgoingReplica | None = None, limit_s: float = CALL_TIMEOUT_S
    ) -> Generator[Wait, None, R]:
        """Send a request after the link's delay; PeerUnreachable if it does not get through, or no answer back."""
        yield from self._travel(limit_s)
        fresh = request.shard.id if isinstance(request, Offer) and request.digest is None else None
        if fresh is not None and (yield from self.peer.before_offer(fresh, self.holder)):
            yield from self._travel()
        asked = PeerCall(self.holder, self.peer, source)
        if isinstance(request, WholeShard):
            asked.bring()
        return asked.ask(request)

    def fetch(self, request: FetchChunks, *, is_reader: bool = False) -> Generator[Wait, None, list[bytes]]:
        """Send a request for chunks and return them, b"" for one that the peer lacks; a reader is a rank."""
        yield from self._travel()
        asked = PeerCall(self.holder, self.peer)
        asked.ask(request, is_reader=is_reader)
        return asked.chunks()

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
    if peer is None or host not in holder.view:
        raise PeerUnreachable(f"host {host} is not in the store's view: it is dead or unknown", host=host)
    return PeerLink(holder, peer)
