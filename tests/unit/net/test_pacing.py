"""Copies leave in a low class and at a bounded rate; what the kernel says of them."""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from memstore.core.wire.frame import Kind
from memstore.errors import PeerTimeout
from memstore.shell.net.channel import Channel
from memstore.shell.net.pacing import CHUNK_S, Pacing
from memstore.shell.net.socket_options import SO_MAX_PACING_RATE, TC_PRIO_FILLER, flight, pace
from memstore.testing.clusters.processes import wait_for


@contextmanager
def connected() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel over TCP and its socket."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sock = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
        with other, Channel(sock) as channel:
            yield channel, sock


def pace_of(sock: socket.socket) -> int:
    """The kernel's word on a socket's pace."""
    found: int = struct.unpack("@L", sock.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 8))[0]
    return found


def test_the_hosts_limit_is_shared_by_the_connections_that_send() -> None:
    """Alone all of it, two of them a half each, and never so little that a frame would miss its deadline."""
    pacing = Pacing(1, 10 << 20, 4 << 20)
    with connected() as (first, one), connected() as (second, two):
        for channel, sock in ((first, one), (second, two)):
            pacing.enter(channel)
            assert sock.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) == 1 << 2
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == TC_PRIO_FILLER
        with pacing.sending(first):
            assert pace_of(one) == 10 << 20
            with pacing.sending(second):
                assert [pace_of(one), pace_of(two)] == [5 << 20, 5 << 20]
            assert pace_of(one) == 10 << 20
        pacing = Pacing(0, 1, 4 << 20)
        with pacing.sending(first):
            assert pace_of(one) == int((4 << 20) / CHUNK_S)


def test_without_a_limit_or_a_class_a_connection_is_left_alone() -> None:
    """0 and 0."""
    pacing = Pacing(0, 0, 4 << 20)
    with connected() as (channel, sock):
        before = pace_of(sock)
        with pacing.sending(pacing.enter(channel)):
            assert pace_of(sock) == before
        assert sock.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) == 0


def test_a_connection_over_ipv6_has_its_class() -> None:
    """Also where the address is an IPv4 one in disguise."""
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        for address in ("::1", "::ffff:127.0.0.1"):
            sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
            sock.connect((address, listener.getsockname()[1]))
            with Channel(sock) as channel:
                Pacing(1, 0, 4 << 20).enter(channel)
                assert sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS) == 1 << 2
                assert sock.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) == 1 << 2


def test_a_class_that_the_kernel_refuses_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """As in a sandbox without the option; nothing else changes. A closed connection is no refusal."""
    refused: Any = SimpleNamespace(family=socket.AF_INET, fileno=lambda: 3)
    refused.setsockopt = lambda *_: (_ for _ in ()).throw(OSError(errno.ENOPROTOOPT, "unknown here"))
    for _ in range(3):
        pace(refused, 1 << 20)
    assert caplog.text.count("unknown here") == 1
    caplog.clear()
    with connected() as (channel, _):
        pass
    channel.classify(2)
    assert caplog.text == ""


def test_the_kernel_says_what_is_on_its_way() -> None:
    """Sent and not acknowledged, and the shortest way there and back."""
    with connected() as (_, sock):
        sock.send(b"x")
        wait_for(lambda: flight(sock).unacked_bytes == 0, "the acknowledgement")
        assert 0.0 < flight(sock).rtt_s < 1.0


def test_a_frame_that_fails_between_two_of_its_parts_ends_the_channel() -> None:
    """The next header could not be found again."""
    with connected() as (channel, sock):

        def parts(views: list[memoryview], *_: object) -> Iterator[list[memoryview]]:
            yield views[:1]
            with contextlib.suppress(BlockingIOError):
                while True:
                    sock.send(bytes(1 << 16))
            yield views[1:]

        gate: Any = SimpleNamespace(parts=parts)
        with pytest.raises(PeerTimeout):
            channel.send(Kind.CHUNK, 1, b"", [memoryview(bytes(1 << 20))], deadline_s=0.1, gate=gate)
        assert channel.is_closed
