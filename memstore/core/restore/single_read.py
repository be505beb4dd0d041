"""Reads of one rank's shard, without a barrier and without adopting anything. Pure (R27).

asked --planned--> the reader's host brings it, from hosts or durable storage --> answered with its place there
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memstore.core.cluster.effects import Effects
from memstore.core.cluster.job import Attempt, Call, Job
from memstore.core.cluster.reading import Read
from memstore.core.cluster.state import ClusterState
from memstore.core.cluster.step_lookup import Refusal, past_step
from memstore.core.cluster.text import dropped_text, listed, listed_names, plural, why_dropped
from memstore.core.durable.paths import place_of
from memstore.core.wire.calls import Get, ReadRanges, ReadStep
from memstore.core.wire.ids import WireShard, WireSpec
from memstore.core.wire.orders import ChunkRange, ReadChunks, ReadShard, Run
from memstore.core.wire.replies import ChunksStaged, RestoreReport, ShardStaged
from memstore.core.wire.reports import ReadEnded
from recovery.inventory import ShardId, StepId
from recovery.lineage import in_lineage
from recovery.planner import RecoveryPlan, plan

TERM_SHIFT, TERMS = 32, 1 << 29  # a term's numbers stay below 2**61


def first_number(term: int) -> int:
    """Return where a term begins to number its orders.

    So a late report to a former controller is not mistaken for one of ours.
    """
    return term % TERMS << TERM_SHIFT


@dataclass(frozen=True, slots=True)
class Wanted:
    """One rank's shard that is to be read, or some of its chunks."""

    step: int | None  # None: the newest
    of_attempt: int | None
    rank: int
    chunks: tuple[ChunkRange, ...] | None = None  # None: all of them
    reader: str = ""  # the nonce of the reading process
    is_repair: bool = False
    report: RestoreReport | None = None  # of the get() that asks once more


def job_of(state: ClusterState, out: Effects, call: Call[Any]) -> Job | None:
    """Return the job that a call names; None, and the call is refused, if the store does not hold it."""
    request = call.request
    name = request.source if isinstance(request, Get) else request.job
    job = state.jobs.get(name)
    if job is None:
        out.refuse(call, *unknown_job(state, name))
    return job


def unknown_job(state: ClusterState, name: str) -> Refusal:
    """Return the refusal for a job that the store does not hold."""
    have = listed_names(state.jobs) or "none"
    gone = f" any more ({why_dropped(state.rules.abandoned_arena_ttl_s)})" if name in state.forgotten else ""
    return "RecoveryError", f"the store holds no job {name!r}{gone}: it has {have}"


def newest_attempt(out: Effects, call: Call[Any], job: Job | None) -> Attempt | None:
    """Return the newest attempt of a job; None, and the call is refused, if no attempt of it is known."""
    if job is not None and job.newest is None:
        why = f"hosts hold copies of job {job.name!r}, but its history is not known: connect to it first"
        out.refuse(call, "RecoveryError", why)
    return job.newest if job is not None else None


