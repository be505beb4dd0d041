"""Where do this host's copies go: replica groups after Gemini, spread over failure domains.

Gemini's groups are consecutive hosts; here hosts are dealt so that a group never lies in one
rack where that can be avoided (R18), capacity is respected, and unmet wishes are listed.
Pure: no torch, ray, socket, clock, environment or file access. Read `rebalance.py` next.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from placement.target_assignment import TargetAssignment
from placement.topology import Topology, levels_of, name_some, spread_level

SWAPS_PER_HOST = 40  # tries of two hosts to change places; half a second for a thousand hosts where none helps

# -- layout -------------------------------------------------------------------------------------------
# Who sits in which replica group: cut hosts into groups and a ring, domains apart (Gemini, d.1).


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


def swapped(
    sets: Sequence[Sequence[str]], levels: Sequence[tuple[Mapping[str, str], int]]
) -> tuple[dict[str, str], int]:
    """Let hosts change places so that, level by level, no set has more than so many in one domain, if that is found.

    Args:
        sets: Hosts that keep bytes for one another; a host may be in several.
        levels: The domain of each host and how many of a set one may have, the level that matters most first.

    Returns:
        The host that takes each host's place, and by how much domains are crowded then: 0 is what is wanted.

    Complexity: SWAPS_PER_HOST tries for each host, each O(sets of a host x size).
    Source: ours; min-conflicts with moves to the side (Minton et al., "Minimizing conflicts", 1992).
    """
    sets_of: dict[str, list[int]] = defaultdict(list)
    for number, members in enumerate(sets):
        for host in members:
            sets_of[host].append(number)
    now, hosts = {host: host for host in sets_of}, list(sets_of)
    base, chance = 1 + sum(map(len, sets)), random.Random(len(hosts))

    def cost(number: int) -> int:
        found = 0
        for domains, most in levels:
            counts = Counter(domains[now[host]] for host in sets[number])
            found = found * base + sum(max(0, count - most) for count in counts.values())
        return found

    crowded = {number: found for number in range(len(sets)) if (found := cost(number))}
    for _ in range(SWAPS_PER_HOST * len(hosts)):
        if not crowded:
            break
        one, other = chance.choice(sets[chance.choice(list(crowded))]), chance.choice(hosts)
        touched = {*sets_of[one], *sets_of[other]}
        now[one], now[other] = now[other], now[one]
        after = {number: cost(number) for number in touched}
        if sum(after.values()) > sum(crowded.get(number, 0) for number in touched):
            now[one], now[other] = now[other], now[one]
            continue
        for number in sorted(touched):
            crowded.pop(number, None)
            crowded |= {number: after[number]} if after[number] else {}
    return now, sum(crowded.values())


# -- groups -------------------------------------------------------------------------------------------


Strategy = Literal["mixed", "group", "ring"]
STRATEGIES: tuple[Strategy, ...] = ("mixed", "group", "ring")


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """Hosts that hold one another's shards: all of them ("group") or the next ones ("ring")."""

    kind: Literal["group", "ring"]
    members: tuple[str, ...]  # in ring order


@dataclass(frozen=True, slots=True)
class Unmet:
    """One separation or one copy that was not possible.

    `target` is "" where no host had room for the copy; then `domain` is "" too. Otherwise
    `target` holds a copy, in a `domain` that the owner or an earlier target is in already; at a
    level of groups all of them are.
    """

    owner: str
    target: str
    level: str
    domain: str
    why: str


