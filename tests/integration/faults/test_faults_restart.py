"""Everything killed at once and started again, one host late, terms forgotten (R16, R17, R23, R24)."""

from __future__ import annotations

from pathlib import Path

from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankNursery, together

THREE = {f"h{i}": {"rack": f"r{i}", "memstore": "replica"} for i in range(3)}


def kill_everything(fleet: Fleet, ranks: list) -> None:  # type: ignore[type-arg]
    """Ranks, holders and controller die at once; Ray's memory of them too; the hosts' memory stays."""
    fleet.cluster.kill_all()
    fleet.kill(ranks)
    fleet.cluster.forget_membership()


def test_the_newest_step_waits_for_a_host_that_comes_up_late(tmp_path: Path, nursery: RankNursery) -> None:
    """After a full restart the host with the only copy of a shard is late: get waits for it and takes no older step."""
    with ProcessCluster(tmp_path / "cluster", THREE, recovery_grace_s=20) as cluster:
        (tmp_path / "durable").mkdir()
        fleet = Fleet(cluster, nursery, replicas=1, durable=str(tmp_path / "durable"), durable_every=1000)
        ranks = fleet.begin(["h0", "h1"], last_step=0)
        wait_for(lambda: cluster.job("train")["durable_step"] == 0, "a durable step that an early get could choose")
        together(ranks, "train", first=1, last=5)
        kill_everything(fleet, ranks)
        cluster.start_holder("h0")
        cluster.start_holder("h2")
        cluster.start_controller()
        cluster.wait_live("h0", "h2")
        ranks = fleet.launch(["h0", "h2"])
        for rank in ranks:
            rank.begin("get")
        wait_for(lambda: "get waits for hosts h1" in cluster.logs(), "the get to wait for h1")
        cluster.start_holder("h1")
        got = [rank.finish() for rank in ranks]
        fleet.check(got)
        assert (got[0]["step"], got[0]["steps_lost"]) == (5, 0)
        assert got[0]["bytes_by_tier"]["durable"] == 0
        together(ranks, "train", first=6, last=7)


def test_a_late_host_is_given_up_after_the_grace(tmp_path: Path, nursery: RankNursery) -> None:
    """The late host never comes: after recovery_grace_s the older durable step is restored, and the steps lost said."""
    with ProcessCluster(tmp_path / "cluster", THREE, recovery_grace_s=1.0) as cluster:
        (tmp_path / "durable").mkdir()
        fleet = Fleet(cluster, nursery, replicas=1, durable=str(tmp_path / "durable"), durable_every=1000)
        ranks = fleet.begin(["h0", "h1"], last_step=0)
        wait_for(lambda: cluster.job("train")["durable_step"] == 0, "the durable step")
        together(ranks, "train", first=1, last=5)
        kill_everything(fleet, ranks)
        cluster.start_holder("h0")
        cluster.start_controller()
        cluster.wait_live("h0")
        _, got = fleet.resume(["h0", "h0"])
        assert (got["step"], got["verdict"], got["steps_lost"]) == (0, "durable", 5)


def test_forgotten_terms_are_outranked(tmp_path: Path, nursery: RankNursery) -> None:
    """A fresh cluster's controller starts below the terms in the journals: it takes a higher one and serves (R17)."""
    with ProcessCluster(tmp_path, {"h0": THREE["h0"], "h1": THREE["h1"]}) as cluster:
        fleet = Fleet(cluster, nursery)
        for last in (2, 4):  # a second controller, so that the journals hold more than one term
            if last == 2:
                ranks = fleet.begin(["h0", "h1"], last_step=2)
            else:
                ranks, _ = fleet.resume(["h0", "h1"])
                together(ranks, "train", first=3, last=4)
            term = cluster.status()["term"]
            cluster.kill_controller()
            cluster.start_controller()
            wait_for(lambda: cluster.status()["term"] > term, "a higher term")  # noqa: B023
            fleet.kill(ranks)
        kill_everything(fleet, [])
        for host in ("h0", "h1"):
            cluster.start_holder(host)
        cluster.start_controller()
        cluster.wait_live("h0", "h1")
        ranks, got = fleet.resume(["h0", "h1"])
        assert (got["step"], got["verdict"]) == (4, "local")
        together(ranks, "train", first=5, last=6)
        # And the facts of this cluster are distinguished from those of the one before.
        kill_everything(fleet, ranks)
        for host in ("h0", "h1"):
            cluster.start_holder(host)
        cluster.start_controller()
        cluster.wait_live("h0", "h1")
        _, got = fleet.resume(["h0", "h1"])
        assert (got["step"], got["attempt"]) == (6, 3)


def test_a_late_host_with_a_higher_term_joins(tmp_path: Path, nursery: RankNursery) -> None:
    """The one host that remembers the highest term comes last: the controller goes above it and keeps serving (R17)."""
    with ProcessCluster(tmp_path, {"h0": THREE["h0"], "h1": THREE["h1"]}) as cluster:
        fleet = Fleet(cluster, nursery)
        ranks = fleet.begin(["h0", "h1"], last_step=2)
        cluster.kill_holder("h0")
        cluster.settle_s = 1.0  # three controllers wait in vain for a host that is not there
        for _ in range(2):
            cluster.kill_controller()
            cluster.start_controller()
            cluster.wait_live("h1")
        ranks[0].kill()
        kill_everything(fleet, ranks)
        cluster.start_holder("h0")
        cluster.start_controller()
        cluster.wait_live("h0")
        cluster.start_holder("h1")
        cluster.wait_live("h0", "h1")
        ranks, got = fleet.resume(["h0", "h1"])
        assert got["step"] == 2
        together(ranks, "train", first=3, last=4)
