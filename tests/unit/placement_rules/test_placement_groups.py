"""Where copies go: Gemini's shapes, separation, capacity, balance, and what is reported."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction
from itertools import combinations, product

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from memstore.core.targets.shared_shards import choose_writers
from placement import (
    Host,
    Placement,
    Topology,
    bonds_of_placement,
    is_finer,
    place,
    rebalance,
    scattered,
    spread_level,
    survival_odds,
)
from placement.groups import STRATEGIES

GROUP_STRATEGIES = ("mixed", "group", "ring")
RACKS = st.lists(st.integers(1, 7), min_size=1, max_size=7)


def _racks(*sizes: int, capacity_bytes: int | None = None) -> Topology:
    return Topology.of(
        (
            Host(f"r{rack}-{at}", {"rack": f"r{rack}"}, f"m{rack}-{at}", capacity_bytes=capacity_bytes)
            for rack, size in enumerate(sizes)
            for at in range(size)
        ),
        ("rack",),
    )


def _peers(placement: Placement) -> Counter[str]:
    return Counter(target for held in placement.targets.values() for target in held)


def _separated(placement: Placement, topology: Topology) -> bool:
    domains = topology.domains(placement.level)
    return all(
        len({domains[host] for host in (owner, *placement.targets[owner])}) == placement.replicas
        for owner in topology.hosts
    )


@pytest.mark.parametrize(
    ("hosts_count", "replicas", "shapes"),
    [
        (4, 2, [("group", 2), ("group", 2)]),
        (5, 2, [("group", 2), ("ring", 3)]),
        (17, 3, [("group", 3)] * 4 + [("ring", 5)]),
        (5, 3, [("ring", 5)]),
        (3, 3, [("group", 3)]),
        (3, 1, [("group", 1)] * 3),
    ],
)
def test_shapes_are_geminis(hosts_count: int, replicas: int, shapes: list[tuple[str, int]]) -> None:
    """N // m groups; a remainder makes the last group a ring of m + r (d.1)."""
    placement = place(_racks(*[1] * hosts_count), replicas=replicas)
    assert sorted((group.kind, len(group.members)) for group in placement.groups) == shapes


@given(sizes=RACKS, replicas=st.integers(1, 5), strategy=st.sampled_from(GROUP_STRATEGIES))
@settings(deadline=None, max_examples=300)
def test_separation_is_kept_exactly_where_balance_allows(sizes: list[int], replicas: int, strategy: str) -> None:
    """No rack above N // m: all separated, m - 1 peers each, nothing unmet. Else at most m peers."""
    topology = _racks(*sizes)
    placement = place(topology, replicas=replicas, strategy=strategy)  # type: ignore[arg-type]
    copies = min(replicas, sum(sizes))
    peers = _peers(placement)
    assert all(owner not in held and len(set(held)) == copies - 1 for owner, held in placement.targets.items())
    assert max(peers.values(), default=0) <= copies
    domains = sizes if placement.level == "rack" else [1]
    fits = max(domains) <= sum(sizes) // copies
    if fits and (strategy != "group" or sum(sizes) % copies == 0):
        assert set(peers.values()) <= {copies - 1}
        assert _separated(placement, topology)
        assert placement.unmet == ()
    assert bool(placement.unmet) != _separated(placement, topology)


def test_uneven_racks_are_separated_by_one_larger_ring() -> None:
    """4 racks of 2 at m=3: a ring of 5 would need 5 racks, a ring of all 8 separates all."""
    topology = _racks(2, 2, 2, 2)
    mixed = place(topology, replicas=3)
    assert [(group.kind, len(group.members)) for group in mixed.groups] == [("ring", 8)]
    assert _separated(mixed, topology)


