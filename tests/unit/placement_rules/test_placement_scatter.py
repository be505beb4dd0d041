"""Several placements side by side: each keeps the promises of one, and a host has other peers in each."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement import Host, Placement, Topology, place, rebalance, scattered, survival_odds


def racks(hosts_count: int, racks_count: int) -> Topology:
    hosts = [Host(f"h{n:03d}", {"rack": f"r{n % racks_count}"}, f"m{n}") for n in range(hosts_count)]
    return Topology.of(hosts)


def peers(placement: Placement, host: str) -> set[str]:
    return {target for each in placement.placements for target in each.targets[host]}


def test_one_is_the_ordinary_placement() -> None:
    """Without scatter nothing is beside it; a later one is a rebalance."""
    topology = racks(10, 4)
    first = scattered(None, topology, replicas=2)
    assert first == place(topology, replicas=2)
    left = Topology.of([host for host in topology.hosts.values() if host.host_id != "h003"])
    assert scattered(first, left, replicas=2) == rebalance(first, left, replicas=2).placement


@given(
    hosts_count=st.integers(1, 24), racks_count=st.integers(1, 6), replicas=st.integers(1, 4), scatter=st.integers(1, 4)
)  # fmt: skip
def test_each_keeps_what_one_promises(hosts_count: int, racks_count: int, replicas: int, scatter: int) -> None:
    """As many copies, no more of them unmet, and no host takes more of others'."""
    topology = racks(hosts_count, racks_count)
    found, one = scattered(None, topology, replicas=replicas, scatter=scatter), place(topology, replicas=replicas)
    assert len(found.placements) == scatter
    assert found == scattered(None, topology, replicas=replicas, scatter=scatter)
    for each in found.placements:
        assert each.targets.keys() == topology.hosts.keys()
        assert (each.level, each.replicas, len(each.unmet)) == (one.level, one.replicas, len(one.unmet))
        taken = [target for held in each.targets.values() for target in held]
        assert all(taken.count(host) <= one.replicas for host in topology.hosts)
        for owner, held in each.targets.items():
            assert owner not in held
            assert len(set(held)) == len(held)


@pytest.mark.parametrize(("hosts_count", "racks_count"), [(4, 2), (16, 4), (16, 16), (48, 6)])
def test_a_host_has_other_peers_in_each(hosts_count: int, racks_count: int) -> None:
    """Two placements of four hosts in two racks have no pair in common, and four of more hosts hardly one."""
    scatter = 2 if hosts_count == 4 else 4
    found = scattered(None, racks(hosts_count, racks_count), replicas=2, scatter=scatter)
    counts = [len(peers(found, host)) for host in found.targets]
    assert sum(counts) >= 0.9 * scatter * hosts_count


@pytest.mark.parametrize("scatter", [2, 3])
def test_only_the_copies_of_a_lost_host_move(scatter: int) -> None:
    """Every pair between hosts that are left stays, in each of the placements."""
    topology = racks(16, 4)
    before = scattered(None, topology, replicas=2, scatter=scatter)
    left = Topology.of([host for host in topology.hosts.values() if host.host_id != "h005"])
    after = scattered(before, left, replicas=2, scatter=scatter)
    for old, new in zip(before.placements, after.placements, strict=True):
        kept = {owner: held for owner, held in old.targets.items() if "h005" not in (owner, *held)}
        assert kept.items() <= new.targets.items()
        assert "h005" not in {target for held in new.targets.values() for target in held}


def test_more_or_fewer_placements_keep_those_that_stay() -> None:
    """A job that is launched again with another scatter moves no more than it must."""
    topology = racks(16, 4)
    two = scattered(None, topology, replicas=2, scatter=2)
    three, one = (scattered(two, topology, replicas=2, scatter=count) for count in (3, 1))
    assert [each.targets for each in three.placements[:2]] == [each.targets for each in two.placements]
    assert one.targets == two.targets
    assert not one.scattered


def test_ranks_take_the_placements_by_turns() -> None:
    """Rank r has the targets of placement r mod scatter; a host that is not placed has none."""
    found = scattered(None, racks(16, 4), replicas=2, scatter=2)
    for rank in range(4):
        assert found.targets_of("h003", rank) == found.placements[rank % 2].targets["h003"]
    assert found.targets_of("unknown", 1) == ()


def test_odds_of_a_large_cluster_that_loses_as_many_hosts_as_there_are_copies() -> None:
    """As docs/operate/deploy.md shows them: k times the fatal pairs."""
    for scatter, fatal in ((1, 64), (2, 128), (4, 256)):
        placed = scattered(None, racks(128, 8), replicas=2, scatter=scatter)
        assert survival_odds(placed, 2) == 1 - Fraction(fatal, 8128)
    with pytest.raises(ValueError, match="128 hosts share copies in a shape"):
        survival_odds(placed, 3)


def test_a_scatter_of_none_is_refused() -> None:
    """As replicas=0 is."""
    with pytest.raises(ValueError, match="scatter is 0, must be at least 1"):
        scattered(None, racks(4, 2), replicas=2, scatter=0)
