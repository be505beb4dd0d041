"""Choose the steps that stay in RAM: one goes after a newer commit only, never while pinned. Pure (R10, R19, R22)."""

from __future__ import annotations

from memstore.core.capacity.drop_orders import Drops
from memstore.core.cluster.job import Job
from memstore.core.cluster.kept_steps import kept_steps, versions_count
from memstore.core.cluster.state import ClusterState
from memstore.core.journal.compaction import compact
from memstore.core.journal.replication import Journal
from recovery.inventory import ShardId, StepId
from recovery.lineage import in_lineage

STEPS_REMEMBERED = 1000  # phases of older steps say nothing that the newest commit does not say


class Retention:
    """Keeps and drops the steps of all jobs."""

    def __init__(self, state: ClusterState, journal: Journal, drops: Drops) -> None:
        self.state, self.journal, self.drops = state, journal, drops

    def retain(self, job: Job) -> None:
        """Drop copies of steps that are no longer kept: only after a newer commit, never a restorable need (R19)."""
        attempt = job.newest
        if attempt is None:
            return
        has_commit = any(s.attempt == attempt.attempt_number for s in job.commits)
        kept, busy = kept_steps(job, attempt), self.state.holds.steps(job)
        for step in list(job.copies):
            if step in kept or step in busy:
                continue
            is_open = step.attempt == attempt.attempt_number and attempt.steps.get(step.step) in ("open", "committing")
            if is_open or not has_commit or not kept or (step.attempt == attempt.attempt_number and step > max(kept)):
                continue
            self._drop_step(job, step)
        # A commit is forgotten only beside a newer one: the last one is history even when its bytes are lost (R23).
        for step in [s for s in job.commits if kept and s < max(kept) and s not in {*job.copies, *kept, *busy}]:
            del job.commits[step]
        newest = job.newest_commit(attempt.attempt_number)
        for number in [n for n in attempt.steps if n < newest - STEPS_REMEMBERED]:
            del attempt.steps[number]
        # older ones are below the newest commit anyway
        attempt.abandoned_ranges = [h for h in attempt.abandoned_ranges if h[1] > newest]
        compact(self.state, self.journal)

    def free_unrestorable(self, job: Job) -> None:
        """Drop, from an attempt's first put on, older steps that no lineage can restore any more (R10, R22).

        An uncommitted step of an older attempt, or a committed one beyond the restored step that is not whole, would
        otherwise fill the share until the first commit, and the first put could never get slots. Whole committed steps
        beyond the restored one stay until then, the newest of them for which there is room: a rewind may be taken back.
        What is held at the first put, such as by a pin, is looked at again when a put is skipped.
        """
        attempt = job.newest
        if attempt is None:
            return
        attempt.has_freed_unrestorable = True
        spans, busy = job.spans(attempt.attempt_number), self.state.holds.steps(job)
        kept = kept_steps(job, attempt)
        # Kept steps and further ones share all versions but the one that the put needs.
        spare = versions_count(job, attempt) - 1 - len(kept & job.copies.keys())
        for step in sorted(
            (s for s in job.copies if s.attempt < attempt.attempt_number and s not in busy), reverse=True
        ):
            commit = job.commits.get(step)
            is_whole = commit is not None and len(job.copies[step]) == commit.world_size
            is_beyond = not in_lineage(spans, step)
            is_old = not is_beyond and step not in kept  # a restore adopted a newer one by a fact
            if commit is None or is_old or (is_beyond and (not is_whole or spare <= 0)):
                self._drop_step(job, step)
                if is_old:
                    job.commits.pop(step, None)  # so that a copy that comes late goes too
            elif is_beyond:
                spare -= 1

    def _drop_step(self, job: Job, step: StepId) -> None:
        """Free every copy of a step in RAM."""
        by_host: dict[str, list[ShardId]] = {}
        for rank, hosts in job.copies[step].items():
            for host in hosts:
                by_host.setdefault(host, []).append(ShardId(job.name, step.attempt, step.step, rank))
        for host, shards in sorted(by_host.items()):
            self.drops.order(host, shards)
        job.drop_step(step)
