"""Chunks of one frame arrive with their digests, in C or by Python, and failures are reported alike (R13, R14)."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import termios
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import xxhash

from memstore import errors
from memstore.core.wire import frame as wire
from memstore.core.wire.frame import Kind
from memstore.shell.native import extension
from memstore.shell.net.channel import Channel
from memstore.testing.clusters.processes import wait_for

WITHOUT = pytest.param(None, id="python")
WITH = pytest.param(
    extension.built,
    id="native",
    marks=pytest.mark.skipif(not extension.is_there(), reason="the native helper is not built, or is turned off"),
)
SIZES = [1, 4096, 300_000, 3 << 20, 17, 5 << 20]


@pytest.fixture(autouse=True, params=[WITHOUT, WITH])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Receive and send by Python's loops, and by those in C."""
    monkeypatch.setattr(extension, "built", request.param)


def chunks(*sizes: int) -> list[memoryview]:
    return [memoryview(os.urandom(size)) for size in sizes]


def places(sizes: list[int]) -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in sizes]


def whole(views: list[memoryview]) -> list[list[memoryview]]:
    """Return chunks of one view each."""
    return [[view] for view in views]


def digests_of(sent: list[memoryview]) -> list[bytes]:
    return [xxhash.xxh3_128_digest(chunk) for chunk in sent]


def raw_frame(bulk_bytes: int) -> bytes:
    """Return the head of a frame whose bulk the test sends itself."""
    return wire.pack_header(Kind.CHUNK, 1, b"", bulk_bytes)


def test_chunks_of_all_sizes_arrive_with_their_digests_and_frames_follow(
    pair: tuple[Channel, Channel], aside: Callable[..., Future[Any]]
) -> None:
    """What wakes the receiver of chunks does not keep the next, small frame from it."""
    left, right = pair
    for _ in range(3):
        sent, got, digests = chunks(*SIZES), places(SIZES), list[bytes]()
        sending = aside(left.send, Kind.CHUNK, 1, b"", sent, deadline_s=30.0)
        right.recv(timeout_s=30.0)
        right.recv_bulk_digests(whole(got[:2]), digests, timeout_s=30.0)
        right.recv_bulk_digests(whole(got[2:]), digests, timeout_s=30.0)
        sending.result(30.0)
        assert [bytes(view) for view in got] == [bytes(view) for view in sent]
        assert digests == digests_of(sent)
        left.send(Kind.REPLY, 1, b"", deadline_s=30.0)
        assert right.recv(timeout_s=30.0).kind is Kind.REPLY


def test_more_views_than_one_call_of_the_system_takes(
    pair: tuple[Channel, Channel], aside: Callable[..., Future[Any]]
) -> None:
    left, right = pair
    sizes = [1 + number % 7 * 1000 for number in range(2500)]
    sent, got, digests = chunks(*sizes), places(sizes), list[bytes]()
    sending = aside(left.send, Kind.CHUNK, 1, b"", sent, deadline_s=30.0)
    right.recv(timeout_s=30.0)
    right.recv_bulk_digests(whole(got), digests, timeout_s=30.0)
    sending.result(30.0)
    assert digests == digests_of(sent)
    assert got == sent


def test_a_chunk_may_go_to_many_places(pair: tuple[Channel, Channel], aside: Callable[..., Future[Any]]) -> None:
    """As into the tensors of a reader: each chunk has the digest of all its bytes, whichever way they are cut."""
    left, right = pair
    cuts = [[1, 999, 70_000], [3_000_000], [5] * 2000, [2_000_000, 1, 1_000_000], [1]]
    got = [places(sizes) for sizes in cuts]
    sent, digests = chunks(*map(sum, cuts)), list[bytes]()
    sending = aside(left.send, Kind.CHUNK, 1, b"", sent, deadline_s=30.0)
    right.recv(timeout_s=30.0)
    right.recv_bulk_digests(got[:2], digests, timeout_s=30.0)
    right.recv_bulk_digests(got[2:], digests, timeout_s=30.0)
    sending.result(30.0)
    assert digests == digests_of(sent)
    assert [b"".join(views) for views in got] == [bytes(view) for view in sent]
    left.send(Kind.REPLY, 1, b"", deadline_s=30.0)
    assert right.recv(timeout_s=30.0).kind is Kind.REPLY


def test_a_chunk_that_ends_between_two_places_has_no_digest(sockets: tuple[socket.socket, socket.socket]) -> None:
    """A place that is full does not make its chunk whole."""
    sent, digests = chunks(1000, 2000), list[bytes]()
    channel = Channel(sockets[1])
    sockets[0].sendall(raw_frame(3000) + b"".join(sent)[:2000])
    sockets[0].close()
    channel.recv(timeout_s=30.0)
    with pytest.raises(errors.PeerUnreachable, match="closed the connection in the middle of a frame"):
        channel.recv_bulk_digests([places([600, 400]), places([500, 500, 1000])], digests, timeout_s=30.0)
    assert digests == digests_of(sent[:1])