def test_a_rack_with_most_hosts_is_separated_as_far_as_spare_places_go() -> None:
    """Racks of 3 and 1 at m=2: the lone host takes two peers, the third is listed as unmet."""
    topology = _racks(3, 1)
    placement = place(topology, replicas=2)
    assert _peers(placement)["r1-0"] == 2
    (unmet,) = placement.unmet
    assert (unmet.level, unmet.domain) == ("rack", "r0")
    assert placement.targets[unmet.owner] == (unmet.target,)
    assert "no place is left" in unmet.why


@pytest.mark.parametrize("sizes", [(3, 1, 1, 1), (4, 2, 1, 1), (4, 4, 2, 1), (5, 3, 2, 1)])
def test_peers_are_moved_on_where_that_separates_an_owner(sizes: tuple[int, ...]) -> None:
    """Too big a rack for groups of 3: taking free places only would leave an owner unseparated."""
    topology = _racks(*sizes)
    assert place(topology, replicas=3).unmet == ()


@given(sizes=st.lists(st.integers(1, 12), min_size=2, max_size=5))
@settings(deadline=None, max_examples=100)
def test_two_copies_clash_only_where_all_places_outside_are_taken(sizes: list[int]) -> None:
    """m=2: a rack of s of N hosts has 2 (N - s) places outside; only the rest is unmet."""
    biggest, hosts_count = max(sizes), sum(sizes)
    unmet = place(_racks(*sizes), replicas=2).unmet
    assert len(unmet) == max(0, biggest - 2 * (hosts_count - biggest))


def test_hosts_on_one_machine_are_never_counted_as_apart() -> None:
    """R1: two virtual hosts without explicit labels share a machine; the partner is elsewhere."""
    topology = Topology.of([Host(f"h{at}", {}, f"m{at // 2}") for at in range(4)])
    assert _separated(place(topology, replicas=2), topology)
    alone = Topology.of([Host(f"h{at}", {}, "m") for at in range(2)])
    placement = place(alone, replicas=2)
    assert placement.targets == {"h0": ("h1",), "h1": ("h0",)}
    assert [each.owner for each in placement.unmet] == ["h0", "h1"]


def test_coarser_domains_are_spread_over_too() -> None:
    """Three replicas go to racks by R18, and still not two of them into one of three zones."""
    hosts = [Host(f"h{at:02d}", {"zone": f"z{at % 2}", "rack": f"r{at % 4}"}, f"m{at}") for at in range(12)]
    topology = Topology.of(hosts)
    placement = place(topology, replicas=3)
    assert placement.level == "rack"
    assert all(
        len({topology.hosts[host].domain("zone") for host in (owner, *held)}) == 2
        for owner, held in placement.targets.items()
    )


@pytest.mark.parametrize("strategy", GROUP_STRATEGIES)
def test_too_few_hosts_is_a_visible_shortfall(strategy: str) -> None:
    """Two hosts asked for three replicas hold two, and a warning says so."""
    placement = place(_racks(1, 1), replicas=3, strategy=strategy)  # type: ignore[arg-type]
    assert (placement.replicas, placement.replicas_asked) == (2, 3)
    assert "3 replicas asked, hosts to place them on: 2" in placement.warnings[-1]
    lone = place(_racks(1), replicas=2, strategy=strategy)  # type: ignore[arg-type]
    assert (lone.replicas, lone.targets) == (1, {"r0-0": ()})


