"""One connected stream socket as a sequence of frames, with a deadline on every wait. No policy, no threads.

Sockets are non-blocking; every wait is a poll with the rest of the caller's time, or its own: a socket timeout would be
shared by the sending and the receiving thread. A failure in the middle of a frame ends the channel, because the next
header could not be found again; a timeout between frames leaves it usable.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import functools
import itertools
import logging
import math
import os
import select
import socket
import ssl
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, NoReturn, Protocol

from memstore import errors
from memstore.core.format.manifest import chunk_hasher
from memstore.core.wire import codec
from memstore.core.wire import frame as wire
from memstore.core.wire.error_message import decode_error
from memstore.core.wire.frame import Kind
from memstore.shell.native import extension, loops
from memstore.shell.net.tls import Tls, TlsStream

# -- socket options -----------------------------------------------------------------------------------
# What Linux knows about a bulk connection beyond sending: its class, its pace, its queue. Plain sockets and TLS
# alike.


log = logging.getLogger("memstore")
SO_MAX_PACING_RATE = 47
TC_PRIO_FILLER = 1
"""Linux's names; a queue that knows priorities (pfifo_fast, fq, prio) serves this one last."""
_PACE = struct.Struct("@L")
_MIN_RTT = struct.Struct("@I")
_MIN_RTT_AT = 148  # of tcpi_min_rtt in struct tcp_info, microseconds; all ones until one was measured
_RTT_MAX_US = 1_000_000


class Flight(NamedTuple):
    """Bytes that were sent and that the peer's kernel has not acknowledged, and how soon it could have."""

    unacked_bytes: int
    rtt_s: float


def classify(sock: socket.socket | TlsStream, dscp: int) -> None:
    """Mark later bytes with a class for the network, and send them behind all others of this host."""
    if sock.family == socket.AF_INET6:
        _set(sock, socket.IPPROTO_IPV6, socket.IPV6_TCLASS, dscp << 2, "a class (dscp)")
    if sock.family in (socket.AF_INET, socket.AF_INET6):  # an IPv4 address may be reached through either
        _set(sock, socket.IPPROTO_IP, socket.IP_TOS, dscp << 2, "a class (dscp)")
    _set(sock, socket.SOL_SOCKET, socket.SO_PRIORITY, TC_PRIO_FILLER, "a priority")  # IP_TOS has set another


def pace(sock: socket.socket | TlsStream, bytes_per_s: int) -> None:
    """Have the kernel pace later bytes."""
    _set(sock, socket.SOL_SOCKET, SO_MAX_PACING_RATE, _PACE.pack(bytes_per_s), "a pace (replicate_bytes_per_s)")


def end_after_silence(sock: socket.socket | TlsStream, silence_s: float) -> None:
    """End the connection once the other end has taken nothing for so long, or its kernel has not answered a probe.

    The kernel counts the time in which a receiver's buffer is full as well, so a process that is stopped is a silence.
    """
    what = "an early end of silent connections"
    for option, value in (
        (socket.TCP_USER_TIMEOUT, int(silence_s * 1000)),
        (socket.TCP_KEEPIDLE, 1),
        (socket.TCP_KEEPINTVL, 1),
    ):
        _set(sock, socket.IPPROTO_TCP, option, value, what)


def flight(sock: socket.socket | TlsStream) -> Flight:
    """Return the bytes in transit; 0 if the connection is gone."""
    answer, rtt_us = array.array("i", [0]), 0
    with contextlib.suppress(OSError):
        fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, answer)
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT_AT + _MIN_RTT.size)
        if len(info) == _MIN_RTT_AT + _MIN_RTT.size:  # older kernels say less
            (rtt_us,) = _MIN_RTT.unpack_from(info, _MIN_RTT_AT)
    return Flight(answer[0], rtt_us / 1e6 if rtt_us < _RTT_MAX_US else 0.0)


def _set(sock: socket.socket | TlsStream, level: int, option: int, value: int | bytes, what: str) -> None:
    try:
        sock.setsockopt(level, option, value)
    except OSError as exc:
        if sock.fileno() >= 0:  # else the connection is closed, and the next send says so
            _log_refused(what, str(exc))


@functools.cache
def _log_refused(what: str, why: str) -> None:
    """Log once for each reason: every connection would repeat it."""
    log.warning("memstore: this host's kernel refuses %s for copies (%s): they leave without it", what, why)


