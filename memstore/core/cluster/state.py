"""The controller's state of its cluster: hosts, jobs, and work under way. Plain data; read by every part.

Each field has one writer, named beside it. Nothing here decides, sends or records anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from memstore.core.cluster.hosts import HostTable
from memstore.core.cluster.job import Job
from memstore.core.cluster.reading import Read, Round
from recovery.inventory import ShardId, StepId

# -- holds --------------------------------------------------------------------------------------------
# Holds: the steps that may not be dropped now, and the parts that hold them. Pure (R7, R19, R22).


HoldSource = Callable[[Job], Iterable[StepId]]


class Holds:
    """The sources of all holds, by purpose."""

    def __init__(self) -> None:
        self._in_use: dict[str, HoldSource] = {}
        self._planned: dict[str, HoldSource] = {}

    def add(self, what: str, source: HoldSource, *, is_in_use: bool) -> None:
        """Register a source.

        Args:
            what: Its name in messages, such as "a restore".
            source: Returns the steps of a job that it needs now.
            is_in_use: The bytes are being read or written now. Else the step is named by a decision, such as a pin.
        """
        (self._in_use if is_in_use else self._planned)[what] = source

    def in_use(self, job: Job) -> set[StepId]:
        """Return the steps of a job whose bytes are being read or written now."""
        return {step for source in self._in_use.values() for step in source(job)}

    def steps(self, job: Job) -> set[StepId]:
        """Return all steps of a job that may not be dropped now."""
        return self.in_use(job) | {step for source in self._planned.values() for step in source(job)}


# -- state --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rules:
    """The store's fields of Config by which the controller decides, and constants that tests change; seconds."""

    job_defaults: Mapping[str, Any] = field(default_factory=dict)  # shown only: ranks ask for them as they join
    gcs_storage: str = ""  # shown only: where Ray's head keeps its tables
    failure_domains: tuple[str, ...] = ("zone", "rack")
    chunk_bytes: int = 0  # 0: not known, and no placement goes by the memory of hosts
    suspect_after_s: float = 1.5
    dead_after_s: float = 5.0
    recovery_grace_s: float = 30.0
    lease_s: float = 3.0
    outlast_s: float = 3.0  # shortest wait of a new controller: what its predecessor's lease may still be (R17)
    settle_s: float = 10.0  # longest wait for the expected hosts before a new controller serves
    max_restores: int = 3  # of one step: two deaths may be of hosts, a third without a commit is of the step (R25)
    crash_window_s: float = 600.0  # in which they count: restarts that crash follow one another within minutes


class ClusterState:
    """The controller's knowledge, in memory; facts and inventories rebuild it (R16)."""

    def __init__(self, *, rules: Rules, now: float, wall_offset_s: float, expected_hosts: Iterable[str]) -> None:
        self.rules = rules
        self.now = self.started_s = now  # monotonic; the machine moves it on with every event
        self.wall_offset_s = wall_offset_s
        self.expected_hosts = set(expected_hosts)
        self.hosts = HostTable(
            suspect_after_s=rules.suspect_after_s,
            dead_after_s=rules.dead_after_s,
            failure_domains=rules.failure_domains,
        )
        self.jobs: dict[str, Job] = {}
        self.removed: dict[str, int] = {}  # job -> the last attempt that was removed with it (job_removal)
        self.forgotten: set[str] = set()  # jobs with steps that were removed since nobody used them (orphans)
        self.draining: dict[str, float] = {}  # host -> wall-clock moment of its notice (drain)
        self.rounds: dict[str, Round] = {}  # job -> its get() under way (restore)
        self.reads: dict[int, Read] = {}  # by number: single shards that are brought to readers (single_read)
        self.is_placement_stale = False  # hosts changed: the next tick recomputes the placement of jobs (membership)
        self.holds = Holds()

    @property
    def wall_s(self) -> float:
        """Wall-clock seconds, for facts that outlive this controller."""
        return self.now + self.wall_offset_s

    @property
    def late_until_s(self) -> float:
        """Return until when an announced host that has not come counts as late, on the clock of `now` (R24)."""
        return self.started_s + self.rules.recovery_grace_s

    def age_s(self, moment_s: float) -> float:
        """Return how long ago a moment of a wall clock was; 0 for a moment to come, as after a clock was set back."""
        return max(0.0, self.wall_s - moment_s)

    def job(self, name: str) -> Job:
        """Return the job of a name, known or new."""
        found = self.jobs.get(name)
        if found is None:  # each seal asks: none is made in vain
            found = self.jobs[name] = Job(name)
        return found

    def known_job(self, name: str) -> Job | None:
        """Return the job if a host that is here knows an attempt of it (R20)."""
        job = self.jobs.get(name)
        return job if job is not None and job.newest is not None else None

    def is_dropped(self, job: Job) -> bool:
        """Return whether a job's steps were dropped since nobody used them, and no launch has begun anew since (R5)."""
        is_forgotten = job.name in self.forgotten and not job.has_history
        return is_forgotten and not any(attempt.is_fresh for attempt in job.attempts.values())

    def is_draining(self, host: str) -> bool:
        """Return whether a host has notice of its end."""
        return host in self.draining

    def is_read(self, shard: ShardId) -> bool:
        """Return whether a read brings the shard to some host: no copy of it is surplus yet, least its source (R7)."""
        step = StepId(shard.attempt, shard.step)
        return any(shard == read.shard for read in self.reads.values()) or any(
            active.plan is not None and active.plan.step == step for active in self.rounds_from(shard.job)
        )

    def rounds_from(self, job: str) -> list[Round]:
        """Return the gets under way that read a job's steps: its own, and those of other jobs (R32)."""
        return [active for active in self.rounds.values() if active.source == job]

    def is_back(self, name: str, step: StepId) -> bool:
        """Return whether durable storage has brought a step of a removed job back, to a later job of its name (R31)."""
        job = self.jobs.get(name)
        if job is None:
            return False
        restored = ((a.parent, a.parent_step) for a in job.attempts.values() if a.has_restored)
        return step in job.commits or step in job.markers or (step.attempt, step.step) in restored


# -- failures -----------------------------------------------------------------------------------------
# How often a job fails, as far as its attempts show (R31, R33).


PRIOR_S = 86_400.0  # one failure a day, until failures were seen


def mean_time_between_failures_s(observed_s: float, failures_count: int) -> float:
    """Return the mean over what was observed and one failure a day before that (ours)."""
    return (observed_s + PRIOR_S) / (failures_count + 1)


def mtbf_s(state: ClusterState, job: Job) -> float:
    """Return the mean time between failures, in seconds, from the attempts that did not end well."""
    opened = [a.opened_s for a in job.attempts.values() if a.opened_s is not None]
    newest = job.newest_number
    failures_count = sum(
        a.phase != "closed" or bool(a.ended_by) for a in job.attempts.values() if a.attempt_number != newest
    )
    observed_s = state.age_s(min(opened, default=state.wall_s))
    return mean_time_between_failures_s(observed_s, failures_count)
