"""The end of a job in RAM: a person removes it, or it is over and durable storage has it. Pure (R19).

A job expires when its newest attempt was closed by all its ranks, `job_ttl_s` have passed without a new one, its newest
committed step is on durable storage, no name pins a step, and no reader reads one. What lies only in RAM is
never expired: a finished run looks like one whose owner is away for a long weekend.

    over --job_ttl_s--> checked: a host looks for the step's marker and all its slices, now --all there--> removed
                           '--not listed, marker or slice missing--> kept, said, and written or checked again
"""

from __future__ import annotations

from memstore.core.attempts.join import Attempts
from memstore.core.cluster.effects import Effects, JobForgotten
from memstore.core.cluster.facts import Fact, JobRemoved, StepCommitted, StepPinned, StepRetired
from memstore.core.cluster.job import Call, Job
from memstore.core.cluster.state import ClusterState
from memstore.core.cluster.text import listed_pins
from memstore.core.durable.checks import DurableChecks
from memstore.core.journal.replication import Journal, Waiters
from memstore.core.restore.single_read import job_of
from memstore.core.wire.calls import RemoveJob
from memstore.core.wire.ids import WireShard
from memstore.core.wire.orders import DropJob
from memstore.core.wire.replies import Removed
from memstore.core.wire.status_rows import PinRow
from recovery.inventory import StepId

CHECK_AGAIN_S = 600.0


class JobRemoval:
    """Removes jobs."""

    def __init__(
        self,
        state: ClusterState,
        out: Effects,
        journal: Journal,
        waiters: Waiters,
        checks: DurableChecks,
        attempts: Attempts,
    ) -> None:
        self.state, self.out, self.journal, self.waiters = state, out, journal, waiters
        self.checks, self.attempts = checks, attempts
        self.over_since_s: dict[str, float] = {}  # job -> since when it could expire, as far as this controller saw
        self.checking: set[str] = set()  # jobs whose newest step is looked for on the storage
        self.kept_s: dict[str, float] = {}  # job -> when a check last found that its RAM must stay

    def tick(self, now: float) -> None:
        """Remove jobs that have been over for long enough; a new controller counts from zero."""
        over = {job.name: job for job in self.state.jobs.values() if self._is_over(job)}
        self.over_since_s = {name: self.over_since_s.get(name, now) for name in over}
        for name, job in over.items():
            attempt = job.newest
            ttl_s = float(attempt.config["job_ttl_s"]) if attempt is not None else 0.0
            if 0 < ttl_s <= now - self.over_since_s[name]:
                self._check(now, job)

    def _check(self, now: float, job: Job) -> None:
        """Have a host check that durable storage has the newest step now; earlier checks do not count."""
        step = job.newest_committed
        if step is None or job.name in self.checking or now - self.kept_s.get(job.name, -CHECK_AGAIN_S) < CHECK_AGAIN_S:
            return
        if self.checks.ask(job, step, lambda unread, lacks: self._checked(job, step, unread, lacks)):
            self.checking.add(job.name)

    def _checked(self, job: Job, step: StepId, unread: str, lacks: str) -> None:
        """Take a host's look at the storage: why it could not be read, or what the step lacks there."""
        self.checking.discard(job.name)
        if unread or lacks:
            self.kept_s[job.name] = self.state.now
            self.out.note("not_expired", job=job.name, attempt=step.attempt, step=step.step, why=unread or lacks)
        elif self._is_over(job) and job.newest_committed == step:
            self.out.log(f"job {job.name}: closed for its job_ttl_s and found durable: its room in RAM is freed")
            self.remove(job)

    def _is_over(self, job: Job) -> bool:
        """Return whether nothing is lost with the job's copies, and no process works on them."""
        attempt, newest = job.newest, job.newest_committed
        if attempt is None or attempt.phase != "closed" or attempt.ended_by:
            return False
        if newest is None or newest not in job.markers or job.pins:
            return False
        return not self.is_in_use(job)

    def is_in_use(self, job: Job) -> bool:
        """Return whether a process connects to the job, reads, restores or writes it."""
        is_joining = job.name in self.attempts.gatherings or job.name in self.attempts.opening
        is_read = any(read.shard.job == job.name for read in self.state.reads.values())
        is_read = is_read or bool(self.state.rounds_from(job.name))
        return is_joining or is_read or bool(self.state.holds.in_use(job))

    def ask(self, call: Call[RemoveJob]) -> None:
        """Drop every copy of a job in RAM, and its facts."""
        name = call.request.job
        is_gone = name in self.state.forgotten and name not in self.state.jobs
        job = Job(name) if is_gone else job_of(self.state, self.out, call)
        if job is None:
            return
        attempt = job.newest
        members = attempt.members.values() if attempt is not None and attempt.phase != "closed" else ()
        alive = [s for s in members if s.is_alive and self.state.hosts.is_live(s.host_id)]
        if alive and not call.request.force:
            member = alive[0]
            self.out.refuse(
                call,
                "JobBusyError",
                f"job {job.name!r} is being trained: rank {member.rank} on host {member.host_id} (pid {member.pid}) is "
                "alive. Stop it first, or pass --force as well",
            )
            return
        if job.pins and not call.request.force:
            self.out.refuse(
                call,
                "JobBusyError",
                f"job {job.name!r} has pins that would be lost with it: {listed_pins(job)}. Take them back with "
                f"`memstore unpin {job.name} NAME`, or pass --force as well",
            )
            return
        pins = {name: PinRow(attempt=pin.attempt, step=pin.step) for name, pin in sorted(job.pins.items())}
        self.remove(job, (call, Removed(job=job.name, pins=pins)))

    def remove(self, job: Job, *waiting: tuple[Call[RemoveJob], Removed], is_forgotten: bool = False) -> None:
        """Record the end of a job; answer waiting calls once it is gone."""
        unapplied = [fact for fact in self.journal.log.unapplied() if getattr(fact, "job", "") == job.name]
        begun = [getattr(fact, "attempt", 0) for fact in unapplied]
        fact = JobRemoved(job.name, max(job.newest_number, self.state.removed.get(job.name, 0), *begun), is_forgotten)
        if fact not in unapplied:
            self.journal.record(fact)
        for call, reply in waiting:
            self.waiters.add(fact, call, reply)

    def forget(self, name: str) -> None:
        """Forget the checks of a removed job."""
        self.checking.discard(name)
        self.kept_s.pop(name, None)

    def is_void(self, fact: Fact) -> bool:
        """Return whether a fact is void: decided while the removal of its job was being replicated (R16)."""
        name = getattr(fact, "job", "")
        removed = self.state.removed.get(name, 0)
        if isinstance(fact, JobRemoved) or getattr(fact, "attempt", removed + 1) > removed:
            return False
        if isinstance(fact, StepRetired):
            return name not in self.state.jobs  # else it is true of the bytes, wherever they come from
        if isinstance(fact, StepCommitted | StepPinned):
            return not self.state.is_back(name, StepId(fact.attempt, fact.step))
        return True

    def apply(self, fact: JobRemoved, *, is_replay: bool) -> None:
        """Forget the job of a replicated removal and drop every copy."""
        state, job = self.state, self.state.jobs.pop(fact.job, None)
        state.removed[fact.job] = max(fact.attempt, state.removed.get(fact.job, 0))
        (state.forgotten.add if fact.is_forgotten else state.forgotten.discard)(fact.job)
        self.out.emit(JobForgotten(fact.job))
        if is_replay:
            return
        steps = dict.fromkeys([*job.copies, *job.parity]) if job is not None else ()
        by_host = (job.shards_on(step).values() for step in steps) if job is not None else ()
        found = dict.fromkeys(shard for hosts in by_host for held in hosts for shard in held)
        shards = tuple(map(WireShard.of, found))
        order = DropJob(job=fact.job, attempt=fact.attempt, shards=shards)
        for host in state.hosts.live_ids():
            self.out.send(host, order)
        self.waiters.fill(fact, shards=len(shards))


