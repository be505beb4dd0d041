"""Hosts and the failure domains they sit in (R1, R18).

Pure: no torch, ray, socket, clock, environment or file access. Read `groups.py` next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


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
    """Hosts by id plus the label levels to spread over, coarsest first."""

    hosts: Mapping[str, Host]
    failure_domains: tuple[str, ...] = ("zone", "rack")
    _known: dict[str, dict[str, str]] = field(default_factory=dict, init=False, repr=False, compare=False)  # by level

    @classmethod
    def of(cls, hosts: Iterable[Host], failure_domains: Iterable[str] = ("zone", "rack")) -> Topology:
        """Build a topology from hosts; a host id given twice is a ValueError."""
        table: dict[str, Host] = {}
        for host in hosts:
            if host.host_id in table:
                raise ValueError(f"host {host.host_id!r} is listed twice in the topology")
            table[host.host_id] = host
        return cls(table, tuple(failure_domains))

    def domains(self, level: str) -> Mapping[str, str]:
        """Return the failure domain of every host at `level`; see `domains_of_hosts`."""
        if level not in self._known:
            self._known[level] = domains_of_hosts(self.hosts.values(), level)
        return self._known[level]


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
