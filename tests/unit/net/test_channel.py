"""One channel: frames arrive whole and in order, every wait ends, and failures are distinguished (R4, R28)."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from socket_pairs import tcp_pair

from memstore import errors
from memstore.core.wire import frame as wire
from memstore.core.wire.error_message import ErrorMessage
from memstore.core.wire.frame import Kind
from memstore.shell.net.channel import Channel


def views(*sizes: int) -> list[memoryview]:
    return [memoryview(os.urandom(size)) for size in sizes]


def test_frames_arrive_as_sent_in_order(pair: tuple[Channel, Channel]) -> None:
    """Kind, id, body and bulk come out as they went in, frame after frame."""
    left, right = pair
    bulk = views(5, 0, 70_000)
    left.send(Kind.EVENT, 3, b"body", deadline_s=5)
    left.send(Kind.CHUNK, 4, b"", bulk, deadline_s=5)
    left.send(Kind.BYE, deadline_s=5)
    assert right.recv(timeout_s=5) == (Kind.EVENT, 3, b"body", 0)
    assert right.recv(timeout_s=5) == (Kind.CHUNK, 4, b"", 70_005)
    first, second = bytearray(5), bytearray(70_000)
    right.recv_bulk_digests([[memoryview(first)]], [], timeout_s=5)
    right.recv_bulk_digests([[memoryview(second)]], [], timeout_s=5)
    assert (first, second) == (bulk[0], bulk[2])
    assert right.recv(timeout_s=5).kind is Kind.BYE


def test_bulk_larger_than_every_buffer_arrives_through_partial_sends(
    sockets: tuple[socket.socket, socket.socket], aside: Callable[..., Future[Any]]
) -> None:
    """With the smallest send buffer and more views than one sendmsg takes, every byte arrives in its place."""
    left, right = Channel(sockets[0]), Channel(sockets[1])
    with left, right:
        for sock in sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        bulk = views(*[331] * 2500, 1 << 20)
        sent = aside(left.send, Kind.CHUNK, 1, b"body", bulk, deadline_s=20)
        frame = right.recv(timeout_s=20)
        got = bytearray(frame.bulk_bytes)
        right.recv_bulk_digests([[memoryview(got)]], [], timeout_s=20)
        sent.result(20)
        assert got == b"".join(bulk)


def test_views_of_other_formats_are_sent_as_their_bytes(pair: tuple[Channel, Channel]) -> None:
    """A view of floats counts and travels in bytes."""
    left, right = pair
    left.send(Kind.CHUNK, 1, b"", [memoryview(struct.pack("4d", 1, 2, 3, 4)).cast("d")], deadline_s=5)
    got = memoryview(bytearray(32))
    assert right.recv(timeout_s=5).bulk_bytes == 32
    right.recv_bulk_digests([[got]], [], timeout_s=5)
    assert got.cast("d").tolist() == [1, 2, 3, 4]


def test_bulk_must_be_taken_before_the_next_frame_and_never_more_than_there_is(pair: tuple[Channel, Channel]) -> None:
    """A receiver that forgets the bulk gets an error; skip_bulk drops the rest."""
    left, right = pair
    left.send(Kind.CHUNK, 1, b"", views(1000), deadline_s=5)
    left.send(Kind.EVENT, 2, deadline_s=5)
    right.recv(timeout_s=5)
    with pytest.raises(errors.InternalError, match="1,000 bulk bytes"):
        right.recv(timeout_s=5)
    with pytest.raises(errors.InternalError, match="1,001 bulk bytes wanted"):
        right.recv_bulk_digests([[memoryview(bytearray(1001))]], [], timeout_s=5)
    right.recv_bulk_digests([[memoryview(bytearray(10))]], [], timeout_s=5)
    right.skip_bulk(timeout_s=5)
    assert right.recv(timeout_s=5).request_id == 2


def test_a_timeout_between_frames_leaves_the_channel_usable(pair: tuple[Channel, Channel]) -> None:
    """PeerTimeout carries operation, waited_s and limit_s, and the next frame still arrives."""
    left, right = pair
    with pytest.raises(errors.PeerTimeout, match=r"receive a frame took .* limit is 0\.02 s") as caught:
        right.recv(timeout_s=0.02)
    assert caught.value.operation == "receive a frame"  # type: ignore[attr-defined]
    assert caught.value.waited_s >= caught.value.limit_s == 0.02  # type: ignore[attr-defined]
    left.send(Kind.EVENT, 1, deadline_s=5)
    assert right.recv(timeout_s=5).request_id == 1


@pytest.mark.parametrize("cut", [1, 31, 32, 35])
def test_a_timeout_inside_a_frame_ends_the_channel(sockets: tuple[socket.socket, socket.socket], cut: int) -> None:
    """Half a header or half a body within the limit is a timeout, and no later byte is taken for a header."""
    body = b"body 12345"
    with Channel(sockets[1]) as right:
        sockets[0].sendall((wire.pack_header(Kind.EVENT, 1, body) + body)[:cut])
        with pytest.raises(errors.PeerTimeout):
            right.recv(timeout_s=0.03)
        assert right.is_closed
        with pytest.raises(errors.PeerUnreachable):
            right.recv(timeout_s=5)


def test_a_peer_that_drips_inside_a_frame_loses_its_connection(
    sockets: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that waits without limit for a frame gives the rest of one that has begun a limit (slowloris, fault
    F33).
    """
    monkeypatch.setattr("memstore.shell.net.channel.REST_OF_FRAME_S", 0.1)
    frame, stop = wire.pack_header(Kind.EVENT, 1, bytes(1000)) + bytes(1000), threading.Event()

    def drip() -> None:
        for at in range(len(frame)):
            if stop.wait(0.005):
                return
            with contextlib.suppress(OSError):  # the connection is lost, as it should be
                sockets[0].send(frame[at : at + 1])

    dripping = threading.Thread(target=drip)
    dripping.start()
    with Channel(sockets[1]) as right:
        began = time.monotonic()
        with pytest.raises(errors.PeerTimeout):
            right.recv(timeout_s=None)
        assert time.monotonic() - began < 3
        assert right.is_closed
        stop.set()
        dripping.join(5)


