"""Bring the decided step to every rank's host, verify, check and hand it out; adopt it once loaded. Pure (R23-R26).

Works on one round and returns its outcome; `rounds.py` owns the rounds and acts on that.

staging --every shard verified and compared with into=, decision replicated--> loading: ranks are sent their bytes
   '--a source lacks chunks--> planned again            .--every rank has loaded--'   '--one could not--> failed
       under a new number (`rounds.py`)                 '--> releasing --fact replicated--> answered
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from memstore.core.capacity.reservations import Reservations
from memstore.core.cluster.effects import Effects
from memstore.core.cluster.facts import JobBranched, RestoreDecided, RestoreReleased, StepCommitted
from memstore.core.cluster.job import Attempt, Call
from memstore.core.cluster.reading import Round
from memstore.core.cluster.state import ClusterState
from memstore.core.durable.paths import place_of
from memstore.core.journal.replication import Journal
from memstore.core.repair.repair import Repair
from memstore.core.restore.single_read import SingleReads
from memstore.core.wire.calls import ShardLoaded
from memstore.core.wire.orders import Run
from memstore.core.wire.replies import Noted, PhaseSeconds, RestoreReport, ShardReady, StepAgreed
from memstore.core.wire.reports import Brought
from memstore.core.wire.status_rows import BytesByTier, RejectedStep
from recovery.inventory import Copy, ShardId, StepId
from recovery.planner import RecoveryPlan

ADOPTED = "adopted by a restore"  # a whole step without a commit fact that a restore chose
FETCH_S = 30.0  # longest that repair leaves the network to ranks that fetch what was released


@dataclass(frozen=True, slots=True)
class PlanAgain:
    """The step is to be planned again, from other sources, or another step."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The get ends with this error on all ranks."""

    error: str
    message: str


@dataclass(frozen=True, slots=True)
class Released:
    """The get is over: every rank has loaded the step, and may be answered."""


Outcome = PlanAgain | Failed | Released | None