# -- orphans ------------------------------------------------------------------------------------------
# Jobs of a forgotten store: when they leave RAM. Pure (R5, R23).


TTL_S = 86_400.0  # of a job of which only copies are known
GRACE_S = 600.0  # for a launch to come after the last of the job's hosts; at most the time that makes an orphan


class Orphans:
    """Drops forgotten jobs."""

    def __init__(self, state: ClusterState, out: Effects, journal: Journal, job_removal: JobRemoval) -> None:
        self.state, self.out, self.journal, self.job_removal = state, out, journal, job_removal
        self.used: set[str] = set()  # jobs that a rank asked for since this controller began

    def tick(self) -> None:
        """Remove forgotten jobs, if some host was idle for long enough."""
        longest_s = max((state.idle_s for state in self.state.hosts.states.values()), default=0.0)
        for job in list(self.state.jobs.values()):
            ttl_s = float(job.newest.config["job_ttl_s"]) if job.newest is not None else TTL_S
            idle_s = self._idle_s(job, ttl_s) if 0 < ttl_s <= longest_s else None
            if idle_s is not None and not self._is_removed(job):
                newest = f"step {max(job.commits).step} is the newest committed" if job.commits else "none is committed"
                self.out.log(
                    f"job {job.name!r}: its steps, of which {newest}, are dropped from RAM: no holder of hosts "
                    f"{', '.join(sorted(self._named(job)))} had run for {idle_s:.0f} s",
                    "warning",
                )
                self.job_removal.remove(job, is_forgotten=job.has_history)

    def _idle_s(self, job: Job, ttl_s: float) -> float | None:
        """Return how long no holder of the job's hosts had run before they came; None if it is no orphan."""
        if job.name in self.used:
            return None
        hosts, named = self.state.hosts.states, self._named(job)
        if not named or not named <= hosts.keys() or job.pins or self.job_removal.is_in_use(job):
            return None
        members = job.newest.members.values() if job.newest is not None and job.newest.phase != "closed" else ()
        if any(member.is_alive for member in members):
            self.used.add(job.name)
        states = [hosts[host] for host in named]
        since_s = max(state.since_s for state in states)
        is_early = self.state.now - since_s < min(GRACE_S, ttl_s)
        if job.name in self.used or is_early or any(state.status != "live" for state in states):
            return None
        idle_s = min(state.idle_s for state in states)
        return idle_s if idle_s >= ttl_s else None

    def _named(self, job: Job) -> set[str]:
        """Return the hosts that hold some of it, or may know more of it than those that are here."""
        named = {host for host, steps in job.on_host.items() if steps}
        if job.commits:
            named |= job.committed_on(max(job.commits))
        return named | {member.host_id for member in job.newest.members.values()} if job.newest is not None else named

    def _is_removed(self, job: Job) -> bool:
        return any(isinstance(fact, JobRemoved) and fact.job == job.name for fact in self.journal.log.unapplied())

    def asked(self, name: str) -> None:
        """Note that a rank asks for a job, so that it does not count as forgotten."""
        if name in self.state.jobs:
            self.used.add(name)

    def forget(self, name: str) -> None:
        """Forget a removed job."""
        self.used.discard(name)
