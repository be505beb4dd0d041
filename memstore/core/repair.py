"""How missing copies are made again, and surplus ones dropped.

The controller's machine calls it when hosts, copies or steps change. It finds shards with too few copies, newest step
first, and orders pushes; its `Substitutes` keep copies away from hosts that die often.

Missing copies of kept steps are rebuilt on the hosts placement names, newest first. Pure (R27, R29).

Only death starts repair. Copies that placement no longer names are dropped once the ones it names
are there, so memory stays within what was reserved. Once a rank of the newest attempt is dead, none finishes its open
steps: kept steps are rebuilt before them, and their copies give way where a host has no room for a kept step's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from memstore.core.capacity import Drops, Reservations
from memstore.core.cluster.effects import Effects
from memstore.core.cluster.facts import Fact, StepCommitted
from memstore.core.cluster.job import Attempt, Job
from memstore.core.cluster.state import ClusterState
from memstore.core.cluster.step_lookup import redundant_steps
from memstore.core.commits import StepCommits
from memstore.core.targets.targets import ClusterView
from memstore.core.wire.ids import WireShard
from memstore.core.wire.orders import PushCopy
from memstore.core.wire.peer_messages import ParityOf
from memstore.core.wire.reports import Brought, PushFailed
from recovery.inventory import Copy, ShardId, StepId
from recovery.parity import ParitySet

# -- pushes -------------------------------------------------------------------------------------------
# Copies that repair has under way, and those that it leaves alone for a moment. Plain data (R29).


PUSHES_PER_SOURCE_MAX = 2


@dataclass(slots=True)
class RepairPushes:
    """The pushes that repair has ordered, and the refusals, for all jobs."""

    #: (shard, target) -> (source, deadline)
    under_way: dict[tuple[ShardId, str], tuple[str, float]] = field(default_factory=dict)
    refused_s: dict[tuple[ShardId, str], float] = field(default_factory=dict)  # (shard, target) -> when
    vain_s: dict[ShardId, float] = field(default_factory=dict)  # copies for which no substitute was found, and when
    sought_s: dict[ShardId, float] = field(default_factory=dict)  # copies for which a host was asked for room, and when
    load: Counter[str] = field(default_factory=Counter)  # pushes by source, in one look at a job

    def count_load(self) -> None:
        """Recount the pushes of each source."""
        self.load = Counter(source for source, _ in self.under_way.values())

    def is_free(self, source: str) -> bool:
        """Return whether a host may send one copy more."""
        return self.load[source] < PUSHES_PER_SOURCE_MAX


# -- substitutes --------------------------------------------------------------------------------------
# Hosts that hold a kept step's copies in place of hosts that die often. Pure (R29).


ASKED_MAX = 8  # hosts looked at for one copy
SEARCHES_MAX = 32  # copies of a step in one look for which a host is sought among all; the next goes on with others


class Substitutes:
    """A scan of one step of a job: values that are the same for all its shards are computed once."""

    def __init__(
        self,
        state: ClusterState,
        view: ClusterView,
        room: Reservations,
        pushes: RepairPushes,
        job: Job,
        attempt: Attempt,
        step: StepId,
    ) -> None:
        self.hosts, self.view, self.room, self.pushes = state.hosts, view, room, pushes
        self.now, self.job, self.attempt, self.step = state.now, job, attempt, step
        self.flaky = self.hosts.on_probation(self.now)
        self._searches_left = SEARCHES_MAX
        self._is_asked = False  # a host was asked for room, and has not answered
        self._beside: dict[str, set[ShardId]] = {}  # host -> the job's shards there that placement does not ask of it

    def of(self, shard: ShardId, wanted: list[str], good: Mapping[str, Copy]) -> list[str]:
        """Return the substitute hosts for a shard.

        A host that has the copy, or is being sent it, keeps it; a new one is chosen where a flapping host lacks it:
        first of another failure domain, then with the fewest copies of the step. None takes more than one version.
        """
        flaky = self.flaky.intersection(wanted)
        if not flaky or self.view.placement(self.job) is None:
            return []
        # A push of before may reach the flapping host while a substitute is asked for room: it is still the one wanted.
        has_all = all(h in good and not good[h].missing for h in flaky) and shard not in self.pushes.sought_s
        steady = [h for h in wanted if h not in flaky]
        taken, near = self.hosts.domains(steady), {self._places.get(h) for h in steady}
        count = max(0, self.attempt.replicas - len(taken))

        def may(host: str) -> bool:
            is_free = host not in wanted and host not in self.flaky and self.hosts.is_answering(host)
            is_refused = (shard, host) in self.pushes.refused_s
            return is_free and not is_refused and taken.isdisjoint(self.hosts.domains([host]))

        begun = {*good, *(() if has_all else self._pushed.get(shard, ()))}
        known = [h for h in begun if may(h)]
        known.sort(key=lambda h: (h not in good, self._places.get(h) in near, self._load(h), h))
        found = [host for host in known if self._takes(shard, host, is_there=host in good)][:count]
        is_vain = shard in self.pushes.vain_s or not self._searches_left or not self._is_source_free(good)
        if has_all or len(found) == count or is_vain:
            return found
        self._searches_left -= 1
        self._is_asked = False
        others = self._far_first(near, (h for h in self._by_load if h not in begun and may(h)))
        found += [host for host in others if self._takes(shard, host, is_there=False)][: count - len(found)]
        if len(found) < count:
            (self.pushes.sought_s if self._is_asked else self.pushes.vain_s).setdefault(shard, self.now)
        return found

    def _far_first(self, near: set[str | None], able: Iterable[str]) -> list[str]:
        """Return the first that are in another place than those that have it, then the others."""
        far: list[str] = []
        others: list[str] = []
        for host in able:
            (others if self._places.get(host) in near else far).append(host)
            if len(far) == ASKED_MAX:
                break
        return [*far, *others][:ASKED_MAX]

    def _takes(self, shard: ShardId, host: str, *, is_there: bool) -> bool:
        """Return whether a host has room for this copy among those that placement does not ask of it: one version.

        Beyond that a copy would take the room of steps that are still to be put, and nothing would be committed. The
        room is claimed when it is first needed; until the host answers, only a copy that is there stays.
        """
        job, attempt, here = self.job, self.attempt, self._ranks.get(host, set())
        if host not in self._beside:
            held = {
                ShardId(job.name, s.attempt, s.step, r) for s, ranks in job.on_host.get(host, {}).items() for r in ranks
            }
            held |= {s for s, target in self.pushes.under_way if target == host and s.job == job.name}
            self._beside[host] = {
                s for s in held if s.rank not in here and host not in self.view.wanted(job, attempt, s.rank)
            }
        specs = map(job.spec, self._beside[host] | {shard})
        taken = sum(spec.chunks_count for spec in specs if spec is not None)
        most = sum(self.room.need(job, attempt, rank) for rank in here)
        if taken > most:
            return False
        room = self.room.room_to_rebuild(job, attempt, host, most)
        self._is_asked = self._is_asked or room.state == "asked"
        return room.state == "claimed" or (is_there and room.state == "asked")

    def pushed(self, shard: ShardId, target: str) -> None:
        """Note a copy that was ordered meanwhile."""
        if target in self._beside and target not in self.view.wanted(self.job, self.attempt, shard.rank):
            self._beside[target].add(shard)

    def _is_source_free(self, good: Iterable[str]) -> bool:
        """Return whether one of these hosts may send a copy now."""
        return any(self.hosts.is_answering(host) and self.pushes.is_free(host) for host in good)

    def _load(self, host: str) -> int:
        return len(self.job.on_host.get(host, {}).get(self.step, ()))

    @cached_property
    def _by_load(self) -> list[str]:
        placement = self.view.placement(self.job)
        return sorted(placement.targets, key=lambda h: (self._load(h), h)) if placement is not None else []

    @cached_property
    def _places(self) -> Mapping[str, str | None]:
        return self.hosts.live_domains(self.attempt.level_asked)

    @cached_property
    def _pushed(self) -> dict[ShardId, list[str]]:
        found: dict[ShardId, list[str]] = {}
        for shard, target in self.pushes.under_way:
            found.setdefault(shard, []).append(target)
        return found

    @cached_property
    def _ranks(self) -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        for rank, member in self.attempt.members.items():
            found.setdefault(member.host_id, set()).add(rank)
        return found


# -- parity -------------------------------------------------------------------------------------------
# Parity that was lost is added up again from the shards in it; a lost shard is decoded from the parity (R37).


OPEN_PARITY_S = 5.0  # from a put until its host is ordered to add it into parity that an open step still lacks
ADDING_DEADLINE_S = 10.0  # until a shard is ordered to be added again: no report says that parity was given up
ADDED_TOGETHER_MAX = 2  # ranks' parity, or steps', that one host adds up at a time
Decode = Callable[[str, Job, Attempt, ShardId], int | None]  # orders a host to decode a shard and to store it
DECODE_DEADLINE_S = 60.0  # until a shard is to be decoded again, if no report comes, or RAM has not all that it takes


@dataclass(frozen=True, slots=True)
class Decoding:
    """An order to decode a lost shard; or none, if there was nothing to order, or the host has reported a failure."""

    attempt: int  # the newest when it was ordered: what it brings is fenced with it
    until_s: float  # it may be ordered again then
    number: int | None = None
    host: str | None = None


class ParityRepair:
    """Orders what parity sets lack."""

    def __init__(
        self, state: ClusterState, out: Effects, view: ClusterView, pushes: RepairPushes, decode: Decode
    ) -> None:
        self.state, self.out, self.view, self.pushes, self._decode = state, out, view, pushes, decode
        self.decoding: dict[ShardId, Decoding] = {}
        self.adding: dict[tuple[ShardId, str], float] = {}  # (parity, where it is added up) -> deadline
        self._added_at = Counter[str]()  # so many by host, in one look at a job

    def begin_look(self, now: float) -> None:
        """Forget orders that have ended, and count what each host adds up."""
        under_way = {(_step_of(shard), host) for shard, host in self.pushes.under_way}
        self.decoding = {
            shard: order
            for shard, order in self.decoding.items()
            if order.until_s > now and self._is_wanted(shard, order)
        }
        late = [key for key, until_s in self.adding.items() if until_s <= now]
        self.pushes.refused_s |= dict.fromkeys(late, now)  # others have a turn
        # When a step is dropped, or a source dies, no report says so: then no part is under way.
        self.adding = {
            (parity, host): until_s
            for (parity, host), until_s in self.adding.items()
            if until_s > now and (_step_of(parity), host) in under_way
        }
        self._added_at = Counter(host for _, host in self.adding)

    def lacking_at(self, job: Job, attempt: Attempt, step: StepId, rank: int, ranks: ParitySet) -> str | None:
        """Return the host that is to keep a rank's parity; None if a live one does."""
        hosts, commit = self.state.hosts, job.commits.get(step)
        target = attempt.members[rank].host_id if commit is None and rank in attempt.members else ""
        if not hosts.is_live(target):  # what is being put goes on where ranks add to it, also on a host that is to go
            target = self.view.owner_host(job, attempt, rank)
        for host, copy in job.parity.get(step, {}).get(rank, {}).items():
            is_meant = commit is None or all(commit.digests.is_possible(x.rank, x.digest) for x in copy.spec.summands)
            is_here = hosts.is_live(host) and is_meant and not copy.missing
            if is_here and (host == target or self._is_apart(job, attempt, rank, ranks, host, target)):
                return None
        return target

    def add_up(self, now: float, job: Job, attempt: Attempt, step: StepId, of: ParityOf, target: str) -> None:
        """Have the other hosts of a set add their shards into parity that lacks.

        Only once they all can: parity that waits for one of them takes room, and one of its host's turns.
        """
        hosts, commit, shards = self.state.hosts, job.commits.get(step), job.copies.get(step, {})
        parity = ShardId(job.name, step.attempt, step.step, of.rank, is_parity=True)
        if not hosts.is_answering(target) or (parity, target) in self.pushes.refused_s:
            return
        if self._is_decoding(job, target):
            return  # a get may wait for that shard: its chunks have the link for themselves
        if (parity, target) not in self.adding and self._added_at[target] >= ADDED_TOGETHER_MAX:
            return
        sources = {
            other: [
                host
                for host, copy in shards.get(other, {}).items()
                if host != target and hosts.is_answering(host) and not copy.missing
                if commit is None or commit.digests.is_possible(other, copy.spec.digest)
            ]
            for other in of.set.others(of.rank)
        }
        if not all(sources.values()):
            # A shard is not put yet, is lost, or is on the host of the parity alone: rows that are not full take room.
            return
        for other, held in sources.items():
            put_s = attempt.members[other].put_s if other in attempt.members else None
            if commit is not None or put_s is None or now - put_s >= OPEN_PARITY_S:
                self._add(now, job, step, other, held, target, of)
                if (parity, target) not in self.adding:
                    self.adding[parity, target] = now + ADDING_DEADLINE_S
                    self._added_at[target] += 1

    def _is_wanted(self, shard: ShardId, order: Decoding) -> bool:
        """Return whether a shard is still to come of an order: a newer attempt has fenced it, and needs another."""
        job = self.state.jobs.get(shard.job)
        if job is None or job.newest is None or job.newest.attempt_number != order.attempt:
            return False
        return order.host is None or not job.has_copy(shard, order.host)

    def _is_decoding(self, job: Job, host: str) -> bool:
        return any(order.host == host and shard.job == job.name for shard, order in self.decoding.items())

    def _is_apart(self, job: Job, attempt: Attempt, rank: int, ranks: ParitySet, host: str, own: str) -> bool:
        """Return whether a host that keeps a rank's parity is as far from the set's other hosts as the rank's own.

        A host that stood in for one that was to go may share a rack with another one of the set.
        """
        domains = self.state.hosts.live_domains(attempt.level_asked)
        near = {domains.get(self.view.owner_host(job, attempt, other)) for other in ranks.others(rank)}
        return domains.get(host) not in near or domains.get(own) in near

    def is_spare(
        self, job: Job, attempt: Attempt, step: StepId, rank: int, ranks: ParitySet, wanted: list[str]
    ) -> bool:
        """Return whether a shard comes back without its surplus copies if the domain of those wanted is lost.

        After ranks have moved one host may have two shards of a set, or a shard and parity that it is in: then not.
        Two lost domains are survived once each rank's host has its shard and its parity, and none shares a domain.
        """
        domains = self.state.hosts.live_domains(attempt.level_asked)
        copies, parity = job.copies.get(step, {}), job.parity.get(step, {})
        if ranks.spare > 1:
            owners = {each: self.view.owner_host(job, attempt, each) for each in ranks.ranks}
            kept = (held.get(each, {}).get(host) for held in (copies, parity) for each, host in owners.items())
            is_home = all(copy is not None and not copy.missing for copy in kept)
            return is_home and len({domains[host] for host in owners.values() if host in domains}) == len(owners)
        near = {domains.get(host) for host in wanted}

        def is_far(held: Mapping[str, Copy]) -> bool:
            return any(h in domains and domains[h] not in near and not copy.missing for h, copy in held.items())

        return all(is_far(copies.get(other, {})) and is_far(parity.get(other, {})) for other in ranks.others(rank))

    def _add(
        self, now: float, job: Job, step: StepId, rank: int, sources: list[str], target: str, parity: ParityOf
    ) -> None:
        shard = ShardId(job.name, step.attempt, step.step, rank)
        if (shard, target) in self.pushes.under_way:
            return
        source = min(sources, key=lambda h: (self.pushes.load[h], h))
        self.pushes.load[source] += 1
        self.pushes.under_way[shard, target] = (source, now + ADDING_DEADLINE_S)
        digest = job.copies[step][rank][source].spec.digest
        self.out.send(source, PushCopy(shard=WireShard.of(shard), digest=digest, target=target, parity=parity))

    def decode(self, now: float, job: Job, attempt: Attempt, shard: ShardId, ranks: ParitySet) -> None:
        """Have a lost shard of a committed step decoded on its rank's host, or if that is dead on another one."""
        step, hosts = StepId(shard.attempt, shard.step), self.state.hosts
        if shard in self.decoding:
            return
        target = self.view.owner_host(job, attempt, shard.rank)
        if not hosts.is_answering(target):
            placement = self.view.placement(job)
            near = {attempt.members[rank].host_id for rank in ranks.ranks if rank in attempt.members}
            others = [h for h in (placement.targets if placement is not None else ()) if hosts.is_answering(h)]
            if not others:
                return
            coming = Counter(order.host for order in self.decoding.values())  # two lost shards of a set go to two hosts
            target = min(others, key=lambda h: (h in near, len(job.on_host.get(h, {}).get(step, ())) + coming[h], h))
        number = self._decode(target, job, attempt, shard)
        self.decoding[shard] = Decoding(
            attempt.attempt_number, now + DECODE_DEADLINE_S, number, target if number is not None else None
        )

    def brought(self, now: float, report: Brought) -> None:
        """Note that a host has stored what it was to decode; if it could not, that is ordered again in a moment."""
        shard = next((each for each, order in self.decoding.items() if order.number == report.read), None)
        if shard is None:
            return
        order = self.decoding.pop(shard)
        if report.problem is not None:
            self.decoding[shard] = Decoding(order.attempt, now + REFUSAL_TTL_S)


