"""Ranks with equal state as real processes.

What is copied, what travels, what comes back, what is reported (R13, R34).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from memstore.client.dcp.writer import DcpWriter
from memstore.client.shared_shard import SharedShard
from memstore.errors import ConfigError
from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankNursery, RankProcess, fail_together, together

HOSTS = [f"h{n}" for n in range(4)]
KIB = 4096  # of 512 bytes: 2 MiB of shared state, 32 chunks
REPAIR_BYTES_PER_S = 8 << 20  # the least there is: copies stay where they are for a while when the ranks move


@pytest.fixture(scope="module")
def shared_shard_nursery() -> Iterator[RankNursery]:
    with RankNursery("memstore.testing.ranks.shared_shard_ranks") as nursery:
        yield nursery
        nursery.kill_all()


def four_hosts(folder: Path) -> ProcessCluster:
    return ProcessCluster(
        folder,
        {host: {"rack": f"r{host}"} for host in HOSTS},
        arena_bytes=96 << 20,
        repair_bytes_per_s=REPAIR_BYTES_PER_S,
    )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with four_hosts(tmp_path_factory.mktemp("shared_shard")) as running:
        yield running


@pytest.fixture
def unshared_cluster(tmp_path: Path) -> Iterator[ProcessCluster]:
    """Without other tests' jobs, whose copies would still be moving: what comes over the network is counted by host."""
    with four_hosts(tmp_path) as running:
        yield running


def launched(fleet: Fleet, hosts: list[str], shards: int = 1) -> list[RankProcess]:
    """Ranks of `shards` shards, dealt in turn."""
    ranks = fleet.spawn(hosts)
    for rank in ranks:
        command = fleet.connect_command(rank.rank, len(ranks), shard_rank=rank.rank % shards, shard_count=shards)
        rank.begin("connect", **command)
    for rank in ranks:
        rank.finish()
    return ranks


def put(ranks: list[RankProcess], step: int, *, poked: int = -1, **options: Any) -> None:
    """All put and wait for the commit; rank `poked` has one element changed."""
    for rank in ranks:
        rank.begin("put_own", step=step, poke="norm" if rank.rank == poked else "", **options)
    for rank in ranks:
        rank.finish()
    together(ranks, "wait", step=step)


def received(cluster: ProcessCluster) -> int:
    """Bytes that came over the network to all holders since they started, as of each one's last heartbeat."""
    return sum(int(host["stats"].get("received_bytes", 0)) for host in cluster.status()["hosts"])


def events(cluster: ProcessCluster, job: str, kind: str) -> list[dict[str, Any]]:
    return [e for e in cluster.events(job) if e["event"] == kind]


def check(got: list[dict[str, Any]], step: int, shards: int = 1) -> None:
    """Every rank has its shard's state and what was its own."""
    for rank, reply in enumerate(got):
        assert reply["step"] == step
        assert (reply["rank"], reply["problem"]) == (rank % shards, "")
        assert (reply["own"], reply["noise"]) == (rank, float(rank + step))


def test_two_of_four_copy_and_a_restart_without_their_hosts_memory_gives_all_back(
    unshared_cluster: ProcessCluster, shared_shard_nursery: RankNursery
) -> None:
    """DDP of four: two writers, nearly nothing on the wire, and losing one writer's host loses nothing."""
    cluster = unshared_cluster
    fleet = Fleet(cluster, shared_shard_nursery, job="ddp", kib=KIB)
    ranks = launched(fleet, HOSTS)
    roles = together(ranks, "role")
    assert [role["is_writer"] for role in roles] == [True, True, False, False]
    assert [r["step"] for r in together(ranks, "get_own")] == [None] * 4
    before = received(cluster)
    put(ranks, 1)
    sizes = [reply["nbytes"] for reply in together(ranks, "ticket", step=1)]
    assert min(sizes[:2]) > 2 << 20 > 1 << 20 > max(sizes[2:])
    own_nbytes = len(ranks) * sizes[2]
    wait_for(lambda: received(cluster) >= before + own_nbytes, "word of the ranks' own parts of step 1 on the wire")
    before = received(cluster)
    put(ranks, 2)
    wait_for(lambda: received(cluster) >= before + own_nbytes, "word of the ranks' own parts of step 2 on the wire")
    assert received(cluster) - before < 0.02 * sizes[0]
    fleet.kill(ranks)
    ranks = launched(fleet, HOSTS)
    check(together(ranks, "get_own", into=True), 2)
    check(together(ranks, "get_own", step=2), 2)
    put(ranks, 3)
    fleet.kill(ranks)
    hosts = ["h2", "h3", "h1", "h1"]  # the first writer's host is not used any more, another has two ranks
    ranks = launched(fleet, hosts)
    check(together(ranks, "get_own"), 3)
    together(ranks, "close")


