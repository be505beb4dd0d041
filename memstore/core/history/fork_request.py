"""A fork: a new job that begins with a committed step of another one, over the same chunks. Pure (R10, R32).

asked [--markers listed] --room claimed--> hosts look at their copies --JobForked spread--> made --whole--> answered
   '--refused: nothing is left of it

The fact comes first and the manifests after it, so a crash leaves a whole fork or none: without the fact no host has
written anything; with it every controller orders what is missing until the fork is whole, and the origin's step is
not dropped before that.
"""

from __future__ import annotations

from memstore.config import check_name
from memstore.core.capacity.reservations import Reservations
from memstore.core.cluster.collective import job_removed
from memstore.core.cluster.effects import Effects
from memstore.core.cluster.facts import JobForked
from memstore.core.cluster.job import AttemptMember, Call, Job
from memstore.core.cluster.pending_fork import PendingFork
from memstore.core.cluster.state import ClusterState
from memstore.core.cluster.step_lookup import Refusal, named_step, whole_or_partly, why_not_whole
from memstore.core.durable.marker_listing import DurableMarkers
from memstore.core.durable.paths import place_of
from memstore.core.history.fork_copy import ForkMaking, origin_attempt
from memstore.core.journal.replication import Journal
from memstore.core.targets.targets import ClusterView
from memstore.core.wire.calls import ForkJob
from memstore.core.wire.orders import GiveUpFork
from memstore.core.wire.reports import CopiesLookedAt
from memstore.errors import ConfigError
from placement.domains import is_finer
from recovery.inventory import StepId

ASK_LIMIT_S = 60.0  # until every host has claimed the room and looked at its copies


