"""Steps that are not offered again: a person says so, or a rank saw that its bytes are of two moments. Pure (R25)."""

from __future__ import annotations

from memstore.core.cluster.effects import Effects
from memstore.core.cluster.facts import StepRetired
from memstore.core.cluster.job import Call
from memstore.core.cluster.state import ClusterState
from memstore.core.journal.replication import Journal
from memstore.core.journal.waiters import Waiters
from memstore.core.restore.rounds import Rounds
from memstore.core.restore.single_read import job_of
from memstore.core.wire.calls import RetireStep
from memstore.core.wire.replies import Noted
from recovery.inventory import StepId


class Retirement:
    """Takes requests to retire steps, and makes their facts true."""

    def __init__(self, state: ClusterState, out: Effects, journal: Journal, waiters: Waiters, rounds: Rounds) -> None:
        self.state, self.out, self.journal, self.waiters, self.rounds = state, out, journal, waiters, rounds

    def ask(self, call: Call[RetireStep]) -> None:
        """Retire a step: by command, or because its rank saw that it is torn (R25)."""
        job, request = job_of(self.state, self.out, call), call.request
        if job is None:
            return
        reason = request.reason or "by request, without a reason"
        fact = StepRetired(job.name, request.attempt, request.step, reason, request.is_torn)
        if not self.waiters.is_awaited(fact):
            self.journal.record(fact)
        self.waiters.add(fact, call, Noted(), is_done_by_removal=True)

    def apply(self, fact: StepRetired) -> None:
        """Answer the call: the fact is replicated, so a successor has it too (R16)."""
        job = self.state.jobs.get(fact.job)
        if job is not None:  # else it was removed meanwhile
            job.retire(fact)
        if job is not None and fact.is_torn:
            self.rounds.torn(self.state.now, job, StepId(fact.attempt, fact.step))
