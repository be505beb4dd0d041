"""A get is one numbered round for all ranks alike. Pure (R23, R24, R25, R26, R27).

gathering --all ranks--> listing (durable markers) --> planning --> staging, while the decision becomes a fact
    |                                                    |  ^           |    '--a source failed: next plan
    '--deadline--> failed                         wait for hosts (grace)|
                                                                        v
       releasing <--every rank has loaded-- loading <--every shard verified and compared with into=, fact replicated
                                               '--a rank could not load, or died--> failed: adopts nothing
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from memstore.core.capacity import Reservations
from memstore.core.cluster.collective import attempt_of, job_removed, missing_ranks
from memstore.core.cluster.effects import Effects
from memstore.core.cluster.facts import JobBranched, RestoreDecided, RestoreReleased, StepRetired
from memstore.core.cluster.job import Attempt, Call, Job, Restore
from memstore.core.cluster.reading import Round
from memstore.core.cluster.state import ClusterState
from memstore.core.cluster.step_lookup import Refusal, past_step, same_number
from memstore.core.cluster.text import HOSTS_MAX, WHY_DROPPED, listed, named_hosts, plural, who_is_missing
from memstore.core.durable.markers import DurableMarkers
from memstore.core.durable.paths import place_of, storage_of
from memstore.core.journal.replication import Journal
from memstore.core.repair import Repair
from memstore.core.restore.followers import Followers, Wish
from memstore.core.restore.single_read import SingleReads, run_of, unknown_job
from memstore.core.targets.targets import ClusterView
from memstore.core.wire.calls import Get, ReadStep, ShardLoaded, Withdraw
from memstore.core.wire.orders import OWN_PARITY, Run
from memstore.core.wire.replies import (
    GetAgain,
    Noted,
    NothingStored,
    PhaseSeconds,
    RestoreReport,
    ShardReady,
    StepAgreed,
)
from memstore.core.wire.reports import Brought
from memstore.core.wire.status_rows import BytesByTier, RejectedStep
from recovery.inventory import Copy, Inventory, ShardId, StepId
from recovery.lineage import in_lineage
from recovery.parity import set_of
from recovery.planner import RecoveryPlan, plan

ADOPTED = "adopted by a restore"  # a whole step without a commit fact that a restore chose
MOVE_S = 30.0  # longest that parity which is to move with its ranks waits for their first put
MARKERS_DEADLINE_S = 15.0  # a durable store that does not list its markers by then is left out, with a note


class Rounds:
    """The rounds of all jobs; they stand in `ClusterState.rounds`."""

    def __init__(
        self,
        state: ClusterState,
        out: Effects,
        journal: Journal,
        view: ClusterView,
        room: Reservations,
        repair: Repair,
        markers: DurableMarkers,
        reads: SingleReads,
        followers: Followers,
    ) -> None:
        self.state, self.out, self.journal, self.view = state, out, journal, view
        self.room, self.repair, self.markers, self.reads, self.followers = room, repair, markers, reads, followers
        state.holds.add("a restore", self._held, is_in_use=True)
        state.holds.add("a restore that was decided", self._decided, is_in_use=False)
        state.holds.add("the attempt that restored it", self._restored, is_in_use=False)

    def _held(self, job: Job) -> set[StepId]:
        active = self.state.rounds.get(job.name)
        if active is None or active.plan is None or active.plan.step is None or active.from_job is not None:
            return set()  # a step of another job is leased: its own puts do not wait for it (R36)
        return {active.plan.step}

    def _decided(self, job: Job) -> set[StepId]:
        facts = [p for p in self.journal.log.unapplied() if isinstance(p, RestoreDecided) and p.job == job.name]
        return {StepId(p.from_attempt, p.step) for p in facts if p.from_attempt and p.step is not None}

    def _restored(self, job: Job) -> set[StepId]:
        attempt = job.newest
        step = _parent(attempt) if attempt is not None and attempt.has_restored and not attempt.has_put else None
        return {step} if step is not None else set()

    # -- gathering ----------------------------------------------------------------------------

    def get(self, now: float, call: Call[Get]) -> None:
        """Handle a rank's get(); the round ends for all ranks at once."""
        request, found = call.request, attempt_of(self.state, self.out, call)
        if found is None:
            return
        job, attempt = found
        name = job.name
        only_step, rank, is_agreement = request.step, request.rank, request.is_agreement
        member = attempt.members.get(rank)
        has_lost_answer = attempt.is_released and member is not None and member.step < 0  # it has not trained since
        if request.is_adopting and has_lost_answer and name not in self.state.rounds:
            self._hand_out_again(call, _parent(attempt))  # without a barrier: the others may be training already
            return
        if request.is_adopting and attempt.has_put:
            self.out.refuse(
                call,
                "RecoveryError",
                f"job {name!r}: get() after this attempt's first put would go back in time: use store.rewind(step) to "
                "continue from an older step, or get(step=S) to read one",
            )
            return
        active = self.state.rounds.get(name)
        if active is None or active.attempt != attempt.attempt_number:
            attempt.rounds_count += 1
            active = self.state.rounds[name] = Round(
                name, attempt.attempt_number, attempt.rounds_count, only_step, request.from_job, now
            )
        if not active.calls:
            active.is_agreement, active.then_loads = is_agreement, request.then_loads
            active.is_trusted = request.is_trusted
        mine = _asked(only_step, request.from_job, is_agreement, request.is_trusted)
        theirs = _asked(active.only_step, active.from_job, active.is_agreement, active.is_trusted)
        if mine != theirs:
            why = f"this rank calls {mine}, the ranks waiting {theirs}: all ranks must call the same"
            self.out.refuse(call, "RecoveryError", f"job {name!r}: {why}")
            return
        active.calls[rank] = call
        active.withdrawn.discard(rank)
        if active.report is None:
            self.attempt_open(now, name)
        elif active.plan is not None and active.plan.step is not None:
            self._hand_out_again(call, active.plan.step, active.report)  # the others may have loaded it by now

    def attempt_open(self, now: float, name: str) -> None:
        """Plan as soon as all ranks ask and every holder is fenced: from those inventories only (R21)."""
        active = self.state.rounds.get(name)
        job = self.state.jobs[name]
        attempt = job.newest
        if active is None or attempt is None or active.attempt != attempt.attempt_number or attempt.phase == "fencing":
            return
        if active.phase == "gathering" and len(active.calls) == attempt.world_size:
            is_empty = attempt.is_fresh and active.is_adopting  # steps of earlier runs are not its past (R23)
            self._restore_nothing(now, active) if is_empty else self._list_markers(now, active, job, attempt)

    def _hand_out_again(self, call: Call[Get], step: StepId | None, report: RestoreReport | None = None) -> None:
        """Send a rank whose answer was lost what the others were sent (R23)."""
        request = call.request
        if step is None:
            job = self.state.jobs[request.job]
            self.out.answer(call, NothingStored(lost=job.put_in_vain(job.attempts[request.attempt])))
        elif request.is_agreement:
            self.out.answer(call, StepAgreed(step=step.step, attempt=step.attempt, report=report))
        else:
            asked = ReadStep(job=request.source, step=step.step, of_attempt=step.attempt, rank=request.rank)
            self.reads.read(call, asked, report)

    def _list_markers(self, now: float, active: Round, job: Job, attempt: Attempt) -> None:
        hosts = [h for h in self.state.hosts.live_ids() if self.state.hosts.is_answering(h)]
        config = self._storage_config(active)
        if config.get("durable") is None or not hosts:
            self._plan(now, active)
            return
        active.enter(now, "listing")
        active.unread, first = "", attempt.members[0].host_id

        host = first if first in hosts else hosts[0]
        active.markers_call = self.markers.ask(host, active.source, storage_of(config))

    def listed(self, now: float, call: int, why: str) -> None:
        """Plan with the markers that a host has listed; `why` storage could not be read, or ""."""
        for active in list(self.state.rounds.values()):
            if active.phase == "listing" and active.markers_call == call:
                active.unread = why
                self._plan(now, active)

    # -- planning -----------------------------------------------------------------------------

    def _plan(self, now: float, active: Round, *, is_grace_over: bool = False) -> None:
        attempt = self.state.jobs[active.job].attempts[active.attempt]
        job = self.state.jobs.get(active.source) or Job(active.source)  # a late host may know it
        inventory = job.inventory(
            live=self.state.hosts.live_ids(), silent=() if is_grace_over else self.view.silent_hosts(job)
        )
        known, number = {*job.commits, *job.markers}, job.present_number
        if active.from_job is None:
            known, number = known | job.copies.keys(), attempt.attempt_number
        else:  # what another job has not committed, it may still give up
            copies = tuple(c for c in inventory.copies if StepId(c.shard.attempt, c.shard.step) in known)
            inventory = replace(inventory, copies=copies)
        only = None
        if active.only_step is not None and active.source in self.state.jobs:
            spans, found = job.spans(number), [s for s in known if s.step == active.only_step]
            only = max(found, key=lambda s: (in_lineage(spans, s), s), default=None)
            if only is None:
                self.fail(active, *_no_step(active, active.only_step, job, known))
                return
        result = plan(
            inventory,
            job.spans_to_read(number, only),
            world_size=attempt.world_size,
            rank_hosts={rank: member.host_id for rank, member in attempt.members.items()},
            only_step=only,
            not_steps=tuple(active.failed_steps),
            among=job.trusted_steps if active.is_trusted else None,
        )
        if active.is_agreement and result.step is not None:
            result = self._plan_in_place(active, job, attempt, inventory, result)
        else:
            active.staging_hosts = {rank: call.host_id for rank, call in active.calls.items()}
        late = frozenset() if is_grace_over else self.view.awaited_hosts(job, result)
        active.plan, active.planned_s = replace(result, wait_for=late), now
        if late:
            if active.phase != "waiting":
                names = ", ".join(sorted(late))
                self.out.log(f"job {job.name!r}: get waits for hosts {names}: they may have a newer step")
                active.enter(now, "waiting")
        elif result.step is not None:
            self._decide(now, active, job, attempt, result.step)
        elif (refusal := self._why_none(active, job, result)) is not None:
            self.fail(active, *refusal)
        else:
            self._restore_nothing(now, active)

    def _plan_in_place(
        self, active: Round, job: Job, attempt: Attempt, inventory: Inventory, result: RecoveryPlan
    ) -> RecoveryPlan:
        """Stage for no rank: verify each shard where a copy lies, or bring it to a rank's host if none is whole."""
        step, asking_hosts = result.step, sorted({call.host_id for call in active.calls.values()})
        copies = job.copies.get(step, {}) if step is not None else {}
        active.staging_hosts = {}
        for rank, spec in sorted(result.specs.items()):
            held = [c.host for c in copies.get(rank, {}).values() if c.spec.digest == spec.digest and not c.missing]
            live = sorted(h for h in held if self.state.hosts.is_answering(h))
            active.staging_hosts[rank] = live[0] if live else asking_hosts[rank % len(asking_hosts)]
        return plan(
            inventory,
            job.spans_to_read(attempt.attempt_number, step),
            world_size=len(result.specs),
            rank_hosts=active.staging_hosts,
            only_step=step,
        )

    def plan_again(self, now: float, active: Round) -> None:
        """Plan the next candidate, or the same one from other sources, under a new number (R23)."""
        attempt = self.state.jobs[active.job].attempts[active.attempt]
        attempt.rounds_count += 1
        active.number = attempt.rounds_count
        self._let_go(active)
        self._plan(now, active)

    def _why_none(self, active: Round, job: Job, result: RecoveryPlan) -> Refusal | None:
        """Return the refusal where no step is whole; None for a job that never committed anything (R19).

        The planner calls every copy history; such a job starts again from nothing.
        """
        if active.from_job is not None:
            if job.name not in self.state.jobs:
                return unknown_job(self.state, job.name)
            is_gone = not any(step.step == active.only_step for step in (*job.copies, *job.markers))
            if is_gone and (past := past_step(job, active.only_step)):
                return past
        if self.state.is_dropped(job):
            return (
                "RecoveryError",
                f"the steps of job {job.name!r} were dropped from RAM: {WHY_DROPPED}.\n"
                f"Start over with connect(..., fresh=True), or forget it with `memstore rm {job.name}`",
            )
        if not (job.has_history or active.failed_steps or active.unread or active.from_job is not None):
            return None
        lines = [f"step {r.step.step} (attempt {r.step.attempt}): {r.reason}" for r in result.rejected[:10]]
        lines += [f"step {s.step} (attempt {s.attempt}): {why}" for s, why in active.failed_steps.items()]
        lines += [f"durable storage could not be read: {active.unread}"] if active.unread else []
        named = {host for rejected in result.rejected for host in rejected.hosts}
        is_all_here = bool(named) and named.issubset(self.state.hosts.live_ids())
        ways = ["" if is_all_here else "bring the named hosts back and call get() again", _way_back(job)]
        ways.append("" if active.from_job is not None else "start over with connect(..., fresh=True)")
        kind, lines = "", lines or [result.why]
        if active.is_trusted:
            kind, lines = "trusted ", lines if result.rejected else [*lines, _who_is_trusted(job)]
            ways[-1] = "go on without trusted=True"
        way = ", or ".join(filter(None, ways))
        return (
            "RecoveryError",
            f"job {job.name!r} has history but no whole {kind}step, neither in RAM nor on durable storage:\n  "
            + "\n  ".join(lines)
            + ("\nThe named hosts are here, and what they have of it is damaged" if is_all_here else "")
            + f"\n{way[:1].upper()}{way[1:]}",
        )

    def _restore_nothing(self, now: float, active: Round) -> None:
        active.enter(now, "deciding")
        self.journal.record(RestoreDecided(active.job, active.attempt, active.number, None, None, self.state.wall_s))

    def _decide(self, now: float, active: Round, job: Job, attempt: Attempt, step: StepId) -> None:
        """Restore the planned step, unless it fits no rank here, or the training seems to die of it (R25)."""
        if (refusal := _other_size(active, job, attempt)) is not None:
            is_end = active.from_job is not None or not _share(attempt, job.attempts.get(step.attempt))
            self.fail(active, "WorldSizeError", refusal, is_end=is_end)
            return
        if active.is_adopting and (why := same_number(attempt, step)):
            self.fail(active, "RecoveryError", why)
            return
        if active.is_adopting and self._is_crash_looping(job, step):
            rules = self.state.rules
            reason = (
                f"restored {rules.max_restores} times within {rules.crash_window_s:g} s and no newer step was "
                "committed since: the training dies of it"
            )
            if self._has_another(active, job, attempt, step):
                fact = StepRetired(job.name, step.attempt, step.step, reason)
                self.journal.record(fact)
                job.retire(fact)  # at once, for this round's next plan; the fact is for those to come
                self._plan(now, active)
                return
            active.notes.append(f"step {step.step} was {reason}; no other step is whole, so it is restored again")
            self.out.log(f"job {job.name!r}: {active.notes[-1]}", "warning")
        if active.from_job is not None:
            active.enter(now, "deciding")
            self._lease(active, step)
        else:
            self._stage(now, active)

    def _lease(self, active: Round, step: StepId) -> None:
        """Keep another job's step while it is read, in room of its own; without any it is read all the same."""
        number = active.number

        def is_current() -> bool:
            known = self.state.rounds.get(active.job) is active
            return known and active.number == number and active.phase == "deciding"

        def answer(_: StepId, why_not: str) -> None:
            if not is_current():
                self.followers.let_go(active.source, active.lease)
                return
            active.notes += [f"step {step.step} was not kept for this read: {why_not}"] if why_not else []
            self._stage(self.state.now, active)

        def refuse(error: str, why: str) -> None:
            if is_current():
                self.fail(active, error, why)

        limit_s = 2 * max(call.request.timeout_s for call in active.calls.values())  # staging, then loading
        host = next(iter(active.calls.values())).host_id
        self.followers.keep(Wish(active.source, step.step, step.attempt, active.lease, host, limit_s, answer, refuse))

    def _has_another(self, active: Round, job: Job, attempt: Attempt, step: StepId) -> bool:
        """Return whether a get has another step than this one; the only one is better than none (R25)."""
        other = plan(
            job.inventory(live=self.state.hosts.live_ids(), silent=self.view.silent_hosts(job)),
            job.spans(attempt.attempt_number),
            world_size=attempt.world_size,
            rank_hosts={rank: member.host_id for rank, member in attempt.members.items()},
            not_steps=(*active.failed_steps, step),
            among=job.trusted_steps if active.is_trusted else None,
        )
        return other.step is not None and (active.is_agreement or other.world_size == attempt.world_size)

    def _is_crash_looping(self, job: Job, step: StepId) -> bool:
        rules = self.state.rules
        wall_s = self.state.wall_s
        recent = [
            r
            for r in job.restores
            if r.step == step
            and abs(wall_s - r.wall_s) <= rules.crash_window_s  # clocks may have been set back
            and not self._is_no_verdict(job.attempts.get(r.attempt))
        ]
        return len(recent) >= rules.max_restores

    @staticmethod
    def _is_no_verdict(attempt: Attempt | None) -> bool:
        """Return whether the end of an attempt says nothing of the step that it restored (R25).

        It ended well, or some rank never loaded the step, or it began in place: what replaces ranks has a limit.
        """
        is_good_end = attempt is not None and attempt.phase == "closed" and not attempt.ended_by
        return is_good_end or (attempt is not None and (attempt.is_in_place or not attempt.is_released))

    def apply_decided(self, now: float, fact: RestoreDecided, *, is_replay: bool) -> None:
        """Bind the lineage to the replicated decision; hand out what is staged by then (R22, R23)."""
        job = self.state.jobs.get(fact.job)
        attempt = job.attempts.get(fact.attempt) if job is not None else None
        if job is None or attempt is None:
            return
        attempt.parent, attempt.parent_step = fact.from_attempt, fact.step
        # A later decision of the same get takes the place of one that could not be staged.
        job.restores = [r for r in job.restores if r.attempt != fact.attempt]
        if fact.step is not None and fact.from_attempt is not None and fact.round > 0:
            job.restores.append(Restore(StepId(fact.from_attempt, fact.step), fact.attempt, fact.wall_s))
        attempt.has_restored, attempt.is_released = True, fact.step is None
        attempt.rounds_count = max(attempt.rounds_count, fact.round)
        active = self.state.rounds.get(fact.job)
        if is_replay or active is None or active.attempt != fact.attempt or active.number != fact.round:
            return
        if fact.step is None:
            del self.state.rounds[fact.job]
            active.calls.answer_all(self.out, NothingStored(lost=job.put_in_vain(attempt)))
        else:
            active.is_decided = True
            self._go_on(now, active)

    # -- staging ------------------------------------------------------------------------------

    def _stage(self, now: float, active: Round) -> None:
        """Order every host to bring its ranks' shards together and verify them."""
        job, (result, step) = self.state.jobs[active.source], _planned(active)
        needed = {str(t.source) for t in result.transfers if t.tier in ("peer", "parity")}
        needed |= set(active.staging_hosts.values()) if active.is_agreement else set()  # perhaps where no rank sits
        if not all(self.state.hosts.is_live(host) for host in needed):
            self.plan_again(now, active)
            return
        active.enter(now, "staging")
        active.reads.clear()
        active.staged.clear()
        active.is_decided = not active.is_adopting
        if active.is_adopting:
            brought = {t.target_host for t in result.transfers if t.tier in ("parity", "durable")}
            self.room.retention.free_unfinished(job, job.attempts[active.attempt], brought)
        runs: dict[int, list[Run]] = {}
        for t in result.transfers:
            runs.setdefault(t.rank, []).append(run_of(t))
        members = {} if active.is_agreement else self.state.jobs[active.job].attempts[active.attempt].members
        readers = {rank: member.nonce for rank, member in members.items()}
        config, marker = self._storage_config(active), job.markers.get(step)
        for rank, staging_host in sorted(active.staging_hosts.items()):
            number = self.reads.bring(
                staging_host,
                ShardId(job.name, step.attempt, step.step, rank),
                result.specs[rank],
                runs.get(rank, ()),
                use="get",
                job=active.job,
                attempt=active.attempt,
                durable=place_of(config, marker, rank),
                reader=readers.get(rank, ""),
            )
            active.reads[number] = rank
        if active.is_adopting:  # the fact spreads while the bytes come
            decided = RestoreDecided(
                active.job, active.attempt, active.number, step.attempt, step.step, self.state.wall_s
            )
            self.journal.record(decided)

    def staged(self, now: float, report: Brought) -> None:
        """Take a host's report that it staged one rank's shard, or which chunks their sources lack (R25)."""
        active = next((each for each in self.state.rounds.values() if report.read in each.reads), None)
        if active is None or active.phase != "staging":
            return
        rank = active.reads[report.read]
        if report.refusal is not None:
            self.fail(active, report.refusal[0], f"rank {rank}: {report.refusal[1]}")
        elif report.problem is not None:
            self._staging_failed(now, active, report, report.problem)
        else:
            active.staged[rank] = report.read
            self._go_on(now, active)

    def _staging_failed(self, now: float, active: Round, report: Brought, problem: str) -> None:
        """Plan again without the chunks that their sources say they lack; anything else fails the get, never the step.

        A broken connection, a deadline or a lack of room says nothing about the bytes (R25).
        """
        job, (_, step), rank = self.state.jobs[active.source], _planned(active), active.reads[report.read]
        if not report.bad:
            self.fail(
                active,
                "RecoveryError",
                f"step {step.step} (attempt {step.attempt}) could not be brought to rank {rank} on host "
                f"{active.staging_hosts[rank]}: {problem}. Nothing is known to be lost and no older step was "
                "taken: call get() again once the cause is gone",
            )
            return
        for source, chunks in report.bad.items():
            copy = job.copies.get(step, {}).get(rank, {}).get(source)
            if copy is None:
                self._lose_rows(job, step, rank, active.staging_hosts[rank] if source == OWN_PARITY else source, chunks)
                continue
            # One without a chunk is known still: its host has it, and frees it when its step goes.
            job.add_copy(Copy(copy.shard, copy.spec, copy.host, copy.missing | frozenset(chunks)))
        active.notes.append(f"rank {rank}: {problem}")
        # The plan uses it only for chunks without another source; a manifest that was lost here is asked for there too.
        is_planned = active.plan is not None and any(
            t.rank == rank and t.tier == "durable" for t in active.plan.transfers
        )
        if set(report.bad) == {"durable"} and is_planned:
            active.failed_steps[step] = problem
        self.plan_again(now, active)

    @staticmethod
    def _lose_rows(job: Job, step: StepId, rank: int, host: str, chunks: Iterable[int]) -> None:
        """Note that a host could not decode chunks from its parity."""
        for kept in list(job.parity.get(step, {}).values()):
            copy = kept.get(host)
            if copy is not None and any(each.rank == rank for each in copy.spec.summands):
                ranks = set_of(copy.shard, copy.spec)
                rows = (ranks.row_of(copy.shard.rank, rank, chunk) for chunk in chunks)
                missing = copy.missing.union(row for row in rows if row is not None)
                job.add_copy(Copy(copy.shard, copy.spec, host, missing))

    def _go_on(self, now: float, active: Round) -> None:
        """Send every rank its shard and the slots of its bytes, once all are here and the decision is a fact.

        No get() returns before all ranks have loaded. Ranks that agree on the step alone have nothing to load.
        """
        if active.phase != "staging" or not active.is_decided or len(active.staged) < len(active.staging_hosts):
            return
        if active.is_agreement and not active.then_loads:
            self._adopt(now, active)
        else:
            self._answer(now, active)
            active.enter(now, "loading")

    def _answer(self, now: float, active: Round) -> RestoreReport:
        """Send every rank the step, and its shard with the slots of its bytes unless all agreed on the step alone."""
        step = _planned(active)[1]
        attempt = self.state.jobs[active.job].attempts[active.attempt]
        for member in attempt.members.values():
            member.last_active_s = now
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
        return report

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

    # -- loading ------------------------------------------------------------------------------

    def loaded(self, now: float, call: Call[ShardLoaded]) -> None:
        """Take a rank's word that its state has what it was sent, or why not; answered once all ranks have (R23)."""
        request, found = call.request, attempt_of(self.state, self.out, call)
        if found is None:
            return
        attempt, active, rank = found[1], self.state.rounds.get(request.job), request.rank
        if active is not None and active.number == request.round and active.report is not None:
            active.loads[rank] = call
            if request.problem is not None:
                why = f"get() failed on rank {rank} while its state was loaded, so no rank goes on from this step"
                self.fail(active, "RecoveryError", f"job {active.job!r}: {why}: {request.problem}")
            elif len(active.loads) == len(active.calls) and active.phase == "loading":
                self._adopt(now, active)
        elif attempt.failed_load is not None and attempt.failed_load[0] >= request.round:
            self.out.refuse(call, "RecoveryError", attempt.failed_load[1])
        elif attempt.is_released or not request.is_adopting:
            self.out.answer(call, Noted())
        else:
            self.out.answer(call, GetAgain())  # another controller sent the bytes, and no rank's get() has returned

    def _adopt(self, now: float, active: Round) -> None:
        """Adopt the step that every rank has loaded as this attempt's own (R22)."""
        job, (result, step) = self.state.jobs[active.job], _planned(active)
        active.enter(now, "releasing")
        attempt = job.attempts[active.attempt]
        if active.from_job is not None and attempt.parent_step is None and not attempt.has_put:
            self.journal.record(JobBranched(job.name, attempt.attempt_number, active.from_job, step.attempt, step.step))
            return
        if not active.is_adopting:
            self._release(now, active)
            return
        if step not in job.commits:
            copies = job.copies.get(step, {})
            shards = [(digest, tuple(sorted(copies.get(rank, {})))) for rank, digest in sorted(result.digests.items())]
            self.journal.record(job.commit_of(step, shards, attempt.level_asked, ADOPTED, self.state.wall_s))
        self.journal.record(RestoreReleased(job.name, attempt.attempt_number))

    def apply_released(self, now: float, fact: RestoreReleased | JobBranched, *, is_replay: bool) -> None:
        """Let ranks go on: enough journals say that every rank has loaded, so no rank can get another step (R23).

        A job that begins with another one's step has that noted with the attempt (R32).
        """
        job, active = self.state.jobs.get(fact.job), self.state.rounds.get(fact.job)
        attempt = job.attempts.get(fact.attempt) if job is not None else None
        if attempt is not None and isinstance(fact, JobBranched):
            attempt.branched = fact
        elif attempt is not None:
            attempt.is_released = True
        if not is_replay and active is not None and active.attempt == fact.attempt and active.phase == "releasing":
            self._release(now, active)

    def _release(self, now: float, active: Round) -> None:
        """Let every rank's get() return."""
        del self.state.rounds[active.job]
        job, (result, step) = self.state.jobs[active.job], _planned(active)
        attempt, report = job.attempts[active.attempt], active.report
        if attempt.parity and any(transfer.tier == "peer" for transfer in result.transfers):
            attempt.move_until_s = now + MOVE_S
        if report is not None:
            active.loads.answer_all(self.out, Noted())
        else:  # they had nothing to load
            report = self._answer(now, active)
        for member in attempt.members.values():
            member.last_active_s = now
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
        if active.is_adopting and not active.is_agreement:
            self.room.grow(job, attempt)
        self.repair.consider(now, self.state.jobs[active.source])
        self._let_go(active)

    def _let_go(self, active: Round) -> None:
        if active.from_job is not None:
            self.followers.let_go(active.from_job, active.lease)

    def _storage_config(self, active: Round) -> Mapping[str, Any]:
        """Return the settings of the durable storage of the step: its job's, or of one unknown here the reader's."""
        source = self.state.jobs.get(active.source)
        if active.from_job is not None and source is not None and source.newest is not None:
            return source.newest.config
        return self.state.jobs[active.job].attempts[active.attempt].config

    # -- ends ---------------------------------------------------------------------------------

    def fail(self, active: Round, name: str, message: str, *, is_end: bool = True) -> None:
        """End a round with the same error on all ranks; their get is not over where that is no `is_end`."""
        self.state.rounds.pop(active.job, None)
        self._let_go(active)
        if is_end:
            self.out.note(
                "restore_failed",
                job=active.job,
                attempt=active.attempt,
                error=name,
                why=message,
                phase=active.phase,
                seconds={"waited": self.state.now - active.since_s},
            )
        if active.is_loading:
            self.state.jobs[active.job].attempts[active.attempt].failed_load = (active.number, message)
        active.waiting.refuse_all(self.out, name, message)

    def forget(self, name: str) -> None:
        """End the rounds of a removed job, and those that read its steps."""
        self.abort(name, *job_removed(name))
        for active in self.state.rounds_from(name):
            self.fail(active, "RecoveryError", f"job {name!r} was removed while job {active.job!r} read a step of it")

    def rank_gone(self, job: Job, rank: int) -> None:
        """Note a rank's death: it asks no more, and what is being brought to it has no reader (R20)."""
        active = self.state.rounds.get(job.name)
        if active is None or rank not in active.calls or active.phase == "releasing":
            return
        if active.phase in ("gathering", "listing", "waiting"):
            del active.calls[rank]
            active.phase = "gathering"
            if not active.calls:
                del self.state.rounds[job.name]
            return
        self.fail(active, "RecoveryError", f"rank {rank} died during the restore: all ranks must begin again")

    def torn(self, now: float, job: Job, step: StepId) -> None:
        """Go on to the next candidate if a rank of an older attempt reports the restoring step torn (R25)."""
        for active in self.state.rounds_from(job.name):
            if active.plan is None or active.plan.step != step:
                continue
            if active.phase in ("deciding", "staging"):
                self.plan_again(now, active)
            elif active.phase == "loading":
                why = f"step {step.step} was found torn while it was loaded: call get() again"
                self.fail(active, "RecoveryError", why)

    def abort(self, job: str, name: str, message: str) -> None:
        """End a round that can no longer mean anything."""
        if job in self.state.rounds:
            self.fail(self.state.rounds[job], name, message)

    def withdraw(self, call: Call[Withdraw]) -> None:
        """Let a rank leave whose deadline passed if nothing is decided yet; else it takes the result (R23)."""
        active = self.state.rounds.get(call.request.job)
        self.out.answer(call, Noted())
        if active is None or active.phase not in ("gathering", "listing", "waiting"):
            return
        attempt = self.state.jobs[active.job].attempts[active.attempt]
        if len(active.calls) == attempt.world_size:
            active.ran_out_on = awaited_text(self.state, self.state.jobs[active.job], attempt)
        gone = active.calls.pop(call.request.rank, None)
        active.withdrawn.add(call.request.rank)
        missing = [r for r in range(attempt.world_size) if r not in active.calls and r not in active.withdrawn]
        if gone is not None:
            why = f"after {call.request.timeout_s:g} s {ran_out_text(missing, attempt.world_size, active.ran_out_on)}"
            self.out.refuse(gone, "GatherTimeout", f"get() of job {active.job!r}: {why}")
        if not active.calls:
            del self.state.rounds[active.job]
        elif active.phase != "gathering":
            active.phase = "gathering"

    def tick(self, now: float) -> None:
        """Check deadlines of listings and of late hosts, and hosts lost while staging."""
        for active in list(self.state.rounds.values()):
            waited_s = now - active.phase_since_s
            if active.phase == "listing" and waited_s > MARKERS_DEADLINE_S:
                active.notes.append(f"durable storage did not list its markers within {MARKERS_DEADLINE_S:g} s")
                self._plan(now, active)
            elif active.phase == "waiting":
                self._plan(now, active, is_grace_over=waited_s > self.state.rules.recovery_grace_s)
            elif active.phase in ("staging", "loading"):
                dead = [c.host_id for c in active.calls.values() if not self.state.hosts.is_live(c.host_id)]
                limit_s = max(c.request.timeout_s for c in active.calls.values())
                if dead:
                    why = f"host {dead[0]} died while the step was being restored: restart"
                    self.fail(active, "RecoveryError", why)
                elif waited_s > limit_s:
                    done = active.staged if active.phase == "staging" else active.loads
                    ranks = active.staging_hosts if active.phase == "staging" else active.calls
                    late = listed([r for r in sorted(ranks) if r not in done])
                    why = f"{active.phase} took more than {limit_s:g} s on ranks {late}: raise timeout_s of get()"
                    self.fail(active, "RecoveryError", why)

    def source_died(self, now: float, host_id: str) -> None:
        """Plan rounds again that fetch from a host whose holder is gone, or that it stages for.

        Their ranks are to fetch from it once they are sent their bytes; and what it staged is gone, if it comes back.
        """
        for active in list(self.state.rounds.values()):
            if active.phase != "staging" or active.plan is None:
                continue
            is_source = any(t.source == host_id and t.tier in ("peer", "parity") for t in active.plan.transfers)
            if is_source or host_id in active.staging_hosts.values():
                self.plan_again(now, active)


