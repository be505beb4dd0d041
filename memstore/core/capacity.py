"""Room for a job's steps: reserved on all hosts at the first put, given back when a newer step is committed.

The controller's machine calls it, and so do commit, repair and restore, which need room or free it. It never looks at
an arena: hosts claim and refuse, with their numbers.

    ranks ask --all asked, or one has put--> hosts ordered --all claimed--> fact 'room claimed' --> put
      '--deadline--> refused                    '--one refuses--> refused on all ranks, with its numbers
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from msgspec import structs

from memstore.core.cluster import facts as f
from memstore.core.cluster.collective import attempt_of, gather_timeout, job_removed, newer_attempt
from memstore.core.cluster.effects import Effects, SentOrders
from memstore.core.cluster.facts import SlotsReserved
from memstore.core.cluster.job import Attempt, Call, Job, LeaseRoom, RankCalls
from memstore.core.cluster.state import ClusterState
from memstore.core.cluster.step_lookup import kept_steps, versions_count
from memstore.core.cluster.text import listed_pins
from memstore.core.journal.replication import Journal
from memstore.core.targets.targets import ClusterView, PeerHostLookup
from memstore.core.wire.calls import ReserveRoom
from memstore.core.wire.ids import WireShard, WireStep
from memstore.core.wire.orders import FreeCopies, FreeStep, Reserve, TermNumber
from memstore.core.wire.replies import Noted
from memstore.core.wire.reports import Freed, Reserved, StepFreed
from recovery.inventory import ShardId, StepId
from recovery.lineage import in_lineage
from recovery.parity import ParitySet

# -- compaction ---------------------------------------------------------------------------------------
# Which facts of the past nothing needs any more, so that journals stay short. Pure (R16).


JOURNAL_NBYTES_MIN = 64 << 10  # journals shorter than this are not worth rewriting


def compact(state: ClusterState, journal: Journal) -> None:
    """Forget facts that are not needed, and have the journals rewritten once they are half as long."""
    if journal.log.journal_nbytes < JOURNAL_NBYTES_MIN:
        return
    journal.log.shorten(lambda fact: shorter(state, fact))
    if journal.log.compact(lambda fact: is_needed(state, fact)):
        journal.shorten()


def shorter(state: ClusterState, fact: f.Fact) -> f.Fact:
    """Return the part of a fact that is still needed, which may be the whole fact.

    An ended attempt keeps its number, its parent, its key and its launch options: lineage, crash loops and
    spent keys need them (R20, R22, R25). Its processes and their hosts are not needed any more once a later attempt has
    committed and none of its committed steps is kept: those hosts may have copies of such a step.
    """
    if not isinstance(fact, f.AttemptOpened) or not fact.hosts:
        return fact
    job = state.jobs.get(fact.job)
    attempt, newest = (job.attempts.get(fact.attempt), job.newest) if job is not None else (None, None)
    if job is None or attempt is None or newest is None or fact.attempt >= newest.attempt_number:
        return fact
    if job.newest_commit(newest.attempt_number) < 0 or job.newest_commit(fact.attempt) >= 0:
        return fact
    attempt.needs, attempt.groups = {}, {}
    attempt.place({})
    return structs.replace(fact, nonces=f.kept_by((), ()), hosts=(), shard_of=(), writers=(), groups={})


def is_needed(state: ClusterState, fact: f.Fact) -> bool:
    """Return whether a successor would know less without this fact."""
    job = state.jobs.get(getattr(fact, "job", ""))
    if isinstance(fact, f.StepCommitted):
        return job is not None and job.commits.get(StepId(fact.attempt, fact.step)) == fact
    if isinstance(fact, f.StepSkipped):
        newest = max(job.commits, default=None) if job is not None else None
        return newest is None or StepId(fact.attempt, fact.step) > newest
    if isinstance(fact, f.SlotsReserved):
        return job is not None and fact.attempt == job.newest_number
    if isinstance(fact, f.StepPinned):
        return job is not None and job.pins.get(fact.name) == fact
    if isinstance(fact, f.StepUnpinned):
        return False  # nor is the pin that it took back
    if isinstance(fact, f.HostsJoined | f.JobRemoved):
        return True
    if isinstance(fact, f.HostDraining):
        return fact.until_s is not None and state.draining.get(fact.host_id) == fact.until_s
    return job is not None


# -- drop orders --------------------------------------------------------------------------------------
# Copies that hosts are ordered to free, and that do not count from then on. Pure (R7, R19).


class Drops:
    """Orders to free copies, one by one or all of a step, until each is obeyed."""

    def __init__(self, state: ClusterState, out: Effects, term: int) -> None:
        self.state, self.out, self.term = state, out, term
        #: Host -> copy, or step of a job -> numbers of the orders it has to obey.
        self._ordered: dict[str, dict[ShardId | tuple[str, StepId], set[int]]] = {}
        self._given_count = 0

    def order(self, host: str, shards: Sequence[ShardId]) -> None:
        """Order a host to free copies; the caller takes them off the job."""
        self._given_count += 1
        ordered = self._ordered.setdefault(host, {})
        for shard in shards:
            ordered.setdefault(shard, set()).add(self._given_count)
        number = TermNumber(self.term, self._given_count)
        self.out.send(host, FreeCopies(shards=tuple(map(WireShard.of, shards)), number=number))

    def order_step(self, job: str, step: StepId, hosts: Iterable[str]) -> None:
        """Order hosts to free all that they have of a step; the caller takes it off the job."""
        self._given_count += 1
        number = TermNumber(self.term, self._given_count)
        order = FreeStep(job=job, step=WireStep.of(step), number=number)
        for host in sorted(hosts):
            self._ordered.setdefault(host, {}).setdefault((job, step), set()).add(self._given_count)
            self.out.send(host, order)

    # Both take off their job what was counted in an inventory while an older order was still to be obeyed.

    def freed(self, host: str, report: Freed) -> None:
        """Note that a host has freed copies, perhaps for an earlier session or controller."""
        for shard in (row.id for row in report.shards):
            self._obeyed(host, shard, report.number)
            job = self.state.jobs.get(shard.job)
            if job is not None and job.has_copy(shard, host):
                job.drop_copy(shard, host)

    def step_freed(self, host: str, report: StepFreed) -> None:
        """Note that a host has freed all that it had of a step, perhaps for an earlier session or controller."""
        step = report.step.id
        self._obeyed(host, (report.job, step), report.number)
        job = self.state.jobs.get(report.job)
        if job is not None:
            job.drop_step_on(host, step)

    def _obeyed(self, host: str, what: ShardId | tuple[str, StepId], number: TermNumber | None) -> None:
        ordered = self._ordered.get(host, {})
        numbers = ordered.get(what, set())
        if number is not None and number.term == self.term:
            numbers.discard(number.number)
        if not numbers:
            ordered.pop(what, None)

    def is_ordered(self, host: str, shard: ShardId) -> bool:
        """Return whether a host has yet to free a copy, so that a report of it is outdated."""
        ordered = self._ordered.get(host, {})
        return shard in ordered or (shard.job, StepId(shard.attempt, shard.step)) in ordered

    def forget_host(self, host: str) -> None:
        """Forget a host's orders: a new session begins with its inventory, and older orders may be lost."""
        self._ordered.pop(host, None)


