"""Peers are timed in processes of their own, bytes compared, and one that does not run is shown with the reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.peers import children, races
from benchmarks.peers.children import PeerFailed, Team
from benchmarks.report import __main__
from benchmarks.report.harness import Options
from benchmarks.rigs import gpt_tensors

NBYTES = 2 << 20


def own_interpreter(name: str) -> Path:
    """The environment of these tests for torch's own ways; none for what would have to be installed."""
    if name in ("memstore", "torch"):
        return Path(sys.executable)
    raise children.CannotInstall(f"no package index for {name} in this test")


@pytest.fixture(autouse=True)
def _no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "interpreter", own_interpreter)


@pytest.mark.long
def test_a_race_times_what_runs_and_names_what_does_not() -> None:
    """memstore and torch's saves have a number in every round; a peer without an environment has the reason."""
    stall, done = races.run("stall", Options(NBYTES, rounds=1, warmups=0, chunk_bytes=64 << 10))
    assert stall.absent == {races.DLROVER: "not installed: no package index for dlrover in this test"}
    assert set(stall.seconds) == set(done.seconds) >= {races.PUT, races.THREAD, races.PROCESS}
    assert all(0 < stall.seconds[label][0] <= done.seconds[label][0] for label in stall.seconds)
    assert stall.ratios[0].name == "put / DCP async_save, the quicker"
    assert "did not run" in __main__.rows(stall)


def test_a_contestant_that_fails_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    """Its last line becomes the reason; its processes and folders are gone."""
    before = set(Path("/dev/shm").glob("bench-*"))
    with Team("torch", NBYTES) as team:
        with pytest.raises(PeerFailed, match="no-such-kind"):
            team.round("dcp no-such-kind")
        processes = list(team._children)
    assert all(process.poll() is not None for process in processes)
    assert set(Path("/dev/shm").glob("bench-*")) <= before


def test_another_ranks_bytes_are_sent_from_the_own_and_from_torn_ones() -> None:
    """The expected state of a peer is the own one with its marks moved, bit for bit."""
    mine, theirs = gpt_tensors.gpt_state(NBYTES), gpt_tensors.gpt_state(NBYTES)
    gpt_tensors.mark(mine, 0)
    gpt_tensors.mark(theirs, 1000)
    for _ in range(3):
        gpt_tensors.touch(mine)
        gpt_tensors.touch(theirs)
    assert gpt_tensors.is_same_but(theirs, mine, 1000)
    assert gpt_tensors.is_same_but(mine, theirs, -1000)
    assert not gpt_tensors.is_same_but(mine, mine, 1000)
    gpt_tensors.tensors(theirs)[-1].view(-1)[-1] += 1
    assert not gpt_tensors.is_same_but(theirs, mine, 1000)


def test_an_environment_that_cannot_be_made_says_the_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip's words reach the results."""
    monkeypatch.undo()
    with pytest.raises(children.CannotInstall, match="last words"):
        children._run([sys.executable, "-c", "print('first'); raise SystemExit('last words')"])
