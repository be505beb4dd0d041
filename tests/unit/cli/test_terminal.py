"""Tables on 80 columns and in a pipe, with the names that clusters have; `status --watch`; progress bars."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator

import pytest
from cli_store import Desk

from memstore.cli.output import progress_bar
from memstore.testing.controller.world import ControllerWorld, describe

HOSTS = [f"ip-10-20-{n}-{n}.eu-central-1.compute.internal-3f9a1c{n:02x}" for n in range(12)]
JOBS = ("llama3-8b-pretrain-fineweb-edu-lr3e-4-warmup2000-seed17-retry03a", "e" * 64)
PIN = "best-before-the-learning-rate-was-lowered-for-the-second-time-xyz"[:64]
TABLES = (
    ["status"],
    ["ls"],
    ["plan"],
    ["plan", "--lose", HOSTS[3], HOSTS[4]],
    ["plan", "--bill"],
    ["metrics"],
    ["metrics", "--list"],
    ["verify"],
)


@pytest.fixture(scope="module", params=[0, 3], ids=["copies", "parity"])
def crowded(request: pytest.FixtureRequest) -> Iterator[Desk]:
    """Twelve hosts in three racks, one dead, one to go; two jobs with names of 64 characters, one with a pin."""
    labels = {host: {"zone": "eu-central-1a", "rack": f"rack-{n % 3}"} for n, host in enumerate(HOSTS)}
    world = ControllerWorld(HOSTS, labels=labels, keep_steps=2, parity=request.param)
    for job in JOBS:
        ranks = world.launch(len(HOSTS), job=job)
        world.get(ranks)
        for step in (17_999, 18_000):
            assert world.put_all(ranks, step), describe(world)
    with pytest.MonkeyPatch.context() as patch:
        desk = Desk(patch, world, ranks[0])
        assert desk.run("pin", JOBS[0], "18000", PIN).exit_code == 0
        world.call(ranks[0], "drain", host=HOSTS[1], within_s=60.0)
        world.kill_host(HOSTS[2])
        world.run(10.0)
        yield desk


@pytest.mark.parametrize("verb", TABLES, ids=lambda verb: " ".join(verb)[:20])
def test_a_table_fits_80_columns_and_a_pipe(crowded: Desk, monkeypatch: pytest.MonkeyPatch, verb: list[str]) -> None:
    """On the terminal no line is longer and every name whole; a pipe has one line for a row, no colour, nothing cut."""
    monkeypatch.delenv("COLUMNS", raising=False)
    piped = crowded.run(*verb).stdout
    monkeypatch.setenv("COLUMNS", "80")
    shown = crowded.run(*verb).stdout
    assert max(map(len, shown.splitlines())) <= 80
    for text in (piped, shown):
        assert not re.search("\x1b|…", text)
    names = [name for name in (*HOSTS, *JOBS, PIN) if name in piped]
    assert [name for name in names if name not in shown] == []
    if verb == ["status"]:
        assert {*HOSTS, *JOBS} <= {*names}
        assert all(sum(line.startswith(name) for line in piped.splitlines()) == 1 for name in (*HOSTS, *JOBS))
        lines = shown.splitlines()
        sizes = [lines.index(b) - lines.index(a) for a, b in zip(sorted(HOSTS), sorted(HOSTS)[1:], strict=False)]
        assert sorted(sizes)[len(sizes) // 2] <= 5, "a host takes a few lines, not one for each cell"


def watched(desk: Desk, *typed: str, for_s: float) -> list[str]:
    """Return the lines that `status --watch` prints until Ctrl-C, which comes after so long."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    desk.world.at(for_s, interrupt)
    result = desk.run("status", *typed)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    world = ControllerWorld(2)
    ranks = world.launch(2)
    world.get(ranks)
    assert world.put_all(ranks, 1)
    return Desk(monkeypatch, world, ranks[0])


def test_watch_goes_on_while_the_controller_is_away(desk: Desk) -> None:
    """Each look is a line of JSON; those in vain say so, and the store is seen again."""
    desk.world.at(4.0, lambda: desk.world.crash_controller(restart_after_s=25.0))
    looks = [json.loads(line) for line in watched(desk, "--watch", "2", "--json", for_s=60.0)]
    failed = ["error" in look for look in looks]
    first, last = failed.index(True), len(failed) - failed[::-1].index(True)
    assert 0 < first < last < len(failed), failed
    assert "'status'" in looks[first]["error"] or "status" in looks[first]["error"]


def test_watch_looks_as_often_as_it_is_told(desk: Desk) -> None:
    """At most once in a second by default; a controller must not be asked for more."""
    assert 8 <= len(watched(desk, "--watch", "--json", for_s=10.5)) <= 11
    assert 2 <= len(watched(desk, "--watch", "4", "--json", for_s=10.5)) <= 3
    for text in ("0.5", "0", "-1", "often"):
        assert desk.run("status", "--watch", text).exit_code == 2
    assert "give one of them" in desk.run("status", "--watch", "--check").stderr
    assert "once" in desk.run("status", "--watch", "3", "--offline").stderr


def test_watch_into_a_pipe_is_one_screen_after_the_other(desk: Desk) -> None:
    lines = watched(desk, "--watch", for_s=2.5)
    assert sum(line.startswith("memstore ") for line in lines) == 3
    assert not re.search("\x1b|…", "\n".join(lines))


# -- progress bars ------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """What is written to a terminal."""

    def isatty(self) -> bool:
        return True


def drawn(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, error: type[BaseException] | None) -> str:
    """Return what a bar writes to stderr while hosts come, until all have or something is raised."""
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with contextlib.suppress(error or ()), progress_bar("starting default", unit="hosts") as tell:
        tell(done=3, total=12)
        if error is not None:
            raise error
        tell(9)
    return stream.getvalue()


def test_a_bar_says_what_it_waits_for_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn on a terminal alone; at its end, by whatever, its line is erased and the cursor is there again."""
    for error, count in ((None, "12/12"), (OSError, "3/12"), (KeyboardInterrupt, "3/12")):
        text = drawn(monkeypatch, Terminal(), error)
        assert re.search(rf"starting default .*{count} .*hosts", re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", text))
        assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
        assert text.endswith("\x1b[2K")
        assert drawn(monkeypatch, io.StringIO(), error) == ""


def test_a_bar_of_bytes_says_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", stream := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar("digesting", 80 << 30) as tell:
        tell(12 << 30)
    assert "12.0/80.0 GiB" in re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", stream.getvalue())
