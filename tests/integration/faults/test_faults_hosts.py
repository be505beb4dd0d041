"""Hosts lost with their memory: restored from peers, at any size, or refused by name (R13, R18, R23, R29)."""

from __future__ import annotations

from pathlib import Path

import pytest
from variants import later

from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankNursery, fail_together, together


def racks(count: int, per_rack: int = 1) -> dict[str, dict[str, str]]:
    """`count` hosts h0, h1, ..., `per_rack` of them in each rack; any of them may hold copies."""
    return {f"h{i}": {"rack": f"r{i // per_rack}", "memstore": "replica"} for i in range(count)}


def test_a_lost_host_is_restored_from_its_peer(tmp_path: Path, nursery: RankNursery) -> None:
    """A host dies with its memory; both ranks get the newest step bit for bit, the lost one's from a peer."""
    # Repair would bring the bytes to h2 before the restore asks for them.
    with ProcessCluster(tmp_path, racks(2), detect=60.0, repair_bytes_per_s=8 << 20) as cluster:
        fleet = Fleet(cluster, nursery, kib=8192)
        ranks = fleet.begin(["h0", "h1"], last_step=3)
        fleet.kill(ranks)
        cluster.lose_host("h1")
        cluster.add_host("h2", {"rack": "r1"})
        cluster.wait_live("h2")
        ranks, got = fleet.resume(["h0", "h2"])
        assert (got["step"], got["verdict"], got["steps_lost"]) == (3, "peer", 0)
        assert got["bytes_by_tier"]["peer"] > 0
        assert got["bytes_by_tier"]["durable"] == 0
        assert not together(ranks, "train", first=4, last=6)[0]["degraded"]


def test_scattered_ranks_of_a_lost_host_come_back_from_two(tmp_path: Path, nursery: RankNursery) -> None:
    """The copies of h0's two ranks are on both hosts of the other rack, and either comes back bit for bit."""
    with ProcessCluster(tmp_path, racks(4, per_rack=2), detect=60.0, repair_bytes_per_s=8 << 20) as cluster:
        fleet = Fleet(cluster, nursery, scatter=2, kib=8 << 10)  # a second of repair for each shard
        ranks = fleet.begin(["h0", "h0", "h2", "h3"], last_step=2)
        assert {*cluster.job("train")["targets"]["h0"]} == {"h2", "h3"}
        fleet.kill(ranks)
        cluster.lose_host("h0")
        ranks, got = fleet.resume(["h1", "h1", "h2", "h3"])
        assert (got["step"], got["verdict"], got["steps_lost"]) == (2, "peer", 0)
        assert got["ranks_moved"] == [0, 1]
        assert got["bytes_by_tier"]["peer"] > 0
        assert not together(ranks, "train", first=3, last=5)[0]["degraded"]


@pytest.mark.parametrize("lost", [("h2", "h3"), *later(("h0", "h1"))])
def test_a_whole_pipeline_that_is_evicted_costs_nothing(
    tmp_path: Path, nursery: RankNursery, lost: tuple[str, str]
) -> None:
    """Both hosts of a pipeline, which lie in two racks, go at once: the other one has every shard in RAM (R18.8)."""
    labels = {f"h{at}": {"rack": f"r{at % 2}"} for at in range(4)}
    with ProcessCluster(tmp_path, labels) as cluster:
        fleet = Fleet(cluster, nursery, pipelines=[0, 0, 1, 1], kib=70)
        ranks = fleet.begin(list(labels), last_step=2)
        assert {row["level"]: row["tolerated"] for row in cluster.job("train")["survives"]}["pp group"] == 1
        fleet.kill(ranks)
        for host in lost:
            cluster.lose_host(host)
        left = [host for host in labels if host not in lost]
        _, got = fleet.resume([*left, *left])
        assert (got["step"], got["steps_lost"]) == (2, 0)
        assert got["verdict"] in ("local", "peer", "mixed")  # local: repair brought the bytes before the get
        assert got["bytes_by_tier"]["durable"] == 0


@pytest.mark.parametrize("replicas", [3, *later(2)])
@pytest.mark.parametrize("hosts_count", [5, *later(3, 7)])
def test_losing_replicas_less_one_hosts_costs_nothing(
    tmp_path: Path, nursery: RankNursery, hosts_count: int, replicas: int
) -> None:
    """3, 5 and 7 hosts, 2 and 3 copies: any replicas - 1 hosts lost at once, the newest step comes from RAM (R13)."""
    with ProcessCluster(tmp_path, racks(hosts_count)) as cluster:
        hosts = list(cluster.labels)
        fleet = Fleet(cluster, nursery, replicas=replicas, kib=70)
        ranks = fleet.begin(hosts, last_step=1)
        fleet.kill(ranks)
        lost = hosts[-(replicas - 1) :]
        for host in lost:
            cluster.lose_host(host)
        left = hosts[: len(hosts) - len(lost)]
        _, got = fleet.resume([left[i % len(left)] for i in range(hosts_count)])
        assert (got["step"], got["steps_lost"]) == (1, 0)
        assert got["verdict"] in ("local", "peer", "mixed")
        assert got["bytes_by_tier"]["durable"] == 0