@given(sizes=RACKS, replicas=st.integers(1, 3), seed=st.integers(0, 10**6))
@example(sizes=[1, 4, 7, 4, 7, 7], replicas=3, seed=9866)  # a host gave one peer's bytes to two newcomers
@settings(deadline=None, max_examples=150)
def test_capacity_is_never_exceeded_and_no_copy_is_dropped_silently(sizes: list[int], replicas: int, seed: int) -> None:
    """Peers' bytes fit every host; each missing copy is in unmet and lowers `replicas`."""
    rng = random.Random(seed)
    hosts = [
        Host(each.host_id, each.labels, each.machine, capacity_bytes=rng.choice([None, 0, 5, 12, 30]))
        for each in _racks(*sizes).hosts.values()
    ]
    topology = Topology.of(hosts, ("rack",))
    demand = {host.host_id: rng.randint(1, 12) for host in hosts}
    placement = place(topology, replicas=replicas, demand_bytes=demand)
    used: Counter[str] = Counter()
    for owner, held in placement.targets.items():
        used.update(dict.fromkeys(held, demand[owner]))
    assert all(host.capacity_bytes is None or used[host.host_id] <= host.capacity_bytes for host in hosts)
    copies = min(replicas, len(hosts))
    short = {owner for owner, held in placement.targets.items() if len(held) < copies - 1}
    assert short == {each.owner for each in placement.unmet if not each.target}
    assert placement.replicas == 1 + min(len(held) for held in placement.targets.values())


def test_a_full_host_is_swapped_for_another_in_another_rack() -> None:
    """A host without room gets no peers; its group's copies go elsewhere, still separated."""
    hosts = list(_racks(2, 2, 2, capacity_bytes=20).hosts.values())
    hosts[0] = Host("r0-0", {"rack": "r0"}, "m", capacity_bytes=0)
    topology = Topology.of(hosts, ("rack",))
    placement = place(topology, replicas=2, demand_bytes=dict.fromkeys(topology.hosts, 10))
    assert _peers(placement)["r0-0"] == 0
    assert placement.unmet == ()
    assert _separated(placement, topology)


def test_no_room_anywhere_is_reported_for_every_owner() -> None:
    """Nothing placed, replicas 1, one unmet without a target per owner, a warning with the way out."""
    topology = _racks(1, 1, capacity_bytes=5)
    placement = place(topology, replicas=2, demand_bytes=dict.fromkeys(topology.hosts, 10))
    assert placement.replicas == 1
    assert [(each.owner, each.target) for each in placement.unmet] == [("r0-0", ""), ("r1-0", "")]
    assert "raise capacity" in placement.warnings[-1]


@given(sizes=RACKS, replicas=st.integers(1, 4), seed=st.integers(0, 999))
@settings(deadline=None, max_examples=50)
def test_order_of_hosts_does_not_matter(sizes: list[int], replicas: int, seed: int) -> None:
    """The same hosts in any order give the same placement."""
    topology = _racks(*sizes)
    shuffled = list(topology.hosts.values())
    random.Random(seed).shuffle(shuffled)
    assert place(Topology.of(shuffled, ("rack",)), replicas=replicas) == place(topology, replicas=replicas)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"replicas": 0}, "replicas is 0"),
        ({"replicas": 1, "strategy": "star"}, "'star'"),
        ({"replicas": 1, "demand_bytes": {"r0-0": -1}}, "negative for 1 hosts: r0-0"),
    ],
)
def test_nonsense_is_refused_by_name(keywords: dict[str, object], message: str) -> None:
    """ValueError names the value; an empty topology is one too."""
    with pytest.raises(ValueError, match=message):
        place(_racks(2), **keywords)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no hosts"):
        place(Topology.of([]), replicas=1)


@pytest.mark.slow
def test_ten_thousand_hosts_are_separated_and_balanced() -> None:
    """250 racks of 40 at m=3, with a remainder: every host's copies in three racks, two peers each."""
    topology = _racks(*[40] * 250)
    placement = place(topology, replicas=3)
    assert placement.unmet == ()
    assert _separated(placement, topology)
    assert set(_peers(placement).values()) == {2}


