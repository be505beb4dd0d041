"""Is one rank's shard on enough domains to commit the step? Pure (R18)."""

from __future__ import annotations

from dataclasses import dataclass

from memstore.core.capacity.reservations import Reservations
from memstore.core.cluster.job import Attempt, Job
from memstore.core.cluster.state import ClusterState
from memstore.core.targets.targets import ClusterView
from recovery.inventory import ShardId, StepId


@dataclass(frozen=True, slots=True)
class Held:
    """One shard with enough copies: its entry in the commit fact, and why it is degraded, if it is."""

    digest: str
    hosts: tuple[str, ...]
    reasons: tuple[str, ...]


class CommitRule:
    """The rule for the shards of one step, as the cluster is now.

    `held` runs about once per seal, so it must be cheap.
    """

    def __init__(
        self,
        state: ClusterState,
        view: ClusterView,
        room: Reservations,
        job: Job,
        attempt: Attempt,
        step: StepId,
        level: str,
    ) -> None:
        """Prepare to look at a step; `attempt` is the newest: its members decide where the copies go (R22)."""
        self.view, self.job, self.attempt, self.step = view, job, attempt, step
        self.copies = job.copies.get(step, {})
        self.commit = job.commits.get(step)  # if it is committed already: its digests are the truth (R14)
        self.domains = state.hosts.live_domains(level)
        self.replicas, self.min_copies = attempt.replicas, int(attempt.config["min_copies"])
        # Hosts without room for the job that refused a shard lately: not waited for, they would refuse after 10 s.
        unroomed = room.unroomed
        self.full = {h for _, h in job.refusals if (job.name, h) in unroomed} if unroomed else set()

    def held(self, rank: int) -> Held | None:
        """Return the copies of a rank's shard, or None while it is not on enough domains."""
        job, domains, truth = self.job, self.domains, self.commit
        hosts = [
            h
            for h, c in self.copies.get(rank, {}).items()
            if not c.missing and h in domains and (truth is None or c.spec.digest == truth.digests[rank])
        ]
        if not hosts:
            return None
        copies = self.copies[rank]
        digest = copies[hosts[0]].spec.digest
        if any(copies[h].spec.digest != digest for h in hosts):
            return None
        wanted = self.view.wanted(job, self.attempt, rank)
        refused: dict[str, str] = {}
        if job.refusals:
            shard = ShardId(job.name, self.step.attempt, self.step.step, rank)
            refused = {h: job.refusals[shard, h] for h in wanted if (shard, h) in job.refusals}
        have = {domains[h] for h in hosts}
        need = {
            domains[h] for h in wanted if h in domains and (h in hosts or (h not in refused and h not in self.full))
        }
        if len(have) < max(len(need), self.min_copies):
            return None
        reasons = [f"{host}: {why}" for host, why in refused.items()]
        if len(have) < self.replicas:
            reasons.insert(0, f"rank {rank} has {len(have)} of {self.replicas} copies")
        return Held(digest, tuple(sorted(hosts)), tuple(reasons))
