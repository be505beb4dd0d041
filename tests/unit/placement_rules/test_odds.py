"""Odds of survival against enumeration and Gemini's table (d.2), and how often bytes are lost against all states."""

from __future__ import annotations

import random
from collections.abc import Iterable
from fractions import Fraction
from itertools import combinations, product
from math import comb, prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement import (
    Bond,
    Host,
    Odds,
    Placement,
    Topology,
    bonds_of,
    bonds_of_placement,
    place,
    scattered,
    survival_odds,
)
from placement.losses import YEAR_S, causes
from placement.odds import corollary, sampled_odds
from placement.rates import PRESETS, Rates

HOSTS = "abcdefgh"
FATAL = st.lists(st.frozensets(st.sampled_from(HOSTS), max_size=4), max_size=7)


def even(hosts_count: int, replicas: int, strategy: str = "mixed") -> Placement:
    """Copies on hosts without labels."""
    topology = Topology.of(Host(f"h{at:04d}") for at in range(hosts_count))
    return place(topology, replicas=replicas, strategy=strategy)  # type: ignore[arg-type]


def chances(placement: Placement, lost_max: int) -> list[Fraction]:
    """Return the odds of a placement, all of them exact."""
    found = survival_odds(bonds_of_placement(placement), len(placement.targets), lost_max)
    assert all(each.is_exact for each in found)
    return [each.chance for each in found]


def enumerated(fatal: Iterable[frozenset[str]], hosts: Iterable[str]) -> list[Fraction]:
    """Return the odds for every number of lost hosts, by looking at every set of them."""
    sets, names = list(fatal), list(hosts)
    found = []
    for count in range(len(names) + 1):
        lost = [frozenset(each) for each in combinations(names, count)]
        found.append(Fraction(sum(not any(each <= gone for each in sets) for gone in lost), len(lost)))
    return found


def sets_of(placement: Placement) -> list[frozenset[str]]:
    """Return the hosts of each shard."""
    return [frozenset((owner, *held)) for each in placement.placements for owner, held in each.targets.items()]


# -- the published table ------------------------------------------------------------------------------

TABLE = [
    (16, 2, 2, "0.9333", "0.8667", "0.9333"),
    (16, 2, 3, "0.8000", "0.6286", "0.8000"),
    (16, 2, 4, "0.6154", "0.3626", "0.6000"),
    (17, 2, 2, "0.9265", "0.8750", None),
    (17, 2, 3, "0.7824", "0.6500", None),
    (15, 3, 3, "0.9890", "0.9670", "0.9890"),
    (15, 3, 4, "0.9560", "0.8791", "0.9560"),
    (16, 3, 3, "0.9857", "0.9714", None),
    (7, 3, 3, "0.8571", "0.8000", None),
    (5, 2, 2, "0.6000", "0.5000", None),
    (16, 4, 4, "0.9978", "0.9912", "0.9978"),
    (128, 2, 2, "0.9921", None, "0.9921"),
    (128, 2, 3, "0.9764", None, "0.9764"),
    (128, 2, 4, "0.9529", None, None),
    (1024, 2, 2, "0.9990", None, "0.9990"),
    (1024, 2, 3, "0.9971", None, "0.9971"),
    (1024, 2, 4, "0.9941", None, None),
]


@pytest.mark.parametrize(("hosts", "copies", "lost", "mixed", "ring", "bound"), TABLE)
def test_table_of_recovery_probabilities(
    hosts: int, copies: int, lost: int, mixed: str, ring: str | None, bound: str | None
) -> None:
    """Mixed, ring over all, and the corollary, to four digits."""
    assert f"{float(chances(even(hosts, copies), lost)[lost]):.4f}" == mixed
    if ring is not None:
        assert f"{float(chances(even(hosts, copies, 'ring'), lost)[lost]):.4f}" == ring
    published = corollary(hosts, copies, lost)
    assert (published is None) == bool(hosts % copies)
    if bound is not None:
        assert f"{float(published or 0):.4f}" == bound


@given(groups=st.integers(1, 5), copies=st.integers(1, 4), lost=st.integers(0, 20))
def test_corollary_is_a_lower_bound_exact_below_twice_the_copies(groups: int, copies: int, lost: int) -> None:
    """Gemini's union bound never promises more than there is."""
    lost = min(lost, groups * copies)
    exact, bound = chances(even(groups * copies, copies), lost)[lost], corollary(groups * copies, copies, lost)
    assert bound is not None
    assert bound <= exact
    if lost < 2 * copies:
        assert bound == exact


# -- every set of lost hosts --------------------------------------------------------------------------


@given(hosts=st.integers(1, 9), copies=st.integers(1, 5), strategy=st.sampled_from(("mixed", "group", "ring")))
@settings(deadline=None, max_examples=100)
def test_placements_equal_enumeration(hosts: int, copies: int, strategy: str) -> None:
    """For every number lost, groups and rings alike."""
    placement = even(hosts, copies, strategy)
    assert chances(placement, hosts) == enumerated(sets_of(placement), placement.targets)