# -- retention ----------------------------------------------------------------------------------------


STEPS_REMEMBERED = 1000  # phases of older steps say nothing that the newest commit does not say


class Retention:
    """Keeps and drops the steps of all jobs."""

    def __init__(self, state: ClusterState, journal: Journal, drops: Drops) -> None:
        self.state, self.journal, self.drops = state, journal, drops

    def retain(self, job: Job) -> None:
        """Drop copies of steps that are no longer kept: only after a newer commit, never a restorable need (R19)."""
        attempt = job.newest
        if attempt is None:
            return
        has_commit = any(s.attempt == attempt.attempt_number for s in job.commits)
        kept, busy = kept_steps(job, attempt), self.state.holds.steps(job)
        for step in dict.fromkeys([*job.copies, *job.parity]):
            if step in kept or step in busy:
                continue
            is_open = step.attempt == attempt.attempt_number and attempt.steps.get(step.step) in ("open", "committing")
            if is_open or not has_commit or not kept or (step.attempt == attempt.attempt_number and step > max(kept)):
                continue
            self._drop_step(job, step)
        # A commit is forgotten only beside a newer one: the last one is history even when its bytes are lost (R23).
        for step in [s for s in job.commits if kept and s < max(kept) and s not in {*job.copies, *kept, *busy}]:
            del job.commits[step]
        newest = job.newest_commit(attempt.attempt_number)
        for number in [n for n in attempt.steps if n < newest - STEPS_REMEMBERED]:
            del attempt.steps[number]
        # older ones are below the newest commit anyway
        attempt.abandoned_ranges = [h for h in attempt.abandoned_ranges if h[1] > newest]
        compact(self.state, self.journal)

    def free_unrestorable(self, job: Job) -> None:
        """Drop, from an attempt's first put on, older steps that no lineage can restore any more (R10, R22).

        An uncommitted step of an older attempt, or a committed one beyond the restored step that is not whole, would
        otherwise fill the share until the first commit, and the first put could never get slots. Whole committed steps
        beyond the restored one stay until then, the newest of them for which there is room: a rewind may be taken back.
        What is held at the first put, such as by a pin, is looked at again when a put is skipped.
        """
        attempt = job.newest
        if attempt is None:
            return
        attempt.has_freed_unrestorable = True
        spans, busy = job.spans(attempt.attempt_number), self.state.holds.steps(job)
        kept = kept_steps(job, attempt)
        # Kept steps and further ones share all versions but the one that the put needs.
        spare = versions_count(job, attempt) - 1 - len(kept & job.copies.keys())
        known = {*job.copies, *job.parity}
        for step in sorted((s for s in known if s.attempt < attempt.attempt_number and s not in busy), reverse=True):
            commit = job.commits.get(step)
            is_whole = commit is not None and len(job.copies.get(step, ())) == commit.world_size
            is_beyond = not in_lineage(spans, step)
            is_old = not is_beyond and step not in kept  # a restore adopted a newer one by a fact
            if commit is None or is_old or (is_beyond and (not is_whole or spare <= 0)):
                self._drop_step(job, step)
                if is_old:
                    job.commits.pop(step, None)  # so that a copy that comes late goes too
            elif is_beyond:
                spare -= 1

    def free_unfinished(self, job: Job, attempt: Attempt, hosts: Collection[str]) -> None:
        """Drop, on hosts to which a restore brings chunks, what older attempts have put and not committed (R10).

        No rank will finish it, and it lies in the version that is empty otherwise.
        """
        spared = self.state.holds.steps(job) | job.commits.keys()
        for step in sorted({*job.copies, *job.parity} - spared):
            if step.attempt < attempt.attempt_number:
                having = job.hosts_of(step).intersection(hosts)
                self.drops.order_step(job.name, step, having)
                for host in having:
                    job.drop_step_on(host, step)

    def _drop_step(self, job: Job, step: StepId) -> None:
        """Free every copy of a step in RAM."""
        self.drops.order_step(job.name, step, job.hosts_of(step))
        job.drop_step(step)


