"""What reaches the machine from outside: time, hosts, calls of ranks and people, reports of holders. Pure.

Read `reactions.py` for the reactions to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from memstore.config import check_name
from memstore.core.cluster.hosts import Change
from memstore.core.cluster.job import Call
from memstore.core.controller.membership import PlacementUpdates
from memstore.core.controller.parts import Parts
from memstore.core.controller.queries import Queries
from memstore.core.controller.takeover import Takeover
from memstore.core.wire.messages import (
    Body,
    DrainsSeen,
    Event,
    FactAck,
    Heard,
    HostLost,
    HostUp,
    LeaseRenewed,
    RankCall,
    RankGone,
    Report,
    Tick,
    copy_from_wire,
    shard_from_wire,
)
from memstore.errors import ConfigError


class Inputs:
    """Gives each event to the part that it is for."""

    def __init__(self, parts: Parts, placing: PlacementUpdates, queries: Queries, takeover: Takeover) -> None:
        self.state, self.out, self.parts = parts.state, parts.out, parts
        self.placing, self.queries, self.takeover = placing, queries, takeover
        state, p = parts.state, parts
        self._events: Mapping[type[Event], Callable[[Any], object]] = {
            Tick: self._tick,
            Heard: lambda event: self._heard((event,)),
            HostUp: self._host_up,
            HostLost: self._host_lost,
            RankCall: self._call,
            RankGone: lambda event: p.attempts.rank_gone(state.now, event.nonce),
            Report: self._report,
            FactAck: lambda event: p.journal.log.ack(event.host_id, event.seq),
            DrainsSeen: lambda event: p.drains.seen(event.until_s),
            LeaseRenewed: lambda event: p.journal.lease.renew(event.until_s),
        }
        #: Calls that are refused once their job is not known any more; all others go to `Queries`.
        self._calls: Mapping[str, Callable[[Call], object]] = {
            "mesh_order": lambda call: p.mesh_orders.ask(state.now, call),
            "get": lambda call: p.rounds.get(state.now, call),
            "withdraw": p.rounds.withdraw,
            "rewind": p.rewinds.ask,
            "reserve": p.room.reserve,
            "cadence": p.cadence.ask,
            "skip": self._skip,
            "close": p.attempts.close,
        }
        self._reports: Mapping[str, Callable[[str, Body], object]] = {
            "sealed": self._sealed,
            "freed": p.drops.freed,
            "push_failed": lambda host, body: p.repair.push_failed(state.now, shard_from_wire(body["shard"]), body),
            "fenced": self._fenced,
            "reserved": p.room.reserved,
            "staged": self._staged,
            "checked": lambda host, body: p.rounds.checked(state.now, body),
            "persisted": lambda host, body: p.durable.persisted(state.now, host, body),
            "markers": self._markers,
            "forked": p.forks.looked,
            "answer": queries.answered,
            "rank_here": lambda host, body: takeover.rank_here(str(body["nonce"])),
        }

    def handle(self, event: Event) -> None:
        """Dispatch one event."""
        self._events[type(event)](event)

    # -- time and hosts -----------------------------------------------------------------------

    def _tick(self, event: Tick) -> None:
        p, now = self.parts, self.state.now
        self._heard(event.heard)
        self.placing.tick(self.state.hosts.tick(now))
        self.takeover.tick()
        p.journal.lease.tick()
        p.journal.record_waiting()
        p.drains.tick()
        p.departures.tick()
        for part in (p.attempts, p.mesh_orders, p.room, p.rounds, p.repair, p.forks, p.expiry):
            part.tick(now)
        p.durable_checks.tick(now)
        p.durable_looks.tick(now)
        p.persists.tick(now)
        p.orphans.tick()
        self.queries.tick()
        p.observer.tick()
        for job in self.state.jobs.values():
            p.steps.evaluate_all(job)  # for what changed without a seal
            p.durable.consider(now, job)

    def _heard(self, beats: Iterable[Heard]) -> None:
        changes: list[Change] = []
        for beat in beats:
            changes += self.state.hosts.heard(self.state.now, beat)
            self.parts.observer.heard(beat.host_id, beat.stats)
            self.parts.steps.trained(beat.trained)
        self.placing.changed(changes)

    def _host_up(self, event: HostUp) -> None:
        self.takeover.host_up(event)
        self.parts.drains.returned(event.info.host_id, has_memory=bool(event.copies or event.journal))

    def _host_lost(self, event: HostLost) -> None:
        is_certain = self.parts.journal.lease.may_record()
        hosts = self.state.hosts
        self.placing.changed(hosts.lost(self.state.now, event.host_id, event.why, is_certain=is_certain))

    # -- calls --------------------------------------------------------------------------------

    def _call(self, event: RankCall) -> None:
        call = Call(event.host_id, event.call_id, event.body, self.state.now)
        name, verb = str(event.body.get("job", "")), event.verb
        self.parts.orphans.asked(name)
        if verb == "join":
            self._join(call)
        elif verb not in self._calls and verb != "drain":
            self.queries.ask(verb, call)
        elif verb == "drain":
            self.parts.drains.ask(call)
        elif name not in self.state.jobs:
            self.out.refuse(call, "FencedError", f"the store does not know job {name!r} any more: connect again")
        else:
            self._calls[verb](call)

    def _join(self, call: Call) -> None:
        try:
            check_name("job", call.body.get("job"))  # it will be a folder's name
        except ConfigError as error:
            self.out.refuse(call, "ConfigError", str(error))
            return
        self.parts.attempts.join(self.state.now, call)

    def _skip(self, call: Call) -> None:
        self.parts.observer.skipped(call.host_id, call.body)
        self.parts.steps.skip(call)

    # -- reports ------------------------------------------------------------------------------

    def _report(self, event: Report) -> None:
        report = self._reports.get(event.kind)
        if report is not None:
            report(event.host_id, event.body)

    def _sealed(self, host: str, body: Body) -> None:
        p = self.parts
        for item in body["copies"]:
            copy = copy_from_wire(item, host)
            p.observer.sealed(copy, host, body.get("put"))
            p.repair.pushed(copy.shard, host)
            p.steps.sealed(self.state.now, copy)

    def _fenced(self, host: str, body: Body) -> None:
        copies = [copy_from_wire(item, host) for item in body["copies"]]
        self.parts.steps.inventory(host, str(body["job"]), copies)
        self.parts.attempts.fenced(self.state.now, host, str(body["job"]), int(body["attempt"]))

    def _staged(self, host: str, body: Body) -> None:
        if int(body["round"]) < 0:
            self.parts.reads.staged(body)
        else:
            self.parts.rounds.staged(self.state.now, body)

    def _markers(self, host: str, body: Body) -> None:
        why = self.parts.durable_markers.answered(host, body)
        self.parts.durable_checks.answered(host, body, why)
