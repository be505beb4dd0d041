"""Parity instead of copies: any one host of a set may be lost, for a fraction of a copy's memory (R37)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from memstore.core.format.manifest import decode_manifest
from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankNursery, RankProcess, fail_together, together
from recovery.inventory import ShardId

CHUNK_BYTES = 64 << 10
CHUNKS = 65  # each rank puts 4 MiB of a tensor and a few bytes more, where it fills its arena
FULL = {"kib": 8192, "arena_bytes": 2 * (CHUNKS + -(-CHUNKS // 4)) * CHUNK_BYTES}  # two versions: 2.5 times the state
HOSTS = ("h0", "h1", "h2", "h3", "h4")


@contextmanager
def trained(
    folder: Path, nursery: RankNursery, *, hosts: int = 5, kib: int = 2048, detect: float = 2.0, **settings: Any
) -> Iterator[tuple[ProcessCluster, Fleet, list[RankProcess]]]:
    """Yield hosts h0, h1, ... in a rack each, and the ranks of a set on five of them, which have committed step 4."""
    labels = {f"h{i}": {"rack": f"r{i}", "memstore": "replica"} for i in range(hosts)}
    with ProcessCluster(folder, labels, detect=detect, chunk_bytes=CHUNK_BYTES, **settings) as cluster:
        fleet = Fleet(cluster, nursery, kib=kib, parity=4)
        yield cluster, fleet, fleet.begin(HOSTS, last_step=4)


def replace_h1(cluster: ProcessCluster) -> list[str]:
    """Lose h1, and let an empty host take its place in the rack; return the hosts of the next launch."""
    cluster.lose_host("h1")
    cluster.add_host("h5", {"rack": "r1"})
    cluster.wait_live("h5")
    return ["h0", "h5", "h2", "h3", "h4"]


def shards_on(cluster: ProcessCluster, host: str) -> set[ShardId]:
    """Return what a host has whole."""
    return {decode_manifest(data).shard for data in cluster.manifests(host).values()}


def test_a_lost_host_is_decoded_from_four_others(tmp_path: Path, nursery: RankNursery) -> None:
    """An arena of exactly 2.5 times the state; a host goes with its memory, and the newest step comes back whole."""
    # Repair would decode the shard before the restore asks for it.
    with trained(tmp_path, nursery, detect=60.0, **FULL) as (cluster, fleet, ranks):
        # What a host reserves reaches `status` with the host's next heartbeat, which may come after the commit.
        reserved = lambda: {row["stats"]["reserved_bytes"] for row in cluster.status()["hosts"]}  # noqa: E731
        wait_for(lambda: reserved() == {FULL["arena_bytes"]}, "the whole share of every host in its heartbeat")
        assert not cluster.job("train")["degraded"]
        fleet.kill(ranks)
        hosts = replace_h1(cluster)
        assert shards_on(cluster, "h5") == set()
        ranks, got = fleet.resume(hosts)
        assert (got["step"], got["steps_lost"]) == (4, 0)
        assert got["verdict"] in ("peer", "local")
        assert ShardId("train", 1, 4, 1) in shards_on(cluster, "h5")
        assert not together(ranks, "train", first=5, last=9)[0]["degraded"]


@pytest.mark.parametrize("is_unfinished", [False, True])
def test_a_full_host_decodes_the_shard_of_a_rank_that_moved_there(
    tmp_path: Path, nursery: RankNursery, is_unfinished: bool
) -> None:
    """Its own rank has leased nothing before the get, and a step that was never committed gives way."""
    with trained(tmp_path, nursery, detect=60.0, **FULL) as (cluster, fleet, ranks):
        if is_unfinished:
            together(ranks[:4], "put", step=5)
            wait_for(lambda: len(cluster.manifests("h0")) == 3, "two shards and the parity of one step on h0")
        fleet.kill(ranks)
        cluster.lose_host("h4")
        assert ShardId("train", 1, 4, 4) not in shards_on(cluster, "h0")
        _, got = fleet.resume(["h0", "h1", "h2", "h3", "h0"])
        assert (got["step"], got["steps_lost"]) == (4, int(is_unfinished))
        assert got["verdict"] in ("peer", "local")
        assert ShardId("train", 1, 4, 4) in shards_on(cluster, "h0")


def test_a_lost_host_without_a_replacement_is_decoded_elsewhere(tmp_path: Path, nursery: RankNursery) -> None:
    """The lost shard is decoded onto a host that is left, so the next loss costs nothing either."""
    with trained(tmp_path, nursery, hosts=6) as (cluster, fleet, ranks):
        survives = {row["level"]: row["tolerated"] for row in cluster.job("train")["survives"]}
        assert survives == {"rack": 1, "host": 1}
        fleet.kill(ranks)
        cluster.lose_host("h1")
        wait_for(lambda: (job := cluster.job("train")) and job["copies"] == 2, "the decoded shard, and its parity")
        cluster.lose_host("h2")
        ranks, got = fleet.resume(["h0", "h3", "h4", "h5", "h5"])
        assert (got["step"], got["steps_lost"]) == (4, 0)
        assert not together(ranks, "train", first=5, last=9)[0]["degraded"]


def test_parity_is_complete_again_after_a_restore(tmp_path: Path, nursery: RankNursery) -> None:
    """A host is lost and replaced; before a rank puts again the parity that it had is added up again."""
    with trained(tmp_path, nursery) as (cluster, fleet, ranks):
        fleet.kill(ranks)
        ranks, _ = fleet.resume(replace_h1(cluster))
        wait_for(
            lambda: (job := cluster.job("train")) and (job["copies"], job["missing_copies"]) == (2, 0), "all parity"
        )
        fleet.kill(ranks)
        cluster.lose_host("h3")
        ranks, got = fleet.resume(["h0", "h5", "h2", "h2", "h4"])
        assert (got["step"], got["steps_lost"]) == (4, 0)


def test_two_lost_hosts_of_a_set_are_refused_by_name(tmp_path: Path, nursery: RankNursery) -> None:
    """Two of five hosts at once are more than one parity gives back: the get says which ranks, and returns nothing."""
    with trained(tmp_path, nursery, hosts=6) as (cluster, fleet, ranks):
        fleet.kill(ranks)
        cluster.lose_host("h1")
        cluster.lose_host("h2")
        ranks = fleet.launch(["h0", "h5", "h5", "h3", "h4"])
        errors = fail_together(ranks, "get")
        assert "RecoveryError" in str(errors[0])
        assert "ranks 1: " in str(errors[0])
