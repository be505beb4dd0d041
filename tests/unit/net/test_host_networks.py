"""A connection goes to the network with the fewest, and to another where one cannot be reached (R13)."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from memstore.core.wire.handshake import HolderIdentity
from memstore.core.wire.ids import Endpoint
from memstore.errors import AuthenticationError, PeerUnreachable
from memstore.shell.net.channel import Channel
from memstore.shell.net.host_networks import SILENCE_S, HostNetworks
from memstore.shell.net.listener import Listener, connect_tcp

SECRET = b"s" * 32
ME, OTHER = (HolderIdentity(host=host, incarnation=1) for host in ("a", "b"))


@contextlib.contextmanager
def listening(who: HolderIdentity = OTHER) -> Iterator[Endpoint]:
    over = threading.Event()
    with Listener.tcp(
        "127.0.0.1", 0, secret=SECRET, store="s", identity=lambda: who, on_channel=lambda channel, _: over.wait(30.0)
    ) as listener:  # fmt: skip
        try:
            yield Endpoint(*listener.address)
        finally:
            over.set()


def refusing() -> Endpoint:
    """Return where no process listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return Endpoint(*free.getsockname())


def connect(endpoint: Endpoint) -> Channel:
    return connect_tcp(
        endpoint.address, endpoint.port, secret=SECRET, store="s", identity=ME, timeout_s=10.0, host="b"
    )  # fmt: skip


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
