"""Says whether a job trains, by what its ranks put, on the controller's monotonic clock. Pure (D283).

Four things stop a training that was not closed: ranks ended; one rank puts nothing while others do; no rank does; or
all put and nothing is committed. How long is too long follows from the pace of this attempt (`step_pace.py`).
`problems.py` has the words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from memstore.core.cluster.job import Attempt, AttemptMember, Job
from memstore.core.cluster.state import ClusterState
from memstore.core.commit.commits import PASSED_OFTEN
from memstore.core.wire.status_rows import RankGroup, RankPlace, TrainingStatus

RANKS_NAMED_MAX = 8


def training_status(state: ClusterState, job: Job, attempt: Attempt) -> TrainingStatus | None:
    """Return whether the newest attempt of a job trains; None if it has ended well."""
    if attempt.has_ended_well:
        return None
    now, members = state.now, attempt.members.values()
    ended = [member for member in members if member.is_gone and not member.has_closed]
    unseen = [m for m in members if not m.is_gone and not (m.is_alive and state.hosts.is_live(m.host_id))]
    apart = {id(member) for member in (*ended, *unseen)}
    newest_put = max((member.sealed_step for member in members), default=-1)
    behind = [m for m in members if m.sealed_step < newest_put and id(m) not in apart]
    late = [m for m in behind if (attempt.pace.passed_s(m.sealed_step, now) or 0.0) > attempt.pace.lags_after_s()]
    quiet_s, quiet_limit_s = _quiet_s(attempt, now), attempt.progress.late_after_s()
    uncommitted_s, limit_s = _uncommitted_s(job, attempt, now), attempt.pace.late_after_s()
    is_restoring = job.name in state.rounds  # that has a deadline of its own
    stopped = [now - (member.ended_s or state.started_s) for member in ended]
    stopped += [now - attempt.closed_s] if attempt.phase == "closed" else []
    stopped += [_since_put_s(member, now) or 0.0 for member in late]
    stopped += [quiet_s] if quiet_s > quiet_limit_s and not is_restoring else []
    stopped += [uncommitted_s] if uncommitted_s is not None and uncommitted_s > limit_s else []
    alive = [member for member in members if member.is_alive]
    return TrainingStatus(
        ended=_group(ended, now),
        unseen=_group(unseen, now),
        late=_group(late, now),
        example=_place(alive[0], now) if alive else None,
        quiet_s=0.0 if is_restoring else quiet_s,
        quiet_limit_s=quiet_limit_s,
        interval_s=attempt.progress.interval_s(),
        uncommitted_s=uncommitted_s,
        uncommitted_limit_s=limit_s,
        puts_differ=attempt.passed_count >= PASSED_OFTEN,
        stopped_s=max(stopped, default=0.0),
    )


def _quiet_s(attempt: Attempt, now: float) -> float:
    """Return since when no rank is at a newer step; a launch and a restore count as one."""
    last = attempt.progress.last
    moments = [member.last_active_s for member in attempt.members.values() if member.last_active_s > -math.inf]
    return now - max([*moments, *([last[1]] if last is not None else [])], default=now)


def _uncommitted_s(job: Job, attempt: Attempt, now: float) -> float | None:
    """Return for how long puts have waited for a commit, counted from the newest one or from the first of them."""
    waits_s = attempt.pace.passed_s(job.newest_commit(attempt.attempt_number), now)
    if waits_s is None or attempt.committed_s is None:
        return waits_s
    return now - attempt.committed_s


def _since_put_s(member: AttemptMember, now: float) -> float | None:
    at_s = member.ended_s if member.is_gone else member.put_s
    return now - at_s if at_s is not None else None


def _place(member: AttemptMember, now: float) -> RankPlace:
    return RankPlace(
        rank=member.rank,
        host=member.host_id,
        pid=member.pid,
        step=max(member.sealed_step, member.step),
        since_s=_since_put_s(member, now),
        has_closed=member.has_closed,
    )


def _group(members: Iterable[AttemptMember], now: float) -> RankGroup:
    ordered = sorted(members, key=lambda member: member.rank)
    return RankGroup(count=len(ordered), first=[_place(member, now) for member in ordered[:RANKS_NAMED_MAX]])
