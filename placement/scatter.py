"""Where do the copies of one host's ranks go if not all to the same hosts: several placements side by side.

With one placement a lost host's ranks are all restored from the hosts of one group, over their links. With `scatter`
placements rank r has the targets of placement r mod scatter. That many more sets of hosts may not be lost together.
Pure: no torch, ray, socket, clock, environment or file access. Read README.md for the odds.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import replace

from placement.groups import Placement, Strategy, described, place
from placement.rebalance import rebalance
from placement.topology import Host, Topology

TRIES = 32  # orders of the hosts that one more placement is chosen from
TRIES_HOSTS_MAX = 1000  # of more hosts two random placements have hardly a pair in common


def scattered(
    before: Placement | None,
    topology: Topology,
    *,
    replicas: int,
    strategy: Strategy = "mixed",
    scatter: int = 1,
    demand_bytes: Mapping[str, int] | None = None,
) -> Placement:
    """Return a placement, and in its `scattered` the others of the `scatter` placements of a job.

    Each keeps what `place` and `rebalance` promise: copies in distinct domains, few moves, fair shares. A new one is
    made for the hosts in another order, the one of some orders that has the fewest pairs in common with the others.

    Args:
        before: What this function returned last; None: nothing is placed yet.
        topology: Hosts, their labels and their room.
        replicas: Copies of each shard, the owner's own included.
        strategy: "mixed", "group" or "ring".
        scatter: Number of placements; 1 is `place`, or `rebalance`.
        demand_bytes: As for `place`, of a single placement.

    Raises:
        ValueError: as `place`; `scatter` is below 1.

    Complexity: `scatter` times that of `rebalance`; at first TRIES times that of `place`, up to TRIES_HOSTS_MAX hosts.
    Source: ours; copysets with a scatter width are from Cidon et al., "Copysets", ATC 2013.
    """
    if scatter < 1:
        raise ValueError(f"scatter is {scatter}, must be at least 1")
    if demand_bytes is not None and scatter > 1:
        raise ValueError(f"scatter is {scatter}: only a single placement can go by room")
    known = (before, *before.scattered)[:scatter] if before is not None else ()
    found = [
        rebalance(old, topology, replicas=replicas, strategy=strategy, demand_bytes=demand_bytes).placement
        for old in known
    ]
    if scatter == 1 and not found:
        return place(topology, replicas=replicas, strategy=strategy, demand_bytes=demand_bytes)
    while len(found) < scatter:
        found.append(_another(topology, found, replicas, strategy))
    return replace(found[0], scattered=tuple(found[1:]))


def _another(topology: Topology, others: list[Placement], replicas: int, strategy: Strategy) -> Placement:
    if not others:
        return place(topology, replicas=replicas, strategy=strategy)
    taken = {(owner, target) for other in others for owner, held in other.targets.items() for target in held}
    best: dict[str, tuple[str, ...]] = {}
    fewest = len(taken) + 1
    for number in range(TRIES if len(topology.hosts) <= TRIES_HOSTS_MAX else 1):
        targets = _shuffled(topology, replicas, strategy, f"{len(others)}.{number}")
        common = sum((owner, target) in taken for owner, held in targets.items() for target in held)
        if common < fewest:
            best, fewest = targets, common
        if fewest == 0:
            break
    return described(topology, best, replicas=replicas)


def _shuffled(topology: Topology, replicas: int, strategy: Strategy, seed: str) -> dict[str, tuple[str, ...]]:
    """Return the targets that hosts get if they, machines and domains are named at random: names give the order."""
    chance, known = random.Random(seed), topology.hosts.values()
    alias, machine = _dealt(topology.hosts, chance), _dealt((host.machine for host in known), chance)
    levels = {
        level: _dealt((host.labels.get(level, "") for host in known), chance)
        for level in (*topology.failure_domains, *topology.groups)
    }
    hosts = [
        Host(
            alias[host.host_id],
            {level: names[host.labels.get(level, "")] for level, names in levels.items()},
            machine[host.machine],
            host.is_explicit,
            host.capacity_bytes,
        )
        for host in known
    ]
    name = {other: host for host, other in alias.items()}
    placed = place(Topology.of(hosts, topology.failure_domains, topology.groups), replicas=replicas, strategy=strategy)
    found = {name[owner]: tuple(name[target] for target in held) for owner, held in placed.targets.items()}
    return {owner: found[owner] for owner in sorted(found)}


def _dealt(names: Iterable[str], chance: random.Random) -> dict[str, str]:
    """Return another name for each; "" is none, and stays."""
    known = sorted({*names} - {""})
    others = known.copy()
    chance.shuffle(others)
    return dict(zip(known, others, strict=True)) | {"": ""}
