"""Whether hosts with notice of their end can go: what only they have of kept steps. Pure (R29, R31).

Elsewhere is another live host that answers and has no notice, or durable storage, if it was found to hold the whole
step since the notice. Where too few hosts stay for all copies, kept steps are written to durable storage at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from memstore.core.cluster.effects import Effects
from memstore.core.cluster.facts import HostDraining
from memstore.core.cluster.job import Attempt, Call, Job
from memstore.core.cluster.state import ClusterState
from memstore.core.cluster.step_lookup import redundant_steps
from memstore.core.durable.checks import DurableChecks
from memstore.core.durable.persist import Persists
from memstore.core.wire.calls import AskLastCopies
from memstore.core.wire.replies import LastCopies as LostCopies
from memstore.core.wire.status_rows import DurableStep, ShortStep
from recovery.inventory import StepId

LOOK_AGAIN_S = 30.0  # between two checks that durable storage has the shards of a leaving host


@dataclass(slots=True)
class Remains:
    """What a host that is to go has of kept steps, and too few copies elsewhere have."""

    short: list[ShortStep] = field(default_factory=list)  # steps with shards below `replicas` in all tiers elsewhere
    durable: list[DurableStep] = field(default_factory=list)  # steps as short of copies that durable storage has

    @property
    def shards_count(self) -> int:
        """The shards that would be lost with the host."""
        return sum(row.shards for row in self.short)

    @property
    def may_come(self) -> bool:
        """Return whether copies elsewhere, or a durable one, may still be made."""
        return any(row.may_come for row in self.short)


class Departures:
    """Looks at durable storage for hosts that are to go, and reports what would be lost with them."""

    def __init__(self, state: ClusterState, out: Effects, checks: DurableChecks, persists: Persists) -> None:
        self.state, self.out, self.checks, self.persists = state, out, checks, persists
        self.looked_s: dict[tuple[str, StepId], float] = {}  # steps for which the storage is looked at, and when
        self.is_there: dict[tuple[str, StepId], bool] = {}  # results of looks: an old marker proves nothing

    def apply(self, fact: HostDraining) -> None:
        """Forget what durable storage had before a new notice."""
        if fact.until_s is not None:
            self.looked_s.clear()
            self.is_there.clear()

    def tick(self) -> None:
        """Have storage looked at for steps that hosts may leave to it, and stranded steps written there."""
        for job in self.state.jobs.values() if self.state.draining else ():
            attempt = job.newest
            held = redundant_steps(job, attempt) if attempt is not None else ()
            for step in held:
                if step in job.markers:
                    self._look_for(job, step)
                elif attempt is not None and attempt.config.get("durable") and self._is_stranded(job, attempt, step):
                    self.persists.want(job, step)

    def _is_stranded(self, job: Job, attempt: Attempt, step: StepId) -> bool:
        """Return whether a host with notice holds some of the step, and too few hosts stay for all copies of it."""
        is_held = any(step in job.on_host.get(host, {}) for host in self.state.draining)
        return is_held and len(self.state.hosts.domains(self._staying())) < attempt.replicas

    def _look_for(self, job: Job, step: StepId) -> None:
        """Have the storage looked at now and then, while a host may go because it has the step."""
        key = (job.name, step)
        if self.state.now - self.looked_s.get(key, float("-inf")) < LOOK_AGAIN_S:
            return

        def looked(unread: str, lacks: str) -> None:
            self.looked_s[key], self.is_there[key] = self.state.now, not unread and not lacks
            if unread or lacks:
                why = f"step {step.step} of job {job.name!r} is not safe on durable storage: {unread or lacks}"
                self.out.log(why, "warning")

        if self.checks.ask(job, step, looked):
            self.looked_s[key] = float("inf")

    def forget(self, name: str) -> None:
        """Forget a removed job and the looks at its steps."""
        self.looked_s = {key: s for key, s in self.looked_s.items() if key[0] != name}
        self.is_there = {key: is_there for key, is_there in self.is_there.items() if key[0] != name}

    def remains(self, host: str) -> Remains:
        """Return the shards that would be short of copies if the host went now; all empty without notice."""
        found = Remains()
        for job in self.state.jobs.values() if self.state.is_draining(host) else ():
            self._look(job, host, found)
        return found

    def _look(self, job: Job, host: str, found: Remains) -> None:
        attempt = job.newest
        if attempt is None:
            return
        staying = self._staying()
        reachable = min(attempt.replicas, len(self.state.hosts.domains(staying)))
        for step in sorted(redundant_steps(job, attempt), reverse=True):
            in_parity = [r for r, hosts in job.parity.get(step, {}).items() if host in hosts]
            ranks = {
                *job.on_host.get(host, {}).get(step, ()),
                *(o for r in in_parity for o in job.parity_sets(step)[r].ranks),
            }
            counts = [self._elsewhere_count(job, step, rank, staying) for rank in ranks]
            few = [count for count in counts if count < attempt.replicas]
            if few and step in job.markers and self.is_there.get((job.name, step)):
                found.durable.append(DurableStep(job=job.name, step=step.step, copies=min(few)))
            elif few:
                is_durable_on, is_in_parity = attempt.config.get("durable") is not None, bool(in_parity)
                found.short.append(
                    ShortStep(
                        job=job.name,
                        step=step.step,
                        shards=len(few),
                        copies=min(few),
                        replicas=attempt.replicas,
                        may_come=is_durable_on or (min(few) < reachable and not is_in_parity),
                        durable_problem=self.persists.problem(job, step) if is_durable_on else "",
                        in_parity=is_in_parity,
                    )
                )

    def _staying(self) -> set[str]:
        """Return the hosts to which a draining one may leave its copies."""
        hosts = self.state.hosts
        return {h for h in hosts.states if hosts.is_answering(h) and not self.state.is_draining(h)}

    def _elsewhere_count(self, job: Job, step: StepId, rank: int, staying: set[str]) -> int:
        digest, copies = job.commits[step].digests[rank], job.copies[step].get(rank, {}).items()
        whole = [h for h, copy in copies if h in staying and not copy.missing and copy.spec.digest == digest]
        return len(self.state.hosts.domains(whole)) + job.parity_copies(step, rank, staying)


# -- last copies --------------------------------------------------------------------------------------
# What would be lost for good with the copies in RAM: durable storage is looked at before that is reported. Pure
# (R19).


Look = tuple[str, StepId]  # a job's name, and a step that is looked for


@dataclass(slots=True)
class Question:
    """A question of a person who is about to free the RAM of some jobs."""

    call: Call[AskLastCopies]
    jobs: list[str]
    waits: set[Look] = field(default_factory=set)
    unread: dict[Look, str] = field(default_factory=dict)  # why the storage could not be looked at
    lacks: dict[Look, str] = field(default_factory=dict)  # what storage lacks of a step


class LastCopyFinder:
    """The open questions of people who are about to free RAM."""

    def __init__(self, state: ClusterState, out: Effects, checks: DurableChecks) -> None:
        self.state, self.out, self.checks = state, out, checks
        self.questions: list[Question] = []

    def ask(self, call: Call[AskLastCopies], jobs: Iterable[Job]) -> None:
        """Answer {lost: job -> what it would lose, in words}; jobs that would lose nothing are left out."""
        question = Question(call, [job.name for job in jobs])
        self.questions.append(question)
        looks = [(job, step) for job in map(self.state.jobs.__getitem__, question.jobs) for step in _instead(job)]
        question.waits = {(job.name, step) for job, step in looks}
        for job, step in looks:
            self._look(question, job, step)
        self._finish(question)

    def _look(self, question: Question, job: Job, step: StepId) -> None:
        look = (job.name, step)

        def looked(unread: str, lacks: str) -> None:
            question.waits.discard(look)
            (question.unread if unread else question.lacks)[look] = unread or lacks
            self._finish(question)

        if not self.checks.ask(job, step, looked):
            question.waits.discard(look)
            question.unread[look] = "no host that could look answers"

    def _finish(self, question: Question) -> None:
        if question.waits or question not in self.questions:
            return
        self.questions.remove(question)
        jobs = [self.state.jobs[name] for name in question.jobs if name in self.state.jobs]
        lost = {job.name: self._lost(question, job) for job in jobs}
        self.out.answer(question.call, LostCopies(lost={name: words for name, words in lost.items() if words}))

    def _lost(self, question: Question, job: Job) -> list[str]:
        """Return what a job would lose, in words: its newest committed step, and what is pinned."""
        newest, durable, lost = job.newest_committed, job.newest_durable, []
        why = [words for (name, _), words in question.lacks.items() if name == job.name and words]
        since = f": {'; '.join(why)}" if why else ""
        unread = {step: words for (name, step), words in question.unread.items() if name == job.name}
        if newest is not None and newest not in unread and (durable is None or durable.step < newest.step):
            known = "nothing of it is durable" if durable is None else f"durable is step {durable.step}"
            lost.append(f"step {newest.step} lives only in RAM ({known}){since}")
            since = ""
        named = [
            f"{name} (step {p.step})"
            for name, p in sorted(job.pins.items())
            if StepId(p.attempt, p.step) not in {*job.markers, *unread}
        ]
        if named:
            lost.append(f"what is pinned as {', '.join(named)} lives only in RAM{since}")
        return lost + [f"step {s.step} cannot be read on durable storage: {unread[s]}" for s in sorted(unread)]

    def forget(self, name: str) -> None:
        """Drop the looks at a removed job."""
        for question in list(self.questions):
            question.waits = {look for look in question.waits if look[0] != name}
            self._finish(question)


def _instead(job: Job) -> set[StepId]:
    """Return the steps that durable storage is said to have in place of what RAM keeps."""
    newest, durable = job.newest_committed, job.newest_durable
    pinned = {StepId(pin.attempt, pin.step) for pin in job.pins.values()}
    found = pinned & job.markers.keys()
    return found | {durable} if newest is not None and durable is not None and durable.step >= newest.step else found
