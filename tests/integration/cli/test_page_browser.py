"""The live page in headless Chromium, of a store of 1,000 hosts: content, widths, colours, keyboard, hostile text.

Where a Chromium is found (CHROMIUM names it, or PATH has it); it is spoken to through its debugging port.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeVar

import aiohttp
import pytest

from memstore.core.wire.calls import AskStatus, NoteDrill
from memstore.core.wire.codec import Request
from memstore.core.wire.messages import HostLost, Tick
from memstore.core.wire.replies import Status
from memstore.shell.page import server
from memstore.shell.page.server import PageServer
from memstore.testing.controller.fleet import JOB, ControllerFleet

R = TypeVar("R")
CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "headless_shell"))), None
)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: CHROMIUM does not name one, and PATH has none"),
    pytest.mark.xdist_group("chromium"),
]
HOSTS = 1000
LIMIT_S = 60.0
KEYS = {"Tab": (9, ""), "Enter": (13, "\r"), "Escape": (27, "")}


class FedStore:
    """A controller of HOSTS hosts, one of them dead, with a job that has put some steps."""

    def __init__(self) -> None:
        self.fleet, self.lock = ControllerFleet(HOSTS, ranks_per_host=1), threading.Lock()
        for step in range(1, 6):
            self.fleet.now += 1.0
            self.fleet.put(step)
        self.fleet.handle(HostLost("h00040", "<i>it closed</i> the connection"))
        self.fleet.handle(Tick())

    def ask(self, request: Request[R]) -> R:
        """Answer as the controller does."""
        with self.lock:
            return self.fleet.ask(request)

    def status(self) -> Status:
        """Answer as the controller does."""
        return self.ask(AskStatus())


@pytest.fixture(scope="module")
def store() -> FedStore:
    """One for all tests: they only look, and note drills."""
    return FedStore()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run Chromium; give the address of its debugging port."""
    profile = tmp_path_factory.mktemp("profile")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0"]
    command = [str(CHROMIUM), *options, f"--user-data-dir={profile}", "about:blank"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if "DevTools listening on ws://" in line)
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield line.split("ws://")[1].split("/")[0]
        finally:
            os.killpg(process.pid, signal.SIGKILL)


class Tab:
    """A tab of the browser; everything that its pages complain about or load is kept."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket, self.numbers = socket, itertools.count(1)
        self.complaints: list[str] = []
        self.loaded: list[str] = []

    async def do(self, method: str, **given: Any) -> Any:
        """Give an order; return its result."""
        number = next(self.numbers)
        await self.socket.send_json({"id": number, "method": method, "params": given})
        while True:
            said = await asyncio.wait_for(self.socket.receive_json(), LIMIT_S)
            if said.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(str(said["params"]))
            if said.get("method") == "Network.requestWillBeSent":
                self.loaded.append(said["params"]["request"]["url"])
            if said.get("id") == number:
                assert "error" not in said, said
                return said["result"]

    async def value(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        found = await self.do("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true in the page."""
        async with asyncio.timeout(LIMIT_S):
            while not await self.value(f"Boolean({expression})"):
                await asyncio.sleep(0.02)

    async def press(self, key: str) -> None:
        """Press a key."""
        code, text = KEYS[key]
        given = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.do("Input.dispatchKeyEvent", type="keyDown", **given, **({"text": text} if text else {}))
        await self.do("Input.dispatchKeyEvent", type="keyUp", **given)


