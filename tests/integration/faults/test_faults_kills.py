"""SIGKILL of a rank, a holder, the controller, or several: every committed step stays restorable (R2, R8, R16, R17)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memstore.core.wire.calls import VerifyStore
from memstore.testing.clusters.processes import ProcessCluster
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankNursery, together

LATER = [("controller", True), ("holder", False), ("controller", False)]
TWO_RACKS = {"h0": {"rack": "r0", "memstore": "replica"}, "h1": {"rack": "r1", "memstore": "replica"}}


def test_a_rank_killed_in_mid_copy_loses_only_its_own_step(tmp_path: Path, nursery: RankNursery) -> None:
    """SIGKILL between two bytes of a put: the step before it comes back whole, and the dead rank's slots are free."""
    with ProcessCluster(tmp_path, TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery)
        ranks = fleet.begin(["h0", "h1"], last_step=2)
        ranks[1].begin("put", step=3, hold=True)
        assert ranks[1].finish()["at"] == "mid-copy"
        ranks[0].call("put", step=3)
        ranks[1].kill()
        ranks[0].kill()
        ranks, got = fleet.resume(["h0", "h1"])
        assert (got["step"], got["verdict"]) == (2, "local")
        assert together(ranks, "train", first=3, last=8)[0]["level"] == "committed"
        verify = cluster.ask(VerifyStore()).found
        assert all(answer.damaged == 0 and answer.chunks > 0 for answer in verify.values())


@pytest.mark.parametrize(
    ("victims", "has_ranks"),
    [
        ("holder", True),
        ("holder and controller", True),
        ("holder and controller", False),
        *(pytest.param(*row, marks=pytest.mark.long) for row in LATER),
    ],
)
def test_committed_steps_survive_a_kill(tmp_path: Path, nursery: RankNursery, victims: str, has_ranks: bool) -> None:
    """SIGKILL of a holder, the controller or both, with the ranks or under them: then nothing raises, commits go on."""
    with ProcessCluster(tmp_path, TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery, stall_budget_s=0.5)
        ranks = fleet.begin(["h0", "h1"], last_step=3)
        if "controller" in victims:
            cluster.kill_controller()
        if "holder" in victims:
            cluster.kill_holder("h0")
        if has_ranks:
            assert all(reply["level"] != "failed" for reply in together(ranks, "put", step=4))
        else:
            fleet.kill(ranks)
        if "holder" in victims:
            cluster.start_holder("h0")
        if "controller" in victims:
            cluster.start_controller()
        step = fleet.put_until_committed(ranks, first=5) if has_ranks else 3
        cluster.wait_live("h0", "h1")
        fleet.kill(ranks)
        ranks, got = fleet.resume(["h0", "h1"])
        assert (got["step"], got["verdict"], got["steps_lost"]) == (step, "local", 0)
        together(ranks, "train", first=step + 1, last=step + 2)


def test_a_put_in_mid_copy_outlives_its_holder(tmp_path: Path, nursery: RankNursery) -> None:
    """The holder dies and is replaced while a rank copies: its lease is confirmed, and the step commits (R8)."""
    with ProcessCluster(tmp_path, TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery, stall_budget_s=30)
        ranks = fleet.begin(["h0", "h1"], last_step=1)
        ranks[0].begin("put", step=2, hold=True)
        ranks[0].finish()
        cluster.kill_holder("h0")
        cluster.start_holder("h0")
        cluster.wait_live("h0")
        ranks[1].call("put", step=2)
        ranks[0].begin("go")
        assert ranks[0].finish()["level"] in ("pending", "sealed", "replicated", "committed")
        assert ranks[0].call("wait", step=2)["level"] == "committed"
        fleet.kill(ranks)
        _, got = fleet.resume(["h0", "h1"])
        assert got["step"] == 2


def test_a_submitted_step_is_sent_again_to_the_next_holder(tmp_path: Path, nursery: RankNursery) -> None:
    """A submission that found no holder is not lost: the next one seals it and the step commits (R8, R11)."""
    with ProcessCluster(tmp_path, TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery)
        ranks = fleet.begin(["h0", "h1"], last_step=0)
        cluster.kill_holder("h0")
        together(ranks, "put", step=1)
        cluster.start_holder("h0")
        assert together(ranks, "wait", step=1)[0]["level"] == "committed"


def test_nothing_remains_of_a_cluster(tmp_path: Path, nursery: RankNursery) -> None:
    """After the last exit no process, socket or shared memory file is left."""
    with ProcessCluster(tmp_path, TWO_RACKS) as cluster:
        fleet = Fleet(cluster, nursery)
        ranks = fleet.begin(["h0", "h1"], last_step=1)
        pids = [p.pid for p in [*cluster.holders.values(), cluster.controller] if p is not None]
        root = cluster.arena("h0").parent
        assert (root / "h0" / "holder.sock").exists()
        fleet.kill(ranks)
    assert not root.exists()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