@dataclass(frozen=True, slots=True)
class Placement:
    """Who holds whose copies. Every host owns one shard set and always keeps its own copy."""

    targets: Mapping[str, tuple[str, ...]]  # owner -> other hosts that must hold its copies
    groups: tuple[ReplicaGroup, ...]  # the parts of `targets` that are whole groups or rings
    level: str
    replicas: int  # copies, own included, that every owner has
    replicas_asked: int
    unmet: tuple[Unmet, ...] = ()
    warnings: tuple[str, ...] = ()
    scattered: tuple[Placement, ...] = ()  # beside it, of the same hosts; see `scatter.py`

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Return this placement and those beside it."""
        return (self, *self.scattered)

    def merged(self) -> dict[str, list[str]]:
        """Return, by owner, the other hosts that must hold copies of any of its ranks."""
        return {
            owner: list(dict.fromkeys(target for each in self.placements for target in each.targets.get(owner, ())))
            for owner in self.targets
        }

    def targets_of(self, owner: str, rank: int) -> tuple[str, ...]:
        """Return the other hosts that must hold a rank's copies; `owner` is its host."""
        placements = self.placements
        return placements[rank % len(placements)].targets.get(owner, ())


def place(
    topology: Topology, *, replicas: int, strategy: Strategy = "mixed", demand_bytes: Mapping[str, int] | None = None
) -> Placement:
    """Choose `replicas - 1` targets for every host, in distinct failure domains.

    With N hosts and m = min(replicas, N): hosts form N // m groups of m; a remainder joins the
    last group, and those hosts form a ring in which each sends to the next m - 1. "group" keeps
    that ring at Gemini's m + (N mod m) hosts even where a larger one would separate better;
    "mixed" takes the larger ring then; "ring" is one ring of all. N not divisible by m is never
    an error. If every domain has at most N / m hosts, all owners are separated and every host
    has m - 1 peers ("group" with a remainder excepted). Otherwise single pairs are redirected
    outside their group; no host then takes more than its fair share plus one (`TargetAssignment`).
    At levels of groups (`with_groups`) hosts change places, and pairs are redirected, until no owner
    has all copies within its own; where that cannot be, the finest level is given up first.

    Args:
        topology: Hosts, their labels and their room.
        replicas: Copies per shard, the owner's own included. With fewer hosts than that, as
            many as there are: `Placement.replicas` and a warning say so.
        strategy: "mixed", "group" or "ring".
        demand_bytes: The bytes that one copy of an owner's shards takes on a target, against
            `Host.capacity_bytes`; an owner not named takes nothing. None: capacity is not looked at.

    Returns:
        The same value for the same input in any order of the mappings. Separations and
        impossible copies are in `unmet`.

    Raises:
        ValueError: no hosts, `replicas` below 1, a negative demand, or an unknown strategy.

    Complexity: O(N log N + N m); pairs that are redirected cost about log N each, and making
        room by moving others is bounded by `target_assignment.DISPLACEMENT_STEPS_MAX`.
    Source: Gemini (SOSP 2023), mixed placement; separation, capacity and redirection are ours.
    """
    copies = check_request(topology, replicas, strategy, demand_bytes)
    spread = spread_level(topology, replicas)
    blocks, ring = arrange(hosts_by_domain(topology, spread.level), copies, strategy)
    rows = [*blocks, *([ring] if ring else [])]
    if topology.groups_apart and copies > 1:
        windows = [tuple(ring[(at + step) % len(ring)] for step in range(copies)) for at in range(len(ring))]
        levels = [(topology.domains(each), copies - 1) for each in topology.groups_apart]
        now, _ = swapped([*blocks, *windows], [(topology.domains(spread.level), 1), *levels])
        rows = [tuple(now[host] for host in row) for row in rows]
    wished = {
        owner: tuple(members[(at + step) % len(members)] for step in range(1, copies))
        for members in rows
        for at, owner in enumerate(members)
    }
    targets = {owner: wished[owner] for owner in sorted(wished)}
    found = described(topology, targets, replicas=replicas)
    if demand_bytes is None and not found.unmet:
        return found
    return settled(topology, targets, replicas=replicas, demand_bytes=demand_bytes)


