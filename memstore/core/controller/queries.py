"""What people and readers may ask, and which part answers. Pure; changes no attempt (R27)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from memstore.core.attempts.join import come_text, launch
from memstore.core.cluster.facts import StepRetired
from memstore.core.cluster.job import Attempt, Call, Job
from memstore.core.cluster.text import named_hosts
from memstore.core.controller.parts import Parts
from memstore.core.report.timeline import steps_of
from memstore.core.restore.rounds import awaited_by_get, named_ranks
from memstore.core.restore.single_read import first_number, job_of
from memstore.core.wire import calls
from memstore.core.wire.calls import VerifyStore
from memstore.core.wire.codec import Request
from memstore.core.wire.orders import VerifyCopies
from memstore.core.wire.replies import HostVerified, Noted, RollCalled, VerifyResult
from memstore.core.wire.reports import CopiesVerified

ASK_DEADLINE_S = 300.0  # re-digesting a large host takes a while; a host that answers later is left out


@dataclass(slots=True)
class HostQuery:
    """A question put to every live host."""

    call: Call[VerifyStore]
    waits: set[str]
    found: dict[str, HostVerified] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    died: set[str] = field(default_factory=set)  # hosts that died before they answered


class Queries:
    """Questions of people and readers; those that every live host must answer stand here until all have."""

    def __init__(self, parts: Parts) -> None:
        self.state, self.out, self.parts = parts.state, parts.out, parts
        self.asks: dict[int, HostQuery] = {}
        # Made since the last tick, by job and verb: all ranks that wait ask at the same moment.
        self.roll_calls: dict[tuple[str, str], RollCalled] = {}
        self._count = first_number(parts.term)
        self._handlers: Mapping[type[Request[Any]], Callable[[Any], None]] = {
            calls.Join: lambda call: parts.attempts.join(parts.state.now, call),
            calls.DrainHost: parts.drains.ask,
            calls.AskStatus: self._status,
            calls.AskRollCall: self._roll_call,
            calls.AskSteps: self._steps,
            VerifyStore: self._verify,
            calls.AskEvents: self._events,
            calls.NoteDrill: self._note_drill,
            calls.AskLastCopies: self._last_copies,
            calls.AskPlan: parts.dry_runs.ask,
            calls.ReadStep: lambda call: parts.reads.read(call, call.request),
            calls.RemoveJob: parts.job_removal.ask,
            calls.RetireStep: parts.retirement.ask,
            calls.ReportDiffering: parts.view.shared_shards.reported,
            calls.ReportNonfinite: parts.steps.nonfinite,
            calls.AwaitStep: parts.followers.await_step,
            calls.LeaseStep: parts.followers.lease,
            calls.EndLease: parts.followers.end,
            calls.PinStep: self._of_job(parts.pins.pin),
            calls.UnpinStep: self._of_job(parts.pins.unpin),
            calls.PersistStep: self._of_job(parts.persists.ask),
        }

    def ask(self, call: Call[Any]) -> None:
        """Dispatch one question."""
        self._handlers[type(call.request)](call)

    def _of_job(self, work: Callable[[Job, Call[Any]], None]) -> Callable[[Call[Any]], None]:
        """Return a handler that finds the job of a call first, or refuses the call."""

        def handle(call: Call[Any]) -> None:
            job = job_of(self.state, self.out, call)
            if job is not None:
                work(job, call)

        return handle

    # -- status -------------------------------------------------------------------------------

    def _status(self, call: Call[calls.AskStatus]) -> None:
        self.out.answer(call, self.parts.status.answer())

    def _roll_call(self, call: Call[calls.AskRollCall]) -> None:
        """Answer which ranks have made the call that the caller waits in, and which are awaited (R20, R23)."""
        key = (call.request.job, call.request.of)
        found = self.roll_calls.get(key) or self._come(*key)
        if found is not None:
            self.roll_calls[key] = found
        self.out.answer(call, found or Noted())

    def _come(self, name: str, verb: str) -> RollCalled | None:
        """Return how far a call is that ranks of a job wait for; None if none of them does."""
        job = self.state.jobs.get(name)
        attempt = job.newest if job is not None else None
        found = None
        if job is not None and attempt is not None and verb in ("get", "shard_loaded"):
            found = awaited_by_get(self.state, job, attempt)
        elif job is not None and attempt is not None and verb == "reserve":
            found = self._awaited_by_reserve(job, attempt)
        if found is not None and attempt is not None:
            missing, awaited = found
            world_size, awaited = attempt.world_size, named_ranks(attempt, missing) if missing else awaited
        elif (row := launch(self.state, self.parts.attempts, name)) is not None:
            missing, awaited, world_size = row.missing, row.awaited, row.world_size
        else:
            return None
        come = come_text(world_size - len(missing), world_size, missing)
        return RollCalled(come=come, awaited=awaited, is_complete=not missing)

    def _awaited_by_reserve(self, job: Job, attempt: Attempt) -> tuple[list[int], str] | None:
        room = self.parts.room
        active = room.active.get(job.name)
        if active is None or active.attempt != attempt.attempt_number:
            return None
        missing = [] if active.is_ordered else room.silent_ranks(job, attempt)
        hosts = f"{named_hosts(active.waits)} to have the room" if active.waits else "hosts to write it down"
        return missing, hosts

    def _steps(self, call: Call[calls.AskSteps]) -> None:
        job = job_of(self.state, self.out, call)
        if job is not None:
            self.out.answer(call, steps_of(self.state, self.parts.durable_states, job))

    def _events(self, call: Call[calls.AskEvents]) -> None:
        """Answer with the events since a number, of one job or of all; the store's own events come with either."""
        events = self.parts.recorder.recent_events
        self.out.answer(call, events.page(call.request.since, call.request.job, self.state.wall_s))

    def _note_drill(self, call: Call[calls.NoteDrill]) -> None:
        told = call.request
        self.out.note("drill", job=told.job, phase=told.phase, text=told.text)
        self.out.answer(call, Noted())

    def _last_copies(self, call: Call[calls.AskLastCopies]) -> None:
        """Answer what would be lost with the copies in RAM, of one job or of all."""
        job = job_of(self.state, self.out, call) if call.request.job is not None else None
        if job is not None or call.request.job is None:
            self.parts.last_copies.ask(call, [job] if job is not None else list(self.state.jobs.values()))

    # -- verify, rm ---------------------------------------------------------------------------

    def _verify(self, call: Call[VerifyStore]) -> None:
        """Have live hosts digest all again; retired steps that are not torn may be offered again (R25, R30)."""
        self._count += 1
        live = self.state.hosts.live_ids()
        self.asks[self._count] = HostQuery(call, set(live))
        for job in self.state.jobs.values():
            if call.request.job in (None, job.name):
                for step in sorted(job.retired.keys() - job.torn):
                    self.parts.journal.record(StepRetired(job.name, step.attempt, step.step, ""))
        for host in live:
            self.out.send(host, VerifyCopies(call=self._count, job=call.request.job))

    def verified(self, host_id: str, report: CopiesVerified) -> None:
        """Take what one host found when it digested everything again."""
        found = self.asks.get(report.call)
        if found is not None:
            found.waits.discard(host_id)
            if report.found is not None:
                found.found[host_id] = report.found
            else:
                found.failed[host_id] = report.problem
            self._finish_asks()

    def _finish_asks(self) -> None:
        for number, ask in list(self.asks.items()):
            ask.died |= {h for h in ask.waits if not self.state.hosts.is_live(h)}
            ask.waits -= ask.died
            if not ask.waits or self.state.now - ask.call.since_s > ASK_DEADLINE_S:
                del self.asks[number]
                silent = sorted(ask.waits | ask.died)
                self.out.answer(ask.call, VerifyResult(found=ask.found, failed=ask.failed, silent=silent))

    def host_died(self, host_id: str) -> None:
        """Wait no longer for a host that died, even if it is back at once."""
        for ask in self.asks.values():
            ask.died |= ask.waits & {host_id}
        self._finish_asks()

    def tick(self) -> None:
        """Answer the questions whose deadline has passed, and forget the roll calls of this tick."""
        self.roll_calls.clear()
        self._finish_asks()
