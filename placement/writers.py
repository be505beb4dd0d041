"""Which ranks copy where several hold equal state: as many as there are to be copies, none in another's domain.

Pure: no torch, ray, socket, clock, environment or file access. Read `groups.py` for where copies of other state go.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

from placement.topology import Topology


def choose_writers(
    shard_of: Sequence[int],
    hosts: Sequence[str],
    topology: Topology,
    *,
    level: str,
    replicas: int,
    avoid: Collection[str] = (),
) -> tuple[int, ...]:
    """Return the ranks that copy, in order.

    Of every shard as many as can sit in distinct domains, at most `replicas`. Which of several hosts is a matter of
    load: the one with the fewest writers so far, then the lowest rank, so that a host with ranks of many shards copies
    no more of them than its neighbours.

    Args:
        shard_of: By rank: the number of the shard whose state it holds.
        hosts: By rank: the host it sits on.
        topology: Hosts and their labels; one that is not in it is in a domain of its own, and chosen last.
        level: The level of the domains that are to be distinct.
        replicas: Copies per shard.
        avoid: Hosts to be chosen only in a domain that has no other, such as those about to go.

    Returns:
        The same ranks for the same input.

    Raises:
        ValueError: `replicas` below 1, or not one host for every rank.

    Complexity: O(ranks log ranks).
    """
    if replicas < 1 or len(shard_of) != len(hosts):
        raise ValueError(f"{len(shard_of)} ranks on {len(hosts)} hosts with {replicas} replicas")
    domains = topology.domains(level)
    members: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, shard in enumerate(shard_of):
        known = domains.get(hosts[rank])
        members[shard][f"unknown:{hosts[rank]}" if known is None else f"known:{known}"].append(rank)
    load: Counter[str] = Counter()

    def cost(rank: int) -> tuple[bool, int, int]:
        host = hosts[rank]
        return host in avoid or host not in topology.hosts, load[host], rank

    chosen: list[int] = []
    for shard in sorted(members):
        nearest = sorted(min(ranks, key=cost) for ranks in members[shard].values())
        for rank in sorted(nearest, key=cost)[:replicas]:
            load[hosts[rank]] += 1
            chosen.append(rank)
    return tuple(sorted(chosen))
