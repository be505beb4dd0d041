"""The losses that the present copies survive, counted from the copies that exist, not from the planned ones (R18).

Pure. A chunk survives the loss of any k domains exactly if more than k domains hold it, so the answer for a level is
the least number of domains that hold one chunk, less one. Read `problems.py` next.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from math import comb

from memstore.core.wire.status_rows import SurvivalRow
from placement.topology import HOST_LEVEL, Topology, levels_of, name_some
from recovery.inventory import Copy

COUNTED_SETS_MAX = 20_000  # loss sets looked at for one answer: the controller must not be busy for long


@dataclass(frozen=True, slots=True)
class Odds:
    """The chance that every shard keeps a copy; `is_exact` is False where it is at least that."""

    chance: float
    is_exact: bool


def survival(shards: Sequence[Collection[Copy]], topology: Topology) -> list[SurvivalRow]:
    """Return, coarsest level first, how many domains may be lost with every shard keeping a whole copy.

    -1: some chunk is nowhere even now. `fatal` names the domains each of which alone has the only copy of something.

    Args:
        shards: For every rank, the verified copies of its committed shard. Copies that lack chunks count for the
            chunks they have, as a restore takes chunks from several sources.
        topology: The hosts that are not dead. Copies on other hosts do not count. A level that labels none of them
            is left out; hosts without the label share one domain (R18), and hosts on one machine that are not
            explicit share that of the machine (R1).

    Complexity: levels x (copies + copies x damaged chunks).
    Source: ours.
    """
    found = []
    for level in levels_of(topology.failure_domains):
        if level != HOST_LEVEL and not any(host.domain(level) for host in topology.hosts.values()):
            continue
        least, fatal = len(topology.hosts), set()
        for copies in shards:
            for domains in _domains_by_chunk([c for c in copies if c.host in topology.hosts], level, topology):
                least = min(least, len(domains))
                fatal |= domains if len(domains) == 1 else set()
        words = sorted(_in_words(topology, level, domain) for domain in fatal) if least == 1 else []
        found.append(SurvivalRow(level=level, tolerated=least - 1, fatal=words))
    return found


def survival_odds(shards: Iterable[Iterable[str]], hosts: Collection[str], lost_count: int) -> Odds | None:
    """Return the chance that `lost_count` of the hosts, lost at once at random, leave every shard a copy.

    Every set of hosts is looked at if there are at most COUNTED_SETS_MAX. With more the chance is bounded from below:
    the sets that hold all copies of one shard are added up over the shards, as if no set held those of two. The bound
    is the chance itself where every shard lies on exactly `lost_count` hosts or on more.

    Args:
        shards: For every shard, the hosts that hold a whole copy.
        hosts: All hosts that may be lost, equally likely.
        lost_count: How many are lost.

    Returns:
        None if there are fewer hosts.

    Complexity: linear in the shards, or (sets of hosts) x (different sets of holders) where they are counted.
    Source: the union bound, as in Gemini's corollary (SOSP 2023), over the copies that are there.
    """
    if lost_count > len(hosts):
        return None
    fatal = {frozenset(holders) for holders in shards}
    sets_count = comb(len(hosts), lost_count)
    if sets_count <= COUNTED_SETS_MAX:
        bit = {host: 1 << at for at, host in enumerate(sorted(hosts))}
        masks = {sum(bit[host] for host in holders) for holders in fatal}
        lost_sets = [sum(lost) for lost in combinations(bit.values(), lost_count)]
        return Odds(sum(not any(mask & lost == mask for mask in masks) for lost in lost_sets) / sets_count, True)
    reachable = [holders for holders in fatal if len(holders) <= lost_count]
    harmful = sum(comb(len(hosts) - len(holders), lost_count - len(holders)) for holders in reachable)
    is_exact = all(len(holders) == lost_count for holders in reachable)
    return Odds(float(max(Fraction(0), 1 - Fraction(harmful, sets_count))), is_exact)


def held_for(
    rank_hosts: Mapping[int, str], ranks: Mapping[int, Mapping[str, object]], hosts: Iterable[str]
) -> dict[str, list[str]]:
    """Return, per host, the hosts of the ranks whose shards it holds: itself first if it holds its own.

    Args:
        rank_hosts: Host of every rank.
        ranks: rank -> host -> copy, of one step.
        hosts: The hosts to answer for.
    """
    table: dict[str, set[str]] = {host: set() for host in hosts}
    for rank, copies in ranks.items():
        for host in copies:
            if host in table and rank in rank_hosts:
                table[host].add(rank_hosts[rank])
    return {host: sorted(owners, key=lambda owner: (owner != host, owner)) for host, owners in table.items()}


def _domains_by_chunk(copies: list[Copy], level: str, topology: Topology) -> Iterable[set[str]]:
    """Yield the set of domains that hold a chunk, once per different case."""
    yield {topology.hosts[c.host].domain(level) for c in copies}  # chunks that no copy lacks, if there are any
    for index in sorted(set().union(*(c.missing for c in copies))):
        yield {topology.hosts[c.host].domain(level) for c in copies if index not in c.missing}


def _in_words(topology: Topology, level: str, domain: str) -> str:
    members = [host.host_id for host in topology.hosts.values() if host.domain(level) == domain]
    if level != HOST_LEVEL:
        return f"{level} {domain}" if domain else f"the hosts without a {level} label ({name_some(members)})"
    return members[0] if len(members) == 1 else f"the machine of {name_some(members)}"
