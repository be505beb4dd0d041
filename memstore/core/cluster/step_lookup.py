"""Committed steps: which stay in RAM, and the one that a person names. Pure (R10, R19, R22)."""

from __future__ import annotations

from collections.abc import Iterable

from memstore.core.cluster.hosts import HostTable
from memstore.core.cluster.job import Attempt, Job
from memstore.core.cluster.text import listed
from recovery.inventory import StepId
from recovery.lineage import in_lineage

Refusal = tuple[str, str]  # error class and message


def named_step(
    job: Job, number: int | None, of_attempt: int | None, *, among: Iterable[StepId], option: str
) -> tuple[StepId | None, Refusal | None]:
    """Return the step of that number: the lineage's; else the only one that another lineage has.

    Args:
        number: None: the newest of the lineage that a get would return, while commits go on.
        of_attempt: Only this attempt's step; None: any.
        among: The steps that may be named.
        option: How the caller is to name the attempt, where several lineages have the number.

    Returns:
        The step and None, or None and what to refuse with.
    """
    if number is None:
        spans = job.spans(job.newest.attempt_number) if job.newest is not None else ()
        known = (s for s in among if in_lineage(spans, s) and s not in job.retired and of_attempt in (None, s.attempt))
        newest = max(known, default=None)
        return newest, None if newest else ("RecoveryError", f"job {job.name!r} has no committed step in its lineage")
    found = sorted(s for s in among if s.step == number and of_attempt in (None, s.attempt))
    of = f" of attempt {of_attempt}" if of_attempt is not None else ""
    if not found:
        is_put = any(s.step == number and of_attempt in (None, s.attempt) for s in job.copies)
        have = listed(sorted({s.step for s in among}, reverse=True)) or "none"
        what = "it was put and is not committed" if is_put else f"its committed steps are {have}"
        return None, ("RecoveryError", f"job {job.name!r} has no committed step {number}{of}: {what}")
    mine = [s for s in found if job.newest is not None and in_lineage(job.spans(job.newest.attempt_number), s)]
    if not mine and len(found) > 1:
        return None, (
            "RecoveryError",
            f"step {number} of job {job.name!r} is not in the present lineage, and attempts "
            f"{listed([s.attempt for s in found])} each have one: name the attempt with {option}",
        )
    return (mine or found)[-1], None


def past_step(job: Job, number: int | None) -> Refusal | None:
    """Return the refusal for a number that no step has and newer ones have passed: it was there, or never put."""
    newest = job.newest_committed
    if number is None or newest is None or newest.step <= number:
        return None
    return "StepDropped", (
        f"job {job.name!r} has no step {number} any more: step {newest.step} is committed, and older ones than "
        "keep_steps= stay only while they are pinned or leased. Read the newest, within `with reader.lease():`"
    )


def why_not_whole(hosts: HostTable, job: Job, step: StepId) -> str:
    """Return "" if answering hosts hold every chunk of a committed step, else the missing part."""
    commit, copies = job.commits.get(step), job.copies.get(step, {})
    if commit is None or not copies:
        return (
            "it is on durable storage only: get() or rewind() brings it back to RAM"
            if step in job.markers
            else ("no copy of it is left in RAM")
        )
    for rank, digest in enumerate(commit.digests):
        good = whole_or_partly(hosts, job, step, rank, digest)
        if not good or frozenset.intersection(*good.values()):
            missing = "no host that answers has a copy" if not good else "no copy has some of its chunks"
            return f"rank {rank} is not whole in RAM: {missing}"
    return ""


def whole_or_partly(hosts: HostTable, job: Job, step: StepId, rank: int, digest: str) -> dict[str, frozenset[int]]:
    """Return the answering hosts with a copy of these bytes, and the chunks that each lacks."""
    return {
        host: copy.missing
        for host, copy in job.copies.get(step, {}).get(rank, {}).items()
        if copy.spec.digest == digest and hosts.is_answering(host)
    }


def same_number(attempt: Attempt, step: StepId) -> str:
    """Say why an attempt cannot go on from this step, or "": another launch that had its number put it.

    That launch's hosts came after the number was given away. The next launch gets a higher one, and goes on from there.
    """
    if step.attempt < attempt.attempt_number:
        return ""
    return (
        f"step {step.step} was put by another launch that had the number {attempt.attempt_number} too: its "
        "hosts came after "
        "this launch had begun. Launch the job again: it gets another number, and goes on from that step"
    )


# -- kept steps ---------------------------------------------------------------------------------------
# Which committed steps of a job stay in RAM, and for how many versions there is room. Pure (R10, R19, R22).


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
    return int(attempt.config["keep_steps"]) + attempt.in_flight + (attempt.config.get("durable") is not None)