def _parent(attempt: Attempt) -> StepId | None:
    """Return the step that an attempt goes on from."""
    return StepId(attempt.parent, attempt.parent_step) if attempt.parent and attempt.parent_step is not None else None


def _planned(active: Round) -> tuple[RecoveryPlan, StepId]:
    """Return the plan of a round that has decided, and its step."""
    if active.plan is None or active.plan.step is None:
        raise ValueError(f"round {active.number} of job {active.job!r} is {active.phase} without a plan")
    return active.plan, active.plan.step


def _asked(step: int | None, from_job: str | None, is_agreement: bool, is_trusted: bool) -> str:
    """Return a call in words: "get() for step 5 of job 'base'"."""
    of = f" of job {from_job!r}" if from_job is not None else ""
    verb = "agree_on_step" if is_agreement else "get"
    return f"{verb}({'trusted=True' if is_trusted else ''}) for step {step}{of}"


def _no_step(active: Round, number: int, job: Job, known: Collection[StepId]) -> Refusal:
    """Return the refusal of a get that names a step which is not there."""
    past = past_step(job, number) if active.from_job is not None else None  # it may have been dropped since
    have = sorted({s.step for s in known})
    what = f"its steps are {listed(have)}" if have else "it has none"
    return past or ("RecoveryError", f"job {job.name!r} has no step {number}: {what}")


