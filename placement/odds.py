"""What are the odds that k hosts lost at once destroy some shard: counted, in whole numbers (d.2).

Losses are independent and uniform here: every set of k hosts is equally likely. `losses.py` has racks that go dark.
Pure: no torch, ray, socket, clock, environment or file access. Read README.md for the maths.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from math import comb, sqrt

from placement.groups import Placement

STATES_MAX = 100_000  # looked at while the harmless sets of one bond are counted: half a second at most
Z_95 = 1.96  # standard deviations that hold 95 % of a normal distribution

# -- bonds --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bond:
    """Hosts that keep bytes for one another, and which of them may not be lost together.

    Any more than `tolerated` of them, or where `fatal` is not empty all the hosts of one of these sets.
    """

    hosts: frozenset[str]
    tolerated: int = 0
    fatal: frozenset[frozenset[str]] = frozenset()

    def kills(self, lost: frozenset[str]) -> bool:
        """Return whether this loss takes bytes with it."""
        if self.fatal:
            return any(each <= lost for each in self.fatal)
        return len(self.hosts & lost) > self.tolerated

    def without(self, lost: frozenset[str]) -> list[Bond]:
        """Return what may not be lost any more after `lost`."""
        if self.fatal:
            return bonds_of(each - lost for each in self.fatal)
        return [Bond(self.hosts - lost, self.tolerated - len(self.hosts & lost))]

    def of_domains(self, domain: Mapping[str, str]) -> Iterable[frozenset[str]]:
        """Yield the sets of failure domains that may not be lost together, given those of hosts that are in one."""
        if self.fatal:
            yield from (frozenset(domain[host] for host in each) for each in self.fatal if each <= domain.keys())
            return
        names = sorted(domain[host] for host in self.hosts if host in domain)
        if len(set(names)) == len(names):
            yield from map(frozenset, combinations(names, max(0, self.tolerated + 1)))
            return
        members = Counter(names)
        for count in range(1, self.tolerated + 2):
            for domains in combinations(sorted(members), count):
                if sum(members[each] for each in domains) > self.tolerated:
                    yield frozenset(domains)


def bonds_of(fatal: Iterable[frozenset[str]]) -> list[Bond]:
    """Return the bonds that sets of hosts make, each of which has all that there is of some bytes.

    Complexity: linear in the hosts of all sets, if no set has another one within it.
    """
    sets = _minimal(fatal)
    parent = {host: host for each in sets for host in each}

    def root(host: str) -> str:
        while parent[host] != host:
            parent[host] = parent[parent[host]]
            host = parent[host]
        return host

    for each in sets:
        first, *rest = each or ("",)
        for host in rest:
            parent[root(host)] = root(first)
    together: dict[str, set[frozenset[str]]] = defaultdict(set)
    for each in sets:
        together[root(next(iter(each))) if each else ""].add(each)
    found = []
    for of_bond in together.values():
        hosts, sizes = frozenset[str]().union(*of_bond), {len(each) for each in of_bond}
        is_any = len(sizes) == 1 and len(of_bond) == comb(len(hosts), *sizes)
        found.append(Bond(hosts, min(sizes) - 1) if is_any else Bond(hosts, 0, frozenset(of_bond)))
    return found


def bonds_of_placement(placement: Placement) -> list[Bond]:
    """Return the bonds of copies: the hosts with all copies of some shard may not be lost together."""
    return bonds_of(frozenset((owner, *held)) for each in placement.placements for owner, held in each.targets.items())


def _minimal(sets: Iterable[frozenset[str]]) -> frozenset[frozenset[str]]:
    """Return the sets that have no other one within them."""
    ordered = sorted(set(sets), key=len)
    if not ordered or len(ordered[0]) == len(ordered[-1]):
        return frozenset(ordered)
    if not ordered[0]:
        return frozenset(ordered[:1])
    found: dict[str, list[frozenset[str]]] = defaultdict(list)
    for each in ordered:
        if not any(within <= each for host in each for within in found[host]):
            for host in each:
                found[host].append(each)
    return frozenset(each for of_host in found.values() for each in of_host)


# -- odds ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Odds:
    """The chance that every shard is still there; `is_exact` is False where it is at least that."""

    chance: Fraction
    is_exact: bool


def survival_odds(
    bonds: Sequence[Bond], hosts_count: int, lost_max: int, *, states_max: int = STATES_MAX
) -> list[Odds]:
    """Return the chance that every shard is still there after 0, 1, ... `lost_max` random hosts are lost.

    Parts survive independently of one another, so the numbers of harmless sets multiply like polynomials: sum over j of
    (harmless sets of j hosts) x**j. Where a bond has no shape and too many hosts to count its sets, they are bounded
    from below: the sets that hold a fatal one are added up, as if no set held two. That is exact up to the size of the
    smallest.

    Args:
        bonds: Each host is in one at most.
        hosts_count: All hosts that may be lost, equally likely.
        lost_max: 0 <= lost_max <= hosts_count.
        states_max: Steps of counting for each bond without a shape; one that takes more is bounded.

    Raises:
        ValueError: lost_max is out of range.

    Complexity: O(lost_max**2 log bonds) big-number operations for the bonds of each shape; for each bond without a
        shape `states_max` steps, or O(sets).
    Source: ours; the bound is Gemini's corollary (SOSP 2023), for any shape.
    """
    if not 0 <= lost_max <= hosts_count:
        raise ValueError(f"lost_max is {lost_max}, must be between 0 and the {hosts_count} hosts placed")
    total, exact_to, in_bonds = [1] + [0] * lost_max, lost_max, 0
    shapes: Counter[tuple[int, int]] = Counter()
    for bond in bonds:
        in_bonds += len(bond.hosts)
        if not bond.fatal:
            shapes[len(bond.hosts), bond.tolerated] += 1
            continue
        smallest = min(map(len, bond.fatal))
        series = _counted(bond, lost_max, states_max) if lost_max > smallest else None
        exact_to = exact_to if series else min(exact_to, smallest)
        total = _product(total, series or _bounded(bond, lost_max))
    for (size, tolerated), count in sorted(shapes.items()):
        total = _product(total, _shape_series(size, count, tolerated, lost_max))
    total = _product(total, [comb(hosts_count - in_bonds, lost) for lost in range(lost_max + 1)])
    return [Odds(Fraction(n, comb(hosts_count, lost)), lost <= exact_to) for lost, n in enumerate(total)]


def sampled_odds(
    bonds: Sequence[Bond], hosts_count: int, lost_count: int, *, samples_count: int, chance: random.Random
) -> tuple[float, float]:
    """Return between which chances every shard is still there, with 95 % confidence, by drawing sets of lost hosts.

    Complexity: O(samples x lost hosts x fatal sets of one host).
    Source: Wilson's score interval (1927).
    """
    hosts = [(host, bond) for bond in bonds for host in bond.hosts]
    of_host = {
        host: Bond(bond.hosts, 0, frozenset(each for each in bond.fatal if host in each)) if bond.fatal else bond
        for host, bond in hosts
    }
    kept = 0
    for _ in range(samples_count):
        lost = frozenset(hosts[at][0] for at in chance.sample(range(hosts_count), lost_count) if at < len(hosts))
        kept += not any(of_host[host].kills(lost) for host in lost)
    share, spread = kept / samples_count, Z_95**2 / samples_count
    middle, half = share + spread / 2, sqrt(share * (1 - share) * spread + spread**2 / 4)
    return (middle - half) / (1 + spread), (middle + half) / (1 + spread)


def corollary(hosts_count: int, replicas: int, lost_count: int) -> Fraction | None:
    """Return Gemini's bound for copies in groups, 1 - (N/m) C(N-m, k-m) / C(N, k), 1 for k < m; None if m bonds N not.

    Source: Wang et al., "Gemini", SOSP 2023, corollary 1.
    """
    groups_count, rest = divmod(hosts_count, replicas)
    if rest or lost_count > hosts_count:
        return None
    if lost_count < replicas:
        return Fraction(1)
    fatal = groups_count * comb(hosts_count - replicas, lost_count - replicas)
    return max(Fraction(0), 1 - Fraction(fatal, comb(hosts_count, lost_count)))


# -- series -------------------------------------------------------------------------------------------
# Per number of hosts lost, in how many ways that is harmless.


def _shape_series(size: int, count: int, tolerated: int, degree: int) -> list[int]:
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


def _counted(bond: Bond, degree: int, states_max: int) -> list[int] | None:
    """Return the series of a bond without a shape, or None if there are more than `states_max` states.

    Hosts are decided one after the other, neighbours together. What matters then of those decided are the lost ones in
    sets that are still open, and how many are lost in all: a ring of any length has few such states.
    """
    order = {host: at for at, host in enumerate(_neighbours_together(bond))}
    closing: dict[int, list[int]] = defaultdict(list)
    last_of = [0] * len(order)  # where the last set of a host ends
    for each in bond.fatal:
        at = max(order[host] for host in each)
        closing[at].append(sum(1 << order[host] for host in each))
        for host in each:
            last_of[order[host]] = max(last_of[order[host]], at)
    ends: dict[int, int] = defaultdict(int)
    for at, last in enumerate(last_of):
        ends[last] |= 1 << at
    states, looked = {(0, 0): 1}, 0
    for at in range(len(order)):
        looked += len(states)
        if looked > states_max:
            return None
        found: dict[tuple[int, int], int] = defaultdict(int)
        for (mask, lost), ways in states.items():
            found[mask & ~ends[at], lost] += ways
            more = mask | 1 << at
            if lost < degree and not any(each & more == each for each in closing[at]):
                found[more & ~ends[at] if lost + 1 < degree else 0, lost + 1] += ways
        states = found
    series = [0] * (degree + 1)
    for (_, lost), ways in states.items():
        series[lost] += ways
    return series


def _neighbours_together(bond: Bond) -> list[str]:
    """Return a bond's hosts, those near one another in sets close together."""
    sets_of: dict[str, list[frozenset[str]]] = defaultdict(list)
    for each in sorted(map(sorted, bond.fatal)):
        for host in each:
            sets_of[host].append(frozenset(each))
    found: dict[str, None] = {}
    queue = deque([min(sets_of, key=lambda host: (len(sets_of[host]), host))])
    while queue:
        host = queue.popleft()
        if host not in found:
            found[host] = None
            queue.extend(near for each in sets_of[host] for near in sorted(each) if near not in found)
    return [*found, *sorted(bond.hosts - found.keys())]


def _bounded(bond: Bond, degree: int) -> list[int]:
    """Return at most the series of a bond without a shape."""
    count, sizes = len(bond.hosts), Counter(map(len, bond.fatal))
    series = []
    for lost in range(degree + 1):
        harmful = sum(sets * comb(count - size, lost - size) for size, sets in sizes.items() if size <= lost)
        series.append(max(0, comb(count, lost) - harmful))
    return series


def _product(left: Sequence[int], right: Sequence[int]) -> list[int]:
    """Multiply two series of one length, dropping higher terms."""
    return [sum(left[i] * right[degree - i] for i in range(degree + 1)) for degree in range(len(left))]
