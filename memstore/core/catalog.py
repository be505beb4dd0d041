"""The catalog: one pure state machine that decides for all jobs of a store. `handle(now, event) -> actions`.

It composes host_table (who is alive), fact_log (what has spread), attempts (connect, fencing),
room (reservations), steps (commit rule), rounds (get), repair and durable_orders; each decides one
thing. The controller actor and the simulator are two shells around it (R16, R17).

    settling --every expected host up, or settle_s over--> serving
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from memstore.core import facts as f
from memstore.core.attempts import Attempts
from memstore.core.durable_orders import DurableOrders
from memstore.core.events import (
    Action,
    Answer,
    Body,
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
from memstore.core.fact_log import FactLog
from memstore.core.host_table import Change, HostTable
from memstore.core.job import Attempt, Call, Job
from memstore.core.queries import Queries
from memstore.core.repair import Repair
from memstore.core.room import Room
from memstore.core.rounds import Rounds
from memstore.core.steps import Steps
from placement.groups import Placement, place
from placement.rebalance import rebalance
from recovery.inventory import StepId

FACTS_COMPACT_MIN = 256  # journals shorter than this are not worth rewriting


@dataclass(frozen=True, slots=True)
class Rules:
    """Store fields of Config that the catalog decides by; seconds."""

    failure_domains: tuple[str, ...] = ("zone", "rack")
    suspect_after_s: float = 1.5
    repair_after_s: float = 5.0
    recovery_grace_s: float = 30.0
    lease_s: float = 3.0
    settle_s: float = 10.0  # longest wait for the expected hosts before a rebuilt catalog serves


class Catalog:
    """See the module docstring. Attributes are read by the parts it composes, never from outside."""

    def __init__(
        self, *, term: int, now: float, wall_offset_s: float, rules: Rules, expected_hosts: Iterable[str] = ()
    ) -> None:
        self.rules = rules
        self.now = self.started_s = now
        self.wall_offset_s = wall_offset_s
        self.expected_hosts = set(expected_hosts)
        self.is_settled = False
        self.lease_until_s = now
        self.hosts = HostTable(
            suspect_after_s=rules.suspect_after_s,
            repair_after_s=rules.repair_after_s,
            failure_domains=rules.failure_domains,
        )
        self.log = FactLog(term)
        self.journals: list[list[f.Entry]] = []
        self.jobs: dict[str, Job] = {}
        self.actions: list[Action] = []
        self.early: list[Event] = []  # calls that came while settling
        self.attempts = Attempts(self)
        self.room = Room(self)
        self.steps = Steps(self)
        self.rounds = Rounds(self)
        self.repair = Repair(self)
        self.durable = DurableOrders(self)
        self.queries = Queries(self)

    # -- the one entry ------------------------------------------------------------------------

    def handle(self, now: float, event: Event) -> list[Action]:
        """Take one event at time `now` (monotonic seconds); return what is to be done."""
        self.now = max(self.now, now)
        self.actions = []
        if not self.is_settled:
            self._settle(event)
        else:
            self._dispatch(event)
        self._apply_spread()
        return self.actions

    def _dispatch(self, event: Event) -> None:
        now = self.now
        if isinstance(event, Tick):
            self._changed(self.hosts.tick(now))
            self._flush_waiting()
            for part in (self.attempts, self.room, self.rounds, self.repair):
                part.tick(now)
            self.queries.tick()
            for job in self.jobs.values():
                self.durable.consider(now, job)
        elif isinstance(event, Heard):
            self._changed(self.hosts.heard(now, event.host_id, event.stats))
        elif isinstance(event, HostUp):
            self._host_up(event)
        elif isinstance(event, HostLost):
            self._changed(self.hosts.lost(now, event.host_id, event.why))
        elif isinstance(event, RankCall):
            self._rank_call(event)
        elif isinstance(event, RankGone):
            self.attempts.rank_gone(now, event.nonce)
        elif isinstance(event, Report):
            self._report(event)
        elif isinstance(event, FactAck):
            self.log.ack(event.host_id, event.seq)
        elif isinstance(event, LeaseRenewed):
            self.lease_until_s = max(self.lease_until_s, event.until_s)

    # -- settling -----------------------------------------------------------------------------

    def _settle(self, event: Event) -> None:
        """Before serving: gather journals and inventories, then rebuild (R16, R17)."""
        if isinstance(event, HostUp):
            self.hosts.up(self.now, event.info)
            self.journals.append([f.entry_from_wire(entry) for entry in event.journal])
            for copy in event.copies:
                self.jobs.setdefault(copy.shard.job, Job(copy.shard.job)).add_copy(copy)
        elif isinstance(event, Heard):
            self.hosts.heard(self.now, event.host_id, event.stats)
        elif isinstance(event, HostLost):
            self.hosts.lost(self.now, event.host_id, event.why)
            for job in self.jobs.values():
                job.drop_host(event.host_id)
        elif isinstance(event, LeaseRenewed):
            self.lease_until_s = max(self.lease_until_s, event.until_s)
        elif not isinstance(event, Tick):
            self.early.append(event)
        waited_s = self.now - self.started_s
        is_all_up = self.expected_hosts <= set(self.hosts.live_ids()) and waited_s >= self.rules.lease_s
        if not self.hosts.live_ids() or not (is_all_up or waited_s >= self.rules.settle_s):
            return
        self.is_settled = True
        for fact in self.log.adopt(self.journals):
            self._apply(fact, is_replay=True)
        self.journals = []
        for job in self.jobs.values():
            self.steps.adopt(job)
        for host in self.hosts.live_ids():
            self._send_journal(host)
            self._greet(host)
        early, self.early = self.early, []
        for waiting in early:
            self._dispatch(waiting)
        for job in self.jobs.values():
            self.steps.evaluate_all(job)

    def _send_journal(self, host: str) -> None:
        records = [f.entry_to_wire(entry) for entry in self.log.entries]
        self.tell(host, "journal", {"reset": True, "records": records, "seq": self.log.last_seq})

    def _greet(self, host: str) -> None:
        """Whatever a host must know before it serves: its peers, and who is fenced."""
        self._send_view()
        for job in self.jobs.values():
            if job.newest is not None:
                self.tell(host, "fence", {"job": job.name, "attempt": job.newest.ordinal})
                self.send_targets(job.name, only_host=host)
                if job.newest.phase == "open" and (job.newest.needs or job.copies):
                    self.room.order(job, job.newest, only_host=host)  # shares are not journalled
                self.steps.greet(job, host)

    # -- hosts --------------------------------------------------------------------------------

    def _host_up(self, event: HostUp) -> None:
        host = event.info.host_id
        for fact in self.log.merge([f.entry_from_wire(entry) for entry in event.journal]):
            if isinstance(fact, f.StepCommitted | f.StepRetired):
                self._apply(fact, is_replay=True)
        for job in self.jobs.values():
            job.drop_host(host)
        changes = self.hosts.up(self.now, event.info)
        if not changes:
            return
        if host not in self.hosts.joined:
            self.record(f.HostJoined(host, dict(event.info.labels)))
        self._send_journal(host)
        self._greet(host)
        for copy in event.copies:
            self.steps.sealed(self.now, copy)
        self._changed(changes)

    def _changed(self, changes: list[Change]) -> None:
        for change in changes:
            self.note(f"host {change.host_id} is {change.status}: {change.why}", "info" if change.status == "live" else "warning")
            if change.status == "dead":
                self.log.forget(change.host_id)
                self.repair.host_died(change.host_id)
                for job in self.jobs.values():
                    self.durable.host_died(job, change.host_id)
                    job.drop_host(change.host_id)
                self.rounds.source_died(self.now, change.host_id)
        if any(change.status in ("live", "dead") for change in changes):
            self._send_view()
            for job in self.jobs.values():
                self._replace(job)

    def _replace(self, job: Job) -> None:
        """Membership changed: place anew with the fewest moves, claim room there, then see what commits."""
        before = job.placement
        job.placement = None
        placement = self.placement(job, before=before)
        attempt = job.newest
        if placement is not None and attempt is not None and placement != before:
            if attempt.needs or job.copies:
                self.room.order(job, attempt)
            self.send_targets(job.name)
        self.repair.consider(self.now, job)
        self.steps.evaluate_all(job)

    def _send_view(self) -> None:
        rows = [
            [s.info.host_id, s.info.address, s.info.port, s.info.incarnation, s.status]
            for s in self.hosts.states.values()
            if s.status != "dead"
        ]
        for host in self.hosts.live_ids():
            self.tell(host, "view", {"hosts": rows})

    def silent_hosts(self, now: float) -> set[str]:
        """Hosts that facts name, neither answering nor known to be gone for long (R24)."""
        named = {h for job in self.jobs.values() for c in job.commits.values() for hosts in c.hosts for h in hosts}
        if now - self.started_s < self.rules.recovery_grace_s:
            named |= self.expected_hosts
        known_gone = {
            h
            for h, s in self.hosts.states.items()
            if s.status == "dead" and now - s.since_s > self.rules.repair_after_s
        }
        return {h for h in named if not self.hosts.is_answering(h)} - known_gone

    # -- placement ----------------------------------------------------------------------------

    def eligible_hosts(self, rank_hosts: Iterable[str]) -> set[str]:
        """Hosts that may hold copies: those with ranks, those labelled for it, and stand-ins for dead ones (R13)."""
        wanted = set(rank_hosts)
        live = {h for h in wanted if self.hosts.is_live(h)}
        others = [h for h in self.hosts.live_ids() if h not in wanted]
        labelled = {h for h in others if self.hosts.states[h].info.labels.get("memstore") == "replica"}
        # A replacement host gets its share without anybody asking (R29): one stand-in per dead host.
        standins = [h for h in others if h not in labelled and not self.hosts.is_on_probation(self.now, h)]
        return live | labelled | set(standins[: len(wanted) - len(live)])

    def placement(self, job: Job, before: Placement | None = None) -> Placement | None:
        """Return where the newest attempt's copies go, among the hosts that are not dead."""
        attempt = job.newest
        if attempt is None:
            return None
        if job.placement is None:
            hosts = self.eligible_hosts(seat.host_id for seat in attempt.seats.values())
            if not hosts:
                return None
            topology = self.hosts.topology(sorted(hosts))
            strategy = str(attempt.config["placement"])
            if before is None:
                job.placement = place(topology, replicas=attempt.replicas, strategy=strategy)  # type: ignore[arg-type]
            else:
                job.placement = rebalance(before, topology, replicas=attempt.replicas, strategy=strategy).placement  # type: ignore[arg-type]
        return job.placement

    def owner_host(self, job: Job, attempt: Attempt, rank: int) -> str:
        """The host whose targets a rank's copies follow: the rank's own, or a live holder if that is dead."""
        seat = attempt.seats.get(rank)
        if seat is not None and self.hosts.is_live(seat.host_id):
            return seat.host_id
        for step in sorted(job.copies, reverse=True):
            live = sorted(h for h in job.copies[step].get(rank, {}) if self.hosts.is_live(h))
            if live:
                return live[0]
        return seat.host_id if seat is not None else ""

    def send_targets(self, name: str, only_host: str | None = None) -> None:
        """Tell hosts where to push the shards of their ranks (R13)."""
        job = self.jobs[name]
        placement, attempt = self.placement(job), job.newest
        if placement is None or attempt is None or attempt.phase == "fencing":
            return
        for host, targets in placement.targets.items():
            if only_host in (None, host):
                self.tell(host, "targets", {"job": name, "attempt": attempt.ordinal, "targets": list(targets)})

    # -- calls and reports --------------------------------------------------------------------

    def _rank_call(self, event: RankCall) -> None:
        call = Call(event.host_id, event.call_id, event.body, self.now)
        name = str(event.body.get("job", ""))
        known = name in self.jobs
        verb = event.verb
        if verb == "join":
            self.attempts.join(self.now, call)
        elif verb in ("get", "withdraw", "rewind", "reserve", "skip", "close") and not known:
            self.refuse(call, "FencedError", f"the store does not know job {name!r} any more: connect again")
        elif verb == "get":
            self.rounds.get(self.now, call)
        elif verb == "withdraw":
            self.rounds.withdraw(call)
        elif verb == "reserve":
            self.room.reserve(call)
        elif verb == "skip":
            self.steps.skip(call)
        elif verb == "rewind":
            self.attempts.rewind(call)
        elif verb == "close":
            self.attempts.close(call)
        else:
            self.queries.ask(verb, call)

    def _report(self, event: Report) -> None:
        host, kind, body = event.host_id, event.kind, event.body
        if kind == "sealed":
            for item in body["copies"]:
                copy = copy_from_wire(item, host)
                if copy.missing:
                    job = self.jobs.setdefault(copy.shard.job, Job(copy.shard.job))
                    job.add_copy(copy)
                else:
                    self.repair.pushed(copy.shard, host)
                    self.steps.sealed(self.now, copy)
        elif kind == "lost":
            for item in body["shards"]:
                shard = shard_from_wire(item)
                if shard.job in self.jobs:
                    self.jobs[shard.job].drop_copy(shard, host)
        elif kind == "push_failed":
            self.repair.push_failed(self.now, shard_from_wire(body["shard"]), body)
        elif kind == "fenced":
            job = self.jobs.get(str(body["job"]))
            if job is not None:
                job.drop_host(host)
                for item in body["copies"]:
                    job.add_copy(copy_from_wire(item, host))
            self.attempts.fenced(self.now, host, str(body["job"]))
        elif kind == "reserved":
            self.room.reserved(host, body)
        elif kind == "staged" and int(body["round"]) < 0:
            self.queries.staged(body)
        elif kind == "staged":
            self.rounds.staged(self.now, host, body)
        elif kind == "checked":
            self.rounds.checked(self.now, body)
        elif kind == "persisted":
            self.durable.persisted(self.now, host, body)
        elif kind == "markers":
            self.durable.markers_listed(body)
            self.rounds.markers_listed(self.now, str(body["job"]), int(body["call"]))
        elif kind == "answer":
            self.queries.answered(host, body)

    # -- facts --------------------------------------------------------------------------------

    def record(self, fact: f.Fact) -> None:
        """Journal a decision; it takes effect in `_apply` once it has spread (R16)."""
        if self.may_record():
            self._send_fact(fact)
        else:
            self.log.waiting.append(fact)

    def may_record(self) -> bool:
        """Within the lease, or every registered holder was heard from within it (R17)."""
        states = self.hosts.states.values()
        heard = [self.now - s.last_heard_s <= self.rules.lease_s for s in states if s.status != "dead"]
        return self.now <= self.lease_until_s or (bool(heard) and all(heard))

    def is_recording(self, fact: f.StepCommitted) -> bool:
        """True while a commit fact of the same step has not spread yet."""
        pending = [e.fact for e in self.log.entries if e.seq > self.log.applied_seq] + self.log.waiting
        return any(
            isinstance(p, f.StepCommitted) and (p.job, p.attempt, p.step) == (fact.job, fact.attempt, fact.step)
            for p in pending
        )

    def _send_fact(self, fact: f.Fact) -> None:
        entry = self.log.append(fact)
        body = {"reset": False, "records": [f.entry_to_wire(entry)], "seq": entry.seq}
        for host in self.hosts.live_ids():
            self.tell(host, "journal", body)

    def _flush_waiting(self) -> None:
        while self.log.waiting and self.may_record():
            self._send_fact(self.log.waiting.pop(0))

    def _apply_spread(self) -> None:
        while True:
            ready = self.log.spread(self._is_enough) if self.is_settled else []
            if not ready:
                return
            for fact in ready:
                self._apply(fact, is_replay=False)

    def _is_enough(self, hosts: list[str], fact: f.Fact) -> bool:
        job = self.jobs.get(getattr(fact, "job", ""))
        replicas = job.newest.replicas if job is not None and job.newest is not None else 2
        have = self.hosts.domains(h for h in hosts if self.hosts.is_live(h))
        return bool(have) and len(have) >= min(replicas, len(self.hosts.domains(self.hosts.live_ids())))

    def _apply(self, fact: f.Fact, *, is_replay: bool) -> None:
        now = self.now
        if isinstance(fact, f.AttemptOpened):
            self.attempts.apply_opened(now, fact, is_replay=is_replay)
        elif isinstance(fact, f.RestoreDecided):
            self.rounds.apply_decided(now, fact, is_replay=is_replay)
        elif isinstance(fact, f.StepCommitted):
            self.steps.apply_committed(now, fact, is_replay=is_replay)
        elif isinstance(fact, f.StepAbandoned):
            self.steps.apply_abandoned(fact, is_replay=is_replay)
        elif isinstance(fact, f.StepRetired):
            self.jobs.setdefault(fact.job, Job(fact.job)).retired[StepId(fact.attempt, fact.step)] = fact.reason
        elif isinstance(fact, f.AttemptClosed):
            job = self.jobs.get(fact.job)
            if job is not None and fact.attempt in job.attempts:
                job.attempts[fact.attempt].phase = "closed"
        elif isinstance(fact, f.JobRemoved):
            self.jobs.pop(fact.job, None)
        elif isinstance(fact, f.HostJoined):
            self.hosts.joined[fact.host_id] = fact.labels

    def compact(self) -> None:
        """Forget facts of steps that are gone, when the journals have grown."""
        if len(self.log.entries) < FACTS_COMPACT_MIN:
            return
        size = len(self.log.entries)
        if self.log.compact(self._is_needed) and len(self.log.entries) <= size // 2:
            for host in self.hosts.live_ids():
                self._send_journal(host)

    def _is_needed(self, fact: f.Fact) -> bool:
        job = self.jobs.get(getattr(fact, "job", ""))
        if isinstance(fact, f.StepCommitted):
            return job is not None and job.commits.get(StepId(fact.attempt, fact.step)) == fact
        if isinstance(fact, f.StepAbandoned):
            newest = max(job.commits, default=None) if job is not None else None
            return newest is None or StepId(fact.attempt, fact.step) > newest
        if isinstance(fact, f.HostJoined | f.JobRemoved):
            return True
        return job is not None

    # -- for the parts ------------------------------------------------------------------------

    @property
    def wall_s(self) -> float:
        """Wall-clock seconds, for facts that outlive this controller."""
        return self.now + self.wall_offset_s

    @property
    def recovery_grace_s(self) -> float:
        """How long a get waits for hosts named by the newest commit (R24)."""
        return self.rules.recovery_grace_s

    def pinned_steps(self, job: Job) -> set[StepId]:
        """Steps in use by a restore or a durable write: not dropped now."""
        active, write = self.rounds.active.get(job.name), self.durable.state(job.name).active
        steps = {active.plan.step} if active is not None and active.plan is not None else set()
        return {s for s in steps if s is not None} | ({write.step} if write is not None else set())

    def tell(self, host: str, kind: str, body: Body) -> None:
        """Order a holder."""
        self.actions.append(Tell(host, kind, body))

    def answer(self, call: Call, body: Mapping[str, Any]) -> None:
        """Answer a call."""
        self.actions.append(Answer(call.host_id, call.call_id, dict(body)))

    def refuse(self, call: Call, error: str, message: str) -> None:
        """Answer a call with an error of the memstore tree."""
        self.actions.append(Answer(call.host_id, call.call_id, {}, (error, message)))

    def note(self, text: str, level: str = "info") -> None:
        """Log a line."""
        self.actions.append(Note(text, level))
