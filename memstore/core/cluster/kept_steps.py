"""Which committed steps of a job stay in RAM, and for how many versions there is room. Pure (R10, R19, R22)."""

from __future__ import annotations

from collections.abc import Iterable

from memstore.core.cluster.job import Attempt, Job
from recovery.inventory import StepId
from recovery.lineage import in_lineage


def newest_steps(committed: Iterable[StepId], *, keep: int) -> frozenset[StepId]:
    """Return the newest `keep` committed steps of the lineage.

    The caller passes only committed steps of the newest attempt's lineage, so an older step can
    leave this set only because a newer one was committed by a fact.

    >>> sorted(s.step for s in newest_steps([StepId(1, 4), StepId(1, 5), StepId(2, 6)], keep=2))
    [5, 6]
    """
    return frozenset(sorted(committed, reverse=True)[:keep])


def kept_steps(job: Job, attempt: Attempt) -> frozenset[StepId]:
    """Return the committed steps of the lineage that retention keeps."""
    spans = job.spans(attempt.attempt_number)
    committed = [s for s in job.commits if in_lineage(spans, s) and s not in job.retired]
    return newest_steps(committed, keep=int(attempt.config["keep_steps"]))


def redundant_steps(job: Job, attempt: Attempt) -> frozenset[StepId]:
    """Return the committed steps that keep all their copies: kept ones, and pinned ones of any lineage (R29)."""
    return kept_steps(job, attempt) | (job.pinned_steps() & job.commits.keys())


def versions_count(job: Job, attempt: Attempt) -> int:
    """Return how many versions of every shard have room, pins apart.

    A closed attempt writes no more versions. So there is room only for the steps that the job keeps, and for those that
    were not whole yet when the attempt closed.
    """
    if attempt.phase == "closed":
        kept = kept_steps(job, attempt) - job.pinned_steps()
        begun = [step for step, phase in attempt.steps.items() if phase in ("open", "committing")]
        return len(kept) + len(begun)
    return int(attempt.config["keep_steps"]) + 1 + (attempt.config.get("durable") is not None)