def test_a_send_into_a_full_connection_times_out(pair: tuple[Channel, Channel]) -> None:
    """A peer that reads nothing costs its sender the deadline and not more (fault F4)."""
    left, _ = pair
    bulk = views(wire.BULK_BYTES_MAX)
    began = time.monotonic()
    with pytest.raises(errors.PeerTimeout, match="send CHUNK"):
        left.send(Kind.CHUNK, 1, b"", bulk, deadline_s=0.2)
    assert time.monotonic() - began < 3
    assert left.is_closed


def test_a_sender_waits_for_another_sender_only_until_its_deadline(
    pair: tuple[Channel, Channel], aside: Callable[..., Future[Any]]
) -> None:
    """A heartbeat behind a stuck bulk send fails in time."""
    left, right = pair
    stuck = aside(left.send, Kind.CHUNK, 1, b"", views(wire.BULK_BYTES_MAX), deadline_s=20)
    right.recv(timeout_s=5)
    with pytest.raises(errors.PeerTimeout, match="send EVENT"):
        left.send(Kind.EVENT, 2, deadline_s=0.05)
    right.skip_bulk(timeout_s=20)
    stuck.result(20)
    left.send(Kind.EVENT, 3, deadline_s=5)
    assert right.recv(timeout_s=5).request_id == 3


def test_end_of_stream_between_frames_is_reported_from_one_inside(sockets: tuple[socket.socket, socket.socket]) -> None:
    """eof is True only where a peer may close: between frames."""
    left, right = sockets
    with Channel(right) as channel:
        left.sendall(wire.pack_header(Kind.EVENT, 1))
        left.close()
        channel.recv(timeout_s=5)
        with pytest.raises(errors.PeerUnreachable, match="closed the connection") as caught:
            channel.recv(timeout_s=5)
        assert caught.value.eof is True  # type: ignore[attr-defined]


@pytest.mark.parametrize("cut", [1, 32, 33])
def test_end_of_stream_inside_a_frame_is_not_eof(sockets: tuple[socket.socket, socket.socket], cut: int) -> None:
    """A torn frame is a lost peer, not an orderly end (fault F19)."""
    left, right = sockets
    body = b"body 12345"
    with Channel(right) as channel:
        left.sendall((wire.pack_header(Kind.EVENT, 1, body) + body)[:cut])
        left.close()
        with pytest.raises(errors.PeerUnreachable, match="middle of a frame") as caught:
            channel.recv(timeout_s=5)
        assert caught.value.eof is False  # type: ignore[attr-defined]


def test_a_reset_is_unreachable_for_both_directions() -> None:
    """RST from the peer is PeerUnreachable, receiving or sending."""
    left, right = tcp_pair()
    with Channel(right) as channel:
        left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        left.close()
        with pytest.raises(errors.PeerUnreachable) as caught:
            channel.recv(timeout_s=5)
        assert caught.value.eof is False  # type: ignore[attr-defined]
        with pytest.raises(errors.PeerUnreachable):
            channel.send(Kind.EVENT, 1, deadline_s=5)


def test_what_a_peer_said_before_its_end_is_received_after_a_send_has_failed() -> None:
    """A rank says `bye` and closes while its holder sends: without the `bye` its slots would stay leased (R8)."""
    left, right = map(Channel, socket.socketpair())
    with right:
        left.send(Kind.EVENT, 1, b"bye", deadline_s=5)
        left.close()
        with pytest.raises(errors.PeerUnreachable):
            right.send(Kind.EVENT, 2, b"slots", deadline_s=5)
        assert right.is_closed
        with pytest.raises(errors.PeerUnreachable):
            right.send(Kind.EVENT, 3, b"more", deadline_s=5)
        assert right.recv(timeout_s=5).data == b"bye"
        with pytest.raises(errors.PeerUnreachable) as caught:
            right.recv(timeout_s=5)
        assert caught.value.eof is True  # type: ignore[attr-defined]


