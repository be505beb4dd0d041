"""The end of a job in RAM: a person removes it, or it is over and durable storage has it. Pure (R19).

A job expires when its newest attempt was closed by all its ranks, `job_ttl_s` have passed without a new one, its newest
committed step is on durable storage, no name pins a step, and no fork is being made of it. What lies only in RAM is
never expired: nobody can tell a finished run from one whose owner is away for a long weekend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memstore.core.facts import JobRemoved
from memstore.core.job import Job

if TYPE_CHECKING:
    from memstore.core.catalog import Catalog


class Expiry:
    """Removes jobs, for the catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.over_since_s: dict[str, float] = {}  # job -> since when it could expire, as far as this controller saw

    def tick(self, now: float) -> None:
        """Remove what has been over for its time; a new controller begins to count anew."""
        over = {job.name: job for job in self.catalog.jobs.values() if self._is_over(job)}
        self.over_since_s = {name: self.over_since_s.get(name, now) for name in over}
        for name, job in over.items():
            attempt = job.newest
            ttl_s = float(attempt.config["job_ttl_s"]) if attempt is not None else 0.0
            if 0 < ttl_s <= now - self.over_since_s[name]:
                self.catalog.note(f"job {name}: closed for {ttl_s:g} s and durable: its room in RAM is freed")
                self.remove(job)

    def _is_over(self, job: Job) -> bool:
        """True if nothing is lost with the job's copies, and nobody works on them."""
        attempt, newest = job.newest, job.newest_committed
        if attempt is None or attempt.phase != "closed" or newest is None or newest not in job.markers or job.pins:
            return False
        is_joining = job.name in self.catalog.attempts.gatherings or job.name in self.catalog.attempts.opening
        is_read = any(shard.job == job.name for _, shard, _ in self.catalog.queries.reads.values())
        is_used = is_read or bool(self.catalog.steps_in_use(job)) or bool(self.catalog.forks.unfinished(job))
        return not is_joining and not is_used

    def remove(self, job: Job) -> int:
        """Drop every copy of a job in RAM, and its facts; return how many shards that were."""
        shards = [[job.name, s.attempt, s.step, rank] for s, ranks in job.copies.items() for rank in ranks]
        for host in self.catalog.hosts.live_ids():
            self.catalog.tell(host, "drop", {"shards": shards, "removed": [job.name, job.newest_ordinal]})
        self.catalog.record(JobRemoved(job.name, job.newest_ordinal))
        return len(shards)
