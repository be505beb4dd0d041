"""The answer to `memstore status`. Pure; read `problems.py` for the problems derived from it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from memstore.core.attempts.join import Attempts, launches
from memstore.core.capacity import Reservations
from memstore.core.cluster.job import Attempt, AttemptMember, Job
from memstore.core.cluster.state import ClusterState
from memstore.core.commits import PASSED_OFTEN
from memstore.core.durable.departures import Departures
from memstore.core.durable.states import DurableStates
from memstore.core.repair import RepairPushes
from memstore.core.report.goodput import Accounts
from memstore.core.report.problems import problems
from memstore.core.report.redundancy import RedundancyMonitor, held_for, own_first, survival, survival_rows
from memstore.core.report.timeline import fewest_copies, steps_of
from memstore.core.targets.drain import Drains
from memstore.core.targets.targets import ClusterView
from memstore.core.wire.replies import Status
from memstore.core.wire.status_rows import (
    AttemptStatus,
    HostRow,
    JobRow,
    OddsRow,
    RankGroup,
    RankPlace,
    ShortRow,
    SurvivalRow,
    TrainingStatus,
)
from placement.groups import Placement
from placement.topology import is_finer
from recovery.inventory import ShardId, StepId

# -- training -----------------------------------------------------------------------------------------
# Says whether a job trains, by what its ranks put, on the controller's monotonic clock. Pure (D283).


RANKS_SHOWN_MAX = 8


def training_status(state: ClusterState, job: Job, attempt: Attempt) -> TrainingStatus | None:
    """Return whether the newest attempt of a job trains; None if it has ended well."""
    if attempt.has_ended_well:
        return None
    now, members = state.now, attempt.members.values()
    ended = [member for member in members if member.is_gone and not member.has_closed]
    unseen = [m for m in members if not m.is_gone and not (m.is_alive and state.hosts.is_live(m.host_id))]
    apart = {id(member) for member in (*ended, *unseen)}
    newest_put = max((member.sealed_step for member in members), default=-1)
    behind = [m for m in members if m.sealed_step < newest_put and id(m) not in apart]
    late = [m for m in behind if (attempt.pace.passed_s(m.sealed_step, now) or 0.0) > attempt.pace.lags_after_s()]
    quiet_s, quiet_limit_s = _quiet_s(attempt, now), attempt.progress.late_after_s()
    uncommitted_s, limit_s = _uncommitted_s(job, attempt, now), attempt.pace.late_after_s()
    is_restoring = job.name in state.rounds  # that has a deadline of its own
    stopped = [now - (member.ended_s or state.started_s) for member in ended]
    stopped += [now - attempt.closed_s] if attempt.phase == "closed" else []
    stopped += [_since_put_s(member, now) or 0.0 for member in late]
    stopped += [quiet_s] if quiet_s > quiet_limit_s and not is_restoring else []
    stopped += [uncommitted_s] if uncommitted_s is not None and uncommitted_s > limit_s else []
    alive = [member for member in members if member.is_alive]
    return TrainingStatus(
        ended=_group(ended, now),
        unseen=_group(unseen, now),
        late=_group(late, now),
        example=_place(alive[0], now) if alive else None,
        quiet_s=0.0 if is_restoring else quiet_s,
        quiet_limit_s=quiet_limit_s,
        interval_s=attempt.progress.interval_s(),
        uncommitted_s=uncommitted_s,
        uncommitted_limit_s=limit_s,
        puts_differ=attempt.passed_count >= PASSED_OFTEN,
        stopped_s=max(stopped, default=0.0),
    )


def _quiet_s(attempt: Attempt, now: float) -> float:
    """Return since when no rank is at a newer step; a launch and a restore count as one."""
    last = attempt.progress.last
    moments = [member.last_active_s for member in attempt.members.values() if member.last_active_s > -math.inf]
    return now - max([*moments, *([last[1]] if last is not None else [])], default=now)


def _uncommitted_s(job: Job, attempt: Attempt, now: float) -> float | None:
    """Return for how long puts have waited for a commit, counted from the newest one or from the first of them."""
    waits_s = attempt.pace.passed_s(job.newest_commit(attempt.attempt_number), now)
    if waits_s is None or attempt.committed_s is None:
        return waits_s
    return now - attempt.committed_s


def _since_put_s(member: AttemptMember, now: float) -> float | None:
    at_s = member.ended_s if member.is_gone else member.put_s
    return now - at_s if at_s is not None else None


def _place(member: AttemptMember, now: float) -> RankPlace:
    return RankPlace(
        rank=member.rank,
        host=member.host_id,
        pid=member.pid,
        step=max(member.sealed_step, member.step),
        since_s=_since_put_s(member, now),
        has_closed=member.has_closed,
    )


def _group(members: Iterable[AttemptMember], now: float) -> RankGroup:
    ordered = sorted(members, key=lambda member: member.rank)
    return RankGroup(count=len(ordered), first=[_place(member, now) for member in ordered[:RANKS_SHOWN_MAX]])


# -- status -------------------------------------------------------------------------------------------


RANKS_NAMED_MAX = 64  # looked at for one status; how many there are is counted beside it


@dataclass(frozen=True, slots=True)
class Shards:
    """What the copies of a job's newest committed step show, all ranks looked at, and as of when."""

    when: tuple[Any, ...]  # all that it follows from
    copies: int
    short: dict[int, int]
    survives: list[SurvivalRow]
    odds: list[OddsRow]
    holds: dict[str, list[str]]
    parity: dict[str, list[str]]


