"""Rebuilds the past of a controller: from all journals at its start, from late hosts afterwards. Pure (R16, R17).

    settling --every expected host up, or settle_s over--> serving

A successor's state is the union of the surviving journals and inventories. A late host's facts may fill gaps of the
past, but it changes no decision that was taken since: a commit of a step that was abandoned meanwhile is not taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from memstore.core.cluster import facts as f
from memstore.core.cluster.job import TRUSTED, AttemptMember, Job
from memstore.core.cluster.text import NAMED_MAX
from memstore.core.controller.parts import Parts
from memstore.core.controller.reactions import Membership
from memstore.core.journal.records import Entry
from memstore.core.wire.messages import Event, HostBeat, HostLost, HostUp, LeaseRenewed, Tick
from memstore.core.wire.orders import DropJob, TakeIncarnation
from recovery.inventory import Copy, StepId


class Takeover:
    """The take-over from a predecessor: settling, and late hosts; `replay` makes a fact of the past true."""

    def __init__(self, parts: Parts, membership: Membership, replay: Callable[[f.Fact], None]) -> None:
        self.state, self.out, self.parts, self.membership, self.replay = (
            parts.state,
            parts.out,
            parts,
            membership,
            replay,
        )
        self.is_settled = False
        self.alone_since_s = math.inf if parts.term > 1 else parts.state.now  # no predecessor has a host any more
        self.journals: dict[str, list[Entry]] = {}
        self.newcomers: set[str] = set()  # that no fact knows yet: those of a tick are recorded together
        self.copies: dict[str, tuple[Copy, ...]] = {}
        self.ranks: dict[str, tuple[str, ...]] = {}  # host -> nonces of the processes that live there
        self.present: set[str] = set()  # nonces of processes that a host has reported since this controller began
        self.missed: dict[str, AttemptMember] = {}  # nonce -> a process that its host did not know when the host came
        self.early: list[Event] = []  # calls that came while settling

    def collect_inventories(self, event: Event) -> list[Event]:
        """Gather journals and inventories before serving; once there are enough, return the events that waited."""
        state, parts, hosts = self.state, self.parts, self.state.hosts
        if isinstance(event, HostUp):
            host = event.info.host_id
            if self._is_outdated(event):
                return []
            hosts.up(state.now, event.info, event.asked_s, event.up_s, event.idle_s)
            self.alone_since_s = min(self.alone_since_s, state.now)
            self.journals[host] = [*self.journals.get(host, ()), *parts.journal.log.read(host, event.journal)]
            self.copies[host] = event.copies
            if event.ranks is not None:
                self.ranks[host] = event.ranks
                self.present.update(event.ranks)
        elif isinstance(event, HostBeat):
            hosts.heartbeat(state.now, event)
        elif isinstance(event, Tick):
            for beat in event.heartbeats:
                hosts.heartbeat(state.now, beat)
        elif isinstance(event, HostLost):
            hosts.lost(state.now, event.host_id, event.why, is_certain=parts.journal.lease.may_record())
            self.copies.pop(event.host_id, None)  # its journal was read: facts stay facts
        elif isinstance(event, LeaseRenewed):
            parts.journal.lease.renew(event.until_s)
        else:
            self.early.append(event)
        is_all_up = all(map(hosts.is_live, state.expected_hosts))  # of thousands nearly always the first is not
        is_late = state.now - state.started_s >= state.rules.settle_s
        # The first host may have kept up a predecessor's lease until it came here (R17).
        has_outlasted = state.now - self.alone_since_s >= state.rules.outlast_s
        if not any(map(hosts.is_live, hosts.states)) or not has_outlasted or not (is_all_up or is_late):
            return []
        self.is_settled = True
        self._rebuild()
        self.out.note(
            "term",
            term=parts.term,
            hosts=hosts.live_ids()[:NAMED_MAX],
            jobs=len(state.jobs),
            seconds={"settling": state.now - state.started_s},
        )
        early, self.early = self.early, []
        return early

    def _rebuild(self) -> None:
        """Apply every fact, then count the copies, then go on where the predecessor stopped."""
        state, parts = self.state, self.parts
        for fact in parts.journal.log.adopt(self.journals.values()):
            self.replay(fact)
        hosts = state.hosts.live_ids()
        for host in hosts:
            parts.journal.send(host, have=self.journals.get(host, ()))
        for copies in self.copies.values():
            for copy in copies:
                parts.steps.take_copy(copy)
        for host in hosts:
            parts.drains.returned(host, has_memory=bool(self.journals.get(host) or self.copies.get(host)))
        for job in state.jobs.values():
            job.prove()
            parts.steps.adopt(job)
        self._look_for_ranks(self.ranks)
        self.journals, self.copies = {}, {}
        self.newcomers.update(hosts)
        self._record_newcomers()
        parts.view.settled(hosts)
        self.send_initial_state(hosts, is_start=True)

    def _look_for_ranks(self, ranks: Mapping[str, tuple[str, ...]]) -> None:
        """Note ranks whose process is unknown to its host: it may still reconnect, or may have died unseen (R20).

        Such a rank is not gone. But it keeps no other process out, and counts as alive only once it is reported.
        """
        attempts = [job.newest for job in self.state.jobs.values() if job.newest is not None]
        for member in (m for attempt in attempts for host in ranks for m in attempt.members_on(host)):
            self.missed.pop(member.nonce, None)
            if member.nonce not in ranks[member.host_id] and not member.is_gone:
                member.last_active_s = -math.inf
                self.missed[member.nonce] = member

    def _look_for_learned(self, jobs: list[Job]) -> None:
        """Note ranks of attempts that a late host has just brought, and that no host has reported: see above.

        Else they would count as active for a minute, and keep every other launch out.
        """
        for job in jobs:
            for member in job.newest.members.values() if job.newest is not None else ():
                if member.nonce not in self.present and not member.is_gone:
                    member.last_active_s = -math.inf
                    self.missed[member.nonce] = member

    def rank_here(self, nonce: str) -> None:
        """Note that a process has connected to its host: it may be the one of a rank that was missed."""
        self.present.add(nonce)
        member = self.missed.pop(nonce, None)
        if member is not None:
            member.last_active_s = max(member.last_active_s, self.state.now)

    def tick(self) -> None:
        """Record the hosts that joined since the last tick, and send all hosts the news."""
        self._record_newcomers()
        self.parts.view.send_news()

    def _record_newcomers(self) -> None:
        hosts = self.state.hosts
        labels = {h: dict(hosts.states[h].info.labels) for h in sorted(self.newcomers.difference(hosts.joined))}
        self.newcomers.clear()
        if labels:
            self.parts.journal.record(f.HostsJoined(labels))

    def send_initial_state(self, hosts: Sequence[str], *, is_start: bool = False) -> None:
        """Send hosts their state before they serve: peers, fences, targets, commits.

        As this controller starts, all answer the fence before an attempt goes on: its predecessor may have died between
        fact and fence (R21).
        """
        self.parts.view.send_initial_state(hosts)
        for name, attempt in self.state.removed.items():  # some were out of reach then: they free its room now
            for host in hosts:
                self.out.send(host, DropJob(job=name, attempt=attempt, shards=()))
        for job in self.parts.room.in_turn():
            if job.newest is not None:
                if is_start and job.newest.phase != "closed":
                    self.parts.attempts.fence_all(self.state.now, job.name)
                else:
                    self.parts.attempts.send_fences(hosts, job.name, job.newest)
                if not self.state.is_placement_stale:  # else the next tick sends it
                    self.parts.view.send_targets(job, only=set(hosts))
                    if job.newest.needs or job.copies:
                        self.parts.room.order(job, job.newest, only=set(hosts))  # shares are not journalled
                for host in hosts:
                    self.parts.steps.send_initial_state(job, host)

    def host_up(self, event: HostUp) -> None:
        """Take in a holder whose session began while serving: new, late or back again."""
        state, parts, host = self.state, self.parts, event.info.host_id
        if self._is_outdated(event):
            return
        known = state.hosts.states.get(host)
        if known is not None and known.info.incarnation < event.info.incarnation:
            # Its successor may connect before its end is reported: its work has ended all the same.
            self.membership.changed(state.hosts.lost(state.now, host, "another holder has taken its place"))
        parts.journal.send_facts()  # of that end: to those that are live; it has them with what its journal lacks
        changes = state.hosts.up(state.now, event.info, event.asked_s, event.up_s, event.idle_s)
        parts.journal.log.forget(host)
        parts.sent_orders.forget_host(host)
        journal = parts.journal.log.read(host, event.journal)
        self._learn_nonces(host, journal)
        newest = {name: job.newest for name, job in state.jobs.items()}
        is_news = self._merge(journal)
        for job in state.jobs.values():
            job.drop_host(host)
        parts.drops.forget_host(host)
        if event.ranks is not None:
            self.present.update(event.ranks)
            self._look_for_ranks({host: event.ranks})
        self.newcomers.add(host)
        if not is_news:  # else all have the whole of it already
            parts.journal.send(host, have=journal)
        self.send_initial_state([host])
        for copy in sorted(event.copies, key=lambda c: c.shard):  # in order, or older steps would look passed over
            parts.steps.sealed(state.now, copy)
        for job in state.jobs.values():
            job.prove()
        self._look_for_learned([job for name, job in state.jobs.items() if job.newest is not newest.get(name)])
        self.membership.changed(changes)

    def _learn_nonces(self, host: str, journal: list[Entry]) -> None:
        """Take the processes of a late host's ranks: only its own journal names them."""
        for fact in (entry.fact for entry in journal if isinstance(entry.fact, f.AttemptOpened)):
            attempt = self.state.jobs[fact.job].attempts.get(fact.attempt) if fact.job in self.state.jobs else None
            for member in attempt.members_on(host) if attempt is not None else ():
                member.nonce = member.nonce or fact.nonces[member.rank]

    def _is_outdated(self, event: HostUp) -> bool:
        """Refuse a holder with a lower incarnation than one before it: it lost its folder, and takes the next (R3)."""
        state, info = self.state, event.info
        later = state.hosts.later_life(info)
        if later is None:
            return False
        self.out.log(
            f"host {info.host_id}: its holder at {info.endpoints[0]} has incarnation {info.incarnation}, an "
            f"earlier one at {later.endpoints[0]} had {later.incarnation}: it is ordered to take a higher one",
            "warning",
        )
        self.out.send(info.host_id, TakeIncarnation(above=later.incarnation))
        return True

    def _merge(self, journal: list[Entry]) -> bool:
        """Take facts that only this host had kept, and give them to all (R16); True if there were some."""
        state, parts = self.state, self.parts
        late = parts.journal.log.merge(journal, self._is_welcome)
        before = {name: job.newest for name, job in state.jobs.items()}
        for fact in late:
            self.replay(fact)
        if late:
            parts.journal.send(*state.hosts.live_ids())
        for opened in (fact for fact in late if isinstance(fact, f.AttemptOpened)):
            self._warn_of_other_history(opened)
        for name, job in state.jobs.items():
            if job.newest is not None and job.newest is not before.get(name):
                self.out.log(f"job {name!r}: a late host knows of attempt {job.newest.attempt_number}", "warning")
                if job.newest.phase == "closed":
                    parts.attempts.send_fences(state.hosts.live_ids(), name, job.newest)
                else:
                    parts.attempts.fence_all(state.now, name)
        return bool(late)

    def _warn_of_other_history(self, late: f.AttemptOpened) -> None:
        """Say that the present launch began without an attempt of its job that a late host brings."""
        job = self.state.jobs[late.job]
        newest = job.newest
        if newest is None or any(span.attempt == late.attempt for span in job.spans(newest.attempt_number)):
            return
        number = newest.attempt_number
        self.out.log(
            f"job {late.job!r}: a late host knows of attempt {late.attempt}, which attempt {number} does not follow. "
            "To go on from its steps, start the job again before it commits one, or rewind()",
            "warning",
        )

    def _is_welcome(self, fact: f.Fact) -> bool:
        """Return whether a late fact only fills a gap, and contradicts nothing that was decided without it."""
        job = self.state.jobs.get(getattr(fact, "job", ""), Job(""))
        if isinstance(fact, f.HostsJoined):
            return not fact.labels.keys() <= self.state.hosts.joined.keys()
        if isinstance(fact, f.StepUnpinned):
            return False  # of a pin that only that host knew nothing is left; any other one's end is known
        if isinstance(fact, f.HostDraining):
            return False  # notices are given to a controller; a late host's may be long past
        if isinstance(fact, f.JobRemoved) or self.parts.job_removal.is_void(fact):
            return False
        if isinstance(fact, f.StepRetired):
            # It is no decision but a property of these bytes, under every controller (R25).
            return fact.is_torn or self._is_last_word(fact)
        if isinstance(fact, f.AttemptOpened):
            return fact.attempt not in job.attempts
        if isinstance(fact, f.StepCommitted):
            return not job.is_abandoned(StepId(fact.attempt, fact.step))
        if isinstance(fact, f.StepPinned):
            known = job.pins.get(fact.name)
            is_newer = known is None or (known.attempt, known.step) < (fact.attempt, fact.step)
            return (known is None or fact.name == TRUSTED) and is_newer and self._is_pin_there(job, fact)
        if isinstance(fact, f.StepSkipped):
            return StepId(fact.attempt, fact.step) not in job.commits
        # The other facts record the course of an attempt. Only the newest attempt's is decided here.
        return job.newest is None or fact.attempt != job.newest.attempt_number

    def _is_pin_there(self, job: Job, fact: f.StepPinned) -> bool:
        """Return whether the step is committed and the late host has no end of the pin.

        Its commit may come with the pin if it is beyond all that are known: of others the pin's end may be forgotten.
        """
        facts = [entry.fact for entry in self.parts.journal.log.entries]
        at = next(number for number, other in enumerate(facts) if other is fact)
        if any(isinstance(x, f.StepUnpinned) and (x.job, x.name) == (fact.job, fact.name) for x in facts[at:]):
            return False
        step, newest = StepId(fact.attempt, fact.step), job.newest
        if step in job.commits or job.is_abandoned(step):
            return step in job.commits
        committed = (x for x in facts[:at] if isinstance(x, f.StepCommitted))
        is_committed = any((x.job, x.attempt, x.step) == (fact.job, fact.attempt, fact.step) for x in committed)
        return is_committed and (
            newest is None or step > StepId(newest.attempt_number, job.newest_commit(newest.attempt_number))
        )

    def _is_last_word(self, fact: f.StepRetired) -> bool:
        """Return whether no later fact contradicts this one; the log has the late host's facts in their places."""
        facts = [entry.fact for entry in self.parts.journal.log.entries if isinstance(entry.fact, f.StepRetired)]
        about = [x for x in facts if (x.job, x.attempt, x.step) == (fact.job, fact.attempt, fact.step)]
        return about[-1] == fact
