"""Turns the controller's decisions into store events: puts with their times, their outcome and its reason. Pure.

The controller calls it beside decisions, never for one. Times of a put count from its begin on the rank's host, which
the seal's report carries (R11: nothing travels for this alone).
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec

from msgspec.structs import asdict

from memstore.core.cluster import events as e
from memstore.core.cluster import facts as f
from memstore.core.cluster.effects import Effects
from memstore.core.cluster.hosts import Change
from memstore.core.cluster.job import Job
from memstore.core.cluster.state import ClusterState
from memstore.core.cluster.text import why_dropped
from memstore.core.durable.departures import Departures
from memstore.core.repair.pushes import Pushes
from memstore.core.report.event_ring import RecentEvents
from memstore.core.report.redundancy import RedundancyMonitor
from memstore.core.wire.calls import SkipStep
from memstore.core.wire.measured import seconds
from memstore.core.wire.reports import PutTimes
from memstore.core.wire.status_rows import HostStats
from recovery.inventory import Copy, StepId

PUTS_MAX = 256  # steps under way, over all jobs; more are forgotten, oldest first
SKIPS_MAX = 64
NAMED_MAX = 32  # hosts named in one event
P = ParamSpec("P")


def never_raises(
    method: Callable[Concatenate[EventRecorder, P], None],
) -> Callable[Concatenate[EventRecorder, P], None]:
    """Catch and log any exception of the wrapped recorder method: recording must never break a decision."""

    @functools.wraps(method)
    def wrapped(self: EventRecorder, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as exc:
            problem = f"{method.__name__}: {exc!r}"
            if problem != self.problem:
                self.out.log(f"an event could not be recorded; nothing else is affected: {problem}", "warning")
            self.problem = problem

    return wrapped


@dataclass(slots=True)
class Putting:
    """One step between its first seal and its last copy."""

    began_s: float
    stalls_s: dict[int, float] = field(default_factory=dict)  # by rank
    hosts: dict[int, str] = field(default_factory=dict)
    nbytes: dict[int, int] = field(default_factory=dict)
    unchanged: dict[int, int] = field(default_factory=dict)  # rank -> the step before, whose chunks it put again
    is_reported: bool = False  # every rank has put it
    is_committed: bool = False


class EventRecorder:
    """Records the events of all jobs and hosts."""

    def __init__(self, state: ClusterState, out: Effects, pushes: Pushes, departures: Departures, term: int) -> None:
        self.state, self.out, self.term = state, out, term
        self.recent_events = RecentEvents(term)
        self.watch = RedundancyMonitor(state, pushes, departures, self.add)
        self.puts: dict[tuple[str, StepId], Putting] = {}
        self.skips: dict[tuple[str, int, int], tuple[str, SkipStep]] = {}  # (job, attempt, step) -> host, rank's word
        self.problem = ""  # the last mistake in telling; tests look at it
        self.files_lost: dict[str, str] = {}  # by host: what of its folder was removed, as its last beat said
        self.scrubbed: dict[tuple[str, int], int] = {}  # (host, incarnation) -> damaged chunks already reported

    def add(self, kind: str, **fields: Any) -> None:
        """Note one thing that happened now."""
        self.recent_events.add(kind, self.state.wall_s, **fields)

    # -- puts -----------------------------------------------------------------------------------

    @never_raises
    def sealed(self, copy: Copy, host: str, put: PutTimes | None) -> None:
        """Record a copy; `put` has the measurements of the rank and its holder, if it is a rank's own."""
        self.watch.sealed(copy, host)
        job = self.state.jobs.get(copy.shard.job)
        attempt = job.newest if job is not None else None
        if put is None or job is None or attempt is None or copy.shard.attempt != attempt.attempt_number:
            return
        if copy.shard.step <= job.newest_commit(attempt.attempt_number):
            return  # reported again after a link or a controller broke
        key = (copy.shard.job, StepId(copy.shard.attempt, copy.shard.step))
        began_s = self.state.now - seconds(put.age_s)
        putting = self.puts.setdefault(key, Putting(began_s))
        putting.began_s = min(putting.began_s, began_s)
        rank = copy.shard.rank
        putting.stalls_s[rank], putting.hosts[rank] = seconds(put.stall_s), host
        putting.nbytes[rank] = copy.spec.nbytes
        before = put.unchanged_since
        if before is not None and before < copy.shard.step:
            putting.unchanged[rank] = before
        if len(putting.stalls_s) == attempt.world_size and not putting.is_reported:
            self._put(key, putting)
        while len(self.puts) > PUTS_MAX:
            del self.puts[next(iter(self.puts))]

    def _put(self, key: tuple[str, StepId], putting: Putting) -> None:
        """Record that every rank has put the step, as one event (D52)."""
        putting.is_reported = True
        job, step = key
        slowest = max(putting.stalls_s, key=lambda rank: putting.stalls_s[rank])
        self.add(
            "put", job=job, attempt=step.attempt, step=step.step, rank=slowest, host=putting.hosts[slowest],
            ranks=len(putting.stalls_s), nbytes=sum(putting.nbytes.values()),
            stall_s={
                "max": rounded(putting.stalls_s[slowest]),
                "median": rounded(statistics.median(putting.stalls_s.values())),
            },
            seconds={"sealed": rounded(self.state.now - putting.began_s)},
        )  # fmt: skip
        if putting.unchanged:
            self._unchanged(job, step, putting.unchanged)

    def _unchanged(self, job: str, step: StepId, befores: dict[int, int]) -> None:
        """Record that ranks put the bytes of the step before: once when it begins, not for every further step."""
        ranks = sorted(befores)
        why = "the optimizer did not step, or the same object was put"
        self.add(
            "unchanged", job=job, attempt=step.attempt, step=step.step, rank=ranks[0], before=befores[ranks[0]],
            ranks=ranks[:NAMED_MAX], count=len(ranks), why=why,
        )  # fmt: skip
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks, first {ranks[0]},"
        text = f"{who} put at step {step.step} the bytes of step {befores[ranks[0]]}: {why}"
        self.out.log(f"job {job!r}: {text}", "warning")

    @never_raises
    def replicas_differ(self, event: e.ReplicasDiffer) -> None:
        """Record that two ranks that should hold equal state put different bytes (R34)."""
        job, attempt, step, ranks, names, chunks = (
            event.job, event.attempt, event.step, event.ranks, event.names, event.chunks_count,
        )  # fmt: skip
        self.add(
            "replicas_differ",
            job=job.name,
            attempt=attempt.attempt_number,
            step=step,
            rank=ranks[0],
            ranks=list(ranks),
            names=list(names),
            chunks=chunks,
            shard=attempt.shard_of[ranks[0]] if attempt.shard_of else 0,
        )
        where = ", ".join(names) or f"{chunks} chunks"
        text = f"ranks {ranks[0]} and {ranks[1]} name one shard and put different bytes at step {step}: {where}"
        self.out.log(f"job {job.name!r}: {text}", "warning")

    @never_raises
    def replicas_agree(self, event: e.ReplicasAgree) -> None:
        """Record that two ranks put equal bytes again."""
        self.add(
            "replicas_agree",
            job=event.job.name,
            attempt=event.attempt.attempt_number,
            step=event.step,
            rank=event.ranks[0],
            ranks=list(event.ranks),
        )

    @never_raises
    def skipped(self, host: str, request: SkipStep) -> None:
        """Keep a rank's or holder's report of a skipped put until the fact that all skip it (R12)."""
        self.skips[request.job, request.attempt, request.step] = host, request
        while len(self.skips) > SKIPS_MAX:
            del self.skips[next(iter(self.skips))]

    # -- facts (R16) ----------------------------------------------------------------------------

    @never_raises
    def fact(self, fact: f.Fact) -> None:
        """Record a replicated fact, just before it takes effect."""
        job = self.state.jobs.get(getattr(fact, "job", ""))
        if isinstance(fact, f.StepCommitted) and job is not None:
            self._committed(job, fact)
        elif isinstance(fact, f.StepSkipped):
            self._abandoned(fact)
        elif isinstance(fact, f.StepRetired):
            word = {"kind": "retired", "why": fact.reason} if fact.reason else {"kind": "lifted"}
            self.add(**word, job=fact.job, attempt=fact.attempt, step=fact.step)
        elif isinstance(fact, f.AttemptOpened):
            is_new = job is None or fact.attempt not in job.attempts  # else it was written again with another process
            self.add(
                "attempt" if is_new else "members", job=fact.job, attempt=fact.attempt, ranks=fact.world_size,
                parent=fact.parent, fresh=fact.is_fresh, hosts=sorted(set(fact.hosts))[:NAMED_MAX],
            )  # fmt: skip
        elif isinstance(fact, f.AttemptClosed):
            word = {"kind": "ended", "why": fact.ended_by} if fact.ended_by else {"kind": "closed"}
            self.add(**word, job=fact.job, attempt=fact.attempt)
        elif isinstance(fact, f.StepPinned):
            self.add("pinned", job=fact.job, attempt=fact.attempt, step=fact.step, name=fact.name)
        elif isinstance(fact, f.StepUnpinned):
            self.add("unpinned", job=fact.job, name=fact.name)
        elif isinstance(fact, f.JobBranched):
            self.add(
                "branched", job=fact.job, attempt=fact.attempt, step=fact.step, from_job=fact.from_job,
                from_attempt=fact.from_attempt,
            )  # fmt: skip
        elif isinstance(fact, f.JobRemoved):
            why = {"why": why_dropped(self.state.rules.abandoned_arena_ttl_s)} if fact.is_forgotten else {}
            self.add("dropped" if fact.is_forgotten else "removed", job=fact.job, **why)
        elif isinstance(fact, f.HostDraining):
            due_s = None if fact.until_s is None else rounded(fact.until_s - self.state.wall_s)
            is_known = self.state.is_draining(fact.host_id)
            if due_s is not None and not is_known:
                self.add("drain", host=fact.host_id, due_s=due_s)
            elif due_s is None and is_known:
                self.add("drain_over", host=fact.host_id)
        elif isinstance(fact, f.RestoreDecided) and fact.step is None and fact.round > 0:
            self.add("restore", job=fact.job, attempt=fact.attempt, verdict="none", why="nothing was ever committed")

    def _committed(self, job: Job, fact: f.StepCommitted) -> None:
        step = StepId(fact.attempt, fact.step)
        putting, before = self.puts.get((job.name, step)), job.commits.get(step)
        took_s = rounded(self.state.now - putting.began_s) if putting is not None else None
        place = {"job": job.name, "attempt": fact.attempt, "step": fact.step}
        if before is not None and before.is_degraded and not fact.is_degraded:
            self.add("redundant", **place, copies=fewest(fact.hosts), seconds=phases(redundant=took_s))
        elif before is None:
            if putting is not None and not putting.is_reported:
                self._put((job.name, step), putting)
            ranks = job.copies.get(step, {})
            self.add(
                "commit", **place, ranks=fact.world_size, copies=fewest(fact.hosts), level=fact.level,
                nbytes=sum(next(iter(hosts.values())).spec.nbytes for hosts in ranks.values() if hosts),
                hosts=sorted({host for hosts in fact.hosts for host in hosts})[:NAMED_MAX],
                degraded=fact.reason if fact.is_degraded else "",
                seconds=phases(committed=took_s, redundant=None if fact.is_degraded else took_s),
            )  # fmt: skip
            self._pass_over(job, step)
            self._recovered(job, fact)
        if putting is not None:
            putting.is_committed = True
            if not fact.is_degraded:
                del self.puts[job.name, step]

    def _pass_over(self, job: Job, newest: StepId) -> None:
        """Record the older steps that a commit supersedes (R12)."""
        for key, putting in list(self.puts.items()):
            if key[0] == job.name and key[1] < newest:
                del self.puts[key]
                if not putting.is_committed and key[1].attempt == newest.attempt:
                    self.add(
                        "superseded", job=job.name, attempt=newest.attempt, step=key[1].step,
                        why=f"step {newest.step} was committed first", ranks=len(putting.stalls_s),
                    )  # fmt: skip

    def _abandoned(self, fact: f.StepSkipped) -> None:
        word = self.skips.pop((fact.job, fact.attempt, fact.step), None)
        for key in [k for k in self.puts if k[0] == fact.job and k[1].attempt == fact.attempt]:
            if fact.step <= key[1].step < max(fact.resume, fact.step + 1):
                del self.puts[key]
        found: dict[str, Any] = {}
        why = "a rank passed over it, or no copy has all of it"
        if word is not None:
            host, request = word
            found, why = {"rank": request.rank, "host": host}, request.why or "no room"
            found |= {"stall_s": rounded(seconds(request.stall_s))} if request.stall_s is not None else {}
        self.add(
            "skip", job=fact.job, attempt=fact.attempt, step=fact.step, why=why[:300], resume=fact.resume,
            **found,
        )  # fmt: skip

    # -- recovery in place ------------------------------------------------------------------------

    @never_raises
    def attempt_begun(self, event: e.AttemptBegun) -> None:
        """Record which ranks were replaced before a generation of recovery in place."""
        attempt = self.state.jobs[event.job].attempts[event.attempt]
        if attempt.recovery is not None:
            self.add(
                "replaced", job=event.job, attempt=event.attempt, generation=attempt.generation,
                replaced=[asdict(row) for row in attempt.recovery.replaced],
            )  # fmt: skip

    def _recovered(self, job: Job, fact: f.StepCommitted) -> None:
        """Record the seconds of all phases of a recovery with the first commit of its generation."""
        attempt = job.attempts.get(fact.attempt)
        if attempt is None or attempt.recovery is None or attempt.recovery.is_over:
            return
        recovery = attempt.recovery
        recovery.end_phase("first_step", self.state.now)
        self.add(
            "recovered", job=job.name, attempt=fact.attempt, step=fact.step, rank=recovery.rank, host=recovery.host,
            generation=attempt.generation,
            seconds={phase: rounded(took_s) for phase, took_s in recovery.seconds.items()},
        )  # fmt: skip

    # -- restores -------------------------------------------------------------------------------

    @never_raises
    def restored(self, event: e.RoundReleased) -> None:
        """Record a restored step: every rank has it (R23)."""
        active, report = event.round, event.report
        recovery = self.state.jobs[active.job].attempts[active.attempt].recovery
        if recovery is not None and active.is_adopting:
            recovery.end_phase("rebuild", active.planned_s)
            recovery.end_phase("get", self.state.now)
        self.add(
            "restore", job=active.job, attempt=active.attempt, step=event.step.step, verdict=report.verdict,
            of_attempt=event.step.attempt, of_job=active.source, ranks=len(active.calls), adopted=active.is_adopting,
            bytes=asdict(report.bytes), steps_lost=report.steps_lost,
            seconds={name: rounded(value) for name, value in asdict(report.seconds).items()}, why=report.why,
            not_used=[f"step {row.step} (attempt {row.attempt}): {row.reason}" for row in report.rejected],
            notes=list(report.notes),
        )  # fmt: skip

    @never_raises
    def restore_failed(self, event: e.RoundFailed) -> None:
        """Record a get that failed with the same error on all ranks."""
        active = event.round
        waited_s = rounded(self.state.now - active.since_s)
        self.add(
            "restore_failed", job=active.job, attempt=active.attempt, error=event.error, why=event.message[:1000],
            phase=active.phase, seconds={"waited": waited_s},
        )  # fmt: skip

    @never_raises
    def tick(self) -> None:
        """Record, at the end of an input, the conditions that began or ended."""
        self.watch.tick(self.state.now)

    # -- hosts, storage -------------------------------------------------------------------------

    @never_raises
    def settled(self) -> None:
        """Record that a controller begins to serve (R17)."""
        state = self.state
        self.add(
            "term", term=self.term, hosts=state.hosts.live_ids()[:NAMED_MAX], jobs=len(state.jobs),
            seconds={"settling": rounded(state.now - state.started_s)},
        )  # fmt: skip

    @never_raises
    def rank_gone(self, event: e.RankGone) -> None:
        """Note, once, that a rank has not closed its store: its process ended or left, or an exception ended it."""
        if not event.is_news:
            return
        member, attempt = event.member, event.job.newest_number
        kind = "rank_ended" if event.error else "rank_left" if event.has_left else "rank_dead"
        word = {"kind": kind, "why": event.error} if event.error else {"kind": kind}
        self.add(
            **word, job=event.job.name, attempt=attempt, step=member.step, rank=member.rank, host=member.host_id,
            pid=member.pid,
        )  # fmt: skip

    @never_raises
    def host_changed(self, change: Change) -> None:
        """Record that a host is live, suspect or dead (R28)."""
        kind = "host_joined" if change.why.startswith("joined") else f"host_{change.status}"
        held = sum(newest_held(job, change.host_id) for job in self.state.jobs.values())
        self.add(kind, host=change.host_id, why=change.why, shards=held)

    @never_raises
    def heartbeat(self, host: str, stats: HostStats | None) -> None:
        """Record what a host's scrub found since its last heartbeat (R30)."""
        state = self.state.hosts.states.get(host)
        if state is None:
            return
        found = stats.scrub if stats is not None else 0
        lost = stats.files_lost[:300] if stats is not None else ""
        if lost and self.files_lost.get(host) != lost:  # its successor's beats say so as well
            self.add("files_lost", host=host, what=lost)
        self.files_lost[host] = lost
        key = (host, state.info.incarnation)
        if key not in self.scrubbed:  # the previous controller has reported what a holder found before this one knew it
            self.scrubbed = {k: n for k, n in self.scrubbed.items() if k[0] != host}
        elif found > self.scrubbed[key]:
            self.add("scrub", host=host, found=found - self.scrubbed[key])
        self.scrubbed[key] = found

    @never_raises
    def not_expired(self, event: e.JobKept) -> None:
        """Record that a closed job keeps its RAM: durable storage lacks part of its newest step (R19)."""
        step = event.step
        self.add("not_expired", job=event.job, attempt=step.attempt, step=step.step, why=event.why[:300])

    @never_raises
    def durable(self, event: e.DurableWriteEnded) -> None:
        """Record that a durable write ended as asked, failed or was abandoned (R31)."""
        took_s = rounded(self.state.now - event.since_s)
        kind = f"durable_{event.outcome}" if event.outcome else "durable"
        reason = {"why": event.why[:300]} if event.why else {}
        step = event.step
        self.add(kind, job=event.job, attempt=step.attempt, step=step.step, seconds={"write": took_s}, **reason)


def newest_held(job: Job, host: str) -> int:
    """Return the shards that the host holds of the newest committed step with copies."""
    step = max((s for s in job.commits if s in job.copies), default=None)
    return 0 if step is None else len(job.on_host.get(host, {}).get(step, ()))


def fewest(hosts_by_rank: Iterable[Collection[str]]) -> int:
    """Return the number of copies of the shard with the fewest."""
    return min((len(hosts) for hosts in hosts_by_rank), default=0)


def rounded(value_s: float) -> float:
    """Round to microseconds."""
    return round(value_s, 6)


def phases(**took_s: float | None) -> dict[str, float]:
    """Return the seconds by phase, without those that were not measured."""
    return {name: value for name, value in took_s.items() if value is not None}
