"""What became of a job's time: in steps that stay, in steps that were lost, or down, by phase. Pure (D321).

    training --a launch--> restore --every rank has loaded--> first_step --a newer step--> training
       '--closed by all ranks--> closed, which is not counted --a launch--> restore

A part of the recorder: no decision follows from it. Seconds are of the controller's monotonic clock. A successor knows
nothing of the time before it, but the newest step that was trained, which holders remember (R33.6).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from memstore.core.cluster import facts as f
from memstore.core.cluster.job import Attempt, Job
from memstore.core.cluster.state import ClusterState
from memstore.core.wire.status_rows import EventRow, GoodputRow

MOMENTS_MAX = 512  # of steps remembered; between two of them as much time is taken for each step

# -- account ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Outage:
    """From the last step before a launch to the first one after it."""

    why: str = ""
    is_start: bool = False  # nothing had failed: the first launch, or one after all ranks had closed
    is_chosen: bool = False  # a person went back: a rewind, or get(trusted=True)
    seconds: dict[str, float] = field(default_factory=dict)  # by phase, in their order
    steps: int = 0  # trained, and gone back behind
    steps_s: float = 0.0  # that they had taken


@dataclass(slots=True)
class Account:
    """The time of one job since an account of it is kept."""

    since_s: float  # by the wall clock
    attempt: int  # whose steps are followed
    moved_s: float  # all time until then is accounted for
    is_whole: bool = False  # nothing of the job was before
    phase: Literal["training", "restore", "first_step", "closed"] = "training"
    step: int | None = None  # the newest that was trained, and that nothing has gone back behind
    first: int = -1  # the step before all that are known
    kept_s: float = 0.0
    moments: list[tuple[int, float]] = field(default_factory=list)  # steps, and `kept_s` when each was trained
    trained: tuple[int, float] = (0, 0.0)  # all steps whose time is known, and that time, lost ones too
    noticed: tuple[float, str] = (0.0, "")  # when a loss was seen, and which
    current: Outage | None = None
    lost: tuple[int, float] = (0, 0.0)  # steps that failures took, and their seconds
    taken_back: tuple[int, float] = (0, 0.0)  # the same of those that a person chose
    down_s: dict[str, float] = field(default_factory=dict)
    outages: int = 0  # that are over
    rewound: int = 0  # the newest attempt that began with a rewind

    def reached(self, step: int, at_s: float) -> Outage | None:
        """Take the newest step that is trained; return the outage that it ends, if it ends one."""
        if self.step is not None and step <= self.step:
            return None
        if self.step is None:
            self.first = self.step = step - 1
        over, count, span_s = self.current, step - self.step, max(0.0, at_s - self.moved_s)
        useful_s = span_s
        if over is not None:
            if self.trained[0]:  # what it took longer than steps usually do was no training
                useful_s = min(span_s, count * self.trained[1] / self.trained[0])
            self._spend(over, self.phase, self.moved_s + span_s - useful_s)
        self._keep(step, useful_s, count)
        self.moved_s, self.phase = max(self.moved_s, at_s), "training"
        self._end()
        return over

    def heard(self, step: int) -> None:
        """Take word of a step that was trained before the launch that is under way; when is not known."""
        if self.step is not None and step > self.step:
            self._keep(step, 0.0, 0)

    def notice(self, why: str, now: float) -> None:
        """Take that a process or a host is lost; of several after the newest step the first counts."""
        if self.noticed[0] <= self.moved_s:
            self.noticed = now, why

    def opened(self, now: float) -> None:
        """Take that all ranks of a launch have come."""
        (noticed_s, why), is_start = self.noticed, self.phase == "closed"
        self.moved_s = now if is_start else self.moved_s
        is_seen = noticed_s > self.moved_s
        outage = self.current = self.current or Outage(why if is_seen else "", is_start)
        if is_seen:
            self._spend(outage, "detection" if self.phase == "training" else self.phase, noticed_s)
        self._spend(outage, "restart", now)
        self.phase = "restore"

    def went_on(self, step: int | None, now: float, *, is_chosen: bool) -> None:
        """Take the step from which ranks go on, None: from nothing; `is_chosen`: a person wanted it."""
        outage = self.current = self.current or Outage()
        self._spend(outage, self.phase if self.phase != "training" else "restart", now)
        outage.is_chosen, self.phase = is_chosen, "first_step"
        to = self.first if step is None else step
        if self.step is None:
            self.first, self.step = to, step
        elif to >= self.step:
            self.heard(to)
        else:
            at_s = self._kept_at(to)
            count, took_s = self.step - to, self.kept_s - at_s
            outage.steps, outage.steps_s = outage.steps + count, outage.steps_s + took_s
            if is_chosen:
                self.taken_back = self.taken_back[0] + count, self.taken_back[1] + took_s
            else:
                self.lost = self.lost[0] + count, self.lost[1] + took_s
            self.moments = [*(moment for moment in self.moments if moment[0] < to), (to, at_s)]
            self.step, self.kept_s = to, at_s

    def closed(self, now: float) -> None:
        """Take that all ranks have closed the job, and well."""
        self._end()
        self.phase, self.moved_s = "closed", now

    def row(self, now: float, age_s: float) -> GoodputRow:
        """Return it as of now; a loss that was seen and has no launch yet is an outage."""
        down_s, is_down = dict(self.down_s), self.current is not None and not self.current.is_start
        open_s, noticed_s = 0.0 if self.phase == "closed" else max(0.0, now - self.moved_s), self.noticed[0]
        if self.phase in ("restore", "first_step"):
            _add(down_s, self.phase, open_s)
        elif self.phase == "training" and noticed_s > self.moved_s:
            is_down = True
            _add(down_s, "detection", noticed_s - self.moved_s)
            _add(down_s, "restart", now - noticed_s)
        return GoodputRow(
            since_s=age_s,
            is_whole=self.is_whole,
            total_s=self.kept_s + self.lost[1] + self.taken_back[1] + sum(self.down_s.values()) + open_s,
            kept_s=self.kept_s,
            lost_steps=self.lost[0],
            lost_s=self.lost[1],
            taken_back_steps=self.taken_back[0],
            taken_back_s=self.taken_back[1],
            down_s=down_s,
            outages=self.outages + is_down,
        )

    def _spend(self, outage: Outage, phase: str, until_s: float) -> None:
        for seconds in (outage.seconds, self.down_s):
            _add(seconds, phase, until_s - self.moved_s)
        self.moved_s = max(self.moved_s, until_s)

    def _keep(self, step: int, took_s: float, count: int) -> None:
        self.step, self.kept_s = step, self.kept_s + took_s
        self.trained = self.trained[0] + count, self.trained[1] + took_s
        self.moments.append((step, self.kept_s))
        if len(self.moments) > MOMENTS_MAX:
            half = MOMENTS_MAX // 2
            self.moments = [*self.moments[:half:2], *self.moments[half:]]

    def _kept_at(self, step: int) -> float:
        """Return the time kept up to a step, in proportion between two; steps without a time have taken none."""
        after = bisect_right(self.moments, step, key=lambda moment: moment[0])
        if after == len(self.moments):
            return self.kept_s
        before, before_s = self.moments[after - 1] if after else (self.first, 0.0)
        then, then_s = self.moments[after]
        return before_s + (then_s - before_s) * max(0, step - before) / max(1, then - before)

    def _end(self) -> None:
        outage, self.current = self.current, None
        self.outages += outage is not None and not outage.is_start and not outage.is_chosen


def _add(seconds: dict[str, float], phase: str, took_s: float) -> None:
    if took_s > 0:
        seconds[phase] = seconds.get(phase, 0.0) + took_s


# -- accounts -----------------------------------------------------------------------------------------


LOSSES = ("rank_dead", "rank_ended", "rank_left", "host_dead")  # events by which an outage is noticed


class Accounts:
    """The accounts of all jobs; `note` records an event."""

    def __init__(self, state: ClusterState, note: Callable[..., None]) -> None:
        self.state, self.note = state, note
        self.of: dict[str, Account] = {}

    def fact(self, fact: f.Fact, job: Job | None) -> None:
        """Take a fact, just before it takes effect."""
        now, account = self.state.now, self.of.get(getattr(fact, "job", ""))
        match fact:
            case f.JobRemoved():
                self.of.pop(fact.job, None)
            case f.AttemptOpened() if job is None or fact.attempt not in job.attempts:
                if job is not None:
                    self.look(job)
                    account = self.of.get(fact.job)
                if account is None or (fact.is_fresh and fact.generation <= 1):
                    is_whole = fact.parent is None
                    account = Account(self.state.wall_s, fact.attempt, now, is_whole, phase="closed")
                    self.of[fact.job] = account
                account.opened(now)
            case f.RestoreDecided(round=0) if account is not None:
                account.rewound = fact.attempt
            case f.RestoreDecided(step=None) | f.RestoreReleased() if account is not None and job is not None:
                self._go_on(account, job, job.attempts[fact.attempt])
            case f.AttemptClosed(ended_by="") if account is not None:
                account.closed(now)

    def noted(self, event: EventRow) -> None:
        """Take an event: the loss of a rank, or of a host with ranks, may begin an outage."""
        if event.event not in LOSSES:
            return
        for name, account in self.of.items():
            job = self.state.jobs.get(name)
            members = job.newest.members.values() if job is not None and job.newest is not None else ()
            if name == event.job or (not event.job and any(member.host_id == event.host for member in members)):
                who = f"rank {event.rank} on {event.host}" if event.job else f"host {event.host}"
                account.notice(f"the loss of {who}", self.state.now)

    def tick(self) -> None:
        """Take what ranks have trained since."""
        self.of = {name: account for name, account in self.of.items() if name in self.state.jobs}
        for job in self.state.jobs.values():
            self.look(job)

    def look(self, job: Job) -> None:
        """Take what a job's ranks have trained since the last look."""
        newest, account, now = job.newest, self.of.get(job.name), self.state.now
        if newest is None:
            return
        if account is None:
            account = self.of[job.name] = self._taken_over(job, newest)
        if account.attempt != newest.attempt_number and newest.trained_step >= 0:
            self._go_on(account, job, newest)  # its ranks have not called get()
        followed = job.attempts.get(account.attempt)
        if followed is None or followed.trained_step < 0:
            return
        if account.phase == "closed" or account.attempt != newest.attempt_number:
            account.heard(followed.trained_step)
            return
        step, last = followed.trained_step, followed.progress.last
        outage = account.reached(step, last[1] if last is not None and last[0] == step else now)
        if outage is not None and not outage.is_start:
            self._note(job, account, outage)

    def _taken_over(self, job: Job, newest: Attempt) -> Account:
        """Return an account that goes on from what an earlier controller left: its seconds are not known."""
        former = max((number for number in job.attempts if number < newest.attempt_number), default=0)
        is_restoring = former > 0 and not newest.is_released and newest.trained_step < 0
        attempt = job.attempts[former] if is_restoring else newest
        of_it = [each.step for each in (*job.copies, *job.commits) if each.attempt == attempt.attempt_number]
        known = max((attempt.trained_step, -1 if attempt.parent_step is None else attempt.parent_step, *of_it))
        account = Account(self.state.wall_s, attempt.attempt_number, self.state.now, first=known)
        account.phase = "restore" if is_restoring else "closed" if newest.has_ended_well else "training"
        account.step = known if known >= 0 else None
        return account

    def _go_on(self, account: Account, job: Job, attempt: Attempt) -> None:
        former, active = job.attempts.get(account.attempt), self.state.rounds.get(job.name)
        if account.attempt == attempt.attempt_number and account.phase == "training":
            return
        if former is not None and former is not attempt:
            account.heard(former.trained_step)
        is_chosen = account.rewound == attempt.attempt_number or (active is not None and active.is_trusted)
        account.attempt = attempt.attempt_number
        account.went_on(attempt.parent_step, self.state.now, is_chosen=is_chosen)

    def _note(self, job: Job, account: Account, outage: Outage) -> None:
        row = account.row(self.state.now, 0.0)
        self.note(
            "outage",
            job=job.name,
            attempt=account.attempt,
            step=account.step,
            why=outage.why,
            is_chosen=outage.is_chosen,
            seconds=outage.seconds,
            steps_lost=outage.steps,
            lost_s=outage.steps_s,
            goodput=row.kept_s / row.total_s if row.total_s else 0.0,
        )

    def row(self, job: Job) -> GoodputRow | None:
        """Return what became of a job's time; None if none of its steps is known."""
        account = self.of.get(job.name)
        if account is None or account.step is None:
            return None
        return account.row(self.state.now, self.state.age_s(account.since_s))