@contextlib.asynccontextmanager
async def opened(
    browser: str, store: FedStore, *, token: str = "", link: str = "", width: int = 1440, scheme: str = "light"
) -> AsyncIterator[Tab]:
    """Serve the page and open it; it has loaded, though perhaps not its data."""
    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(PageServer(store, "fed", token).run("127.0.0.1", 0, ready.set_result))
    async with aiohttp.ClientSession() as session:
        try:
            url = f"http://127.0.0.1:{await asyncio.wait_for(ready, LIMIT_S)}/"
            async with session.put(f"http://{browser}/json/new?about:blank") as made:
                target = await made.json()
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                tab = Tab(socket)
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await tab.do(f"{domain}.enable")
                await tab.do(
                    "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
                )
                features = [{"name": "prefers-color-scheme", "value": scheme}]
                await tab.do("Emulation.setEmulatedMedia", features=features)
                await tab.do("Page.navigate", url=url + link)
                await tab.until(f"location.href.startsWith('{url}') && document.readyState === 'complete'")
                yield tab
                assert {address.split("#")[0].rpartition("/")[0] + "/" for address in tab.loaded} == {url}
            async with session.get(f"http://{browser}/json/close/{target['id']}") as closed:
                await closed.read()
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


SHOWN = "document.querySelectorAll('.cell[title]').length === 1000"


def play(browser: str, store: FedStore, look: Callable[[Tab], Awaitable[None]], **how: Any) -> None:
    """Open the page and look at it."""

    async def run() -> None:
        async with opened(browser, store, **how) as tab:
            await look(tab)

    asyncio.run(run())


def test_the_page_of_a_thousand_hosts_shows_all_of_them(browser: str, store: FedStore) -> None:
    """Racks with their hosts, the job's exposure and its plot, events; no complaint, and no other host is asked."""

    async def look(tab: Tab) -> None:
        await tab.until(SHOWN)
        assert await tab.value("document.title") == "memstore fed"
        assert await tab.value("document.getElementById('h-hosts').textContent") == "Hosts: 1,000"
        assert await tab.value("document.querySelectorAll('#groups details').length") == 32
        assert await tab.value("document.querySelectorAll('.cell.dead[title]').length") == 1
        assert await tab.value("document.querySelectorAll('#groups details[open]').length") == 0  # so many are closed
        assert await tab.value("document.querySelectorAll('#groups tbody tr').length") == 0  # and not drawn
        job = await tab.value("document.querySelector('#jobs article').innerText")
        assert [word in job for word in (JOB, "at risk now", "copies", "survives")] == [True] * 4
        points = await tab.value(
            "document.querySelector('polyline.committed').getAttribute('points').split(' ').length"
        )
        assert points == 5
        label = await tab.value("document.querySelector('#jobs svg').getAttribute('aria-label')")
        assert label.startswith("Seconds of steps 1 to 5; the last: stall 10 ms")
        assert "h00040" in await tab.value("document.getElementById('events').innerText")
        await tab.value("document.getElementById('level').value = '0'; drawEvents()")
        assert "step 5 put by 1,000 ranks" in await tab.value("document.getElementById('events').innerText")
        assert tab.complaints == []

    play(browser, store, look)


