"""Rewinds and pins over real holders: bytes compared with what was put, through kills (R10, R22)."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import memstore
from memstore.admin.cluster import refuse_last_copies
from memstore.cli import main
from memstore.client.reader import Reader
from memstore.core.arena.slot_table import SlotState
from memstore.errors import CapacityError, ConfigError
from memstore.shell.rank.admin_link import Tool
from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankFailed, RankNursery, RankProcess, together
from memstore.testing.ranks.states import compare, make_state

HOSTS = {"h0": {"memstore": "replica"}, "h1": {"memstore": "replica"}}
TWO = ["h0", "h1"]


def restart_everything(cluster: ProcessCluster) -> None:
    """SIGKILL of every holder and the controller; new ones adopt what lies in memory."""
    cluster.kill_all()
    cluster.start_controller()
    for host in cluster.labels:
        cluster.start_holder(host)
    cluster.wait_live(*cluster.labels)


def commit_each(ranks: list[RankProcess], first: int, last: int) -> None:
    """Commit every one of the steps: a newer commit would supersede one that is slow."""
    for step in range(first, last + 1):
        together(ranks, "train", first=step, last=step)


def lineage(cluster: ProcessCluster, job: str = "train") -> list[tuple[int, int]]:
    """(attempt, step) of the committed steps of the lineage, newest first."""
    found = cluster.job(job) or {"steps": []}
    return [(s["attempt"], s["step"]) for s in found["steps"] if s["committed"] and s["in_lineage"]]


def steps_in_ram(cluster: ProcessCluster, job: str = "train") -> list[int]:
    """Steps with a copy in RAM, newest first."""
    return [step["step"] for step in (cluster.job(job) or {"steps": []})["steps"] if step["shards"]]


def used_slots(cluster: ProcessCluster) -> dict[str, int]:
    """Sealed slots by host, as the files say."""
    return {
        host: sum(state == SlotState.SEALED for state, _, _ in cluster.inventory(host)["slots"])
        for host in cluster.labels
    }


def read(cluster: ProcessCluster, job: str, step: int, kib: int, size: int = 2) -> bool:
    """Read every rank's shard on its own and compare it with what was put."""
    with Reader(job, Tool(cluster.arena("h1")), cluster.config) as reader:
        for rank in range(size):
            got = reader.get(step, rank=rank)
            if compare(got.state, make_state(1, job, 1, rank, step, kib * 512))[1]:
                return False
    return True


def test_three_kept_steps_a_rewind_to_the_oldest_and_a_restart(tmp_path: Path, nursery: RankNursery) -> None:
    """keep_steps=3, back to the oldest of them, two steps on, everything killed: the new lineage comes back."""
    with ProcessCluster(tmp_path, HOSTS) as cluster:
        fleet = Fleet(cluster, nursery, keep_steps=3, kib=64)
        ranks = fleet.begin(TWO, last_step=0)
        commit_each(ranks, 1, 4)
        wait_for(lambda: lineage(cluster) == [(1, 4), (1, 3), (1, 2)], "three kept steps")
        assert [reply["attempt"] for reply in together(ranks, "rewind", step=2)] == [2, 2]
        got = together(ranks, "get")
        fleet.check(got)
        assert got[0]["step"] == 2
        commit_each(ranks, 3, 4)
        wait_for(lambda: lineage(cluster) == [(2, 4), (2, 3), (1, 2)], "the new lineage")
        fleet.kill(ranks)
        restart_everything(cluster)
        _, got_again = fleet.resume(TWO)
        assert (got_again["step"], got_again["attempt"]) == (4, 2)
        shown = CliRunner().invoke(main, ["ls", "train", "--store", cluster.config.store]).stdout
        assert [line.split()[:3] for line in shown.splitlines() if line.startswith("*-")] == [
            ["*-", "attempt", "3"],
            ["*-", "attempt", "2"],
            ["*-", "attempt", "1"],
        ]
        assert "attempt 2 from step 2 of attempt 1" in shown


