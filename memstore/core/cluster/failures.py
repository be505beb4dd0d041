"""How often a job fails, as far as its attempts show. Pure (R31, R33)."""

from __future__ import annotations

from memstore.core.cluster.job import Job
from memstore.core.cluster.state import ClusterState

PRIOR_S = 86_400.0  # one failure a day, until failures were seen


def mean_time_between_failures_s(observed_s: float, failures_count: int) -> float:
    """Return the mean over what was observed and one failure a day before that (ours)."""
    return (observed_s + PRIOR_S) / (failures_count + 1)


def mtbf_s(state: ClusterState, job: Job) -> float:
    """Return the mean time between failures, in seconds, from the attempts that did not end well."""
    opened = [a.opened_s for a in job.attempts.values() if a.opened_s is not None]
    newest = job.newest_number
    failures_count = sum(
        a.phase != "closed" or bool(a.ended_by) for a in job.attempts.values() if a.attempt_number != newest
    )
    observed_s = state.age_s(min(opened, default=state.wall_s))
    return mean_time_between_failures_s(observed_s, failures_count)
