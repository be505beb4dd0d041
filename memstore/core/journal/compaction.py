"""Which facts of the past nothing needs any more, so that journals stay short. Pure (R16)."""

from __future__ import annotations

from msgspec.structs import replace

from memstore.core.cluster import facts as f
from memstore.core.cluster.state import ClusterState
from memstore.core.journal.replication import Journal
from recovery.inventory import StepId

JOURNAL_NBYTES_MIN = 64 << 10  # journals shorter than this are not worth rewriting


def compact(state: ClusterState, journal: Journal) -> None:
    """Forget facts that are not needed, and have the journals rewritten once they are half as long."""
    if journal.log.journal_nbytes < JOURNAL_NBYTES_MIN:
        return
    journal.log.shorten(lambda fact: shorter(state, fact))
    if journal.log.compact(lambda fact: is_needed(state, fact)):
        journal.shorten()


def shorter(state: ClusterState, fact: f.Fact) -> f.Fact:
    """Return the part of a fact that is still needed, which may be the whole fact.

    An ended attempt keeps its number, its parent, its key and its launch options: lineage, crash loops and
    spent keys need them (R20, R22, R25). Its processes are not needed any more once a later attempt has committed.
    """
    if not isinstance(fact, f.AttemptOpened) or not fact.hosts:
        return fact
    job = state.jobs.get(fact.job)
    attempt, newest = (job.attempts.get(fact.attempt), job.newest) if job is not None else (None, None)
    if job is None or attempt is None or newest is None or fact.attempt >= newest.attempt_number:
        return fact
    if job.newest_commit(newest.attempt_number) < 0:
        return fact
    attempt.members, attempt.needs = {}, {}
    return replace(fact, nonces=(), hosts=(), shard_of=(), writers=())


def is_needed(state: ClusterState, fact: f.Fact) -> bool:
    """Return whether a successor would know less without this fact."""
    job = state.jobs.get(getattr(fact, "job", ""))
    if isinstance(fact, f.StepCommitted):
        return job is not None and job.commits.get(StepId(fact.attempt, fact.step)) == fact
    if isinstance(fact, f.StepSkipped):
        newest = max(job.commits, default=None) if job is not None else None
        return newest is None or StepId(fact.attempt, fact.step) > newest
    if isinstance(fact, f.SlotsReserved):
        return job is not None and fact.attempt == job.newest_number
    if isinstance(fact, f.StepPinned):
        return job is not None and job.pins.get(fact.name) == fact
    if isinstance(fact, f.StepUnpinned):
        return False  # nor is the pin that it took back
    if isinstance(fact, f.HostsJoined | f.JobRemoved):
        return True
    if isinstance(fact, f.HostDraining):
        return fact.until_s is not None and state.draining.get(fact.host_id) == fact.until_s
    return job is not None
