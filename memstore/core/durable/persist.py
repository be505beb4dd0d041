"""Steps that are written to durable storage out of turn: a caller asks for it, or their hosts are to go. Pure (R31).

asked --has a marker--> looked for on the storage, now --all there--> answered
  |                         '--something is missing--> written
  '--> written ahead of the schedule, again after a failure --marker--> answered
                 '--not within its time--> answered all the same, with what went wrong

All callers for one step wait for one write; a caller for the newest step takes a newer one too. A write that the
schedule began makes way for it; it makes way for none.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from memstore.core.cluster.collective import job_removed
from memstore.core.cluster.effects import Effects, PersistAsked
from memstore.core.cluster.job import Attempt, Call, Job
from memstore.core.cluster.state import ClusterState
from memstore.core.cluster.step_lookup import Refusal, named_step, why_not_whole
from memstore.core.durable.checks import DurableChecks
from memstore.core.durable.states import DurableStates
from memstore.core.schedule import retire
from memstore.core.wire.calls import PersistStep
from memstore.core.wire.replies import Persisted
from recovery.inventory import StepId
from recovery.lineage import in_lineage

AGAIN_S = 2.0  # between a write that failed and the next one
WANTED_S = 2.0  # how long a step is wanted without a waiting caller, unless it is wanted again
WITHIN_MAX_S = 86_400.0
HOSTS_SHOWN_MAX = 3


@dataclass(slots=True)
class PersistWish:
    """A step that is wanted to be durable."""

    calls: list[Call[PersistStep]] = field(default_factory=list)
    is_looked_for: bool = False  # on the storage, for it has a marker
    tried_s: float = -math.inf
    until_s: float = -math.inf  # wanted until then although no caller waits for the answer

    def take_newest(self) -> list[Call[PersistStep]]:
        """Take out the callers for the newest step, who take a newer one too."""
        taken = [call for call in self.calls if call.request.step is None]
        self.calls = [call for call in self.calls if call not in taken]
        return taken


class Persists:
    """Steps that are wanted on durable storage now, of all jobs."""

    def __init__(self, state: ClusterState, out: Effects, states: DurableStates, checks: DurableChecks) -> None:
        self.state, self.out, self.states, self.checks = state, out, states, checks
        self.wishes: dict[str, dict[StepId, PersistWish]] = {}

    def ask(self, job: Job, call: Call[PersistStep]) -> None:
        """Make a step durable now; answered when it is."""
        within_s, attempt = call.request.within_s, job.newest
        if attempt is None or not attempt.config.get("durable"):
            why = f'job {job.name!r} has no durable storage: connect with Config(durable="/a/shared/directory")'
            self.out.refuse(call, "ConfigError", why)
            return
        if not 0 < within_s <= WITHIN_MAX_S:
            why = f"within {within_s:g} s: the write must have some time, at most {WITHIN_MAX_S:g} s"
            self.out.refuse(call, "ConfigError", why)
            return
        step, refusal = self._named(job, call.request.step)
        refusal = refusal if step is None else self._refusal(job, attempt, step)
        if step is None or refusal is not None:
            self.out.refuse(call, *(refusal or ("RecoveryError", f"job {job.name!r} has no committed step")))
            return
        wish = self.wishes.setdefault(job.name, {}).setdefault(step, PersistWish())
        wish.calls.append(call)
        if step in job.markers and not wish.is_looked_for:
            wish.is_looked_for = self._look(job, step)
        self.out.emit(PersistAsked(job))

    def _named(self, job: Job, number: int | None) -> tuple[StepId | None, Refusal | None]:
        return named_step(
            job,
            number,
            None,
            among={*job.commits, *job.markers},
            option="`memstore export JOB STEP FOLDER --format dcp --attempt N`",
        )

    def want(self, job: Job, step: StepId) -> None:
        """Have a committed step written although no caller waits; to be called again within WANTED_S."""
        if job.newest is not None and self._refusal(job, job.newest, step) is None:
            self.wishes.setdefault(job.name, {}).setdefault(step, PersistWish()).until_s = self.state.now + WANTED_S

    def _refusal(self, job: Job, attempt: Attempt, step: StepId) -> Refusal | None:
        what = f"step {step.step} (attempt {step.attempt}) of job {job.name!r} cannot be made durable"
        if step in job.retired:
            return "RecoveryError", f"{what}: it is retired: {job.retired[step]}"
        spans = job.spans(attempt.attempt_number)
        if not in_lineage(spans, step):
            return "RecoveryError", f"{what}: the job went on without it; `memstore export` keeps it in a file"
        if step in job.markers:
            return None
        lacking = why_not_whole(self.state.hosts, job, step)
        if not lacking and not self.states.is_whole(job, step):
            lacking = "no host has all of some rank's shard yet: ask again when repair has ended (`memstore status`)"
        if lacking:
            return "RecoveryError", f"{what}: {lacking}"
        key, keep = self.states.of(job.name).key or "", int(attempt.config["durable_keep"])
        keys = {s: marker.key for s, marker in job.markers.items() if in_lineage(spans, s)}
        if step in retire({**keys, step: key}, keep, key):
            return "ConfigError", (
                f"{what}: durable_keep={keep} keeps {keep} newer steps and would remove it at once; "
                "`memstore export` keeps it in a file"
            )
        return None

    def _look(self, job: Job, step: StepId) -> bool:
        return self.checks.ask(job, step, lambda unread, lacks: self._looked(job, step, unread, lacks))

    def _looked(self, job: Job, step: StepId, unread: str, lacks: str) -> None:
        """Take a look at the storage: the step is there, or is to be written."""
        wish = self.wishes.get(job.name, {}).get(step)
        if wish is None:
            return
        wish.is_looked_for = False
        if unread:
            wish.tried_s = self.state.now
        elif not lacks:
            self.written(job, step)

    def wanted(self, job: Job) -> StepId | None:
        """Return the step to write before all others, the newest that is asked for; None if there is none."""
        found = (
            step
            for step, wish in self.wishes.get(job.name, {}).items()
            if not wish.is_looked_for and step not in job.markers and self.states.is_whole(job, step)
        )
        return max(found, default=None)

    def is_due(self, job: Job, step: StepId) -> bool:
        """Return whether no write of it has failed just now."""
        return self.state.now - self.wishes[job.name][step].tried_s >= AGAIN_S

    def is_wanted(self, job: Job, step: StepId) -> bool:
        """Return whether a caller waits for a step's write."""
        return step in self.wishes.get(job.name, {})

    def tried(self, job: Job, step: StepId) -> None:
        """Note that a write of the step failed, or is given up."""
        if self.is_wanted(job, step):
            self.wishes[job.name][step].tried_s = self.state.now

    def refuse(self, job: Job, step: StepId, refusal: Refusal) -> None:
        """Refuse a step that cannot become durable at present."""
        wish = self.wishes.get(job.name, {}).pop(step, PersistWish())
        for call in wish.calls:
            self.out.refuse(call, *refusal)

    def written(self, job: Job, step: StepId) -> None:
        """Answer for a durable step; older steps that are asked for may not stay in storage any more."""
        wishes = self.wishes.get(job.name, {})
        calls = wishes.pop(step, PersistWish()).calls
        for older in [wish for s, wish in wishes.items() if s < step]:
            calls += older.take_newest()
        for call in calls:
            self._answer(job, step, call, "")
        for other in [s for s in wishes if s < step]:
            refusal = self._refusal(job, job.newest, other) if job.newest is not None else None
            if refusal is not None and refusal[0] == "ConfigError":
                self.refuse(job, other, refusal)

    def _answer(self, job: Job, step: StepId, call: Call[PersistStep], problem: str) -> None:
        at = {"attempt": step.attempt, "step": step.step}
        self.out.answer(call, Persisted(job=job.name, **at, is_durable=not problem, problem=problem))

    def tick(self, now: float) -> None:
        """Check deadlines, retired steps, and markers that no host was asked for."""
        for name, wishes in list(self.wishes.items()):
            job = self.state.jobs[name]
            for step, wish in list(wishes.items()):
                if step in job.retired and job.newest is not None:
                    self.refuse(job, step, self._refusal(job, job.newest, step) or ("RecoveryError", "it is retired"))
                    continue
                if step in job.markers and not wish.is_looked_for and self.is_due(job, step):
                    wish.is_looked_for = self._look(job, step)
                self._go_on(job, step, wish)
                late = [call for call in wish.calls if now - call.since_s >= call.request.within_s]
                wish.calls = [call for call in wish.calls if call not in late]
                for call in late:
                    self._answer(job, step, call, self.problem(job, step))
                if not wish.calls and now > wish.until_s:
                    del wishes[step]

    def _go_on(self, job: Job, step: StepId, wish: PersistWish) -> None:
        """Move the callers for the newest step to a newer one, once training has left theirs behind."""
        newest = self._named(job, None)[0]
        if newest is not None and newest > step and step not in job.markers and not self.states.is_whole(job, step):
            calls = wish.take_newest()
            self.wishes[job.name].setdefault(newest, PersistWish()).calls += calls

    def problem(self, job: Job, step: StepId) -> str:
        """Return why a step's write waits, or why it failed."""
        state = self.states.of(job.name)
        write = state.writes.get(step)
        if write is not None:
            hosts = set(write.waits.values())
            return f"{_named(hosts)} still write{'s' if len(hosts) == 1 else ''}"
        first = next((other for other in state.writes if self.is_wanted(job, other)), None)
        if first is not None:
            return f"step {first.step} is written first"
        seen = state.problem or state.lacks or state.unread
        looking = self.checks.looking(job, step)
        if seen or looking:
            return seen or f"waiting for {_named(looking)}, asked whether durable storage has all of it"
        lacking = why_not_whole(self.state.hosts, job, step)
        return lacking or f"no host has all of some rank's shard of step {step.step}, or it is not its turn yet"

    def forget(self, name: str) -> None:
        """Forget a removed job."""
        for wish in self.wishes.pop(name, {}).values():
            for call in wish.calls:
                self.out.refuse(call, *job_removed(name))


def _named(hosts: Collection[str]) -> str:
    shown, more = sorted(hosts)[:HOSTS_SHOWN_MAX], len(hosts) - HOSTS_SHOWN_MAX
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")