@given(fatal=FATAL)
@settings(deadline=None, max_examples=200)
def test_any_sets_equal_enumeration(fatal: list[frozenset[str]]) -> None:
    """Sets within sets, of different sizes, and of no host at all: as copies are after losses and repairs."""
    found = survival_odds(bonds_of(fatal), len(HOSTS), len(HOSTS))
    assert found == [Odds(each, True) for each in enumerated(fatal, HOSTS)]


@given(fatal=FATAL)
@settings(deadline=None, max_examples=200)
def test_a_bound_never_promises_too_much(fatal: list[frozenset[str]]) -> None:
    """Where the sets are too many to count the answer is at most the counted one, and equal where it says so."""
    counted = survival_odds(bonds_of(fatal), len(HOSTS), len(HOSTS))
    bounded = survival_odds(bonds_of(fatal), len(HOSTS), len(HOSTS), states_max=0)
    for exact, bound in zip(counted, bounded, strict=True):
        assert bound.chance == exact.chance if bound.is_exact else bound.chance <= exact.chance


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4), tolerated=st.integers(0, 3))
@settings(deadline=None, max_examples=100)
def test_odds_of_groups_equal_enumeration(sizes: list[int], tolerated: int) -> None:
    """Parity groups of different sizes, smaller ones than may be lost included; and a host that is in none."""
    sizes = sizes[:2]
    groups = [frozenset(f"{group}.{at}" for at in range(size)) for group, size in enumerate(sizes)]
    hosts = [*sorted(frozenset().union(*groups)), "alone"]
    fatal = [frozenset(each) for group in groups for each in combinations(sorted(group), tolerated + 1)]
    found = survival_odds([Bond(group, tolerated) for group in groups], len(hosts), len(hosts))
    assert [each.chance for each in found] == enumerated(fatal, hosts)
    assert survival_odds(bonds_of(fatal), len(hosts), len(hosts)) == found


@pytest.mark.parametrize(("replicas", "scatter"), [(2, 1), (2, 2), (2, 3), (3, 2)])
def test_odds_count_the_sets_of_all_placements(replicas: int, scatter: int) -> None:
    """The exact odds equal those of all sets counted, and each placement makes them worse."""
    topology = Topology.of(Host(f"h{n:03d}", {"rack": f"r{n % 4}"}, f"m{n}") for n in range(12))
    placed = [scattered(None, topology, replicas=replicas, scatter=count) for count in (1, scatter)]
    counted = [chances(each, 12) for each in placed]
    assert counted == [enumerated(sets_of(each), topology.hosts) for each in placed]
    assert all(more <= one for one, more in zip(*counted, strict=True))


def test_a_long_ring_is_counted_as_its_closed_form_says() -> None:
    """1,000 hosts in a ring, two in a row fatal: n / (n - k) C(n - k, k) sets of k are harmless."""
    found = chances(even(1000, 2, "ring"), 8)
    assert found == [Fraction(1000 * comb(1000 - k, k), (1000 - k) * comb(1000, k)) for k in range(9)]