@pytest.mark.parametrize("timeout_s", [None, 30.0])
def test_close_wakes_a_receiver(pair: tuple[Channel, Channel], timeout_s: float | None) -> None:
    """A thread that waits for a frame ends when another thread closes the channel."""
    left, _ = pair
    caught: list[BaseException] = []

    def receive() -> None:
        try:
            left.recv(timeout_s=timeout_s)
        except errors.PeerUnreachable as error:
            caught.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    while not left._recv_lock.locked():
        thread.join(0.001)
    left.close()
    thread.join(5)
    assert not thread.is_alive()
    assert "closed" in str(caught[0])
    assert left._sock.fileno() == -1


def test_garbage_and_oversized_frames_end_the_channel_before_anything_is_allocated(
    sockets: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A length beyond its limit is refused from the header alone (I20)."""
    asked: list[int] = []

    class Watched(bytearray):
        def __init__(self, size: int) -> None:
            asked.append(size)
            super().__init__(size)

    with Channel(sockets[1]) as right:
        monkeypatch.setattr("memstore.shell.net.channel.bytearray", Watched, raising=False)
        sockets[0].sendall(struct.pack("<4sBBHQIQI", wire.MAGIC, wire.VERSION, 10, 0, 1, 2**32 - 1, 2**63, 0))
        with pytest.raises(errors.ProtocolError, match="limit"):
            right.recv(timeout_s=5)
        assert right.is_closed
        assert asked == []


def test_a_strangers_long_body_is_refused_from_its_header(sockets: tuple[socket.socket, socket.socket]) -> None:
    """Before authentication no process waits for, or holds, more than 4 KiB of a stranger's bytes (I19)."""
    with Channel(sockets[1]) as right:
        right.authenticated = False
        sockets[0].sendall(wire.pack_header(Kind.HELLO, 1, bytes(4097)))
        with pytest.raises(errors.ProtocolError, match="limit is 4,096"):
            right.recv(timeout_s=5)


def test_a_flipped_bit_in_a_body_ends_the_channel(sockets: tuple[socket.socket, socket.socket]) -> None:
    """A corrupted step number never reaches the caller (fault F21)."""
    body = b"step 100"
    frame = bytearray(wire.pack_header(Kind.CALL, 1, body) + body)
    frame[-1] ^= 1
    with Channel(sockets[1]) as right:
        sockets[0].sendall(frame)
        with pytest.raises(errors.ProtocolError, match="crc"):
            right.recv(timeout_s=5)
        assert right.is_closed


def test_request_returns_the_reply_and_raises_the_peers_error(
    pair: tuple[Channel, Channel], aside: Callable[..., Future[Any]]
) -> None:
    """ERROR comes back as the class the peer raised."""
    left, right = pair

    def serve() -> None:
        call = right.recv(timeout_s=5)
        right.send(Kind.REPLY, call.request_id, bytes(call.data) + b"!", views(3), deadline_s=5)
        call = right.recv(timeout_s=5)
        refusal = errors.CapacityError("no room", bytes_asked=5)
        right.send(Kind.ERROR, call.request_id, ErrorMessage.of(refusal), deadline_s=5)

    served = aside(serve)
    reply = left.request(b"1", timeout_s=5)
    assert (reply.data, reply.bulk_bytes) == (b"1!", 3)
    left.skip_bulk(timeout_s=5)
    with pytest.raises(errors.CapacityError, match="no room") as caught:
        left.request(b"1", timeout_s=5)
    assert caught.value.bytes_asked == 5  # type: ignore[attr-defined]
    served.result(5)


def test_a_late_reply_is_dropped_and_a_strange_one_ends_the_channel(pair: tuple[Channel, Channel]) -> None:
    """The answer to a call that timed out is never taken for the answer to the next one."""
    left, right = pair
    with pytest.raises(errors.PeerTimeout):
        left.request(b"1", timeout_s=0.01)
    right.send(Kind.REPLY, 1, b"late", views(9), deadline_s=5)
    right.send(Kind.REPLY, 2, b"2", deadline_s=5)
    assert left.request(b"2", timeout_s=5).data == b"2"
    right.send(Kind.REPLY, 77, b"", deadline_s=5)
    with pytest.raises(errors.ProtocolError, match="REPLY 77"):
        left.request(b"3", timeout_s=5)
    assert left.is_closed


def test_both_directions_run_at_once(pair: tuple[Channel, Channel], aside: Callable[..., Future[Any]]) -> None:
    """Two ends that send more than the buffers hold at the same moment do not lock each other up."""
    left, right = pair
    bulk = views(16 << 20)
    sends = [aside(end.send, Kind.CHUNK, 1, b"", bulk, deadline_s=20) for end in pair]

    def take(end: Channel) -> bytearray:
        got = bytearray(end.recv(timeout_s=20).bulk_bytes)
        end.recv_bulk_digests([[memoryview(got)]], [], timeout_s=20)
        return got

    takes = [aside(take, end) for end in (left, right)]
    assert all(taken.result(20) == bulk[0] for taken in takes)
    assert [send.result(20) for send in sends] == [None, None]
