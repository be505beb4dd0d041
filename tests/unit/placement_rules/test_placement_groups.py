"""Where copies go: Gemini's shapes, separation, capacity, balance, and what is reported."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from placement import Host, Placement, Topology, place

STRATEGIES = ("mixed", "group", "ring")
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


@given(sizes=RACKS, replicas=st.integers(1, 5), strategy=st.sampled_from(STRATEGIES))
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


@pytest.mark.parametrize("strategy", STRATEGIES)
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
    [({"replicas": 0}, "replicas is 0"), ({"replicas": 1, "strategy": "star"}, "'star'"),
     ({"replicas": 1, "demand_bytes": {"r0-0": -1}}, "negative for 1 hosts: r0-0")],
)  # fmt: skip
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