def _who_is_trusted(job: Job) -> str:
    """Say which steps are trusted, none of which a get(trusted=True) may take, and what a get() would go on from."""
    others = ", ".join(f"step {s.step} (attempt {s.attempt})" for s in sorted(job.trusted_steps, reverse=True)[:10])
    newest = job.newest_committed
    said = f"{others} is trusted and not of this lineage: rewind() goes there" if others else "no step is trusted"
    return f"{said}; the newest committed step is {newest.step if newest is not None else 'not known'}"


def _way_back(job: Job) -> str:
    """Return how a retired step that is not torn can be restored after all (R25)."""
    return f"run `memstore verify {job.name}` to lift what is retired" if job.retired.keys() - job.torn else ""


def _other_size(active: Round, job: Job, attempt: Attempt) -> str | None:
    """Return why the planned step fits no rank here; None if it was put by as many."""
    result, step = _planned(active)
    if result.world_size == attempt.world_size or active.is_agreement:
        return None
    ranks = plural(result.world_size or 0, "rank")
    what = f"job {job.name!r}: step {step.step} was put by {ranks}, this attempt has {attempt.world_size}"
    if active.from_job is not None:
        return (
            f"{what}. Start {ranks}, or load what DCP saved with memstore.reader({job.name!r}).load(state, "
            f"{step.step}); get({step.step}, rank=r, from_job={job.name!r}) reads one"
        )
    return (
        f"{what}. Start {ranks}, or dcp.load(state, storage_reader=store.dcp_reader()) what DCP saved. Ranks "
        "that hold equal state (DDP): connect(shard_rank=0, shard_count=1), any number gets it; "
        "get(step, rank=r) reads one"
    )


