"""Two ends of one connection on this machine."""

from __future__ import annotations

import socket


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a TCP connection; the caller closes them."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        left = socket.create_connection(listening.getsockname())
        right, _ = listening.accept()
    return left, right