# -- test placement scatter ---------------------------------------------------------------------------
# Several placements side by side: each keeps the promises of one, and a host has other peers in each.


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
)
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
    """In each of the placements every pair between hosts that are left stays, but for the one that makes room."""
    topology = racks(16, 4)
    before = scattered(None, topology, replicas=2, scatter=scatter)
    left = Topology.of([host for host in topology.hosts.values() if host.host_id != "h005"])
    after = scattered(before, left, replicas=2, scatter=scatter)
    for old, new in zip(before.placements, after.placements, strict=True):
        kept = {owner: held for owner, held in old.targets.items() if "h005" not in (owner, *held)}
        assert len(kept.items() - new.targets.items()) <= 1
        assert Counter(target for held in new.targets.values() for target in held).most_common(1)[0][1] == 1
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
        odds = survival_odds(bonds_of_placement(placed), 128, 4)
        assert odds[2].chance == 1 - Fraction(fatal, 8128)
    assert [each.is_exact for each in odds] == [True] * 3 + [False] * 2  # too many share copies to count four of them


def test_a_scatter_of_none_is_refused() -> None:
    """As replicas=0 is."""
    with pytest.raises(ValueError, match="scatter is 0, must be at least 1"):
        scattered(None, racks(4, 2), replicas=2, scatter=0)


# -- test placement rebalance -------------------------------------------------------------------------
# Hosts join or leave: fewest moves, separation no worse than fresh, balance kept.


def _host(name: str, rack: int, capacity_bytes: int | None = None) -> Host:
    return Host(name, {"rack": f"r{rack}"}, f"m-{name}", capacity_bytes=capacity_bytes)


def _changed(rng: random.Random, hosts: list[Host], racks_count: int, limit: int) -> list[Host]:
    left = rng.sample(hosts, rng.randint(max(1, len(hosts) - 3), len(hosts)))
    joins = rng.randint(0, max(0, min(3, limit - len(left))))
    return left + [_host(f"new{at}", rng.randrange(racks_count)) for at in range(joins)]


def _pairs(placement: Placement) -> set[tuple[str, str]]:
    return {(owner, target) for owner, held in placement.targets.items() for target in held}


def _fewest_moves(old: Placement, topology: Topology, copies: int, level: str) -> int | None:
    """Brute force: the least number of new pairs over all separated placements, in fair shares if there are any."""
    ids = sorted(topology.hosts)
    domain = {host: topology.hosts[host].domain(level) for host in ids}
    choices = [
        [held for held in combinations(ids, copies - 1) if len({domain[h] for h in (owner, *held)}) == copies]
        for owner in ids
    ]
    had = _pairs(old)
    best: dict[bool, int] = {}  # is unfair -> moves
    for chosen in product(*choices):
        peers = max(Counter(target for held in chosen for target in held).values(), default=0)
        if peers <= copies:
            moves = sum((o, t) not in had for o, held in zip(ids, chosen, strict=True) for t in held)
            best[peers == copies] = min(moves, best.get(peers == copies, moves))
    return best.get(False, best.get(True))


@given(seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=150)
def test_moves_are_the_fewest_by_brute_force(seed: int) -> None:
    """At most 6 hosts, unit room, the same replicas: it takes at most one new pair less.

    A host that holds more than its share gives up a pair that may not be the one whose end costs least.
    """
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
        assert fewest <= len(result.moves) <= fewest + 1


@given(seed=st.integers(0, 10**6), strategy=st.sampled_from(("mixed", "group", "ring")))
@settings(deadline=None, max_examples=150)
def test_result_is_as_separated_as_a_fresh_placement_and_balanced(seed: int, strategy: str) -> None:
    """Through five membership changes in a row, with replicas changing too; moves tell the difference."""
    rng = random.Random(seed)
    racks_count = rng.randint(1, 6)
    hosts = [_host(f"h{at}", rng.randrange(racks_count)) for at in range(rng.randint(1, 20))]
    old = place(Topology.of(hosts, ("rack",)), replicas=2, strategy=strategy)  # type: ignore[arg-type]
    for turn in range(5):
        hosts = [
            Host(f"{h.host_id}.{turn}" if h.host_id.startswith("new") else h.host_id, h.labels, h.machine)
            for h in _changed(rng, hosts, racks_count, 20)
        ]
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
    """A thousand hosts, one dies: m - 1 owners get one new target each, and one pair for each makes room for it."""
    hosts = [_host(f"h{at:04d}", at % 20) for at in range(1000)]
    old = place(Topology.of(hosts, ("rack",)), replicas=3)
    topology = Topology.of(hosts[1:], ("rack",))
    result = rebalance(old, topology, replicas=3)
    left = sorted(move.owner for move in result.moves if move.why == "h0000 left")
    assert left == sorted(o for o, t in _pairs(old) if t == "h0000")
    assert len(result.moves) <= 2 * len(left)
    assert Counter(target for _, target in _pairs(result.placement)).most_common(1)[0][1] == 2
    assert result.placement.unmet == ()


