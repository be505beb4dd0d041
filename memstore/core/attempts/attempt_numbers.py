"""Which number the next attempt of a job gets: one that no other launch has, as far as is known. Pure (R16, R20)."""

from __future__ import annotations

from memstore.core.cluster.effects import Effects
from memstore.core.cluster.facts import AttemptOpened
from memstore.core.cluster.job import Job
from memstore.core.cluster.state import ClusterState
from memstore.core.cluster.text import named_hosts
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
        here. So may any host that is expected and has not come, of a job that no host here knows. Two launches of one
        number would be taken for one, and their shards for one step: their numbers are left free.
        """
        job, known_job = self.state.jobs.get(name), self.state.known_job(name)
        unapplied = [x.attempt for x in self.journal.log.unapplied() if isinstance(x, AttemptOpened) and x.job == name]
        known = job.newest_number if job is not None else 0
        attempt_number = max([known, self.state.removed.get(name, 0), *unapplied]) + 1
        is_first = name not in self._opened
        absent = (self._absent(known_job) if known_job is not None else self._late()) if is_first else set()
        self._opened.add(name)
        if not absent:
            return attempt_number
        why = "had its newest steps and may know of launches" if known_job is not None else "may know the job"
        why = f"{named_hosts(absent)}, not here yet, {why}"
        self.out.log(f"job {name!r}: attempt {attempt_number + LEFT_FREE} follows {known}: {why}", "warning")
        return attempt_number + LEFT_FREE

    def _late(self) -> set[str]:
        return self.state.expected_hosts - self.state.hosts.states.keys()

    def _absent(self, job: Job) -> set[str]:
        named = {host for fact in job.commits.values() for hosts in fact.hosts for host in hosts}
        if job.newest is not None:
            named |= {member.host_id for member in job.newest.members.values()}
        return named - self.state.hosts.states.keys()
