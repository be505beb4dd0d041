"""Writers: per shard the most distinct domains that can be had, never more ranks than replicas, hosts loaded evenly."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.topology import Host, Topology
from placement.writers import choose_writers


def cluster(racks: list[int]) -> Topology:
    """Host n in rack racks[n]."""
    return Topology.of(Host(f"h{n}", {"rack": f"r{rack}"}) for n, rack in enumerate(racks))


@given(st.data())
def test_no_choice_covers_more_domains(data: st.DataObject) -> None:
    """Against every subset of a shard's ranks of that size; every writer in a domain of its own."""
    topology = cluster(data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6)))
    places = data.draw(st.lists(st.integers(0, len(topology.hosts) - 1), min_size=1, max_size=9))
    hosts = [f"h{n}" for n in places]
    shards = data.draw(st.integers(1, len(hosts)))
    shard_of = [n % shards for n in range(len(hosts))]
    replicas, level = data.draw(st.integers(1, 4)), data.draw(st.sampled_from(["rack", "host"]))
    avoid = data.draw(st.sets(st.sampled_from(hosts)))
    chosen = choose_writers(shard_of, hosts, topology, level=level, replicas=replicas, avoid=avoid)

    def domains(ranks: tuple[int, ...]) -> set[str]:
        return {topology.hosts[hosts[rank]].domain(level) for rank in ranks}

    for shard in range(shards):
        members = [rank for rank, other in enumerate(shard_of) if other == shard]
        mine = tuple(rank for rank in chosen if shard_of[rank] == shard)
        size = min(replicas, len(members))
        assert len(domains(mine)) == len(mine) == max(len(domains(some)) for some in combinations(members, size))
    assert chosen == choose_writers(shard_of, hosts, topology, level=level, replicas=replicas, avoid=avoid)


@pytest.mark.parametrize(("hosts_count", "shards", "replicas"), [(4, 8, 2), (4, 8, 3), (16, 4, 2), (5, 8, 2)])
def test_hosts_copy_evenly(hosts_count: int, shards: int, replicas: int) -> None:
    """Sharded over each host and replicated over the hosts, as HSDP does it: no host copies two shards more."""
    topology = Topology.of(Host(f"h{n}") for n in range(hosts_count))
    shard_of = [shard for _ in range(hosts_count) for shard in range(shards)]
    hosts = [f"h{n}" for n in range(hosts_count) for _ in range(shards)]
    chosen = choose_writers(shard_of, hosts, topology, level="host", replicas=replicas)
    load = Counter(hosts[rank] for rank in chosen)
    assert len(chosen) == shards * replicas
    assert max(load.values()) - min(load.get(f"h{n}", 0) for n in range(hosts_count)) <= 1


def test_hosts_to_avoid_copy_only_where_there_is_no_other() -> None:
    """A host about to go is passed over within its rack, and kept if the rack has no other."""
    topology = cluster([0, 0, 1])
    for avoid, expected in [((), (0, 2)), (("h0",), (1, 2)), (("h0", "h2"), (1, 2)), (("h0", "h1"), (0, 2))]:
        found = choose_writers([0, 0, 0], ["h0", "h1", "h2"], topology, level="rack", replicas=2, avoid=avoid)
        assert found == expected, avoid


def test_a_host_that_is_not_known_copies_last() -> None:
    """It is dead or has not come: its rank copies only if too few others do."""
    topology = cluster([0, 1])
    hosts = ["gone", "h0", "h1"]
    assert choose_writers([0, 0, 0], hosts, topology, level="host", replicas=2) == (1, 2)
    assert choose_writers([0, 0, 0], hosts, topology, level="host", replicas=3) == (0, 1, 2)


@pytest.mark.parametrize(("replicas", "hosts"), [(0, ["h0"]), (2, [])])
def test_nonsense_is_refused(replicas: int, hosts: list[str]) -> None:
    """No replicas, or ranks without a host."""
    with pytest.raises(ValueError, match="1 ranks on"):
        choose_writers([0], hosts, cluster([0]), level="host", replicas=replicas)
