"""What a sign of a coming failure causes: a put and a durable write ahead of their turn, and nothing more. Pure (R41).

sign --none lately--> asked: may this step be put? --all ranks: yes--> agreed --committed--> durable write
                        '--a rank has passed it, or does not answer--> not put ---------------^

A sign is a guess unless the host has notice of its end: `drain.py` and `departures.py` move copies then, and only then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from memstore.core.cluster.collective import attempt_of
from memstore.core.cluster.effects import DrainChanged, Effects
from memstore.core.cluster.job import Attempt, Call, Job
from memstore.core.cluster.state import ClusterState
from memstore.core.durable.persist import Persists
from memstore.core.wire.calls import AnswerPutEarly
from memstore.core.wire.messages import HostBeat
from memstore.core.wire.orders import PutEarly
from memstore.core.wire.replies import Noted
from memstore.core.wire.status_rows import HostStats
from memstore.intervals import parse_put_every
from recovery.inventory import StepId

AGAIN_S = 600.0  # between two precautions for one job; a notice of an end has no such pause, unless one is under way
LEAD_S = 5.0  # of training, from the question to the step: as long as ranks' words and answers take, and more
ANSWER_S = 3.0  # longest wait for all ranks' answers
AHEAD_S = 60.0  # longest wait for ranks to come to a step that was agreed
OVER_S = 600.0  # then a precaution is over, whatever it came to

# -- signs --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Counter:
    """A count of a host's heartbeats: a rise by so many is a sign."""

    of: Callable[[HostStats], int]
    rise: int
    text: str
    begins_with_holder: bool = False  # at 0, while what the kernel counts may be years old


COUNTERS: Mapping[str, Counter] = {
    "scrub": Counter(lambda stats: stats.scrub, 1, "its scrub found {} damaged chunks or manifests", True),
    "uncorrected": Counter(
        lambda stats: stats.uncorrected_errors, 1, "its memory had {} uncorrected errors: `memstore drain` empties it"
    ),
    "corrected": Counter(lambda stats: stats.corrected_errors, 100, "its memory had {} corrected errors"),
    "link": Counter(lambda stats: stats.link_errors, 1000, "its network links had {} errors"),
}
SUSPECTED_OFTEN = 3  # times within AGAIN_S that a host did not answer for a while


def wanted_put(job: Job, attempt: Attempt) -> tuple[int | None, str]:
    """Return the step that is to be put ahead of its turn, or None and why none is."""
    every = parse_put_every(attempt.config.get("put_every", "step"))
    if every.is_epoch:
        return None, 'put_every="epoch": no other step is to be restored'
    if not all(member.is_alive for member in attempt.members.values()):
        return None, "a rank is lost"
    steps = attempt.progress.steps_within(LEAD_S)
    if steps is None:
        return None, "nothing is known of its pace"
    step, newest = attempt.trained_step + steps + 1, attempt.pace.last
    last_put = attempt.trained_step if newest is None else newest[0]
    if last_put + (every.steps or attempt.put_interval[1]) <= step:
        return None, "its next put comes as soon"
    return step, ""


# -- precautions --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Precaution:
    """What is done for one job since a sign."""

    attempt: int
    step: int | None  # the early put
    why: str
    since_s: float
    waits: set[int] = field(default_factory=set)  # ranks that have not answered
    notice_of: str = ""  # the host that is to go; "": the sign is a guess
    is_decided: bool = True
    target: StepId | None = None  # the durable write

    def is_under_way(self, attempt: Attempt, now: float) -> bool:
        """Return whether a rank may still come to the early put: no other one is asked for until then."""
        is_ahead = self.step is not None and attempt.trained_step <= self.step and now - self.since_s < AHEAD_S
        return self.attempt == attempt.attempt_number and (not self.is_decided or is_ahead)


