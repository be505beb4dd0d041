"""Named pins: a committed step that a person named stays in RAM, in room of its own. Pure (R10, R19).

asked --whole in RAM--> room claimed on every host --StepPinned spread--> pinned --StepUnpinned spread--> not pinned
"""

from __future__ import annotations

from dataclasses import dataclass, field

from memstore.config import check_name
from memstore.core.capacity.reservations import Room
from memstore.core.capacity.retention import Retention
from memstore.core.cluster.effects import Effects
from memstore.core.cluster.facts import StepPinned, StepUnpinned
from memstore.core.cluster.job import Call, Job
from memstore.core.cluster.state import ClusterState
from memstore.core.cluster.step_lookup import named_step, why_not_whole
from memstore.core.cluster.text import listed_pins
from memstore.core.journal.replication import Journal
from memstore.errors import ConfigError
from recovery.inventory import StepId


@dataclass(slots=True)
class Pending:
    """A pin whose room is being claimed, or whose fact is spreading."""

    fact: StepPinned
    calls: list[Call] = field(default_factory=list)


class Pins:
    """Pins of all jobs."""

    def __init__(self, state: ClusterState, out: Effects, journal: Journal, room: Room, retention: Retention) -> None:
        self.state, self.out, self.journal, self.room, self.retention = state, out, journal, room, retention
        self.pending: dict[str, Pending] = {}  # by job: one at a time
        self.unpinning: dict[tuple[str, str], list[Call]] = {}
        state.holds.add("a pin", self._held, is_in_use=False)

    def _held(self, job: Job) -> set[StepId]:
        return set(job.pins_and_asked())

    # -- pin ----------------------------------------------------------------------------------

    def pin(self, job: Job, call: Call) -> None:
        """Name a step of a job; asked again with the same step it is the same pin."""
        body, attempt = call.body, job.newest
        try:
            name = check_name("pin", body.get("name"))
        except ConfigError as error:
            self.out.refuse(call, "ConfigError", str(error))
            return
        step, refusal = named_step(
            job, None if body["step"] is None else int(body["step"]), body.get("of_attempt"),
            among={*job.commits, *job.markers}, option="attempt= or --attempt",
        )  # fmt: skip
        if step is None or attempt is None:
            what = f"job {job.name!r} has copies and no attempt: connect to it first"
            self.out.refuse(call, *(refusal or ("RecoveryError", what)))
            return
        known = job.pins.get(name)
        if known is not None and (known.attempt, known.step) == (step.attempt, step.step):
            self._answer(call, known)
            return
        pending = self.pending.get(job.name)
        if pending is not None and (pending.fact.name, self._step(pending.fact)) == (name, step):
            pending.calls.append(call)
            return
        refusal = self._refusal(job, step, name)
        if refusal is not None:
            self.out.refuse(call, *refusal)
            return
        needs = tuple(
            next(iter(job.copies[step][rank].values())).spec.chunks_count
            for rank in range(job.commits[step].world_size)
        )
        fact = StepPinned(job.name, name, step.attempt, step.step, needs, self.state.wall_s)
        self.pending[job.name], job.pin_asked = Pending(fact, [call]), fact
        self.room.claim(job, attempt, lambda host, why: self._claimed(job, host, why))

    def _refusal(self, job: Job, step: StepId, name: str) -> tuple[str, str] | None:
        what = f"step {step.step} (attempt {step.attempt}) of job {job.name!r} cannot be pinned"
        known = job.pins.get(name)
        if known is not None:
            return "ConfigError", (
                f"job {job.name!r} has a pin {name!r}, on step {known.step} of attempt {known.attempt}: take another "
                f"name, or `memstore unpin {job.name} {name}` first"
            )
        if job.name in self.pending:
            return "JobBusyError", f"another pin of job {job.name!r} is being made: ask again in a moment"
        if step in job.retired:
            return "RecoveryError", f"{what}: it is retired: {job.retired[step]}"
        lacking = why_not_whole(self.state.hosts, job, step)
        return ("RecoveryError", f"{what}: {lacking}") if lacking else None

    def _claimed(self, job: Job, host: str, why: str) -> None:
        """Every host has the room, or one has not: then nothing has changed (R10)."""
        pending = self.pending[job.name]
        if not why:
            self.journal.record(pending.fact)
            return
        del self.pending[job.name]
        job.pin_asked = None
        if job.newest is not None:
            self.room.order(job, job.newest)  # the others give the room back
        step, pins = pending.fact.step, f"; its pins are {listed_pins(job)}" if job.pins else ""
        for call in pending.calls:
            self.out.refuse(
                call, "CapacityError",
                f"step {step} of job {job.name!r} cannot be pinned: a pin takes room of its own, and it does not fit "
                f"on {host}: {why}{pins}",
            )  # fmt: skip

    def apply_pinned(self, fact: StepPinned, *, is_replay: bool) -> None:
        """The name has spread: retention leaves the step alone."""
        job = self.state.jobs.setdefault(fact.job, Job(fact.job))
        job.pins[fact.name] = fact
        pending = self.pending.get(fact.job)
        if not is_replay and pending is not None and pending.fact == fact:
            del self.pending[fact.job]
            job.pin_asked = None
            for call in pending.calls:
                self._answer(call, fact)

    # -- unpin --------------------------------------------------------------------------------

    def unpin(self, job: Job, call: Call) -> None:
        """Take a name back."""
        name = str(call.body.get("name"))
        if name not in job.pins:
            have = listed_pins(job) or "none"
            self.out.refuse(call, "ConfigError", f"job {job.name!r} has no pin {name!r}: it has {have}")
            return
        waiting = self.unpinning.setdefault((job.name, name), [])
        waiting.append(call)
        if len(waiting) == 1:
            self.journal.record(StepUnpinned(job.name, name))

    def apply_unpinned(self, fact: StepUnpinned, *, is_replay: bool) -> None:
        """The name is gone: the step goes too if nothing else keeps it, and so does its room."""
        job = self.state.jobs.get(fact.job)
        pin = job.pins.pop(fact.name, None) if job is not None else None
        if is_replay or job is None:
            return
        self.retention.retain(job)
        if job.newest is not None:
            self.room.order(job, job.newest)
        for call in self.unpinning.pop((fact.job, fact.name), []):
            if pin is not None:
                self._answer(call, pin)

    # -- for both -----------------------------------------------------------------------------

    def forget(self, name: str) -> None:
        """The job was removed, and its pins with it."""
        pending = self.pending.pop(name, None)
        calls = pending.calls if pending is not None else []
        for key in [key for key in self.unpinning if key[0] == name]:
            calls = calls + self.unpinning.pop(key)
        for call in calls:
            self.out.refuse(call, "FencedError", f"job {name!r} was removed")

    def _answer(self, call: Call, pin: StepPinned) -> None:
        body = {"job": pin.job, "name": pin.name, "attempt": pin.attempt, "step": pin.step}
        self.out.answer(call, body)

    @staticmethod
    def _step(pin: StepPinned) -> StepId:
        return StepId(pin.attempt, pin.step)