def test_a_lone_copy_that_is_lost_is_refused_by_name(tmp_path: Path, nursery: RankNursery) -> None:
    """With one copy and no durable tier a lost host gives a RecoveryError naming shards and hosts, never None (R23)."""
    with ProcessCluster(tmp_path, racks(2), recovery_grace_s=0.5) as cluster:
        fleet = Fleet(cluster, nursery, replicas=1)
        ranks = fleet.begin(["h0", "h1"], last_step=2)
        fleet.kill(ranks)
        cluster.lose_host("h1")
        wait_for(lambda: cluster.host_status().get("h1") == "dead", "the death of h1")
        ranks = fleet.launch(["h0", "h0"])
        for failed in fail_together(ranks, "get"):
            assert failed.error == "RecoveryError"
            assert "step 2" in failed.message
            assert "h1" in failed.message
            assert "rank 1" in failed.message
        refused = ranks[0].fails("put", step=0)
        assert refused.error == "CommitError"


def test_a_replacement_host_is_filled_without_being_asked(tmp_path: Path, nursery: RankNursery) -> None:
    """A host that joins in place of a lost one gets its share while no rank trains: 2 of 2 copies again (R29)."""
    with ProcessCluster(tmp_path, racks(2)) as cluster:
        fleet = Fleet(cluster, nursery)
        fleet.begin(["h0", "h1"], last_step=1)
        cluster.lose_host("h1")
        wait_for(lambda: cluster.job("train")["copies"] == 1, "the loss to be seen")
        cluster.add_host("h2", {"rack": "r1"})
        wait_for(lambda: cluster.job("train")["copies"] == 2, "the second copies")


def test_a_lost_rack_degrades_commits_until_it_returns(tmp_path: Path, nursery: RankNursery) -> None:
    """Two copies over two racks, one rack lost: training goes on, commits say degraded, and recover later (R18)."""
    with ProcessCluster(tmp_path, racks(4, per_rack=2)) as cluster:
        fleet = Fleet(cluster, nursery, kib=70)
        ranks = fleet.begin(["h0", "h1", "h2", "h3"], last_step=1)
        assert not ranks[0].call("ticket", step=1)["degraded"]
        fleet.kill(ranks)
        cluster.lose_host("h2")
        cluster.lose_host("h3")
        ranks, got = fleet.resume(["h0", "h1", "h0", "h1"])
        assert got["step"] == 1
        ticket = together(ranks, "train", first=2, last=4)[0]
        assert ticket["degraded"]
        assert "racks" in ticket["reason"]
        assert cluster.job("train")["degraded"]
        for host in ("h2", "h3"):
            cluster.start_holder(host)
        cluster.wait_live("h2", "h3")
        wait_for(lambda: not cluster.job("train")["degraded"], "a whole commit of step 4")
        assert not together(ranks, "train", first=5, last=6)[0]["degraded"]


def test_a_rack_replaced_host_by_host_before_the_job_dies_is_filled(tmp_path: Path, nursery: RankNursery) -> None:
    """Two hosts of a rack are lost within a second and come back blank, the job dies: the newest commit is repaired."""
    labels = {f"h{i}": {"rack": "ab"[i // 2]} for i in range(4)}
    with ProcessCluster(tmp_path, labels) as cluster:
        fleet = Fleet(cluster, nursery)
        ranks = fleet.begin(["h0", "h1", "h2", "h3"], last_step=4)
        for rank in (ranks[0], ranks[2], ranks[3]):
            rank.begin("put", step=5)
        for rank in (ranks[0], ranks[2], ranks[3]):
            rank.finish()
        for lost in (1, 0):
            ranks[lost].kill()
            cluster.lose_host(f"h{lost}")
            wait_for(lambda host=f"h{lost}": cluster.host_status().get(host) == "dead", "the death of a host")
            cluster.start_holder(f"h{lost}")
        fleet.kill(ranks[2:])
        cluster.wait_live("h0", "h1")
        wait_for(
            lambda: (job := cluster.job("train")) and (job["copies"], job["missing_copies"]) == (2, 0), "all copies"
        )
        cluster.lose_host("h3")
        ranks, got = fleet.resume(["h0", "h1", "h2", "h2"])
        assert got["step"] in (4, 5)


def test_an_arena_of_four_times_the_state_survives_a_lost_host(tmp_path: Path, nursery: RankNursery) -> None:
    """Not a byte more than what was reserved: copies are rebuilt, the host is replaced, and puts go on (R10, R29)."""
    chunk_bytes = 64 << 10
    arena_bytes = 4 * 65 * chunk_bytes  # each rank puts 4 MiB of a tensor and a few bytes more
    with ProcessCluster(tmp_path, racks(3), arena_bytes=arena_bytes, detect=2.0, chunk_bytes=chunk_bytes) as cluster:
        fleet = Fleet(cluster, nursery, kib=8192)
        ranks = fleet.begin(["h0", "h1", "h2"], last_step=4)
        reserved = lambda: {row["stats"]["reserved_bytes"] for row in cluster.status()["hosts"]}  # noqa: E731
        wait_for(lambda: reserved() == {arena_bytes}, "a full arena everywhere")
        fleet.kill(ranks)
        cluster.lose_host("h1")
        wait_for(lambda: (job := cluster.job("train")) and job["missing_copies"] == 0, "the lost copies")
        cluster.add_host("h3", {"rack": "r1"})
        cluster.wait_live("h3")
        ranks, got = fleet.resume(["h0", "h3", "h2"])
        assert (got["step"], got["steps_lost"]) == (4, 0)
        assert not together(ranks, "train", first=5, last=9)[0]["degraded"]
        wait_for(lambda: (job := cluster.job("train")) and job["missing_copies"] == 0, "all copies of the new steps")
