"""How often does a cluster lose bytes: hosts one after the other, and racks, switches and feeds of power whole.

Pure: no torch, ray, socket, clock, environment or file access. Read `odds.py` and `rates.py` first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import exp, lgamma, log, log1p

from placement.odds import Bond, Odds, bonds_of, survival_odds
from placement.rates import DAY_S, DAYS_A_YEAR, Rates
from placement.topology import HOST_LEVEL, Topology

YEAR_S = DAYS_A_YEAR * DAY_S
LEAST = 1e-12  # chances below do not count
AWAY_MAX = 100  # hosts that wait for their bytes on average; with more of them nothing trains


@dataclass(frozen=True, slots=True)
class Cause:
    """How often hosts, or the domains of a level, are lost, and bytes with them."""

    level: str
    units_count: int
    events_per_year: float  # one of the units is lost
    losses_per_year: float  # and bytes with it, because of what else is away just then
    fatal_alone: float  # chance that one of the units takes bytes with it while nothing else is away
    is_exact: bool  # else odds were bounded, and so less than this is lost


def causes(bonds: Sequence[Bond], topology: Topology, rates: Rates, repair_s: float) -> list[Cause]:
    """Return how often bytes are lost: through single hosts, and through whole domains of each level with a rate.

    The model: every host, and every domain, is lost at random at its own rate r, and its bytes are whole again
    w = `repair_s` later, so it is away a share q = r w / (1 + r w) of the time. Bytes are lost when one more is lost of
    N that are there. With S(j) the odds of j random hosts, S_d(j) those with all hosts of domain d lost besides, and
    P(j) the chance that j hosts are away:

        hosts    F = N r (1 - q) sum over j of P(j) (S(j) - S(j + 1))
        domains  the sum over d of r_d (1 - q_d) sum over j of P(j) (S(j) - S_d(j)), and of q_d (F_d - F), F_d with S_d;
                 and F of the domains themselves, without j = 0

    The first is exact. Left out of the second: what domains of two levels, or two domains and a host, take together.

    Args:
        bonds: What may not be lost together.
        topology: The hosts with their labels. A level that labels no host is left out, and hosts without its label.
        rates: How often what is lost.
        repair_s: From a loss until the bytes have all their copies, or their parity, again.

    Raises:
        ValueError: more than AWAY_MAX hosts would be away on average.

    Complexity: that of `survival_odds`, for each way in which domains cut bonds.
    Source: the frequency of failures of a system of independent units that are repaired (Barlow and Proschan,
        "Statistical Theory of Reliability and Life Testing", 1975); what is fatal is counted.
    """
    hosts_count, rate = len(topology.hosts), rates.host_losses_per_s
    away = _away(rate, repair_s)
    if hosts_count * away > AWAY_MAX:
        raise ValueError(
            f"{hosts_count * away:,.0f} of {hosts_count:,} hosts would wait for their bytes at any time, must be at "
            f"most {AWAY_MAX}: each is lost {rate * YEAR_S:.3g} times a year and is whole again after {repair_s:,.0f} s"
        )
    odds = survival_odds(bonds, hosts_count, _most_away(bonds, hosts_count, away))
    alone = _frequency(odds, hosts_count, rate, away)
    found = [_cause(HOST_LEVEL, hosts_count, rate, alone, odds, [odds])]
    weights = _binomial(hosts_count, away, len(odds))
    for level, domain_rate in ((each, rates.domain_losses_per_s(each)) for each in rates.domain_losses_per_year):
        domain = {
            host: name for host, name in topology.domains(level).items() if topology.hosts[host].labels.get(level)
        }
        members: dict[str, set[str]] = defaultdict(set)
        for host, name in domain.items():
            members[name].add(host)
        if not members:
            continue
        domain_away, total, looked = _away(domain_rate, repair_s), 0.0, []
        for lost, count in _cuts(bonds, members.values()):
            left = survival_odds(_left(bonds, lost), hosts_count, len(odds) - 1)
            falls = (float(each.chance - then.chance) for each, then in zip(odds, left, strict=True))
            at_once = sum(p * fall for p, fall in zip(weights, falls, strict=True))
            while_away = _frequency(left, hosts_count, rate, away) - alone
            total += count * (domain_rate * (1 - domain_away) * at_once + domain_away * while_away)
            looked.append(left)
        whole = bonds_of(each for bond in bonds for each in bond.of_domains(domain))
        several = survival_odds(whole, len(members), max(1, _most_away(whole, len(members), domain_away)))
        total += _frequency(several, len(members), domain_rate, domain_away, first=1)
        found.append(_cause(level, len(members), domain_rate, max(0.0, total), several, [odds, several, *looked]))
    return found


def _cause(
    level: str, count: int, rate: float, frequency: float, odds: Sequence[Odds], looked: Iterable[Sequence[Odds]]
) -> Cause:
    alone = float(1 - odds[1].chance) if len(odds) > 1 else 1.0
    is_exact = all(each[-1].is_exact for each in looked)
    return Cause(level, count, count * rate * YEAR_S, frequency * YEAR_S, alone, is_exact)


def _cuts(bonds: Sequence[Bond], domains: Iterable[set[str]]) -> list[tuple[frozenset[str], int]]:
    """Return domains that cut the bonds in different ways, and how many cut them alike."""
    of_host = {host: at for at, bond in enumerate(bonds) for host in bond.hosts}
    found: dict[Hashable, tuple[frozenset[str], int]] = {}
    for members in domains:
        lost: dict[int, set[str]] = defaultdict(set)
        for host in members & of_host.keys():
            lost[of_host[host]].add(host)
        cut: Counter[Hashable] = Counter(
            (at, frozenset(hosts)) if bonds[at].fatal else (len(bonds[at].hosts), bonds[at].tolerated, len(hosts))
            for at, hosts in lost.items()
        )
        first, count = found.get(frozenset(cut.items()), (frozenset(members), 0))
        found[frozenset(cut.items())] = first, count + 1
    return list(found.values())


def _left(bonds: Sequence[Bond], lost: frozenset[str]) -> list[Bond]:
    return [left for bond in bonds for left in ([bond] if bond.hosts.isdisjoint(lost) else bond.without(lost))]


def _away(rate: float, repair_s: float) -> float:
    """Return the share of time that a unit is away."""
    return rate * repair_s / (1 + rate * repair_s)


def _most_away(bonds: Sequence[Bond], count: int, away: float) -> int:
    """Return how many units may be away at once and matter: with more than that the chance is below LEAST."""
    smallest = min((min(map(len, bond.fatal), default=bond.tolerated + 1) for bond in bonds), default=0)
    most, chance = 0, exp(-count * away)
    while chance > LEAST or most < count * away:
        most += 1
        chance *= count * away / most
    return min(count, max(most, smallest))


def _binomial(count: int, away: float, terms: int) -> list[float]:
    """Return the chances that 0, 1, ... of so many units are away."""
    if away == 0:
        return [1.0] + [0.0] * (terms - 1)
    ways = (lgamma(count + 1) - lgamma(n + 1) - lgamma(count - n + 1) if n <= count else None for n in range(terms))
    return [0.0 if w is None else exp(w + n * log(away) + (count - n) * log1p(-away)) for n, w in enumerate(ways)]


def _frequency(odds: Sequence[Odds], count: int, rate: float, away: float, *, first: int = 0) -> float:
    """Return how often one of `count` units is lost, with `first` or more away already, and that is fatal."""
    weights = _binomial(count - 1, away, len(odds) - 1)
    falls = (float(odds[n].chance - odds[n + 1].chance) for n in range(len(odds) - 1))
    return count * rate * (1 - away) * sum(p * fall for p, fall in list(zip(weights, falls, strict=True))[first:])
