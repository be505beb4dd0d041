"""R19 for pins: a pinned step stays restorable.

Only what was acknowledged is demanded. A question whose rank died before the answer promises nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from memstore.testing.simulator.checks.observed import Observed
from memstore.testing.simulator.world.processes import AnyController
from memstore.testing.simulator.world.violation import Violation
from memstore.testing.simulator.world.world import World
from recovery.inventory import ShardId, StepId


class Promises:
    """The pins of one simulation."""

    def __init__(self, world: World, observed: Observed) -> None:
        self.world, self.observed = world, observed
        self.pins: dict[str, StepId] = {}  # acknowledged pins, until a command takes them back

    def promised(self) -> Iterator[tuple[str, ShardId]]:
        """Yield every shard that a pin promises, with the name of that."""
        facts = self.observed.facts
        for name, step in sorted(self.pins.items()):
            yield from ((f"pin {name}", self._shard(step, rank)) for rank in range(len(facts[step].digests)))

    def _shard(self, step: StepId, rank: int) -> ShardId:
        return ShardId(self.world.scenario.job, step.attempt, step.step, rank)

    def copies(self, shard: ShardId) -> list[str]:
        """Return the hosts that have a shard, as far as a controller can know at this moment."""
        believed = self.observed.believed
        return sorted(host for host, held in believed.items() if any(copy == shard for copy, _ in held))

    def claims_redundancy(self, controller: AnyController) -> bool:
        """Say whether the store claims every copy of what is promised."""
        live = set(controller.machine.hosts.live_ids())
        for _, shard in self.promised():
            job = controller.machine.jobs.get(shard.job)
            step = StepId(shard.attempt, shard.step)
            copies = job.copies.get(step, {}).get(shard.rank, {}) if job is not None else {}
            if len([h for h, c in copies.items() if h in live and not c.missing]) < self.world.scenario.replicas:
                return False
        return True

    def dropped(self, host: str, shard: ShardId, taken: list[str]) -> None:
        """Look at a copy that has gone without a fault: a promised shard must have enough others (R19).

        Args:
            taken: Hosts whose copies faults have taken since the drop was ordered: the order counted on them.
        """
        for what, promised in self.promised():
            left = [*self.copies(shard), *taken]
            if promised == shard and len(left) < self.world.scenario.replicas:
                raise Violation("R19", f"{host} dropped {shard}, kept by {what}; copies left: {left}")

    def lacking(self, wanted: int) -> str:
        """Say which promised shard lies on too few hosts, or ""."""
        for what, shard in self.promised():
            have = self.copies(shard)
            if len(have) < wanted:
                return f"{shard}, kept by {what}, is on {have}, wanted {wanted} hosts"
        return ""