# -- reservations -------------------------------------------------------------------------------------
# Room for a job's versions: reserved on all hosts at the first put, or refused on all ranks alike. Pure (R10, R19).
#
# Pins and leases claim room as well. Every order carries a number, by which its answers are known.


Room = Counter[int | str]  # slots by rank, on its own host, and by host, for other hosts' ranks and for parity
SLOTS_MAX = 1 << 40  # of one rank: the sum of all ranks and versions stays below the 2**62 of a message
RETRY_S = 5.0  # between two tries of a host that had no room when it joined
REBUILD_S = 30.0  # until room that was refused is asked for again, or that is not used any more goes back
GATHER_S = 5.0  # for other ranks to ask for more than they prepared as well, unless one puts: then it needs no more


@dataclass(slots=True)
class Reservation:
    """Calls that wait until every host named has claimed the room."""

    attempt: int
    calls: RankCalls[ReserveRoom] = field(default_factory=RankCalls)
    #: Want more than was ordered: a reservation of their own, next.
    late: RankCalls[ReserveRoom] = field(default_factory=RankCalls)
    before: dict[int, int | None] = field(default_factory=dict)  # rank -> its need until it called
    ordered: list[int] = field(default_factory=list)  # slots of one version by rank, as last sent to the hosts
    waits: set[str] = field(default_factory=set)
    refusals: dict[str, str] = field(default_factory=dict)
    faults: set[str] = field(default_factory=set)  # hosts that refused for want of something else than room
    number: int = 0  # of the order
    is_ordered: bool = False
    is_claimed: bool = False  # every host has the room; the fact is spreading


@dataclass(slots=True)
class Claim:
    """Room for a pin or a lease: `done(host, why)` gets the first refusal, or ("", "") if there is none."""

    job: str
    waits: set[str]
    done: Callable[[str, str], None]
    refusals: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReservationRefused:
    """A host had no room for an attempt when it joined."""

    attempt: int
    why: str
    due_s: float  # when to ask again


@dataclass(slots=True)
class RebuildRoom:
    """Room on one host for copies that placement does not ask of it: they stand in for those of a host that flaps."""

    slots_count: int
    used_s: float  # when it was last asked for: room that no host asks for goes back
    number: int = 0  # of the order that asked for it, or the last one before it was asked again without it
    state: Literal["asked", "claimed", "refused"] = "asked"


