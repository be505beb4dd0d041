"""Groups of a job's ranks as failure domains: never all copies in one, with racks, levels in order, few moves."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from memstore.core.targets.shared_shards import choose_writers
from placement import Host, Placement, Topology, place, rebalance, scattered, spread_level
from placement.parity_sets import crowded_groups, parity_groups
from placement.topology import with_groups

Places = Sequence[tuple[int, ...]]  # of each host: its rack, then its group of each kind


def cluster(places: Places, first: int = 0) -> Topology:
    """Return hosts in racks, whose ranks are in one group of each kind."""
    ids = [f"h{first + at}" for at in range(len(places))]
    hosts = [Host(name, {"rack": f"r{place[0]}"}, name) for name, place in zip(ids, places, strict=True)]
    kinds = range(1, len(places[0]))
    groups = {f"k{kind}": {name: [place[kind]] for name, place in zip(ids, places, strict=True)} for kind in kinds}
    return with_groups(Topology.of(hosts, ("rack",)), groups)


def lacks(topology: Topology, targets: Mapping[str, Sequence[str]], level: str) -> list[int]:
    """Count, level by level, the owners whose copies are not apart: copies in one rack, then all in one group."""
    domain = topology.domains(level)
    near = sum(len({domain[h] for h in (owner, *held)}) <= len(held) for owner, held in targets.items())
    inside = []
    for kind in topology.groups_apart:
        group = topology.domains(kind)
        inside.append(sum(len({group[h] for h in (owner, *held)}) == 1 for owner, held in targets.items()))
    return [near, *inside]


def every(topology: Topology, copies: int, most: int) -> Iterator[dict[str, tuple[str, ...]]]:
    """Yield every placement in which no host takes more peers than that."""
    hosts = sorted(topology.hosts)
    choices = [list(combinations([h for h in hosts if h != owner], copies - 1)) for owner in hosts]
    for chosen in product(*choices):
        load = Counter(target for held in chosen for target in held)
        if max(load.values(), default=0) <= most:
            yield dict(zip(hosts, chosen, strict=True))


def is_best(topology: Topology, found: Placement, copies: int, most: int) -> bool:
    """Say whether no placement keeps a longer row of levels whole, the coarsest first."""
    mine = lacks(topology, found.targets, found.level)
    whole = next((at for at, count in enumerate(mine) if count), len(mine))
    if whole == len(mine):
        return True
    return all(any(lacks(topology, each, found.level)[: whole + 1]) for each in every(topology, copies, most))


def peers_most(placement: Placement) -> int:
    return max(Counter(t for held in placement.targets.values() for t in held).values(), default=0)


PLACES = st.integers(1, 2).flatmap(
    lambda kinds: st.lists(st.tuples(st.integers(0, 2), *[st.integers(0, 2)] * kinds), min_size=2, max_size=5)
)


@given(places=PLACES, strategy=st.sampled_from(("mixed", "group", "ring")))
@settings(deadline=None, max_examples=300)
def test_two_copies_are_apart_at_every_level_where_any_placement_is(places: Places, strategy: str) -> None:
    """Brute force over all placements with a fair share and one more; the coarsest levels count first."""
    topology = cluster(places)
    found = place(topology, replicas=2, strategy=strategy)  # type: ignore[arg-type]
    assert peers_most(found) <= 2
    assert is_best(topology, found, 2, 2)


@given(places=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=3, max_size=5))
@settings(deadline=None, max_examples=100)
def test_three_copies_are_never_all_in_one_group_where_any_placement_avoids_it(places: Places) -> None:
    """Two of them may share one: the third is elsewhere."""
    topology = cluster(places)
    found = place(topology, replicas=3)
    assert is_best(topology, found, 3, 3)


@given(seed=st.integers(0, 10_000))
@settings(deadline=None, max_examples=150)
def test_what_is_not_kept_is_said_for_each_owner(seed: int) -> None:
    """The unmet wishes are exactly the owners that lack something, and groups that hold all hosts are named."""
    rng = random.Random(seed)
    kinds, most = rng.randint(1, 3), rng.randint(1, 4)
    topology = cluster([tuple(rng.randrange(most) for _ in range(kinds + 1)) for _ in range(rng.randint(2, 12))])
    found = place(topology, replicas=2)
    counts = Counter(each.level for each in found.unmet)
    assert [counts[level] for level in (found.level, *topology.groups_apart)] == lacks(
        topology, found.targets, found.level
    )
    for kind in set(topology.groups) - set(topology.groups_apart):
        assert any(f"are in one {kind}" in text for text in found.warnings)


@given(racks=st.integers(2, 6), groups=st.integers(2, 6), each=st.integers(1, 4), copies=st.integers(2, 3))
@settings(deadline=None, max_examples=100)
def test_a_grid_of_racks_and_groups_stays_in_replica_groups(racks: int, groups: int, each: int, copies: int) -> None:
    """Racks apart, no group of ranks with all copies, one copy for each: and as few fatal sets as without groups."""
    assume(racks >= copies and (racks * groups * each) % copies == 0)
    topology = cluster([(rack, group) for rack in range(racks) for group in range(groups) for _ in range(each)])
    found = place(topology, replicas=copies)
    assert not found.unmet
    assert peers_most(found) == copies - 1
    assert {group.kind for group in found.groups} == {"group"}
    assert sum(len(group.members) for group in found.groups) == len(topology.hosts)


def test_a_thousand_hosts_whose_groups_lie_across_racks() -> None:
    """Aligned so that dealing alone pairs most hosts with one of their own group."""
    topology = cluster([(at // 100, at % 50) for at in range(1000)])
    plain = Topology.of(topology.hosts.values(), ("rack",))
    assert lacks(topology, place(plain, replicas=2).targets, "rack")[1] > 500
    assert not place(topology, replicas=2).unmet


def test_one_group_of_nearly_all_hosts_leaves_the_next_level_whole() -> None:
    """Nine of ten hosts are in one group: no more than that asks is inside, and the pairs of the other kind are."""
    topology = cluster([(at, min(at, 1), at % 5) for at in range(10)])
    found = place(topology, replicas=2)
    counts = Counter(each.level for each in found.unmet)
    assert counts["k1"] == 9 - peers_most(found)
    assert counts["k2"] == counts["host"] == 0


def test_groups_of_one_host_and_groups_of_all_change_nothing() -> None:
    """Each host in a group of its own, or all in one: placement is as without groups."""
    plain = cluster([(at % 3,) for at in range(9)])
    alone, together = cluster([(at % 3, at) for at in range(9)]), cluster([(at % 3, 0) for at in range(9)])
    targets = place(plain, replicas=2).targets
    assert place(alone, replicas=2).targets == targets == place(together, replicas=2).targets
    assert not place(alone, replicas=2).warnings
    assert "all 9 hosts are in one k1" in place(together, replicas=2).warnings[-1]


def test_a_host_with_ranks_of_two_groups_is_lost_with_each() -> None:
    """So both are one domain, and a host without ranks is one of its own."""
    hosts = Topology.of(Host(name) for name in "abcde")
    topology = with_groups(hosts, {"pp group": {"a": {0}, "b": {0, 1}, "c": {1}, "d": {2}}})
    domain = topology.domains("pp group")
    assert domain["a"] == domain["b"] == domain["c"] == "0+1"
    assert len({*domain.values()}) == 3


@given(seed=st.integers(0, 10_000))
@settings(deadline=None, max_examples=200)
def test_hosts_that_come_and_go_move_as_little_as_groups_allow(seed: int) -> None:
    """Two copies: the pairs that are new are the fewest of all placements that keep as much apart, or one more."""
    rng = random.Random(seed)
    places = [(rng.randrange(3), rng.randrange(3)) for _ in range(rng.randint(3, 5))]
    topology = cluster(places)
    old = place(topology, replicas=2)
    hosts = dict(topology.hosts)
    if rng.random() < 0.5 and len(hosts) > 2:
        hosts.pop(rng.choice(sorted(hosts)))
    else:
        hosts |= cluster([(rng.randrange(3), rng.randrange(3))], first=9).hosts
    now = Topology.of(hosts.values(), ("rack",), topology.groups)
    assume(not old.unmet and old.level == spread_level(now, 2).level)
    found = rebalance(old, now, replicas=2)
    assume(not found.placement.unmet and peers_most(found.placement) == 1)
    pairs = {(owner, t) for owner, held in old.targets.items() for t in held}
    fewest = min(
        sum((owner, t) not in pairs for owner, held in each.items() for t in held)
        for each in every(now, 2, 1)
        if not any(lacks(now, each, found.placement.level))
    )
    assert len(found.moves) <= fewest + 1


def test_groups_that_change_move_only_the_pairs_that_are_inside_then() -> None:
    """A recovery in place exchanged two ranks of different pipelines."""
    before = cluster([(at, at // 4) for at in range(12)])
    old = place(before, replicas=2)
    after = cluster([(at, {3: 1, 4: 0}.get(at, at // 4)) for at in range(12)])
    inside = sum(lacks(after, old.targets, "host")[1:])
    found = rebalance(old, after, replicas=2)
    assert not found.placement.unmet
    assert len(found.moves) <= 2 * inside


@pytest.mark.parametrize("scatter", [2, 3])
def test_scattered_placements_keep_groups_apart_too(scatter: int) -> None:
    """Each of them."""
    topology = cluster([(at % 4, at // 4) for at in range(16)])
    found = scattered(None, topology, replicas=2, scatter=scatter)
    assert all(lacks(topology, each.targets, each.level) == [0, 0] for each in found.placements)


def test_a_host_with_little_room_takes_fewer_copies_and_groups_stay_apart() -> None:
    """Room goes before balance, and not before separation as long as others have room."""
    topology = cluster([(at, at % 4) for at in range(8)])
    hosts = [
        Host(host.host_id, host.labels, host.machine, capacity_bytes=0 if host.host_id == "h0" else 20)
        for host in topology.hosts.values()
    ]
    limited = Topology.of(hosts, ("rack",), topology.groups)
    found = place(limited, replicas=2, demand_bytes=dict.fromkeys(topology.hosts, 10))
    assert not found.unmet
    assert all("h0" not in held for held in found.targets.values())


# -- parity and writers -------------------------------------------------------------------------------


@given(seed=st.integers(0, 10_000), data=st.integers(2, 4), spare=st.integers(1, 2))
@settings(deadline=None, max_examples=200)
def test_no_parity_set_has_more_of_a_group_than_it_survives(seed: int, data: int, spare: int) -> None:
    """Wherever sets of at least 2 + p hosts can be so: with even groups that lie across racks."""
    rng = random.Random(seed)
    racks, groups = rng.randint(2 + spare, 6), rng.randint(2 + spare, 6)
    topology = cluster([(rack, group) for rack in range(racks) for group in range(groups)])
    found = parity_groups(topology, "rack", data, spare)
    assert sorted(host for members in found for host in members) == sorted(topology.hosts)
    assert not crowded_groups(topology, found, spare)
    rack = topology.domains("rack")
    assert all(len({rack[host] for host in members}) == len(members) >= 2 + spare for members in found)


def test_too_few_groups_for_parity_are_named_and_racks_are_kept() -> None:
    """Two pipelines: of three hosts two are in one."""
    topology = cluster([(at % 4, at % 2) for at in range(8)])
    found = parity_groups(topology, "rack", 2)
    assert crowded_groups(topology, found, 1) == ["k1"]
    assert all(len({topology.domains("rack")[host] for host in members}) == len(members) for members in found)


def test_writers_of_a_shard_are_not_all_in_one_group() -> None:
    """The cheapest two hosts are in one pipeline: the second writer is one of the other."""
    topology = cluster([(at, at // 4) for at in range(8)])
    hosts = [f"h{rank}" for rank in range(8)]
    shard_of = [0, 0, 1, 1, 0, 0, 1, 1]
    writers = choose_writers(shard_of, hosts, topology, level="host", replicas=2)
    group = topology.domains("k1")
    for shard in (0, 1):
        assert len({group[hosts[rank]] for rank in writers if shard_of[rank] == shard}) == 2
