"""What would happen if these hosts were lost? Dry runs of the planner, moving nothing.

Pure. Behind `memstore plan --lose`. Imports the planner.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from dataclasses import replace

from recovery.inventory import Inventory
from recovery.lineage import Span
from recovery.planner import RecoveryPlan, plan


def lose(inventory: Inventory, hosts: Collection[str]) -> Inventory:
    """Return the inventory after `hosts` died: their copies are gone and no host waits for them.

    Facts and markers stay: they are journalled on every live holder and on durable storage (R16, R31).
    """
    dead = frozenset(hosts)
    copies = tuple(copy for copy in inventory.copies if copy.host not in dead)
    return replace(inventory, copies=copies, silent_hosts=inventory.silent_hosts - dead)


def relaunch(rank_hosts: Mapping[int, str], lost_hosts: Collection[str]) -> dict[int, str]:
    """Return the hosts of all ranks after those on lost hosts went, rank by rank, to the surviving host with fewest.

    If no host of the job survives, replacements under the old names are assumed, with empty memory.
    """
    dead = frozenset(lost_hosts)
    counts: dict[str, int] = {}
    for host in rank_hosts.values():
        if host not in dead:
            counts[host] = counts.get(host, 0) + 1
    if not counts:
        return dict(rank_hosts)
    heap = [(count, host) for host, count in counts.items()]
    heapq.heapify(heap)
    moved: dict[int, str] = {}
    for rank in sorted(rank_hosts):
        if rank_hosts[rank] in dead:
            count, host = heap[0]
            heapq.heapreplace(heap, (count + 1, host))
            moved[rank] = host
    return {**rank_hosts, **moved}


def what_if(
    inventory: Inventory,
    spans: tuple[Span, ...],
    lost_hosts: Collection[str],
    *,
    world_size: int,
    rank_hosts: Mapping[int, str],
    relaunched: Mapping[int, str] | None = None,
) -> RecoveryPlan:
    """Return the plan that would follow if `lost_hosts` died now.

    Args:
        inventory: The present one.
        spans: The lineage.
        lost_hosts: Hosts to lose; unknown names change nothing.
        world_size: Ranks of the job.
        rank_hosts: Present host of every rank.
        relaunched: Where ranks run afterwards, for the ranks it names; the others follow `relaunch`.
    """
    after = {**relaunch(rank_hosts, lost_hosts), **(relaunched or {})}
    return plan(lose(inventory, lost_hosts), spans, world_size=world_size, rank_hosts=after)
