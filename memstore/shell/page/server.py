"""The server of `memstore page`: asks the store as a person would, and sends every reader the same answers.

The controller is asked only while the page is read: new events are asked for every second, and a status so rarely
that the controller spends at most SHARE of a core on it, however large the store is (D306). Nothing is changed.

    GET /        the page, which has no data       GET /stream  JSON lines, as things happen
    GET /loss    what would be lost with a host or a domain, by the controller's own dry run
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any, Protocol, TypeVar

from aiohttp import web

from memstore.core.report.page import hosts_of, loss_view, news_view, status_view
from memstore.core.wire.calls import AskEvents, AskPlan
from memstore.core.wire.codec import Request
from memstore.core.wire.replies import Plan, Status
from memstore.core.wire.status_rows import EventRow
from memstore.errors import ConfigError, MemstoreError

R = TypeVar("R")
EVENTS_S = 1.0  # between two questions for new events: they cost the controller microseconds
STATUS_S = 2.0  # between two statuses at least
SHARE = 0.008  # of the time that a status may take the store
FIRST_S = 0.08  # what one is expected to take
SLOWER = 1.5  # an answer counts as at most so much slower than the last: a busy machine is no larger store
EVENTS_MAX = 4096  # as many as a controller remembers
READERS_MAX = 32
QUIET_S = 15.0  # after this a reader gets an empty line, which finds out whether it is there
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
HERE = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]+)?", re.IGNORECASE)


class AskedStore(Protocol):
    """A store that any thread may ask; each call ends by a deadline."""

    def ask(self, request: Request[R]) -> R:
        """Ask the controller."""

    def status(self) -> Status:
        """Ask for its status."""


def is_loopback(address: str) -> bool:
    """Return whether only this machine reaches an address; any name but localhost counts as beyond."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return address == "localhost"


def refusal(request: web.Request, token: str) -> tuple[int, str] | None:
    """Return status and reason if a request is not answered. Only data needs the token: the page itself has none."""
    if not token and not HERE.fullmatch(request.host):  # else a foreign page reads it whose name leads here
        return 403, "without a token this page answers to the names localhost, 127.0.0.1 and [::1] only"
    if request.path not in ("/stream", "/loss"):
        return None
    if request.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
        return 403, "the page of another site asked"
    given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
    if token and not hmac.compare_digest(given, f"Bearer {token}".encode()):
        return 401, "give the token that this page was started with: `Authorization: Bearer TOKEN`"
    return None