def test_a_joining_host_only_adds_its_own_targets() -> None:
    """A newcomer costs m - 1 new pairs, and takes over as many from hosts that hold more than their share."""
    hosts = [_host(f"h{at:03d}", at % 5) for at in range(100)]
    old = place(Topology.of(hosts, ("rack",)), replicas=3)
    result = rebalance(old, Topology.of([*hosts, _host("new", 1)], ("rack",)), replicas=3)
    assert [move.why for move in result.moves if move.owner == "new"] == ["new joined"] * 2
    assert [move.target for move in result.moves if move.owner != "new"] == ["new"] * 2
    assert Counter(target for _, target in _pairs(result.placement)).most_common(1)[0][1] == 2


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


# -- placement domains --------------------------------------------------------------------------------
# The spread level (R18): which failure domains copies are spread over.


def _topology(*labels: dict[str, str], machine: str = "") -> Topology:
    return Topology.of(Host(f"h{at}", each, machine or f"m{at}") for at, each in enumerate(labels))


def test_coarsest_level_with_enough_labelled_values_is_chosen() -> None:
    """Two zones serve two replicas; three replicas need the racks; four fall to hosts."""
    topology = _topology(
        {"zone": "a", "rack": "1"}, {"zone": "a", "rack": "2"}, {"zone": "b", "rack": "3"}, {"zone": "b", "rack": "3"}
    )
    assert [(spread_level(topology, m).level, spread_level(topology, m).domains_count) for m in (1, 2, 3, 4)] == [
        ("zone", 2),
        ("zone", 2),
        ("rack", 3),
        ("host", 4),
    ]


def test_unlabelled_hosts_never_count_as_a_labelled_value() -> None:
    """One rack label and one host without any is not two racks."""
    assert spread_level(_topology({"rack": "1"}, {}), 2).level == "host"


def test_unlabelled_hosts_share_one_domain_and_are_named_up_to_ten() -> None:
    """At a used level the warning names ten hosts and counts the others."""
    found = spread_level(_topology({"rack": "1"}, {"rack": "2"}, *[{}] * 12), 2)
    assert (found.level, found.domains_count) == ("rack", 3)
    (warning,) = found.warnings
    assert "12 of 14" in warning
    assert "and 2 more" in warning
    assert sum(f"h{at}" in warning.replace(",", " ").split() for at in range(2, 14)) == 10


def test_hosts_on_one_machine_are_one_domain_unless_explicit() -> None:
    """R1: the machine is an implicit failure domain; explicit host labels lift that."""
    shared = spread_level(_topology({}, {}, machine="m"), 2)
    assert (shared.domains_count, len(shared.warnings)) == (1, 1)
    explicit = Topology.of(Host(f"h{at}", {}, "m", is_explicit=True) for at in range(2))
    assert (spread_level(explicit, 2).domains_count, spread_level(explicit, 2).warnings) == (2, ())


def test_labels_do_not_make_two_hosts_of_one_machine() -> None:
    """R1: two racks on one machine (two raylets on a laptop) are lost together; across machines the labels count."""
    racks = ({"rack": "1"}, {"rack": "2"})
    found = spread_level(_topology(*racks, machine="m"), 2)
    assert (found.level, found.domains_count) == ("host", 1)
    assert "share a machine" in found.warnings[0]
    assert spread_level(_topology(*racks), 2).level == "rack"
    explicit = Topology.of(Host(f"h{at}", each, "m", is_explicit=True) for at, each in enumerate(racks))
    assert spread_level(explicit, 2).level == "rack"