CONTRAST = """
(() => {
  const linear = (part) => part / 255 <= 0.03928 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4;
  const light = (colour) => {
    const [red, green, blue] = colour.match(/[0-9.]+/g).map(linear);
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const behind = (node) => {
    const own = getComputedStyle(node).backgroundColor;
    return own === "rgba(0, 0, 0, 0)" ? behind(node.parentNode) : light(own);
  };
  const contrast = (node) => {
    const both = [light(getComputedStyle(node).color), behind(node)];
    return (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
  };
  const texts = "h1, h2, h3, p, li, dt, dd, summary, button, small, span, strong, td, th, label, select";
  const shown = [...document.querySelectorAll(texts)].filter((node) => node.textContent);
  return [behind(document.body), Math.min(...shown.map(contrast))];
})()
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1440])
def test_every_width_and_scheme_can_be_read(width: int, scheme: str, browser: str, store: FedStore) -> None:
    """Nothing is wider than the screen, also with a rack open and in the dialog; texts stand out."""

    async def look(tab: Tab) -> None:
        await tab.until(SHOWN)
        await tab.value("document.querySelectorAll('details').forEach((node, at) => { node.open = at < 3; })")
        await tab.until("document.querySelector('#groups tbody tr')")
        assert await tab.value("document.documentElement.scrollWidth") <= width
        await tab.value("document.querySelector('#groups tbody button').click()")
        await tab.until("document.querySelector('#losses .whole')")
        assert await tab.value("document.documentElement.scrollWidth") <= width
        assert await tab.value("document.getElementById('loss').scrollWidth") <= width
        behind, contrast = await tab.value(CONTRAST)
        assert (behind < 0.1) == (scheme == "dark")
        assert contrast >= 4.5  # WCAG 2.2, AA

    play(browser, store, look, width=width, scheme=scheme)


def test_the_keyboard_alone_opens_a_rack_and_asks_for_a_loss(
    browser: str, store: FedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the focus is can be seen; Escape leads back to where it was, also after a newer status was drawn."""
    monkeypatch.setattr(server, "SHARE", 1.0)

    async def look(tab: Tab) -> None:
        focused = "document.activeElement"

        async def tab_to(condition: str) -> None:
            async with asyncio.timeout(LIMIT_S):
                while not await tab.value(condition):
                    await tab.press("Tab")

        await tab.until(SHOWN)
        await tab_to(f"{focused}.textContent.startsWith('rack r1 ')")
        assert await tab.value(f"getComputedStyle({focused}).outlineStyle") == "solid"
        await tab.press("Enter")
        await tab.until(f"{focused}.parentNode.open && {focused}.parentNode.querySelector('tbody tr')")
        await tab.press("Tab")
        assert await tab.value(f"{focused}.textContent") == "If rack r1 died…"
        await tab.press("Tab")
        assert await tab.value(f"{focused}.textContent") == "h00032"
        await tab.press("Enter")
        await tab.until("document.querySelector('#losses .whole')")
        assert await tab.value("document.getElementById('h-loss').textContent") == "If host h00032 died now"
        assert "losing h00032 now restores step 5" in await tab.value("document.getElementById('losses').innerText")
        assert await tab.value(f"document.getElementById('loss').contains({focused})")
        await tab.press("Escape")
        assert not await tab.value("document.getElementById('loss').open")
        before = await tab.value("document.getElementById('as-of').textContent")
        await tab.until(f"document.getElementById('as-of').textContent !== {before!r}")
        assert await tab.value(f"{focused}.textContent") == "h00032"

    play(browser, store, look)


def test_texts_of_the_store_are_never_markup(browser: str, store: FedStore) -> None:
    """Drills, hosts and errors say what they like."""
    hostile = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
    store.ask(NoteDrill(job="drill-hostile", phase="<b>inject</b>", text=hostile))

    async def look(tab: Tab) -> None:
        await tab.until(SHOWN)
        assert hostile in await tab.value("document.getElementById('drills').innerText")
        assert "<i>it closed</i>" in await tab.value("document.getElementById('events').innerText")
        assert await tab.value("document.querySelectorAll('main img, main script, main b').length") == 0
        assert await tab.value("document.title") == "memstore fed"

    play(browser, store, look)


def test_a_token_is_asked_for_or_comes_with_the_link(browser: str, store: FedStore) -> None:
    """It leaves the address bar at once, and a wrong one shows nothing."""
    token = "0123456789abcdefghij"

    async def typed(tab: Tab) -> None:
        await tab.until("!document.getElementById('token').hidden")
        assert not await tab.value(SHOWN)
        for given in ("wrong", token):
            await tab.value(f"document.querySelector('#token input').value = '{given}'")
            await tab.value("document.querySelector('#token button').click()")
        await tab.until(f"{SHOWN} && document.getElementById('token').hidden")

    async def followed(tab: Tab) -> None:
        await tab.until(SHOWN)
        assert token not in await tab.value("location.href")

    play(browser, store, typed, token=token)
    play(browser, store, followed, token=token, link=f"#{token}")
