"""Hosts and the failure domains they sit in (R1, R18).

Pure: no torch, ray, socket, clock, environment or file access. Read `groups.py` next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Host:
    """One machine's memory, one unit of loss (R1).

    `machine` is the boot id: an implicit failure domain. Two hosts on one machine count as
    distinct only if both carry an explicit `host` label (`is_explicit`).
    """

    host_id: str
    labels: Mapping[str, str] = field(default_factory=dict)
    machine: str = ""
    is_explicit: bool = False
    capacity_bytes: int | None = None  # room for copies of other hosts' shards; None: no limit known

    def domain(self, level: str) -> str:
        """Return the failure domain at `level` as labelled: a label name such as "rack", or "host".

        Unlabelled hosts at a label level share the one domain "" (R18). At level "host" the
        domain is the host id if explicit, else the machine.
        """
        if level == "host":
            return self.host_id if self.is_explicit or not self.machine else f"machine:{self.machine}"
        return self.labels.get(level, "")


@dataclass(frozen=True, slots=True)
class Topology:
    """Hosts by id plus the label levels to spread over, coarsest first.

    `groups` are further levels, after those: of a job's ranks, which may be lost as one (`with_groups`).
    """

    hosts: Mapping[str, Host]
    failure_domains: tuple[str, ...] = ("zone", "rack")
    groups: tuple[str, ...] = ()
    _known: dict[str, dict[str, str]] = field(default_factory=dict, init=False, repr=False, compare=False)  # by level

    @classmethod
    def of(
        cls, hosts: Iterable[Host], failure_domains: Iterable[str] = ("zone", "rack"), groups: Iterable[str] = ()
    ) -> Topology:
        """Build a topology from hosts; a host id given twice is a ValueError."""
        table: dict[str, Host] = {}
        for host in hosts:
            if host.host_id in table:
                raise ValueError(f"host {host.host_id!r} is listed twice in the topology")
            table[host.host_id] = host
        return cls(table, tuple(failure_domains), tuple(groups))

    def domains(self, level: str) -> Mapping[str, str]:
        """Return the failure domain of every host at `level`; see `domains_of_hosts`."""
        if level not in self._known:
            self._known[level] = domains_of_hosts(self.hosts.values(), level)
        return self._known[level]

    @property
    def groups_apart(self) -> tuple[str, ...]:
        """Return the levels of groups at which any two hosts differ: of one group alone no copy can lie outside."""
        return tuple(level for level in self.groups if len(set(self.domains(level).values())) > 1)

    def group_warnings(self, level: str) -> tuple[str, ...]:
        """Return a line for each level of groups that cannot count; copies are spread over `level` all the same."""
        return tuple(
            f"all {len(self.hosts)} hosts are in one {each}, so no copy can lie outside it; copies are spread over "
            f"{level}s. Name groups of fewer hosts, or add hosts without ranks (label memstore=replica)"
            for each in self.groups
            if each not in self.groups_apart
        )


def with_groups(topology: Topology, numbers: Mapping[str, Mapping[str, Collection[int]]]) -> Topology:
    """Return the topology with the groups of a job's ranks as further levels, in their order (R18.8).

    Hosts that have ranks of one group are one domain, and a host that has ranks of several makes these one: it is lost
    with each of them. A host without ranks is a domain of its own.

    Args:
        topology: The hosts.
        numbers: By the name of a level and by host: the groups that ranks there are in.
    """
    levels = {level: dict[str, str]() for level in numbers}
    for level, by_host in numbers.items():
        rows = [
            Host(host.host_id, {level: label}, host.machine, host.is_explicit)
            for host in topology.hosts.values()
            for label in (*map(str, by_host.get(host.host_id, ())),) or (f"none, on {host.host_id}",)
        ]
        levels[level] = domains_of_hosts(rows, level)
    hosts = (
        replace(host, labels={**host.labels, **{level: names[host.host_id] for level, names in levels.items()}})
        for host in topology.hosts.values()
    )
    return Topology.of(hosts, topology.failure_domains, levels)


def domains_of_hosts(hosts: Iterable[Host], level: str) -> dict[str, str]:
    """Return the failure domain of every host at `level`, by id.

    That of its label, and labels never part a machine: those that some machine carries several of are one domain, of a
    joint name, because copies in two of them may be lost with that machine (R1).

    Complexity: O(hosts).
    """
    hosts = list(hosts)
    if level == "host":
        return {host.host_id: host.domain(level) for host in hosts}
    joined: dict[str, str] = {}  # label -> a label of the same domain

    def root(label: str) -> str:
        while joined.setdefault(label, label) != label:
            label = joined[label]
        return label

    first: dict[str, str] = {}  # machine -> the label of its first host
    for host in hosts:
        label = host.domain(level)
        joined[root(label)] = root(first.setdefault(host.domain("host"), label))
    members: dict[str, list[str]] = {}
    for label in sorted(joined):
        members.setdefault(root(label), []).append(label)
    names = {label: "+".join(filter(None, labels)) for labels in members.values() for label in labels}
    return {host.host_id: names[host.domain(level)] for host in hosts}


# -- domains ------------------------------------------------------------------------------------------
# How far apart can the copies be: the spread level and its warnings (R1, R18).


HOST_LEVEL = "host"  # the finest level there is; never needs a label
NAMED_MAX = 10  # names in one message; the count says how many there are


@dataclass(frozen=True, slots=True)
class SpreadLevel:
    """The level copies are spread over, and how many domains there are at it.

    `domains_count` counts the one domain that unlabelled hosts share, if there are any.
    """

    level: str
    domains_count: int
    warnings: tuple[str, ...] = ()


def levels_of(failure_domains: Iterable[str]) -> tuple[str, ...]:
    """Return every level, coarsest first, ending in "host"."""
    return (*dict.fromkeys(level for level in failure_domains if level != HOST_LEVEL), HOST_LEVEL)


def is_finer(level_a: str, level_b: str, failure_domains: Iterable[str]) -> bool:
    """Return whether `level_a` is strictly finer than `level_b`; "host" is the finest.

    Raises:
        ValueError: a level is neither "host" nor one of `failure_domains`.
    """
    levels = levels_of(failure_domains)
    for level in (level_a, level_b):
        if level not in levels:
            raise ValueError(f"level {level!r} is not one of {', '.join(levels)}")
    return levels.index(level_a) > levels.index(level_b)


def spread_level(topology: Topology, replicas: int, *, among: Collection[str] | None = None) -> SpreadLevel:
    """Choose the coarsest level with at least `replicas` labelled domains, else "host" (R18).

    Args:
        topology: Hosts and the levels to try, coarsest first.
        replicas: Copies per shard, the owner's own included.
        among: Count only these hosts (the live ones, say); None means all. Ids that the
            topology does not know are ignored.

    Raises:
        ValueError: `replicas` is below 1.
    """
    if replicas < 1:
        raise ValueError(f"replicas is {replicas}, must be at least 1")
    ids = topology.hosts if among is None else set(among) & topology.hosts.keys()
    hosts = [topology.hosts[host_id] for host_id in sorted(ids)]
    for level in levels_of(topology.failure_domains)[:-1]:
        values = set(domains_of_hosts(hosts, level).values())
        if len(values - {""}) >= replicas:
            return SpreadLevel(level, len(values), _unlabelled_warnings(level, hosts))
    return SpreadLevel(HOST_LEVEL, len({host.domain(HOST_LEVEL) for host in hosts}), _machine_warnings(hosts))


def name_some(names: Collection[str]) -> str:
    """Return the names in order, at most ten of them, with the count of the rest."""
    shown = ", ".join(sorted(names)[:NAMED_MAX])
    return shown if len(names) <= NAMED_MAX else f"{shown} and {len(names) - NAMED_MAX} more"


def _unlabelled_warnings(level: str, hosts: list[Host]) -> tuple[str, ...]:
    unlabelled = [host.host_id for host in hosts if not host.domain(level)]
    if not unlabelled:
        return ()
    return (
        f"{len(unlabelled)} of {len(hosts)} hosts have no {level!r} label and count as one {level} together: "
        f"{name_some(unlabelled)}; label them to spread copies over them",
    )


def _machine_warnings(hosts: list[Host]) -> tuple[str, ...]:
    sharing: dict[str, list[str]] = defaultdict(list)
    for host in hosts:
        sharing[host.domain(HOST_LEVEL)].append(host.host_id)
    crowded = sorted(host_id for ids in sharing.values() if len(ids) > 1 for host_id in ids)
    if not crowded:
        return ()
    return (
        f"{len(crowded)} of {len(hosts)} hosts share a machine with another one and count as one host with it: "
        f"{name_some(crowded)}; give each an explicit 'host' label if they are meant as virtual hosts",
    )
