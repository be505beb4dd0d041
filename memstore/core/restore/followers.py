"""Readers that follow a job: they wait for its next step, and lease the one that they read. Pure (R36).

waits:  asked --a newer step is committed, or its time is over--> answered
lease:  asked --room of its own is claimed--> kept --ended, its reader's host is lost, or too old--> retention decides
          '--there is none--> answered all the same: retention drops the step as if it were not read
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from memstore.core.capacity import Reservations, Retention
from memstore.core.cluster.collective import job_removed
from memstore.core.cluster.effects import Effects
from memstore.core.cluster.job import Call, Job, LeaseRoom, ReadLease
from memstore.core.cluster.state import ClusterState
from memstore.core.cluster.step_lookup import Refusal, named_step, past_step, why_not_whole
from memstore.core.restore.single_read import unknown_job
from memstore.core.wire.calls import AwaitStep, EndLease, LeaseStep
from memstore.core.wire.replies import Noted, StepAwaited, StepLeased
from recovery.inventory import StepId

STEPS_MAX = 2  # leased at once in room of their own: readers that begin one after the other never hold all of it
ROOM_S = 60.0  # without a lease, until the room is given back: a follower takes the next one sooner
REFUSED_S = 10.0  # until a host that had no room is asked again


@dataclass(frozen=True, slots=True)
class Wish:
    """A reader's wish that a step be kept while it reads."""

    job: str
    step: int | None  # None: the newest
    of_attempt: int | None
    lease: str  # the reader's own name of it
    host_id: str  # the reader's
    limit_s: float
    answer: Callable[[StepId, str], None]  # takes the step, and why it is not kept
    refuse: Callable[[str, str], None]


