"""Conditions with a beginning and an end, both recorded: a job short of copies, a repair under way. Pure (R18, R29).

Looks at the controller's state on ticks and seals, for the recorder; changes nothing in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from msgspec import structs

from memstore.core.cluster.job import Job
from memstore.core.cluster.state import ClusterState
from memstore.core.durable.departures import Departures
from memstore.core.repair.pushes import RepairPushes
from memstore.core.wire.status_rows import ShortStep
from recovery.inventory import Copy, ShardId, StepId

LOOK_S = 1.0  # how often jobs are counted through
ROWS_MAX = 32  # steps named in one event


@dataclass(slots=True)
class OpenRepair:
    """One repair of one job."""

    since_s: float
    shards: int = 0
    nbytes: int = 0


class RedundancyMonitor:
    """Conditions of all jobs; `add` takes an event that begins or ends one."""

    def __init__(
        self, state: ClusterState, pushes: RepairPushes, departures: Departures, add: Callable[..., None]
    ) -> None:
        self.state, self.pushes, self.departures, self._add = state, pushes, departures, add
        self.short_s: dict[str, float] = {}  # job -> since when its newest commit has too few or too near copies
        self.open_repairs: dict[str, OpenRepair] = {}
        self.drained: dict[str, list[ShortStep]] = {}  # host that is to go -> what was last reported short
        self.looked_s = 0.0

    def sealed(self, copy: Copy, host: str) -> None:
        """Note a copy that arrived, if repair ordered it there."""
        if (copy.shard, host) in self.pushes.under_way and self._is_kept(copy.shard):
            open_repair = self._begin(copy.shard.job)
            open_repair.shards, open_repair.nbytes = open_repair.shards + 1, open_repair.nbytes + copy.spec.nbytes

    def tick(self, now: float) -> None:
        """Note, after repair's scan, its pushes under way and the jobs short of copies."""
        busy = {shard.job for shard, _ in self.pushes.under_way if self._is_kept(shard)}
        for name in sorted(busy):
            self._begin(name)
        for name in [n for n in self.open_repairs if n not in busy]:
            self._end(name)
        if now - self.looked_s >= LOOK_S:
            self.looked_s = now
            for name in [n for n in self.short_s if n not in self.state.jobs]:
                del self.short_s[name]
            for job in self.state.jobs.values():
                self._look(job)
            self._look_at_drains()

    def short_for_s(self, job: str) -> float:
        """Return for how long the job's newest commit has had too few or too near copies; 0 while it has enough."""
        return self.state.now - self.short_s[job] if job in self.short_s else 0.0

    # -- hosts that are to go -------------------------------------------------------------------

    def _look_at_drains(self) -> None:
        """Report once for every host with notice whether it can go, and again when that has changed."""
        self.drained = {host: rows for host, rows in self.drained.items() if self.state.is_draining(host)}
        for host in self.state.draining:
            remains = self.departures.remains(host)
            was_ready = host in self.drained and not self.drained[host]
            if not self.state.hosts.is_live(host) or remains.may_come or (was_ready and not remains.short):
                continue
            rows = [structs.replace(row, step=0) for row in remains.short]  # the step changes with every commit
            if host not in self.drained or rows != self.drained[host]:
                self.drained[host] = rows
                short, durable = remains.short[:ROWS_MAX], remains.durable[:ROWS_MAX]
                self._add("drained", host=host, short=short, durable=durable)

    # -- repair ---------------------------------------------------------------------------------

    def _is_kept(self, shard: ShardId) -> bool:
        job = self.state.jobs.get(shard.job)
        return job is not None and StepId(shard.attempt, shard.step) in job.commits

    def _begin(self, name: str) -> OpenRepair:
        if name not in self.open_repairs:
            self.open_repairs[name] = OpenRepair(self.state.now)
            self._add("repair", job=name, missing=self._missing(name))
        return self.open_repairs[name]

    def _end(self, name: str) -> None:
        done = self.open_repairs.pop(name)
        took_s = self.state.now - done.since_s
        self._add(
            "repaired",
            job=name,
            shards=done.shards,
            nbytes=done.nbytes,
            missing=self._missing(name),
            seconds={"repair": took_s},
        )

    def _missing(self, name: str) -> int:
        job = self.state.jobs.get(name)
        return sum(self.short_shards(job).values()) if job is not None else 0

    # -- copies ---------------------------------------------------------------------------------

    def short_shards(self, job: Job) -> dict[int, int]:
        """Rank -> whole copies that its shard of the newest committed step lacks; those with enough are left out."""
        step, attempt = job.newest_committed, job.newest
        if step is None or attempt is None:
            return {}
        ranks = job.copies.get(step, {})
        whole = {r: sum(not c.missing for c in ranks.get(r, {}).values()) for r in range(job.commits[step].world_size)}
        return {rank: attempt.replicas - count for rank, count in whole.items() if count < attempt.replicas}

    def _look(self, job: Job) -> None:
        step, short = job.newest_committed, self.short_shards(job)
        commit = job.commits[step] if step is not None else None
        is_short = commit is not None and (bool(short) or commit.is_degraded)
        if commit is not None and is_short and job.name not in self.short_s:
            self.short_s[job.name] = self.state.now
            self._add(
                "degraded",
                job=job.name,
                attempt=commit.attempt,
                step=commit.step,
                shards=len(short),
                missing=sum(short.values()),
                why=commit.reason if commit.is_degraded else "copies were lost",
            )
        elif job.name in self.short_s and not is_short:
            since_s = self.short_s.pop(job.name)
            ended = {} if commit is None else {"attempt": commit.attempt, "step": commit.step}
            took_s = self.state.now - since_s
            self._add("whole", job=job.name, **ended, seconds={"degraded": took_s})
