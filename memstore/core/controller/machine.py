"""The catalog: one pure state machine that decides for all jobs of a store. `handle(now, event) -> actions`.

It composes host_table (who is alive), lease (whether it may decide), placing and cluster_view (who holds what),
fact_log and journals (what has spread), takeover (the past), attempts and rewinds (connect, fencing), mesh_orders (who
is which rank), room (reservations), steps (commit rule), retention, pins, forks, rounds and staging (get), repair,
durable_orders and queries; each decides one thing, and observer says what came of it. The controller actor and the
simulator are two shells around it (R16, R17).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from memstore.config import check_name
from memstore.core.attempts.join import Attempts
from memstore.core.attempts.put_interval_rounds import CadenceRounds
from memstore.core.attempts.rank_order import MeshOrders
from memstore.core.attempts.rewind import Rewinds
from memstore.core.capacity.reservations import Room
from memstore.core.capacity.retention import Retention
from memstore.core.cluster import facts as f
from memstore.core.cluster.hosts import Change, HostTable
from memstore.core.cluster.job import Call, Job
from memstore.core.cluster.sent_orders import Told
from memstore.core.commit.commits import Steps
from memstore.core.controller.membership import Placing
from memstore.core.controller.queries import Queries
from memstore.core.controller.takeover import Takeover
from memstore.core.durable.checks import DurableChecks
from memstore.core.durable.looks import DurableLooks
from memstore.core.durable.marker_listing import DurableMarkers
from memstore.core.durable.persist import Persists
from memstore.core.durable.writes import DurableOrders
from memstore.core.history.fork_request import Forks
from memstore.core.history.job_removal import Expiry
from memstore.core.history.orphans import Orphans
from memstore.core.history.pins import Pins
from memstore.core.journal.compaction import compact
from memstore.core.journal.fact_log import FactLog
from memstore.core.journal.lease import Lease
from memstore.core.journal.replication import Journals
from memstore.core.repair.drop_copy import Drops
from memstore.core.repair.repair import Repair
from memstore.core.report.recorder import Observer
from memstore.core.restore.rounds import Rounds
from memstore.core.restore.staging import Staging
from memstore.core.targets.drain import Drains
from memstore.core.targets.targets import ClusterView
from memstore.core.wire.messages import (
    Action,
    Answer,
    Body,
    DrainsSeen,
    Event,
    FactAck,
    Heard,
    HostLost,
    HostUp,
    LeaseRenewed,
    Note,
    RankCall,
    RankGone,
    Report,
    Tell,
    Tick,
    copy_from_wire,
    shard_from_wire,
)
from memstore.errors import ConfigError
from placement.groups import Placement
from recovery.inventory import StepId


@dataclass(frozen=True, slots=True)
class Rules:
    """Store fields of Config that the catalog decides by; seconds."""

    job_defaults: Mapping[str, Any] = field(default_factory=dict)  # shown only: ranks ask for them as they join
    failure_domains: tuple[str, ...] = ("zone", "rack")
    suspect_after_s: float = 1.5
    repair_after_s: float = 5.0
    recovery_grace_s: float = 30.0
    lease_s: float = 3.0
    outlast_s: float = 3.0  # shortest wait of a new controller: what its predecessor's lease may still be (R17)
    settle_s: float = 10.0  # longest wait for the expected hosts before a rebuilt catalog serves
    orphan_ttl_s: float = 86_400.0  # a job whose hosts had no holder for so long, and that nobody asks for, is dropped


class Catalog:
    """See the module docstring. Attributes are read by the parts it composes, never from outside."""

    def __init__(
        self, *, term: int, now: float, wall_offset_s: float, rules: Rules, expected_hosts: Iterable[str] = ()
    ) -> None:
        self.rules = rules
        self.now = self.started_s = now
        self.wall_offset_s = wall_offset_s
        self.expected_hosts = set(expected_hosts)
        self.lease = Lease(self)
        self.hosts = HostTable(
            suspect_after_s=rules.suspect_after_s,
            repair_after_s=rules.repair_after_s,
            failure_domains=rules.failure_domains,
        )
        self.log = FactLog(term)
        self.journals = Journals(self)
        self.jobs: dict[str, Job] = {}
        self.removed: dict[str, int] = {}  # job -> the last attempt that was removed with it
        self.actions: list[Action] = []
        self.takeover = Takeover(self)
        self.drains = Drains(self)
        self.view = ClusterView(self)
        self.told = Told()
        self.placing = Placing(self)
        self.attempts = Attempts(self)
        self.mesh_orders = MeshOrders(self)
        self.rewinds = Rewinds(self)
        self.room = Room(self)
        self.cadence = CadenceRounds(self)
        self.steps = Steps(self)
        self.retention = Retention(self)
        self.drops = Drops(self)
        self.pins = Pins(self)
        self.forks = Forks(self)
        self.expiry = Expiry(self)
        self.orphans = Orphans(self)
        self.rounds = Rounds(self)
        self.staging = Staging(self)
        self.repair = Repair(self)
        self.durable = DurableOrders(self)
        self.durable_checks, self.durable_markers = DurableChecks(self), DurableMarkers(self)
        self.durable_looks = DurableLooks(self)
        self.persists = Persists(self)
        self.queries = Queries(self)
        self.observer = Observer(self)
        self._asks = {
            "withdraw": self.rounds.withdraw, "reserve": self.room.reserve, "cadence": self.cadence.ask,
            "rewind": self.rewinds.ask, "close": self.attempts.close, "drain": self.drains.ask,
        }  # fmt: skip

    # -- the one entry ------------------------------------------------------------------------

    def handle(self, now: float, event: Event) -> list[Action]:
        """Take one event at time `now` (monotonic seconds); return what is to be done."""
        self.now = max(self.now, now)
        self.actions = []
        if self.is_settled:
            self._dispatch(event)
        else:
            for waiting in self.takeover.settle(event):
                self._dispatch(waiting)
            for job in self.jobs.values():
                self.steps.evaluate_all(job)
        self._apply_spread()
        self.journals.send_facts()
        return self.actions

    @property
    def is_settled(self) -> bool:
        """True once the past is known and calls are served."""
        return self.takeover.is_settled

    def _dispatch(self, event: Event) -> None:
        now = self.now
        if isinstance(event, Tick):
            self._heard(event.heard)
            self.placing.tick(self.hosts.tick(now))
            self.takeover.tick()
            self.lease.tick()
            self._flush_waiting()
            self.drains.tick()
            for part in (self.attempts, self.mesh_orders, self.room, self.rounds, self.repair, self.forks, self.expiry):
                part.tick(now)
            self.durable_checks.tick(now)
            self.durable_looks.tick(now)
            self.persists.tick(now)
            self.orphans.tick()
            self.queries.tick()
            self.observer.tick()
            for job in self.jobs.values():
                self.steps.evaluate_all(job)  # whatever changed without a seal
                self.durable.consider(now, job)
        elif isinstance(event, Heard):
            self._heard((event,))
        elif isinstance(event, HostUp):
            self.takeover.host_up(event)
            self.drains.returned(event.info.host_id, has_memory=bool(event.copies or event.journal))
        elif isinstance(event, HostLost):
            is_certain = self.lease.may_record()
            self.placing.changed(self.hosts.lost(now, event.host_id, event.why, is_certain=is_certain))
        elif isinstance(event, RankCall):
            self._rank_call(event)
        elif isinstance(event, RankGone):
            self.attempts.rank_gone(now, event.nonce)
        elif isinstance(event, Report):
            self._report(event)
        elif isinstance(event, FactAck):
            self.log.ack(event.host_id, event.seq)
        elif isinstance(event, DrainsSeen):
            self.drains.seen(event.until_s)
        elif isinstance(event, LeaseRenewed):
            self.lease.renew(event.until_s)

    # -- hosts --------------------------------------------------------------------------------

    def _heard(self, beats: Iterable[Heard]) -> None:
        changes: list[Change] = []
        for beat in beats:
            changes += self.hosts.heard(self.now, beat)
            self.observer.heard(beat.host_id, beat.stats)
            self.steps.trained(beat.trained)
        self.placing.changed(changes)

    def placement(self, job: Job) -> Placement | None:
        """Return where the newest attempt's copies go."""
        return self.view.placement(job)

    # -- calls and reports --------------------------------------------------------------------

    def _rank_call(self, event: RankCall) -> None:
        call = Call(event.host_id, event.call_id, event.body, self.now)
        name = str(event.body.get("job", ""))
        known = name in self.jobs
        verb = event.verb
        self.orphans.asked(name)
        if verb == "join":
            try:
                check_name("job", event.body.get("job"))  # it will be a folder's name
            except ConfigError as error:
                self.refuse(call, "ConfigError", str(error))
                return
            self.attempts.join(self.now, call)
        elif verb in ("mesh_order", "get", "withdraw", "rewind", "reserve", "cadence", "skip", "close") and not known:
            self.refuse(call, "FencedError", f"the store does not know job {name!r} any more: connect again")
        elif verb == "mesh_order":
            self.mesh_orders.ask(self.now, call)
        elif verb == "get":
            self.rounds.get(self.now, call)
        elif verb == "skip":
            self.observer.skipped(event.host_id, event.body)
            self.steps.skip(call)
        elif (ask := self._asks.get(verb)) is not None:
            ask(call)
        else:
            self.queries.ask(verb, call)

    def _report(self, event: Report) -> None:
        host, kind, body = event.host_id, event.kind, event.body
        if kind == "sealed":
            for item in body["copies"]:
                copy = copy_from_wire(item, host)
                self.observer.sealed(copy, host, body.get("put"))
                self.repair.pushed(copy.shard, host)
                self.steps.sealed(self.now, copy)
        elif kind == "freed":
            self.drops.freed(host, body)
        elif kind == "push_failed":
            self.repair.push_failed(self.now, shard_from_wire(body["shard"]), body)
        elif kind == "fenced":
            self.steps.inventory(host, str(body["job"]), [copy_from_wire(item, host) for item in body["copies"]])
            self.attempts.fenced(self.now, host, str(body["job"]), int(body["attempt"]))
        elif kind == "reserved":
            self.room.reserved(host, body)
        elif kind == "staged" and int(body["round"]) < 0:
            self.queries.staged(body)
        elif kind == "staged":
            self.staging.staged(self.now, body)
        elif kind == "checked":
            self.staging.checked(self.now, body)
        elif kind == "persisted":
            self.durable.persisted(self.now, host, body)
        elif kind == "markers":
            why = self.durable_markers.listed(host, body)
            self.attempts.markers_listed(str(body["job"]), int(body["call"]), why)
            self.rounds.markers_listed(self.now, str(body["job"]), int(body["call"]), why)
            self.forks.markers_listed(str(body["job"]), int(body["call"]), why)
            self.durable_checks.answered(host, body, why)
        elif kind == "forked":
            self.forks.looked(host, body)
        elif kind == "answer":
            self.queries.answered(host, body)
        elif kind == "rank_here":
            self.takeover.rank_here(str(body["nonce"]))

    # -- facts --------------------------------------------------------------------------------

    def record(self, fact: f.Fact) -> None:
        """Journal a decision; it takes effect in `_apply` once it has spread (R16)."""
        if self.lease.may_record():
            self.journals.record(fact)
        else:
            self.log.waiting.append(fact)

    def _flush_waiting(self) -> None:
        while self.log.waiting and self.lease.may_record():
            self.journals.record(self.log.waiting.pop(0))

    def _apply_spread(self) -> None:
        while True:
            ready = self.log.spread(self._is_enough) if self.is_settled else []
            if not ready:
                return
            for fact in ready:
                self.apply(fact, is_replay=False)

    def _is_enough(self, hosts: list[str], fact: f.Fact) -> bool:
        job = self.jobs.get(getattr(fact, "job", ""))
        replicas = job.newest.replicas if job is not None and job.newest is not None else 2
        if isinstance(fact, f.AttemptOpened | f.JobForked):
            replicas = int(fact.config["replicas"])
        have = self.hosts.domains(h for h in hosts if self.hosts.is_live(h))
        return bool(have) and len(have) >= self.hosts.live_domains_count(replicas)

    def apply(self, fact: f.Fact, *, is_replay: bool) -> None:
        """A fact takes effect: it has spread, or it is of the past."""
        now = self.now
        if self.expiry.passes_over(fact):
            return
        if not is_replay:
            self.observer.fact(fact)
        self.repair.fact(getattr(fact, "job", ""))
        if isinstance(fact, f.AttemptOpened):
            self.attempts.apply_opened(now, fact, is_replay=is_replay)
            self.orphans.begun(fact.job)
            if not is_replay:
                self.durable.keys.ask(self.jobs[fact.job])
        elif isinstance(fact, f.RoomClaimed):
            self.room.apply_claimed(fact, is_replay=is_replay)
        elif isinstance(fact, f.CadenceSet):
            self.cadence.apply(fact)
        elif isinstance(fact, f.RestoreDecided):
            self.rounds.apply_decided(now, fact, is_replay=is_replay)
        elif isinstance(fact, f.RestoreReleased):
            self.staging.apply_released(now, fact, is_replay=is_replay)
        elif isinstance(fact, f.StepCommitted):
            self.steps.apply_committed(now, fact, is_replay=is_replay)
            self.orphans.begun(fact.job)
        elif isinstance(fact, f.StepAbandoned):
            self.steps.apply_abandoned(fact, is_replay=is_replay)
        elif isinstance(fact, f.StepRetired):
            self.queries.apply_retired(fact)
        elif isinstance(fact, f.AttemptClosed):
            job = self.jobs.get(fact.job)
            if job is not None and fact.attempt in job.attempts:
                job.attempts[fact.attempt].phase = "closed"
        elif isinstance(fact, f.StepPinned):
            self.pins.apply_pinned(fact, is_replay=is_replay)
        elif isinstance(fact, f.StepUnpinned):
            self.pins.apply_unpinned(fact, is_replay=is_replay)
        elif isinstance(fact, f.JobForked):
            self.forks.apply_forked(fact, is_replay=is_replay)
        elif isinstance(fact, f.JobRemoved):
            self.expiry.apply(fact, is_replay=is_replay)
        elif isinstance(fact, f.HostsJoined):
            self.hosts.joined.update(fact.labels)
        elif isinstance(fact, f.HostDraining):
            self.drains.apply(fact, is_replay=is_replay)

    def compact(self) -> None:
        """Forget facts of steps that are gone, when the journals have grown."""
        compact(self)

    # -- for the parts ------------------------------------------------------------------------

    @property
    def wall_s(self) -> float:
        """Wall-clock seconds, for facts that outlive this controller."""
        return self.now + self.wall_offset_s

    def age_s(self, moment_s: float) -> float:
        """How long ago a moment of a wall clock was; 0 if it is yet to come, for a clock was set back since."""
        return max(0.0, self.wall_s - moment_s)

    def steps_in_use(self, job: Job) -> set[StepId]:
        """Steps in use by a restore, a durable write or a fork: not dropped now."""
        active, write = self.rounds.active.get(job.name), self.durable.state(job.name).active
        steps = {active.plan.step} if active is not None and active.plan is not None else set()
        steps |= {write.step} if write is not None else set()
        return {s for s in steps if s is not None} | self.forks.needed(job)

    def tell(self, host: str, kind: str, body: Body) -> None:
        """Order a holder."""
        self.actions.append(Tell(host, kind, body))

    def answer(self, call: Call, body: Mapping[str, Any]) -> None:
        """Answer a call; what was decided for it is on its way before."""
        self.journals.send_facts()
        self.actions.append(Answer(call.host_id, call.call_id, dict(body)))

    def refuse(self, call: Call, error: str, message: str) -> None:
        """Answer a call with an error of the memstore tree."""
        self.actions.append(Answer(call.host_id, call.call_id, {}, (error, message)))

    def note(self, text: str, level: str = "info") -> None:
        """Log a line."""
        self.actions.append(Note(text, level))