class StatusReport:
    """Plain values about hosts, jobs and steps, for people, for --json and every two seconds for metrics.

    All shards are looked at again only if copies or hosts have changed: with 16,384 ranks that takes 0.2 s, and the
    controller receives nothing meanwhile.
    """

    def __init__(
        self,
        state: ClusterState,
        term: int,
        view: ClusterView,
        drains: Drains,
        room: Reservations,
        pushes: RepairPushes,
        states: DurableStates,
        departures: Departures,
        attempts: Attempts,
        watch: RedundancyMonitor,
        accounts: Accounts,
    ) -> None:
        self.state, self.term, self.view, self.drains, self.room, self.pushes = state, term, view, drains, room, pushes
        self.states, self.departures, self.attempts, self.watch = states, departures, attempts, watch
        self.accounts = accounts
        self._shards: dict[str, Shards] = {}

    def answer(self) -> Status:
        """Return the answer to `memstore status`."""
        now, state = self.state.now, self.state
        self._shards = {name: shards for name, shards in self._shards.items() if name in state.jobs}
        (holds, parity), pushes = self._holds(), self._repairs()
        hosts = [
            self._host(host, holds.get(host, []), parity.get(host, []), pushes[host])
            for host in sorted(state.hosts.states)
        ]
        waiting = launches(state, self.attempts)
        jobs = [self._job(job) for _, job in sorted(state.jobs.items())]
        return Status(
            term=self.term,
            serving_s=now - state.started_s,
            hosts=hosts,
            job_defaults=dict(state.rules.job_defaults),
            gcs_storage=state.rules.gcs_storage,
            failure_domains=list(state.rules.failure_domains),
            launches=waiting,
            jobs=jobs,
            problems=problems(hosts, waiting, jobs),
        )

    def _host(self, host: str, holds: list[str], parity: list[str], pushes: int) -> HostRow:
        now, state, remains = self.state.now, self.state.hosts.states[host], self.departures.remains(host)
        info = state.info
        return HostRow(
            host=host, labels=dict(info.labels), address=", ".join(map(str, info.endpoints)), status=state.status,
            why=state.why, status_s=now - state.since_s, silent_s=now - state.last_beat_s, stats=state.stats,
            machine=info.machine, is_explicit=info.is_explicit, holds=holds, keeps_parity_of=parity,
            drains_s=self.drains.due_s(host), drain_left=remains.shards_count, drain_may_come=remains.may_come,
            drain_short=remains.short, drain_durable=remains.durable,
            is_on_probation=self.state.hosts.is_on_probation(now, host), up_s=now - state.began_s, pushes=pushes,
        )  # fmt: skip

    def _repairs(self) -> Counter[str]:
        """Return by host the copies of committed steps that it sends; those of an open step are its rank's put."""
        commits = {name: job.commits for name, job in self.state.jobs.items()}
        under_way = self.pushes.under_way.items()
        return Counter(
            source
            for (shard, _), (source, _) in under_way
            if StepId(shard.attempt, shard.step) in commits.get(shard.job, ())
        )

    def _holds(self) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        """Return by host the hosts whose ranks' newest committed shards lie there, over all jobs; itself first.

        And those whose ranks' shards are in parity there.
        """
        tables: list[dict[str, set[str]]] = [{}, {}]
        for job in self.state.jobs.values():
            newest, attempt = job.newest_committed, job.newest
            if newest is not None and attempt is not None:
                looked = self._looked(job, attempt, newest)
                for table, held in zip(tables, (looked.holds, looked.parity), strict=True):
                    for host, owners in held.items():
                        table.setdefault(host, set()).update(owners)
        holds, parity = ({host: own_first(host, owners) for host, owners in table.items()} for table in tables)
        return holds, parity

    def _looked(self, job: Job, attempt: Attempt, step: StepId | None) -> Shards:
        if step is None:
            return Shards((), 0, {}, [], [], {}, {})
        rank_hosts = {rank: member.host_id for rank, member in attempt.members.items()}
        when = (
            job.commits[step],
            job.changes.get(step),
            step in job.copies,
            self.state.hosts.changes_count,
            attempt.replicas,
            rank_hosts,
        )
        known = self._shards.get(job.name)
        if known is None or known.when != when:
            known = self._shards[job.name] = Shards(
                when,
                fewest_copies(self.state, job, step),
                self.watch.short_shards(job),
                self._survives(job, attempt, step),
                survival_rows(job, self.state.hosts.live_ids(), attempt.replicas + 1),
                held_for(rank_hosts, job.copies.get(step, {}), self.state.hosts.states),
                held_for(rank_hosts, job.in_parity(step), self.state.hosts.states),
            )
        return known

    def _survives(self, job: Job, attempt: Attempt, step: StepId) -> list[SurvivalRow]:
        """Return how many failure domains of each level may be lost while every shard of the step keeps a copy."""
        commit, ranks = job.commits[step], job.copies.get(step, {})
        shards = [
            [c for c in ranks.get(rank, {}).values() if c.spec.digest == commit.digests[rank]]
            for rank in range(commit.world_size)
        ]
        sets = job.parity_sets(step)
        parity = {rank: (job.parity_copies(step, rank), job.parity_members(step, rank)) for rank in sets}
        return survival(shards, self.view.topology(attempt, self.state.hosts.live_ids()), parity)

    def _job(self, job: Job) -> JobRow:
        known = steps_of(self.state, self.states, job)
        return JobRow(
            job=job.name,
            attempt=known.attempt,
            steps=known.steps,
            gone=known.gone,
            attempts=known.attempts,
            pins=known.pins,
            origin=known.origin,
            newest=self._attempt(job, job.newest, job.newest_committed) if job.newest is not None else None,
            goodput=self.accounts.row(job),
        )

    def _ago_s(self, at_s: float | None) -> float | None:
        return self.state.now - at_s if at_s is not None else None

    def _attempt(self, job: Job, attempt: Attempt, newest: StepId | None) -> AttemptStatus:
        placement, tier, looked = self.view.placement(job), self.states.of(job.name), self._looked(job, attempt, newest)
        return AttemptStatus(
            phase=attempt.phase,
            ended_by=attempt.ended_by,
            closed_s=self.state.now - attempt.closed_s if attempt.has_ended_well else None,
            training=training_status(self.state, job, attempt),
            generation=attempt.generation,
            replaced=list(attempt.recovery.replaced) if attempt.recovery is not None else [],
            recovery_s=dict(attempt.recovery.seconds) if attempt.recovery is not None else {},
            world_size=attempt.world_size,
            ranks_alive=sum(s.is_alive and self.state.hosts.is_live(s.host_id) for s in attempt.members.values()),
            shards=max(attempt.shard_of, default=-1) + 1,
            writers=list(attempt.writers),
            replicas_differ=self.view.shared_shards.differing_rows(job, attempt),
            nonfinite=[attempt.nonfinite[rank] for rank in sorted(attempt.nonfinite)],
            rank_hosts={str(rank): member.host_id for rank, member in attempt.members.items()},
            training_step=attempt.trained_step,
            committed_step=newest.step if newest is not None else None,
            committed_attempt=newest.attempt if newest is not None else None,
            committed_s=self.state.age_s(job.commits[newest].wall_s) if newest is not None else None,
            degraded=job.commits[newest].reason if newest is not None and job.commits[newest].is_degraded else "",
            retired=job.retired.get(newest, "") if newest is not None else "",
            is_torn=newest in job.torn,
            copies=looked.copies,
            missing_copies=sum(looked.short.values()),
            short_shards=len(looked.short),
            short=self.short_rows(job, looked.short),
            short_s=self.watch.short_for_s(job.name),
            replicas=attempt.replicas,
            parity=attempt.parity,
            set_sizes=_set_sizes(job, attempt, newest),
            keep_steps=int(attempt.config["keep_steps"]),
            in_flight=attempt.in_flight,
            in_flight_lack=attempt.in_flight_lack,
            survives=looked.survives,
            odds=looked.odds,
            refusals=self._refusals(job)[:5],
            parent=attempt.parent,
            parent_step=attempt.parent_step,
            level=placement.level if placement is not None else None,
            level_asked=attempt.level_asked,
            is_level_finer=self._is_level_finer(attempt, placement),
            targets=placement.merged() if placement is not None else {},
            warnings=list(placement.warnings) if placement is not None else [],
            unmet=_unmet_rows(placement) if placement is not None else [],
            durable=attempt.config.get("durable"),
            durable_step=job.newest_durable.step if job.newest_durable is not None else None,
            durable_seen_s=self._ago_s(tier.seen_s.get(job.newest_durable) if job.newest_durable else None),
            durable_unseen=tier.unread or tier.lacks,
            durable_problem=tier.problem,
            durable_abandoned=tier.abandoned_count,
            durable_s=self._ago_s(tier.last_done_s),
            resume_step=attempt.resume_step,
            is_restoring=job.name in self.state.rounds,
            skipped=sum(phase == "abandoned" for phase in attempt.steps.values()),
            skipped_s=self._skipped_s(job, attempt),
            skip_why=attempt.skip_why,
            is_skip_for_room=attempt.is_skip_for_room,
        )

    def _is_level_finer(self, attempt: Attempt, placement: Placement | None) -> bool:
        return placement is not None and is_finer(
            placement.level, attempt.level_asked, self.state.hosts.failure_domains
        )

    def _skipped_s(self, job: Job, attempt: Attempt) -> float | None:
        """Return since when a step was given up, if none that is newer is committed, or it was just now."""
        newest = max((number for number, phase in attempt.steps.items() if phase == "abandoned"), default=None)
        if newest is None:
            return None
        skipped_s = self.state.now - attempt.skipped_s if attempt.skipped_s is not None else None
        is_recent = skipped_s is not None and skipped_s < attempt.pace.late_after_s()
        is_last = newest > job.newest_commit(attempt.attempt_number)
        return skipped_s if is_recent or is_last else None

    def _refusals(self, job: Job) -> list[str]:
        """Return rows "host: why" of the hosts that take no copy, with the reason of a host without room (R10)."""
        unroomed = {host: row.why for (name, host), row in self.room.unroomed.items() if name == job.name}
        found = {host: why for (_, host), why in job.refusals.items()}
        return sorted(f"{host}: {why}" for host, why in {**found, **unroomed}.items())

    # -- copies that are missing (R18, R29) --------------------------------------------------------

    def short_rows(self, job: Job, short: Mapping[int, int]) -> list[ShortRow]:
        """Return which ranks lack copies and why; ranks in the same state share a row.

        Args:
            job: Has a newest committed step.
            short: The ranks that lack copies of it; the first RANKS_NAMED_MAX are named.

        Returns:
            `hosts` have a whole copy, `targets` are to get one; `why_not` says what repair waits for, or what keeps it
            from a host.
        """
        step, attempt = job.newest_committed, job.newest
        if step is None or attempt is None:
            return []
        waits = self._short_waits(job, attempt, step) if short else ""
        found: dict[tuple[tuple[str, ...], tuple[str, ...], str], list[int]] = {}
        for rank in sorted(short)[:RANKS_NAMED_MAX]:
            shard = ShardId(job.name, step.attempt, step.step, rank)
            found.setdefault(self._short_state(job, attempt, shard, waits), []).append(rank)
        return [
            ShortRow(
                attempt=step.attempt,
                step=step.step,
                ranks=ranks,
                hosts=list(hosts),
                targets=list(targets),
                why_not=why_not,
            )
            for (hosts, targets, why_not), ranks in found.items()
        ]

    def _short_waits(self, job: Job, attempt: Attempt, step: StepId) -> str:
        """Return why repair of the whole step has not begun, or ""."""
        if step in job.retired:
            return "the step is retired"
        active, state = self.state.rounds.get(job.name), self.state
        if active is not None and active.is_due:
            return "after the restore that is under way"
        if attempt.is_moving(state.now):
            return "with the next put: ranks have moved, and parity moves with them"
        late_s = state.rules.dead_after_s
        late = state.hosts.dead_since(state.now - late_s) & {member.host_id for member in attempt.members.values()}
        return f"{', '.join(sorted(late)[:3])} died within {late_s:g} s and may be back with its copies" if late else ""

    def _short_state(
        self, job: Job, attempt: Attempt, shard: ShardId, waits: str
    ) -> tuple[tuple[str, ...], tuple[str, ...], str]:
        """Return the hosts with a whole copy of a shard, those that are to get one, and what keeps them from it.

        With parity those are named on which parity that it is in is to be added up again.
        """
        step = StepId(shard.attempt, shard.step)
        copies = job.copies.get(step, {}).get(shard.rank, {})
        hosts = tuple(sorted(host for host, copy in copies.items() if not copy.missing))
        if not copies:
            return hosts, (), "no copy is left in RAM to rebuild it from"
        wanted = self.view.wanted(job, attempt, shard.rank, step)
        lacking = {host: shard for host in wanted if host not in hosts}
        for rank, keeping in job.parity_hosts(step, shard.rank).items():
            if not keeping:
                lacking[self.view.owner_host(job, attempt, rank)] = shard._replace(rank=rank, is_parity=True)
        if not lacking:
            return hosts, (), "; ".join(["no other host may hold it", *([waits] if waits else [])])
        reasons = {host: self._why_not_copied(job, each, host) for host, each in lacking.items()}
        targets = tuple(host for host in lacking if not reasons[host])
        kept_from = [f"{host}: {why}" for host, why in reasons.items() if why]
        return hosts, targets, "; ".join([*kept_from, *([waits] if waits else [])])

    def _why_not_copied(self, job: Job, shard: ShardId, host: str) -> str:
        """Return why repair cannot copy a shard to a host, or add parity up there, or ""."""
        step = StepId(shard.attempt, shard.step)
        ranks = job.parity_sets(step).get(shard.rank) if shard.is_parity else None
        for rank in ranks.others(shard.rank) if ranks is not None else ():
            copies = job.copies.get(step, {}).get(rank, {})
            if {h for h, copy in copies.items() if not copy.missing} == {host}:
                return f"it alone has the shard of rank {rank}, which is in the same parity"
        unroomed = self.room.unroomed.get((job.name, host))
        refusal = unroomed.why if unroomed is not None else job.refusals.get((shard, host), "")
        if refusal:
            return refusal
        hosts, state = self.state.hosts, self.state.hosts.states.get(host)
        if state is None or state.status != "live":
            return f"{state.status}, {state.why}" if state is not None else "it is not here"
        is_passed_over = hosts.is_on_probation(self.state.now, host) and shard not in self.pushes.vain_s
        return "it died 3 times within 10 minutes, another host is sought" if is_passed_over else ""


def _set_sizes(job: Job, attempt: Attempt, step: StepId | None) -> list[int]:
    sets = job.parity_sets(step) if step is not None else {}
    return sorted({len(sets[rank].ranks) if rank in sets else 0 for rank in attempt.members}) if sets else []


def _unmet_rows(placement: Placement) -> list[str]:
    return [f"{u.owner} -> {u.target}: {u.why}" for each in placement.placements for u in each.unmet]