class Forks:
    """Forks of all jobs; those that no fact knows stand in `ClusterState.pending_forks`."""

    def __init__(
        self, state: ClusterState, out: Effects, journal: Journal, view: ClusterView, room: Reservations,
        markers: DurableMarkers,
    ) -> None:  # fmt: skip
        self.state, self.out, self.journal = state, out, journal
        self.view, self.room, self.markers = view, room, markers
        self.making = ForkMaking(state, out, journal, view, room)
        state.holds.add("a fork", self.needed, is_in_use=True)
        self.count = 0

    # -- asked --------------------------------------------------------------------------------

    def ask(self, job: Job, call: Call[ForkJob]) -> None:
        """Fork a step of a job under a new name; asked again with the same nonce it is the same fork."""
        name, nonce = call.request.new_job, call.request.nonce
        try:
            check_name("job", name)
        except ConfigError as error:
            self.out.refuse(call, "ConfigError", str(error))
            return
        known, pending = self.state.jobs.get(name), self.state.pending_forks.get(name)
        if pending is not None and pending.nonce == nonce:
            pending.calls.append(call)
            return
        if known is not None and known.origin is not None and known.origin.nonce == nonce:
            self.making.waiting.setdefault(name, []).append(call)
            return
        step, refusal = self._find(job, name, call)
        if step is None or refusal is not None:
            self.out.refuse(call, *(refusal or ("RecoveryError", f"job {job.name!r} has no such step")))
            return
        pending = self.state.pending_forks[name] = PendingFork(
            [call], nonce, self._replica(job, step, name), job.name, step, self.state.now
        )
        durable = place_of(job.newest.config) if job.newest is not None else None
        if durable is None:
            self._claim(pending)
            return
        asked, pending.is_listing = pending, True
        self.markers.ask(call.host_id, name, durable, lambda why: self._markers_listed(asked, why))

    def _find(self, job: Job, name: str, call: Call[ForkJob]) -> tuple[StepId | None, Refusal | None]:
        if name in self.state.jobs or name in self.state.pending_forks:
            return None, self._exists(name)
        step, refusal = named_step(
            job, call.request.step, call.request.of_attempt, among={*job.commits, *job.markers},
            option="attempt= or --attempt",
        )  # fmt: skip
        if step is None:
            return None, refusal
        what = f"step {step.step} (attempt {step.attempt}) of job {job.name!r} cannot be forked"
        if job.newest is None:
            return None, (
                "RecoveryError",
                f"{what}: hosts hold copies of the job, but its history is not known: connect to it first",
            )
        if step in job.retired:
            return None, ("RecoveryError", f"{what}: it is retired: {job.retired[step]}")
        lacking = why_not_whole(self.state.hosts, job, step)
        if lacking:
            return None, ("RecoveryError", f"{what}: {lacking}")
        split = [rank for rank in range(job.commits[step].world_size) if not self._hosts(job, step, rank)]
        if split:
            why = f"no host alone has all of rank {split[0]}: repair is under way, ask again in a moment"
            return None, ("RecoveryError", f"{what}: {why}")
        return step, None

    def _exists(self, name: str) -> Refusal:
        job = self.state.jobs.get(name)
        what = "is being forked" if job is None else "exists"
        if job is not None and not job.attempts and job.markers:
            what = "has steps on durable storage"
        return "ConfigError", f"job {name!r} {what}: fork to another name, or remove it first (`memstore rm {name}`)"

    def _hosts(self, job: Job, step: StepId, rank: int) -> list[str]:
        """Return the hosts with the whole shard: those that are to hold it, or any if none of these has it."""
        digest = job.commits[step].digests[rank]
        whole = [h for h, lacks in whole_or_partly(self.state.hosts, job, step, rank, digest).items() if not lacks]
        wanted = self.view.wanted(job, job.newest, rank) if job.newest is not None else []
        return sorted(h for h in whole if h in wanted) or sorted(whole)

    def _replica(self, origin: Job, step: StepId, name: str) -> Job:
        """Return the future job: one closed attempt, whose ranks sit where the origin's copies are."""
        if origin.newest is None:
            raise ValueError("a fork needs an origin with an attempt")
        commit, newest = origin.commits[step], origin.newest
        members = {}
        for rank in range(commit.world_size):
            hosts, owner = self._hosts(origin, step, rank), self.view.owner_host(origin, newest, rank)
            members[rank] = AttemptMember(rank, owner if owner in hosts else hosts[0], "", is_gone=True)
        job = Job(name, last_copied_placement=origin.placement or origin.last_copied_placement)
        attempt_number = self.state.removed.get(name, 0) + 1
        job.attempts[attempt_number] = attempt = origin_attempt(
            attempt_number, commit.world_size, {**newest.config, "durable": None}, newest.level_asked, members,
            [self._chunks(origin, step, rank) for rank in range(commit.world_size)],
        )  # fmt: skip
        attempt.steps[step.step] = "open"  # not whole yet: the one version that needs room
        return job

    def _chunks(self, job: Job, step: StepId, rank: int) -> int:
        return next(copy.spec.chunks_count for copy in job.copies[step][rank].values())

    def _markers_listed(self, pending: PendingFork, why: str) -> None:
        """Go on if durable storage has no job of the new name, whose history would be mixed with the fork's."""
        name = pending.job.name
        if self.state.pending_forks.get(name) is not pending or not pending.is_listing:
            return
        pending.is_listing = False
        if why:
            what = f"whether job {name!r} has steps on durable storage is unknown: {why}"
            self._refuse(pending, "RecoveryError", what)
        elif name in self.state.jobs:
            self._refuse(pending, *self._exists(name))
        else:
            self._claim(pending)

    # -- room, then a look --------------------------------------------------------------------

    def _claim(self, pending: PendingFork) -> None:
        job = pending.job
        if job.newest is not None:
            pending.claimed = self.room.claim(job, job.newest, lambda h, why: self._claimed(pending, h, why))

    def _claimed(self, pending: PendingFork, host: str, why: str) -> None:
        """Go on if every host has room for the fork without its origin's chunks; refuse it otherwise."""
        if self.state.pending_forks.get(pending.job.name) is not pending:
            return
        if why:
            self._refuse(
                pending, "CapacityError",
                f"{pending.job.name} does not fit on {host}: it shares the chunks of {pending.origin}, and still needs "
                f"room of its own for the day when that drops them: {why}",
            )  # fmt: skip
            return
        origin = self.state.jobs.get(pending.origin)
        if origin is None or pending.step not in origin.copies:
            self._refuse(pending, "RecoveryError", f"step {pending.step.step} of job {pending.origin!r} is gone")
            return
        self.count += 1
        pending.number = self.count
        ranks = range(origin.commits[pending.step].world_size)
        where = {rank: self._hosts(origin, pending.step, rank) for rank in ranks}
        pending.found = {rank: {} for rank in ranks}
        pending.waits = self.making.order(pending.job, origin, pending.step, where, call=pending.number)

    def looked(self, host: str, report: CopiesLookedAt) -> None:
        """Take a host's report: the origin's shards that it has whole, and their digests under the new name."""
        pending = self.state.pending_forks.get(report.job)
        if pending is None or pending.number != report.call or host not in pending.waits:
            return
        pending.waits.discard(host)
        for shard in report.shards:
            if not shard.lacking and shard.rank in pending.found:
                pending.found[shard.rank][host] = shard.digest
        self._progress(pending)

    def _progress(self, pending: PendingFork) -> None:
        """Record the fact, or refuse the fork, once all hosts have looked."""
        pending.waits = {h for h in pending.waits if self.state.hosts.is_live(h)}
        if pending.waits or not pending.number or pending.is_recorded:
            return
        found = {
            rank: {h: d for h, d in hosts.items() if self.state.hosts.is_live(h)}
            for rank, hosts in pending.found.items()
        }
        lost = [rank for rank, hosts in found.items() if len(set(hosts.values())) != 1]
        if lost:
            what = f"rank {lost[0]} of step {pending.step.step} of job {pending.origin!r} is not whole on any host now"
            self._refuse(pending, "RecoveryError", f"{what}: repair is under way, ask again in a moment")
            return
        origin = self.state.jobs.get(pending.origin)
        why = origin.retired.get(pending.step) if origin is not None else None
        if why is not None:  # since it was asked for
            what = f"step {pending.step.step} of job {pending.origin!r} is retired"
            self._refuse(pending, "RecoveryError", f"{what}: {why}")
            return
        pending.is_recorded = True
        self.journal.record(self._fact(pending, found))

    def _fact(self, pending: PendingFork, found: dict[int, dict[str, str]]) -> JobForked:
        job, placement = pending.job, self.view.placement(pending.job)
        attempt = next(iter(job.attempts.values()))
        short = [
            f"rank {rank} has {len(self.state.hosts.domains(hosts))} of {attempt.replicas} copies"
            for rank, hosts in found.items()
            if len(self.state.hosts.domains(hosts)) < attempt.replicas
        ]
        level = placement.level if placement is not None else "host"
        if is_finer(level, attempt.level_asked, self.state.hosts.failure_domains):
            short.insert(0, f"copies are spread over {level}s, not {attempt.level_asked}s")
        return JobForked(
            job=job.name, attempt=attempt.attempt_number, step=pending.step.step, world_size=attempt.world_size,
            from_job=pending.origin, from_attempt=pending.step.attempt,
            digests=tuple(next(iter(found[rank].values())) for rank in range(attempt.world_size)),
            hosts=tuple(tuple(sorted(found[rank])) for rank in range(attempt.world_size)),
            rank_hosts=tuple(attempt.members[rank].host_id for rank in range(attempt.world_size)),
            needs=tuple(attempt.needs[rank] for rank in range(attempt.world_size)),
            level=level, level_asked=attempt.level_asked, is_degraded=bool(short),
            reason="; ".join(short[:3]), config=attempt.config, nonce=pending.nonce, wall_s=self.state.wall_s,
        )  # fmt: skip

    def _refuse(self, pending: PendingFork, error: str, why: str) -> None:
        """Give up a fork: hosts free its room."""
        job = pending.job
        self.state.pending_forks.pop(job.name, None)
        for host in sorted(pending.claimed):
            # The name and the number are free again: the next job of this name is not fenced by it.
            self.out.send(host, GiveUpFork(job=job.name, attempt=max(job.attempts)))
        for call in pending.calls:
            self.out.refuse(call, error, why)

    # -- the fact -----------------------------------------------------------------------------

    def apply_forked(self, fact: JobForked, *, is_replay: bool) -> None:
        """Let the caller wait for the manifests: the fact is replicated."""
        pending = self.state.pending_forks.pop(fact.job, None)
        if pending is not None:
            self.making.waiting.setdefault(fact.job, []).extend(pending.calls)
        self.making.apply(fact, is_replay=is_replay)

    def tick(self, now: float) -> None:
        """Give up forks that have no fact after a while."""
        for pending in list(self.state.pending_forks.values()):
            self._progress(pending)
            if not pending.is_recorded and now - pending.since_s > ASK_LIMIT_S:
                late = ", ".join(sorted(pending.waits or pending.claimed)) or "asked for durable markers"
                why = f"hosts {late} did not answer within {ASK_LIMIT_S:g} s: see `memstore status`, then ask again"
                self._refuse(pending, "PeerTimeout", why)
        self.making.tick(now)

    # -- for the parts ------------------------------------------------------------------------

    def needed(self, job: Job) -> set[StepId]:
        """Return the steps of a job that are being forked, so not dropped now."""
        steps = {p.step for p in self.state.pending_forks.values() if p.origin == job.name}
        facts = [fact for fact in self.state.forks_of(job) if self.making.needs_origin(self.state.jobs[fact.job], job)]
        return steps | {StepId(fact.from_attempt, fact.step) for fact in facts}

    def unfinished(self, job: Job) -> list[str]:
        """Return the forks of a job that are not whole yet, but may become so."""
        pending = [name for name, p in self.state.pending_forks.items() if p.origin == job.name]
        jobs = self.state.jobs
        made = [fact.job for fact in self.state.forks_of(job) if self.making.needs_origin(jobs[fact.job], job)]
        return pending + made

    def forget(self, name: str) -> None:
        """Forget a removed job, origin or fork."""
        self.making.forget(name)
        for pending in list(self.state.pending_forks.values()):
            if name in (pending.origin, pending.job.name) and not pending.is_recorded:
                self._refuse(pending, *job_removed(name))
