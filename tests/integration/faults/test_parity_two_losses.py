"""Parity of two rows on six processes' hosts: any two of them are killed at once, and every byte comes back (R37)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import pytest

from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankNursery, RankProcess, fail_together, together

CHUNK_BYTES = 64 << 10
KIB = (
    1202,
    2,
    130,
    512,
    770,
    642,
)  # twice what each rank puts: 10, 1, 2, 4, 7 and 6 chunks, most of the last ones short
RANKS = range(6)


class Job:
    """A job of six ranks, each on a host in a rack of its own, with four shards in a row and two rows."""

    def __init__(self, cluster: ProcessCluster, nursery: RankNursery) -> None:
        self.cluster, self.fleet = cluster, Fleet(cluster, nursery, kib=KIB, parity=4, replicas=3)
        self.hosts = [f"h{rank}" for rank in RANKS]
        self.ranks: list[RankProcess] = self.fleet.begin(self.hosts, last_step=2)
        self.step = 2

    def lose(self, ranks: Sequence[int], *, replaced: bool = True) -> None:
        """Kill all ranks, and some hosts with their memory; others come in their place."""
        self.fleet.kill(self.ranks)
        for rank in ranks:
            self.cluster.lose_host(self.hosts[rank])
        for rank in ranks if replaced else ():
            self.hosts[rank] = f"h{len(self.cluster.labels)}"
            self.cluster.add_host(self.hosts[rank], {"rack": f"r{rank}"})
        self.cluster.wait_live(*(self.hosts[rank] for rank in ranks if replaced))

    def resume(self) -> None:
        """Launch it again: its newest step comes back, every byte as put, from RAM."""
        self.ranks, got = self.fleet.resume(self.hosts)
        assert (got["step"], got["steps_lost"]) == (self.step, 0)
        assert got["verdict"] in ("peer", "local")  # local: repair has decoded what was lost before it was asked for

    def train(self) -> None:
        """Put two more steps; the newest has all of its parity."""
        replies = together(self.ranks, "train", first=self.step + 1, last=self.step + 2)
        self.step += 2
        assert not any(reply["degraded"] for reply in replies), replies


def cluster_of(folder: Path, count: int = 6) -> ProcessCluster:
    """Hosts h0, h1, ..., each in a rack of its own."""
    labels = {f"h{i}": {"rack": f"r{i}", "memstore": "replica"} for i in range(count)}
    return ProcessCluster(folder, labels, detect=2.0, chunk_bytes=CHUNK_BYTES)


@pytest.mark.timeout(600)
def test_every_two_of_six_hosts_are_decoded_from_the_others(tmp_path: Path, nursery: RankNursery) -> None:
    """All fifteen pairs, one after the other, each from the newest step that the launch before has put."""
    with cluster_of(tmp_path) as cluster:
        job = Job(cluster, nursery)
        for pair in combinations(RANKS, 2):
            job.lose(pair)
            job.resume()
            job.train()
        assert job.step == 2 + 2 * 15, "every launch went on from the step that was decoded"


def test_two_lost_hosts_without_replacement_are_decoded_elsewhere(tmp_path: Path, nursery: RankNursery) -> None:
    """With two hosts that have no rank both shards are decoded there, parity follows, and two more may be lost."""
    with cluster_of(tmp_path, 8) as cluster:
        job = Job(cluster, nursery)
        survives = lambda: {r["level"]: r["tolerated"] for r in cluster.job("train")["survives"]}  # noqa: E731
        assert survives() == {"rack": 2, "host": 2}
        job.lose((1, 4), replaced=False)
        wait_for(lambda: survives() == {"rack": 2, "host": 2}, "the decoded shards, and all parity")
        cluster.lose_host("h0")
        cluster.lose_host("h5")
        job.hosts = ["h6", "h7", "h2", "h3", "h6", "h7"]
        job.resume()


def test_three_lost_hosts_of_a_set_are_refused_by_name(tmp_path: Path, nursery: RankNursery) -> None:
    """Without durable storage: the get says which ranks are lost, and returns nothing."""
    with cluster_of(tmp_path) as cluster:
        job = Job(cluster, nursery)
        job.lose((0, 3, 4))
        errors = fail_together(job.fleet.launch(job.hosts), "get")
        assert {error.error for error in errors} == {"RecoveryError"}
        lost = r"ranks 0: \d+ of 10 chunks, 3: \d+ of 5 chunks, 4: \d+ of 7 chunks \(3 of 6\)"
        assert re.search(lost, str(errors[0])), errors[0]
