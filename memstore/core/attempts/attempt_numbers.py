"""Which number the next attempt of a job gets: one that no other launch has, as far as is known. Pure (R16, R20)."""

from __future__ import annotations

from memstore.core.cluster.effects import Effects
from memstore.core.cluster.facts import AttemptOpened
from memstore.core.cluster.job import Job
from memstore.core.cluster.state import ClusterState
from memstore.core.journal.replication import Journal

LEFT_FREE = 1000  # numbers that launches may have which only absent hosts know of


class AttemptNumbers:
    """Numbers of attempts, of all jobs."""

    def __init__(self, state: ClusterState, out: Effects, journal: Journal) -> None:
        self.state, self.out, self.journal = state, out, journal
        self._opened: set[str] = set()  # jobs of which this controller has opened an attempt

    def next(self, name: str) -> int:
        """Return the number of the attempt that is opened now.

        Hosts that had the newest steps and that this controller has never seen may have gone on without those that are
        here. Two launches of one number would be taken for one, and their shards for one step: theirs are left free.
        """
        job = self.state.jobs.get(name)
        unapplied = [x.attempt for x in self.journal.log.unapplied() if isinstance(x, AttemptOpened) and x.job == name]
        known = job.newest_number if job is not None else 0
        attempt_number = max([known, self.state.removed.get(name, 0), *unapplied]) + 1
        absent = self._absent(job) if job is not None and name not in self._opened else set()
        self._opened.add(name)
        if not absent:
            return attempt_number
        hosts = ", ".join(sorted(absent)[:10])
        why = f"hosts {hosts} had its newest steps and have not come: they may know of launches"
        self.out.log(f"job {name!r}: attempt {attempt_number + LEFT_FREE} follows {known}: {why}", "warning")
        return attempt_number + LEFT_FREE

    def _absent(self, job: Job) -> set[str]:
        named = {host for fact in job.commits.values() for hosts in fact.hosts for host in hosts}
        if job.newest is not None:
            named |= {member.host_id for member in job.newest.members.values()}
        return named - self.state.hosts.states.keys()
