"""A TCP proxy that delays, slows down, loses or resets what passes through it, or flips a bit.

    proxy = FaultProxy(lambda: ("127.0.0.1", port))      clients connect to (proxy.address, proxy.port)
    proxy.up.delay_s = 0.05                              from client to target, until it is changed again
    proxy.down.drop = True                               from target to client: half-open
    proxy.up.flip("payload", 100, payload_min=4096)      once: bit 0 of byte 100 of the next payload that large

One thread moves all bytes, so the result follows from the rules alone. The proxy knows memstore's frames
(core/wire/frame.py), in order to break a chosen part of one; other bytes pass as they are.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from memstore.core.wire.frame import HEADER_BYTES, MAGIC, unpack_header
from memstore.errors import ProtocolError

Part = Literal["connection", "header", "body", "payload", "end"]
LOOK_S = 0.02  # how soon a rule changed from outside is seen
READ_BYTES = 64 << 10
QUEUE_BYTES_MAX = 1 << 20  # of one direction of one connection; then its sender feels it
SLICE_S = 0.01  # a limited rate is kept over slices this long
CONNECT_S = 5.0
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: close() sends RST


@dataclass(frozen=True)
class ProxyFault:
    """A reset or a flip that happens once, at byte `at` of the connection or of a frame with enough payload."""

    kind: Literal["reset", "flip"]
    part: Part
    at: int
    payload_min: int
    bit: int = 0


@dataclass
class Direction:
    """The rules of one direction, for all connections; any of them may be changed at any time."""

    delay_s: float = 0.0
    jitter_s: float = 0.0  # added to the delay, uniformly from 0
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    rate_bytes_per_s: float = 0.0  # over all connections; 0: no limit
    drop: bool = False  # bytes, and the end of the connection, are read and lost; later what lost some is reset
    stall: bool = False  # nothing is read or written: the sender's buffers fill
    bytes_count: int = 0  # delivered
    dropped_count: int = 0  # bytes
    resets_count: int = 0  # done, after what came before them was delivered
    flips_count: int = 0
    _faults: list[ProxyFault] = field(default_factory=list)
    _due_s: float = 0.0

    def reset(self, part: Part, at: int = 0, *, payload_min: int = 0) -> None:
        """Reset both ends of one connection in place of a byte; see `ProxyFault`."""
        self._faults.append(ProxyFault("reset", part, at, payload_min))

    def flip(self, part: Part, at: int = 0, *, payload_min: int = 0, bit: int = 0) -> None:
        """Flip one bit; see `ProxyFault`."""
        self._faults.append(ProxyFault("flip", part, at, payload_min, bit))

    @property
    def waiting(self) -> int:
        """The faults that have not happened yet."""
        return len(self._faults)

    def _take(self, part_at: Callable[[ProxyFault], int | None]) -> tuple[ProxyFault, int] | None:
        for fault in self._faults:
            at = part_at(fault)
            if at is not None:
                self._faults.remove(fault)
                return fault, at
        return None


class _Flow:
    """One direction of one connection: bytes that were read and are due later, and where the next frame begins."""

    def __init__(self, source: socket.socket, sink: socket.socket, direction: Direction) -> None:
        self.source, self.sink, self.direction = source, sink, direction
        self.queue: deque[tuple[float, bytes | None]] = deque()  # (due, bytes); None: reset the connection
        self.queued_bytes = 0
        self.is_over = False  # the source has ended
        self.is_shut = False  # and the sink knows
        self._position = 0  # bytes of the connection taken so far
        self._held = bytearray()  # the beginning of a header
        self._frame_left = 0
        self._is_framed = True
        self._has_lost = False
        self._pending: tuple[ProxyFault, int] | None = None  # a fault and its byte of the connection

    def wants_read(self) -> bool:
        return not (self.is_over or self.direction.stall) and self.queued_bytes < QUEUE_BYTES_MAX

    def due_s(self) -> float | None:
        """When the next bytes may be written; None if nothing waits."""
        if not self.queue or self.direction.stall:
            return None
        return max(self.queue[0][0], self.direction._due_s if self.direction.rate_bytes_per_s else 0.0)

    def take(self, data: bytes, now: float) -> None:
        """Queue bytes that were read, with the faults that fall into them."""
        if self.direction.drop:
            self.direction.dropped_count += len(data)
            self._has_lost = True
            return
        self._held += data
        while self._held:
            if not self._is_framed:
                self._emit(bytes(self._held), now)
                self._held.clear()
                return
            if self._frame_left == 0:
                if len(self._held) < HEADER_BYTES and MAGIC.startswith(self._held[: len(MAGIC)]):
                    return
                self._begin_frame()
            part = bytes(self._held[: self._frame_left])
            del self._held[: len(part)]
            self._frame_left = max(0, self._frame_left - len(part))
            self._emit(part, now)

    def _begin_frame(self) -> None:
        """Read the header, and choose a fault that falls into this frame."""
        try:
            header = unpack_header(self._held[:HEADER_BYTES])
        except ProtocolError:
            self._is_framed = False
            return
        begins = {
            "header": 0,
            "body": HEADER_BYTES,
            "payload": HEADER_BYTES + header.body_bytes,
            "end": HEADER_BYTES + header.body_bytes + header.bulk_bytes,
        }
        self._frame_left = begins["end"]
        if self._pending is not None:
            return
        found = self.direction._take(
            lambda f: begins[f.part] + f.at if f.part in begins and header.bulk_bytes >= f.payload_min else None
        )
        if found is not None:
            self._pending = (found[0], self._position + found[1])

    def _emit(self, data: bytes, now: float) -> None:
        """Queue bytes, broken where a fault is due."""
        start, end = self._position, self._position + len(data)
        if self._pending is None:
            self._pending = self.direction._take(
                lambda f: f.at if f.part == "connection" and start <= f.at < end else None
            )
        self._position = end
        is_reset = False
        if self._pending is not None and start <= self._pending[1] <= end:
            fault, at = self._pending
            if fault.kind == "reset":
                data, is_reset = data[: at - start], True
                self._pending = None
            elif at < end:
                broken = bytearray(data)
                broken[at - start] ^= 1 << fault.bit
                data = bytes(broken)
                self.direction.flips_count += 1
                self._pending = None
        direction = self.direction
        due_s = now + direction.delay_s + (direction.rng.uniform(0, direction.jitter_s) if direction.jitter_s else 0.0)
        if self.queue:
            due_s = max(due_s, self.queue[-1][0])  # a stream keeps its order
        if data:
            self.queue.append((due_s, data))
            self.queued_bytes += len(data)
        if is_reset:
            self.queue.append((due_s, None))
            self.is_over = True

    def write(self, now: float) -> None:
        """Write what is due; ConnectionResetError when the reset is."""
        if self._has_lost and not self.direction.drop:
            raise ConnectionResetError("bytes of it are lost for good")
        while self.queue and (due_s := self.due_s()) is not None and due_s <= now:
            data = self.queue[0][1]
            if data is None:
                self.direction.resets_count += 1
                raise ConnectionResetError("as asked")
            rate = self.direction.rate_bytes_per_s
            part = data[: max(1, int(rate * SLICE_S))] if rate else data
            try:
                sent = self.sink.send(part)
            except BlockingIOError:
                return
            self.queued_bytes -= sent
            self.direction.bytes_count += sent
            if sent == len(data):
                self.queue.popleft()
            else:
                self.queue[0] = (self.queue[0][0], data[sent:])
            if rate:
                self.direction._due_s = max(now, self.direction._due_s) + sent / rate
        if self.is_over and not self.queue and not self.is_shut and not self.direction.drop:
            self.is_shut = True
            self.sink.shutdown(socket.SHUT_WR)


class FaultProxy:
    """A proxy on (address, port); each connection goes to the address that `target` returns when it comes."""

    def __init__(self, target: Callable[[], tuple[str, int]], *, address: str = "127.0.0.1") -> None:
        self.target = target
        self.up, self.down = Direction(), Direction()
        self.refuse = False  # new connections are reset at once
        self.connections_count = 0
        self.refused_count = 0
        self._connections: list[tuple[_Flow, _Flow]] = []
        self._listener = socket.create_server((address, 0))
        self._listener.setblocking(False)
        self.address, self.port = self._listener.getsockname()[:2]
        self._reset_all = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memstore-fault-proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Reset every connection and stop."""
        self._stopping.set()
        self._thread.join(timeout=CONNECT_S + 1.0)

    @property
    def is_open(self) -> bool:
        """Return whether some connection is open."""
        return bool(self._connections)

    def reset_all(self) -> None:
        """Reset every connection that is open."""
        self._reset_all.set()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._turn()
        finally:
            self._listener.close()
            for flows in list(self._connections):
                self._end(flows)

    def _turn(self) -> None:
        """Wait until something can be done, then do all of it once."""
        now = time.monotonic()
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        wait_s = LOOK_S
        events: dict[int, int] = {}
        for flows in self._connections:
            for flow in flows:
                due_s = flow.due_s()
                if flow.wants_read():
                    events[flow.source.fileno()] = events.get(flow.source.fileno(), 0) | select.POLLIN
                if due_s is not None and due_s <= now:
                    events[flow.sink.fileno()] = events.get(flow.sink.fileno(), 0) | select.POLLOUT
                elif due_s is not None:
                    wait_s = min(wait_s, due_s - now)
        for fd, mask in events.items():
            poll.register(fd, mask)
        ready = dict(poll.poll(max(0.0, wait_s) * 1000))
        if self._reset_all.is_set():
            self._reset_all.clear()
            for flows in list(self._connections):
                self._end(flows)
        for flows in list(self._connections):
            self._serve(flows, ready)
        if self._listener.fileno() in ready:
            self._accept()

    def _serve(self, flows: tuple[_Flow, _Flow], ready: dict[int, int]) -> None:
        now = time.monotonic()
        try:
            for flow in flows:
                if flow.wants_read() and ready.get(flow.source.fileno(), 0):
                    self._read(flow, now)
                flow.write(now)
        except OSError:
            self._end(flows)
            return
        if all(flow.is_shut for flow in flows):
            self._end(flows)

    def _read(self, flow: _Flow, now: float) -> None:
        try:
            data = flow.source.recv(READ_BYTES)
        except BlockingIOError:
            return
        if data:
            flow.take(data, now)
        else:
            flow.is_over = True

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            client, _ = self._listener.accept()
            self.connections_count += 1
            try:
                if self.refuse:
                    raise ConnectionRefusedError("as asked")
                server = socket.create_connection(self.target(), timeout=CONNECT_S)
            except (OSError, ValueError, KeyError):  # refused, or the target is not known yet
                self.refused_count += 1
                _reset(client)
                return
            for sock in (client, server):
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections.append((_Flow(client, server, self.up), _Flow(server, client, self.down)))

    def _end(self, flows: tuple[_Flow, _Flow]) -> None:
        self._connections.remove(flows)
        is_clean = all(flow.is_shut for flow in flows)
        for flow in flows:
            flow.source.close() if is_clean else _reset(flow.source)


def _reset(sock: socket.socket) -> None:
    """Close with RST."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    sock.close()