# -- channel ------------------------------------------------------------------------------------------


UNIX_BUFFER_BYTES = 4 << 20
"""AF_UNIX buffers do not grow by themselves. TCP's do, and setting them would switch that off (see `_tune`)."""
USER_TIMEOUT_S = 30.0
"""TCP resets a connection whose peer acknowledged nothing for this long; our own deadlines are shorter."""
REST_OF_FRAME_S = 30.0
"""How long a frame that has begun may take when the caller waits without limit for one to begin."""
SKIP_BUFFER_BYTES = 256 << 10
WAKE_BYTES = 1 << 20
"""A receiver of bulk bytes is woken once per this many: 4 times per chunk instead of some 30 times."""
NATIVE_BYTES = 256 << 10
"""So many bytes or more are sent in one call of C: Python's loop comes round once per buffer that fills."""
PIECE_BYTES = 1 << 20
"""Most bytes received before `seen` gets them: well within a core's share of the cache."""
_UCRED = struct.Struct("3i")
_NUMBERS = itertools.count()
_IOV_MAX = os.sysconf("SC_IOV_MAX")


class Frame(NamedTuple):
    """A received header and body, which is not yet decoded; `bulk_bytes` still wait in the connection."""

    kind: Kind
    request_id: int
    data: bytes | bytearray
    bulk_bytes: int


class BulkGate(Protocol):
    """Decides when the bytes of a frame may leave."""

    def paced(self, pace: Callable[[], contextlib.AbstractContextManager[None]]) -> BulkGate:
        """Return a gate that is inside `pace` while bytes leave."""

    def parts(
        self, views: Sequence[memoryview], flight: Callable[[], Flight], closed: threading.Event
    ) -> Iterator[list[memoryview]]:
        """Yield the bytes of `views` in parts, each when it may leave; end early if `closed` is set."""


