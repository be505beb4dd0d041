"""Jobs of a forgotten store: when they leave RAM, and the error for a rank that comes back for them. Pure (R5, R23).

A job is an orphan if no holder of any host that has it, or that its facts name, ran for `abandoned_arena_ttl_s`, all of
these hosts are here again for a while, and no rank has asked for it since. Its removal is a fact that records which
steps it had, when and why it went. Holders keep the story outside their host's folder, so that it outlives the
journals, and a get that finds nothing fails with it on all ranks, until the job begins afresh or is removed by name.
"""

from __future__ import annotations

from collections.abc import Mapping

from memstore.core.cluster.effects import Effects
from memstore.core.cluster.facts import JobRemoved
from memstore.core.cluster.job import Job
from memstore.core.cluster.state import ClusterState
from memstore.core.history.job_removal import JobRemoval
from memstore.core.journal.replication import Journal
from memstore.core.wire.orders import ForgetStory, KeepStory
from recovery.inventory import StepId

GRACE_S = 600.0  # for a launch to come after the last of the job's hosts; at most the time that makes an orphan
STEPS_NAMED_MAX = 3


class Orphans:
    """Drops forgotten jobs and remembers them; what became of each stands in `ClusterState.stories`."""

    def __init__(self, state: ClusterState, out: Effects, journal: Journal, job_removal: JobRemoval) -> None:
        self.state, self.out, self.journal, self.job_removal = state, out, journal, job_removal
        self.used: set[str] = set()  # jobs that a rank asked for since this controller began
        self.ended: set[str] = set()  # jobs removed by name since: a host that was away may still have a story

    def tick(self) -> None:
        """Remove forgotten jobs, if some host was idle for long enough."""
        ttl_s = self.state.rules.abandoned_arena_ttl_s
        if not ttl_s or all(state.idle_s < ttl_s for state in self.state.hosts.states.values()):
            return
        for job in list(self.state.jobs.values()):
            idle_s = self._idle_s(job)
            if idle_s is not None and not self._is_removed(job):
                story = self._story(job, idle_s)
                self.out.log(f"job {job.name!r}: {story or 'it never committed a step, and was forgotten'}", "warning")
                self.job_removal.remove(job, story=story)

    def _idle_s(self, job: Job) -> float | None:
        """Return how long no holder of the job's hosts had run before they came; None if it is no orphan."""
        if job.name in self.used:
            return None
        ttl_s, hosts = self.state.rules.abandoned_arena_ttl_s, self.state.hosts.states
        named = self._named(job)
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

    def _story(self, job: Job, idle_s: float) -> str:
        """Say what went, when and why; nothing where nothing was ever committed."""
        if not job.has_history:
            return ""
        steps = sorted(job.commits or job.copies, reverse=True)[:STEPS_NAMED_MAX]
        newest = ", ".join(f"{step.step} (attempt {step.attempt})" for step in steps)
        what = "committed steps" if job.commits else "steps"
        return (
            f"its {what} {newest} were dropped from RAM on {_date(self.state.wall_s)}: no holder of hosts "
            f"{', '.join(sorted(self._named(job)))} had run for {idle_s:.0f} s, and no rank asked for the job then; "
            f"abandoned_arena_ttl_s is {self.state.rules.abandoned_arena_ttl_s:g}"
        )

    # -- removal records ----------------------------------------------------------------------

    def asked(self, name: str) -> None:
        """Note that a rank asks for a job, so that it does not count as forgotten."""
        if name in self.state.jobs:
            self.used.add(name)

    def reported(self, host: str, stories: Mapping[str, str]) -> None:
        """Take the jobs that a host remembers; order it to forget those that went on, or were removed, since."""
        for name, story in stories.items():
            if name in self.ended or self._goes_on(name):
                self.out.send(host, ForgetStory(job=name))
            else:
                self.state.stories.setdefault(name, story)

    def removed(self, fact: JobRemoved, *, is_replay: bool) -> None:
        """Keep the removal record of a job that a rule dropped; one removed by name has none."""
        self.used.discard(fact.job)
        before = self.state.stories.pop(fact.job, "")
        self.ended.add(fact.job)
        if fact.story:
            self.ended.discard(fact.job)
            self.state.stories[fact.job] = fact.story
        if fact.story != before and not is_replay:
            self._send_all(KeepStory(job=fact.job, story=fact.story) if fact.story else ForgetStory(job=fact.job))

    def begun(self, name: str) -> None:
        """Drop the removal record if an opened attempt or a commit goes on without the removed steps."""
        if name in self.state.stories and self._goes_on(name):
            del self.state.stories[name]
            self._send_all(ForgetStory(job=name))

    def send_initial_state(self, host: str) -> None:
        """Send a host the removal records that it may have missed."""
        for name, story in self.state.stories.items():
            self.out.send(host, KeepStory(job=name, story=story))

    def _send_all(self, order: KeepStory | ForgetStory) -> None:
        for host in self.state.hosts.live_ids():
            self.out.send(host, order)

    def _goes_on(self, name: str) -> bool:
        """Return whether a launch of the job asked to start over, or has committed something."""
        job = self.state.jobs.get(name)
        return job is not None and (bool(job.commits) or any(a.is_fresh for a in job.attempts.values()))


def _date(wall_s: float) -> str:
    """Return a moment as people write it, in UTC; the modules that do so ask the clock as well."""
    days, year = int(wall_s // 86_400), 1970
    while days >= (length := 366 if _is_leap(year) else 365):
        days, year = days - length, year + 1
    lengths, month = [31, 29 if _is_leap(year) else 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31], 0
    while days >= lengths[month]:
        days, month = days - lengths[month], month + 1
    minutes = int(wall_s % 86_400) // 60
    return f"{year}-{month + 1:02d}-{days + 1:02d} {minutes // 60:02d}:{minutes % 60:02d} UTC"


def _is_leap(year: int) -> bool:
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
