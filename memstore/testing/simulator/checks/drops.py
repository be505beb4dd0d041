"""R19, R36: no host is to drop a copy of the newest committed step that is needed, or of one that is leased."""

from __future__ import annotations

from memstore.core.wire.orders import DropJob, FreeCopies
from memstore.testing.simulator.checks.observed import Observed
from memstore.testing.simulator.checks.promises import Promises
from memstore.testing.simulator.world.processes import AnyController
from memstore.testing.simulator.world.violation import Violation
from memstore.testing.simulator.world.world import World
from recovery.inventory import ShardId, StepId

NOTICE_S = 0.05  # a controller learns of a host's end within this


class DropCheck:
    """Copies that were dropped on order, and copies that faults destroyed."""

    def __init__(self, world: World, observed: Observed, promises: Promises) -> None:
        self.world, self.observed, self.promises = world, observed, promises
        self._ordered_s: dict[tuple[str, ShardId], float] = {}  # (host, shard) -> when its drop was ordered
        self._unaware: set[tuple[str, ShardId]] = set()  # dropped by order of a controller that knew of no such commit
        self._taken_s: dict[tuple[str, ShardId], float] = {}  # (host, shard) -> when a fault took the copy

    def ordered(self, controller: AnyController, host: str, order: FreeCopies | DropJob) -> None:
        """Look at an order to drop copies: of its newest committed step a controller must know enough others."""
        shards = [shard.id for shard in order.shards]
        self._look_at_leases(controller, host, shards)
        self._ordered_s.update({(host, shard): self.world.now for shard in shards})
        job = controller.machine.jobs.get(self.world.scenario.job)
        commits = {(job.name, step) for job in controller.machine.jobs.values() for step in job.commits}
        unaware = {shard for shard in shards if (shard.job, StepId(shard.attempt, shard.step)) not in commits}
        self._unaware.difference_update((host, shard) for shard in shards)
        self._unaware.update((host, shard) for shard in unaware)
        newest = max(job.commits, default=None) if job is not None else None
        if job is None or newest is None or isinstance(order, DropJob) or not self.world.scenario.is_strict:
            return
        for shard in shards:
            if shard.job == job.name and StepId(shard.attempt, shard.step) == newest:
                known = job.copies.get(newest, {}).get(shard.rank, {})
                left = sorted(h for h, copy in known.items() if h != host and not copy.missing)
                if len(left) < self.world.scenario.replicas:
                    raise Violation(
                        "R19", f"{host} is to drop {shard}, the newest committed; whole elsewhere, as it knows: {left}"
                    )

    def _look_at_leases(self, controller: AnyController, host: str, shards: list[ShardId]) -> None:
        """Look for a step that the controller drops before it has ended its lease; repair may drop surplus copies."""
        for shard in shards:
            job, step = controller.machine.jobs.get(shard.job), StepId(shard.attempt, shard.step)
            left = job.copies.get(step, {}).get(shard.rank, {}) if job is not None else {}
            if job is not None and step in job.leased and all(copy.missing for copy in left.values()):
                raise Violation("R36", f"{host} is to drop {shard}, which a reader has leased; no host has it then")

    def taken_by_fault(self, host: str, shard: ShardId) -> None:
        """Record that a fault destroyed a copy."""
        self._taken_s[host, shard] = self.world.now

    def dropped(self, host: str, shard: ShardId, digest: str) -> None:
        """Look at a copy that has gone without a fault."""
        taken = self._taken_meanwhile(host, shard)
        self.promises.dropped(host, shard, taken)
        step = StepId(shard.attempt, shard.step)
        newest = max(self.observed.facts, default=None)
        if newest is None or step != newest or shard.job != self.world.scenario.job:
            return
        if step not in self.observed.acked and (host, shard) in self._unaware:
            # its fact is in too few journals: no rank was informed of it, and a new controller has not learned of it
            return
        left = sorted(h for h, believed in self.observed.believed.items() if (shard, digest) in believed)
        left += taken
        if len(left) < self.world.scenario.replicas:
            raise Violation("R19", f"{host} dropped {shard}, the newest committed; copies left: {left}")

    def _taken_meanwhile(self, host: str, shard: ShardId) -> list[str]:
        """Return the hosts whose copy a fault took after this host was ordered to drop its own.

        The controller counted on their copies when it gave the order, and was right to do so.
        """
        since_s = self._ordered_s.get((host, shard), self.world.now) - NOTICE_S
        return sorted(h for (h, lost), at_s in self._taken_s.items() if lost == shard and at_s >= since_s)