class Precautions:
    """The precautions for all jobs, and the signs of all hosts that were seen."""

    def __init__(self, state: ClusterState, out: Effects, persists: Persists, term: int) -> None:
        self.state, self.out, self.persists, self.term = state, out, persists, term
        self.of: dict[str, Precaution] = {}
        self.counts: dict[tuple[str, str], tuple[int, int]] = {}  # host and counter -> its incarnation, what it was
        self.odd: set[tuple[str, str]] = set()  # host and sign that holds still

    # -- signs --------------------------------------------------------------------------------

    def drain_changed(self, event: DrainChanged) -> None:
        """Take that a host has notice of its end, or none any more."""
        if self.state.is_draining(event.host):
            self._sign(event.host, "drain", "it has notice of its end", is_certain=True)

    def heartbeat(self, beat: HostBeat) -> None:
        """Take what a host counts: a sign is what neither an earlier life of it counted nor a controller before saw."""
        state = self.state.hosts.states.get(beat.host_id)
        if state is None or beat.stats is None:
            return
        for kind, counter in COUNTERS.items():
            value, key = counter.of(beat.stats), (beat.host_id, kind)
            life, before = self.counts.get(key, (-1, 0))
            if life != state.info.incarnation or value < before:
                # Only an earlier controller can have reported what this life of a holder has counted so far.
                is_unreported = counter.begins_with_holder and (life >= 0 or self.term == 1)
                before = 0 if is_unreported else value
                self.counts[key] = state.info.incarnation, before
            if value - before >= counter.rise:
                self.counts[key] = state.info.incarnation, value
                if kind == "scrub":
                    self.out.note("scrub", host=beat.host_id, found=value - before)
                self._sign(beat.host_id, kind, counter.text.format(value - before))

    def _look_at_hosts(self) -> None:
        hosts, now = self.state.hosts, self.state.now
        for host, state in hosts.states.items():
            if not state.deaths_s and not state.suspected_s:
                continue
            recent = sum(now - at_s <= AGAIN_S for at_s in state.suspected_s)
            signs = {
                "flaps": (hosts.is_on_probation(now, host), "it died 3 times within 10 minutes"),
                "slow": (recent >= SUSPECTED_OFTEN, f"it was silent for a while {recent} times within 10 minutes"),
            }
            for kind, (is_so, why) in signs.items():
                is_news = is_so and (host, kind) not in self.odd
                (self.odd.add if is_so else self.odd.discard)((host, kind))
                if is_news:
                    self._sign(host, kind, why)

    def _sign(self, host: str, kind: str, why: str, *, is_certain: bool = False) -> None:
        """Take a sign: decide what is done for each job that has ranks or copies there."""
        for job in self.state.jobs.values():
            attempt = job.newest
            is_there = attempt is not None and (
                job.on_host.get(host) or any(member.host_id == host for member in attempt.members.values())
            )
            if attempt is None or not is_there or attempt.phase == "closed":
                continue
            last, now = self.of.get(job.name), self.state.now
            is_lately = last is not None and now - last.since_s < AGAIN_S
            if last is not None and is_lately and (not is_certain or last.is_under_way(attempt, now)):
                continue
            step, why_not = wanted_put(job, attempt)
            found = Precaution(attempt.attempt_number, step, f"{host}: {why}", now)
            found.notice_of, self.of[job.name] = host if is_certain else "", found
            has_tier = bool(attempt.config.get("durable"))
            place = {"job": job.name, "attempt": attempt.attempt_number, "step": step, "host": host}
            self.out.note("precaution", **place, sign=kind, why=why, why_not=why_not, durable=has_tier)
            if step is not None:
                self._ask(job, attempt, found)

    # -- the early put (R33) --------------------------------------------------------------------

    def _ask(self, job: Job, attempt: Attempt, found: Precaution) -> None:
        found.waits, found.is_decided = set(attempt.members), False
        self._send(job, found, None)

    def _send(self, job: Job, found: Precaution, is_agreed: bool | None) -> None:
        attempt = job.attempts[found.attempt]
        order = PutEarly(job=job.name, attempt=found.attempt, step=found.step or 0, is_agreed=is_agreed)
        for host in sorted({member.host_id for member in attempt.members.values()}):
            self.out.send(host, order)

    def answered(self, call: Call[AnswerPutEarly]) -> None:
        """Take a rank's answer; once all have said yes, all are told, and before that at the first no."""
        request, active = call.request, attempt_of(self.state, self.out, call)
        if active is None:
            return
        self.out.answer(call, Noted())
        found = self.of.get(request.job)
        if found is None or found.is_decided or (found.attempt, found.step) != (request.attempt, request.step):
            return
        found.waits.discard(request.rank)
        if not request.is_possible:
            self._decide(active[0], found, f"rank {request.rank} had passed it")
        elif not found.waits:
            self._decide(active[0], found, "")

    def _decide(self, job: Job, found: Precaution, why_not: str) -> None:
        found.is_decided = True
        if found.attempt in job.attempts:
            self._send(job, found, not why_not)
        place = {"job": job.name, "attempt": found.attempt, "step": found.step}
        self.out.note("early_put", **place, why=found.why, why_not=why_not)
        found.step = None if why_not else found.step

    # -- time -----------------------------------------------------------------------------------

    def tick(self) -> None:
        """Look for signs, give up what was not answered, and have steps written."""
        self._look_at_hosts()
        for name, found in list(self.of.items()):
            job, now = self.state.jobs[name], self.state.now
            if not found.is_decided and now - found.since_s >= ANSWER_S:
                self._decide(job, found, f"{len(found.waits)} ranks did not answer within {ANSWER_S:g} s")
            if now - found.since_s < OVER_S:
                self._have_written(job, found)

    def _have_written(self, job: Job, found: Precaution) -> None:
        """Want the early put on durable storage once it is committed, or the newest step where there is none."""
        newest, durable, attempt = job.newest_committed, job.newest_durable, job.newest
        if newest is None or attempt is None or not attempt.config.get("durable") or not found.is_decided:
            return
        if found.notice_of and not self.state.is_draining(found.notice_of):
            return  # it stays
        if found.step is not None and newest < StepId(found.attempt, found.step):
            return
        if found.target is not None and durable is not None and durable >= found.target:
            return
        if found.target is None or not self.persists.is_wanted(job, found.target):
            found.target = newest
        self.persists.want(job, found.target)

    def forget(self, name: str) -> None:
        """Forget a removed job."""
        self.of.pop(name, None)
