"""The arena's files go, or are others, under living ranks: no wrong byte is committed, and commits go on (R8, R35)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from memstore.testing.fleet import Fleet
from memstore.testing.processes import ProcessCluster, wait_for
from memstore.testing.rank_process import RankNursery, together

HOSTS = {"h0": {"rack": "r0", "memstore": "replica"}, "h1": {"rack": "r1", "memstore": "replica"}}


@pytest.mark.parametrize("what", ["arena", "slots", "folder"])
def test_a_rank_that_outlives_the_arena_writes_into_the_next_one(
    tmp_path: Path, nursery: RankNursery, what: str
) -> None:
    """A holder is killed, its files removed, another one started, twice: every step committed since has its bytes."""
    with ProcessCluster(tmp_path, HOSTS) as cluster:
        fleet = Fleet(cluster, nursery, stall_budget_s=0.5)
        ranks = fleet.begin(["h0", "h1"], last_step=2)
        step = 2
        for _ in range(2):
            cluster.kill_holder("h0")
            if what == "folder":
                shutil.rmtree(cluster.arena("h0"))
            else:
                (cluster.arena("h0") / what).unlink()
            together(ranks, "put", step=step + 1)
            cluster.start_holder("h0")
            cluster.wait_live("h0")
            step = fleet.put_until_committed(ranks, first=step + 2)
        fleet.kill(ranks)
        _, got = fleet.resume(["h0", "h1"])
        assert got["step"] == step


def test_a_put_in_mid_copy_into_a_lost_arena_is_skipped(tmp_path: Path, nursery: RankNursery) -> None:
    """The arena is another one before a put has copied: its step is skipped by all ranks, and later ones commit."""
    with ProcessCluster(tmp_path, HOSTS) as cluster:
        fleet = Fleet(cluster, nursery, stall_budget_s=0.5)
        ranks = fleet.begin(["h0", "h1"], last_step=2)
        ranks[0].begin("put", step=3, hold=True)
        assert ranks[0].finish()["at"] == "mid-copy"
        ranks[1].call("put", step=3)
        cluster.kill_holder("h0")
        shutil.rmtree(cluster.arena("h0"))
        cluster.start_holder("h0")
        cluster.wait_live("h0")
        wait_for(lambda: _leased(cluster, "h0") > 0, "new slots for the rank that copies")
        ranks[0].begin("go on")
        assert (reply := ranks[0].finish())["level"] == "skipped", reply
        step = fleet.put_until_committed(ranks, first=4)
        fleet.kill(ranks)
        _, got = fleet.resume(["h0", "h1"])
        assert got["step"] == step


def _leased(cluster: ProcessCluster, host: str) -> int:
    return sum(int(row["stats"].get("leased_slots", 0)) for row in cluster.host_rows() if row["host"] == host)
