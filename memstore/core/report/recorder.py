"""Takes the store events that parts note, and makes those of facts, puts and heartbeats. Pure.

The controller calls it beside decisions, never for one. Times of a put count from its begin on the rank's host, which
the seal's report carries (R11: nothing travels for this alone).
"""

from __future__ import annotations

import functools
import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec

from msgspec import to_builtins

from memstore.core.cluster import facts as f
from memstore.core.cluster.effects import Effects
from memstore.core.cluster.job import Job
from memstore.core.cluster.state import ClusterState
from memstore.core.cluster.text import NAMED_MAX, WHY_DROPPED
from memstore.core.durable.departures import Departures
from memstore.core.repair import RepairPushes
from memstore.core.report.event_kinds import KINDS, ROUTINE, event_text
from memstore.core.report.goodput import Accounts
from memstore.core.report.redundancy import RedundancyMonitor
from memstore.core.wire.calls import SkipStep
from memstore.core.wire.replies import Events
from memstore.core.wire.reports import PutTimes, seconds
from memstore.core.wire.status_rows import EventRow, HostStats
from recovery.inventory import Copy, StepId

# -- event ring ---------------------------------------------------------------------------------------
# The newest store events of one controller's term, for people and metrics: a bounded memory, no decisions. Pure.


KEPT = 2048  # of the routine kinds, and as many of all others: a week of commits pushes no death of a host out
PAGE = 500  # in one answer
TERM_SEQ = 10**9  # a term's numbers begin at term * TERM_SEQ + 1: they grow over controllers too (R17)
CHARS_MAX = 1000  # of a text in an event


class RecentEvents:
    """The newest store events of one controller's term."""

    def __init__(self, term: int) -> None:
        self.last_seq = term * TERM_SEQ
        self.unwritten_count = 0  # events that the shell could not log in time; it sets this
        self._first_seq = self.last_seq + 1
        self._routine: deque[EventRow] = deque(maxlen=KEPT)
        self._rare: deque[EventRow] = deque(maxlen=KEPT)
        self._forgotten_seq = 0  # the newest that was pushed out

    def add(
        self,
        kind: str,
        wall_s: float,
        *,
        job: str = "",
        attempt: int | None = None,
        step: int | None = None,
        rank: int | None = None,
        host: str = "",
        **fields: Any,
    ) -> EventRow:
        """Note one thing that happened; KeyError if its kind has no name."""
        ring = self._routine if KINDS[kind].level == ROUTINE else self._rare
        self.last_seq += 1
        if len(ring) == KEPT:
            self._forgotten_seq = max(self._forgotten_seq, ring[0].seq)
        row = EventRow(
            seq=self.last_seq,
            event=kind,
            wall_s=round(wall_s, 3),
            job=job,
            attempt=attempt,
            step=step,
            rank=rank,
            host=host,
            fields=_plain(to_builtins(fields)),
        )
        ring.append(row)
        return row

    def since(self, seq: int) -> list[EventRow]:
        """Return the remembered events after `seq`, oldest first."""
        if seq >= self.last_seq:
            return []
        found: list[EventRow] = []
        for ring in (self._routine, self._rare):
            newer = []
            for event in reversed(ring):
                if event.seq <= seq:
                    break
                newer.append(event)
            found += newer
        return sorted(found, key=lambda event: event.seq)

    def page(self, since: int, job: str | None, wall_s: float) -> Events:
        """Answer `memstore events`: at most PAGE of them; `next` is the `since` of the page after it.

        Of one job: its own, and those of hosts and the store since its first one.

        `is_gap`: something after `since` was pushed out before it was asked for, or an earlier controller had it.
        """
        newer = self.since(since)
        first = next((event.seq for event in self._rare if event.job == job), 0)
        mine = [event for event in newer if job is None or event.job == job or (event.job == "" and event.seq > first)]
        return Events(
            events=mine[:PAGE],
            next=mine[PAGE - 1].seq if len(mine) > PAGE else max(since, self.last_seq),
            has_more=len(mine) > PAGE,
            is_gap=since > 0 and (since < self._forgotten_seq or since < self._first_seq - 1),
            unwritten=self.unwritten_count,
            wall_s=wall_s,
        )


