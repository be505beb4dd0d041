"""The controller's machine: one pure state machine that decides for all jobs of a store.

    handle(now, event) -> actions

`parts.py` builds its parts, `Inputs` gives each event to one of them, `reactions.py` has the reactions. The controller
actor and the simulator are two shells around it (R16, R17).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from memstore.core.cluster import facts as f
from memstore.core.cluster.effects import Effects, Happened
from memstore.core.cluster.hosts import Change, HostTable
from memstore.core.cluster.job import Call, Job
from memstore.core.cluster.state import ClusterState, Rules
from memstore.core.controller.parts import Parts
from memstore.core.controller.queries import Queries
from memstore.core.controller.reactions import Membership, facts, reactions
from memstore.core.controller.takeover import Takeover
from memstore.core.journal.replication import TermLease
from memstore.core.wire import reports
from memstore.core.wire.calls import (
    AnswerPutEarly,
    Called,
    CloseStore,
    Get,
    ReserveRoom,
    Rewind,
    ShardLoaded,
    SkipStep,
    Withdraw,
)
from memstore.core.wire.codec import Request
from memstore.core.wire.messages import (
    Action,
    DrainsSeen,
    Event,
    HostBeat,
    HostLost,
    HostUp,
    LeaseRenewed,
    Received,
    Tick,
)

# -- inputs -------------------------------------------------------------------------------------------
# What reaches the machine from outside: time, hosts, calls of ranks and people, reports of holders. Pure.


class Inputs:
    """Gives each event to the part that it is for."""

    def __init__(self, parts: Parts, membership: Membership, queries: Queries, takeover: Takeover) -> None:
        self.state, self.out, self.parts = parts.state, parts.out, parts
        self.membership, self.queries, self.takeover = membership, queries, takeover
        state, p = parts.state, parts
        self._events: Mapping[type[Event], Callable[[Any], object]] = {
            Tick: self._tick,
            HostBeat: lambda event: self._heartbeats((event,)),
            HostUp: self._host_up,
            HostLost: self._host_lost,
            Received: lambda event: self._messages[type(event.message)](event.host_id, event.message),
            DrainsSeen: lambda event: p.drains.seen(event.until_s),
            LeaseRenewed: lambda event: p.journal.lease.renew(event.until_s),
        }
        #: Calls of ranks: refused if the job is unknown. All other calls go to `Queries`.
        self._calls: Mapping[type[Request[Any]], Callable[[Any], object]] = {
            Get: lambda call: p.rounds.get(state.now, call),
            Withdraw: p.rounds.withdraw,
            ShardLoaded: lambda call: p.rounds.loaded(state.now, call),
            Rewind: p.rewinds.ask,
            ReserveRoom: p.room.reserve,
            SkipStep: self._skip,
            AnswerPutEarly: p.precautions.answered,
            CloseStore: p.attempts.close,
        }
        self._messages: Mapping[type[reports.Report], Callable[[str, Any], object]] = {
            Called: self._call,
            reports.FactsWritten: lambda host, report: p.journal.log.ack(host, report.seq),
            reports.Sealed: self._sealed,
            reports.Freed: p.drops.freed,
            reports.StepFreed: p.drops.step_freed,
            reports.PushFailed: lambda host, report: p.repair.push_failed(state.now, report),
            reports.Fenced: self._fenced,
            reports.Reserved: p.room.reserved,
            reports.Brought: self._brought,
            reports.SliceWritten: p.durable.slice_written,
            reports.MarkerWritten: p.durable.marker_written,
            reports.StepRemoved: p.durable.step_removed,
            reports.MarkersListed: self._markers,
            reports.CopiesVerified: queries.verified,
            reports.ProcessGone: lambda host, report: p.attempts.rank_gone(
                host, report.nonce, has_left=report.has_left
            ),
            reports.RankArrived: lambda host, report: takeover.rank_here(report.nonce),
        }

    def handle(self, event: Event) -> None:
        """Dispatch one event."""
        self._events[type(event)](event)

    # -- time and hosts -----------------------------------------------------------------------

    def _tick(self, event: Tick) -> None:
        p, now = self.parts, self.state.now
        self._heartbeats(event.heartbeats)
        self.membership.tick(self.state.hosts.tick(now))
        self.takeover.tick()
        p.journal.lease.tick()
        p.journal.record_waiting()
        p.drains.tick()
        p.departures.tick()
        p.precautions.tick()
        for part in (p.attempts, p.room, p.rounds, p.followers, p.repair, p.job_removal):
            part.tick(now)
        p.durable_checks.tick(now)
        p.durable_looks.tick(now)
        p.persists.tick(now)
        p.orphans.tick()
        self.queries.tick()
        p.recorder.tick()
        for job in self.state.jobs.values():
            p.steps.evaluate_all(job)  # for what changed without a seal
            p.durable.consider(now, job)

    def _heartbeats(self, beats: Iterable[HostBeat]) -> None:
        changes: list[Change] = []
        for beat in beats:
            changes += self.state.hosts.heartbeat(self.state.now, beat)
            self.parts.recorder.heartbeat(beat.host_id, beat.stats)
            self.parts.precautions.heartbeat(beat)
            self.parts.steps.trained(beat.trained)
        self.membership.changed(changes)

    def _host_up(self, event: HostUp) -> None:
        self.takeover.host_up(event)
        self.parts.drains.returned(event.info.host_id, has_memory=bool(event.copies or event.journal))

    def _host_lost(self, event: HostLost) -> None:
        is_certain = self.parts.journal.lease.may_record()
        hosts = self.state.hosts
        self.membership.changed(hosts.lost(self.state.now, event.host_id, event.why, is_certain=is_certain))

    # -- calls --------------------------------------------------------------------------------

    def _call(self, host: str, called: Called) -> None:
        request = called.call
        call = Call(host, called.id, request, self.state.now)
        name, answer = getattr(request, "job", None) or "", self._calls.get(type(request))
        self.parts.orphans.asked(name)
        if answer is None:
            self.queries.ask(call)
        elif name in self.state.jobs:
            answer(call)
        else:
            self.out.refuse(call, "FencedError", f"the store does not know job {name!r} any more: connect again")

    def _skip(self, call: Call[SkipStep]) -> None:
        self.parts.recorder.skipped(call.host_id, call.request)
        self.parts.steps.skip(call)

    # -- reports ------------------------------------------------------------------------------

    def _brought(self, host: str, report: reports.Brought) -> None:
        self.parts.repair.parity.brought(self.state.now, report)
        if not self.parts.reads.ended(report):
            self.parts.rounds.staged(self.state.now, report)

    def _sealed(self, host: str, report: reports.Sealed) -> None:
        p, copy = self.parts, report.copy.on(host)
        p.recorder.sealed(copy, host, report.put)
        p.repair.pushed(copy.shard, host)
        p.steps.sealed(self.state.now, copy, report.put)

    def _fenced(self, host: str, report: reports.Fenced) -> None:
        copies = [copy.on(host) for copy in report.copies]
        self.parts.steps.inventory(host, report.job, copies)
        self.parts.attempts.fenced(self.state.now, host, report.job, report.attempt)

    def _markers(self, host: str, report: reports.MarkersListed) -> None:
        why = self.parts.durable_markers.listed(report)
        self.parts.attempts.listed(report.call, why)
        self.parts.rounds.listed(self.state.now, report.call, why)
        self.parts.durable_checks.answered(host, report, why)


# -- machine ------------------------------------------------------------------------------------------


class ControllerMachine:
    """The machine of one controller term."""

    def __init__(
        self, *, term: int, now: float, wall_offset_s: float, rules: Rules, expected_hosts: Iterable[str] = ()
    ) -> None:
        self.state = ClusterState(rules=rules, now=now, wall_offset_s=wall_offset_s, expected_hosts=expected_hosts)
        self.out = Effects()
        self.parts = Parts(self.state, self.out, term)
        queries = Queries(self.parts)
        membership = Membership(self.parts, queries)
        self.takeover = Takeover(self.parts, membership, lambda fact: self.apply(fact, is_replay=True))
        self._inputs = Inputs(self.parts, membership, queries, self.takeover)
        self._facts, self._reactions = facts(self.parts), reactions(self.parts, membership)
        self.out.react = self._react

    # -- what shells look at ------------------------------------------------------------------

    @property
    def jobs(self) -> Mapping[str, Job]:
        """The jobs that the controller knows, by name."""
        return self.state.jobs

    @property
    def hosts(self) -> HostTable:
        """The hosts that the controller knows."""
        return self.state.hosts

    @property
    def lease(self) -> TermLease:
        """The time until which this controller may record facts."""
        return self.parts.journal.lease

    @property
    def actions(self) -> list[Action]:
        """The actions ordered so far by the event being handled (or by the last one)."""
        return self.out.actions

    @property
    def is_settled(self) -> bool:
        """Whether the past is known and calls are served."""
        return self.takeover.is_settled

    # -- events -------------------------------------------------------------------------------

    def handle(self, now: float, event: Event) -> list[Action]:
        """Handle one event at time `now` (monotonic seconds); return the actions."""
        self.state.now = max(self.state.now, now)
        self.out.actions = []
        if self.is_settled:
            self._inputs.handle(event)
        else:
            for waiting in self.takeover.collect_inventories(event):
                self._inputs.handle(waiting)
            for job in self.state.jobs.values():
                self.parts.steps.evaluate_all(job)
        self._apply_replicated()
        self.parts.journal.send_facts()
        return self.out.actions

    def _react(self, happened: Happened) -> None:
        for reaction in self._reactions[type(happened)]:
            reaction(happened)

    # -- facts --------------------------------------------------------------------------------

    def _apply_replicated(self) -> None:
        while True:
            ready = self.parts.journal.log.replicated(self._is_enough) if self.is_settled else []
            if not ready:
                return
            for fact in ready:
                self.apply(fact, is_replay=False)

    def _is_enough(self, hosts: list[str], fact: f.Fact) -> bool:
        job = self.state.jobs.get(getattr(fact, "job", ""))
        replicas = job.newest.replicas if job is not None and job.newest is not None else 2
        if isinstance(fact, f.AttemptOpened):
            replicas = int(fact.config["replicas"])
        table = self.state.hosts
        have = table.domains(h for h in hosts if table.is_live(h))
        return bool(have) and len(have) >= table.live_domains_count(replicas)

    def apply(self, fact: f.Fact, *, is_replay: bool) -> None:
        """Make a fact true: it has reached enough journals, or it is of the past."""
        if self.parts.job_removal.is_void(fact):
            return
        if not is_replay:
            self.parts.recorder.fact(fact)
        self.parts.repair.fact(fact)
        for part in self._facts[type(fact)]:
            part(fact, is_replay)
        if not is_replay:
            self.parts.waiters.applied(fact)
