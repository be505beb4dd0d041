"""Groups of hosts that keep parity for one another, and the sets of their ranks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstore.config import _RANGES
from memstore.core.wire.codec import encode
from memstore.core.wire.ids import WireShard
from memstore.core.wire.peer_messages import Abort, ParityOf, decode_request
from placement import Host, Topology
from placement.parity_sets import parity_groups, parity_sets

RACKS = st.lists(st.integers(1, 7), min_size=1, max_size=12)


def racks(*sizes: int) -> Topology:
    """Hosts by rack."""
    hosts = [
        Host(f"r{rack}-{at}", {"rack": f"r{rack}"}, f"m{rack}-{at}")
        for rack, size in enumerate(sizes)
        for at in range(size)
    ]
    random.Random(len(hosts)).shuffle(hosts)
    return Topology.of(hosts, ("rack",))


SPARE = st.integers(1, 2)


@given(RACKS, st.integers(2, 8), SPARE)
def test_every_host_is_in_one_group_of_distinct_racks(rack_sizes: list[int], data_hosts: int, spare: int) -> None:
    """Of k + p to 2 (k + p) - 1 hosts; smaller ones only where a rack is too large, and none of fewer than 2 + p."""
    topology, whole = racks(*rack_sizes), data_hosts + spare
    groups = parity_groups(topology, "rack", data_hosts, spare)
    if not groups:
        assert len(topology.hosts) < (2 + spare) * max(1, len(topology.hosts) // whole, *rack_sizes)
        return
    assert sorted(host for group in groups for host in group) == sorted(topology.hosts)
    domains = topology.domains("rack")
    for group in groups:
        assert len({domains[host] for host in group}) == len(group) >= 2 + spare
        assert len(group) <= 2 * whole - 1
    if max(rack_sizes) <= len(topology.hosts) // whole:
        assert min(map(len, groups)) >= whole
    assert max(map(len, groups)) - min(map(len, groups)) <= 1
    assert parity_groups(racks(*rack_sizes), "rack", data_hosts, spare) == groups


@given(st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=9), min_size=1, max_size=5), SPARE, st.randoms())
def test_a_set_has_at_most_one_rank_of_a_host(counts: list[list[int]], spare: int, order: random.Random) -> None:
    """Ranks that hosts have more of than 1 + p others are in none; in any order of ranks and hosts, sets agree."""
    numbers = list(range(sum(map(sum, counts))))
    order.shuffle(numbers)
    left = iter(numbers)
    groups = [[f"g{g}-{h}" for h in range(len(group))] for g, group in enumerate(counts)]
    ranks = {
        groups[g][h]: [next(left) for _ in range(count)]
        for g, group in enumerate(counts)
        for h, count in enumerate(group)
    }
    found = parity_sets(groups, ranks, spare)
    host_of = {rank: host for host, held in ranks.items() for rank in held}
    assert len({rank for members in found for rank in members}) == sum(map(len, found))
    for members in found:
        assert list(members) == sorted(members)
        assert len({host_of[rank] for rank in members}) == len(members) >= 2 + spare
        assert len({host_of[rank].partition("-")[0] for rank in members}) == 1
    whole = [sum(count > number for count in group) >= 2 + spare for group in counts for number in range(5)]
    assert len(found) == sum(whole)
    shuffled = {host: order.sample(held, len(held)) for host, held in sorted(ranks.items(), reverse=True)}
    assert parity_sets(groups, shuffled, spare) == found


@pytest.mark.parametrize("spare", [1, 2])
def test_the_largest_set_that_may_be_configured_can_be_named_to_a_peer(spare: int) -> None:
    """With the largest k a group of 2 (k + p) - 1 hosts is one set, and a peer can be told its name."""
    (most,) = (int(high) for name, _, high in _RANGES if name == "parity")
    hosts = [Host(f"h{n}", {"rack": f"r{n}"}, f"m{n}") for n in range(2 * (most + spare) - 1)]
    (group,) = parity_groups(Topology.of(hosts, ("rack",)), "rack", most, spare)
    (ranks,) = parity_sets([group], {host: [number] for number, host in enumerate(group)}, spare)
    request = Abort(shard=WireShard("job", 1, 2, 0), sender="a", parity=ParityOf(1, ranks, spare))
    assert decode_request(encode(request)) == request