class PageServer:
    """Follows one store while somebody reads. `token`: what readers must give; "" where only this machine reads."""

    def __init__(self, store: AskedStore, name: str, token: str) -> None:
        self.store, self.name, self.token = store, name, token
        self.status: Status | None = None
        self.events: deque[EventRow] = deque(maxlen=EVENTS_MAX)
        self.problem = ""
        self._as_of = self._every_s = self._due_s = 0.0
        self._took_s, self._next_seq = FIRST_S, 0
        self._readers_count, self._has_readers = 0, asyncio.Event()
        self._news = asyncio.Event()  # set with every answer; then another takes its place
        self._plans: dict[tuple[str, ...], list[Plan]] = {}  # since the newest status
        self._planning = asyncio.Lock()
        folder = files("memstore.shell.page")
        self._files = {f"/page.{kind}": (folder / f"page.{kind}").read_bytes() for kind in TYPES}

    async def run(self, bind: str, port: int, on_ready: Callable[[int], None]) -> None:
        """Serve until cancelled; `on_ready` gets the port.

        Raises:
            ConfigError: the address cannot be taken.
        """
        app = web.Application(middlewares=[self._guarded])
        app.router.add_get("/stream", self._stream)
        app.router.add_get("/loss", self._loss)
        for path in ("/", "/favicon.ico", *self._files):
            app.router.add_get(path, self._file)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, bind, port).start()
            except OSError as error:
                raise ConfigError(
                    f"the page cannot listen at {bind}, port {port}: {error.strerror}. Name another port with --port "
                    "(0: any that is free), or with --bind an address of this machine"
                ) from error
            on_ready(int(runner.addresses[0][1]))
            await self._follow()
        finally:
            await runner.cleanup()

    # -- the store ----------------------------------------------------------------------------

    async def _follow(self) -> None:
        while True:
            await self._has_readers.wait()
            try:
                await self._look()
                self.problem = ""
            except (MemstoreError, OSError) as error:
                self.problem = str(error) or type(error).__name__
            news, self._news = self._news, asyncio.Event()
            news.set()
            await asyncio.sleep(EVENTS_S)

    async def _look(self) -> None:
        """Ask for a status if one is due, and for what happened."""
        began_s = time.monotonic()
        if began_s >= self._due_s:
            status = await asyncio.to_thread(self.store.status)
            self._took_s = min(time.monotonic() - began_s, SLOWER * self._took_s)
            self._every_s = max(STATUS_S, self._took_s / SHARE)
            self._due_s = began_s + self._every_s
            if self.status is not None and status.term < self.status.term:  # another store under the same name
                self._next_seq = 0
                self.events.clear()
            self.status, self._as_of, self._plans = status, time.time(), {}
        has_more = True
        while has_more:
            found = await asyncio.to_thread(self.store.ask, AskEvents(since=self._next_seq))
            self.events.extend(found.events)
            self._next_seq, has_more = found.next, found.has_more

    def _message(self, shown: Status | None, after_seq: int) -> dict[str, Any]:
        """Return what a reader has not seen, who has seen a status and the events up to a number."""
        found: dict[str, Any] = {}
        status = self.status
        if status is not None and (status is not shown or self._next_seq > after_seq):
            found = news_view(self.events, after_seq, status.jobs)
        if status is not None and status is not shown:
            found |= {**status_view(status), "as_of": self._as_of, "every_s": self._every_s}
        return found

    # -- requests -----------------------------------------------------------------------------

    @web.middleware
    async def _guarded(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        refused = refusal(request, self.token)
        if refused is not None:
            return web.json_response({"error": refused[1]}, status=refused[0], headers=HEADERS)
        response = await handler(request)
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    async def _file(self, request: web.Request) -> web.StreamResponse:
        path = "/page.html" if request.path == "/" else request.path
        if path not in self._files:
            return web.Response(status=204)  # it has no icon
        return web.Response(body=self._files[path], content_type=TYPES[path.rpartition(".")[2]], charset="utf-8")

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        """Send JSON lines: first all that is known, then what is new, until the reader goes."""
        if self._readers_count == READERS_MAX:
            return web.json_response({"error": f"{READERS_MAX} readers are here already"}, status=503)
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "application/x-ndjson"})
        self._readers_count += 1
        self._has_readers.set()
        try:
            with contextlib.suppress(ConnectionResetError):  # the reader has gone: that is how a stream ends
                await response.prepare(request)
                await self._send_news(response)
        finally:
            self._readers_count -= 1
            if not self._readers_count:
                self._has_readers.clear()
        return response

    async def _send_news(self, response: web.StreamResponse) -> None:
        shown, after_seq, said, wrote_s = None, 0, "", time.monotonic()
        while True:
            after_seq = after_seq if after_seq <= self._next_seq else 0  # the store began again
            news, message = self._news, self._message(shown, after_seq)
            if message or self.problem != said:
                shown, after_seq, said = self.status, self._next_seq, self.problem
                line = json.dumps({**message, "store": self.name, "problem": said}, ensure_ascii=False)
                await response.write(line.encode() + b"\n")
                wrote_s = time.monotonic()
            elif time.monotonic() - wrote_s >= QUIET_S:
                await response.write(b"\n")
                wrote_s = time.monotonic()
            with contextlib.suppress(
                asyncio.TimeoutError
            ):  # a silent store brings no news, a quiet one news of nothing
                await asyncio.wait_for(news.wait(), QUIET_S)

    async def _loss(self, request: web.Request) -> web.StreamResponse:
        """Answer what each job would lose with the hosts of a domain; no host's answer is asked twice of one status."""
        level, name = request.query.get("level", ""), request.query.get("name", "")
        try:
            async with self._planning:  # one at a time: a plan of a large job takes the controller a while
                status = self.status
                if status is None:
                    status = await asyncio.to_thread(self.store.status)
                hosts = tuple(hosts_of(status, level, name))
                if not hosts:
                    return web.json_response({"error": f"the store has no {level} {name}"}, status=404)
                if (plans := self._plans.get(hosts)) is None:
                    asked = [AskPlan(job=row.job, lose=hosts) for row in status.jobs if row.attempt is not None]
                    plans = self._plans[hosts] = [await asyncio.to_thread(self.store.ask, each) for each in asked]
                return web.json_response({"hosts": hosts, "jobs": loss_view(plans)})
        except (MemstoreError, OSError) as error:
            return web.json_response({"error": str(error)}, status=502)
