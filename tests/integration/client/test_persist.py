"""A step is made durable because a process asked: store.persist(), memstore persist, SIGTERM (R31)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from repository import SUPPORT

import memstore
from memstore.cli import main
from memstore.config import Config
from memstore.errors import ConfigError
from memstore.shell.rank.sigterm import check_sigterm
from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankNursery, together

# -- persist ------------------------------------------------------------------------------------------
# `store.persist()` and `memstore persist` on real processes: a step is durable because a process asked (R31).


HOSTS = {"h0": {"rack": "r0", "memstore": "replica"}, "h1": {"rack": "r1", "memstore": "replica"}}


def run(cluster: ProcessCluster, *arguments: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """Return what `memstore persist` wrote to stdout, as JSON, and to stderr."""
    where = ["--store", cluster.config.store, "--arena-dir", cluster.config.arena_dir]
    result = CliRunner().invoke(main, ["persist", *arguments, *where, "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout) if result.stdout else {}, result.stderr


def test_a_person_and_a_reader_make_the_newest_step_durable(
    tmp_path: Path, nursery: RankNursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 0 alone is durable by the schedule; the command exits 0 once the marker of step 6 is there."""
    durable = tmp_path / "durable"
    durable.mkdir()
    with ProcessCluster(tmp_path / "cluster", HOSTS) as cluster:
        fleet = Fleet(cluster, nursery, durable=str(durable), durable_every=1000)
        ranks = fleet.begin(["h0", "h1"], last_step=0)
        ranks[0].call("wait", step=0, level="durable")
        together(ranks, "train", first=1, last=6)
        body, _ = run(cluster, "train", "--within", "60")
        assert (body["step"], body["is_durable"]) == (6, True)
        assert (durable / "train" / str(body["attempt"]) / "6" / "marker").exists()
        together(ranks, "train", first=7, last=8)
        monkeypatch.setenv("MEMSTORE_HOST", "h1")
        config = Config(store=cluster.config.store, arena_dir=cluster.config.arena_dir)
        with memstore.reader("train", config=config) as reader:
            assert reader.persist(timeout_s=60.0) == 8
        durable.rename(tmp_path / "away")
        durable.write_text("not a directory")
        body, _ = run(cluster, "train", "latest", "--within", "2", code=4)
        assert not body["is_durable"]
        assert str(durable) in body["problem"]
        assert "no committed step 99" in run(cluster, "train", "99", code=1)[1]


# -- sigterm ------------------------------------------------------------------------------------------
# SIGTERM makes the newest committed step durable, within its time, before it takes its course (R31).


PROGRAM = SUPPORT.joinpath("sigterm_rank.py")
ENDS_S = 60.0


def steps(durable: Path, job: str = "train") -> list[int]:
    """The steps of which a marker is there."""
    return sorted(int(marker.parent.name) for marker in durable.glob(f"{job}/*/*/marker"))


class Rank:
    """A rank that has put 60 steps, or begins to, and waits for SIGTERM in some way."""

    def __init__(
        self, program: subprocess.Popen[str], cluster: ProcessCluster, way: str, folder: Path, limit_s: float = 30.0
    ) -> None:
        self.program, self.folder, self.job = program, folder, way
        self.durable = folder / "durable"
        self.durable.mkdir(parents=True)
        (folder / "said").touch()
        config = {
            "store": cluster.config.store,
            "arena_dir": cluster.config.arena_dir,
            "durable": str(self.durable),
            "persist_on_sigterm_s": limit_s,
        }
        wish = {"way": way, "job": self.job, "folder": str(folder), "config": config}
        self.pid = int(self._order(json.dumps(wish)))
        wait_for(lambda: self.words()[:1] == ["ready"], f"ready in {folder}", ENDS_S)

    def _order(self, line: str) -> str:
        stdin, stdout = self.program.stdin, self.program.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(line + "\n")
        stdin.flush()
        return stdout.readline()

    def expects(self, *words: str) -> None:
        """Wait until the rank has said that, and nothing else."""
        wait_for(lambda: self.words() == list(words), f"{words} in {self.folder}", ENDS_S)

    def words(self) -> list[str]:
        """What it said."""
        return (self.folder / "said").read_text().split("\n")[:-1]

    def log(self) -> str:
        """What it logged."""
        return (self.folder / "log").read_text()

    def signal(self) -> None:
        """Send it SIGTERM."""
        os.kill(self.pid, signal.SIGTERM)

    def ends(self) -> int:
        """Wait for its end; return its exit code."""
        return int(self._order(""))

    def kill(self) -> None:
        """End it in any case."""
        os.kill(self.pid, signal.SIGKILL)
        self.ends()


