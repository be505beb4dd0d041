"""Calls that are answered when all ranks made them: how many have, and which ranks are awaited. Pure (R20, R23)."""

from __future__ import annotations

from collections.abc import Callable

from memstore.core.attempts.join import Attempts
from memstore.core.attempts.launches import come_text, launch
from memstore.core.capacity.reservations import Reservations
from memstore.core.cluster.job import Attempt, Job
from memstore.core.cluster.state import ClusterState
from memstore.core.cluster.text import named_hosts
from memstore.core.restore.awaited import awaited_by_get, named_ranks
from memstore.core.wire.replies import RollCalled


class RollCalls:
    """Shows waiting ranks, and people, which ranks have come."""

    def __init__(self, state: ClusterState, room: Reservations, attempts: Attempts) -> None:
        self.state, self.room, self.attempts = state, room, attempts
        self._looks: dict[str, Callable[[Job, Attempt], tuple[list[int], str] | None]] = {
            "get": lambda job, attempt: awaited_by_get(state, job, attempt),
            "shard_loaded": lambda job, attempt: awaited_by_get(state, job, attempt),
            "reserve": self._reserve,
        }

    def of(self, name: str, verb: str) -> RollCalled | None:
        """Return how far a call is that ranks of a job wait for; None if none of them does."""
        job = self.state.jobs.get(name)
        attempt = job.newest if job is not None else None
        look = self._looks.get(verb)
        found = look(job, attempt) if look is not None and job is not None and attempt is not None else None
        if found is not None and attempt is not None:
            missing, awaited = found
            awaited = named_ranks(attempt, missing) if missing else awaited
            come = come_text(attempt.world_size - len(missing), attempt.world_size, missing)
            return RollCalled(come=come, awaited=awaited, is_complete=not missing)
        row = launch(self.state, self.attempts, name)
        if row is None:
            return None
        come = come_text(row.ranks, row.world_size, row.missing)
        return RollCalled(come=come, awaited=row.awaited, is_complete=not row.missing)

    def _reserve(self, job: Job, attempt: Attempt) -> tuple[list[int], str] | None:
        active = self.room.active.get(job.name)
        if active is None or active.attempt != attempt.attempt_number:
            return None
        missing = [] if active.is_ordered else self.room.silent_ranks(job, attempt)
        hosts = f"{named_hosts(active.waits)} to have the room" if active.waits else "hosts to write it down"
        return missing, hosts
