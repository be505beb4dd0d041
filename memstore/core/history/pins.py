"""Steps that people treat by name: pinned, trusted, or not offered again. Pure (R10, R19, R25, R38).

A pin: a committed step that a person named stays in RAM, in room of its own.

asked --whole in RAM--> room claimed on every host --StepPinned spread--> pinned --StepUnpinned spread--> not pinned
                                                                            '--trust alone: a newer one is--> moved
"""

from __future__ import annotations

from memstore.config import check_name
from memstore.core.capacity import Reservations, Retention
from memstore.core.cluster.effects import Effects
from memstore.core.cluster.facts import Fact, StepPinned, StepRetired, StepUnpinned
from memstore.core.cluster.job import TRUSTED, Call, Job
from memstore.core.cluster.state import ClusterState
from memstore.core.cluster.step_lookup import named_step, why_not_whole
from memstore.core.cluster.text import listed_pins
from memstore.core.journal.replication import Journal, Waiters
from memstore.core.restore.rounds import Rounds
from memstore.core.restore.single_read import job_of
from memstore.core.wire.calls import PinStep, RetireStep, UnpinStep
from memstore.core.wire.replies import Noted, PinNoted
from memstore.errors import ConfigError
from recovery.inventory import StepId
from recovery.lineage import in_lineage


class Pins:
    """Pins of all jobs."""

    def __init__(
        self,
        state: ClusterState,
        out: Effects,
        journal: Journal,
        waiters: Waiters,
        room: Reservations,
        retention: Retention,
    ) -> None:
        self.state, self.out, self.journal, self.waiters = state, out, journal, waiters
        self.room, self.retention = room, retention
        state.holds.add("a pin", self._held, is_in_use=False)

    def _held(self, job: Job) -> set[StepId]:
        return set(job.pins_and_asked())

    # -- pin ----------------------------------------------------------------------------------

    def pin(self, job: Job, call: Call[PinStep]) -> None:
        """Name a step of a job; asked again with the same step it is the same pin. Trust only moves on (R38)."""
        request, attempt = call.request, job.newest
        try:
            name = check_name("pin", request.name)
        except ConfigError as error:
            self.out.refuse(call, "ConfigError", str(error))
            return
        step, refusal = named_step(
            job, request.step, request.of_attempt, among={*job.commits, *job.markers}, option="attempt= or --attempt"
        )
        if step is None or attempt is None:
            what = f"hosts hold copies of job {job.name!r}, but its history is not known: connect to it first"
            self.out.refuse(call, *(refusal or ("RecoveryError", what)))
            return
        known = job.pins.get(name)
        if known is not None and (_step_of(known) == step or (name == TRUSTED and _is_behind(job, step, known))):
            self.out.answer(call, _answer(known))
            return
        asked = job.pin_asked
        if asked is not None and (asked.name, asked.attempt, asked.step) == (name, step.attempt, step.step):
            self._wait(call, asked, asked)
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
        job.pin_asked = fact
        self._wait(call, fact, fact)
        self.room.claim(job, attempt, lambda host, why: self._claimed(job, fact, host, why))

    def _refusal(self, job: Job, step: StepId, name: str) -> tuple[str, str] | None:
        what = f"step {step.step} (attempt {step.attempt}) of job {job.name!r} cannot be {_done(name)}"
        known = job.pins.get(name)
        if known is not None and name != TRUSTED:
            return "ConfigError", (
                f"job {job.name!r} has a pin {name!r}, on step {known.step} of attempt {known.attempt}: take another "
                f"name, or `memstore unpin {job.name} {name}` first"
            )
        if job.pin_asked is not None:
            return "JobBusyError", f"another pin of job {job.name!r} is being made: ask again in a moment"
        if step in job.retired:
            return "RecoveryError", f"{what}: it is retired: {job.retired[step]}"
        lacking = why_not_whole(self.state.hosts, job, step)
        return ("RecoveryError", f"{what}: {lacking}") if lacking else None

    def _claimed(self, job: Job, fact: StepPinned, host: str, why: str) -> None:
        """Record a pin for which every host has the room; if one has not, nothing has changed (R10)."""
        if not why:
            self.journal.record(fact)
            return
        job.pin_asked = None
        if job.newest is not None:
            self.room.order(job, job.newest)  # the others give the room back
        pins = f" beside {listed_pins(job)}" if job.pins else ""
        noun = "trusted step" if fact.name == TRUSTED else "pin"
        self.waiters.refuse(
            fact,
            "CapacityError",
            f"step {fact.step} of job {job.name!r} cannot be {_done(fact.name)}: a {noun} takes room of its own, and "
            f"it does not fit{pins} on {host}: {why}",
        )

    def apply_pinned(self, fact: StepPinned, *, is_replay: bool) -> None:
        """Apply the replicated pin: retention keeps the step, and no more the one from which trust moved on."""
        job = self.state.job(fact.job)
        before, job.pins[fact.name] = job.pins.get(fact.name), fact
        job.distrusted.discard(_step_of(fact))
        if not is_replay and job.pin_asked == fact:
            job.pin_asked = None
        if not is_replay and before is not None:
            self._let_go(job)

    # -- unpin --------------------------------------------------------------------------------

    def unpin(self, job: Job, call: Call[UnpinStep]) -> None:
        """Take a name back."""
        name = call.request.name
        pin, fact = job.pins.get(name), StepUnpinned(job.name, name)
        if pin is None:
            have = listed_pins(job) or "none"
            self.out.refuse(call, "ConfigError", f"job {job.name!r} has no pin {name!r}: it has {have}")
            return
        if not self.waiters.is_awaited(fact):
            self.journal.record(fact)
        self._wait(call, fact, pin)

    def apply_unpinned(self, fact: StepUnpinned, *, is_replay: bool) -> None:
        """Apply the end of a pin: free its room, and drop the step if nothing else keeps it."""
        job = self.state.jobs.get(fact.job)
        pin = job.pins.pop(fact.name, None) if job is not None else None
        if is_replay or job is None:
            return
        if pin is not None and fact.name == TRUSTED:
            job.distrusted.add(_step_of(pin))
        self._let_go(job)

    def _let_go(self, job: Job) -> None:
        self.retention.retain(job)
        if job.newest is not None:
            self.room.order(job, job.newest)

    def _wait(self, call: Call[PinStep] | Call[UnpinStep], fact: Fact, pin: StepPinned) -> None:
        self.waiters.add(fact, call, _answer(pin))


def _step_of(pin: StepPinned) -> StepId:
    return StepId(pin.attempt, pin.step)


def _is_behind(job: Job, step: StepId, pin: StepPinned) -> bool:
    """Return whether a newer step is trusted already, and could be gone on from: a late rank moves trust never back."""
    trusted, spans = _step_of(pin), job.spans(job.present_number)
    return step < trusted and in_lineage(spans, trusted) and trusted not in job.retired


def _done(name: str) -> str:
    return "trusted" if name == TRUSTED else "pinned"


def _answer(pin: StepPinned) -> PinNoted:
    return PinNoted(job=pin.job, name=pin.name, attempt=pin.attempt, step=pin.step)


# -- retirement ---------------------------------------------------------------------------------------
# Steps that are not offered again: a person says so, or a rank saw that its bytes are of two moments. Pure (R25).


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