def test_a_step_of_four_ranks_is_restored_on_three(cluster: ProcessCluster, shared_shard_nursery: RankNursery) -> None:
    """The shared state needs no rank of the same number; what was a rank's own stays behind (R27)."""
    fleet = Fleet(cluster, shared_shard_nursery, job="resized", kib=KIB)
    ranks = launched(fleet, HOSTS)
    together(ranks, "get_own")
    put(ranks, 7)
    fleet.kill(ranks)
    ranks = launched(fleet, HOSTS[1:])
    for reply in together(ranks, "get_own", into=True):
        assert (reply["step"], reply["own"], reply["steps_lost"]) == (7, None, 0)
        assert (reply["rank"], reply["problem"]) == (0, "")
    assert not events(cluster, "resized", "restore_failed")
    assert [event["step"] for event in events(cluster, "resized", "restore") if "step" in event] == [7]
    put(ranks, 8)
    check(together(ranks, "get_own", step=8), 8)
    together(ranks, "close")


def test_every_shard_of_a_hybrid_has_its_writers(cluster: ProcessCluster, shared_shard_nursery: RankNursery) -> None:
    """HSDP: two shards, each held by two ranks; every rank copies, and each gets its shard's state."""
    fleet = Fleet(cluster, shared_shard_nursery, job="hsdp", kib=KIB)
    ranks = launched(fleet, HOSTS, shards=2)
    assert [role["writers"] for role in together(ranks, "role")] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    together(ranks, "get_own")
    put(ranks, 1)
    fleet.kill(ranks)
    ranks = launched(fleet, HOSTS, shards=2)
    check(together(ranks, "get_own"), 1, shards=2)
    together(ranks, "close")


def differing(cluster: ProcessCluster) -> list[dict[str, Any]]:
    """What status says of equal ranks that put different bytes."""
    return [row for row in cluster.status()["problems"] if row["kind"] == "replicas_differ"]


def test_equal_ranks_that_differ_are_named_and_a_put_of_the_same_is_reported(
    cluster: ProcessCluster, shared_shard_nursery: RankNursery
) -> None:
    """One element of one tensor on one writer; the step commits all the same. Then a state that has not changed."""
    fleet = Fleet(cluster, shared_shard_nursery, job="sdc", kib=KIB)
    ranks = launched(fleet, HOSTS)
    together(ranks, "get_own")
    put(ranks, 1)
    assert not events(cluster, "sdc", "replicas_differ")
    put(ranks, 2, poked=1)
    found = wait_for(lambda: events(cluster, "sdc", "replicas_differ"), "the writers' difference")
    assert [(e["step"], e["ranks"], e["names"]) for e in found] == [(2, [0, 1], ["state['model']['norm']"])]
    job = cluster.job("sdc")
    assert job is not None
    assert job["writers"] == [0, 1]
    assert [(pair["ranks"], pair["step"]) for pair in job["replicas_differ"]] == [([0, 1], 2)]
    [row] = differing(cluster)
    assert "ranks 0 and 1 name one shard and differ since step 2 in state['model']['norm']" in row["cause"]
    assert row["remedy"].startswith("a missing all-reduce, state that is a rank's own (put it with rank_state=)")
    put(ranks, 3)  # of equal states
    wait_for(lambda: events(cluster, "sdc", "replicas_agree"), "the word that they agree again")
    assert differing(cluster) == []
    assert not events(cluster, "sdc", "unchanged")
    for step in (4, 5):
        put(ranks, step, of_step=3)
    found = wait_for(lambda: events(cluster, "sdc", "unchanged"), "the word that nothing changed")
    assert [(e["step"], e["before"], e["ranks"]) for e in found] == [(4, 3, [0, 1])]
    together(ranks, "close")


def test_a_launch_that_deals_the_shards_otherwise_is_refused(
    cluster: ProcessCluster, shared_shard_nursery: RankNursery
) -> None:
    """A rank never gets another shard's state (D83)."""
    fleet = Fleet(cluster, shared_shard_nursery, job="dealt")
    ranks = launched(fleet, HOSTS, shards=2)
    together(ranks, "get_own")
    put(ranks, 1)
    fleet.kill(ranks)
    ranks = launched(fleet, HOSTS, shards=1)
    for failed in fail_together(ranks, "get_own"):
        assert failed.error == "ManifestMismatch"
        assert "shard_count=2 on rank" in failed.message
        assert "this launch has shard_rank=0, shard_count=1: connect as then" in failed.message
    together(ranks, "close")


def test_dcps_writer_refuses_shards_and_every_tensor_has_its_name() -> None:
    """What a message about an overlapped copy calls it: on a writer, and on a rank that stores its own alone."""
    state, own = {"weight": torch.zeros(1 << 16)}, {"seen": torch.zeros(1 << 15)}
    for rank, names in (0, ["state['weight']", "rank_state['seen']"]), (1, ["rank_state['seen']"]):
        shared_shard = SharedShard(0, 1, (0,), rank)
        plan = shared_shard.plan(state, own, 1 << 16)
        assert [plan.name_at(offset) for offset, _ in plan.placed] == names
    with pytest.raises(ConfigError, match="connect without shard_rank="):
        DcpWriter(cast(Any, SimpleNamespace(shared_shard=shared_shard)), 2)
