"""A server of S3, of Google's or of Azure's storage on loopback, and an HTTP layer that breaks its requests.

    with ObjectServer("gs", folder) as server, HttpFaults(server) as faults:
        os.environ.update(faults.environment())        obstore finds the server through it
        faults.add("PUT", "marker", kind="status", status=500, times=2)
        tier = PartsTier(files_from_url(f"{faults.url}/checkpoints"))

S3 is moto's server, pure Python from PyPI; Google's XML interface is laid over it (`gcs_server.py`); Azure is Azurite,
from npm, where it is installed. All keep everything in their memory and have one bucket.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

from memstore.testing.faults.processes import Started

CLOUDS = ("s3", "gs", "az")
BUCKET = "bucket"
TOKEN = "test"  # that the server of gs takes; s3's takes any, az's checks signatures
START_S = 60.0
_RUNNING = re.compile(rb"(?:Running|listens) on http://127\.0\.0\.1:(\d+)")
_ACCOUNT, _ACCOUNT_KEY = "memstore", base64.b64encode(b"a key of this test's account")
Kind = Literal["status", "truncate", "hang-up", "lose-reply", "reset", "wait"]


def azurite() -> str | None:
    """Return the program of Azure's emulator: `$AZURITE`, or azurite-blob on PATH."""
    return os.environ.get("AZURITE") or shutil.which("azurite-blob")


NO_AZURITE = "no Azurite: `npm install azurite`, then AZURITE=node_modules/.bin/azurite-blob"


class ObjectServer(Started):
    """One server process of a cloud, with an empty bucket."""

    def __init__(self, scheme: str, folder: Path) -> None:
        self.scheme, self.folder, self.url = scheme, folder, f"{scheme}://{BUCKET}"
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None

    def environment(self, port: int = 0) -> dict[str, str]:
        """Return the environment in which clients find the server, or what stands before it at another port."""
        at = f"http://127.0.0.1:{port or self.port}"
        if self.scheme == "gs":
            return {"GOOGLE_BASE_URL": at, "GOOGLE_BEARER_TOKEN": TOKEN, "GOOGLE_ALLOW_HTTP": "true"}
        if self.scheme == "az":
            account = {"AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": _ACCOUNT_KEY.decode()}
            return {**account, "AZURE_STORAGE_ENDPOINT": f"{at}/{_ACCOUNT}", "AZURE_ALLOW_HTTP": "true"}
        keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
        return {**keys, "AWS_ENDPOINT_URL": at, "AWS_ALLOW_HTTP": "true"}

    def _command(self) -> list[str]:
        if self.scheme == "az":
            return [azurite() or NO_AZURITE, "--blobPort", "0", "--inMemoryPersistence", "--disableTelemetry"]
        if self.scheme == "gs":
            return [sys.executable, "-m", "memstore.testing.faults.gcs_server", TOKEN]
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]

    def start(self) -> None:
        """Start the server and make its bucket."""
        printed = self.folder / f"{self.scheme}-server.log"
        with printed.open("wb") as log:
            self.process = subprocess.Popen(
                self._command(),
                env={**os.environ, "AZURITE_ACCOUNTS": f"{_ACCOUNT}:{_ACCOUNT_KEY.decode()}"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline_s = time.monotonic() + START_S
        while not (found := _RUNNING.search(printed.read_bytes())):
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise AssertionError(f"no server of {self.scheme}://:\n{printed.read_text()[-2000:]}")
            time.sleep(0.02)
        self.port = int(found[1])
        self._make_bucket()

    def stop(self) -> None:
        """Kill the server, which loses all that it had stored."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)

    def _make_bucket(self) -> None:
        path, headers = f"/{BUCKET}", {"Authorization": f"Bearer {TOKEN}"} if self.scheme == "gs" else {}
        if self.scheme == "az":
            path = f"/{_ACCOUNT}/{BUCKET}?restype=container"
            dated = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
            lines = ["PUT", *[""] * 11, *(f"{name}:{value}" for name, value in dated.items())]
            signed = "\n".join([*lines, f"/{_ACCOUNT}/{_ACCOUNT}/{BUCKET}", "restype:container"]).encode()
            seal = base64.b64encode(hmac.digest(base64.b64decode(_ACCOUNT_KEY), signed, hashlib.sha256)).decode()
            headers = {**dated, "Authorization": f"SharedKey {_ACCOUNT}:{seal}", "Content-Length": "0"}
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.request("PUT", path, headers=headers)
            reply = connection.getresponse()
            if reply.status not in (200, 201):
                raise AssertionError(f"no bucket could be made at {self.scheme}://: {reply.status} {reply.read()!r}")


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

    def __init__(self, target: ObjectServer) -> None:
        self.target, self.url = target, target.url
        self.rules: list[Rule] = []
        self.seen: list[tuple[str, str, str, int]] = []
        self.lock = threading.Lock()
        faults = self

        class Handler(_Handler):
            owner = faults

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = int(self.server.server_address[1])
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), name="http-faults", daemon=True)

    def __enter__(self) -> HttpFaults:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for rule in self.rules:
            rule.gate.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(10)

    def environment(self) -> dict[str, str]:
        """Return the environment in which clients reach the server through this layer."""
        return self.target.environment(self.port)

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
        nbytes, path = int(self.headers.get("Content-Length") or 0), unquote(self.path)  # Google's quote dots as well
        rule = self.owner.take(self.command, path)
        is_reset = rule is not None and rule.kind == "reset"
        body = self.rfile.read(nbytes // 2 if is_reset else nbytes)
        with self.owner.lock:
            self.owner.seen.append((self.command, path, self.headers.get("Range") or "", len(body)))
        if is_reset:  # closing with bytes unread, or with no time to linger, sends an RST
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            return
        if rule is not None and rule.kind == "wait":
            rule.gate.wait(60)
        if rule is not None and rule.kind == "hang-up":
            self.close_connection = True
            return
        if rule is not None and rule.kind == "status":
            self._answer(rule.status, [("Content-Type", "application/xml")], rule.body)
            return
        with contextlib.closing(
            http.client.HTTPConnection("127.0.0.1", self.owner.target.port, timeout=60)
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
