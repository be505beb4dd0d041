"""Choose the steps that stay in RAM: one goes after a newer commit only, never while pinned. Pure (R10, R19, R22)."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from memstore.core.cluster import facts as f
from memstore.core.cluster.effects import Effects
from memstore.core.cluster.job import Job
from memstore.core.cluster.state import ClusterState
from memstore.core.cluster.step_lookup import kept_steps, versions_count
from memstore.core.journal.replication import Journal
from memstore.core.wire.ids import WireShard
from memstore.core.wire.orders import FreeCopies, TermNumber
from memstore.core.wire.reports import Freed
from recovery.inventory import ShardId, StepId
from recovery.lineage import in_lineage

# -- compaction ---------------------------------------------------------------------------------------
# Which facts of the past nothing needs any more, so that journals stay short. Pure (R16).


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


# -- drop orders --------------------------------------------------------------------------------------
# Copies that hosts are ordered to free, and that do not count from then on. Pure (R7, R19).


class Drops:
    """Orders to free copies, until each is obeyed."""

    def __init__(self, state: ClusterState, out: Effects, term: int) -> None:
        self.state, self.out, self.term = state, out, term
        self._ordered: dict[str, dict[ShardId, set[int]]] = {}  # host -> copy -> numbers of the orders it has to obey
        self._given_count = 0

    def order(self, host: str, shards: Sequence[ShardId]) -> None:
        """Order a host to free copies; the caller takes them off the job."""
        self._given_count += 1
        ordered = self._ordered.setdefault(host, {})
        for shard in shards:
            ordered.setdefault(shard, set()).add(self._given_count)
        number = TermNumber(self.term, self._given_count)
        self.out.send(host, FreeCopies(shards=tuple(map(WireShard.of, shards)), number=number))

    def freed(self, host: str, report: Freed) -> None:
        """Note that a host has freed copies, perhaps for an earlier session or controller."""
        ordered = self._ordered.get(host, {})
        for shard in (row.id for row in report.shards):
            numbers = ordered.get(shard, set())
            if report.number is not None and report.number.term == self.term:
                numbers.discard(report.number.number)
            if not numbers:
                ordered.pop(shard, None)
            self._uncount(shard, host)

    def _uncount(self, shard: ShardId, host: str) -> None:
        """Take a copy off its job, if it was counted in an inventory while an older order was still to be obeyed."""
        job = self.state.jobs.get(shard.job)
        step = StepId(shard.attempt, shard.step)
        if job is not None and host in job.copies.get(step, {}).get(shard.rank, {}):
            job.drop_copy(shard, host)

    def is_ordered(self, host: str, shard: ShardId) -> bool:
        """Return whether a host has yet to free a copy, so that a report of it is outdated."""
        return shard in self._ordered.get(host, ())

    def forget_host(self, host: str) -> None:
        """Forget a host's orders: a new session begins with its inventory, and older orders may be lost."""
        self._ordered.pop(host, None)


# -- retention ----------------------------------------------------------------------------------------


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
