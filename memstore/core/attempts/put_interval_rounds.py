"""Rounds in which all ranks are sent how many steps lie between two puts. Pure (R33).

all ranks asked --distance decided--> fact --replicated--> answered; a rank that asks later gets the same
"""

from __future__ import annotations

from memstore.core.cluster.collective import attempt_of, job_removed
from memstore.core.cluster.effects import Effects
from memstore.core.cluster.facts import PutIntervalSet
from memstore.core.cluster.failures import mtbf_s
from memstore.core.cluster.job import Attempt, Call, Job
from memstore.core.cluster.rank_calls import RankCalls
from memstore.core.cluster.state import ClusterState
from memstore.core.journal.replication import Journal
from memstore.core.journal.waiters import Waiters
from memstore.core.schedule.put_interval import Measured, decide_steps
from memstore.core.wire.calls import AskPutInterval
from memstore.core.wire.measured import seconds
from memstore.core.wire.replies import PutInterval
from memstore.intervals import parse_put_every


class PutIntervalRounds:
    """The rounds of all jobs."""

    def __init__(self, state: ClusterState, out: Effects, journal: Journal, waiters: Waiters) -> None:
        self.state, self.out, self.journal, self.waiters = state, out, journal, waiters
        self.asked: dict[tuple[str, int, int], RankCalls[AskPutInterval]] = {}  # by job, attempt and step
        self.decided: dict[tuple[str, int, int], PutIntervalSet] = {}  # recorded, not in enough journals yet

    def ask(self, call: Call[AskPutInterval]) -> None:
        """Handle the call of a rank that has reached the step of a round."""
        found = attempt_of(self.state, self.out, call)
        if found is None:
            return
        (job, attempt), step = found, call.request.step
        if step in attempt.put_intervals:
            self.out.answer(call, PutInterval(steps=attempt.put_intervals[step]))
            return
        key = (job.name, attempt.attempt_number, step)
        if key in self.decided:
            self._wait(self.decided[key], call)
            return
        for old in [k for k in self.asked if k[0] == job.name and k[1:] < key[1:]]:
            # Its attempt is over, or its ranks have gone on.
            why = f"job {job.name!r}: the round of step {old[2]} was given up for that of step {step}"
            error = "FencedError" if old[1] < attempt.attempt_number else "GatherTimeout"
            self.asked.pop(old).refuse_all(self.out, error, why)
        calls = self.asked.setdefault(key, RankCalls[AskPutInterval]())
        calls[call.request.rank] = call
        if len(calls) == attempt.world_size:
            steps = self._decide(job, attempt, list(calls.values()))
            fact = self.decided[key] = PutIntervalSet(job.name, attempt.attempt_number, step, steps)
            self.journal.record(fact)
            for each in self.asked.pop(key).values():
                self._wait(fact, each)

    def _wait(self, fact: PutIntervalSet, call: Call[AskPutInterval]) -> None:
        self.waiters.add(fact, call, PutInterval(steps=fact.steps))

    def _decide(self, job: Job, attempt: Attempt, calls: list[Call[AskPutInterval]]) -> int:
        ranks = [
            Measured(*map(seconds, (asked.step_s, asked.stall_s, asked.commit_s)))
            for asked in (call.request for call in calls)
        ]
        failure_s = mtbf_s(self.state, job)
        last = attempt.put_intervals[max(attempt.put_intervals)] if attempt.put_intervals else 1
        steps = decide_steps(parse_put_every(attempt.config.get("put_every", "step")), ranks, failure_s, last)
        self.out.log(
            f"job {job.name!r}: every {steps} steps are put ({attempt.config.get('put_every')}): a step takes "
            f"{max(m.step_s for m in ranks):.3g} s, a put blocks {max(m.stall_s for m in ranks):.3g} s, is committed "
            f"after {max(m.commit_s for m in ranks):.3g} s, a failure every {failure_s / 3600:.3g} h"
        )
        return steps

    def apply(self, fact: PutIntervalSet) -> None:
        """Answer all ranks: the fact is replicated, so a successor gives the same answer."""
        job = self.state.jobs.get(fact.job)
        attempt = job.attempts.get(fact.attempt) if job is not None else None
        key = (fact.job, fact.attempt, fact.step)
        self.decided.pop(key, None)
        if attempt is not None:
            attempt.put_intervals[fact.step] = fact.steps

    def forget(self, name: str) -> None:
        """Forget a removed job."""
        for key in [k for k in self.asked if k[0] == name]:
            self.asked.pop(key).refuse_all(self.out, *job_removed(name))