def _plain(value: Any) -> Any:
    """Return a value as it travels: seconds to the microsecond, texts of at most CHARS_MAX, lists for tuples."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return list(value)
    return round(value, 6) if isinstance(value, float) else value[:CHARS_MAX] if isinstance(value, str) else value


# -- recorder -----------------------------------------------------------------------------------------


PUTS_MAX = 256  # steps under way, over all jobs; more are forgotten, oldest first
SKIPS_MAX = 64
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

    def __init__(
        self, state: ClusterState, out: Effects, pushes: RepairPushes, departures: Departures, term: int
    ) -> None:
        self.state, self.out = state, out
        self.recent_events = RecentEvents(term)
        self.watch = RedundancyMonitor(state, pushes, departures, self.note)
        self.accounts = Accounts(state, self.note)
        self.puts: dict[tuple[str, StepId], Putting] = {}
        self.skips: dict[tuple[str, int, int], tuple[str, SkipStep]] = {}  # (job, attempt, step) -> host, rank's word
        self.problem = ""  # the last mistake in telling; tests look at it
        self.files_lost: dict[str, str] = {}  # by host: what of its folder was removed, as its last beat said
        out.note = self.note

    @never_raises
    def note(self, /, kind: str, **told: Any) -> None:
        """Record one thing that happened now; some kinds are lines of the controller's log as well."""
        row = self.recent_events.add(kind, self.state.wall_s, **told)
        self.accounts.noted(row)
        if KINDS[kind].is_logged:
            about = f"job {row.job!r}" if row.job else f"host {row.host}"
            self.out.log(f"{about}: {event_text(row)}", "warning")

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
        """Record that every rank has put the step, as one event (D52), and which put the bytes of the step before."""
        putting.is_reported = True
        stalls_s, ranks = putting.stalls_s, sorted(putting.unchanged)
        slowest = max(stalls_s, key=lambda rank: stalls_s[rank])
        place = {"job": key[0], "attempt": key[1].attempt, "step": key[1].step}
        self.note(
            "put",
            **place,
            rank=slowest,
            host=putting.hosts[slowest],
            ranks=len(stalls_s),
            nbytes=sum(putting.nbytes.values()),
            stall_s={"max": stalls_s[slowest], "median": statistics.median(stalls_s.values())},
            seconds={"sealed": self.state.now - putting.began_s},
        )
        if ranks:  # once when it begins, not for every further step
            self.note(
                "unchanged",
                **place,
                rank=ranks[0],
                before=putting.unchanged[ranks[0]],
                ranks=ranks[:NAMED_MAX],
                count=len(ranks),
                why="the optimizer did not step, or the same object was put",
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
        job, note = self.state.jobs.get(getattr(fact, "job", "")), self.note
        place = {name: getattr(fact, name) for name in ("job", "attempt", "step") if hasattr(fact, name)}
        self.accounts.fact(fact, job)
        match fact:
            case f.StepCommitted() if job is not None:
                self._committed(job, fact)
            case f.StepSkipped():
                self._abandoned(fact)
            case f.StepRetired(reason=""):
                note("lifted", **place)
            case f.StepRetired(reason=why):
                note("retired", **place, why=why)
            case f.AttemptOpened():
                is_new = job is None or fact.attempt not in job.attempts  # else it was written again, with a process
                note(
                    "attempt" if is_new else "members",
                    **place,
                    ranks=fact.world_size,
                    parent=fact.parent,
                    fresh=fact.is_fresh,
                    hosts=sorted(set(fact.hosts))[:NAMED_MAX],
                    taken=self._taken_from(job, set(fact.nonces)),
                )
            case f.AttemptClosed(ended_by=""):
                note("closed", **place)
            case f.AttemptClosed(ended_by=why):
                note("ended", **place, why=why)
            case f.StepPinned():
                note("pinned", **place, name=fact.name)
            case f.StepUnpinned():
                note("unpinned", **place, name=fact.name)
            case f.JobBranched():
                note("branched", **place, from_job=fact.from_job, from_attempt=fact.from_attempt)
            case f.JobRemoved(is_forgotten=True):
                note("dropped", **place, why=WHY_DROPPED)
            case f.JobRemoved():
                note("removed", **place, taken=self._taken_from(job, ()))
            case f.HostDraining(until_s=None):
                if self.state.is_draining(fact.host_id):
                    note("drain_over", host=fact.host_id)
            case f.HostDraining() if fact.until_s is not None and not self.state.is_draining(fact.host_id):
                note("drain", host=fact.host_id, due_s=fact.until_s - self.state.wall_s)
            case f.RestoreDecided(step=None) if fact.round > 0:
                note("restore", **place, verdict="none", why="nothing was ever committed")

    def _taken_from(self, job: Job | None, nonces: Collection[str]) -> dict[str, Any]:
        """Return the first process that is alive and loses the job, and how many others do; {} if none does."""
        newest = job.newest if job is not None else None
        members = newest.members.values() if newest is not None and newest.phase != "closed" else ()
        alive = [m for m in members if m.is_alive and m.nonce not in nonces and self.state.hosts.is_live(m.host_id)]
        if not alive:
            return {}
        return {"rank": alive[0].rank, "host": alive[0].host_id, "pid": alive[0].pid, "others": len(alive) - 1}

    def _committed(self, job: Job, fact: f.StepCommitted) -> None:
        step = StepId(fact.attempt, fact.step)
        putting, before = self.puts.get((job.name, step)), job.commits.get(step)
        took_s = self.state.now - putting.began_s if putting is not None else None
        place = {"job": job.name, "attempt": fact.attempt, "step": fact.step}
        if before is not None and before.is_degraded and not fact.is_degraded:
            self.note(
                "redundant", **place, copies=fewest(fact.digests.keepers.values()), seconds=phases(redundant=took_s)
            )
        elif before is None:
            if putting is not None and not putting.is_reported:
                self._put((job.name, step), putting)
            ranks = job.copies.get(step, {})
            self.note(
                "commit",
                **place,
                ranks=fact.world_size,
                copies=fewest(fact.digests.keepers.values()),
                level=fact.level,
                nbytes=sum(next(iter(hosts.values())).spec.nbytes for hosts in ranks.values() if hosts),
                hosts=sorted(job.hosts_of(step))[:NAMED_MAX],
                degraded=fact.reason if fact.is_degraded else "",
                seconds=phases(committed=took_s, redundant=None if fact.is_degraded else took_s),
            )
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
                    self.note(
                        "superseded",
                        job=job.name,
                        attempt=newest.attempt,
                        step=key[1].step,
                        why=f"step {newest.step} was committed first",
                        ranks=len(putting.stalls_s),
                    )

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
            found |= {"stall_s": seconds(request.stall_s)} if request.stall_s is not None else {}
        self.note("skip", job=fact.job, attempt=fact.attempt, step=fact.step, why=why, resume=fact.resume, **found)

    def _recovered(self, job: Job, fact: f.StepCommitted) -> None:
        """Record the seconds of all phases of a recovery with the first commit of its generation."""
        attempt = job.attempts.get(fact.attempt)
        if attempt is None or attempt.recovery is None or attempt.recovery.is_over:
            return
        recovery = attempt.recovery
        recovery.end_phase("first_step", self.state.now)
        self.note(
            "recovered",
            job=job.name,
            attempt=fact.attempt,
            step=fact.step,
            rank=recovery.rank,
            host=recovery.host,
            generation=attempt.generation,
            seconds=dict(recovery.seconds),
        )

    @never_raises
    def tick(self) -> None:
        """Record, at the end of an input, the conditions that began or ended."""
        self.watch.tick(self.state.now)
        self.accounts.tick()

    # -- hosts, storage -------------------------------------------------------------------------

    @never_raises
    def heartbeat(self, host: str, stats: HostStats | None) -> None:
        """Record which files of a host's folder were removed while its holder ran."""
        if host not in self.state.hosts.states:
            return
        lost = stats.files_lost[:300] if stats is not None else ""
        if lost and self.files_lost.get(host) != lost:  # its successor's beats say so as well
            self.note("files_lost", host=host, what=lost)
        self.files_lost[host] = lost


def fewest(hosts_by_rank: Iterable[Collection[str]]) -> int:
    """Return the number of copies of the shard with the fewest."""
    return min(map(len, hosts_by_rank), default=0)


def phases(**took_s: float | None) -> dict[str, float]:
    """Return the seconds by phase, without those that were not measured."""
    return {name: value for name, value in took_s.items() if value is not None}
