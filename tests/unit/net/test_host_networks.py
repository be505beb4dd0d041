"""A connection goes to the network with the fewest, and to another where one cannot be reached (R13)."""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from memstore.core.wire.frame import Kind
from memstore.core.wire.handshake import HolderIdentity
from memstore.core.wire.ids import Endpoint
from memstore.errors import AuthenticationError, PeerTimeout, PeerUnreachable
from memstore.shell.net.channel import CHUNK_S, SO_MAX_PACING_RATE, TC_PRIO_FILLER, Channel, Pacing, flight, pace
from memstore.shell.net.host_networks import SILENCE_S, HostNetworks
from memstore.shell.net.listener import Listener, connect_tcp
from memstore.testing.clusters.processes import wait_for

SECRET = b"s" * 32
ME, OTHER = (HolderIdentity(host=host, incarnation=1) for host in ("a", "b"))


@contextlib.contextmanager
def listening(who: HolderIdentity = OTHER) -> Iterator[Endpoint]:
    over = threading.Event()
    with Listener.tcp(
        "127.0.0.1", 0, secret=SECRET, store="s", identity=lambda: who, on_channel=lambda channel, _: over.wait(30.0)
    ) as listener:
        try:
            yield Endpoint(*listener.address)
        finally:
            over.set()


def refusing() -> Endpoint:
    """Return where no process listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return Endpoint(*free.getsockname())


def connect(endpoint: Endpoint) -> Channel:
    return connect_tcp(endpoint.address, endpoint.port, secret=SECRET, store="s", identity=ME, timeout_s=10.0, host="b")


def endpoint_of(channel: Channel) -> Endpoint:
    """Return where a connection goes, as Channel names it: tcp:ADDRESS:PORT."""
    _, address, port = channel.peer.rsplit(":", 2)
    return Endpoint(address, int(port))


def test_connections_take_turns_and_end_early_where_another_network_is() -> None:
    """Else one whose network has fallen silent would hold a copy up for as long as a single network may be slow."""
    with listening() as one, listening() as two, contextlib.ExitStack() as stack:
        networks, reached = HostNetworks([one, two]), []
        for _ in range(4):
            channel = networks.dial(connect)
            stack.callback(channel.close)
            reached.append(endpoint_of(channel))
            limit_ms = channel._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert limit_ms == SILENCE_S * 1000
        assert reached == [one, two, one, two]
        alone = HostNetworks([one]).dial(connect)
        stack.callback(alone.close)
        assert alone._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) > SILENCE_S * 1000


def test_one_that_refuses_is_passed_over_and_then_avoided() -> None:
    gone = refusing()
    with listening() as good, contextlib.ExitStack() as stack:
        networks = HostNetworks([gone, good])
        tried: list[Endpoint] = []

        def noted(endpoint: Endpoint) -> Channel:
            tried.append(endpoint)
            return connect(endpoint)

        for _ in range(3):
            channel = networks.dial(noted)
            stack.callback(channel.close)
            assert endpoint_of(channel) == good
        assert tried == [gone, good, good, good]


@pytest.mark.parametrize(("error", "follows"), [(None, (0, 1)), (PeerUnreachable("it broke"), (1, 1))])
def test_a_connection_that_ended_is_counted_no_more_and_one_that_broke_is_avoided(
    error: PeerUnreachable | None, follows: tuple[int, int]
) -> None:
    with listening() as one, listening() as two, contextlib.ExitStack() as stack:
        networks = HostNetworks([one, two])
        first = networks.dial(connect)
        networks.end(first, error)
        networks.end(first, error)  # its owner and its reader both end it
        assert endpoint_of(first) == one
        for number in follows:
            channel = networks.dial(connect)
            stack.callback(channel.close)
            assert endpoint_of(channel) == (one, two)[number]


def test_where_none_answers_the_error_says_so() -> None:
    with pytest.raises(PeerUnreachable, match="cannot connect"):
        HostNetworks([refusing(), refusing()]).dial(connect)


def test_another_host_at_an_address_is_no_failed_network() -> None:
    """The view is out of date: the caller has to learn that, and gets no copy over what is left."""
    with (
        listening(HolderIdentity(host="c", incarnation=1)) as stranger,
        listening() as good,
        pytest.raises(AuthenticationError, match="that address is out of date"),
    ):
        HostNetworks([stranger, good]).dial(connect)


def test_connections_that_are_opened_at_once_are_spread_too() -> None:
    """All streams of a fetch are opened by threads of their own."""
    together = threading.Barrier(4)
    with listening() as one, listening() as two, contextlib.ExitStack() as stack:
        networks = HostNetworks([one, two])

        def late(endpoint: Endpoint) -> Channel:
            together.wait(30.0)
            return connect(endpoint)

        with ThreadPoolExecutor(4) as threads:
            made = [threads.submit(networks.dial, late) for _ in range(4)]
            for each in made:
                stack.callback(each.result(30.0).close)
        assert sorted(endpoint_of(each.result()) == one for each in made) == [False, False, True, True]


# -- test pacing --------------------------------------------------------------------------------------
# Copies leave in a low class and at a bounded rate; what the kernel says of them.


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
