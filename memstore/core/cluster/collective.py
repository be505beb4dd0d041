"""A call that every rank of an attempt makes and that is answered once all have. Pure (R10, R20, R23, R27).

calling --every rank has called--> complete --its owner decides--> answered, all alike
   |--a rank died--> its call is void, and awaited again
   '--a newer attempt, the end of the job, or a deadline that names the missing ranks--> refused, all alike
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from memstore.core.cluster.effects import Effects
from memstore.core.cluster.job import Attempt, Call, Job
from memstore.core.cluster.state import ClusterState
from memstore.core.cluster.text import who_is_missing
from memstore.core.wire.calls import RankRequest

Refusal = tuple[str, str]  # error class and message


def newer_attempt(job: str) -> Refusal:
    """Return the error for a rank of an attempt that is over."""
    return "FencedError", f"job {job!r}: a newer attempt was opened"


def job_removed(job: str) -> Refusal:
    """Return the error for a caller whose job was removed meanwhile."""
    return "FencedError", f"job {job!r} was removed"


def attempt_of(state: ClusterState, out: Effects, call: Call[RankRequest[Any]]) -> tuple[Job, Attempt] | None:
    """Return the job and the attempt of the rank that calls; None, and the call is refused, if its attempt is over."""
    job = state.jobs.get(call.request.job)
    attempt = job.newest if job is not None else None
    if job is None or attempt is None or attempt.attempt_number != call.request.attempt:
        out.refuse(call, *newer_attempt(call.request.job))
        return None
    return job, attempt


def missing_ranks(world_size: int, called: Collection[int]) -> list[int]:
    """Return the ranks that have not called."""
    return [rank for rank in range(world_size) if rank not in called]


def gather_timeout(what: str, after_s: float, missing: list[int], world_size: int, done: str, advice: str) -> Refusal:
    """Return the error for all ranks if some rank never called.

    Args:
        what: The call and its job, such as "get() of job 'llama'".
        after_s: Seconds that were waited.
        missing: The ranks that have not called.
        world_size: Of the attempt.
        done: What the others have done, such as "called get()".
        advice: A sentence.
    """
    return "GatherTimeout", f"{what}: after {after_s:g} s {who_is_missing(missing, world_size, done)}. {advice}"
