"""What are the odds that k hosts lost at once destroy some shard: exact (d.2).

Losses are independent and uniform here: every set of k hosts is equally likely. A rack going
dark is not in this model; that is what separation over failure domains is for.
Pure: no torch, ray, socket, clock, environment or file access. Read README.md for the maths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from fractions import Fraction
from math import comb

from placement.groups import Placement, components_of, group_of

IRREGULAR_HOSTS_MAX = 24  # hosts in one component that is neither group nor ring: 2**24 sets at worst


def survival_odds(placement: Placement, lost_count: int) -> Fraction:
    """Return the chance that every shard keeps a copy when `lost_count` random hosts are lost.

    Hosts that share no copies survive independently of one another, so the numbers of harmless
    sets multiply like polynomials: sum over j of (harmless sets of j hosts) x**j, per component.
    If no more hosts are lost than the least number of copies, each set of them holds at most one
    fatal set, and these are counted. Groups and rings have series of their own; components of other
    shapes (after `rebalance`, or pairs redirected for lack of room) are counted, if small.

    Args:
        placement: `targets` is what counts, and those of all placements beside it; `groups` is not consulted.
        lost_count: Hosts lost together, 0 <= lost_count <= number of hosts.

    Returns:
        An exact fraction in [0, 1]; 1 while lost_count < the least number of copies.

    Raises:
        ValueError: lost_count is out of range, or an irregular component has more than
            IRREGULAR_HOSTS_MAX hosts and more hosts are lost than the least number of copies.

    Complexity: O(hosts x copies) for the fatal sets; else O(k**2) big-number operations for each
        ring or irregular component, and O(k**2 log groups) for the groups of one size.
    Source: the ring count is the cycle lemma on gaps between survivors; the product is ours.
    """
    hosts_count = len(placement.targets)
    _check(hosts_count, lost_count)
    fatal = fatal_sets(placement)
    if fatal and lost_count <= min(map(len, fatal)):
        return 1 - Fraction(sum(len(each) == lost_count for each in fatal), comb(hosts_count, lost_count))
    total = [1] + [0] * lost_count
    group_sizes: Counter[int] = Counter()
    for members in components_of(placement.merged()):
        shape = group_of(members, placement.targets) if not placement.scattered else None
        if shape is not None and shape.kind == "group":
            group_sizes[len(members)] += 1
        elif shape is not None:
            total = _product(total, _ring_series(len(members), len(placement.targets[members[0]]) + 1, lost_count))
        else:
            total = _product(total, _irregular_series(members, placement, lost_count))
    for size, count in sorted(group_sizes.items()):
        total = _product(total, _groups_series(size, count, size - 1, lost_count))
    return Fraction(total[lost_count], comb(hosts_count, lost_count))


def group_odds(sizes: Iterable[int], tolerated: int, lost_count: int) -> Fraction:
    """Return the chance that no group loses more than `tolerated` hosts when `lost_count` random hosts are lost.

    Args:
        sizes: Hosts of each group; no host is in two.
        tolerated: Hosts that each group may lose: p of parity over k + p hosts, m - 1 of m copies.
        lost_count: Hosts lost together, 0 <= lost_count <= sum of the sizes.

    Raises:
        ValueError: lost_count is out of range.

    Complexity: O(lost_count**2 log groups) big-number operations for the groups of each size.
    Source: ours.
    """
    counts = Counter(sizes)
    hosts_count = sum(size * count for size, count in counts.items())
    _check(hosts_count, lost_count)
    total = [1] + [0] * lost_count
    for size, count in sorted(counts.items()):
        total = _product(total, _groups_series(size, count, tolerated, lost_count))
    return Fraction(total[lost_count], comb(hosts_count, lost_count))


def fatal_sets(placement: Placement) -> set[frozenset[str]]:
    """Return the sets of hosts with all copies of some shard."""
    return {frozenset((owner, *held)) for each in placement.placements for owner, held in each.targets.items()}


def _check(hosts_count: int, lost_count: int) -> None:
    if not 0 <= lost_count <= hosts_count:
        raise ValueError(f"lost_count is {lost_count}, must be between 0 and the {hosts_count} hosts placed")


def _groups_series(size: int, count: int, tolerated: int, degree: int) -> list[int]:
    """Return the coefficients of ((1+x)**size without terms above x**tolerated)**count: each loses no more than that.

    The power is the product of the squares that the bits of `count` name.
    """
    square = [comb(size, lost) if lost <= tolerated else 0 for lost in range(degree + 1)]
    series = [1] + [0] * degree
    while count:
        if count & 1:
            series = _product(series, square)
        count >>= 1
        square = _product(square, square) if count else square
    return series


def _ring_series(hosts_count: int, replicas: int, degree: int) -> list[int]:
    """Return, per number lost, the sets without `replicas` lost hosts in a row on the circle.

    Cut the circle at a survivor: the n - k survivors leave n - k gaps of at most m - 1 lost
    hosts that sum to k. Each circular arrangement is met once per survivor it may be cut at,
    and there are n rotations, hence the factor n / (n - k).
    """
    series = []
    for lost in range(degree + 1):
        kept = hosts_count - lost
        if kept <= 0:
            series.append(0)
            continue
        fillings = sum(
            (-1) ** over * comb(kept, over) * comb(lost - over * replicas + kept - 1, kept - 1)
            for over in range(min(kept, lost // replicas) + 1)
        )
        series.append(hosts_count * fillings // kept)
    return series


def _irregular_series(members: Sequence[str], placement: Placement, degree: int) -> list[int]:
    if len(members) > IRREGULAR_HOSTS_MAX:
        raise ValueError(
            f"{len(members)} hosts share copies in a shape that is neither group nor ring; exact odds are counted "
            f"up to {IRREGULAR_HOSTS_MAX} such hosts; compute a new placement, or sample the odds"
        )
    index = {host: at for at, host in enumerate(members)}
    fatal = {
        sum(1 << index[host] for host in (owner, *each.targets[owner]))
        for each in placement.placements
        for owner in members
    }
    series = _harmless(frozenset(fatal), len(members))
    return (series + [0] * (degree + 1))[: degree + 1]


def _harmless(fatal: Collection[int], free_count: int) -> list[int]:
    """Count, per size, the subsets of `free_count` hosts that contain no fatal set (bit masks).

    Decide the host that most fatal sets name: kept, its sets are harmless; lost, they shrink.
    """
    if not fatal:
        return [comb(free_count, size) for size in range(free_count + 1)]
    if 0 in fatal:
        return [0] * (free_count + 1)
    named = Counter(bit for mask in fatal for bit in range(mask.bit_length()) if mask >> bit & 1)
    pivot = 1 << min(named, key=lambda bit: (-named[bit], bit))
    kept = _harmless(frozenset(mask for mask in fatal if not mask & pivot), free_count - 1)
    lost = _harmless(frozenset(mask & ~pivot for mask in fatal), free_count - 1)
    return [a + b for a, b in zip([*kept, 0], [0, *lost], strict=True)]


def _product(left: Sequence[int], right: Sequence[int]) -> list[int]:
    """Multiply two series of one length, dropping higher terms."""
    return [sum(left[i] * right[degree - i] for i in range(degree + 1)) for degree in range(len(left))]
