"""What is known of every job's durable storage, for all that ask, list, look and write. Pure (R31)."""

from __future__ import annotations

from memstore.core.cluster.job import Job
from memstore.core.cluster.state import ClusterState
from memstore.core.durable.write_state import DurableState
from recovery.inventory import StepId


class DurableStates:
    """The durable states of all jobs, and the numbers of questions to hosts about storage."""

    def __init__(self, state: ClusterState) -> None:
        self.state = state
        self.calls_count = 0
        self._states: dict[str, DurableState] = {}

    def of(self, job: str) -> DurableState:
        """Return the durable progress of a job, made on first use."""
        return self._states.setdefault(job, DurableState())

    def next_call(self) -> int:
        """Number a request to list markers, so that a late answer is not taken for another one's."""
        self.calls_count += 1
        return self.calls_count

    def is_known(self, job: Job) -> bool:
        """Return whether a get would find no other marker of the job than those that are known."""
        attempt = job.newest
        return attempt is None or attempt.config.get("durable") is None or self.of(job.name).is_listed

    def writers(self, job: Job, step: StepId, rank: int) -> list[str]:
        """Return the hosts that answer and hold all of a rank's shard."""
        hosts = job.copies.get(step, {}).get(rank, {})
        return sorted(h for h, c in hosts.items() if not c.missing and self.state.hosts.is_answering(h))

    def is_whole(self, job: Job, step: StepId) -> bool:
        """Return whether every shard of a committed step has a host that answers and holds all of it."""
        ranks, commit = job.copies.get(step, {}), job.commits.get(step)
        return commit is not None and len(ranks) == commit.world_size and all(self.writers(job, step, r) for r in ranks)

    def not_there(self, job: Job, step: StepId, why: str, *, is_read: bool, needs_key: bool) -> None:
        """Note that storage cannot be read, or lacks some of a step that was durable: RAM writes it again.

        So it does with a step under a key that no host has, if RAM has all of it: under the present key.
        """
        state = self.of(job.name)
        if is_read:
            state.lacks = why
        else:
            state.unread = why
        if is_read or (needs_key and self.is_whole(job, step)):
            job.markers.pop(step, None)
            state.seen_s.pop(step, None)
            state.last_started_s = state.last_started_step = None

    def take_back_again(self, name: str, step: StepId) -> None:
        """Have a torn step's marker removed once more: it has one after all."""
        state = self.of(name)
        state.taken_back.discard(step)
        state.ordered_back_s.pop(step, None)

    def forget(self, name: str) -> None:
        """Forget a job that was removed: another one of its name begins without history."""
        self._states.pop(name, None)