def _share(attempt: Attempt, other: Attempt | None) -> bool:
    """Return whether the ranks of both name the same shards, so that one can get what the other shared (R34)."""
    return other is not None and bool(attempt.shard_of) and set(attempt.shard_of) == set(other.shard_of)


# -- awaited ------------------------------------------------------------------------------------------
# Whom a get() waits for, in words (R20, R23).


def awaited_by_get(state: ClusterState, job: Job, attempt: Attempt) -> tuple[list[int], str] | None:
    """Return the ranks that have not called get() yet, and what those that have wait for; None if there is no get()."""
    active = state.rounds.get(job.name)
    if active is None or active.attempt != attempt.attempt_number:
        return None
    bringing = {host for rank, host in active.staging_hosts.items() if rank not in active.staged}
    return missing_ranks(attempt.world_size, active.calls), {
        "gathering": "its hosts to refuse ranks of older attempts",
        "listing": "durable storage to be listed",
        "waiting": f"{named_hosts(active.plan.wait_for if active.plan else ())}, which may have a newer step",
        "deciding": "hosts to write down what is restored",
        "staging": f"{named_hosts(bringing)} to have the bytes, and its ranks to compare into=",
        "loading": f"{named_ranks(attempt, missing_ranks(attempt.world_size, active.loads))} to load the bytes",
        "releasing": "hosts to write down that it is over",
    }[active.phase]


