"""Hosts with two networks: copies use both, and one that falls silent costs no step (R13, R28)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from memstore.testing.clusters.namespaces import NamespaceRig, available
from memstore.testing.clusters.processes import ProcessCluster
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankNursery, together

pytestmark = [pytest.mark.root, pytest.mark.skipif(available() is not None, reason=str(available()))]
HOSTS = ("h0", "h1")
STATE_KIB = 16 << 10
CHANGED_BYTES = STATE_KIB * 1024 // 4  # a step changes more of its state than that
COMMIT_S = 25.0  # less than the silence that ends a connection of a host with one network
DEVICES = ("eth0", "eth1")


@pytest.fixture(scope="module")
def rig() -> Iterator[NamespaceRig]:
    """Two hosts with two links each, and a head node for the controller."""
    with NamespaceRig([*HOSTS, "head"], second_link=True) as rig:
        yield rig


@pytest.fixture
def cluster(rig: NamespaceRig, tmp_path: Path) -> Iterator[ProcessCluster]:
    """A store on both hosts, whose holders listen on both networks; the controller is dialled on the first."""
    labels = {host: {"rack": f"r{host}"} for host in HOSTS}
    networks = (str(rig.network), str(rig.second_network))
    made = ProcessCluster(tmp_path, labels, rig=rig, controller_host="head", interface=networks, arena_bytes=256 << 20)
    with made as cluster:
        yield cluster
    for host in HOSTS:
        rig.heal_second(host)


def sent(rig: NamespaceRig, host: str) -> dict[str, int]:
    return {device: rig.sent_bytes(host, device) for device in DEVICES}


def test_copies_travel_over_both_networks(cluster: ProcessCluster, rig: NamespaceRig, nursery: RankNursery) -> None:
    """Connections are spread over them, so each carries a good part of the bytes."""
    fleet = Fleet(cluster, nursery, kib=STATE_KIB)
    before = sent(rig, "h0")
    ranks = fleet.begin(HOSTS, 2)
    after = sent(rig, "h0")
    shares = [after[device] - before[device] for device in DEVICES]
    assert sum(shares) > CHANGED_BYTES
    assert min(shares) > sum(shares) / 5
    fleet.kill(ranks)


def test_a_network_that_falls_silent_costs_no_step(
    cluster: ProcessCluster, rig: NamespaceRig, nursery: RankNursery
) -> None:
    """The second network is cut while copies use it: they go on over the first, and so do the reads of a moved rank."""
    fleet = Fleet(cluster, nursery, kib=STATE_KIB)
    ranks = fleet.begin(HOSTS, 1)
    rig.cut_second("h1")
    together(ranks, "put", step=2)
    settled = together(ranks, "settle", step=2, timeout_s=COMMIT_S)
    assert [reply["level"] for reply in settled] == ["committed", "committed"]
    before = sent(rig, "h0")
    step = fleet.put_until_committed(ranks, first=3)
    after = sent(rig, "h0")
    assert after["eth0"] - before["eth0"] > CHANGED_BYTES, "the copies did not travel over the network that is left"
    fleet.kill(ranks)
    _, got = fleet.resume([*reversed(HOSTS)])  # each rank's bytes lie on the other host, and here as a copy
    assert got["step"] == step


def test_the_first_network_may_fail_for_copies_too(
    cluster: ProcessCluster, rig: NamespaceRig, nursery: RankNursery
) -> None:
    """Copies that began on it go on over the second while heartbeats, which need the first, are not lost yet."""
    fleet = Fleet(cluster, nursery, kib=STATE_KIB)
    ranks = fleet.begin(HOSTS, 1)
    rig.block("h0", "h1")  # between the two alone: the controller reaches both
    try:
        before = sent(rig, "h0")
        together(ranks, "put", step=2)
        settled = together(ranks, "settle", step=2, timeout_s=COMMIT_S)
        assert [reply["level"] for reply in settled] == ["committed", "committed"]
        assert rig.sent_bytes("h0", "eth1") - before["eth1"] > CHANGED_BYTES
    finally:
        rig.unblock("h0", "h1")
    fleet.kill(ranks)