def settled(
    topology: Topology,
    wished: Mapping[str, Sequence[str]],
    *,
    replicas: int,
    demand_bytes: Mapping[str, int] | None = None,
    extras: Sequence[int] = (1,),
    before: Mapping[str, Sequence[str]] | None = None,
) -> Placement:
    """Assign the wished pairs that can stay and fill the gaps; of several tries return the one that lacks least.

    Args:
        topology: The hosts.
        wished: By owner, the targets that are to stay.
        replicas: Copies per shard.
        demand_bytes: As for `place`.
        extras: Peers that a host may take beyond its fair share; the next number only if something is unmet.
        before: Targets that keep their place in line.
    """
    copies, level = min(replicas, len(topology.hosts)), spread_level(topology, replicas).level
    tried = []
    for extra, kept in product(extras, range(len(topology.groups_apart), -1, -1)):
        assignment = TargetAssignment(
            topology, level=level, replicas=copies, demand_bytes=demand_bytes or {}, extra=extra, groups_kept=kept
        )
        targets = assigned(assignment, wished)
        targets = {owner: _in_old_order(held, (before or {}).get(owner, ())) for owner, held in targets.items()}
        tried.append(described(topology, targets, replicas=replicas))
        if not tried[-1].unmet:
            break
    return min(tried, key=lambda each: shortfall(each, topology))


def shortfall(placement: Placement, topology: Topology) -> tuple[int, ...]:
    """Return how much a placement lacks: copies, then separations level by level, what matters most first."""
    short = sum(not each.target for each in placement.unmet)
    at_level = Counter(each.level for each in placement.unmet if each.target)
    return (short, *(at_level[level] for level in (placement.level, *topology.groups_apart)))


def _in_old_order(held: tuple[str, ...], before: Sequence[str]) -> tuple[str, ...]:
    """Keep old targets where they were in line, so that a ring stays recognisable as one."""
    return (*(host for host in before if host in held), *(host for host in held if host not in before))


def check_request(
    topology: Topology, replicas: int, strategy: str, demand_bytes: Mapping[str, int] | None = None
) -> int:
    """Check the arguments (ValueError); return how many copies are possible."""
    if not topology.hosts:
        raise ValueError("the topology has no hosts, at least 1 is needed to place copies")
    if replicas < 1:
        raise ValueError(f"replicas is {replicas}, must be at least 1 (it counts the owner's own copy)")
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy is {strategy!r}, must be one of {', '.join(STRATEGIES)}")
    negative = [host for host, nbytes in (demand_bytes or {}).items() if nbytes < 0]
    if negative:
        raise ValueError(f"demand_bytes is negative for {len(negative)} hosts: {name_some(negative)}")
    return min(replicas, len(topology.hosts))


def hosts_by_domain(topology: Topology, level: str) -> list[list[str]]:
    """Return hosts per domain at `level`; neighbours share coarser domains, members finer ones."""
    levels = levels_of(topology.failure_domains)
    at = levels.index(level)
    by_level = [topology.domains(each) for each in levels]
    found: dict[str, list[tuple[list[str], str]]] = defaultdict(list)
    for host_id in topology.hosts:
        path = [domains[host_id] for domains in by_level]
        found[path[at]].append((path, host_id))
    domains = sorted((sorted(members) for members in found.values()), key=lambda members: members[0])
    return [[host_id for _, host_id in members] for members in domains]


