"""Hosts join or leave: fewest moves, separation no worse than fresh, balance kept."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement import Host, Placement, Topology, place, rebalance


def _host(name: str, rack: int, capacity_bytes: int | None = None) -> Host:
    return Host(name, {"rack": f"r{rack}"}, f"m-{name}", capacity_bytes=capacity_bytes)


def _changed(rng: random.Random, hosts: list[Host], racks_count: int, limit: int) -> list[Host]:
    left = rng.sample(hosts, rng.randint(max(1, len(hosts) - 3), len(hosts)))
    joins = rng.randint(0, max(0, min(3, limit - len(left))))
    return left + [_host(f"new{at}", rng.randrange(racks_count)) for at in range(joins)]


def _pairs(placement: Placement) -> set[tuple[str, str]]:
    return {(owner, target) for owner, held in placement.targets.items() for target in held}


def _fewest_moves(old: Placement, topology: Topology, copies: int, level: str) -> int | None:
    """Brute force: the least number of new pairs over all separated, balanced placements."""
    ids = sorted(topology.hosts)
    domain = {host: topology.hosts[host].domain(level) for host in ids}
    choices = [
        [held for held in combinations(ids, copies - 1) if len({domain[h] for h in (owner, *held)}) == copies]
        for owner in ids
    ]
    had = _pairs(old)
    best = None
    for chosen in product(*choices):
        peers = Counter(target for held in chosen for target in held)
        if max(peers.values(), default=0) <= copies:
            moves = sum((o, t) not in had for o, held in zip(ids, chosen, strict=True) for t in held)
            best = moves if best is None else min(best, moves)
    return best


@given(seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=150)
def test_moves_are_the_fewest_by_brute_force(seed: int) -> None:
    """At most 6 hosts, unit room, the same replicas: it cannot be done with fewer new pairs."""
    rng = random.Random(seed)
    copies = rng.choice((2, 2, 3))
    racks_count = rng.randint(copies, 4)
    hosts = [_host(f"h{at}", rng.randrange(racks_count)) for at in range(rng.randint(copies, 5))]
    old = place(Topology.of(hosts, ("rack",)), replicas=copies)
    topology = Topology.of(_changed(rng, hosts, racks_count, 5 if copies == 3 else 6), ("rack",))
    if len(topology.hosts) < copies:
        return
    result = rebalance(old, topology, replicas=copies)
    fewest = _fewest_moves(old, topology, copies, result.placement.level)
    assert (fewest is None) == bool(result.placement.unmet)
    if fewest is not None:
        assert len(result.moves) == fewest


@given(seed=st.integers(0, 10**6), strategy=st.sampled_from(("mixed", "group", "ring")))
@settings(deadline=None, max_examples=150)
def test_result_is_as_separated_as_a_fresh_placement_and_balanced(seed: int, strategy: str) -> None:
    """Through five membership changes in a row, with replicas changing too; moves tell the difference."""
    rng = random.Random(seed)
    racks_count = rng.randint(1, 6)
    hosts = [_host(f"h{at}", rng.randrange(racks_count)) for at in range(rng.randint(1, 20))]
    old = place(Topology.of(hosts, ("rack",)), replicas=2, strategy=strategy)  # type: ignore[arg-type]
    for turn in range(5):
        hosts = [Host(f"{h.host_id}.{turn}" if h.host_id.startswith("new") else h.host_id, h.labels, h.machine)
                 for h in _changed(rng, hosts, racks_count, 20)]  # fmt: skip
        topology = Topology.of(hosts, ("rack",))
        replicas = rng.choice((2, 2, 3))
        result = rebalance(old, topology, replicas=replicas, strategy=strategy)  # type: ignore[arg-type]
        new = result.placement
        assert len(new.unmet) <= len(place(topology, replicas=replicas, strategy=strategy).unmet)  # type: ignore[arg-type]
        copies = min(replicas, len(hosts))
        assert all(len(set(held) - {owner}) == copies - 1 for owner, held in new.targets.items())
        peers = Counter(target for held in new.targets.values() for target in held)
        assert max(peers.values(), default=0) <= copies
        assert {(move.owner, move.target) for move in result.moves} == _pairs(new) - _pairs(old)
        for move in result.moves:
            assert move.source is None or (move.owner, move.source) in _pairs(old) - _pairs(new)
            assert move.why
        old = new


def test_nothing_changed_moves_nothing() -> None:
    """The same hosts give the same placement back."""
    topology = Topology.of([_host(f"h{at}", at % 3) for at in range(11)], ("rack",))
    for replicas in (1, 2, 3):
        old = place(topology, replicas=replicas)
        result = rebalance(old, topology, replicas=replicas)
        assert result.moves == ()
        assert result.placement == old


def test_one_lost_host_moves_only_the_copies_it_held() -> None:
    """A thousand hosts, one dies: m - 1 owners get one new target each, no other pair moves."""
    hosts = [_host(f"h{at:04d}", at % 20) for at in range(1000)]
    old = place(Topology.of(hosts, ("rack",)), replicas=3)
    topology = Topology.of(hosts[1:], ("rack",))
    result = rebalance(old, topology, replicas=3)
    assert sorted(move.owner for move in result.moves) == sorted(o for o, t in _pairs(old) if t == "h0000")
    assert {(move.source, move.why) for move in result.moves} == {(None, "h0000 left")}
    assert result.placement.unmet == ()


def test_a_joining_host_only_adds_its_own_targets() -> None:
    """A newcomer costs m - 1 new pairs; its places stay free for later."""
    hosts = [_host(f"h{at:03d}", at % 5) for at in range(100)]
    old = place(Topology.of(hosts, ("rack",)), replicas=3)
    result = rebalance(old, Topology.of([*hosts, _host("new", 1)], ("rack",)), replicas=3)
    assert [(move.owner, move.why) for move in result.moves] == [("new", "new joined")] * 2


def test_room_is_made_by_moving_one_peer_rather_than_starting_afresh() -> None:
    """Two hosts join a rack, one leaves it; 3 moves do, a fresh placement would take 4."""
    before = [_host("h0", 2), _host("h1", 2), _host("h2", 1), _host("h3", 2), _host("h4", 0)]
    old = place(Topology.of(before, ("rack",)), replicas=2)
    topology = Topology.of(
        [*(host for host in before if host.host_id != "h1"), _host("n0", 2), _host("n1", 2)], ("rack",)
    )
    result = rebalance(old, topology, replicas=2)
    assert result.placement.unmet == ()
    assert len(result.moves) == _fewest_moves(old, topology, 2, "rack") == 3


def test_a_host_that_shrank_gives_up_what_no_longer_fits() -> None:
    """Capacity is looked at again; the move names the host the copy leaves."""
    hosts = [_host(f"h{at}", at, capacity_bytes=20) for at in range(4)]
    demand = {host.host_id: 10 for host in hosts}
    old = place(Topology.of(hosts, ("rack",)), replicas=2, demand_bytes=demand)
    (owner,) = [owner for owner, held in old.targets.items() if held == ("h0",)]
    shrunk = Topology.of([_host("h0", 0, capacity_bytes=5), *hosts[1:]], ("rack",))
    result = rebalance(old, shrunk, replicas=2, demand_bytes=demand)
    assert [(move.owner, move.source) for move in result.moves] == [(owner, "h0")]
    assert result.placement.unmet == ()


def test_refuses_what_place_refuses() -> None:
    """No hosts and no replicas are ValueErrors here too."""
    topology = Topology.of([_host("h0", 0)])
    old = place(topology, replicas=1)
    with pytest.raises(ValueError, match="no hosts"):
        rebalance(old, Topology.of([]), replicas=1)
    with pytest.raises(ValueError, match="replicas is 0"):
        rebalance(old, topology, replicas=0)
