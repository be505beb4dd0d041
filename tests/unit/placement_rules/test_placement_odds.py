"""Exact odds of survival against enumeration and Gemini's table (d.2)."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement import Host, Placement, Topology, place, scattered, survival_odds


def _even(hosts_count: int, replicas: int, strategy: str = "mixed") -> Placement:
    topology = Topology.of(Host(f"h{at:04d}") for at in range(hosts_count))
    return place(topology, replicas=replicas, strategy=strategy)  # type: ignore[arg-type]


def survival_odds_counted(placement: Placement, lost_count: int) -> Fraction:
    """Return the odds of survival by looking at every set of so many lost hosts."""
    shards = [{owner, *held} for each in placement.placements for owner, held in each.targets.items()]
    sets = [set(lost) for lost in combinations(placement.targets, lost_count)]
    return Fraction(sum(not any(copies <= lost for copies in shards) for lost in sets), len(sets))


def corollary_bound(hosts_count: int, replicas: int, lost_count: int) -> Fraction:
    """Gemini's union bound for groups: max(0, 1 - (N/m) C(N-m, k-m) / C(N, k)), and 1 while k < m."""
    if lost_count < replicas:
        return Fraction(1)
    fatal = hosts_count // replicas * comb(hosts_count - replicas, lost_count - replicas)
    return max(Fraction(0), 1 - Fraction(fatal, comb(hosts_count, lost_count)))


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
    (128, 2, 2, "0.9921", None, None),
    (128, 2, 3, "0.9764", None, None),
    (128, 2, 4, "0.9529", None, None),
    (1024, 2, 2, "0.9990", None, None),
    (1024, 2, 3, "0.9971", None, None),
    (1024, 2, 4, "0.9941", None, None),
]


@pytest.mark.parametrize(("hosts", "copies", "lost", "mixed", "ring", "bound"), TABLE)
def test_table_of_recovery_probabilities(
    hosts: int, copies: int, lost: int, mixed: str, ring: str | None, bound: str | None
) -> None:
    """Mixed, ring over all, and the corollary, to four digits."""
    assert f"{float(survival_odds(_even(hosts, copies), lost)):.4f}" == mixed
    if ring is not None:
        assert f"{float(survival_odds(_even(hosts, copies, 'ring'), lost)):.4f}" == ring
    if bound is not None:
        assert f"{float(corollary_bound(hosts, copies, lost)):.4f}" == bound


@given(hosts=st.integers(1, 9), copies=st.integers(1, 5), strategy=st.sampled_from(("mixed", "group", "ring")))
@settings(deadline=None, max_examples=100)
def test_closed_form_equals_enumeration(hosts: int, copies: int, strategy: str) -> None:
    """For every number lost, groups and rings alike."""
    placement = _even(hosts, copies, strategy)
    for lost in range(hosts + 1):
        assert survival_odds(placement, lost) == survival_odds_counted(placement, lost)


@given(data=st.data(), hosts=st.integers(2, 9))
@settings(deadline=None, max_examples=100)
def test_irregular_shapes_equal_enumeration(data: st.DataObject, hosts: int) -> None:
    """Any targets at all, as after a rebalance, owners without any copy included."""
    ids = [f"h{at}" for at in range(hosts)]
    targets = {
        owner: tuple(data.draw(st.lists(st.sampled_from([h for h in ids if h != owner]), unique=True, max_size=3)))
        for owner in ids
    }
    placement = Placement(targets, (), "host", 1, 2)
    for lost in range(hosts + 1):
        assert survival_odds(placement, lost) == survival_odds_counted(placement, lost)


@given(groups=st.integers(1, 5), copies=st.integers(1, 4), lost=st.integers(0, 20))
def test_corollary_is_a_lower_bound_exact_below_twice_the_copies(groups: int, copies: int, lost: int) -> None:
    """Gemini's union bound never promises more than there is."""
    hosts = groups * copies
    lost = min(lost, hosts)
    exact, bound = survival_odds(_even(hosts, copies), lost), corollary_bound(hosts, copies, lost)
    assert bound <= exact
    if lost < 2 * copies:
        assert bound == exact


@pytest.mark.parametrize(("replicas", "scatter"), [(2, 1), (2, 2), (2, 3), (3, 2)])
def test_odds_count_the_sets_of_all_placements(replicas: int, scatter: int) -> None:
    """The exact odds equal those of all sets counted, and each placement makes them worse."""
    topology = Topology.of(Host(f"h{n:03d}", {"rack": f"r{n % 4}"}, f"m{n}") for n in range(12))
    placed = [scattered(None, topology, replicas=replicas, scatter=count) for count in (1, scatter)]
    for lost in range(replicas + 3):
        odds = [survival_odds(each, lost) for each in placed]
        assert odds == [survival_odds_counted(each, lost) for each in placed]
        assert odds[1] <= odds[0]


def test_fewer_losses_than_copies_are_always_survived() -> None:
    """The promise of m copies, and its limit: all hosts lost is never survived."""
    placement = _even(100, 3)
    assert [survival_odds(placement, lost) for lost in (0, 1, 2)] == [Fraction(1)] * 3
    assert survival_odds(placement, 3) < 1
    assert survival_odds(placement, 100) == 0


def test_limits_are_refused_by_name() -> None:
    """Out of range, too irregular: each a ValueError with the numbers."""
    placement = _even(4, 2)
    for lost in (-1, 5):
        with pytest.raises(ValueError, match=f"lost_count is {lost}, must be between 0 and the 4 hosts"):
            survival_odds(placement, lost)
    star = {f"h{at}": ("h0",) if at else ("h1",) for at in range(30)}
    with pytest.raises(ValueError, match=r"30 hosts share copies .* up to 24"):
        survival_odds(Placement(star, (), "host", 2, 2), 2)
