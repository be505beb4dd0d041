"""Which ranks keep parity for one another: sets of k + p to 2 (k + p) - 1 ranks, on hosts in distinct failure domains.

Pure: no torch, ray, socket, clock, environment or file access. Read `recovery/parity.py` for what a set does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from placement.groups import hosts_by_domain, swapped
from placement.topology import Topology

DATA_MIN = 2  # hosts whose bytes are in one row: of one it would be a copy


def parity_groups(topology: Topology, level: str, data_hosts: int, spare_hosts: int = 1) -> list[tuple[str, ...]]:
    """Return groups of hosts in distinct failure domains, as many as there can be of k + p hosts; [] for none.

    Every group has k + p to 2 (k + p) - 1 hosts, and with less than that many hosts they are one. Where a domain has
    more hosts than there would be groups, there are more groups, and so smaller ones; none if they would have fewer
    than 2 + p hosts. So too where groups of a job's ranks have more: no group of hosts has more than p of one then,
    as far as that is found. A level of groups for which they would be too small does not count.

    Args:
        topology: The hosts.
        level: The level at which the members of a group must differ.
        data_hosts: k, the hosts whose bytes are in one row.
        spare_hosts: p, the rows that each byte is in.

    Complexity: O(hosts log hosts).
    Source: ours; the dealing is that of `groups.arrange`.
    """
    domains = hosts_by_domain(topology, level)
    hosts = [host for members in domains for host in members]
    # Dealt from a list in which each domain is one run, two hosts of a run no longer than the number of groups never
    # meet.
    groups_count = max(1, len(hosts) // (data_hosts + spare_hosts), *map(len, domains)) if hosts else 0
    if not groups_count or len(hosts) // groups_count < DATA_MIN + spare_hosts:
        return []
    levels = [(topology.domains(level), 1)]
    for domain in (topology.domains(each) for each in topology.groups_apart):
        needed = max(groups_count, -(-max(Counter(domain.values()).values()) // spare_hosts))
        if len(hosts) // needed >= DATA_MIN + spare_hosts:
            groups_count, levels = needed, [*levels, (domain, spare_hosts)]
    groups = [tuple(hosts[start::groups_count]) for start in range(groups_count)]
    now, _ = swapped(groups, levels) if len(levels) > 1 else (dict(zip(hosts, hosts, strict=True)), 0)
    return [tuple(now[host] for host in group) for group in groups]


def crowded_groups(topology: Topology, groups: Sequence[Sequence[str]], spare_hosts: int) -> list[str]:
    """Return the levels of groups of which one may be lost with more than p hosts of a parity set."""
    found = []
    for level in topology.groups:
        domain = topology.domains(level)
        if any(max(Counter(domain[host] for host in group).values()) > spare_hosts for group in groups):
            found.append(level)
    return found


def parity_sets(
    groups: Sequence[Sequence[str]], ranks: Mapping[str, Sequence[int]], spare_hosts: int = 1
) -> tuple[tuple[int, ...], ...]:
    """Return the sets of ranks of groups of hosts: the first rank of every host of a group, the second, and so on.

    Ranks that would be in a set of fewer than 2 + p are in none.

    >>> parity_sets([("a", "b", "c", "d")], {"a": [0, 1], "b": [2, 3], "c": [4, 5], "d": [6]})
    ((0, 2, 4, 6), (1, 3, 5))
    """
    found = []
    for group in groups:
        held = [sorted(ranks.get(host, ())) for host in group]
        for number in range(max(map(len, held), default=0)):
            members = sorted(each[number] for each in held if number < len(each))
            if len(members) >= DATA_MIN + spare_hosts:
                found.append(tuple(members))
    return tuple(sorted(found))
