"""Orders to bring a shard to its reader; and reads of one, without a barrier and without adopting it. Pure (R27).

asked --planned--> the reader's host brings it, from hosts or durable storage --> answered with its place there
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from memstore.core.cluster.effects import Effects
from memstore.core.cluster.job import Attempt, Call, Job
from memstore.core.cluster.reading import Read
from memstore.core.cluster.state import ClusterState
from memstore.core.cluster.step_lookup import Refusal, past_step
from memstore.core.cluster.text import WHY_DROPPED, dropped_text, listed, listed_names, plural
from memstore.core.durable.paths import place_of
from memstore.core.wire.calls import Get, ReadStep
from memstore.core.wire.ids import WireShard, WireSpec
from memstore.core.wire.orders import Bring, ChunkRange, DurablePlace, Run
from memstore.core.wire.peer_messages import ShardHost
from memstore.core.wire.replies import RestoreReport, ShardReady
from memstore.core.wire.reports import Brought
from recovery.inventory import Copy, ShardId, ShardSpec, StepId
from recovery.lineage import in_lineage
from recovery.planner import RecoveryPlan, plan
from recovery.transfers import Transfer

Use = Literal["get", "read", "repair", "store"]
TERM_SHIFT, TERMS = 32, 1 << 29  # a term's numbers stay below 2**61


def first_number(term: int) -> int:
    """Return where a term begins to number its orders.

    So a late report to a former controller is not mistaken for one of ours.
    """
    return term % TERMS << TERM_SHIFT


def run_of(transfer: Transfer) -> Run:
    """Return a transfer as it is ordered."""
    return Run(transfer.tier, transfer.source, transfer.first_chunk, transfer.chunks_count, transfer.stride)


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
    gone = f" any more ({WHY_DROPPED})" if name in state.forgotten else ""
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

    def read(self, call: Call[Get] | Call[ReadStep], asked: ReadStep, report: RestoreReport | None = None) -> None:
        """Bring one rank's shard to the caller, without a barrier and without adopting anything (R27).

        Args:
            report: Of the get() that asks once more.
        """
        job = job_of(self.state, self.out, call)
        attempt = newest_attempt(self.out, call, job)
        if job is None or attempt is None:
            return
        rank, spans = asked.rank, job.spans(attempt.attempt_number)
        known = [s for s in {*job.copies, *job.commits, *job.markers} if asked.of_attempt in (None, s.attempt)]
        found = [s for s in known if s.step == asked.step]
        only = max(found, key=lambda s: (in_lineage(spans, s), s), default=None)
        if asked.step is not None and only is None:
            have = sorted({s.step for s in known}, reverse=True)
            what = f"its steps are {listed(have)}" if have else "it has none"
            refusal = "RecoveryError", f"job {job.name!r} has no step {asked.step}: {what}"
            self.out.refuse(call, *(past_step(job, asked.step) or refusal))
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
        shard = ShardId(job.name, result.step.attempt, result.step.step, rank)
        runs = [run_of(t) for t in result.transfers if t.rank == rank]
        use: Use = "repair" if asked.is_repair else "read"
        number = self.bring(
            call.host_id,
            shard,
            result.specs[rank],
            runs,
            use=use,
            job=job.name,
            attempt=attempt.attempt_number,
            durable=place_of(attempt.config, job.markers.get(result.step), rank),
            reader=asked.reader,
            chunks=asked.chunks,
        )
        self.state.reads[number] = Read(call, shard, result.verdict, result.why, report)

    def rebuild(self, host: str, job: Job, attempt: Attempt, shard: ShardId) -> int | None:
        """Order a host to decode and store a lost shard; return the number, None if RAM has not all that it takes."""
        step = StepId(shard.attempt, shard.step)
        result = self._plan_at(host, job, attempt, step, job.commits[step].world_size)
        runs = [run_of(t) for t in result.transfers if t.rank == shard.rank]
        if not runs or any(run.tier == "durable" for run in runs):
            return None
        number, spec = attempt.attempt_number, result.specs[shard.rank]
        return self.bring(host, shard, spec, runs, use="store", job=job.name, attempt=number, durable=None, reader="")

    def bring(
        self,
        host: str,
        shard: ShardId,
        spec: ShardSpec,
        runs: Sequence[Run],
        *,
        use: Use,
        job: str,
        attempt: int,
        durable: DurablePlace | None,
        reader: str,
        chunks: tuple[ChunkRange, ...] | None = None,
    ) -> int:
        """Order a host to have a shard in a reader's reach; return the number of the order."""
        self._count += 1
        is_decoded = any(run.tier == "parity" for run in runs)
        copies = self.state.jobs[shard.job].copies.get(StepId(shard.attempt, shard.step), {}).get(shard.rank, {})
        order = Bring(
            read=self._count,
            job=job,
            shard=WireShard.of(shard),
            spec=WireSpec.of(spec),
            chunks=chunks,
            attempt=attempt,
            holders=tuple(sorted(h for h in copies if self.state.hosts.is_live(h))),
            durable=durable,
            runs=tuple(runs),
            others=self._others(self.state.jobs[shard.job], shard) if is_decoded else (),
            reader=reader,
            use=use,
        )
        self.out.send(host, order)
        return self._count

    def _others(self, job: Job, shard: ShardId) -> tuple[ShardHost, ...]:
        """Return where the other shards of a parity set are: for each a host whose copy lacks fewest chunks.

        Of a set that survives two losses, also where each rank's parity is.
        """
        step, found = StepId(shard.attempt, shard.step), dict[tuple[int, bool], ShardHost]()

        def add(rank: int, copies: Iterable[Copy], *, is_parity: bool) -> None:
            live = [copy for copy in copies if self.state.hosts.is_live(copy.host)]
            if live:
                best = min(live, key=lambda copy: (len(copy.missing), copy.host))
                found[rank, is_parity] = ShardHost(rank, best.host, best.spec.digest if is_parity else None)

        for rank, kept in job.parity.get(step, {}).items():
            meant = [copy for copy in kept.values() if any(each.rank == shard.rank for each in copy.spec.summands)]
            for parity in meant:
                for each in parity.spec.summands:
                    copies = job.copies.get(step, {}).get(each.rank, {}).values()
                    add(each.rank, (copy for copy in copies if copy.spec.digest == each.digest), is_parity=False)
            add(rank, (parity for parity in meant if parity.spec.spare > 1), is_parity=True)
        return tuple(found[key] for key in sorted(found) if key != (shard.rank, False))

    def _plan_at(self, host: str, job: Job, attempt: Attempt, only: StepId | None, world_size: int) -> RecoveryPlan:
        """Return the plan to bring all ranks' shards to one host; none for another world size (R27)."""
        return plan(
            job.inventory(live=self.state.hosts.live_ids(), silent=()),
            job.spans_to_read(attempt.attempt_number, only),
            world_size=world_size,
            rank_hosts=dict.fromkeys(range(world_size), host),
            only_step=only,
        )

    def ended(self, report: Brought) -> bool:
        """Answer a read whose shard is in its reader's reach, or could not be brought there; False if it is none."""
        read = self.state.reads.pop(report.read, None)
        if read is None:
            return False
        shard = read.shard
        if report.problem is None:
            reply = ShardReady(
                step=shard.step,
                attempt=shard.attempt,
                verdict=read.verdict,
                why=read.why,
                report=read.report,
                read=report.read,
            )
            self.out.answer(read.call, reply)
        elif self._was_dropped(shard):
            self.out.refuse(read.call, "StepDropped", dropped_text(shard.job, shard.step))
        else:
            self.out.refuse(read.call, "RecoveryError", f"step {shard.step}: {report.problem}")
        return True

    def _was_dropped(self, shard: ShardId) -> bool:
        """Say whether retention dropped the step for a newer one: its chunks are gone then, not damaged (R19)."""
        job, step = self.state.jobs.get(shard.job), StepId(shard.attempt, shard.step)
        return job is not None and not job.copies.get(step) and any(s > step and s in job.copies for s in job.commits)

    def host_died(self, host: str) -> None:
        """Forget reads of ranks on a host that died: they ask again."""
        self.state.reads = {n: read for n, read in self.state.reads.items() if read.call.host_id != host}