class Channel:
    """Frames over a connected TCP or AF_UNIX socket, which it owns from then on.

    One thread may receive while others send. `number` grows from each channel of this process to the next. Every error
    is a TransportError: PeerTimeout (operation, waited_s, limit_s), PeerUnreachable (peer; eof=True if the peer closed
    between two frames), ProtocolError. Close it in the end in every case.
    """

    def __init__(self, sock: socket.socket, *, peer: str | None = None) -> None:
        self._sock: socket.socket | TlsStream = sock
        self.peer = peer if peer is not None else describe_peer(sock)
        self.number = next(_NUMBERS)
        self.authenticated = True
        self.binding = b""  # under TLS the digest of the server's certificate, which auth.py's proofs then name
        self._closed = threading.Event()
        self._is_write_lost = False
        self._send_lock = threading.Lock()
        self._recv_lock = threading.Lock()
        self._bulk_left = 0
        self._last_request = 0
        self._low_water = 1
        self._header = bytearray(wire.HEADER_BYTES)
        sock.setblocking(False)
        self._writable, self._readable = select.poll(), select.poll()
        self._writable.register(sock, select.POLLOUT)
        self._readable.register(sock, select.POLLIN)
        _tune(sock)

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def bulk_left(self) -> int:
        """Return the bytes of the last frame's bulk that were not taken."""
        return self._bulk_left

    @property
    def is_closed(self) -> bool:
        """Return whether nothing more can be sent; what the peer sent before its end may still be received."""
        return self._closed.is_set() or self._is_write_lost

    def secure(self, tls: Tls, *, is_server: bool, timeout_s: float) -> None:
        """Put TLS below the frames, before the first of them; both ends show a certificate within `timeout_s`.

        Raises AuthenticationError, PeerTimeout or PeerUnreachable; the channel is then unusable.
        """
        self.authenticated = False
        clock = _Clock("TLS handshake", timeout_s)
        with _HeldSend(self, self._send_lock, clock), _HeldSend(self, self._recv_lock, clock):
            if isinstance(self._sock, TlsStream):
                raise errors.InternalError(f"{self.peer}: TLS runs already")
            try:
                stream = self._sock = tls.wrap(self._sock, is_server=is_server)
                if self.is_closed:  # an abort in this moment met the socket that TLS has taken over
                    self._end()
                while wanted := stream.shake():
                    self._wait(self._readable if wanted == "read" else self._writable, clock, mid_frame=True)
            except OSError as error:
                if isinstance(error, errors.MemstoreError):
                    raise
                self._lost(f"{clock.operation}: {error}", cause=error)
            self.binding = stream.server_digest()

    def send(
        self,
        kind: Kind,
        request_id: int = 0,
        body: codec.Message | bytes = b"",
        bulk: Sequence[memoryview] = (),
        *,
        deadline_s: float,
        gate: BulkGate | None = None,
    ) -> None:
        """Send one frame within `deadline_s` seconds from now; the bulk views are sent from where they lie.

        A gate lets its bytes out in parts; its pauses count.
        """
        packed = codec.encode(body) if isinstance(body, codec.Message) else body
        views = [view.cast("B") if view.format != "B" or view.ndim != 1 else view for view in bulk]
        header = wire.pack_header(kind, request_id, packed, sum(view.nbytes for view in views))
        clock = _Clock(f"send {kind.name}", deadline_s)
        with _HeldSend(self, self._send_lock, clock):
            everything = [memoryview(header), memoryview(packed), *views]
            if gate is None:
                self._send_all(everything, clock)
                return
            started = False
            for part in gate.parts(everything, lambda: flight(self._sock), self._closed):
                self._send_all(part, clock, started=started)
                started = True
            if self.is_closed:
                self._lost("closed between two parts of a frame")

    def recv(self, *, timeout_s: float | None) -> Frame:
        """Return the next frame; None waits without limit for one to begin. The last frame's bulk must be taken."""
        clock = _Clock("receive a frame", timeout_s)
        with _HeldSend(self, self._recv_lock, clock):
            frames = self.frames()
            while not isinstance(step := next(frames), Frame):
                if step:
                    clock.limit_from_now()
                self._wait(self._readable, clock, mid_frame=step)
            return step

    def frames(self) -> Iterator[Frame | bool]:
        """Yield each frame, and whenever the socket must be waited for: whether one has begun.

        For a thread that waits for many channels at once. The last frame's bulk must be taken before the next.
        """
        while True:
            if self._bulk_left:
                raise errors.InternalError(f"{self._bulk_left:,} bulk bytes of the last frame were not taken")
            yield from self._filling(memoryview(self._header), "receive a frame", at_boundary=True)
            try:
                header = wire.unpack_header(self._header, authenticated=self.authenticated)
                data = bytearray(header.body_bytes)
                yield from self._filling(memoryview(data), "receive a frame")
                wire.check_crc(self._header, data)
            except errors.ProtocolError as error:
                if (
                    self.authenticated and self._header[4] != wire.VERSION
                ):  # of another release, which learns ours (R40)
                    with contextlib.suppress(OSError):
                        self._sock.sendmsg([memoryview(wire.pack_header(wire.Kind.BYE))])
                self._end()
                raise errors.ProtocolError(f"{self.peer}: {error}", peer=self.peer) from error
            self._bulk_left = header.bulk_bytes
            yield Frame(header.kind, header.request_id, data, header.bulk_bytes)

    def recv_bulk_digests(
        self, chunks: Sequence[Sequence[memoryview]], digests: list[bytes], *, timeout_s: float
    ) -> None:
        """Receive the next bulk bytes of the last frame as chunks, each into its views of bytes and within `timeout_s`.

        The digest of each is taken as it comes and appended to `digests`, also if a later one does not come.
        """
        sock = self._sock
        sizes = [sum(view.nbytes for view in views) for views in chunks]
        if not extension.is_there() or not isinstance(sock, socket.socket):
            for views, nbytes in zip(chunks, sizes, strict=True):
                hasher = chunk_hasher()
                clock = _Clock(f"receive a chunk of {nbytes:,} bytes", timeout_s)
                with _HeldSend(self, self._recv_lock, clock):
                    self._check_bulk(nbytes)
                    for view in views:
                        self._fill(view, clock, hasher.update)
                    self._bulk_left -= nbytes
                digests.append(hasher.digest())
            return
        clock = _Clock(f"receive {len(chunks)} chunks", timeout_s)
        with _HeldSend(self, self._recv_lock, clock):
            self._check_bulk(sum(sizes))
            self._low_water, wake_bytes = -1, 0 if sock.family == socket.AF_UNIX else WAKE_BYTES
            status, found = loops.receive(sock.fileno(), chunks, timeout_s=timeout_s, wake_bytes=wake_bytes)
            digests += found
            self._bulk_left -= sum(sizes[: len(found)])
            if status == loops.ENDED:
                self._lost("it closed the connection in the middle of a frame")
            if status == loops.LATE:
                self._end()
                late = _Clock(f"receive chunk {len(found) + 1} of the {len(chunks)} of a frame", timeout_s)
                late.started -= timeout_s
                late.expired(self.peer)
            if status != loops.DONE:
                error = OSError(status, os.strerror(status))
                self._lost(f"{clock.operation}: {error}", cause=error)

    def _check_bulk(self, wanted: int) -> None:
        if wanted > self._bulk_left:
            raise errors.InternalError(f"{wanted:,} bulk bytes wanted, the frame has {self._bulk_left:,} left")

    def skip_bulk(self, *, timeout_s: float) -> None:
        """Read and drop the rest of the last frame's bulk."""
        if not self._bulk_left:
            return
        clock = _Clock("skip bulk bytes", timeout_s)
        with _HeldSend(self, self._recv_lock, clock):
            scratch = memoryview(bytearray(min(self._bulk_left, SKIP_BUFFER_BYTES)))
            while self._bulk_left:
                part = scratch[: self._bulk_left]
                self._fill(part, clock)
                self._bulk_left -= part.nbytes

    def request(
        self,
        body: codec.Message | bytes,
        bulk: Sequence[memoryview] = (),
        *,
        timeout_s: float,
        gate: BulkGate | None = None,
    ) -> Frame:
        """Send a CALL and return its REPLY, both within `timeout_s`; the peer's ERROR is raised here as its class.

        For one thread on a channel that carries nothing else; answers to calls that timed out earlier are dropped.
        """
        clock = _Clock("call", timeout_s)
        self._last_request += 1
        wanted = self._last_request
        self.send(Kind.CALL, wanted, body, bulk, deadline_s=timeout_s, gate=gate)
        while True:
            frame = self.recv(timeout_s=clock.left_s())
            if frame.kind not in (Kind.REPLY, Kind.ERROR) or frame.request_id > wanted:
                self._end()
                story = f"{frame.kind.name} {frame.request_id} came as the answer to call {wanted}"
                raise errors.ProtocolError(f"{self.peer}: {story}", peer=self.peer)
            if frame.request_id < wanted:
                self.skip_bulk(timeout_s=clock.left_s() or 0.0)
            elif frame.kind is Kind.ERROR:
                raise decode_error(frame.data).rebuilt()
            else:
                return frame

    def fileno(self) -> int:
        """Return the socket's descriptor, to wait for it."""
        return self._sock.fileno()

    def credentials(self) -> tuple[int, int]:
        """Return (pid, uid) of an AF_UNIX peer when it connected, from the kernel."""
        if isinstance(self._sock, TlsStream):
            raise errors.InternalError(f"{self.peer} is no AF_UNIX peer")
        try:
            answer = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        except OSError as error:
            self._lost(f"its credentials cannot be read: {error}", cause=error)
        pid, uid, _ = _UCRED.unpack(answer)
        return pid, uid

    def classify(self, dscp: int) -> None:
        """Send from now on in a class of the network's."""
        classify(self._sock, dscp)

    def end_after_silence(self, silence_s: float) -> None:
        """End once nothing was taken at the other end for so long, be it the network's fault or the process's there."""
        end_after_silence(self._sock, silence_s)

    def pace(self, bytes_per_s: int) -> None:
        """Send no faster from now on."""
        pace(self._sock, bytes_per_s)

    def close(self) -> None:
        """End the channel, wake its waiting threads, and free the socket; may be called twice and from any thread."""
        self._end()
        # The descriptor's number must not be reused while another thread still polls it; shutdown has woken them.
        with contextlib.ExitStack() as stack:
            for lock in (self._send_lock, self._recv_lock):
                if not lock.acquire(timeout=5.0):
                    return
                stack.callback(lock.release)
            self._sock.close()

    def forget(self) -> None:
        """Free the descriptor without ending the connection: for a forked child, whose parent goes on using it (R8)."""
        self._closed.set()
        self._sock.close()

    def abort(self) -> None:
        """End the channel at once without freeing the socket: its owner's waits fail, and the owner closes it."""
        self._end()

    def _end(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _send_all(self, views: list[memoryview], clock: _Clock, *, started: bool = False) -> None:
        # TLS may have sent part of a record when it asks us to wait.
        started = started or isinstance(self._sock, TlsStream)
        sock = self._sock
        if extension.is_there() and isinstance(sock, socket.socket) and sum(v.nbytes for v in views) >= NATIVE_BYTES:
            self._send_native(sock, views, clock, started=started)
            return
        waiting = deque(view for view in views if view.nbytes)
        while waiting:
            if self.send_ready(waiting, clock.operation):
                started = True
            else:
                self._wait(self._writable, clock, mid_frame=started)

    def send_ready(self, waiting: deque[memoryview], operation: str) -> bool:
        """Send from the front of `waiting`, which has no empty views, what the socket takes now; return whether it did.

        What was sent is removed. Not beside another thread that sends.
        """
        try:
            sent = self._sock.sendmsg(list(itertools.islice(waiting, _IOV_MAX)), (), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError as error:
            self._lost_write(f"{operation}: {error}", error)
        while sent:
            view = waiting.popleft()
            if sent < view.nbytes:
                waiting.appendleft(view[sent:])
            sent -= min(sent, view.nbytes)
        return True

    def _send_native(self, sock: socket.socket, views: Sequence[memoryview], clock: _Clock, *, started: bool) -> None:
        left_s = clock.left_s()
        status, sent = loops.send(sock.fileno(), views, timeout_s=math.inf if left_s is None else left_s)
        if status == loops.LATE:
            if started or sent:
                self._end()
            clock.expired(self.peer)
        if status != loops.DONE:
            error = OSError(status, os.strerror(status))
            self._lost_write(f"{clock.operation}: {error}", error)

    def _fill(self, view: memoryview, clock: _Clock, seen: Callable[[memoryview], object] | None = None) -> None:
        for _ in self._filling(view, clock.operation, seen=seen):
            self._wait(self._readable, clock, mid_frame=True)

    def _filling(
        self,
        view: memoryview,
        operation: str,
        *,
        at_boundary: bool = False,
        seen: Callable[[memoryview], object] | None = None,
    ) -> Iterator[bool]:
        """Receive all of `view`; yield whenever the socket must be waited for: whether a frame has begun."""
        done = 0
        while done < view.nbytes:
            try:
                got = self._sock.recv_into(view[done:] if seen is None else view[done : done + PIECE_BYTES])
            except BlockingIOError:
                self._wake_at(min(view.nbytes - done, WAKE_BYTES))
                yield not at_boundary or done > 0
                continue
            except OSError as error:
                self._lost(f"{operation}: {error}", cause=error)
            if not got:
                eof = at_boundary and not done
                self._lost("it closed the connection" + ("" if eof else " in the middle of a frame"), eof=eof)
            if seen is not None:
                seen(view[done : done + got])
            done += got

    def _wake_at(self, nbytes: int) -> None:
        """Ask to be woken when `nbytes` are there or the peer is gone: waking for every segment costs more."""
        # What TLS has read of a record already will not come again, so it cannot be counted in advance.
        if nbytes != self._low_water and isinstance(self._sock, socket.socket) and self._sock.family != socket.AF_UNIX:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._low_water = nbytes

    def _wait(self, poll: select.poll, clock: _Clock, *, mid_frame: bool) -> None:
        left_s = clock.left_s()
        # Rounded up, so that the last millisecond is not spent in a busy loop.
        if (left_s is None or left_s > 0) and poll.poll(None if left_s is None else int(left_s * 1000) + 1):
            return
        if mid_frame:
            self._end()
        clock.expired(self.peer)

    def _lost_write(self, why: str, cause: OSError) -> NoReturn:
        """Send no more. A peer that ended the channel may have said something before, such as `bye`: that is there."""
        if isinstance(self._sock, TlsStream) or self._closed.is_set():
            self._lost(why, cause=cause)
        self._is_write_lost = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)  # so a peer that is still there ends the channel
        raise errors.PeerUnreachable(f"lost {self.peer}: {why}", peer=self.peer, eof=False) from cause

    def _lost(self, why: str, *, eof: bool = False, cause: OSError | None = None) -> NoReturn:
        ours = self._closed.is_set()
        self._end()
        if isinstance(cause, ssl.SSLError) and not self.authenticated and not ours:
            message = f"{self.peer} and this side do not agree on TLS, or on who signs certificates: {why}"
            raise errors.AuthenticationError(message, peer=self.peer) from cause
        story = f"the channel to {self.peer} was closed here" if ours else f"lost {self.peer}: {why}"
        raise errors.PeerUnreachable(story, peer=self.peer, eof=eof and not ours) from cause


class _HeldSend:
    """Holds one of a channel's two locks for a block. A class: a generator costs more, and every frame takes two."""

    __slots__ = ("_channel", "_clock", "_lock")

    def __init__(self, channel: Channel, lock: threading.Lock, clock: _Clock) -> None:
        self._channel, self._lock, self._clock = channel, lock, clock

    def __enter__(self) -> None:
        channel, left_s = self._channel, self._clock.left_s()
        if not self._lock.acquire(timeout=-1 if left_s is None else left_s):
            self._clock.expired(channel.peer)
        if channel.is_closed if self._lock is channel._send_lock else channel._closed.is_set():
            self._lock.release()
            raise errors.PeerUnreachable(f"the channel to {channel.peer} is closed", peer=channel.peer, eof=False)

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class _Clock:
    """One operation's time limit: its name, its start, its deadline."""

    def __init__(self, operation: str, limit_s: float | None) -> None:
        self.operation = operation
        self.limit_s = limit_s
        self.started = time.monotonic()
        self._until = None if limit_s is None else self.started + limit_s

    def left_s(self) -> float | None:
        """Return the seconds left, never negative; None without a limit."""
        return None if self._until is None else max(0.0, self._until - time.monotonic())

    def limit_from_now(self) -> None:
        """Limit the rest of a frame that has begun to REST_OF_FRAME_S, if the caller set no limit."""
        if self._until is None:
            self.started = time.monotonic()
            self.limit_s = REST_OF_FRAME_S
            self._until = self.started + REST_OF_FRAME_S

    def expired(self, peer: str) -> NoReturn:
        """Raise PeerTimeout for this operation."""
        waited_s = time.monotonic() - self.started
        raise errors.PeerTimeout(
            f"{peer}: {self.operation} took {waited_s:.3f} s, the limit is {self.limit_s} s",
            peer=peer,
            operation=self.operation,
            waited_s=waited_s,
            limit_s=self.limit_s,
        )


def describe_peer(sock: socket.socket) -> str:
    """Return "tcp:address:port" or "unix:path" of the other end, for messages."""
    try:
        name = sock.getpeername()
    except OSError:
        return "a peer that is gone"
    if sock.family == socket.AF_UNIX:
        return f"unix:{name or 'client'}"
    return f"tcp:[{name[0]}]:{name[1]}" if sock.family == socket.AF_INET6 else f"tcp:{name[0]}:{name[1]}"


def _tune(sock: socket.socket) -> None:
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, UNIX_BUFFER_BYTES)
        return
    # No SO_SNDBUF/SO_RCVBUF: the kernel grows TCP buffers to tcp_rmem/tcp_wmem, an explicit size stops that and is
    # itself cut to rmem_max (208 KiB on a stock kernel); on loopback 0.5, 1 and 4 MiB were no faster than growing.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(USER_TIMEOUT_S * 1000))


