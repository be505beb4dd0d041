"""Who sends what, so that no source sends more than its share? Balances chunks over the hosts that hold them (R24).

Pure, imports nothing of ours. Read `transfers.py` next.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence


def share(demands: Sequence[tuple[tuple[str, ...], int]]) -> list[dict[str, int]]:
    """Return for each demand how many of its chunks each of its hosts sends.

    A demand is a count of chunks, any of which any host in its tuple can send. The heaviest load over all hosts is
    the least possible, in chunks, and so is the next heaviest, and so on: first each demand is poured into its least
    loaded hosts, then chunks are handed on along paths from heavy hosts to lighter ones until no path gains.

    Raises:
        ValueError: a demand has chunks but no host.

    Complexity: pouring is O(n log n) in the demands' hosts; each handing-on is one breadth-first search of the part
        of the graph that is not settled yet.
    Source: Harvey, Ladner, Lovasz, Tamir, "Semi-matchings for bipartite graphs and load balancing" (WADS 2003,
        theorem: optimal if and only if there is no cost-reducing path). Handing on many chunks at once is ours.
    """
    loads: dict[str, int] = {}
    for hosts, count in demands:
        if count and not hosts:
            raise ValueError(f"{count} chunks are asked for from no host at all")
        for host in hosts:
            loads.setdefault(host, 0)
    shares: list[dict[str, int]] = [{} for _ in demands]
    for index in sorted(range(len(demands)), key=lambda index: len(demands[index][0])):  # the least choice first
        hosts, count = demands[index]
        if count:
            shares[index] = _pour(hosts, count, loads)
            for host, sent in shares[index].items():
                loads[host] += sent
    _even_out([hosts for hosts, _ in demands], shares, loads)
    return shares


def _pour(hosts: Sequence[str], count: int, loads: Mapping[str, int]) -> dict[str, int]:
    """Return `count` chunks poured over the hosts as water into vessels: the lowest fill first, then together."""
    order = sorted(hosts, key=lambda host: (loads[host], host))
    used, below = len(order), 0
    for position, host in enumerate(order):
        if loads[host] * position - below >= count:  # those before it take everything without reaching its level
            used = position
            break
        below += loads[host]
    level, extra = divmod(below + count, used)
    return {host: level - loads[host] + (position < extra) for position, host in enumerate(order[:used])}


def _even_out(holders: Sequence[Sequence[str]], shares: list[dict[str, int]], loads: dict[str, int]) -> None:
    demands_of: dict[str, list[int]] = {host: [] for host in loads}
    for index, hosts in enumerate(holders):
        for host in hosts:
            demands_of[host].append(index)
    settled: set[str] = set()
    heap = [(-load, host) for host, load in loads.items()]
    heapq.heapify(heap)
    while heap:
        load, heavy = heapq.heappop(heap)
        if heavy in settled or -load != loads[heavy]:
            continue
        came_from, light = _search(heavy, holders, demands_of, shares, loads, settled)
        if light is None:
            # All that `heavy`, the heaviest left, can reach is within one chunk of it and leads nowhere else, so no
            # later path can gain by ending here or passing through.
            settled.update(came_from)
            settled.add(heavy)
            continue
        _hand_on(heavy, light, came_from, shares, loads)
        for host in (heavy, light):
            heapq.heappush(heap, (-loads[host], host))


def _search(
    heavy: str,
    holders: Sequence[Sequence[str]],
    demands_of: Mapping[str, Sequence[int]],
    shares: Sequence[Mapping[str, int]],
    loads: Mapping[str, int],
    settled: set[str],
) -> tuple[dict[str, tuple[str, int]], str | None]:
    """Return how each host was reached from `heavy`, and the first found that is lighter by two chunks or more."""
    came_from: dict[str, tuple[str, int]] = {}
    seen_demands: set[int] = set()
    queue = [heavy]
    for host in queue:
        for index in demands_of[host]:
            if index in seen_demands or not shares[index].get(host):
                continue
            seen_demands.add(index)
            for other in holders[index]:
                if other == heavy or other in came_from or other in settled:
                    continue
                came_from[other] = (host, index)
                if loads[other] <= loads[heavy] - 2:
                    return came_from, other
                queue.append(other)
    return came_from, None


def _hand_on(
    heavy: str,
    light: str,
    came_from: Mapping[str, tuple[str, int]],
    shares: list[dict[str, int]],
    loads: dict[str, int],
) -> None:
    path: list[tuple[str, str, int]] = []
    host = light
    while host != heavy:
        giver, index = came_from[host]
        path.append((giver, host, index))
        host = giver
    count = min((loads[heavy] - loads[light]) // 2, *(shares[index][giver] for giver, _, index in path))
    for giver, taker, index in path:
        shares[index][giver] -= count
        shares[index][taker] = shares[index].get(taker, 0) + count
    loads[heavy] -= count
    loads[light] += count
