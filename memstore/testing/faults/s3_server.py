"""A real S3 server process on loopback, and an HTTP layer before it that fails, delays, cuts and loses on request.

    with S3Server(folder) as server, HttpFaults(server.port) as faults:
        os.environ.update(server_environment(faults.port))        obstore and other S3 clients read these
        server.make_bucket("bucket")
        faults.add("PUT", "marker", kind="status", status=500, times=2)

The server is moto's, pure Python from PyPI. It behaves like S3 in ranges, conditional puts and error bodies, which the
tests need, and keeps everything in its memory.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

START_S = 60.0
_RUNNING = re.compile(rb"Running on http://127\.0\.0\.1:(\d+)")
Kind = Literal["status", "truncate", "hang-up", "lose-reply", "wait"]


def server_environment(port: int) -> dict[str, str]:
    """Return the environment in which S3 clients find the server; it takes any credentials."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }


class S3Server:
    """One server process; a context manager that leaves nothing behind."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "s3-server.log"
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> S3Server:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline_s = time.monotonic() + START_S
        while not (found := _RUNNING.search(self.log.read_bytes())):
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                self.stop()
                raise AssertionError(f"no S3 server:\n{self.log.read_text()[-2000:]}")
            time.sleep(0.02)
        self.port = int(found[1])
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Kill the server, which loses all that it had stored."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)

    def make_bucket(self, name: str) -> None:
        """Create a bucket."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.request("PUT", f"/{name}")
            if connection.getresponse().status != 200:
                raise AssertionError(f"bucket {name} could not be made")


@dataclass
class Rule:
    """A fault for the next `times` requests of a method with `part` in their path."""

    method: str
    part: str
    kind: Kind
    times: int = 1
    status: int = 500
    body: bytes = b"<Error><Code>InternalError</Code></Error>"
    gate: threading.Event = field(default_factory=threading.Event)  # "wait": until it is set


class HttpFaults:
    """A reverse proxy before the server. `seen` has every request: (method, path, range, bytes sent)."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.rules: list[Rule] = []
        self.seen: list[tuple[str, str, str, int]] = []
        self.lock = threading.Lock()
        faults = self

        class Handler(_Handler):
            owner = faults

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = int(self.server.server_address[1])
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), name="s3-faults", daemon=True)

    def __enter__(self) -> HttpFaults:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for rule in self.rules:
            rule.gate.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(10)

    def add(self, method: str, part: str, **fields: Any) -> Rule:
        """Add a rule; the first that fits a request is used up by one."""
        rule = Rule(method, part, **fields)
        with self.lock:
            self.rules.append(rule)
        return rule

    def clear(self) -> None:
        """Remove all rules and the list of requests; requests that wait go on."""
        with self.lock:
            for rule in self.rules:
                rule.gate.set()
            self.rules.clear()
            self.seen.clear()

    def take(self, method: str, path: str) -> Rule | None:
        """Return the rule for a request, used up by one."""
        with self.lock:
            for rule in self.rules:
                if rule.times > 0 and rule.method == method and rule.part in path:
                    rule.times -= 1
                    return rule
        return None


class _Handler(BaseHTTPRequestHandler):
    """The handler of one connection of a client."""

    owner: HttpFaults
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Log nothing: requests are in `seen`."""

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        rule = self.owner.take(self.command, self.path)
        with self.owner.lock:
            self.owner.seen.append((self.command, self.path, self.headers.get("Range") or "", len(body)))
        if rule is not None and rule.kind == "wait":
            rule.gate.wait(60)
        if rule is not None and rule.kind == "hang-up":
            self.close_connection = True
            return
        if rule is not None and rule.kind == "status":
            self._answer(rule.status, [("Content-Type", "application/xml")], rule.body)
            return
        with contextlib.closing(
            http.client.HTTPConnection("127.0.0.1", self.owner.target_port, timeout=60)
        ) as connection:
            connection.request(self.command, self.path, body, dict(self.headers))
            reply = connection.getresponse()
            data, headers = reply.read(), reply.getheaders()
        if rule is not None and rule.kind == "lose-reply":
            self.close_connection = True
            return
        is_cut = rule is not None and rule.kind == "truncate"
        self._answer(reply.status, headers, data, sent=len(data) // 2 if is_cut else None)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _forward

    def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes, sent: int | None = None) -> None:
        """Send a reply; with `sent` only so many bytes of the body that was promised."""
        with contextlib.suppress(OSError):  # a client that gave up
            self.send_response_only(status)
            own = {"connection", "transfer-encoding"} | ({"content-length"} if self.command != "HEAD" else set())
            for name, value in headers:
                if name.lower() not in own:
                    self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data[:sent])
            if sent is not None:
                self.close_connection = True