def test_a_pinned_step_outlives_fresh_starts_and_kills(tmp_path: Path, nursery: RankNursery) -> None:
    """The bytes of a pinned step are there after ten commits, a kill of everything and connect(fresh=True)."""
    with ProcessCluster(tmp_path, HOSTS) as cluster:
        fleet = Fleet(cluster, nursery, kib=64)
        ranks = fleet.begin(TWO, last_step=2)
        ranks[1].call("pin", step=2, name="best")
        together(ranks, "train", first=3, last=8)
        assert read(cluster, "train", 2, 64)
        fleet.kill(ranks)
        restart_everything(cluster)
        ranks = fleet.launch(TWO, fresh=True)
        together(ranks, "train", first=20, last=22)
        assert read(cluster, "train", 2, 64)
        wait_for(lambda: [s["step"] for s in (cluster.job("train") or {})["steps"]] == [22, 2], "the pinned step alone")
        assert [reply["attempt"] for reply in together(ranks, "rewind", step=2)] == [3, 3]
        got = together(ranks, "get")
        fleet.check(got)
        assert got[0]["step"] == 2
        ranks[0].call("unpin", name="best")
        together(ranks, "train", first=3, last=4)
        wait_for(lambda: lineage(cluster) == [(3, 4)], "what nothing keeps is dropped")


def test_ranks_go_back_to_the_trusted_step_and_to_the_next_one(tmp_path: Path, nursery: RankNursery) -> None:
    """Hosts are killed with their memory or without; the bytes of the last good step come back, each time (R38)."""
    with ProcessCluster(tmp_path, HOSTS) as cluster:
        fleet = Fleet(cluster, nursery, kib=64)
        ranks = fleet.begin(TWO, last_step=2)
        assert ranks[1].call("trust", step=2)["step"] == 2
        together(ranks, "train", first=3, last=6)
        fleet.kill(ranks)
        restart_everything(cluster)
        ranks = fleet.launch(TWO)
        got = together(ranks, "get", trusted=True)
        fleet.check(got)
        assert [reply["step"] for reply in got] == [2, 2]
        together(ranks, "train", first=3, last=4)
        assert lineage(cluster) == [(2, 4), (1, 2)]
        said = CliRunner().invoke(main, ["trust", "train", "latest", "--store", cluster.config.store]).output
        assert said == "step 4 of train (attempt 2) is trusted\n"
        together(ranks, "train", first=5, last=6)
        fleet.kill(ranks)
        cluster.lose_host("h1")
        cluster.start_holder("h1")
        cluster.wait_live(*HOSTS)
        ranks = fleet.launch(TWO)
        got = together(ranks, "get", trusted=True)
        fleet.check(got)
        assert [(reply["attempt"], reply["step"]) for reply in got] == [(2, 4), (2, 4)]


def test_a_rank_whose_numbers_are_not_finite_keeps_the_good_step_for_all(tmp_path: Path, nursery: RankNursery) -> None:
    """One rank's NaN gives the step up on both, by its tensor's name; the next good one is committed again (R39)."""
    with ProcessCluster(tmp_path, HOSTS) as cluster:
        fleet = Fleet(cluster, nursery, on_nonfinite="skip")
        ranks = fleet.launch(TWO)
        together(ranks, "get")
        together(ranks, "put_number", step=1, number=0.5)
        together(ranks, "wait", step=1)
        ranks[0].call("put_number", step=2, number=0.25)
        put = ranks[1].call("put_number", step=2, number=float("nan"))
        assert (put["level"], "state['model']['weights']" in put["reason"]) == ("failed", True)
        wait_for(lambda: ranks[0].call("ticket", step=2)["level"] == "skipped", "the other rank's step is given up")
        assert lineage(cluster) == [(1, 1)]
        status = CliRunner().invoke(main, ["status", "--store", cluster.config.store]).output
        assert "rank 1 puts NaN or infinity since step 2, in state['model']['weights']" in " ".join(status.split())
        together(ranks, "put_number", step=3, number=0.125)
        together(ranks, "wait", step=3)
        assert lineage(cluster) == [(1, 3)]
        wait_for(lambda: not (cluster.job("train") or {})["newest"]["nonfinite"], "all numbers are finite again")


