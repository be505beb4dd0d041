"""`memstore drain` on real processes: the host can go once it says so, and nothing is lost by it (R29)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from msgspec.structs import replace

from memstore.cli import main
from memstore.cli.status import state_text
from memstore.core.wire.calls import AskStatus
from memstore.core.wire.status_rows import HostRow, ShortStep
from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.fuzz.message_samples import blank
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankNursery, together

HOSTS = {"h0": {"rack": "r1"}, "h1": {"rack": "r2"}, "h2": {"rack": "r1"}, "h3": {"rack": "r2"}}


def run(cluster: ProcessCluster, *arguments: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """Return what the command wrote to stdout, as JSON, and to stderr."""
    result = CliRunner().invoke(main, [*arguments, "--store", cluster.config.store, "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout) if result.stdout else {}, result.stderr


def test_a_drained_host_can_go_and_every_copy_is_still_there(tmp_path: Path, nursery: RankNursery) -> None:
    """Its ranks put meanwhile; the step put last has all its copies the moment the host is gone."""
    with ProcessCluster(tmp_path, HOSTS, detect=60.0) as cluster:  # no repair: what is there was there before
        fleet = Fleet(cluster, nursery)
        ranks = fleet.begin(["h0", "h1", "h2"], last_step=2)
        body, _ = run(cluster, "drain", "h1", "--within", "30")
        assert (body["host"], body["left"]) == ("h1", 0)
        together(ranks, "train", first=3, last=4)
        assert run(cluster, "drain", "h1", "--within", "30")[0]["left"] == 0
        assert any("is to go in" in row["cause"] for row in cluster.status()["problems"])
        assert {row.host: state_text(row) for row in cluster.ask(AskStatus()).hosts}["h1"] == "draining: can go"

        ranks[1].kill()
        cluster.lose_host("h1")
        wait_for(lambda: cluster.host_status()["h1"] == "dead", "the death of h1")
        job = cluster.job("train")
        assert (job["committed_step"], job["copies"], job["missing_copies"]) == (4, 2, 0)
        for rank in ranks:
            rank.kill()
        _, got = fleet.resume(["h0", "h3", "h2"])
        assert got["step"] == 4


def test_hosts_drained_one_after_another_never_end_with_no_copy_and_exit_code_0(
    tmp_path: Path, nursery: RankNursery
) -> None:
    """Two hosts, two copies: the first is informed of one copy of two at once, the last of none (exit 4, both)."""
    with ProcessCluster(tmp_path, {"h0": {}, "h1": {}}) as cluster:
        fleet = Fleet(cluster, nursery)
        ranks = fleet.begin(["h0", "h1"], last_step=2)
        first, _ = run(cluster, "drain", "h0", "--within", "600", code=4)
        [row] = first["short"]
        assert (row["job"], row["step"], row["copies"], row["replicas"]) == ("train", 2, 1, 2)
        for rank in ranks:
            rank.kill()
        words = CliRunner().invoke(main, ["drain", "h1", "--within", "600", "--store", cluster.config.store])
        assert words.exit_code == 4, words.output
        assert "host h1 must not go: train step 2: 0 of 2 copies elsewhere" in words.stderr
        status = cluster.status()
        assert all("0 of 2 copies elsewhere !" in state_text(row) for row in cluster.ask(AskStatus()).hosts)
        assert [row["severity"] for row in status["problems"] if "0 of 2 copies elsewhere" in row["cause"]] == [
            "degraded",
            "degraded",
        ]
        cluster.lose_host("h0")
        wait_for(lambda: cluster.host_status()["h0"] == "dead", "the death of h0")
        assert run(cluster, "drain", "h1", "--within", "600", code=4)[0]["short"][0]["copies"] == 0


def test_a_lone_host_can_go_once_its_step_is_durable(tmp_path: Path, nursery: RankNursery) -> None:
    """Exit 4 before durable storage has the step, 0 after, with the step named."""
    gate = tmp_path / "gate"
    storage = tmp_path / "durable"
    storage.mkdir()
    hosts: dict[str, dict[str, str]] = {"h0": {}}
    with ProcessCluster(tmp_path, hosts, durable_gate=gate, durable=str(storage), durable_every=1) as cluster:
        fleet = Fleet(cluster, nursery)
        fleet.begin(["h0"], last_step=2)
        assert run(cluster, "drain", "h0", "--within", "1", code=4)[0]["short"][0]["copies"] == 0
        gate.touch()
        body, _ = run(cluster, "drain", "h0", "--within", "60")
        assert (body["left"], [row["step"] for row in body["durable"]]) == (0, [2])


def test_hosts_that_all_go_leave_the_newest_step_on_durable_storage(tmp_path: Path, nursery: RankNursery) -> None:
    """By its schedule step 0 alone is durable; with the notices step 3 is, and both hosts can go."""
    storage = tmp_path / "durable"
    storage.mkdir()
    with ProcessCluster(tmp_path / "cluster", {"h0": {}, "h1": {}}) as cluster:
        ranks = Fleet(cluster, nursery, durable=str(storage), durable_every=1000).begin(["h0", "h1"], last_step=0)
        ranks[0].call("wait", step=0, level="durable")
        together(ranks, "train", first=1, last=3)
        for host in ("h0", "h1"):
            body, _ = run(cluster, "drain", host, "--within", "60")
            assert (body["left"], [row["step"] for row in body["durable"]]) == (0, [3])
        assert sorted(marker.parent.name for marker in storage.glob("train/*/*/marker")) == ["0", "3"]


def test_a_notice_can_be_taken_back_and_strangers_and_no_time_are_refused(tmp_path: Path) -> None:
    """--cancel ends it; a notice without time, and one to an unknown host, are refused in words."""
    with ProcessCluster(tmp_path, {"h0": {}, "h1": {}}) as cluster:
        assert run(cluster, "drain", "h1")[0]["drains_s"] > 100
        assert run(cluster, "drain", "h1", "--cancel")[0]["drains_s"] is None
        assert "did you mean h0" in run(cluster, "drain", "h00", code=1)[1]
        assert "must leave some time" in run(cluster, "drain", "h1", "--within", "0", code=2)[1]


def test_the_state_of_a_host_says_what_is_left_to_copy_before_it_can_go() -> None:
    """A dead host is dead, notice or not; a live one that is to go is not "ok"."""
    short = ShortStep(job="train", step=9, shards=3, copies=1, replicas=2, may_come=True, durable_problem="")
    host = replace(
        blank(HostRow),
        status="live",
        drains_s=20.0,
        drain_left=3,
        pushes=2,
        status_s=5.0,
        why="silent",
        drain_may_come=True,
        drain_short=[short],
    )
    assert state_text(host) == "draining: 3 shards to copy"
    assert state_text(replace(host, drain_may_come=False)) == "draining: train step 9: 1 of 2 copies elsewhere !"
    assert state_text(replace(host, status="dead")).endswith(": silent !")
    assert state_text(replace(host, drains_s=None, pushes=0)) == "ok"
