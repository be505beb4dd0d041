"""Rounds in which all ranks are told how many steps lie between two puts. Pure (R33).

all ranks asked --distance decided--> fact --spread--> answered; whoever asks later gets the same
"""

from __future__ import annotations

from memstore.core.cluster.effects import Effects
from memstore.core.cluster.facts import CadenceSet
from memstore.core.cluster.failures import mtbf_s
from memstore.core.cluster.job import Attempt, Call, Job
from memstore.core.cluster.state import ClusterState
from memstore.core.journal.replication import Journal
from memstore.core.schedule.put_interval import Measured, decide_steps, parse_put_every
from memstore.core.wire.measured import seconds


class CadenceRounds:
    """The rounds of all jobs."""

    def __init__(self, state: ClusterState, out: Effects, journal: Journal) -> None:
        self.state, self.out, self.journal = state, out, journal
        self.asked: dict[tuple[str, int, int], dict[int, Call]] = {}  # (job, attempt, step) -> rank -> call
        self.decided: set[tuple[str, int, int]] = set()  # the fact is spreading

    def ask(self, call: Call) -> None:
        """A rank has come to the step of a round."""
        job = self.state.jobs[str(call.body["job"])]
        attempt, step = job.newest, int(call.body["step"])
        if attempt is None or attempt.ordinal != call.body["attempt"]:
            self.out.refuse(call, "FencedError", f"job {job.name!r}: a newer attempt was opened")
            return
        if step in attempt.cadence:
            self.out.answer(call, {"steps": attempt.cadence[step]})
            return
        key = (job.name, attempt.ordinal, step)
        for old in [k for k in self.asked if k[0] == job.name and k[1:] < key[1:] and k not in self.decided]:
            for given_up in self.asked.pop(old).values():  # its attempt is over, or its ranks have gone on
                why = f"job {job.name!r}: the round of step {old[2]} was given up for that of step {step}"
                self.out.refuse(given_up, "FencedError" if old[1] < attempt.ordinal else "GatherTimeout", why)
        calls = self.asked.setdefault(key, {})
        calls[int(call.body["rank"])] = call
        if len(calls) == attempt.world_size and key not in self.decided:
            self.decided.add(key)
            steps = self._decide(job, attempt, list(calls.values()))
            self.journal.record(CadenceSet(job.name, attempt.ordinal, step, steps))

    def _decide(self, job: Job, attempt: Attempt, calls: list[Call]) -> int:
        ranks = [
            Measured(*(seconds(call.body.get(name)) for name in ("step_s", "stall_s", "commit_s"))) for call in calls
        ]
        failure_s = mtbf_s(self.state, job)
        last = attempt.cadence[max(attempt.cadence)] if attempt.cadence else 1
        steps = decide_steps(parse_put_every(attempt.config.get("put_every", "step")), ranks, failure_s, last)
        self.out.log(
            f"job {job.name!r}: every {steps} steps are put ({attempt.config.get('put_every')}): a step takes "
            f"{max(m.step_s for m in ranks):.3g} s, a put blocks {max(m.stall_s for m in ranks):.3g} s, is committed "
            f"after {max(m.commit_s for m in ranks):.3g} s, a failure every {failure_s / 3600:.3g} h"
        )
        return steps

    def apply(self, fact: CadenceSet) -> None:
        """The word has spread, so that a successor says the same: answer all."""
        job = self.state.jobs.get(fact.job)
        attempt = job.attempts.get(fact.attempt) if job is not None else None
        key = (fact.job, fact.attempt, fact.step)
        self.decided.discard(key)
        if attempt is not None:
            attempt.cadence[fact.step] = fact.steps
        for call in self.asked.pop(key, {}).values():
            self.out.answer(call, {"steps": fact.steps})

    def forget(self, name: str) -> None:
        """The job was removed."""
        for key in [k for k in self.asked if k[0] == name]:
            for call in self.asked.pop(key).values():
                self.out.refuse(call, "FencedError", f"job {name!r} was removed")