@pytest.mark.parametrize(
    ("width", "tolerated", "lost", "fatal"),
    [(2, 1, 2, "0.84"), (5, 1, 2, "3.36"), (10, 1, 2, "7.56"), (10, 2, 3, "0.513"), (3, 2, 3, "0.0142")],
)
def test_odds_of_groups_of_120_hosts(width: int, tolerated: int, lost: int, fatal: str) -> None:
    """Pairs, 4+1 and 9+1 with two hosts lost; 8+2 and three copies with three. In percent."""
    groups = [Bond(frozenset(f"{group}.{at}" for at in range(width)), tolerated) for group in range(120 // width)]
    assert f"{float(100 * (1 - survival_odds(groups, 120, lost)[lost].chance)):.3g}" == str(float(fatal))


@pytest.mark.parametrize("lost", [-1, 5])
def test_more_lost_than_there_are_is_refused(lost: int) -> None:
    """Out of range: a ValueError with the numbers."""
    with pytest.raises(ValueError, match=f"lost_max is {lost}, must be between 0 and the 4 hosts"):
        survival_odds(bonds_of_placement(even(4, 2)), 4, lost)


# -- drawn --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_drawn_odds_hold_the_counted_ones(seed: int) -> None:
    """Groups, a bond without a shape and hosts without bytes; the seeds are fixed, so 95 % is all of these."""
    bonds = [*bonds_of([frozenset("ab"), frozenset("bc"), frozenset("cde")]), Bond(frozenset("fgh"), 1)]
    for lost, each in enumerate(survival_odds(bonds, 12, 6)):
        low, high = sampled_odds(bonds, 12, lost, samples_count=2000, chance=random.Random(seed))
        assert low - 0.01 <= each.chance <= high + 0.01
        assert high - low < 0.05


# -- losses a year ------------------------------------------------------------------------------------


@given(data=st.data(), fatal=st.lists(st.frozensets(st.sampled_from("abcdef"), min_size=1, max_size=3), max_size=5))
@settings(deadline=None, max_examples=60)
def test_losses_of_hosts_equal_those_of_all_states(data: st.DataObject, fatal: list[frozenset[str]]) -> None:
    """Every state of six hosts that are there or away: how often one more loss is fatal, summed by hand."""
    repair_s = data.draw(st.sampled_from([60.0, 1e5, 1e6]))
    rates = Rates(6.5, domain_losses_per_year={})
    away = rates.host_losses_per_s * repair_s / (1 + rates.host_losses_per_s * repair_s)
    expected = 0.0
    for there in product((True, False), repeat=6):
        lost = frozenset(host for host, is_there in zip("abcdef", there, strict=True) if not is_there)
        if any(each <= lost for each in fatal):
            continue
        chance = prod(1 - away if is_there else away for is_there in there)
        fatal_next = sum(any(each <= lost | {host} for each in fatal) for host in set("abcdef") - lost)
        expected += chance * fatal_next * rates.host_losses_per_s * YEAR_S
    (found,) = causes(bonds_of(fatal), Topology.of(map(Host, "abcdef")), rates, repair_s)
    assert found.losses_per_year == pytest.approx(expected, rel=1e-4, abs=1e-15)
    assert found.is_exact


@given(
    racks=st.tuples(*[st.sampled_from(["", "r1", "r2", "r3"])] * 6),
    fatal=st.lists(st.frozensets(st.sampled_from("abcdef"), min_size=2, max_size=2), max_size=5),
)
@settings(deadline=None, max_examples=60)
def test_losses_of_racks_equal_those_of_all_states(racks: tuple[str, ...], fatal: list[frozenset[str]]) -> None:
    """Every state of six hosts and their racks. Left out are two racks and a host, in the third order of the rates."""
    rates = Rates(6.5, domain_losses_per_year={"rack": 2.0, "zone": 9.0})
    members = {
        rack: frozenset(h for h, r in zip("abcdef", racks, strict=True) if r == rack) for rack in {*racks} - {""}
    }
    units = {**{host: (frozenset(host), rates.host_losses_per_s) for host in "abcdef"}}
    units |= {rack: (hosts, rates.domain_losses_per_s("rack")) for rack, hosts in members.items()}
    expected = 0.0
    for there in product((True, False), repeat=len(units)):
        gone = [hosts for (hosts, _), is_there in zip(units.values(), there, strict=True) if not is_there]
        lost = frozenset().union(*gone)
        if any(each <= lost for each in fatal):
            continue
        shares = [rate * 3600 / (1 + rate * 3600) for _, rate in units.values()]
        chance = prod(1 - away if is_there else away for is_there, away in zip(there, shares, strict=True))
        for (hosts, rate), is_there in zip(units.values(), there, strict=True):
            if is_there and any(each <= lost | hosts for each in fatal):
                expected += chance * rate * YEAR_S
    hosts = [Host(host, {"rack": rack} if rack else {}) for host, rack in zip("abcdef", racks, strict=True)]
    found = causes(bonds_of(fatal), Topology.of(hosts), rates, 3600.0)
    assert [each.level for each in found] == ["host", *(["rack"] if members else [])]
    assert sum(each.losses_per_year for each in found) == pytest.approx(expected, rel=0.01, abs=1e-12)


def test_what_copies_over_racks_do_not_survive_is_seen() -> None:
    """Pairs in racks of their own, first and third of four: a feed of power for two neighbours has one, else both."""
    apart, together = ({f"r{rack}": f"p{feed}" for rack, feed in enumerate(feeds)} for feeds in ("0011", "0101"))
    alone = {}
    for feed_of in (apart, together):
        labels = [{"rack": f"r{n // 4}", "power": feed_of[f"r{n // 4}"]} for n in range(16)]
        topology = Topology.of((Host(f"h{n:02d}", each) for n, each in enumerate(labels)), ("rack",))
        found = causes(bonds_of_placement(place(topology, replicas=2)), topology, PRESETS["rsc"], 60.0)
        alone[feed_of is apart] = {each.level: each.fatal_alone for each in found}
        power = next(each for each in found if each.level == "power")
        if feed_of is together:
            assert power.losses_per_year == pytest.approx(2 * PRESETS["rsc"].domain_losses_per_year["power"], rel=1e-3)
    assert alone == {True: {"host": 0, "rack": 0, "power": 0}, False: {"host": 0, "rack": 0, "power": 1}}


def test_too_many_hosts_away_are_refused() -> None:
    """A repair that never ends is no model of a cluster that trains: the numbers are named."""
    with pytest.raises(ValueError, match=r"1,\d\d\d of 2,000 hosts would wait for their bytes .* at most 100"):
        causes([], Topology.of(Host(f"h{n}") for n in range(2000)), PRESETS["rsc"], 1e8)


@pytest.mark.parametrize(("field", "value"), [("memory_share", 1.5), ("failures_per_1000_host_days", -1.0)])
def test_what_is_no_rate_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value:g}, must be a number from 0 to"):
        Rates(**{"failures_per_1000_host_days": 1.0, field: value})