@pytest.fixture(scope="module")
def program() -> Iterator[subprocess.Popen[str]]:
    """The process that forks ranks."""
    with subprocess.Popen(
        [sys.executable, str(PROGRAM)],
        env={**os.environ, "MEMSTORE_HOST": "h0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    """One host, for jobs of one rank."""
    with ProcessCluster(tmp_path_factory.mktemp("cluster"), {"h0": {}}) as cluster:
        yield cluster


def test_all_ranks_are_ended_and_the_newest_committed_step_is_durable(tmp_path: Path, nursery: RankNursery) -> None:
    """By its schedule only step 0 would be: three ranks ask, and there is one write."""
    durable = tmp_path / "durable"
    durable.mkdir()
    with ProcessCluster(tmp_path / "cluster", {"h0": {"rack": "r0"}, "h1": {"rack": "r1"}}) as cluster:
        fleet = Fleet(cluster, nursery, kib=16, durable=str(durable), durable_every=1000, persist_on_sigterm_s=30.0)
        ranks = fleet.begin(["h0", "h1", "h1"], last_step=0)
        ranks[0].call("wait", step=0, level="durable")
        together(ranks, "train", first=1, last=60)
        for process in ranks:
            process.send_signal(signal.SIGTERM)
        for process in ranks:
            with pytest.raises(EOFError):
                process.finish(ENDS_S)
        assert steps(durable) == [0, 60]
        written = [e for e in cluster.events("train") if e["event"] == "durable"]
        assert [e["step"] for e in written] == [0, 60]


@pytest.mark.parametrize(
    ("way", "code", "words"),
    [
        ("waits", -signal.SIGTERM, ["ready"]),
        ("hung", -signal.SIGTERM, ["ready"]),
        ("former", 7, ["ready", "former"]),
        ("loop", 0, ["ready", "former"]),
    ],
)
def test_what_was_there_before_happens_after_the_step_is_durable(
    tmp_path: Path, program: subprocess.Popen[str], cluster: ProcessCluster, way: str, code: int, words: list[str]
) -> None:
    """The default action, also of a main thread that hangs in C code; a handler; an event loop that learns signals."""
    rank = Rank(program, cluster, way, tmp_path)
    rank.signal()
    assert (rank.ends(), rank.words()) == (code, words), rank.log()
    assert max(steps(rank.durable, way)) == 60
    assert "rank 0: SIGTERM: step 60 is durable, after" in rank.log()


@pytest.mark.parametrize("way", ["ignored", "counted"])
def test_a_process_that_goes_on_after_a_signal_is_asked_again_by_the_next(
    tmp_path: Path, program: subprocess.Popen[str], cluster: ProcessCluster, way: str
) -> None:
    """An ignored one stays ignored, and a handler that lets training go on is called once for each."""
    rank = Rank(program, cluster, way, tmp_path)
    for count in (1, 2, 3):
        rank.signal()
        wait_for(lambda count=count: rank.log().count("step 60 is durable") == count, "the step on durable storage")
        rank.expects("ready", *(["former"] * count if way == "counted" else []))
    rank.kill()
    assert steps(rank.durable, way) == [0, 60]


def test_storage_that_hangs_holds_the_end_for_its_time_only(tmp_path: Path, program: subprocess.Popen[str]) -> None:
    """The log says what is waited for, and the process ends by the signal, also if there is no answer at all."""
    with ProcessCluster(tmp_path, {"h0": {}}, durable_gate=tmp_path / "gate") as cluster:
        rank = Rank(program, cluster, "hung", tmp_path / "hung", limit_s=6.0)
        rank.signal()
        assert rank.ends() == -signal.SIGTERM
        assert "the newest committed step is not durable after" in rank.log()
        assert "step 60: h0 still writes" in rank.log()
        assert not steps(rank.durable, "hung")
        rank = Rank(program, cluster, "waits", tmp_path / "alone", limit_s=2.0)
        cluster.kill_all()
        rank.signal()
        assert rank.ends() == -signal.SIGTERM
        assert "no answer: is the controller running?" in rank.log()


def test_children_that_are_ended_do_not_end_the_rank(
    tmp_path: Path, program: subprocess.Popen[str], cluster: ProcessCluster
) -> None:
    """Forked and ended at once, fifty times: each dies of SIGTERM, and nothing is written for it."""
    rank = Rank(program, cluster, "forked", tmp_path)
    rank.expects("ready", "forked")
    assert "SIGTERM" not in rank.log()
    rank.kill()


def test_after_close_nothing_is_left(tmp_path: Path, program: subprocess.Popen[str], cluster: ProcessCluster) -> None:
    """Handler and descriptor are those of before, and SIGTERM ends the process without a write."""
    rank = Rank(program, cluster, "closed", tmp_path)
    rank.expects("ready", "closed")
    rank.signal()
    assert rank.ends() == -signal.SIGTERM
    assert "SIGTERM" not in rank.log()
    assert 60 not in steps(rank.durable, "closed")


def test_where_it_cannot_work_connect_says_so(tmp_path: Path, nursery: RankNursery) -> None:
    """Without durable storage, and outside the main thread."""
    with ProcessCluster(tmp_path, {"h0": {}}) as cluster:
        fleet = Fleet(cluster, nursery, persist_on_sigterm_s=30.0)
        [process] = fleet.spawn(["h0"])
        failed = process.fails("connect", **fleet.connect_command(0, 1))
        assert (failed.error, "give durable= as well" in failed.message) == ("ConfigError", True)
    found: list[str] = []

    def check() -> None:
        try:
            check_sigterm(30.0, "/durable")
        except ConfigError as exc:
            found.append(str(exc))

    thread = threading.Thread(target=check, name="trainer")
    thread.start()
    thread.join()
    assert "connect() runs in thread 'trainer'" in found[0]
    check_sigterm(0.0, None)
