"""The spread level (R18): which failure domains copies are spread over."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from placement import Host, Topology, is_finer, place, spread_level
from placement.groups import STRATEGIES


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