def _step_of(shard: ShardId) -> tuple[str, int, int]:
    return shard.job, shard.attempt, shard.step


# -- repair -------------------------------------------------------------------------------------------


PUSH_DEADLINE_S = 120.0  # a push that was neither finished nor refused by then is ordered again
LOOKS_MAX = 1024  # shards of one step looked at in one go, so that a tick takes milliseconds for jobs of any size
REFUSAL_TTL_S = 5.0  # how long a target that refused a copy, or what no host can take or could decode, is left alone


def _are_good(copies: Iterable[Copy], commit: StepCommitted | None, rank: int) -> bool:
    """Return whether copies are whole, and of the committed bytes if there are such."""
    return not any(c.missing or (commit and not commit.digests.is_possible(rank, c.spec.digest)) for c in copies)


@dataclass(slots=True)
class RepairScan:
    """How far one look at all shards of a step has come."""

    changes: int  # of the step's copies, when it began
    next_rank: int = 0
    is_settled: bool = True  # so far nothing is to be done


class Repair:
    """Compares desired with actual copies and orders the difference."""

    def __init__(
        self,
        state: ClusterState,
        out: Effects,
        view: ClusterView,
        drops: Drops,
        room: Reservations,
        steps: StepCommits,
        decode: Decode,
    ) -> None:
        self.state, self.out = state, out
        self.view, self.drops, self.room, self.steps = view, drops, room, steps
        self.pushes = RepairPushes()
        self.parity = ParityRepair(state, out, view, self.pushes, decode)
        self.scans: dict[tuple[str, StepId], RepairScan] = {}
        self._awaiting: set[str] = set()  # hosts that still lack a copy of some kept step, in one look at a job
        self._is_over = False  # in that look: no rank finishes the open steps

    def tick(self, now: float) -> None:
        """Consider every job; forget pushes and refusals that are too old."""
        pushes = self.pushes
        pushes.under_way = {
            (shard, target): (source, deadline)
            for (shard, target), (source, deadline) in pushes.under_way.items()
            if deadline > now and self._has_copy(shard, source)
        }
        pushes.refused_s = {key: s for key, s in pushes.refused_s.items() if now - s <= REFUSAL_TTL_S}
        pushes.vain_s = {shard: s for shard, s in pushes.vain_s.items() if now - s <= REFUSAL_TTL_S}
        pushes.sought_s = {shard: s for shard, s in pushes.sought_s.items() if now - s <= REFUSAL_TTL_S}
        for job in self.state.jobs.values():
            self.consider(now, job)

    def _has_copy(self, shard: ShardId, host: str) -> bool:
        """Return whether a host still has the copy that it is to push.

        When a copy is dropped its push ends without a report; without this check it would block others until its
        deadline.
        """
        job = self.state.jobs.get(shard.job)
        return job is not None and job.has_copy(shard, host)

    def consider(self, now: float, job: Job) -> None:
        """Order the missing copies of one job, newest step first."""
        attempt = job.newest
        if attempt is None or attempt.phase == "fencing" or self._is_restoring(now, job, attempt):
            return
        is_waiting = self._may_come_back(now, attempt)
        if not is_waiting:
            job.last_copied_placement = self.view.placement(job)
        self._forget(job)
        if not job.damaged and all(job.settled.get(step) == job.changes.get(step) for step in job.copies):
            return
        held, self._is_over = redundant_steps(job, attempt), self._is_ended(attempt)
        self.pushes.count_load()
        self.parity.begin_look(now)
        self._awaiting = set()
        for step in sorted(job.copies, key=lambda s: (self._is_over and s in held, s), reverse=True):
            phase = attempt.steps.get(step.step) if step.attempt == attempt.attempt_number else None
            is_open = phase in ("open", "committing")
            is_due = not is_waiting or (is_open and not self._is_over)
            if is_due and (is_open or step in held) and job.settled.get(step) != job.changes.get(step):
                self._consider_step(now, job, attempt, step, may_drop=step in held or phase == "open")
            if step in job.damaged and phase == "open":
                self.steps.give_up_damaged(now, job, attempt, step.step)

    def _is_restoring(self, now: float, job: Job, attempt: Attempt) -> bool:
        """Return whether all ranks of a job have asked for a step and not all loaded it, or parity moves with them."""
        active = self.state.rounds.get(job.name)
        return (active is not None and active.is_due) or attempt.is_moving(now)

    def _is_ended(self, attempt: Attempt) -> bool:
        """Return whether no rank finishes the attempt's open steps: it is closed, or one of its ranks is dead."""
        is_complete = not attempt.has_lost_ranks and all(map(self.state.hosts.is_live, attempt.hosts))
        return attempt.phase == "closed" or not is_complete

    def fact(self, fact: Fact) -> None:
        """Scan a job again after a fact: kept steps, rank placement or committed digests may have changed.

        After a commit only the step itself, unless the commit found all in place: nothing is asked of others that was
        not, and all jobs commit all the time.
        """
        job = self.state.jobs.get(getattr(fact, "job", ""))
        if job is not None and isinstance(fact, StepCommitted):
            step = StepId(fact.attempt, fact.step)
            job.settled.pop(step, None)
            self.scans.pop((job.name, step), None)
            is_in_place = self.steps.was_in_place(job, step, fact.world_size)
            if is_in_place and not self.state.hosts.on_probation(self.state.now):
                job.settled[step] = job.changes[step]
        elif job is not None:
            self.look_again(job)

    def look_again(self, job: Job) -> None:
        """Scan again: hosts, rank placement, pins or kept steps have changed."""
        job.settled.clear()
        for step in job.changes:
            self.scans.pop((job.name, step), None)

    def _forget(self, job: Job) -> None:
        """Forget steps without copies."""
        for step in [s for s in job.changes if s not in job.copies]:
            del job.changes[step]
            job.settled.pop(step, None)
            job.short.pop(step, None)
            job.held.pop(step, None)
            job.damaged.discard(step)
            self.scans.pop((job.name, step), None)

    def _may_come_back(self, now: float, attempt: Attempt) -> bool:
        """Return whether a host of the job died so lately that it may be back with its memory (R3, R28).

        A killed holder is replaced within seconds and adopts its arena: copying everything away at
        once would be work for nothing, in the moment when a restore needs the network.
        """
        late = self.state.hosts.dead_since(now - self.state.rules.dead_after_s)
        return bool(late) and any(own_host.host_id in late for own_host in attempt.members.values())

    def _consider_step(self, now: float, job: Job, attempt: Attempt, step: StepId, *, may_drop: bool) -> None:
        placement = self.view.placement(job)
        if placement is None:
            return
        commit, found = job.commits.get(step), job.copies[step]
        substitutes = Substitutes(self.state, self.view, self.room, self.pushes, job, attempt, step)
        scan = self.scans.setdefault((job.name, step), RepairScan(job.changes[step]))
        sets = job.parity_sets(step)
        ranks = sorted({*found, *sets} if sets else found)
        begin = bisect_left(ranks, scan.next_rank)
        whole = set[tuple[object, ...]]()  # a rank's place and hosts that lacked nothing: nor do the other ranks there
        for rank in ranks[begin : begin + LOOKS_MAX]:
            place = None if sets or substitutes.flaky else self.view.place_of(placement, attempt, rank)
            if place and (place, *found[rank]) in whole and _are_good(found[rank].values(), commit, rank):
                continue
            is_settled = self._consider_shard(now, job, attempt, step, rank, commit, substitutes, may_drop=may_drop)
            if place and is_settled:
                whole.add((place, *found[rank]))
            target = self.parity.lacking_at(job, attempt, step, rank, sets[rank]) if rank in sets else None
            if target is not None:
                is_settled = False
                if commit:
                    self._awaiting.add(target)
                if self._is_due_at(target, commit):
                    of = ParityOf.of(rank, sets[rank])
                    self.parity.add_up(now, job, attempt, step, of, target)
            scan.is_settled = scan.is_settled and is_settled
        if begin + LOOKS_MAX < len(ranks):
            scan.next_rank = ranks[begin + LOOKS_MAX]
            return
        del self.scans[job.name, step]
        if scan.is_settled and scan.changes == job.changes.get(step):
            job.settled[step] = scan.changes

    def _consider_shard(
        self,
        now: float,
        job: Job,
        attempt: Attempt,
        step: StepId,
        rank: int,
        commit: StepCommitted | None,
        scan: Substitutes,
        *,
        may_drop: bool,
    ) -> bool:
        """Order the copies that one shard lacks, and drop surplus ones; True if there was neither."""
        hosts, copies = self.state.hosts, job.copies[step].get(rank, {})
        shard = ShardId(job.name, step.attempt, step.step, rank)
        good = {
            h: c
            for h, c in copies.items()
            if hosts.is_live(h) and (not commit or commit.digests.is_possible(rank, c.spec.digest))
        }
        wanted, parity_set = self.view.wanted(job, attempt, rank, step), job.parity_sets(step).get(rank)
        own_host = attempt.members[rank].host_id if rank in attempt.members else ""
        substitutes = scan.of(shard, wanted, good) if commit and not parity_set else []
        lacking = [h for h in wanted if h not in good or good[h].missing]
        surplus = [h for h in copies if h not in wanted and h not in substitutes and h != own_host]
        if commit:
            self._awaiting.update(lacking)
        is_lost = not good or bool(frozenset.intersection(*(copy.missing for copy in good.values())))
        if commit and parity_set and is_lost:
            self.parity.decode(now, job, attempt, shard, parity_set)
        for target in (*lacking, *(h for h in substitutes if h not in good)):
            if self._is_due_at(target, commit) and self._push(now, shard, target, good, attempt):
                scan.pushed(shard, target)
        is_over = may_drop and not lacking and bool(surplus)
        is_safe = self._is_safe(wanted, 1 if parity_set else attempt.replicas) if is_over else False
        if is_safe and parity_set:
            is_safe = self.parity.is_spare(job, attempt, step, rank, parity_set, wanted)
        if is_safe and not self.state.is_read(shard):
            for host in surplus:
                self.drops.order(host, [shard])
                job.drop_copy(shard, host)
            if step in job.pinned_steps():  # it had room of its own where it was
                self.room.order(job, attempt, is_news_only=True)
        # Copies on substitutes must be dropped when the probation ends, so look at this step again.
        return not lacking and not surplus and not substitutes

    def _is_due_at(self, target: str, commit: StepCommitted | None) -> bool:
        """Return whether a host may get what a step lacks: one that no rank will finish waits for all kept ones."""
        return commit is not None or target not in self._awaiting or not self._is_over

    def _is_safe(self, wanted: list[str], replicas: int) -> bool:
        """Return whether the hosts that placement names are enough: all answer, in as many domains as asked.

        While the cluster cannot hold that many apart, every copy more is worth its room.
        """
        hosts = self.state.hosts
        return all(hosts.is_answering(h) for h in wanted) and len(hosts.domains(wanted)) >= replicas

    def _push(self, now: float, shard: ShardId, target: str, good: dict[str, Copy], attempt: Attempt) -> bool:
        """Order a push, if a source is free; True if that was done."""
        hosts = self.state.hosts
        pushes, key = self.pushes, (shard, target)
        if key in pushes.under_way or key in pushes.refused_s or not hosts.is_answering(target):
            return False
        is_open = StepId(shard.attempt, shard.step) not in self.state.jobs[shard.job].commits
        # For an open step the rank's own host pushes to this target anyway. For a kept step a substitute is sought
        # first; where none is found, a copy that may be gone soon is better than none.
        is_last_resort = not is_open and hosts.is_on_probation(now, target) and len(good) < attempt.replicas
        if is_last_resort and shard not in self.pushes.vain_s:
            return False
        sources = [h for h, c in good.items() if h != target and hosts.is_answering(h) and not c.missing]
        # A copy with bad chunks can be repaired from several sources: any that has a chunk the target lacks helps.
        if not sources and target in good:
            sources = [h for h, c in good.items() if h != target and good[target].missing - c.missing]
        free = [h for h in sources if self.pushes.is_free(h)]
        if not free:
            return False
        source = min(free, key=lambda h: (self.pushes.load[h], h))
        self.pushes.load[source] += 1
        self.pushes.under_way[shard, target] = (source, now + PUSH_DEADLINE_S)
        digest = good[source].spec.digest
        self.out.send(source, PushCopy(shard=WireShard.of(shard), digest=digest, target=target))
        return True

    def pushed(self, shard: ShardId, target: str) -> None:
        """Note that the target sealed the shard."""
        self._end_push(shard, target)

    def _end_push(self, shard: ShardId, target: str) -> None:
        """Forget a push; those of all shards that were to be added into it, if it is parity."""
        under_way = self.pushes.under_way
        under_way.pop((shard, target), None)
        if shard.is_parity:
            self.parity.adding.pop((shard, target), None)
            job, step = self.state.jobs.get(shard.job), StepId(shard.attempt, shard.step)
            ranks = job.parity_sets(step).get(shard.rank) if job is not None else None
            for other in ranks.others(shard.rank) if ranks is not None else ():
                under_way.pop((shard._replace(rank=other, is_parity=False), target), None)

    def push_failed(self, now: float, report: PushFailed) -> None:
        """Note a refused or broken push: count the step without it, try again later (R18)."""
        shard, target, why = report.shard.id, report.target, report.why
        job = self.state.jobs.get(shard.job)
        self._end_push(shard, target)
        if job is None:
            return
        self.pushes.refused_s[shard, target] = now
        if report.is_final and self.state.hosts.is_answering(target):
            kept = {
                key: text for key, text in job.refusals.items() if StepId(key[0].attempt, key[0].step) in job.copies
            }
            job.refusals = {**kept, (shard, target): why}
            self._make_room(job, shard, target)
            self.steps.evaluate(job, StepId(shard.attempt, shard.step))

    def _make_room(self, job: Job, shard: ShardId, target: str) -> None:
        """Make room on a host that refused a kept step's copy, or its parity, which is tried again a while later (R29).

        The host first claims room for the newest attempt, if that ended before its first put claimed any. Otherwise
        steps that no rank will finish are dropped there: incomplete ones first, then the oldest.
        """
        attempt, wanted = job.newest, self._slots_of(job, shard)
        if attempt is None or not wanted or not self._is_ended(attempt):
            return
        if StepId(shard.attempt, shard.step) not in redundant_steps(job, attempt):
            return
        if self.room.order(job, attempt, only=(target,), is_news_only=True):
            return
        here = {rank for rank, own_host in attempt.members.items() if own_host.host_id == target}
        committing = {StepId(attempt.attempt_number, n) for n, phase in attempt.steps.items() if phase == "committing"}
        spared = job.commits.keys() | committing | self.state.holds.steps(job)
        begun = {StepId(attempt.attempt_number, number) for number in attempt.steps.open}
        unfinished = ({*job.on_host.get(target, {}), *job.parity} | begun) - spared
        for step in sorted(unfinished, key=lambda s: (len(job.copies.get(s, {})) >= attempt.world_size, s)):
            # Parity that lacks some shard no host has reported: it may be there, in the place of other rows.
            parity = {ShardId(job.name, step.attempt, step.step, rank, is_parity=True) for rank in here}
            held = {shard for shard in job.shards_on(step).get(target, ()) if shard.is_parity or shard.rank not in here}
            for other in sorted(held | (parity if step in begun else set())):
                if wanted > 0 and not self.state.is_read(other):
                    self.drops.order(target, [other])
                    if other in held:
                        wanted -= self._slots_of(job, other)
                        job.drop_copy(other, target)

    @staticmethod
    def _slots_of(job: Job, shard: ShardId) -> int:
        """Return the slots of a shard, or of parity of which there may be none any more; 0 if that is not known."""
        spec, step = job.spec(shard), StepId(shard.attempt, shard.step)
        ranks = job.parity_sets(step).get(shard.rank) if shard.is_parity else None
        if spec is not None or ranks is None:
            return spec.chunks_count if spec is not None else 0
        others = (job.spec(shard._replace(rank=other, is_parity=False)) for other in ranks.others(shard.rank))
        return ranks.rows_count(max((each.chunks_count for each in others if each is not None), default=0))

    def host_died(self, host_id: str) -> None:
        """Drop pushes from or to a dead host, and what it was to decode."""
        decoding = self.parity.decoding
        self.parity.decoding = {shard: order for shard, order in decoding.items() if order.host != host_id}
        self.parity.adding = {key: until_s for key, until_s in self.parity.adding.items() if key[1] != host_id}
        self.pushes.under_way = {
            (shard, target): (source, deadline)
            for (shard, target), (source, deadline) in self.pushes.under_way.items()
            if host_id not in (source, target)
        }