class Followers:
    """Readers of all jobs that wait, and those that have leased a step."""

    def __init__(self, state: ClusterState, out: Effects, room: Reservations, retention: Retention) -> None:
        self.state, self.out, self.room, self.retention = state, out, room, retention
        self.waits: list[Call[AwaitStep]] = []
        self._claiming: dict[str, list[Wish]] = {}  # job whose room is asked for -> who waits for it
        self._refused: dict[str, tuple[float, str]] = {}  # job -> until when it is not asked for again, and why
        state.holds.add("a lease", lambda job: job.leased, is_in_use=False)

    # -- waits --------------------------------------------------------------------------------

    def await_step(self, call: Call[AwaitStep]) -> None:
        """Answer once a newer step is committed; a job that is not known yet may still come."""
        self.waits.append(call)
        self._answer_waits()

    def committed(self, job: Job) -> None:
        """Answer those who wait for a step of the job."""
        self._answer_waits(job.name)

    def _answer_waits(self, name: str | None = None) -> None:
        jobs = [job for job in self.state.jobs.values() if name in (None, job.name)] if self.waits else []
        found = {job.name: _named(job, None, None)[0] for job in jobs}
        waits, self.waits = self.waits, []
        for call in waits:
            asked, newest = call.request, found.get(call.request.job)
            is_late = self.state.now - call.since_s >= asked.within_s
            if newest is not None and _is_newer(newest, asked):
                self.out.answer(call, StepAwaited(step=newest.step, attempt=newest.attempt))
            elif is_late and name is None:
                self.out.answer(call, StepAwaited(step=None, attempt=None))
            else:
                self.waits.append(call)

    # -- leases -------------------------------------------------------------------------------

    def lease(self, call: Call[LeaseStep]) -> None:
        """Keep a committed step for a reader, if it has room of its own."""
        asked = call.request

        def answer(step: StepId, why_not: str) -> None:
            self.out.answer(call, StepLeased(step=step.step, attempt=step.attempt, why_not_kept=why_not))

        self.keep(
            Wish(
                asked.job,
                asked.step,
                asked.of_attempt,
                asked.lease,
                call.host_id,
                asked.limit_s,
                answer,
                lambda error, why: self.out.refuse(call, error, why),
            )
        )

    def keep(self, wish: Wish) -> None:
        """Keep a committed step, if it has room of its own; answer at once or once every host has claimed that."""
        job = self.state.jobs.get(wish.job)
        if job is None:
            wish.refuse(*unknown_job(self.state, wish.job))
            return
        step, refusal = _named(job, wish.step, wish.of_attempt)
        step = next((s for s, leases in job.leased.items() if wish.lease in leases), step)  # asked again
        if step is None:
            wish.refuse(*(past_step(job, wish.step) or refusal or ("RecoveryError", "no committed step")))
            return
        lacking = why_not_whole(self.state.hosts, job, step)
        if lacking:
            wish.answer(step, lacking)
        elif job.name in self._claiming:
            self._claiming[job.name].append(wish)
        elif not self._take(job, wish, step) and not self._join(job, wish, step):
            self._claim(job, wish, step)

    def _take(self, job: Job, wish: Wish, step: StepId) -> bool:
        """Take a lease, unless it needs more room than is claimed."""
        has_place = len(job.leased) < job.lease_room.versions and job.lease_room.has_place_for(_needs(job, step))
        if step not in job.leased and not has_place:
            return False
        lease = ReadLease(wish.host_id, self.state.now + wish.limit_s)
        job.leased.setdefault(step, {})[wish.lease] = lease
        wish.answer(step, "")
        return True

    def _join(self, job: Job, wish: Wish, newest: StepId) -> bool:
        """Share another reader's step with one that wants the newest and for which there is no place.

        As no reader is let in to the older of two leased steps, one of them ends, and its place is a newer step's.
        """
        leased = [step for step in job.leased if step < newest]
        has_place = len(job.leased) < STEPS_MAX
        return not has_place and wish.step is None and bool(leased) and self._take(job, wish, max(leased))

    def _claim(self, job: Job, wish: Wish, step: StepId) -> None:
        """Ask every host of the job for the room of one leased step more; nothing is kept before they have it."""
        until_s, why = self._refused.get(job.name, (0.0, ""))
        if len(job.leased) >= STEPS_MAX:
            why = f"readers have leased {len(job.leased)} other steps, which is the most"
        elif job.newest is None or self.state.now >= until_s:
            why = "" if job.newest is not None else "the job's history is not known"
        if why or job.newest is None:
            wish.answer(step, why)
            return
        self._claiming[job.name] = [wish]
        job.lease_room = job.lease_room.grown(_needs(job, step), len(job.leased) + 1)
        job.lease_used_s = self.state.now
        self.room.claim(job, job.newest, lambda host, why: self._claimed(job, f"{host}: {why}" if why else ""))

    def _claimed(self, job: Job, why: str) -> None:
        wishes = self._claiming.pop(job.name, [])
        if why and job.newest is not None:
            job.lease_room = replace(job.lease_room, versions=len(job.leased))
            self.room.order(job, job.newest)  # the others give the room back
            self._refused[job.name] = (self.state.now + REFUSED_S, why.partition("\n")[0])
        for wish in wishes:
            self.keep(wish)  # by now there may be a newer step, or none of that number

    def end(self, call: Call[EndLease]) -> None:
        """End a lease; nothing if it is over."""
        self.let_go(call.request.job, call.request.lease)
        self.out.answer(call, Noted())

    def let_go(self, name: str, lease: str) -> None:
        """End a lease of a job's step; nothing if it is over."""
        job = self.state.jobs.get(name)
        if job is not None:
            self._end(job, lambda number, _: number == lease)

    def _end(self, job: Job, is_over: Callable[[str, ReadLease], bool]) -> None:
        """End the leases that a test names, and drop the steps that nothing else keeps."""
        for step, leases in list(job.leased.items()):
            job.leased[step] = {number: lease for number, lease in leases.items() if not is_over(number, lease)}
            if not job.leased[step]:
                del job.leased[step]
                job.lease_used_s = self.state.now
                self.retention.retain(job)

    # -- what ends them -----------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Check deadlines; give back the room that no reader has used for a while."""
        self._answer_waits()
        for job in self.state.jobs.values():
            self._end(job, lambda _, lease: now >= lease.until_s)
            is_idle = not job.leased and job.name not in self._claiming and now - job.lease_used_s >= ROOM_S
            if is_idle and job.lease_room.versions and job.newest is not None:
                job.lease_room = LeaseRoom()
                self.room.order(job, job.newest)

    def host_died(self, host: str) -> None:
        """End the leases of readers on a host that died."""
        for job in self.state.jobs.values():
            self._end(job, lambda _, lease: lease.host_id == host)

    def forget(self, name: str) -> None:
        """Forget a removed job's leases; who waits for a step of that name goes on waiting."""
        self._refused.pop(name, None)
        for wish in self._claiming.pop(name, []):
            wish.refuse(*job_removed(name))


def _named(job: Job, number: int | None, of_attempt: int | None) -> tuple[StepId | None, Refusal | None]:
    return named_step(job, number, of_attempt, among={*job.commits, *job.markers}, option="attempt=")


def _is_newer(newest: StepId, asked: AwaitStep) -> bool:
    """Say whether a step is newer than what the reader has: one of a later attempt is, whatever its number (R22)."""
    if asked.than is None or asked.of_attempt is None:
        return asked.than is None or newest.step > asked.than
    return newest > StepId(asked.of_attempt, asked.than)


def _needs(job: Job, step: StepId) -> tuple[int, ...]:
    """Return the slots by rank of a step that is whole in RAM."""
    ranks = range(job.commits[step].world_size)
    return tuple(next(iter(job.copies[step][rank].values())).spec.chunks_count for rank in ranks)
