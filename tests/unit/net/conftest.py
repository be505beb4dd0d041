"""Connected channels, over TCP and over AF_UNIX."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from socket_pairs import tcp_pair

from memstore.shell.net.channel import Channel


@pytest.fixture(params=["tcp", "unix"])
def sockets(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two connected stream sockets, closed afterwards."""
    pair = tcp_pair() if request.param == "tcp" else socket.socketpair()
    yield pair
    for sock in pair:
        sock.close()


@pytest.fixture
def pair(sockets: tuple[socket.socket, socket.socket]) -> Iterator[tuple[Channel, Channel]]:
    """Two ends of one connection as channels."""
    left, right = Channel(sockets[0]), Channel(sockets[1])
    yield left, right
    left.close()
    right.close()


@pytest.fixture
def aside() -> Iterator[Callable[..., Future[Any]]]:
    """Run a function in another thread; all are waited for at the end."""
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit
