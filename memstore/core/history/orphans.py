"""Jobs of a forgotten store: when they leave RAM. Pure (R5, R23).

A job is an orphan if no holder of any host that has it, or that its facts name, ran for its `job_ttl_s`, all of these
hosts are here again for a while, and no rank has asked for it since. Its removal is a fact, a line of the log and
an event. A get that finds nothing fails on all ranks, until the job begins afresh or is removed by name.
"""

from __future__ import annotations

from memstore.core.cluster.effects import Effects
from memstore.core.cluster.facts import JobRemoved
from memstore.core.cluster.job import Job
from memstore.core.cluster.state import ClusterState
from memstore.core.history.job_removal import JobRemoval
from memstore.core.journal.replication import Journal
from recovery.inventory import StepId

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
        newest = job.commits.get(max(job.commits, default=StepId(0, 0)))
        named |= {host for hosts in newest.hosts for host in hosts} if newest is not None else set()
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