def awaited_text(state: ClusterState, job: Job, attempt: Attempt) -> str:
    """Return the reason why a get() that all ranks have called waits; "" if there is none."""
    found = awaited_by_get(state, job, attempt)
    if found is None:
        return ""
    missing, awaited = found
    return named_ranks(attempt, missing) if missing else awaited


def ran_out_text(missing: list[int], world_size: int, awaited: str) -> str:
    """Return the error of a get() after its timeout: the ranks that never asked, or the reason for the wait."""
    if missing:
        return f"{who_is_missing(missing, world_size, 'called get()')}. Every rank must call get()"
    return f"all ranks have called get(), waiting for {awaited}. Raise timeout_s of get()"


def named_ranks(attempt: Attempt, ranks: list[int]) -> str:
    """Return "ranks 2, 3 on h1, rank 5 on h2", and whose process is gone."""
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(attempt.members[rank].host_id, []).append(rank)
    parts = [f"{_some(found)} on {host}" for host, found in list(by_host.items())[:HOSTS_MAX]]
    more = len(by_host) - HOSTS_MAX
    parts += [f"those of {plural(more, 'more host')}"] if more > 0 else []
    gone = [rank for rank in ranks if not attempt.members[rank].is_alive]
    return ", ".join(parts) + (f"; the process of {_some(gone)} is gone" if gone else "")


def _some(ranks: list[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks)}"
