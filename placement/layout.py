"""Who sits in which replica group: cut hosts into groups and a ring, domains apart (Gemini, d.1).

Works on hosts already sorted into failure domains, knows neither bytes nor labels.
Pure: no torch, ray, socket, clock, environment or file access. Read `groups.py` next.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def arrange(
    domains: Sequence[Sequence[str]], replicas: int, strategy: str
) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """Return the replica groups of `replicas` hosts each, and the ring (empty if none).

    Every group, and every `replicas` hosts in a row on the ring, lie in distinct domains, if no
    domain has more than `hosts_count // replicas` hosts. That bound is also necessary for any
    scheme in which every host stores the same number of peers (see placement/README.md).

    Args:
        domains: Hosts per failure domain. Neighbouring domains should share the coarser ones:
            they are dealt to different groups first.
        replicas: Copies per shard, 1 <= replicas <= number of hosts.
        strategy: "ring" makes one ring of all; "group" makes the ring of the remainder as small
            as Gemini does; "mixed" makes it larger where that alone lets the domains stay apart.

    Complexity: O(hosts + ring x log domains).
    Source: Gemini (SOSP 2023), mixed placement; the dealing and the larger ring are ours.
    """
    size = _ring_size([len(hosts) for hosts in domains], replicas, strategy)
    taken = _ring_shares([len(hosts) for hosts in domains], replicas, size)
    ring = ring_order([hosts[len(hosts) - count :] for hosts, count in zip(domains, taken, strict=True)], replicas)
    rest = [host for hosts, count in zip(domains, taken, strict=True) for host in hosts[: len(hosts) - count]]
    # Dealing a list in which each domain is one run: two hosts of a run no longer than the number
    # of groups can never meet, and a longer run is dealt as evenly as can be.
    groups_count = len(rest) // replicas
    return [tuple(rest[start::groups_count]) for start in range(groups_count)], ring


def ring_order(domains: Sequence[Sequence[str]], replicas: int) -> tuple[str, ...]:
    """Order hosts in a circle so that `replicas` in a row lie in distinct domains if possible.

    Possible if and only if no domain has more than q = hosts_count // replicas hosts. The circle
    is q rounds of at least `replicas` places, filled place by place across the rounds. A domain of
    q hosts fills one place of every round when it starts a column (these come first); a smaller
    one that runs over into the next column leaves at least one whole round in between.

    Source: ours.
    """
    hosts_count = sum(len(hosts) for hosts in domains)
    rounds_count = hosts_count // replicas
    if rounds_count == 0:
        return ()
    ordered = sorted(domains, key=lambda hosts: len(hosts) != rounds_count)
    line = [host for hosts in ordered for host in hosts]
    return tuple(host for start in range(rounds_count) for host in line[start::rounds_count])


def _ring_size(sizes: Sequence[int], replicas: int, strategy: str) -> int:
    """Return how many hosts the ring takes: 0, or replicas * laps + remainder."""
    hosts_count = sum(sizes)
    groups_count, remainder = divmod(hosts_count, replicas)
    if strategy == "ring":
        return hosts_count if hosts_count > replicas > 1 else 0
    if remainder == 0:
        return 0
    if strategy == "mixed" and max(sizes) <= groups_count:
        # A ring of `laps` takes at most that many hosts of one domain and must leave no domain
        # more hosts than there are groups left. laps == groups_count (all hosts) always works.
        for laps in range(1, groups_count):
            size = replicas * laps + remainder
            left = groups_count - laps
            if sum(max(0, n - left) for n in sizes) <= size <= sum(min(laps, n) for n in sizes):
                return size
        return hosts_count
    return replicas + remainder


def _ring_shares(sizes: Sequence[int], replicas: int, ring_size: int) -> list[int]:
    """Return how many hosts of each domain sit on the ring; they sum to `ring_size`."""
    laps = ring_size // replicas
    left = sum(sizes) // replicas - laps
    shares = [min(laps, max(0, n - left)) for n in sizes]
    short = ring_size - sum(shares)
    for index in sorted(range(len(sizes)), key=lambda i: (sizes[i], i)) if short < 0 else ():
        drop = min(shares[index], -short)  # only where domains are too big to be kept apart anyway
        shares[index] -= drop
        short += drop
    # Next host: from a domain not yet on the ring `laps` times, the one with most hosts left.
    heap = [(share >= laps, share - n, index) for index, (share, n) in enumerate(zip(shares, sizes, strict=True))]
    heapq.heapify(heap)
    while short > 0:
        _, remaining, index = heapq.heappop(heap)
        if remaining == 0:
            continue
        shares[index] += 1
        short -= 1
        heapq.heappush(heap, (shares[index] >= laps, remaining + 1, index))
    return shares