def _on_machines(*places: tuple[str, str]) -> Topology:
    """Hosts by (machine, rack)."""
    return Topology.of(
        (Host(f"h{at}", {"rack": rack} if rack else {}, machine) for at, (machine, rack) in enumerate(places)),
        ("rack",),
    )


def test_racks_of_one_machine_are_one_domain() -> None:
    """R1: four racks by their labels, on two machines, are two; what a machine carries of an unlabelled one as well."""
    topology = _on_machines(("m0", "a"), ("m1", "b"), ("m0", "c"), ("m1", "d"))
    assert topology.domains("rack") == {"h0": "a+c", "h1": "b+d", "h2": "a+c", "h3": "b+d"}
    found = spread_level(topology, 2)
    assert (found.level, found.domains_count) == ("rack", 2)
    assert spread_level(topology, 3).level == "host"
    mixed = _on_machines(("m0", "a"), ("m0", ""), ("m1", ""), ("m2", "b"))
    assert mixed.domains("rack") == {"h0": "a", "h1": "a", "h2": "a", "h3": "b"}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_four_racks_on_two_machines_are_paired_across_machines(strategy: str) -> None:
    topology = _on_machines(("m0", "a"), ("m1", "b"), ("m0", "c"), ("m1", "d"))
    placement = place(topology, replicas=2, strategy=strategy)  # type: ignore[arg-type]
    for owner, held in placement.targets.items():
        assert {topology.hosts[host].machine for host in (owner, *held)} == {"m0", "m1"}
    assert placement.unmet == ()


@given(
    places=st.lists(st.tuples(st.sampled_from("MNOPQ"), st.sampled_from(["", *"abcdef"])), min_size=2, max_size=14),
    replicas=st.integers(2, 3),
    strategy=st.sampled_from(("mixed", "ring")),
)
@settings(deadline=None, max_examples=60)
def test_copies_share_no_machine_with_any_labels(places: list[tuple[str, str]], replicas: int, strategy: str) -> None:
    """Where the machines alone would let all copies be apart, labels do not bring two of them together (R1)."""
    topology = _on_machines(*places)
    machines = [machine for machine, _ in places]
    assume(len(places) >= replicas)
    assume(max(map(machines.count, machines)) <= len(places) // replicas)
    placement = place(topology, replicas=replicas, strategy=strategy)  # type: ignore[arg-type]
    for owner, held in placement.targets.items():
        assert len({topology.hosts[host].machine for host in (owner, *held)}) == replicas


def test_among_restricts_the_count_to_live_hosts() -> None:
    """With one rack lost the level becomes finer."""
    topology = _topology({"rack": "1"}, {"rack": "1"}, {"rack": "2"})
    assert spread_level(topology, 2, among={"h0", "h1", "h2"}).level == "rack"
    assert spread_level(topology, 2, among={"h0", "h1", "gone"}).level == "host"


def test_finer_follows_the_order_of_failure_domains() -> None:
    """Host is finer than rack, rack finer than zone, nothing finer than itself."""
    levels = ("zone", "rack")
    assert is_finer("host", "rack", levels)
    assert is_finer("rack", "zone", levels)
    assert not is_finer("rack", "rack", levels)
    assert not is_finer("zone", "host", levels)
    with pytest.raises(ValueError, match="'row' is not one of zone, rack, host"):
        is_finer("row", "host", levels)


def test_replicas_below_one_is_refused() -> None:
    """There is no level for no copies."""
    with pytest.raises(ValueError, match="replicas is 0"):
        spread_level(_topology({}), 0)


# -- placement writers --------------------------------------------------------------------------------
# Writers: per shard the most distinct domains that can be had, never more ranks than replicas, hosts loaded evenly.


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
