"""A rewind is collective: all ranks of an attempt go back to one step, which opens the next attempt. Pure (R20, R22).

asked --all ranks--> [markers listed, if RAM does not have the step] --> AttemptOpened and RestoreDecided recorded

The step is looked for in the lineage first. One of another lineage is taken if only one attempt has it, or if the
caller names the attempt: it was named by a person, nothing chose it.
"""

from __future__ import annotations

from memstore.core.attempts.gathering import Gathering, rewinding
from memstore.core.attempts.join import Attempts
from memstore.core.cluster.collective import attempt_of
from memstore.core.cluster.effects import Effects
from memstore.core.cluster.job import Attempt, Call, Job
from memstore.core.cluster.state import ClusterState
from memstore.core.cluster.step_lookup import Refusal, named_step
from memstore.core.cluster.text import plural
from memstore.core.durable.paths import storage_of
from memstore.core.targets.targets import ClusterView
from memstore.core.wire.calls import Rewind
from recovery.inventory import StepId
from recovery.lineage import Span
from recovery.planner import NONE, plan


class Rewinds:
    """Rewinds of all jobs; the ranks that wait are in `Attempts.gatherings`."""

    def __init__(self, state: ClusterState, out: Effects, view: ClusterView, attempts: Attempts) -> None:
        self.state, self.out, self.view, self.attempts = state, out, view, attempts

    def ask(self, call: Call[Rewind]) -> None:
        """Handle a rank's call to go back; refuse an impossible one at once."""
        request, attempts, found = call.request, self.attempts, attempt_of(self.state, self.out, call)
        if found is None:
            return
        job, attempt = found
        wanted = (request.step, request.of_attempt)
        to, refusal = self._find(job, attempt, *wanted)
        if refusal is not None and attempt.config.get("durable") is None:
            self.out.refuse(call, *refusal)
            return
        gathering = attempts.gatherings.get(job.name)
        if gathering is None or gathering.rewind != wanted:
            attempts.dismiss(
                job.name, "FencedError", f"job {job.name!r}: another rank rewinds to step {wanted[0]} meanwhile"
            )
            gathering = Gathering(attempt.key, attempt.world_size, rewind=wanted, rewind_to=to)
            attempts.gatherings[job.name] = gathering
        gathering.joins[request.rank] = rewinding(call, attempt)
        if len(gathering.joins) < attempt.world_size or gathering.markers_call:
            return
        if gathering.rewind_to is not None:
            attempts.open(job.name, gathering)
            return
        waiting = gathering
        attempts.list_markers(
            self.state.now,
            job.name,
            waiting,
            storage_of(attempt.config),
            lambda why: self._markers_listed(job.name, waiting, why),
        )

    def _markers_listed(self, name: str, gathering: Gathering, why: str) -> None:
        """Take the list of durable steps, or `why` there is none: choose the step, or refuse it on all ranks."""
        job, attempts = self.state.jobs[name], self.attempts
        attempt = job.newest
        if attempt is None or gathering.rewind is None:
            return
        gathering.rewind_to, refusal = self._find(job, attempt, *gathering.rewind)
        if refusal is not None:
            error, message = refusal
            attempts.dismiss(name, error, f"{message}. Durable storage could not be read: {why}" if why else message)
        else:
            attempts.open(name, gathering)

    def _find(
        self, job: Job, attempt: Attempt, number: int, of_attempt: int | None
    ) -> tuple[StepId | None, Refusal | None]:
        """Return the step to go back to, or why there is none."""
        option = f"store.rewind({number}, attempt=...)"
        step, refusal = named_step(job, number, of_attempt, among={*job.commits, *job.markers}, option=option)
        if step is not None:
            refusal = self._refusal(job, attempt, step)
        return (step, None) if refusal is None else (None, refusal)

    def _refusal(self, job: Job, attempt: Attempt, step: StepId) -> Refusal | None:
        name = f"step {step.step} (attempt {step.attempt}) of job {job.name!r}"
        if step in job.retired:
            way = "" if step in job.torn else f". `memstore verify {job.name}` lifts it"
            return "RecoveryError", f"{name} is retired: {job.retired[step]}{way}"
        commit = job.commits.get(step)
        size = commit.world_size if commit is not None else job.markers[step].world_size
        if size != attempt.world_size:
            return "WorldSizeError", (
                f"{name} was put by {plural(size, 'rank')}, this attempt has {attempt.world_size}: start "
                f"{plural(size, 'rank')} to go on from it, read single shards with get(step, rank=r), or, where ranks "
                "hold equal state (DDP), put with connect(shard_rank=0, shard_count=1), whose steps any number of "
                "ranks gets"
            )
        result = plan(
            job.inventory(live=self.state.hosts.live_ids(), silent=self.view.silent_hosts(job)),
            (Span(step.attempt, step.step),),
            world_size=size,
            rank_hosts={rank: member.host_id for rank, member in attempt.members.items()},
            only_step=step,
        )
        if result.verdict == NONE:
            return "RecoveryError", f"{name} is not whole any more, so nothing can go on from it: {result.why}"
        return None
