"""R8: a holder seals the bytes that its rank has put, and no others."""

from __future__ import annotations

from collections.abc import Sequence

from memstore.core.format.manifest import chunk_digest
from memstore.testing.simulator.checks.fences import Fences
from memstore.testing.simulator.checks.observed import Observed
from memstore.testing.simulator.world.processes import AnyHolder
from memstore.testing.simulator.world.violation import Violation
from recovery.inventory import ShardId


class PutCheck:
    """What ranks submit, and what their holders make of it."""

    def __init__(self, observed: Observed, fences: Fences) -> None:
        self.observed, self.fences = observed, fences

    def submitted(self, shard: ShardId, content: list[bytes]) -> None:
        """Record the bytes that a rank has put."""
        self.observed.contents.setdefault(shard, []).append(content)
        self.observed.steps_put += 1

    def sealed_here(self, holder: AnyHolder, shard: ShardId, digests: Sequence[bytes]) -> None:
        """Look at a shard that a holder has sealed for a local rank."""
        puts = [[chunk_digest(data) for data in put] for put in self.observed.contents[shard]]
        if list(digests) not in puts:
            raise Violation("R8", f"{holder.host_id} sealed other bytes of {shard} than its rank put")
        self.fences.sealed_here(holder, shard)
