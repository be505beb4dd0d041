"""Hosts with notice of their end: what they hold is copied elsewhere while they still can send it. Pure (R29).

    (none) --notice: a person or Ray says when--> draining --dead, and past its time or replaced--> (none)
                                                     '--cancelled, or live OVERDUE_S past its time--> (none)

Time is counted by each controller from when it heard of the notice, a new one begins anew, and it is not over while Ray
repeats it: a wall clock set ahead ends none early.
A draining host is no target while enough others are there. Its ranks go on putting: the copies of what they put go to
an heir and the heir's targets, which makes `replicas` copies that outlive it, besides its own. Where too few hosts stay
for that, all of a job's above all, the job's kept steps are written to durable storage at once, if it has any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memstore.core.cluster.facts import HostDraining
from memstore.core.cluster.job import Attempt, Call, Job
from memstore.core.wire.messages import Body
from recovery.inventory import StepId

if TYPE_CHECKING:
    from memstore.core.controller.machine import Catalog

LOOK_AGAIN_S = 30.0  # between two looks whether durable storage still has what a host may leave to it
OVERDUE_S = 60.0  # a host that is still there so long after its moment was spared
SAME_S = 1.0  # moments nearer than this are one
WITHIN_MAX_S = 30 * 86_400.0


@dataclass(slots=True)
class Remains:
    """What a host that is to go has of kept steps, and too few copies elsewhere have."""

    short: list[Body] = field(default_factory=list)  # steps of which shards are below `replicas` in all tiers elsewhere
    durable: list[Body] = field(default_factory=list)  # steps as short of copies that durable storage has

    @property
    def shards_count(self) -> int:
        """Shards that the host must not take along."""
        return sum(int(row["shards"]) for row in self.short)

    @property
    def may_come(self) -> bool:
        """True while copies elsewhere, or a durable one, may still be made."""
        return any(row["may_come"] for row in self.short)


class Drains:
    """Which hosts are to go, and when."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.until_s: dict[str, float] = {}  # wall-clock moments: shown, and names of notices
        self.end_s: dict[str, float] = {}  # when its time is over, or Ray last repeated the notice after that
        self.ended_s: dict[str, float] = {}  # moments of notices that have ended: whoever repeats one says nothing new
        self.left: set[str] = set()  # hosts that were gone when their notice ended
        self.looked_s: dict[tuple[str, StepId], float] = {}  # steps for which the storage is looked at, and when
        self.is_there: dict[tuple[str, StepId], bool] = {}  # what was found: a marker of the past says nothing

    def is_draining(self, host: str) -> bool:
        """True from the notice until the host is gone, spared, or back after its end."""
        return host in self.until_s

    def went(self, host: str) -> bool:
        """True if the host is to go, or went with notice and is not back: no loss."""
        return host in self.until_s or host in self.left

    def ask(self, call: Call) -> None:
        """A person or a script gives notice, or takes it back: body {host, within_s or None}."""
        host, within_s = str(call.body["host"]), call.body.get("within_s")
        if not self.catalog.hosts.is_live(host):
            live = ", ".join(self.catalog.hosts.live_ids()) or "none"
            self.catalog.refuse(call, "ConfigError", f"no live host {host!r} in the store: it has {live}")
            return
        if within_s is not None and not (isinstance(within_s, int | float) and 0 < within_s < WITHIN_MAX_S):
            why = f"within_s={str(within_s)[:40]}: a notice is from 0 to {WITHIN_MAX_S:g} seconds long"
            self.catalog.refuse(call, "ConfigError", why)
            return
        until_s = None if within_s is None else self.catalog.wall_s + within_s
        self._record(host, until_s, within_s or 0.0)
        self.catalog.answer(call, {"host": host, "until_s": until_s})

    def seen(self, until_s: Mapping[str, float]) -> None:
        """What the cluster manager says now, again and again. The earliest word counts; its silence is none."""
        now = self.catalog.now
        for host, moment_s in until_s.items():
            if not self.catalog.hosts.is_live(host) or _is_same(moment_s, self.ended_s.get(host)):
                continue
            if self.is_draining(host):
                self.end_s[host] = max(self.end_s[host], now)
            within_s = min(max(0.0, moment_s - self.catalog.wall_s), WITHIN_MAX_S)
            is_news = now + within_s < self.end_s.get(host, float("inf")) - SAME_S
            known = [self.until_s.get(host), *(fact.until_s for fact in self._undone(host))]
            if is_news and not any(_is_same(moment_s, other_s) for other_s in known):
                self._record(host, moment_s, within_s)

    def returned(self, host: str, *, has_memory: bool) -> None:
        """A host joined. Without memory it is another machine of that name, and the notice was for the one before."""
        self.left.discard(host)
        if self.is_draining(host) and not has_memory:
            self._record(host, None)

    def apply(self, fact: HostDraining, *, is_replay: bool) -> None:
        """The word has spread, or is of the past."""
        before = self.is_draining(fact.host_id)
        if fact.until_s is not None:
            self.until_s[fact.host_id] = fact.until_s
            self.end_s[fact.host_id] = self.catalog.now + fact.within_s
            self.looked_s.clear()
            self.is_there.clear()
        elif before:
            self.ended_s[fact.host_id] = self.until_s.pop(fact.host_id)
            del self.end_s[fact.host_id]
            if not self.catalog.hosts.is_live(fact.host_id):
                self.left.add(fact.host_id)
        if before != self.is_draining(fact.host_id) and not is_replay:
            self._changed(fact.host_id)

    def tick(self) -> None:
        """A host that outlived its time is one like the others again; what returns after it has no notice."""
        for host, end_s in self.end_s.items():
            spare_s = OVERDUE_S if self.catalog.hosts.is_live(host) else 0.0
            if end_s + spare_s <= self.catalog.now:
                self._record(host, None)
        for job in self.catalog.jobs.values() if self.until_s else ():
            attempt = job.newest
            held = self.catalog.retention.held(job, attempt) if attempt is not None else ()
            for step in held:
                if step in job.markers:
                    self._look_for(job, step)
                elif attempt is not None and attempt.config.get("durable") and self._is_stranded(job, attempt, step):
                    self.catalog.persists.want(job, step)

    def _is_stranded(self, job: Job, attempt: Attempt, step: StepId) -> bool:
        """True if a host with notice holds some of the step, and too few hosts stay for all copies of it."""
        is_held = any(step in job.on_host.get(host, {}) for host in self.until_s)
        return is_held and len(self.catalog.hosts.domains(self._staying())) < attempt.replicas

    def _look_for(self, job: Job, step: StepId) -> None:
        """Have the storage looked at now and then, while a host may go because it has the step."""
        key = (job.name, step)
        if self.catalog.now - self.looked_s.get(key, float("-inf")) < LOOK_AGAIN_S:
            return

        def looked(unread: str, lacks: str) -> None:
            self.looked_s[key], self.is_there[key] = self.catalog.now, not unread and not lacks
            if unread or lacks:
                why = f"step {step.step} of job {job.name!r} is not safe on durable storage: {unread or lacks}"
                self.catalog.note(why, "warning")

        if self.catalog.durable_checks.ask(job, step, looked):
            self.looked_s[key] = float("inf")

    def forget(self, name: str) -> None:
        """The job was removed: what was asked of its steps is not answered any more."""
        self.looked_s = {key: s for key, s in self.looked_s.items() if key[0] != name}
        self.is_there = {key: is_there for key, is_there in self.is_there.items() if key[0] != name}

    def _undone(self, host: str) -> list[HostDraining]:
        return [x for x in self.catalog.log.undone() if isinstance(x, HostDraining) and x.host_id == host]

    def _record(self, host: str, until_s: float | None, within_s: float = 0.0) -> None:
        """Record a notice, unless the same is the last word that is under way already."""
        undone = self._undone(host)
        if not undone or not _is_same(undone[-1].until_s, until_s):
            self.catalog.record(HostDraining(host, until_s, within_s))

    def _changed(self, host: str) -> None:
        if self.is_draining(host):
            self.catalog.note(f"host {host} is to go: its copies are made elsewhere", "warning")
        elif self.catalog.hosts.is_live(host):
            self.catalog.note(f"host {host} is not to go any more")
        for job in list(self.catalog.jobs.values()):
            job.heirs.pop(host, None)
            self.catalog.placing.place_anew(job)

    # -- for status ---------------------------------------------------------------------------

    def due_s(self, host: str) -> float | None:
        """Seconds until it is to go, as far as clocks agree, negative past its moment; None without notice."""
        if host not in self.until_s:
            return None
        return min(self.until_s[host] - self.catalog.wall_s, self.end_s[host] - self.catalog.now)

    def remains(self, host: str) -> Remains:
        """What would be short of copies if the host went now; all empty without notice.

        Elsewhere is another live host that answers and has no notice, or durable storage, if it was found to hold the
        whole step since the notice.
        """
        found = Remains()
        for job in self.catalog.jobs.values() if self.is_draining(host) else ():
            self._look(job, host, found)
        return found

    def _look(self, job: Job, host: str, found: Remains) -> None:
        attempt = job.newest
        if attempt is None:
            return
        staying = self._staying()
        reachable = min(attempt.replicas, len(self.catalog.hosts.domains(staying)))
        for step in sorted(self.catalog.retention.held(job, attempt), reverse=True):
            ranks = job.on_host.get(host, {}).get(step, ())
            counts = [self._elsewhere_count(job, step, rank, staying) for rank in ranks]
            few = [count for count in counts if count < attempt.replicas]
            if few and step in job.markers and self.is_there.get((job.name, step)):
                found.durable.append({"job": job.name, "step": step.step, "copies": min(few)})
            elif few:
                is_durable_on = attempt.config.get("durable") is not None
                found.short.append(
                    {
                        "job": job.name, "step": step.step, "shards": len(few), "copies": min(few),
                        "replicas": attempt.replicas, "may_come": min(few) < reachable or is_durable_on,
                        "durable_problem": self.catalog.persists.problem(job, step) if is_durable_on else "",
                    }
                )  # fmt: skip

    def _staying(self) -> set[str]:
        """The hosts to which a draining one may leave its copies."""
        hosts = self.catalog.hosts
        return {h for h in hosts.states if hosts.is_answering(h) and not self.is_draining(h)}

    def _elsewhere_count(self, job: Job, step: StepId, rank: int, staying: set[str]) -> int:
        digest, copies = job.commits[step].digests[rank], job.copies[step][rank].items()
        whole = [h for h, copy in copies if h in staying and not copy.missing and copy.spec.digest == digest]
        return len(self.catalog.hosts.domains(whole))


def _is_same(moment_s: float | None, other_s: float | None) -> bool:
    """Tell whether two notices are one."""
    if moment_s is None or other_s is None:
        return moment_s is other_s
    return abs(moment_s - other_s) <= SAME_S
