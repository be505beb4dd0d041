"""`memstore page` over HTTP: what it sends, who may read it, and how often it asks the store."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import aiohttp
import pytest
from cli_store import open_store, run
from click.testing import CliRunner
from msgspec.structs import replace

from memstore.cli import main
from memstore.cli.page import TOKEN_VARIABLE, given_token
from memstore.core.wire.calls import AskEvents, AskPlan, AskStatus, NoteDrill
from memstore.core.wire.codec import Request
from memstore.core.wire.replies import Status
from memstore.errors import ConfigError, PeerTimeout
from memstore.shell.page import server
from memstore.shell.page.server import PageServer, is_loopback
from memstore.testing.clusters.processes import ProcessCluster
from memstore.testing.controller.fleet import ControllerFleet

R = TypeVar("R")
TOKEN = "0123456789abcdefABCDEF"
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    """A store with a trained job."""
    with open_store(tmp_path_factory.mktemp("page")) as cluster:
        yield cluster


@contextlib.contextmanager
def served(cluster: ProcessCluster, *typed: str, token: str = "") -> Iterator[str]:
    """Run `memstore page` as a person does, on a free port; give its URL."""
    command = [sys.executable, "-m", "memstore.cli", "page", "--store", cluster.config.store, "--port", "0", *typed]
    environment = {**os.environ, TOKEN_VARIABLE: token}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as page:
        try:
            assert page.stdout is not None
            yield page.stdout.readline().strip()
        finally:
            page.send_signal(signal.SIGINT)
            page.wait(LIMIT_S)
            assert page.returncode == 130


def answer(url: str, path: str = "", **headers: str) -> tuple[int, str, Any]:
    """Return status, text and headers of a GET."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url.partition("#")[0] + path, headers=named)
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as found:
            return found.status, found.read().decode(), found.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), error.headers


@contextlib.contextmanager
def stream(url: str, **headers: str) -> Iterator[Iterator[dict[str, Any]]]:
    """Give the messages of the stream as they come."""
    request = urllib.request.Request(url.partition("#")[0] + "stream", headers=headers)
    with urllib.request.urlopen(request, timeout=LIMIT_S) as lines:
        yield (json.loads(line) for line in lines if line.strip())


def test_the_page_shows_the_store_and_what_happens_on_it(store: ProcessCluster) -> None:
    """Hosts by rack, the job and its last steps at once; an event a moment after it happened."""
    with served(store) as url:
        assert url.startswith("http://127.0.0.1:")
        code, html, headers = answer(url)
        assert (code, '<h2 id="h-hosts">' in html) == (200, True)
        assert headers["Content-Security-Policy"].startswith("default-src 'self';")
        assert "llama3" not in html
        assert [answer(url, path)[0] for path in ("page.js", "page.css", "nothing", "page.py")] == [200, 200, 404, 404]
        with stream(url) as messages:
            first = next(messages)
            racks = {group["name"]: [host["host"] for host in group["hosts"]] for group in first["groups"]}
            assert racks == {"r1": ["h1", "h3"], "r2": ["h2"]}
            assert [(job["job"], job["copies"]) for job in first["jobs"]] == [("llama3-8b", "2 of 2")]
            assert [step["step"] for step in first["told"]["llama3-8b"]["steps"]] == [0, 1, 2]
            store.ask(NoteDrill(job="drill-x", phase="inject", text="<b>SIGKILL</b>"))
            drill = next(message["drills"] for message in messages if message.get("drills"))
            assert drill[0]["told"][0][1:] == ["inject", "<b>SIGKILL</b>"]


def test_a_loss_is_told_in_the_words_of_plan(store: ProcessCluster) -> None:
    """Of a host, and of a rack with all its hosts; what is not there is said."""
    with served(store) as url:
        for query, typed in (("level=host&name=h2", "h2"), ("level=rack&name=r1", "rack=r1")):
            found = json.loads(answer(url, f"loss?{query}")[1])
            printed = run(store, "plan", "--lose", typed).stdout.splitlines()
            assert found["jobs"][0]["lines"] == [line.strip() for line in printed[: len(found["jobs"][0]["lines"])]]
        assert found["hosts"] == ["h1", "h3"]
        code, text, _ = answer(url, "loss?level=rack&name=%3Cimg%3E")
        assert (code, json.loads(text)) == (404, {"error": "the store has no rack <img>"})


