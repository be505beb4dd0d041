"""Periodic looks at durable storage, so that reports about it are not outdated. Pure (R31).

unlisted --a host lists the markers--> listed --newest durable step not seen for LOOK_EVERY_S--> looked for
   ^                                     ^                                                           |
   '--not readable: again after AGAIN_S--'----------------- seen, or lacking: written again ---------'
"""

from __future__ import annotations

import math

from memstore.core.cluster.job import Job
from memstore.core.cluster.state import ClusterState
from memstore.core.durable.checks import DurableChecks
from memstore.core.durable.states import DurableStates

LOOK_EVERY_S = 3600.0  # every slice is opened: a request each, of an object store
AGAIN_S = 60.0  # after a look that did not find everything


class DurableLooks:
    """Looks at the durable storage of all jobs, now and then."""

    def __init__(self, state: ClusterState, states: DurableStates, checks: DurableChecks) -> None:
        self.state, self.states, self.checks = state, states, checks

    def tick(self, now: float) -> None:
        """Begin the looks that are due; at most one of a job at a time."""
        for job in self.state.jobs.values():
            if job.newest is not None and job.newest.config.get("durable") and self._is_due(now, job):
                self._look(job)

    def _is_due(self, now: float, job: Job) -> bool:
        state, step = self.states.of(job.name), job.newest_durable
        is_stale = step is not None and now - state.seen_s.get(step, -math.inf) >= LOOK_EVERY_S
        return now >= state.look_s and (is_stale or self._is_open(job))

    def _is_open(self, job: Job) -> bool:
        """Return whether the last look has not found what should be there."""
        state = self.states.of(job.name)
        return not state.is_listed or bool(state.unread or state.lacks)

    def _look(self, job: Job) -> None:
        state = self.states.of(job.name)

        def looked(_unread: str, _lacks: str) -> None:
            state.look_s = self.state.now + (AGAIN_S if self._is_open(job) else 0.0)

        if self.checks.ask(job, job.newest_durable, looked):
            state.look_s = math.inf

    def unlisted(self, job: Job) -> str:
        """Say that durable storage may have more than is known; "" if its markers were listed."""
        if self.states.is_known(job):
            return ""
        why = self.states.of(job.name).unread
        return f"durable markers are not listed yet{f': {why}' if why else ''}"
