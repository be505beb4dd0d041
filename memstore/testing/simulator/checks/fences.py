"""R21: a holder that has answered a fence takes nothing of an older attempt."""

from __future__ import annotations

from memstore.testing.simulator.world.processes import AnyHolder
from memstore.testing.simulator.world.violation import Violation
from memstore.testing.simulator.world.world import World
from recovery.inventory import ShardId


class Fences:
    """The fences that the holders of one simulation have answered."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._answered: dict[tuple[AnyHolder, str], int] = {}  # (holder, job) -> newest attempt

    def answered(self, holder: AnyHolder, job: str, attempt: int) -> None:
        """Record that a holder has promised to refuse older attempts."""
        self._answered[holder, job] = max(attempt, self._answered.get((holder, job), 0))

    def is_fenced(self, holder: AnyHolder, job: str, attempt: int) -> bool:
        """Say whether a holder has promised to refuse an attempt."""
        return attempt < self._answered.get((holder, job), 0)

    def look_at_incoming(self, holder: AnyHolder) -> None:
        """Raise Violation if a holder still receives a shard in an attempt that it has fenced."""
        for (shard, sender, *_), replica in holder.replicas.index.incoming.items():
            if sender in self.world.holders and self.is_fenced(holder, shard.job, replica.attempt):
                raise Violation("R21", f"{holder.host_id} receives {shard} of {sender} in a fenced attempt")

    def sealed_here(self, holder: AnyHolder, shard: ShardId) -> None:
        """Raise Violation if a holder has sealed a local rank's shard of an attempt that it has fenced."""
        if self.is_fenced(holder, shard.job, shard.attempt):
            raise Violation("R21", f"{holder.host_id} sealed {shard} although it had answered a newer fence")
