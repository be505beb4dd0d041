"""What would be lost for good with the copies in RAM: durable storage is looked at before that is reported. Pure (R19).

asked --a host looks for every step that makes up for the copies--> answered: of each job what nothing else has
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from memstore.core.cluster.effects import Effects
from memstore.core.cluster.job import Call, Job
from memstore.core.cluster.state import ClusterState
from memstore.core.durable.checks import DurableChecks
from memstore.core.wire.calls import AskLastCopies
from memstore.core.wire.replies import LastCopies as LostCopies
from recovery.inventory import StepId

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
