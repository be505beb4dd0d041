"""Bring the decided step to every rank's host, verify, check and hand it out; adopt it once loaded. Pure (R23-R26).

Works on one round and returns its outcome; `rounds.py` owns the rounds and acts on that.

staging --every rank's shard verified--> checking (into=) --all agree--> loading: ranks are sent their bytes
   '--a source lacks chunks--> planned again            .--every rank has loaded--'   '--one could not--> failed
       under a new number (`rounds.py`)                 '--> releasing --fact replicated--> answered
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memstore.core.capacity.reservations import Reservations
from memstore.core.cluster.effects import Effects
from memstore.core.cluster.facts import JobBranched, RestoreReleased, StepCommitted
from memstore.core.cluster.job import Attempt, Call
from memstore.core.cluster.reading import Round
from memstore.core.cluster.state import ClusterState
from memstore.core.durable.paths import place_of
from memstore.core.journal.replication import Journal
from memstore.core.repair.repair import Repair
from memstore.core.wire.calls import ShardLoaded
from memstore.core.wire.ids import WireShard, WireSpec
from memstore.core.wire.orders import OrderCheck, Run, StageShard
from memstore.core.wire.replies import Noted, PhaseSeconds, RestoreReport, ShardStaged, StepAgreed
from memstore.core.wire.reports import IntoChecked, StageEnded
from memstore.core.wire.status_rows import BytesByTier, RejectedStep
from recovery.inventory import Copy, ShardId, StepId
from recovery.planner import RecoveryPlan

ADOPTED = "adopted by a restore"  # a whole step without a commit fact that a restore chose
FETCH_S = 30.0  # longest that repair leaves the network to ranks that fetch what was released
CHECK_AGAIN_S = 2.0  # an order given to a rank whose link is down is lost


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

    def __init__(self, state: ClusterState, out: Effects, journal: Journal, room: Reservations, repair: Repair) -> None:
        self.state, self.out, self.journal, self.room, self.repair = state, out, journal, room, repair

    # -- staging ------------------------------------------------------------------------------

    def start(self, now: float, active: Round) -> Outcome:
        """Order every host to bring its ranks' shards together and verify them."""
        job, (result, step) = self.state.jobs[active.source], _planned(active)
        needed = {str(t.source) for t in result.transfers if t.tier == "peer"}
        needed |= set(active.staging_hosts.values()) if active.is_agreement else set()  # perhaps where no rank sits
        if not all(self.state.hosts.is_live(host) for host in needed):
            return PlanAgain()
        active.enter(now, "staging")
        active.staged.clear()
        active.checked.clear()
        runs: dict[int, list[Run]] = {}
        for t in result.transfers:
            runs.setdefault(t.rank, []).append(Run(t.tier, t.source, t.first_chunk, t.chunks_count))
        durable = place_of(storage_config(self.state, active), job.markers.get(step))
        for rank, staging_host in sorted(active.staging_hosts.items()):
            shard = ShardId(job.name, step.attempt, step.step, rank)
            holders = [h for h in job.copies.get(step, {}).get(rank, {}) if self.state.hosts.is_live(h)]
            order = StageShard(
                job=active.job, round=active.number, rank=rank, shard=WireShard.of(shard),
                spec=WireSpec.of(result.specs[rank]), runs=tuple(runs.get(rank, ())), durable=durable,
                holders=tuple(sorted(holders)), attempt=active.attempt,
            )  # fmt: skip
            self.out.send(staging_host, order)
        return None

    def staged(self, now: float, active: Round, report: StageEnded) -> Outcome:
        """Take a host's report that it staged one rank's shard, or which chunks their sources lack (R25)."""
        if active.phase != "staging" or active.plan is None:
            return None
        if report.problem is not None:
            return self._staging_failed(active, report, report.problem)
        active.staged[report.rank] = report
        if len(active.staged) < len(active.staging_hosts):
            return None
        if active.is_agreement and not active.then_loads:
            return self._adopt(now, active)
        if active.is_agreement:
            return self._hand_out(now, active)
        active.enter(now, "checking")
        self._order_checks(now, active)
        return None

    def _staging_failed(self, active: Round, report: StageEnded, problem: str) -> Outcome:
        """Plan again without the chunks that their sources say they lack; anything else fails the get, never the step.

        A broken connection, a deadline or a lack of room says nothing about the bytes (R25).
        """
        job, result = self.state.jobs[active.source], active.plan
        if result is None or result.step is None:
            return None
        step, rank, bad = result.step, report.rank, report.bad
        if not bad:
            return Failed(
                "RecoveryError",
                f"step {step.step} (attempt {step.attempt}) could not be brought to rank {rank} on host "
                f"{active.staging_hosts[rank]}: {problem}. Nothing is known to be lost and no older step was "
                "taken: call get() again once the cause is gone",
            )  # fmt: skip
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

    def tick(self, now: float, active: Round) -> None:
        """Send a rank whose link was down its check order again: it may be repeated."""
        if now >= active.check_again_s:
            self._order_checks(now, active)

    def _order_checks(self, now: float, active: Round) -> None:
        active.check_again_s = now + CHECK_AGAIN_S
        for rank, call in active.calls.items():
            if rank not in active.checked:
                self.out.send(call.host_id, OrderCheck(job=active.job, round=active.number, rank=rank))

    def checked(self, now: float, active: Round, report: IntoChecked) -> Outcome:
        """Take a rank's report that it compared `into=` with the manifest (R26)."""
        if active.phase != "checking":
            return None
        if report.error is not None:
            return Failed(report.error.error, f"rank {report.rank}: {report.error.message}")
        active.checked.add(report.rank)
        return self._hand_out(now, active) if len(active.checked) == len(active.calls) else None

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
                job.name, step.attempt, step.step, len(ranks), digests, hosts, attempt.level_asked, True,
                ADOPTED, self.state.wall_s,
            )  # fmt: skip
            self.journal.record(fact)
        self.journal.record(RestoreReleased(job.name, attempt.attempt_number))
        return None

    def _hand_out(self, now: float, active: Round) -> Outcome:
        """Send every rank its shard and the slots of its bytes; no get() returns before all ranks have loaded."""
        self._answer(now, active)
        active.enter(now, "loading")
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
            "restore", job=active.job, attempt=active.attempt, step=step.step, verdict=report.verdict,
            of_attempt=step.attempt, of_job=active.source, ranks=len(active.calls), adopted=active.is_adopting,
            bytes=report.bytes, steps_lost=report.steps_lost, seconds=report.seconds, why=report.why,
            not_used=[f"step {row.step} (attempt {row.attempt}): {row.reason}" for row in report.rejected],
            notes=report.notes,
        )  # fmt: skip

    def _report(self, now: float, active: Round) -> RestoreReport:
        job, (result, step) = self.state.jobs[active.job], _planned(active)
        attempt = job.attempts[active.attempt]
        before = job.attempts.get(attempt.parent) if attempt.parent is not None else None
        trained_step = before.trained_step if before is not None else -1  # no copy may be left of it
        trained_step = max((trained_step, *(s.step for s in (*job.copies, *job.commits))))
        return RestoreReport(
            round=active.number, verdict=result.verdict, why=result.why, ranks_moved=tuple(result.ranks_moved),
            moved_bytes=result.moved_bytes,
            bytes=BytesByTier(local=result.bytes_local, peer=result.bytes_peer, durable=result.bytes_durable),
            rejected=tuple(RejectedStep(r.step.attempt, r.step.step, r.reason) for r in result.rejected[:10]),
            steps_lost=max(0, trained_step - step.step) if active.from_job is None else 0,
            seconds=PhaseSeconds(gather=active.planned_s - active.since_s, transfer=now - active.planned_s),
            notes=tuple(active.notes[:10]),
        )  # fmt: skip

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
            staged = active.staged[rank]
            reply = ShardStaged(
                step=step.step, attempt=step.attempt, verdict=report.verdict, why=report.why, shard=staged.shard,
                digest=staged.digest, report=report,
            )  # fmt: skip
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