class Staging:
    """Rounds that have decided."""

    def __init__(
        self,
        state: ClusterState,
        out: Effects,
        journal: Journal,
        room: Reservations,
        repair: Repair,
        reads: SingleReads,
    ) -> None:
        self.state, self.out, self.journal = state, out, journal
        self.room, self.repair, self.reads = room, repair, reads

    # -- staging ------------------------------------------------------------------------------

    def start(self, now: float, active: Round) -> Outcome:
        """Order every host to bring its ranks' shards together and verify them."""
        job, (result, step) = self.state.jobs[active.source], _planned(active)
        needed = {str(t.source) for t in result.transfers if t.tier == "peer"}
        needed |= set(active.staging_hosts.values()) if active.is_agreement else set()  # perhaps where no rank sits
        if not all(self.state.hosts.is_live(host) for host in needed):
            return PlanAgain()
        active.enter(now, "staging")
        active.reads.clear()
        active.staged.clear()
        active.is_decided = not active.is_adopting
        runs: dict[int, list[Run]] = {}
        for t in result.transfers:
            runs.setdefault(t.rank, []).append(Run(t.tier, t.source, t.first_chunk, t.chunks_count))
        members = {} if active.is_agreement else self.state.jobs[active.job].attempts[active.attempt].members
        readers = {rank: member.nonce for rank, member in members.items()}
        durable = place_of(storage_config(self.state, active), job.markers.get(step))
        for rank, staging_host in sorted(active.staging_hosts.items()):
            number = self.reads.bring(
                staging_host,
                ShardId(job.name, step.attempt, step.step, rank),
                result.specs[rank],
                runs.get(rank, ()),
                use="get",
                job=active.job,
                attempt=active.attempt,
                durable=durable,
                reader=readers.get(rank, ""),
            )
            active.reads[number] = rank
        if active.is_adopting:  # the fact spreads while the bytes come
            decided = RestoreDecided(
                active.job, active.attempt, active.number, step.attempt, step.step, self.state.wall_s
            )
            self.journal.record(decided)
        return None

    def staged(self, now: float, active: Round, report: Brought) -> Outcome:
        """Take a host's report that it staged one rank's shard, or which chunks their sources lack (R25)."""
        if active.phase != "staging":
            return None
        rank = active.reads[report.read]
        if report.refusal is not None:
            return Failed(report.refusal[0], f"rank {rank}: {report.refusal[1]}")
        if report.problem is not None:
            return self._staging_failed(active, rank, report.problem, report.bad)
        active.staged[rank] = report.read
        return self.go_on(now, active)

    def go_on(self, now: float, active: Round) -> Outcome:
        """Send every rank its shard and the slots of its bytes, once all are here and the decision is a fact.

        No get() returns before all ranks have loaded. Ranks that agree on the step alone have nothing to load.
        """
        if active.phase != "staging" or not active.is_decided or len(active.staged) < len(active.staging_hosts):
            return None
        if active.is_agreement and not active.then_loads:
            return self._adopt(now, active)
        self._answer(now, active)
        active.enter(now, "loading")
        return None

    def _staging_failed(self, active: Round, rank: int, problem: str, bad: Mapping[str, Collection[int]]) -> Outcome:
        """Plan again without the chunks that their sources say they lack; anything else fails the get, never the step.

        A broken connection, a deadline or a lack of room says nothing about the bytes (R25).
        """
        job, (_, step) = self.state.jobs[active.source], _planned(active)
        if not bad:
            return Failed(
                "RecoveryError",
                f"step {step.step} (attempt {step.attempt}) could not be brought to rank {rank} on host "
                f"{active.staging_hosts[rank]}: {problem}. Nothing is known to be lost and no older step was "
                "taken: call get() again once the cause is gone",
            )
        for source, chunks in bad.items():
            copy = job.copies.get(step, {}).get(rank, {}).get(source)
            if copy is None:
                continue
            missing = copy.missing | frozenset(chunks)
            if len(missing) >= copy.spec.chunks_count:
                job.drop_copy(copy.shard, source)
            else:
                job.add_copy(Copy(copy.shard, copy.spec, copy.host, missing))
        active.notes.append(f"rank {rank}: {problem}")
        if set(bad) == {"durable"}:  # the plan uses it only for chunks without another source
            active.failed_steps[step] = problem
        return PlanAgain()

    def loaded(self, now: float, active: Round, call: Call[ShardLoaded]) -> Outcome:
        """Take a rank's word that it has loaded what it was sent, or why not; its call waits for all others."""
        request = call.request
        active.loads[request.rank] = call
        if request.problem is not None:
            why = f"get() failed on rank {request.rank} while its state was loaded, so no rank goes on from this step"
            return Failed("RecoveryError", f"job {active.job!r}: {why}: {request.problem}")
        is_complete = len(active.loads) == len(active.calls) and active.phase == "loading"
        return self._adopt(now, active) if is_complete else None

    def _adopt(self, now: float, active: Round) -> Outcome:
        """Adopt the step that every rank has loaded as this attempt's own (R22)."""
        job, (result, step) = self.state.jobs[active.job], _planned(active)
        active.enter(now, "releasing")
        attempt = job.attempts[active.attempt]
        if active.from_job is not None and attempt.parent_step is None and not attempt.has_put:
            self.journal.record(JobBranched(job.name, attempt.attempt_number, active.from_job, step.attempt, step.step))
            return None
        if not active.is_adopting:
            return Released()
        if step not in job.commits:
            ranks = range(len(result.specs))
            digests = tuple(result.digests[r] for r in ranks)
            hosts = tuple(tuple(sorted(job.copies.get(step, {}).get(r, {}))) for r in ranks)
            fact = StepCommitted(
                job.name,
                step.attempt,
                step.step,
                len(ranks),
                digests,
                hosts,
                attempt.level_asked,
                True,
                ADOPTED,
                self.state.wall_s,
            )
            self.journal.record(fact)
        self.journal.record(RestoreReleased(job.name, attempt.attempt_number))
        return None

    def release(self, now: float, active: Round) -> None:
        """Let every rank's get() return."""
        job, attempt = self.state.jobs[active.job], self.state.jobs[active.job].attempts[active.attempt]
        if active.is_loading:
            active.loads.answer_all(self.out, Noted())
        else:
            self._answer(now, active)
        for member in attempt.members.values():
            member.last_active_s = now
        if active.report is not None:
            self._note(now, active, attempt, active.report)
        if active.is_adopting and not active.is_agreement:
            self.room.grow(job, attempt)
        self.repair.consider(now, self.state.jobs[active.source])

    def _note(self, now: float, active: Round, attempt: Attempt, report: RestoreReport) -> None:
        """Note a restored step: every rank has it (R23)."""
        step = _planned(active)[1]
        if attempt.recovery is not None and active.is_adopting:
            attempt.recovery.end_phase("rebuild", active.planned_s)
            attempt.recovery.end_phase("get", now)
        self.out.note(
            "restore",
            job=active.job,
            attempt=active.attempt,
            step=step.step,
            verdict=report.verdict,
            of_attempt=step.attempt,
            of_job=active.source,
            ranks=len(active.calls),
            adopted=active.is_adopting,
            bytes=report.bytes,
            steps_lost=report.steps_lost,
            seconds=report.seconds,
            why=report.why,
            not_used=[f"step {row.step} (attempt {row.attempt}): {row.reason}" for row in report.rejected],
            notes=report.notes,
        )

    def _report(self, now: float, active: Round) -> RestoreReport:
        job, (result, step) = self.state.jobs[active.job], _planned(active)
        attempt = job.attempts[active.attempt]
        before = job.attempts.get(attempt.parent) if attempt.parent is not None else None
        trained_step = before.trained_step if before is not None else -1  # no copy may be left of it
        trained_step = max((trained_step, *(s.step for s in (*job.copies, *job.commits))))
        return RestoreReport(
            round=active.number,
            verdict=result.verdict,
            why=result.why,
            ranks_moved=tuple(result.ranks_moved),
            moved_bytes=result.moved_bytes,
            bytes=BytesByTier(local=result.bytes_local, peer=result.bytes_peer, durable=result.bytes_durable),
            rejected=tuple(RejectedStep(r.step.attempt, r.step.step, r.reason) for r in result.rejected[:10]),
            steps_lost=max(0, trained_step - step.step) if active.from_job is None else 0,
            seconds=PhaseSeconds(gather=active.planned_s - active.since_s, transfer=now - active.planned_s),
            notes=tuple(active.notes[:10]),
        )

    def _answer(self, now: float, active: Round) -> None:
        """Send every rank the step, and its shard with the slots of its bytes unless all agreed on the step alone."""
        result, step = _planned(active)
        attempt = self.state.jobs[active.job].attempts[active.attempt]
        for member in attempt.members.values():
            member.last_active_s = now
        if result.bytes_peer:
            attempt.fetch_until_s = now + FETCH_S
        report = active.report = self._report(now, active)
        for rank, call in active.calls.items():
            if active.is_agreement:
                self.out.answer(call, StepAgreed(step=step.step, attempt=step.attempt, report=report))
                continue
            reply = ShardReady(
                step=step.step,
                attempt=step.attempt,
                verdict=report.verdict,
                why=report.why,
                report=report,
                read=active.staged[rank],
            )
            self.out.answer(call, reply)


def storage_config(state: ClusterState, active: Round) -> Mapping[str, Any]:
    """Return the settings of the durable storage that has the step: its job's, or of one unknown here the reader's."""
    source = state.jobs.get(active.source)
    if active.from_job is not None and source is not None and source.newest is not None:
        return source.newest.config
    return state.jobs[active.job].attempts[active.attempt].config


def _planned(active: Round) -> tuple[RecoveryPlan, StepId]:
    """Return the plan of a round that has decided, and its step."""
    if active.plan is None or active.plan.step is None:
        raise ValueError(f"round {active.number} of job {active.job!r} is {active.phase} without a plan")
    return active.plan, active.plan.step
