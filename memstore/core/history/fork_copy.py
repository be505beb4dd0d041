"""After the fact of a fork: hosts make its manifests until it is whole, under any controller. Pure (R32)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from memstore.core.capacity.reservations import Reservations
from memstore.core.cluster.collective import job_removed
from memstore.core.cluster.effects import Effects
from memstore.core.cluster.facts import JobForked, StepCommitted, StepRetired
from memstore.core.cluster.job import Attempt, AttemptMember, Call, Job
from memstore.core.cluster.state import ClusterState
from memstore.core.journal.replication import Journal
from memstore.core.targets.targets import ClusterView
from memstore.core.wire.calls import ForkJob
from memstore.core.wire.ids import WireShard
from memstore.core.wire.orders import ForkedShard, LookAtCopies, MakeFork
from memstore.core.wire.replies import Forked
from recovery.inventory import Copy, ShardId, StepId

MAKE_AGAIN_S = 2.0  # an order may have died with a holder, or found no room for a manifest
LAUNCHER = "fork"  # of the attempt that stands for where the fork came from


class ForkMaking:
    """Forks that a fact knows."""

    def __init__(
        self, state: ClusterState, out: Effects, journal: Journal, view: ClusterView, room: Reservations
    ) -> None:
        self.state, self.out, self.journal, self.view, self.room = state, out, journal, view, room
        self.waiting: dict[str, list[Call[ForkJob]]] = {}  # by new job: for it to be whole
        self.ordered_s: dict[str, float] = {}

    def apply(self, fact: JobForked, *, is_replay: bool) -> None:
        """Create the job of the replicated fact, and have hosts make its manifests."""
        job = self.state.jobs.setdefault(fact.job, Job(fact.job))
        if fact.attempt in job.attempts:
            return
        origin = self.state.jobs.get(fact.from_job)
        job.origin, job.last_copied_placement = (
            fact,
            origin.placement or origin.last_copied_placement if origin is not None else None,
        )
        members = {rank: AttemptMember(rank, host, "", is_gone=True) for rank, host in enumerate(fact.rank_hosts)}
        attempt = origin_attempt(
            fact.attempt, fact.world_size, dict(fact.config), fact.level_asked, members, fact.needs
        )
        attempt.steps[fact.step], attempt.opened_s = "committed", fact.wall_s
        attempt.closed_s = self.state.now
        job.attempts[fact.attempt] = attempt
        job.commits[StepId(fact.attempt, fact.step)] = StepCommitted(
            fact.job, fact.attempt, fact.step, fact.world_size, fact.digests, fact.hosts, fact.level,
            fact.is_degraded, fact.reason, fact.wall_s,
        )  # fmt: skip
        if not is_replay:
            self.room.order(job, attempt)  # a holder that was replaced since it claimed has forgotten it
            self._make(self.state.now, job)

    def _unmade(self, job: Job) -> dict[int, list[str]]:
        """Rank -> hosts that are to make the fork's shard: while none is whole, all whose origin's has more of it."""
        fact, newest = job.origin, job.newest
        origin = self.state.jobs.get(fact.from_job) if fact is not None else None
        if fact is None or newest is None or origin is None or newest.has_freed_unrestorable:
            return {}
        step, from_step = StepId(fact.attempt, fact.step), StepId(fact.from_attempt, fact.step)
        if from_step not in origin.commits:
            return {}
        found = {}
        for rank in range(fact.world_size):
            have, there = job.copies.get(step, {}).get(rank, {}), origin.copies.get(from_step, {}).get(rank, {})
            if any(not copy.missing for copy in have.values()):
                wanted = self.view.wanted(job, newest, rank)
                hosts = [h for h in fact.hosts[rank] if h not in have and h in wanted and h in there]
            else:
                hosts = [h for h in there if h not in have or have[h].missing - there[h].missing]
            found[rank] = [h for h in hosts if self.state.hosts.is_answering(h)]
        return {rank: hosts for rank, hosts in found.items() if hosts}

    def _make(self, now: float, job: Job) -> None:
        where = self._unmade(job)
        fact = job.origin
        if fact is not None and where:
            self.ordered_s[job.name] = now
            origin = self.state.jobs[fact.from_job]
            self.order(job, origin, StepId(fact.from_attempt, fact.step), where)

    def is_whole(self, job: Job) -> bool:
        """Return whether every shard that the fork began with has a copy, or newer steps have taken its place."""
        fact, newest = job.origin, job.newest
        if fact is None or newest is None or newest.has_freed_unrestorable:
            return True
        ranks = job.copies.get(StepId(fact.attempt, fact.step), {})
        return all(any(not c.missing for c in ranks.get(r, {}).values()) for r in range(fact.world_size))

    def needs_origin(self, job: Job, origin: Job) -> bool:
        """Return whether the origin's step may have bytes that the fork lacks, here or on a host that may come back.

        Else a chunk that rotted in both would keep the step for ever, and the origin had no room for another.
        """
        fact = job.origin
        if fact is None or self.is_whole(job):
            return False
        state = self.state
        late = state.hosts.dead_since(state.now - state.rules.dead_after_s) | self.view.late_hosts()
        if not late.isdisjoint(h for hosts in fact.hosts for h in hosts):
            return True
        made = job.copies.get(StepId(fact.attempt, fact.step), {})
        there = origin.copies.get(StepId(fact.from_attempt, fact.step), {})
        return any(rank not in made or _lacking(made[rank]) - _lacking(there[rank]) for rank in there)

    def tick(self, now: float) -> None:
        """Order the missing copies again; answer the waiting calls."""
        for job in [job for job in self.state.jobs.values() if job.origin is not None]:
            self._retire_torn(job)
            if self._unmade(job):
                if now - self.ordered_s.get(job.name, -MAKE_AGAIN_S) >= MAKE_AGAIN_S:
                    self._make(now, job)
            elif job.name in self.waiting and self.is_whole(job):
                for call in self.waiting.pop(job.name):
                    self._answer(job, call)

    def _retire_torn(self, job: Job) -> None:
        """Retire the fork's step as its origin's was retired after the fork, by a fact that outlives the origin."""
        fact = job.origin
        origin = self.state.jobs.get(fact.from_job) if fact is not None else None
        if fact is None or origin is None or StepId(fact.attempt, fact.step) in job.torn:
            return
        from_step = StepId(fact.from_attempt, fact.step)
        torn = StepRetired(job.name, fact.attempt, fact.step, origin.retired.get(from_step, ""), is_torn=True)
        if from_step in origin.torn and torn not in self.journal.log.unapplied():
            self.journal.record(torn)

    def _answer(self, job: Job, call: Call[ForkJob]) -> None:
        fact = job.origin
        if fact is None:
            return
        copies = job.copies.get(StepId(fact.attempt, fact.step), {})
        nbytes = sum(next(iter(hosts.values())).spec.nbytes for hosts in copies.values())
        self.out.answer(
            call,
            Forked(
                job=fact.job, attempt=fact.attempt, step=fact.step, from_job=fact.from_job,
                from_attempt=fact.from_attempt, shards=fact.world_size, nbytes=nbytes,
                copies=min((len(hosts) for hosts in copies.values()), default=0),
            ),
        )  # fmt: skip

    def order(
        self, job: Job, origin: Job, step: StepId, where: dict[int, list[str]], *, call: int | None = None
    ) -> set[str]:  # fmt: skip
        """Order hosts to look at their copies (with a call), or to make the fork's over the same slots."""
        if job.newest is None:
            return set()
        attempt = job.origin.attempt if job.origin is not None else job.newest.attempt_number
        orders: dict[str, list[ForkedShard]] = {}
        for rank, hosts in where.items():
            shard = ShardId(origin.name, step.attempt, step.step, rank)
            new = ShardId(job.name, attempt, step.step, rank)
            for host in hosts:
                item = ForkedShard(WireShard.of(shard), origin.commits[step].digests[rank], WireShard.of(new))
                orders.setdefault(host, []).append(item)
        for host, shards in sorted(orders.items()):
            if call is not None:
                self.out.send(host, LookAtCopies(job=job.name, call=call, shards=tuple(shards)))
            else:
                self.out.send(host, MakeFork(job=job.name, shards=tuple(shards)))
        return set(orders)

    def forget(self, name: str) -> None:
        """Forget a removed fork."""
        self.ordered_s.pop(name, None)
        for call in self.waiting.pop(name, []):
            self.out.refuse(call, *job_removed(name))


def _lacking(copies: Mapping[str, Copy]) -> frozenset[int]:
    """Return the chunks of a shard that none of its copies has; there is at least one copy."""
    return frozenset.intersection(*(copy.missing for copy in copies.values()))


def origin_attempt(
    attempt_number: int,
    world_size: int,
    config: dict[str, Any],
    level: str,
    members: dict[int, AttemptMember],
    needs: Iterable[int],
) -> Attempt:
    """Return the closed attempt that stands for the time before the fork, the parent of the first real one."""
    return Attempt(
        attempt_number, world_size, None, LAUNCHER, False, None, level, config, members, phase="closed", has_put=True,
        needs=dict(enumerate(needs)),
    )  # fmt: skip
