"""Missing copies of kept steps are rebuilt on the hosts placement names, newest first. Pure (R27, R29).

Only death starts repair. Copies that placement no longer names are dropped once the ones it names
are there, so memory stays within what was reserved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memstore.core.events import Body, shard_to_wire
from memstore.core.job import Attempt, Job
from recovery.inventory import Copy, ShardId, StepId

if TYPE_CHECKING:
    from memstore.core.catalog import Catalog

PUSHES_PER_SOURCE_MAX = 2
PUSH_DEADLINE_S = 120.0  # a push that was neither finished nor refused by then is ordered again
REFUSAL_TTL_S = 5.0  # how long a target that refused a copy is left alone


class Repair:
    """Compares desired with actual copies and orders the difference."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.pushes: dict[tuple[ShardId, str], tuple[str, float]] = {}  # (shard, target) -> (source, deadline)
        self.refused_s: dict[tuple[ShardId, str], float] = {}

    def tick(self, now: float) -> None:
        """Consider every job; forget pushes and refusals that are too old."""
        self.pushes = {key: value for key, value in self.pushes.items() if value[1] > now}
        for key, since_s in list(self.refused_s.items()):
            if now - since_s > REFUSAL_TTL_S:
                del self.refused_s[key]
        for job in self.catalog.jobs.values():
            self.consider(now, job)

    def consider(self, now: float, job: Job) -> None:
        """Order what is missing of one job, newest step first."""
        attempt = job.newest
        if attempt is None or attempt.phase == "fencing" or job.name in self.catalog.rounds.active:
            return
        is_waiting = self._may_come_back(now, attempt)
        if not is_waiting:
            job.home = self.catalog.view.placement(job)
        held = self.catalog.retention.held(job, attempt)
        for step in sorted(job.copies, reverse=True):
            is_open = step.attempt == attempt.ordinal and attempt.steps.get(step.step) in ("open", "committing")
            if is_open or (step in held and not is_waiting):
                self._consider_step(now, job, attempt, step, may_drop=step in held)
            if is_open and attempt.steps[step.step] == "open":
                self.catalog.steps.give_up_damaged(now, job, attempt, step.step)

    def _may_come_back(self, now: float, attempt: Attempt) -> bool:
        """True while a dead host of the job died so lately that it may be back with its memory (R3, R28).

        A killed holder is replaced within seconds and adopts its arena: copying everything away at
        once would be work for nothing, in the moment when a restore needs the network.
        """
        wait_s = self.catalog.rules.repair_after_s
        for seat in attempt.seats.values():
            state = self.catalog.hosts.states.get(seat.host_id)
            if state is not None and state.status == "dead" and now - state.since_s < wait_s:
                return True
        return False

    def _consider_step(self, now: float, job: Job, attempt: Attempt, step: StepId, *, may_drop: bool) -> None:
        if self.catalog.view.placement(job) is None:
            return
        commit = job.commits.get(step)
        for rank, copies in sorted(job.copies[step].items()):
            shard = ShardId(job.name, step.attempt, step.step, rank)
            good = {
                h: c
                for h, c in copies.items()
                if self.catalog.hosts.is_live(h) and (commit is None or c.spec.digest == commit.digests[rank])
            }
            wanted = self.catalog.view.wanted(job, attempt, rank)
            seat = attempt.seats[rank].host_id if rank in attempt.seats else ""
            whole = [h for h, c in good.items() if not c.missing]
            lacking = [h for h in wanted if h not in whole]
            if not commit and seat not in copies and wanted[0] not in copies:
                continue  # still being put: its owner pushes it
            for target in lacking:
                self._push(now, shard, target, good, attempt)
            if may_drop and not lacking and self._is_safe(wanted, attempt):
                for host in [
                    h for h in copies if h not in (*wanted, seat) and not self.catalog.queries.is_read(shard, h)
                ]:
                    self.catalog.tell(host, "drop", {"shards": [shard_to_wire(shard)]})
                    job.drop_copy(shard, host)

    def _is_safe(self, wanted: list[str], attempt: Attempt) -> bool:
        """True if the hosts that placement names are enough by themselves: all answer, in as many domains as asked.

        While the cluster cannot hold that many apart, every copy more is worth its room.
        """
        hosts = self.catalog.hosts
        return all(hosts.is_answering(h) for h in wanted) and len(hosts.domains(wanted)) >= attempt.replicas

    def _push(self, now: float, shard: ShardId, target: str, good: dict[str, Copy], attempt: Attempt) -> None:
        hosts = self.catalog.hosts
        if (shard, target) in self.pushes or (shard, target) in self.refused_s or not hosts.is_answering(target):
            return
        is_open = StepId(shard.attempt, shard.step) not in self.catalog.jobs[shard.job].commits
        if not is_open and hosts.is_on_probation(now, target) and len(good) < attempt.replicas:
            return  # an open step's owner pushes there anyway, and waits for it
        sources = [h for h, c in good.items() if h != target and hosts.is_answering(h) and not c.missing]
        # A copy with bad chunks can be mended from several: any source that has a chunk the target lacks helps.
        if not sources and target in good:
            sources = [h for h, c in good.items() if h != target and good[target].missing - c.missing]
        load = {h: sum(1 for source, _ in self.pushes.values() if source == h) for h in sources}
        free = [h for h in sources if load[h] < PUSHES_PER_SOURCE_MAX]
        if not free:
            return
        source = min(free, key=lambda h: (load[h], h))
        self.pushes[shard, target] = (source, now + PUSH_DEADLINE_S)
        digest = good[source].spec.digest
        self.catalog.tell(
            source, "push", {"shard": shard_to_wire(shard), "digest": digest, "target": target, "is_repair": True}
        )

    def pushed(self, shard: ShardId, target: str) -> None:
        """The target sealed the shard."""
        self.pushes.pop((shard, target), None)

    def push_failed(self, now: float, shard: ShardId, body: Body) -> None:
        """A push was refused or broke: count the step without it, try again later (R18)."""
        target, why = str(body["target"]), str(body["why"])
        job = self.catalog.jobs.get(shard.job)
        self.pushes.pop((shard, target), None)
        if job is None:
            return
        self.refused_s[shard, target] = now
        if body.get("is_final", True) and self.catalog.hosts.is_answering(target):
            kept = {
                key: text for key, text in job.refusals.items() if StepId(key[0].attempt, key[0].step) in job.copies
            }
            job.refusals = {**kept, (shard, target): why}
            self.catalog.steps.evaluate(job, StepId(shard.attempt, shard.step))

    def host_died(self, host_id: str) -> None:
        """Pushes from or to a dead host will not finish."""
        self.pushes = {
            (shard, target): (source, deadline)
            for (shard, target), (source, deadline) in self.pushes.items()
            if host_id not in (source, target)
        }