def test_more_chunks_than_the_frame_has_left_are_refused_before_one_is_taken(pair: tuple[Channel, Channel]) -> None:
    left, right = pair
    left.send(Kind.CHUNK, 1, b"", chunks(10, 10), deadline_s=30.0)
    right.recv(timeout_s=30.0)
    digests: list[bytes] = []
    with pytest.raises(errors.InternalError, match="left"):
        right.recv_bulk_digests(whole(places([21])), digests, timeout_s=30.0)
    assert not digests


def test_a_connection_that_ends_within_a_chunk_leaves_those_before_it(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    sent, digests = chunks(1000, 2000, 3000), list[bytes]()
    channel = Channel(sockets[1])
    sockets[0].sendall(raw_frame(6000) + b"".join(sent)[:4500])
    sockets[0].close()
    channel.recv(timeout_s=30.0)
    got = places([1000, 2000, 3000])
    with pytest.raises(errors.PeerUnreachable, match="closed the connection in the middle of a frame"):
        channel.recv_bulk_digests(whole(got), digests, timeout_s=30.0)
    assert digests == digests_of(sent[:2])
    assert channel.is_closed


def test_a_sender_that_stalls_within_a_chunk_is_given_up_at_its_deadline(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    """The limit is for each chunk, and the error names it."""
    sent, digests = chunks(1000, 2000), list[bytes]()
    channel = Channel(sockets[1])
    sockets[0].sendall(raw_frame(3000) + b"".join(sent)[:1500])
    channel.recv(timeout_s=30.0)
    with pytest.raises(errors.PeerTimeout, match=r"the limit is 0\.2 s"):
        channel.recv_bulk_digests(whole(places([1000, 2000])), digests, timeout_s=0.2)
    assert digests == digests_of(sent[:1])
    assert channel.is_closed


def test_no_wait_is_for_bytes_of_two_chunks(
    sockets: tuple[socket.socket, socket.socket], aside: Callable[..., Future[Any]]
) -> None:
    """Else a sender that stalls after a whole chunk is given up after twice the time: once for either chunk."""
    if sockets[1].family == socket.AF_UNIX:
        pytest.skip("only TCP wakes for a number of bytes")
    sent, digests = chunks(3 << 20, 1 << 20), list[bytes]()
    channel = Channel(sockets[1])
    got = [places([1 << 20, 2 << 20]), places([1 << 20])]
    sockets[0].sendall(raw_frame(4 << 20))
    channel.recv(timeout_s=30.0)
    receiving = aside(channel.recv_bulk_digests, got, digests, timeout_s=30.0)
    sockets[0].sendall(sent[0][:-1000])

    def waits_for_the_rest() -> bool:
        """Whether it is woken by the last byte of this chunk: what has come and is not taken yet counts."""
        there = int.from_bytes(fcntl.ioctl(sockets[1], termios.FIONREAD, bytes(4)), sys.byteorder)
        return sockets[1].getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == there + 1000

    wait_for(waits_for_the_rest, "the wait for the rest")
    sockets[0].sendall(bytes(sent[0][-1000:]) + bytes(sent[1]))
    receiving.result(30.0)
    assert digests == digests_of(sent)


def test_close_wakes_who_waits_for_the_rest_of_a_chunk(
    sockets: tuple[socket.socket, socket.socket], aside: Callable[..., Future[Any]]
) -> None:
    channel = Channel(sockets[1])
    sockets[0].sendall(raw_frame(3000) + bytes(1500))
    channel.recv(timeout_s=30.0)
    waits = threading.Event()

    def receive() -> None:
        waits.set()
        channel.recv_bulk_digests(whole(places([1000, 2000])), [], timeout_s=600.0)

    waiting = aside(receive)
    assert waits.wait(30.0)
    channel.close()
    with pytest.raises(errors.PeerUnreachable, match="clos"):
        waiting.result(30.0)


def test_a_receiver_that_takes_nothing_lets_the_sender_go_at_its_deadline(pair: tuple[Channel, Channel]) -> None:
    left, _ = pair
    with pytest.raises(errors.PeerTimeout, match="send CHUNK"):
        left.send(Kind.CHUNK, 1, b"", chunks(32 << 20), deadline_s=0.3)
    assert left.is_closed


def test_a_receiver_that_goes_away_fails_the_send(
    pair: tuple[Channel, Channel], aside: Callable[..., Future[Any]]
) -> None:
    left, right = pair
    sending = aside(left.send, Kind.CHUNK, 1, b"", chunks(32 << 20), deadline_s=30.0)
    right.recv(timeout_s=30.0)
    right.close()
    with pytest.raises(errors.PeerUnreachable, match="send CHUNK"):
        sending.result(30.0)