def assigned(assignment: TargetAssignment, wished: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Assign all wished pairs that can stay, then fill the gaps; return targets by owner."""
    spare = {owner: [t for t in wished.get(owner, ()) if not assignment.keep(owner, t)] for owner in assignment.order()}
    for owner in assignment.order():
        assignment.fill(owner, spare[owner])
    return {owner: tuple(targets) for owner, targets in assignment.targets.items()}


def described(topology: Topology, targets: Mapping[str, tuple[str, ...]], *, replicas: int) -> Placement:
    """Return the Placement for given targets: its groups, unmet wishes, warnings."""
    spread, asked = spread_level(topology, replicas), min(replicas, len(topology.hosts))
    level, warnings = spread.level, (*spread.warnings, *topology.group_warnings(spread.level))
    short = [
        Unmet(owner, "", level, "", f"{len(held)} of {asked - 1} copies placed: no other host has room for {owner}")
        for owner, held in targets.items()
        if len(held) < asked - 1
    ]
    achieved = 1 + min(len(held) for held in targets.values())
    if len(topology.hosts) < replicas:
        warnings += (
            f"{replicas} replicas asked, hosts to place them on: {len(topology.hosts)}; each shard gets {asked}",
        )
    if short:
        warnings += (
            f"{len(short)} of {len(targets)} hosts get fewer than {asked} replicas for lack of room: "
            f"{name_some([each.owner for each in short])}; raise capacity or lower replicas",
        )
    return Placement(
        targets=targets,
        groups=groups_of(targets),
        level=level,
        replicas=achieved,
        replicas_asked=replicas,
        unmet=(*_repeats(targets, topology, level), *_enclosed(targets, topology), *short),
        warnings=warnings,
    )


def components_of(targets: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Return the sets of hosts that share copies, directly or through others; each sorted."""
    parent = {host: host for host in targets}

    def root(host: str) -> str:
        while parent[host] != host:
            parent[host] = parent[parent[host]]
            host = parent[host]
        return host

    for owner, held in targets.items():
        for target in held:
            parent[root(target)] = root(owner)
    found: dict[str, list[str]] = defaultdict(list)
    for host in sorted(parent):
        found[root(host)].append(host)
    return sorted(found.values())


def group_of(members: Sequence[str], targets: Mapping[str, Sequence[str]]) -> ReplicaGroup | None:
    """Return the group or ring that a component is, or None if it is neither."""
    whole = set(members)
    if all(len(targets[host]) == len(members) - 1 and whole == {host, *targets[host]} for host in members):
        return ReplicaGroup("group", tuple(members))
    width = len(targets[members[0]])
    if width == 0 or any(len(targets[host]) != width for host in members):
        return None
    circle = [members[0]]
    while len(circle) < len(members):
        circle.append(targets[circle[-1]][0])
    if set(circle) != whole:
        return None
    follows = circle + circle[:width]
    if any(tuple(follows[at + 1 : at + 1 + width]) != tuple(targets[host]) for at, host in enumerate(circle)):
        return None
    return ReplicaGroup("ring", tuple(circle))


def groups_of(targets: Mapping[str, Sequence[str]]) -> tuple[ReplicaGroup, ...]:
    """Return the whole groups and rings among the targets; hosts in other shapes are in none."""
    found = (group_of(members, targets) for members in components_of(targets))
    return tuple(group for group in found if group is not None)


def _repeats(targets: Mapping[str, tuple[str, ...]], topology: Topology, level: str) -> list[Unmet]:
    """Return one Unmet for every target in a domain that its owner already covers."""
    domain, found = topology.domains(level), []
    for owner, held in targets.items():
        if len({domain[owner], *(domain[host] for host in held)}) == len(held) + 1:
            continue
        covered = {domain[owner]: owner}
        for target in held:
            first = covered.setdefault(domain[target], target)
            if first != target:
                name = repr(domain[target]) if domain[target] else "unlabelled"
                why = f"{target} shares {level} {name} with {first}; no place is left in another {level}"
                found.append(Unmet(owner, target, level, domain[target], why))
    return found


def _enclosed(targets: Mapping[str, tuple[str, ...]], topology: Topology) -> list[Unmet]:
    """Return one Unmet for every owner all of whose copies lie in its own group of a level."""
    found = []
    for level in topology.groups_apart:
        domain = topology.domains(level)
        for owner, held in targets.items():
            if held and all(domain[host] == domain[owner] for host in held):
                why = f"all its copies are in {level} {domain[owner]}; no place is left outside"
                found.append(Unmet(owner, held[-1], level, domain[owner], why))
    return found
