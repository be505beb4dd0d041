"""Hosts with notice of their end: their copies are made elsewhere while they can still send them. Pure (R29).

    (none) --notice: a person or Ray says when--> draining --dead, and past its time or replaced--> (none)
                                                     '--cancelled, or live OVERDUE_S past its time--> (none)

Each controller counts time from when it learned of the notice; a new controller begins again. It is not over while Ray
repeats it: a wall clock set ahead ends none early.
A draining host is no target while enough others are there. Its ranks go on putting: the copies of their puts go to
a substitute and the substitute's targets, which makes `replicas` copies that outlive it, besides its own.
`durable/departures.py` says whether such a host can go.
"""

from __future__ import annotations

from collections.abc import Mapping

from memstore.core.cluster.effects import DrainChanged, Effects
from memstore.core.cluster.facts import HostDraining
from memstore.core.cluster.job import Call
from memstore.core.cluster.state import ClusterState
from memstore.core.journal.replication import Journal
from memstore.core.wire.calls import DrainHost
from memstore.core.wire.replies import DrainNoted

OVERDUE_S = 60.0  # a host that is still there this long after its deadline was spared
SAME_S = 1.0  # moments nearer than this are one
WITHIN_MAX_S = 30 * 86_400.0


class Drains:
    """Which hosts are to go, and when."""

    def __init__(self, state: ClusterState, out: Effects, journal: Journal) -> None:
        self.state, self.out, self.journal = state, out, journal
        self.end_s: dict[str, float] = {}  # when its time is over, or Ray last repeated the notice after that
        self.ended_s: dict[str, float] = {}  # deadlines of drains that ended, to ignore repeated notices
        self.left: set[str] = set()  # hosts that were gone when their notice ended

    def went(self, host: str) -> bool:
        """Return whether the host is to go, or went with notice and is not back: no loss."""
        return host in self.state.draining or host in self.left

    def ask(self, call: Call[DrainHost]) -> None:
        """A person or a script gives notice, or takes it back."""
        host, within_s = call.request.host, call.request.within_s
        if not self.state.hosts.is_live(host):
            live = ", ".join(self.state.hosts.live_ids()) or "none"
            self.out.refuse(call, "ConfigError", f"no live host {host!r} in the store: it has {live}")
            return
        if within_s is not None and not 0 < within_s < WITHIN_MAX_S:
            why = f"within_s={within_s:g}: a notice must leave some time, less than {WITHIN_MAX_S:.0f} s (30 days)"
            self.out.refuse(call, "ConfigError", why)
            return
        until_s = None if within_s is None else self.state.wall_s + within_s
        self._record(host, until_s, within_s or 0.0)
        self.out.answer(call, DrainNoted(host=host, until_s=until_s))

    def seen(self, until_s: Mapping[str, float]) -> None:
        """Take the cluster manager's repeated list of notices. The earliest one counts; a missing one lifts nothing."""
        now = self.state.now
        for host, moment_s in until_s.items():
            if not self.state.hosts.is_live(host) or _is_same(moment_s, self.ended_s.get(host)):
                continue
            if self.state.is_draining(host):
                self.end_s[host] = max(self.end_s[host], now)
            within_s = min(max(0.0, moment_s - self.state.wall_s), WITHIN_MAX_S)
            is_news = now + within_s < self.end_s.get(host, float("inf")) - SAME_S
            known = [self.state.draining.get(host), *(fact.until_s for fact in self._unapplied_notices(host))]
            if is_news and not any(_is_same(moment_s, other_s) for other_s in known):
                self._record(host, moment_s, within_s)

    def returned(self, host: str, *, has_memory: bool) -> None:
        """Drop the notice of a host that joined without memory: it was for an earlier machine of that name."""
        self.left.discard(host)
        if self.state.is_draining(host) and not has_memory:
            self._record(host, None)

    def apply(self, fact: HostDraining, *, is_replay: bool) -> None:
        """Apply a replicated or replayed notice."""
        before = self.state.is_draining(fact.host_id)
        if fact.until_s is not None:
            self.state.draining[fact.host_id] = fact.until_s
            self.end_s[fact.host_id] = self.state.now + fact.within_s
        elif before:
            self.ended_s[fact.host_id] = self.state.draining.pop(fact.host_id)
            del self.end_s[fact.host_id]
            if not self.state.hosts.is_live(fact.host_id):
                self.left.add(fact.host_id)
        if before != self.state.is_draining(fact.host_id) and not is_replay:
            self._changed(fact.host_id)

    def tick(self) -> None:
        """Lift the notice of a host that outlived its deadline; one that returns after it has none."""
        for host, end_s in self.end_s.items():
            spare_s = OVERDUE_S if self.state.hosts.is_live(host) else 0.0
            if end_s + spare_s <= self.state.now:
                self._record(host, None)

    def _unapplied_notices(self, host: str) -> list[HostDraining]:
        """Return a host's notices that are recorded and not replicated yet."""
        return [x for x in self.journal.log.unapplied() if isinstance(x, HostDraining) and x.host_id == host]

    def _record(self, host: str, until_s: float | None, within_s: float = 0.0) -> None:
        """Record a notice, unless the last one being replicated is the same."""
        unapplied = self._unapplied_notices(host)
        if not unapplied or not _is_same(unapplied[-1].until_s, until_s):
            self.journal.record(HostDraining(host, until_s, within_s))

    def _changed(self, host: str) -> None:
        if self.state.is_draining(host):
            self.out.log(f"host {host} is to go: its copies are made elsewhere", "warning")
        elif self.state.hosts.is_live(host):
            self.out.log(f"host {host} is not to go any more")
        for job in self.state.jobs.values():
            job.substitute_for.pop(host, None)
        self.out.emit(DrainChanged(host))

    # -- for status ---------------------------------------------------------------------------

    def due_s(self, host: str) -> float | None:
        """Return the seconds until a host is to go, negative past its moment; None without notice."""
        if host not in self.state.draining:
            return None
        return min(self.state.draining[host] - self.state.wall_s, self.end_s[host] - self.state.now)


def _is_same(moment_s: float | None, other_s: float | None) -> bool:
    """Return whether two notices are one."""
    if moment_s is None or other_s is None:
        return moment_s is other_s
    return abs(moment_s - other_s) <= SAME_S