class SingleReads:
    """Reads of all jobs that are under way."""

    def __init__(self, state: ClusterState, out: Effects, term: int) -> None:
        self.state, self.out = state, out
        self._count = first_number(term)

    def ask(self, call: Call[ReadStep] | Call[ReadRanges]) -> None:
        """Read what a reader names."""
        asked = call.request
        if isinstance(asked, ReadStep):
            wanted = Wanted(asked.step, asked.of_attempt, asked.rank, reader=asked.reader)
        else:
            wanted = Wanted(asked.step, asked.of_attempt, asked.rank, asked.chunks, is_repair=asked.is_repair)
        self.read(call, wanted)

    def read(self, call: Call[Get] | Call[ReadStep] | Call[ReadRanges], wanted: Wanted) -> None:
        """Bring one rank's shard to the caller's host, without a barrier and without adopting anything (R27)."""
        job = job_of(self.state, self.out, call)
        attempt = newest_attempt(self.out, call, job)
        if job is None or attempt is None:
            return
        rank, spans = wanted.rank, job.spans(attempt.attempt_number)
        known = [s for s in {*job.copies, *job.commits, *job.markers} if wanted.of_attempt in (None, s.attempt)]
        found = [s for s in known if s.step == wanted.step]
        only = max(found, key=lambda s: (in_lineage(spans, s), s), default=None)
        if wanted.step is not None and only is None:
            have = sorted({s.step for s in known}, reverse=True)
            what = f"its steps are {listed(have)}" if have else "it has none"
            refusal = "RecoveryError", f"job {job.name!r} has no step {wanted.step}: {what}"
            self.out.refuse(call, *(past_step(job, wanted.step) or refusal))
            return
        result = self._plan_at(call.host_id, job, attempt, only, attempt.world_size)
        if result.step is not None and result.world_size not in (None, attempt.world_size):
            result = self._plan_at(call.host_id, job, attempt, result.step, result.world_size)
        if result.step is None or rank not in result.specs:
            why = result.why
            if result.step is not None:
                count = plural(len(result.specs), "rank")
                why = f"step {result.step.step} has no rank {rank}: it was put by {count}, numbered from 0"
            self.out.refuse(call, "RecoveryError", f"job {job.name!r}: {why}")
            return
        self._count += 1
        shard = ShardId(job.name, result.step.attempt, result.step.step, rank)
        holders = [h for h in job.copies.get(result.step, {}).get(rank, {}) if self.state.hosts.is_live(h)]
        bring: dict[str, Any] = {
            "job": job.name,
            "read": self._count,
            "rank": rank,
            "shard": WireShard.of(shard),
            "spec": WireSpec.of(result.specs[rank]),
            "attempt": attempt.attempt_number,
            "holders": tuple(sorted(holders)),
            "durable": place_of(attempt.config, job.markers.get(result.step)),
            "runs": tuple(
                Run(t.tier, t.source, t.first_chunk, t.chunks_count) for t in result.transfers if t.rank == rank
            ),
        }
        if wanted.chunks is not None:
            self.out.send(call.host_id, ReadChunks(**bring, chunks=wanted.chunks, is_repair=wanted.is_repair))
        else:
            self.out.send(call.host_id, ReadShard(**bring, reader=wanted.reader))
        self.state.reads[self._count] = Read(call, shard, result.verdict, result.why, wanted.report)

    def _plan_at(self, host: str, job: Job, attempt: Attempt, only: StepId | None, world_size: int) -> RecoveryPlan:
        """Return the plan to bring all ranks' shards to one host; none for another world size (R27)."""
        return plan(
            job.inventory(live=self.state.hosts.live_ids(), silent=()), job.spans_to_read(attempt.attempt_number, only),
            world_size=world_size, rank_hosts=dict.fromkeys(range(world_size), host), only_step=only,
        )  # fmt: skip

    def ended(self, report: ReadEnded) -> None:
        """A shard that is read is at its reader's host, or could not be brought there."""
        read = self.state.reads.get(report.read)
        if read is None or report.shard.id != read.shard:
            return
        del self.state.reads[report.read]
        if report.problem is None:
            self.out.answer(read.call, _reply(read, report))
        elif self._was_dropped(read.shard):
            self.out.refuse(read.call, "StepDropped", dropped_text(read.shard.job, read.shard.step))
        else:
            self.out.refuse(read.call, "RecoveryError", f"step {read.shard.step}: {report.problem}")

    def _was_dropped(self, shard: ShardId) -> bool:
        """Say whether retention dropped the step for a newer one: its chunks are gone then, not damaged (R19)."""
        job, step = self.state.jobs.get(shard.job), StepId(shard.attempt, shard.step)
        return job is not None and not job.copies.get(step) and any(s > step and s in job.copies for s in job.commits)

    def host_died(self, host: str) -> None:
        """Forget reads of ranks on a host that died: they ask again."""
        self.state.reads = {n: read for n, read in self.state.reads.items() if read.call.host_id != host}


def _reply(read: Read, report: ReadEnded) -> ShardStaged | ChunksStaged:
    """Return the answer for the reader's holder: under which name it has the read."""
    step, attempt, verdict, why = read.shard.step, read.shard.attempt, read.verdict, read.why
    if report.is_partial:
        return ChunksStaged(step=step, attempt=attempt, verdict=verdict, why=why, read=report.read)
    return ShardStaged(
        step=step, attempt=attempt, verdict=verdict, why=why, shard=report.shard, digest=report.digest,
        report=read.report,
    )  # fmt: skip
