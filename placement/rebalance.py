"""Hosts joined or left: which copies move, as few as can be (R29).

Pure: no torch, ray, socket, clock, environment or file access. Read `odds.py` next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from placement.groups import Placement, Strategy, check_request, place, settled, shortfall
from placement.topology import Topology


@dataclass(frozen=True, slots=True)
class Move:
    """One new (owner, target) pair.

    `source` is the old target, still a host, whose copy this one replaces and which may free it
    once the new copy is sealed; None if the pair replaces none (a lost host, a new owner).
    """

    owner: str
    source: str | None
    target: str
    why: str


@dataclass(frozen=True, slots=True)
class Rebalanced:
    """A placement and the moves that lead to it from the old one."""

    placement: Placement
    moves: tuple[Move, ...]


def rebalance(
    old: Placement,
    topology: Topology,
    *,
    replicas: int,
    strategy: Strategy = "mixed",
    demand_bytes: Mapping[str, int] | None = None,
) -> Rebalanced:
    """Place copies for the hosts there are now, keeping every old pair that is still good.

    A pair is good while its target is there, has room and a place, and lies in a domain that the
    owner does not cover yet, at the spread level of today. Missing pairs go to the hosts with
    the fewest peers; if none is free, peers move on along the cheapest chain (`TargetAssignment`). No
    host ends with more peers than its fair share, rounded up: a job's memory is sized for that. Only
    where that leaves something unmet a host takes one more. If that leaves more unmet than `place`
    would, the answer is `place`'s, with all its moves: separation comes before stillness.

    Moves are the fewest there can be within that share, or one more, while `replicas` stays, room is
    no limit and nothing is unmet; in general at most one more per chain link. A new placement after one
    host joined would move most pairs. `strategy` matters only to the fresh placement.

    Raises:
        ValueError: as `place`.

    Complexity: O(N m log N), plus a fresh placement if something is unmet.
    Source: ours.
    """
    check_request(topology, replicas, strategy, demand_bytes)
    wished = {owner: [t for t in held if t in topology.hosts] for owner, held in old.targets.items()}
    result = settled(topology, wished, replicas=replicas, demand_bytes=demand_bytes, extras=(0, 1), before=old.targets)
    if result.unmet:
        fresh = place(topology, replicas=replicas, strategy=strategy, demand_bytes=demand_bytes)
        if shortfall(fresh, topology) < shortfall(result, topology):
            result = fresh
    return Rebalanced(result, _moves(old, result, topology))


def _moves(old: Placement, new: Placement, topology: Topology) -> tuple[Move, ...]:
    moves = []
    for owner, held in new.targets.items():
        before = old.targets.get(owner, ())
        left = [host for host in before if host not in held]
        released = [host for host in left if host in topology.hosts]
        gone = [host for host in left if host not in topology.hosts]
        for target in (host for host in held if host not in before):
            if owner not in old.targets:
                moves.append(Move(owner, None, target, f"{owner} joined"))
            elif gone:
                moves.append(Move(owner, None, target, f"{gone.pop(0)} left"))
            elif released:
                source = released.pop(0)
                moves.append(Move(owner, source, target, f"{source} is full, or too near at level {new.level}"))
            else:
                moves.append(Move(owner, None, target, f"{owner} had {len(before)} targets, needs {len(held)}"))
    return tuple(moves)
