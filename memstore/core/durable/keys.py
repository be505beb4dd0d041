"""Under which key a step is written to durable storage: one key for all its slices (R31). Pure.

    asked --every host said the name of its key, died, or took ASK_S--> compared, and one chosen for the write

The key that every shard can be written under wins; of several the one that most hosts have, then the last write's.
Hosts that differ are named, in an event, in the log and in status, until all say the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from memstore.core.cluster.effects import Effects
from memstore.core.cluster.events import DurableKeysDiffer
from memstore.core.cluster.job import Job
from memstore.core.cluster.state import ClusterState
from memstore.core.durable.paths import storage_of
from memstore.core.wire.orders import NameKey
from memstore.core.wire.reports import KeyNamed

ASK_S = 5.0  # a host that cannot say its key's name by then writes nothing of this step
NAMED_MAX = 3  # hosts named for each key


@dataclass(slots=True)
class KeyState:
    """What the hosts said of a job's key."""

    names: dict[str, str] = field(default_factory=dict)  # host -> name of its key
    faults: dict[str, str] = field(default_factory=dict)  # host -> why it has none
    waits: set[str] = field(default_factory=set)  # asked and not answered yet
    asked_s: float = 0.0
    problem: str = ""


def chosen(names: Mapping[str, str], holders: Iterable[Collection[str]], before: str | None) -> str | None:
    """Return the key under which each shard has a holder; None if there is none.

    Args:
        names: Host -> name of its key.
        holders: Of every shard, the hosts that can write it.
        before: The key of the last write.

    >>> chosen({"h1": "a", "h2": "b"}, [["h1", "h2"], ["h2"]], "a")
    'b'
    """
    counts = Counter(names.values())
    able = set(counts)
    for hosts in holders:
        able &= {names[host] for host in hosts if host in names}
    return max(sorted(able), key=lambda name: (counts[name], name == before), default=None)


def difference(names: Mapping[str, str], faults: Mapping[str, str]) -> str:
    """Return a sentence about hosts that do not have one key, "" if all do."""
    if len(set(names.values())) <= 1 and not faults:
        return ""
    by_name: dict[str, list[str]] = {}
    for host, name in sorted(names.items()):
        by_name.setdefault(name, []).append(host)
    said = [f"{_listed(hosts)} key {name}" for name, hosts in sorted(by_name.items())]
    said += [f"{host} none ({why})" for host, why in sorted(faults.items())[:NAMED_MAX]]
    return f"durable_key_file is not the same on all hosts: {', '.join(said)}. Put the same file on all of them"


def _listed(hosts: list[str]) -> str:
    if len(hosts) > NAMED_MAX:
        return f"{', '.join(hosts[:NAMED_MAX])} and {len(hosts) - NAMED_MAX} more have"
    return f"{', '.join(hosts)} {'have' if len(hosts) > 1 else 'has'}"


class DurableKeys:
    """The names of the keys that hosts have, by job."""

    def __init__(self, state: ClusterState, out: Effects) -> None:
        self.state, self.out = state, out
        self.states: dict[str, KeyState] = {}

    def of(self, job: str) -> KeyState:
        """Return the known keys of a job."""
        return self.states.setdefault(job, KeyState())

    def ask(self, job: Job) -> None:
        """Ask every live host; a job without a key file has nothing to ask."""
        attempt = job.newest
        if attempt is None or not attempt.config.get("durable") or not attempt.config.get("durable_key_file"):
            return
        state = self.of(job.name)
        hosts = [host for host in self.state.hosts.live_ids() if self.state.hosts.is_answering(host)]
        state.waits, state.asked_s = set(hosts), self.state.now
        order = NameKey(job=job.name, durable=storage_of(attempt.config))
        for host in hosts:
            self.out.send(host, order)

    def answered(self, host: str, report: KeyNamed) -> None:
        """Take a host's answer: the name of its key, or why it has none."""
        state = self.of(report.job)
        state.names.pop(host, None)
        state.faults.pop(host, None)
        if report.problem is None:
            state.names[host] = report.key
        else:
            state.faults[host] = report.problem
        state.waits.discard(host)
        self._compare(report.job, state)

    def is_known(self, job: str) -> bool:
        """Return whether by now all hosts that were asked have answered or took too long."""
        state = self.of(job)
        if state.waits and self.state.now - state.asked_s > ASK_S:
            for host in state.waits:
                state.names.pop(host, None)
                state.faults[host] = f"it did not say its key's name within {ASK_S:g} s"
            state.waits.clear()
            self._compare(job, state)
        return not state.waits

    def lost(self, job: str, host: str) -> None:
        """Forget the key of a dead host."""
        state = self.of(job)
        state.names.pop(host, None)
        state.faults.pop(host, None)
        state.waits.discard(host)
        self._compare(job, state)

    def _compare(self, job: str, state: KeyState) -> None:
        if state.waits:
            return
        problem = difference(state.names, state.faults)
        if problem and problem != state.problem:
            self.out.log(f"job {job!r}: {problem}", "warning")
            self.out.emit(DurableKeysDiffer(job, problem))
        state.problem = problem

    def forget(self, job: str) -> None:
        """Forget a removed job."""
        self.states.pop(job, None)
