"""A stand-in for the daemon of HyperPod's tiered checkpointing: keeps what is posted to it in this process's memory.

What the real one does beside that is not here, above all copies on other hosts.
"""

from __future__ import annotations

import http.server
import socketserver
from collections import OrderedDict
from multiprocessing.connection import Connection
from typing import Any

KEPT = 4  # bodies: two steps, each a rank's shard and the metadata


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """The bodies that were posted last, each with its header Shard-Meta, by path."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.namespaces: set[str] = set()
        self.shards: OrderedDict[str, tuple[bytearray, str]] = OrderedDict()


class Handler(http.server.BaseHTTPRequestHandler):
    """A POST makes a namespace or keeps a shard, a GET gives it back."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        """Make a namespace if nothing comes with it, else keep a shard."""
        body, end = bytearray(int(self.headers.get("Content-Length", 0))), 0
        while end < len(body):
            got = self.rfile.readinto(memoryview(body)[end:])
            if not got:
                return
            end += got
        if "/namespaces/" in self.path:
            self.server.namespaces.add(self._name())
        else:
            self.server.shards[self._name()] = (body, self.headers.get("Shard-Meta", ""))
            while len(self.server.shards) > KEPT:
                self.server.shards.popitem(last=False)
        self._answer(200, b"{}")

    def do_GET(self) -> None:
        """Describe a namespace, or give a shard back."""
        if self._name() in self.server.namespaces:
            self._answer(200, b"{}")
        elif self._name() in self.server.shards:
            self._answer(200, *self.server.shards[self._name()])
        else:
            self._answer(404, b"")

    def _name(self) -> str:
        return self.path.partition("?")[0]

    def _answer(self, status: int, body: bytes | bytearray, meta: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if meta:
            self.send_header("Shard-Meta", meta)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


def serve(control: Connection) -> None:
    """Tell the port, and serve until the process is ended."""
    with Server() as server:
        control.send(server.server_port)
        server.serve_forever()