def test_a_pin_that_does_not_fit_is_refused_with_numbers(tmp_path: Path, nursery: RankNursery) -> None:
    """An arena with room for the job and not for a pin: CapacityError, and commits go on as before (R10)."""
    with ProcessCluster(tmp_path, HOSTS, arena_bytes=1 << 20) as cluster:
        fleet = Fleet(cluster, nursery, kib=256)
        ranks = fleet.begin(TWO, last_step=1)
        with Reader("train", Tool(cluster.arena("h0")), cluster.config) as reader:
            with pytest.raises(CapacityError, match=r"a pin takes room of its own.*needs .* MiB, may take 1.0 MiB"):
                reader.pin(1, "best")
            with pytest.raises(ConfigError, match="pin name"):
                reader.pin(1, "no/slash")
        assert together(ranks, "train", first=2, last=4)[0]["level"] == "committed"
        assert (cluster.job("train") or {})["pins"] == {}


def test_the_command_line_pins_and_draws(tmp_path: Path, nursery: RankNursery) -> None:
    """pin, ls, unpin and rm as a person types them."""

    def run(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(main, [*words, "--store", cluster.config.store])
        return result.exit_code, result.output

    with ProcessCluster(tmp_path, HOSTS) as cluster:
        fleet = Fleet(cluster, nursery, kib=64)
        ranks = fleet.begin(TWO, last_step=2)
        assert run("pin", "train", "2", "best") == (0, "step 2 of train (attempt 1) is pinned as best\n")
        with memstore.reader("train", config=cluster.config) as anywhere:  # two hosts are here, and it belongs to none
            got = anywhere.get(2)
            assert (anywhere.pins(), got.step) == (["best"], 2)
            assert len(repr(got)) < 100
            assert repr(got).startswith("Checkpoint(step=2, attempt=1, ")
        together(ranks, "train", first=3, last=4)
        with pytest.raises(CapacityError, match=r"step 4 lives only in RAM .* and what is pinned as best \(step 2\)"):
            refuse_last_copies(cluster.config)
        code, shown = run("ls")
        assert code == 0
        assert "committed, pinned best" in shown
        fleet.kill(ranks)
        wait_for(lambda: (cluster.job("train") or {"ranks_alive": 1})["ranks_alive"] == 0, "dead ranks")
        code, said = run("rm", "train")
        assert (code, "step 4 lives only in RAM" in said) == (1, True)
        code, said = run("rm", "train", "--yes")
        assert (code, "has pins that would be lost with it: best (step 2)" in said) == (1, True)
        assert run("unpin", "train", "best") == (0, "step 2 of train is not pinned as best any more\n")
        assert run("rm", "train", "--yes")[0] == 0


def test_a_rewind_to_a_step_that_only_durable_storage_has(tmp_path: Path, nursery: RankNursery) -> None:
    """The step left RAM, everything was killed since: all ranks go back to it and get its bytes from the directory."""
    with ProcessCluster(tmp_path / "cluster", HOSTS) as cluster:
        (tmp_path / "durable").mkdir()
        fleet = Fleet(cluster, nursery, kib=64, durable=str(tmp_path / "durable"), durable_every=1, durable_keep=9)
        ranks = fleet.begin(TWO, last_step=0)
        ranks[0].call("wait", step=0, level="durable", timeout_s=60.0)
        commit_each(ranks, 1, 2)
        wait_for(lambda: steps_in_ram(cluster) == [2], "step 0 to leave RAM", 60.0)
        fleet.kill(ranks)
        restart_everything(cluster)
        ranks = fleet.launch(TWO)
        assert [reply["attempt"] for reply in together(ranks, "rewind", step=0)] == [3, 3]
        got = together(ranks, "get")
        fleet.check(got)
        assert (got[0]["step"], got[0]["verdict"]) == (0, "durable")
        with pytest.raises(RankFailed, match="no committed step 77"):
            together(ranks, "rewind", step=77)