def test_a_page_without_a_token_answers_to_this_machines_names_alone(store: ProcessCluster) -> None:
    """Neither a name that was bound to this address, nor another site's page gets data."""
    with served(store) as url:
        port = url.rstrip("/").rpartition(":")[2]
        for name, code in (("localhost", 200), ("[::1]", 200), ("evil.example", 403), ("localhost.evil:x", 403)):
            assert answer(url, Host=f"{name}:{port}")[0] == code, name
        assert answer(url, "loss?level=host&name=h1", Sec_Fetch_Site="cross-site")[0] == 403
        assert answer(url, "loss?level=host&name=h1", Sec_Fetch_Site="same-origin")[0] == 200


def test_beyond_loopback_a_token_is_made_and_demanded(store: ProcessCluster) -> None:
    """Of every request for data; the page itself has none, so that it can ask for the token."""
    with served(store, "--bind", "0.0.0.0") as printed:
        url, _, token = printed.partition("#")
        here = f"http://127.0.0.1:{url.rstrip('/').rpartition(':')[2]}/"
        assert len(token) >= 32
        assert answer(here)[0] == 200
        for wrong in ({}, {"Authorization": f"Bearer {token[:-1]}"}, {"Authorization": f"Bearer {token}é"}):
            assert [answer(here, path, **wrong)[0] for path in ("stream", "loss?level=host&name=h1")] == [401, 401]
        assert answer(here, "loss?level=host&name=h1", Authorization=f"Bearer {token}")[0] == 200
        with stream(here, Authorization=f"Bearer {token}") as messages:
            assert next(messages)["store"] == store.config.store


def test_a_token_may_be_given_on_loopback_too(store: ProcessCluster) -> None:
    """Where other users of the machine are to read nothing."""
    with served(store, "--json", token=TOKEN) as printed:
        found = json.loads(printed)
        assert found["token"] == TOKEN
        assert answer(found["url"], "stream")[0] == 401


def test_tokens_that_are_short_or_that_others_can_read_are_refused(tmp_path: Path) -> None:
    """With the way out; a good one is taken as it stands in the file."""
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        given_token(str(file), "")
    file.chmod(0o600)
    assert given_token(str(file), "") == TOKEN
    for bad in ("short", "0123456789 abcdef 0123", "0123456789abcdé0123456"):
        with pytest.raises(ConfigError, match="openssl rand"):
            given_token(None, bad)
    file.write_text("")
    with pytest.raises(ConfigError, match="has 0 characters"):
        given_token(str(file), "")
    assert given_token(None, "") == ""


NEAR, FAR = (
    ("127.0.0.1", "127.8.8.8", "::1", "localhost"),
    ("0.0.0.0", "::", "10.1.2.3", "h1.example", "127.0.0.1.nip.io"),
)


@pytest.mark.parametrize("address", [*NEAR, *FAR])
def test_what_counts_as_loopback(address: str) -> None:
    """A name other than localhost may be anything."""
    assert is_loopback(address) is (address in NEAR)