class Reservations:
    """Reservations of all jobs."""

    def __init__(
        self,
        state: ClusterState,
        out: Effects,
        journal: Journal,
        sent_orders: SentOrders,
        view: ClusterView,
        retention: Retention,
    ) -> None:
        self.state, self.out, self.journal, self.term = state, out, journal, journal.log.term
        self.sent_orders, self.view, self.retention = sent_orders, view, retention
        self.claims: dict[int, Claim] = {}  # by the number of the order
        self.orders_count = 0
        self.active: dict[str, Reservation] = {}
        self.unroomed: dict[tuple[str, str], ReservationRefused] = {}  # by job and late host
        # Job and host that has no room for pinned copies which are to move -> the last order that asked for it.
        self.tight: dict[tuple[str, str], int] = {}
        self.rebuilds: dict[tuple[str, str], RebuildRoom] = {}  # by job and host
        # Job -> the last order that asked for more versions in flight than now, and the hosts that got a later one.
        self.lowered: dict[str, tuple[int, set[str]]] = {}

    def reserve(self, call: Call[ReserveRoom]) -> None:
        """Handle a rank's preparation or first put, or a put that has outgrown its share."""
        found = attempt_of(self.state, self.out, call)
        if found is None:
            return
        job, attempt = found
        # A decided get that failed does not count: its except-branch must not evict the unreadable step (R19), which
        # may be one that was never committed (R23).
        is_rewound = attempt.has_restored and attempt.rounds_count == 0
        may_put = attempt.is_released or is_rewound or attempt.is_fresh or attempt.has_put
        has_steps = job.has_history or self.state.is_dropped(job) or attempt.has_restored
        if has_steps and not may_put:
            if attempt.failed_load:
                what = f"that this attempt could not load ({attempt.failed_load[1]})"
            elif attempt.has_restored:
                what = "that not every rank of this attempt has loaded"
            else:
                what = "that this attempt has not asked for"
            self.out.refuse(
                call,
                "CommitError",
                f"job {job.name!r} has checkpoints {what}: putting now would evict them. "
                "Call store.get() on every rank first, or connect(..., fresh=True) to start over",
            )
            return
        rank, slots = call.request.rank, call.request.slots
        if slots > SLOTS_MAX:
            self.out.refuse(
                call,
                "CapacityError",
                f"rank {rank} of job {job.name!r} asks for {slots:,} slots, the limit is {SLOTS_MAX:,}: put less",
            )
            return
        active = self.active.get(job.name)
        if active is None or active.attempt != attempt.attempt_number:
            self._dismiss(active, *newer_attempt(job.name))
            active = self.active[job.name] = Reservation(attempt.attempt_number)
            self._forget_tight(job.name)
        known = attempt.needs.get(rank)
        attempt.needs[rank] = max(slots, known or 0) if attempt.has_put else slots  # what puts live in never shrinks
        if rank in active.late or (active.is_ordered and slots > (known or 0)):
            active.late[rank] = call
        else:
            active.calls[rank] = call
        active.before.setdefault(rank, known)
        self._order_if_all(job, attempt, active)

    def _order_if_all(self, job: Job, attempt: Attempt, active: Reservation) -> None:
        if not attempt.has_put and len(attempt.needs) < attempt.world_size:
            return  # most ranks of a first put end here, so that not every one of them costs a look at all ranks
        if active.is_ordered or self.silent_ranks(job, attempt) or not self._is_gathered(attempt, active):
            return
        active.is_ordered = True
        active.ordered = [self.need(job, attempt, rank) for rank in range(attempt.world_size)]
        self.take_back_leases(job.name)
        if not attempt.has_put:
            self.retention.free_unrestorable(job)
            attempt.parity_sets = attempt.parity_sets or self.view.parity_sets(job, attempt, active.ordered)
            self.view.fit(job, attempt)
        active.waits, active.number = self.order(job, attempt), self.orders_count
        self._finish(job, active)

    def _is_gathered(self, attempt: Attempt, active: Reservation) -> bool:
        """Return whether no other rank is to be refused together with the one that asks.

        Ranks whose first put is larger than prepared ask one by one, and the last of them might not fit alone.
        """
        if attempt.has_put or len(active.calls) == attempt.world_size:
            return True
        if len(attempt.needs) < attempt.world_size or not active.calls:
            return False
        is_more = any(attempt.needs[rank] > (active.before[rank] or 0) for rank in active.calls)
        newest_s = max(call.since_s for call in active.calls.values())
        return not is_more or self.state.now - newest_s >= GATHER_S

    def _dismiss(self, active: Reservation | None, error: str, why: str) -> None:
        """Drop the wait for this reservation."""
        if active is not None:
            RankCalls({**active.calls, **active.late}).refuse_all(self.out, error, why)

    def _take_back(self, attempt: Attempt, active: Reservation) -> None:
        """Restore the earlier needs of the callers after a refusal."""
        for rank, slots in active.before.items():
            if slots is None:
                attempt.needs.pop(rank, None)
            else:
                attempt.needs[rank] = slots

    def silent_ranks(self, job: Job, attempt: Attempt) -> list[int]:
        """Return the ranks whose need is not known: they reported none, and put nothing that shows it."""
        silent = [rank for rank in range(attempt.world_size) if rank not in attempt.needs]
        return [rank for rank in silent if not (attempt.has_put and self.need(job, attempt, rank))]

    def claim(self, job: Job, attempt: Attempt, done: Callable[[str, str], None]) -> set[str]:
        """Ask every live host of the job for the room it needs now, then call `done`. Return the hosts asked."""
        hosts = self.order(job, attempt)
        self.claims[self.orders_count] = Claim(job.name, set(hosts), done)
        self._finish_claims()
        return hosts

    def grow(self, job: Job, attempt: Attempt) -> None:
        """Have every host of the job get memory and connections ready for puts of the restored size.

        Nothing is claimed and nothing refused: the job may only want to read (D107). Where ranks share a state
        (R34), the writers may have changed, and the size with them.
        """
        if not attempt.needs and not attempt.shard_of:
            self.order(job, attempt, is_growth=True)

    def order(
        self,
        job: Job,
        attempt: Attempt,
        *,
        only: Collection[str] | None = None,
        is_growth: bool = False,
        is_news_only: bool = False,
    ) -> set[str]:
        """Send every live host of the job (or some, or those to which it is news) what to claim; return the hosts."""
        self.orders_count += 1
        if self.view.placement(job) is None:
            return set()
        room, local = self._room(job, attempt), dict[str, dict[int, int]]()
        for rank, member in sorted(attempt.members.items()):
            local.setdefault(member.host_id, {})[rank] = room[rank]
        sent_orders, known = self.sent_orders, {*local, *(place for place in room if isinstance(place, str))}
        hosts = {h for h in known if self.state.hosts.is_live(h) and (only is None or h in only)}
        for host in sorted(hosts):
            rebuild = self.rebuilds.get((job.name, host))
            rebuild_slots = rebuild.slots_count if rebuild is not None and rebuild.state != "refused" else 0
            order = Reserve(
                job=job.name,
                attempt=attempt.attempt_number,
                ranks=local.get(host, {}),
                peer_slots=room[host] + rebuild_slots,
                world_size=attempt.world_size,
                versions=versions_count(job, attempt),
                number=TermNumber(self.term, self.orders_count),
                is_claim=not is_growth,
                may_lease=bool(attempt.needs) or attempt.has_put or attempt.is_released,
            )
            if is_news_only and sent_orders.is_known(host, order):
                hosts.discard(host)
                continue
            if order.is_claim:
                sent_orders.note(host, order)
            self.out.send(host, order)
        return hosts

    def room_to_rebuild(self, job: Job, attempt: Attempt, host: str, slots_count: int) -> RebuildRoom:
        """Return a host's room for copies that placement does not ask of it; the first call asks the host for it.

        It is no part of the reservation: a host that has no memory for it refuses it, and stands in for no other.
        """
        key = (job.name, host)
        room = self.rebuilds.get(key)
        if room is None or (room.slots_count != slots_count and room.state != "refused"):
            room = self.rebuilds[key] = RebuildRoom(slots_count, self.state.now)
            self.order(job, attempt, only=(host,))
            room.number = self.orders_count
        if room.state != "refused":
            room.used_s = self.state.now
        return room

    def _end_rebuilds(self, now: float) -> None:
        """Give back the room for copies in other hosts' stead that were not asked for lately."""
        for (name, host), room in list(self.rebuilds.items()):
            job = self.state.jobs.get(name)
            if job is None or job.newest is None or not self.state.hosts.is_live(host):
                del self.rebuilds[name, host]
            elif now - room.used_s > REBUILD_S:
                del self.rebuilds[name, host]
                self.order(job, job.newest, only=(host,), is_news_only=True)

    def take_back_leases(self, name: str) -> None:
        """End the leases of all readers, and give their room to puts of a job that needs it (R36)."""
        for job in self.state.jobs.values():
            if job.leased:
                self.out.note("leases_ended", job=job.name, readers=sum(map(len, job.leased.values())), of_job=name)
            if job.lease_room.versions:
                job.leased.clear()
                job.lease_room = LeaseRoom()
                self.retention.retain(job)
                if job.newest is not None:
                    self.order(job, job.newest)

    def in_turn(self) -> list[Job]:
        """Return all jobs in the order in which they claim a host's room: training ones first, closed ones after."""
        return sorted(self.state.jobs.values(), key=lambda job: job.newest is None or job.newest.phase == "closed")

    def _room(self, job: Job, attempt: Attempt) -> Room:
        """Return the room that a job needs; pinned, leased and outgrown slots have their own beside the versions."""
        versions = versions_count(job, attempt)
        needs = {rank: self.need(job, attempt, rank) for rank in range(attempt.world_size)}
        total = self._version_room(job, attempt, needs)
        for place in total:
            total[place] *= versions
        total.update(self._older_elsewhere(job, attempt, needs))
        total.update(self._version_room(job, attempt, self._outgrown_slots(job, attempt)))
        leased = self._version_room(job, attempt, dict(enumerate(job.lease_room.needs)))
        for _ in range(job.lease_room.versions):
            total.update(leased)
        for pins in job.pinned_rooms():
            rooms = (
                self._version_room(job, attempt, dict(enumerate(p.needs)), StepId(p.attempt, p.step)) for p in pins
            )
            total.update(functools.reduce(operator.or_, rooms, Room()))  # the larger of two
        for host, slots in self._pinned_elsewhere(job, attempt).items():
            if (job.name, host) not in self.tight:
                total[host] += slots
        return total

    def _version_room(self, job: Job, attempt: Attempt, needs: Mapping[int, int], step: StepId | None = None) -> Room:
        """Return the room for shards of these sizes, by rank, their copies and their rows of parity.

        Args:
            job: The job.
            attempt: Its newest attempt.
            needs: Slots by rank.
            step: The pinned step; None: what the attempt puts. Chunks of two pinned steps are in no common row.
        """
        found, lookup = self._rows_room(job, attempt, needs, step), PeerHostLookup(self.view, job, attempt, step)
        for rank, slots in needs.items():
            found[rank] = slots
            for target in lookup.peer_hosts(rank):
                found[target] += slots
        return found

    def _rows_room(self, job: Job, attempt: Attempt, needs: Mapping[int, int], step: StepId | None = None) -> Room:
        """Return the room for the rows of parity alone."""
        found = Room()
        sets = attempt.parity_sets if step is None else job.parity_sets(step)
        for rank, ranks in sets.items() if needs else ():
            rows = max(ranks.rows_count(needs.get(other, 0)) for other in ranks.others(rank))
            for host in self._parity_hosts(job, attempt, rank, step):
                found[host] += rows
        return found

    def _parity_hosts(self, job: Job, attempt: Attempt, rank: int, step: StepId | None) -> set[str]:
        """Return where a rank's parity is put; of a pinned step also where repair adds it up if that host is to go."""
        own = {attempt.members[rank].host_id} if rank in attempt.members else set()
        return own if step is None else {*own, self.view.owner_host(job, attempt, rank)}

    def _pinned_elsewhere(self, job: Job, attempt: Attempt) -> Counter[str]:
        """Return the slots by host of pinned copies, and parity, that are where their rank puts none any more.

        Each copy is moved once there is room for it where it belongs. In the place of what comes there now, two hosts
        that are full of each other's pinned copies would wait for ever.
        """
        total = Counter[str]()
        for step in job.pins_and_asked():
            lookup = PeerHostLookup(self.view, job, attempt, step)
            for rank, copies in job.copies.get(step, {}).items():
                expected = {*lookup.peer_hosts(rank)}
                if rank in attempt.members:
                    expected.add(attempt.members[rank].host_id)
                for host in copies.keys() - expected:
                    total[host] += copies[host].spec.chunks_count
            for rank, parity in job.parity.get(step, {}).items():
                for host in parity.keys() - self._parity_hosts(job, attempt, rank, step):
                    total[host] += parity[host].spec.chunks_count
        return total

    def _older_elsewhere(self, job: Job, attempt: Attempt, needs: Mapping[int, int]) -> Room:
        """Return the room that kept steps of older attempts take on hosts where their ranks put nothing any more.

        All of it, where there is so much: the places of a version are left to what repair still brings there. Else so
        much as the rows of a version, which repair may still add up, do not hold.
        """
        found = Room()
        kept = kept_steps(job, attempt) - job.pinned_steps() if attempt.parity_sets or job.parity else ()
        older = [step for step in kept if step.attempt != attempt.attempt_number]
        if not older:
            return found
        rows = self._rows_room(job, attempt, needs)
        own = {rank: member.host_id for rank, member in attempt.members.items()}
        for step in older:
            decoded = self._decoded_elsewhere(job, attempt, step)
            for host, shards in job.shards_on(step).items():
                foreign = [s for s in shards if s.is_parity or (own.get(s.rank) != host and s.rank not in decoded)]
                astray = [s for s in foreign if s.rank not in attempt.parity_sets or own.get(s.rank) != host]
                taken, moving = (
                    sum(spec.chunks_count for spec in map(job.spec, those) if spec is not None)
                    for those in (foreign, astray)
                )
                is_tight = (job.name, host) in self.tight
                found[host] += max(0, taken - rows[host], 0 if is_tight else moving)
        return found

    def _decoded_elsewhere(self, job: Job, attempt: Attempt, step: StepId) -> set[int]:
        """Return the ranks whose own hosts have whole copies again: others of them, decoded for safety, soon go (R37).

        Only of sets on hosts apart, whose parity repair can make whole: else the others stay until the next commit.
        """
        domains, found = self.state.hosts.live_domains(attempt.level_asked), set[int]()
        hosts = {rank: member.host_id for rank, member in attempt.members.items()}
        for rank, ranks in job.parity_sets(step).items():
            own = job.copies.get(step, {}).get(rank, {}).get(hosts.get(rank, ""))
            places = {domains.get(hosts.get(other, ""), "") for other in ranks.ranks} - {""}
            if own is not None and not own.missing and len(places) == len(ranks.ranks):
                found.add(rank)
        return found

    def _outgrown_slots(self, job: Job, attempt: Attempt) -> dict[int, int]:
        """Return the slots by rank that kept steps of older attempts take beyond a present version (R10).

        A state that has shrunk would otherwise find its share full of the step that was restored, and skip for ever:
        only the first commit lets that step go. Steps of another world size are in no rank's part of a share (D75).
        """
        total: dict[int, int] = {}
        for step in kept_steps(job, attempt) - job.pinned_steps():
            if step.attempt == attempt.attempt_number or job.commits[step].world_size != attempt.world_size:
                continue
            for rank, copies in job.copies.get(step, {}).items():
                excess = max(copy.spec.chunks_count for copy in copies.values()) - self.need(job, attempt, rank)
                total[rank] = total.get(rank, 0) + max(0, excess)
        return total

    def need(self, job: Job, attempt: Attempt, rank: int) -> int:
        """Return the slots of one version of a rank's shard: as the rank reported, else those of its newest copy."""
        if rank in attempt.needs:
            return attempt.needs[rank]
        for step in sorted(job.copies, reverse=True):
            for copy in job.copies[step].get(rank, {}).values():
                return copy.spec.chunks_count
        return 0

    def reserved(self, host_id: str, report: Reserved) -> None:
        """Take a host's answer to an order of this term: the room is claimed, or refused with numbers.

        It settles what waits for an older order as well, whose answer went with a session: the newer one asks for all.
        """
        problem, number = report.problem, report.number.number  # of a problem further lines are a table
        if report.number.term != self.term:
            return
        rebuild = self.rebuilds.get((report.job, host_id))
        if problem is not None:
            self.sent_orders.refused(host_id, Reserve, report.job)
            if self._is_asked_for_less(host_id, report):
                return
        elif rebuild is not None and rebuild.state == "asked" and number >= rebuild.number:
            rebuild.state = "claimed"
        claims = [c for n, c in self.claims.items() if c.job == report.job and n <= number and host_id in c.waits]
        for claim in claims:
            claim.waits.discard(host_id)
            if problem is not None:
                claim.refusals[host_id] = problem
        active = self.active.get(report.job)
        is_waited = active is not None and active.is_ordered and not active.is_claimed and active.number <= number
        if active is not None and is_waited and active.attempt == report.attempt:
            active.waits.discard(host_id)
            if problem is not None:
                active.refusals[host_id] = problem
                active.faults.update([host_id] if report.is_fault else [])
            if not active.waits:
                self._finish(self.state.jobs[report.job], active)
        elif not claims:
            self._reserved_late(host_id, report.job, report.attempt, (problem or "").partition("\n")[0])
        self._finish_claims()

    def _is_asked_for_less(self, host_id: str, report: Reserved) -> bool:
        """Ask a host again without what its copies can do without; False if it was not asked for any such thing.

        First with fewer versions in flight, then without room for copies in other hosts' stead, then without that for
        pinned copies, and for parts of older steps, beside what is to come in their place.
        """
        key, asked, number = (report.job, host_id), self.orders_count, report.number.number
        job, rebuild = self.state.jobs.get(report.job), self.rebuilds.get(key)
        attempt = job.newest if job is not None else None
        is_current = attempt is not None and attempt.attempt_number == report.attempt and not report.is_fault
        if job and attempt and is_current and number > self.lowered.get(report.job, (0, ()))[0]:
            self._lower_in_flight(job, attempt, f"{host_id}: {report.problem}".partition("\n")[0])
        last, asked_again = self.lowered.get(report.job, (0, set()))
        if number <= last and host_id in asked_again:
            return True  # the answer to an order that asked for more
        if rebuild is not None and rebuild.state == "refused" and number <= rebuild.number:
            return True  # the answer to an order that asked for it as well
        if job and attempt and is_current and rebuild is not None and rebuild.state != "refused":
            rebuild.state, rebuild.number = "refused", asked
            return bool(self.order(job, attempt, only=(host_id,)))
        if key in self.tight:
            return number <= self.tight[key]
        if job is None or attempt is None or not is_current:
            return False
        wanted = self._room(job, attempt)[host_id]
        self.tight[key] = asked
        if self._room(job, attempt)[host_id] == wanted:
            del self.tight[key]
            return False
        return bool(self.order(job, attempt, only=(host_id,)))

    def _lower_in_flight(self, job: Job, attempt: Attempt, why: str) -> None:
        """Ask all hosts for one version in flight less, unless there is only one, or leases are to go first.

        All hosts alike: a step waits for the one that has the least room, so more on the others would be of no use.
        """
        if attempt.in_flight == 1 or attempt.phase == "closed" or job.lease_room.versions:
            return
        last, attempt.in_flight, attempt.in_flight_why = self.orders_count, attempt.in_flight - 1, why
        self.out.log(f"job {job.name!r}: {attempt.in_flight_lack}", "warning")
        self.lowered[job.name] = (last, self.order(job, attempt))

    def _forget_tight(self, name: str) -> None:
        self.tight = {key: number for key, number in self.tight.items() if key[0] != name}

    def _reserved_late(self, host_id: str, name: str, attempt: int, why: str) -> None:
        """Note the share of a host that joined an attempt under way, or ask it again: room may become free there."""
        known = self.unroomed.pop((name, host_id), None)
        if why:
            self.unroomed[name, host_id] = ReservationRefused(attempt, why, self.state.now + RETRY_S)
            self.take_back_leases(name)
        if why and (known is None or known.why != why):
            self.out.log(f"host {host_id} has no room for job {name!r} yet: {why}", "warning")

    def _finish_claims(self) -> None:
        for number, claim in list(self.claims.items()):
            claim.waits = {h for h in claim.waits if self.state.hosts.is_live(h)}
            if not claim.waits:
                del self.claims[number]
                claim.done(*min(claim.refusals.items(), default=("", "")))

    def _ask_again(self, now: float) -> None:
        for (name, host), refused in list(self.unroomed.items()):
            job = self.state.jobs.get(name)
            attempt = job.newest if job is not None else None
            is_live = self.state.hosts.is_live(host)
            if job is None or attempt is None or attempt.attempt_number != refused.attempt or not is_live:
                del self.unroomed[name, host]
            elif refused.due_s <= now:
                self.unroomed[name, host] = replace(refused, due_s=now + RETRY_S)
                if not self.order(job, attempt, only=(host,)):
                    del self.unroomed[name, host]  # placement has left it

    def _finish(self, job: Job, active: Reservation) -> None:
        active.waits = {h for h in active.waits if self.state.hosts.is_live(h)}
        if active.waits or not active.is_ordered or active.is_claimed:
            return
        attempt = job.attempts[active.attempt]
        if not active.refusals:
            active.is_claimed = True
            sets = tuple(sorted({ranks.ranks for ranks in attempt.parity_sets.values()}))
            number, needs = attempt.attempt_number, tuple(active.ordered)
            self.journal.record(SlotsReserved(job.name, number, needs, attempt.in_flight, sets))
            return
        del self.active[job.name]
        host, why = min(active.refusals.items(), key=lambda refusal: (refusal[0] in active.faults, refusal))
        pins = ""
        if job.pins and host not in active.faults:
            pins = f" (its pins take room of their own: {listed_pins(job)}, `memstore unpin {job.name} NAME` frees it)"
        self._take_back(attempt, active)
        # The hosts that had room give it back, by a numbered order, so that its answers are not taken for later ones.
        self.claim(job, attempt, lambda host, why: None)
        is_alike = not attempt.has_put and len(active.calls) == attempt.world_size  # else some rank trains already
        error = "CapacityError" if is_alike else "GrowthRefused"
        how = f"room for {job.name} is not claimed on" if host in active.faults else f"{job.name} does not fit on"
        self._dismiss(active, error, f"{how} {host}{pins}: {why}")

    def apply_claimed(self, fact: SlotsReserved, *, is_replay: bool) -> None:
        """Answer all ranks: the fact is replicated, so no successor makes them wait for ranks that put already."""
        job = self.state.jobs.get(fact.job)
        attempt = job.attempts.get(fact.attempt) if job is not None else None
        if job is None or attempt is None:
            return
        attempt.has_freed_unrestorable = True
        attempt.in_flight = min(attempt.in_flight, fact.in_flight)
        attempt.needs = {**dict(enumerate(fact.needs)), **({} if is_replay else attempt.needs)}
        sets = [ParitySet(ranks, attempt.replicas - 1) for ranks in fact.parity_sets]
        attempt.parity_sets = {rank: each for each in sets for rank in each.ranks}
        if attempt.parity_sets and not is_replay:
            self.view.send_targets(job, is_news_only=True)  # before any rank may put
        active = self.active.get(fact.job)
        if not is_replay and active is not None and active.attempt == fact.attempt and active.is_claimed:
            del self.active[fact.job]
            active.calls.answer_all(self.out, Noted())
            if active.late:
                again = self.active[fact.job] = Reservation(fact.attempt, active.late)
                again.before = {rank: fact.needs[rank] for rank in active.late}
                self._order_if_all(job, attempt, again)

    def forget(self, name: str) -> None:
        """Drop every wait for the reservations of a removed job."""
        self.claims = {n: claim for n, claim in self.claims.items() if claim.job != name}
        self._forget_tight(name)
        self._dismiss(self.active.pop(name, None), *job_removed(name))

    def tick(self, now: float) -> None:
        """Check for ranks that never made their first put, and hosts that died while claiming."""
        self._ask_again(now)
        self._end_rebuilds(now)
        self._finish_claims()
        for name, active in list(self.active.items()):
            job = self.state.jobs[name]
            attempt = job.attempts[active.attempt]
            if attempt is job.newest:
                self._order_if_all(job, attempt, active)
            self._finish(job, active)
            limit_s = float(attempt.config["connect_timeout_s"])
            if not active.is_ordered and any(now - call.since_s > limit_s for call in active.calls.values()):
                refusal = gather_timeout(
                    f"first put of job {name!r}",
                    limit_s,
                    self.silent_ranks(job, attempt),
                    attempt.world_size,
                    "put or prepared",
                    "Every rank must put every step; raise connect_timeout_s if they are merely slow",
                )
                self._dismiss(active, *refusal)
                self._take_back(attempt, active)
                active.calls.clear()
            if not active.calls and not active.is_claimed:
                self.active.pop(name, None)
