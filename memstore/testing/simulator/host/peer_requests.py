"""Requests between simulated holders: each goes to the real peer server of the other, after the link's delay."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from memstore.core.wire.frame import Kind, error_from_body
from memstore.core.wire.messages import shard_from_wire
from memstore.errors import PeerRefused, PeerUnreachable
from memstore.shell.net.channel import Frame
from memstore.shell.peer.outgoing_shard import Fresh, Shipment
from memstore.testing.simulator.host.context import HostContext
from memstore.testing.simulator.world.memory import Crashed
from memstore.testing.simulator.world.virtual_time import Wait

Body = dict[str, Any]


class Request:
    """What the real peer server takes for a channel: one request, whose chunks it pulls from the sender's slots."""

    authenticated = True

    def __init__(self, sender: HostContext, target: HostContext, source: Shipment | None = None) -> None:
        self.sender, self.target, self.source = sender, target, source
        self.peer = f"simulated:{sender.host_id}"
        self.sent: list[tuple[Kind, Body, bytes]] = []
        self.lack: list[int] = []
        self.went_bad = ""  # why the sender has to give up in the middle
        self.is_cut = source is not None and sender.world.network.take("resets")
        self._bulk = b""

    def ask(self, body: Body) -> Body:
        """Let the server answer; its errors are raised here, and its death is a lost connection."""
        try:
            self.target.peer_server._answer(self, Frame(Kind.CALL, 1, body, 0))  # type: ignore[arg-type]
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
        kind, answer, _ = self.sent[-1]
        if kind is Kind.ERROR:
            raise error_from_body(answer)
        return answer

    def chunks(self) -> list[bytes]:
        """The chunks the server sent, in the order asked for; b"" for one it lacks."""
        found = []
        for kind, body, data in self.sent:
            for size in body["sizes"] if kind is Kind.CHUNK else ():
                found.append(data[:size])
                data = data[size:]
        return found

    def send(
        self, kind: Kind, request_id: int, body: Body, bulk: Any = (), *, deadline_s: float, gate: object = None
    ) -> None:
        """What the server sends: an answer, or chunks of its own."""
        data = b"".join(bytes(view) for view in bulk)
        if kind is Kind.CHUNK and data and self.sender.world.network.take("flips"):
            data = bytes([data[0] ^ 0x40]) + data[1:]
        self.sent.append((kind, body, data))
        if kind is Kind.EVENT and "lack" in body:
            self.lack = list(body["lack"])

    def recv(self, *, timeout_s: float | None) -> Frame:
        """The next chunk the server lacks, as it is in the sender's slots now; cut off after the first if so drawn."""
        index = self.lack.pop(0)
        assert self.source is not None
        if isinstance(self.source, Fresh):
            self.target.twins.travels(self.source.shard, index)
        if self.is_cut and not self.lack:
            raise PeerUnreachable("the simulated connection was reset in mid-batch", peer=self.peer)
        if self.source.stored is not None:
            self.sender.checker.stored_bytes.read(self.sender, self.source.stored, index)
        view = self.source.view(index)
        if view is None:
            self.went_bad = f"chunk {index} went bad here"
            raise PeerUnreachable(self.went_bad, peer=self.peer)
        self._bulk = bytes(view)
        if self.sender.world.network.take("flips"):
            self._bulk = bytes([self._bulk[0] ^ 0x40]) + self._bulk[1:]
        return Frame(Kind.CHUNK, 1, {"sizes": [len(self._bulk)]}, len(self._bulk))

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


@dataclass(frozen=True)
class PeerLink:
    """The connections of one holder to one life of another; they end with that life."""

    holder: HostContext
    peer: HostContext

    def ask(self, body: Body, source: Shipment | None = None) -> Generator[Wait, None, Body]:
        """Send a request after the link's delay; PeerUnreachable if it does not get through, or no answer back."""
        yield from self._travel()
        if body["do"] == "offer" and not body["digest"]:
            shard = shard_from_wire(body["shard"])
            if (yield from self.peer.twins.await_own_of(shard, self.holder)):
                yield from self._travel()
        return Request(self.holder, self.peer, source).ask(body)

    def fetch(self, body: Body) -> Generator[Wait, None, list[bytes]]:
        """Send a request for chunks and return them, b"" for one that the peer lacks."""
        yield from self._travel()
        request = Request(self.holder, self.peer)
        request.ask(body)
        return request.chunks()

    def _travel(self) -> Generator[Wait, None, None]:
        world, host = self.holder.world, self.peer.host_id
        yield world.network.delay(self.holder.host_id, host)
        is_there = world.holders.get(host) is self.peer and self.peer.is_serving
        if not is_there or host not in self.holder.view or not world.network.talks(self.holder.host_id, host):
            raise PeerUnreachable(f"host {host} does not answer", host=host)


def connect(holder: HostContext, host: str) -> PeerLink:
    """Return the connections to a host; PeerUnreachable if it is not in the controller's view."""
    peer = holder.world.holders.get(host)
    if peer is None or host not in holder.view:
        raise PeerUnreachable(f"host {host} is not in the store's view: it is dead or unknown", host=host)
    return PeerLink(holder, peer)