# -- pacing -------------------------------------------------------------------------------------------
# How bytes of copies leave this host: in a low class, and no faster than asked, by the kernel's own means.


CHUNK_S = 10.0  # a chunk may be in transit for this long at most: its receiver gives up after 30 s


class Pacing:
    """All outgoing bulk connections of one host; any thread may use it."""

    def __init__(self, dscp: int, bytes_per_s: int, chunk_bytes: int) -> None:
        """`bytes_per_s` is for all connections together, 0: no limit; `dscp` 0: the network's default class.

        A connection is never so slow that a chunk would miss its deadline: with many of them the limit is exceeded.
        """
        self.dscp, self.bytes_per_s = dscp, bytes_per_s
        self.pace_min = int(chunk_bytes / CHUNK_S)
        self._lock = threading.Lock()
        self._sending: list[Channel] = []

    def enter(self, channel: Channel) -> Channel:
        """Take a new connection."""
        if self.dscp:
            channel.classify(self.dscp)
        return channel

    @contextlib.contextmanager
    def sending(self, channel: Channel) -> Iterator[None]:
        """Give the connection an equal share of the limit while inside."""
        if not self.bytes_per_s:
            yield
            return
        self._change(channel, is_begun=True)
        try:
            yield
        finally:
            self._change(channel, is_begun=False)

    def _change(self, channel: Channel, *, is_begun: bool) -> None:
        with self._lock:
            if is_begun:
                self._sending.append(channel)
            else:
                self._sending.remove(channel)
            for each in self._sending:
                each.pace(max(self.pace_min, self.bytes_per_s // len(self._sending)))