def test_a_port_that_is_taken_is_said_with_the_way_out(store: ProcessCluster) -> None:
    """One line, no traceback."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(main, ["page", "--store", store.config.store, "--port", port])
    assert (result.exit_code, f"port {port}" in result.stderr, "--port" in result.stderr) == (1, True, True)


# -- how often the store is asked ---------------------------------------------------------------------


class Counted:
    """A store that counts what it is asked, and fails if told so."""

    def __init__(self) -> None:
        self.fleet = ControllerFleet(4, ranks_per_host=1)
        self.fleet.put(1)
        self.asked: list[str] = []
        self.problem = ""
        self.on_ask: Callable[[Request[Any]], None] = lambda request: None

    def ask(self, request: Request[R]) -> R:
        """Answer as the controller does."""
        self.asked.append(type(request).__name__)
        self.on_ask(request)
        if self.problem:
            raise PeerTimeout(self.problem)
        return self.fleet.ask(request)

    def status(self) -> Status:
        """Answer as the controller does."""
        return self.ask(AskStatus())


@contextlib.asynccontextmanager
async def reached(store: Counted, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[aiohttp.ClientSession]:
    """Serve a store's page in this process, with quick rounds; give a session with its server."""
    monkeypatch.setattr(server, "EVENTS_S", 0.01)
    monkeypatch.setattr(server, "QUIET_S", 0.05)
    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(PageServer(store, "fed", "").run("127.0.0.1", 0, ready.set_result))
    try:
        port = await asyncio.wait_for(ready, LIMIT_S)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            yield session
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def message(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """Return the next message of a stream."""
    while True:
        line = await asyncio.wait_for(response.content.readline(), LIMIT_S)
        assert line, "the stream ended"
        if line.strip():
            found: dict[str, Any] = json.loads(line)
            return found


async def some_rounds(session: aiohttp.ClientSession) -> None:
    """Let as much time pass as many rounds of questions take, and load the page meanwhile."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + 20 * server.EVENTS_S
    while loop.time() < end_s:
        async with session.get("/") as response:
            await response.read()


def test_the_store_is_asked_only_while_somebody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by a page that is loaded and has no stream, and no more once the last reader is found to be gone."""
    store = Counted()
    monkeypatch.setattr(server, "STATUS_S", 3600.0)  # one is due while both read

    async def play() -> None:
        async with reached(store, monkeypatch) as session:
            await some_rounds(session)
            assert store.asked == []
            async with session.get("/stream") as first, session.get("/stream") as second:
                assert (await message(first))["groups"] == (await message(second))["groups"]
                assert store.asked.count("AskStatus") == 1  # for both
            before = -1
            while before != len(store.asked):  # until nothing is asked any more
                before = len(store.asked)
                await some_rounds(session)

    asyncio.run(play())
    assert store.asked.count("AskStatus") == 1


def test_a_store_that_does_not_answer_is_said_and_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is shown stays, with the reason; the reader need not load the page again."""
    store = Counted()

    async def play() -> None:
        async with reached(store, monkeypatch) as session, session.get("/stream") as reader:
            assert (await message(reader))["problem"] == ""
            store.problem = "the controller did not answer"
            assert (await message(reader))["problem"] == "the controller did not answer"
            async with session.get("/loss?level=host&name=h00001") as response:
                assert (response.status, await response.json()) == (502, {"error": "the controller did not answer"})
            store.problem = ""
            assert (await message(reader))["problem"] == ""
            async with session.get("/loss?level=host&name=h00001") as response:
                assert [job["outcome"] for job in (await response.json())["jobs"]] == ["whole"]

    asyncio.run(play())


def test_a_loss_is_planned_once_for_all_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of a large job is work for the controller: the same question waits for the same answer."""
    store = Counted()

    async def play() -> None:
        async with reached(store, monkeypatch) as session:

            async def loss() -> Any:
                async with session.get("/loss?level=rack&name=r0") as response:
                    return await response.json()

            answers = await asyncio.gather(*(loss() for _ in range(5)))
            assert answers == [answers[0]] * 5

    asyncio.run(play())
    assert store.asked.count(AskPlan.__name__) == 1


def test_readers_beyond_the_limit_are_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs memory; the others go on."""
    monkeypatch.setattr(server, "READERS_MAX", 1)

    async def play() -> None:
        async with reached(Counted(), monkeypatch) as session, session.get("/stream") as reader:
            await message(reader)
            async with session.get("/stream") as second:
                assert second.status == 503

    asyncio.run(play())


@pytest.mark.parametrize("took_s", [0.001, 0.25, 2.0])
def test_a_status_is_asked_so_rarely_that_it_takes_its_share(took_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it costs: in virtual time, with a round a second."""
    store, now_s = Counted(), [0.0]
    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=lambda: now_s[0], time=lambda: 0.0))

    def passes(request: Request[Any]) -> None:
        now_s[0] += took_s if isinstance(request, AskStatus) else server.EVENTS_S

    store.on_ask = passes

    async def play() -> None:
        page = PageServer(store, "fed", "")
        await page._look()
        assert page._every_s <= 15.0  # one slow answer makes no reader wait for minutes
        while now_s[0] < 8000.0:
            await page._look()

    asyncio.run(play())
    statuses = store.asked.count("AskStatus")
    assert 2 <= statuses <= now_s[0] / server.STATUS_S + 1
    assert statuses * took_s <= 0.01 * now_s[0]
    assert store.asked.count(AskEvents.__name__) >= 0.9 * 8000.0 / server.EVENTS_S


def test_another_store_under_the_same_name_is_shown_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers of events begin below those of the one before."""
    store = Counted()
    real = store.ask

    async def play() -> None:
        page = PageServer(store, "fed", "")
        monkeypatch.setattr(server, "STATUS_S", 0.0)
        monkeypatch.setattr(server, "SHARE", 1e9)
        monkeypatch.setattr(store, "status", lambda: replace(real(AskStatus()), term=9))
        page._next_seq = 9 * 10**9
        await page._look()
        assert not page.events
        monkeypatch.undo()
        page._due_s = 0.0
        await page._look()
        assert {"attempt", "put", "commit"} <= {row.event for row in page.events}

    asyncio.run(play())
