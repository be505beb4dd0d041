"""What one holder of the simulation knows of equal ranks: the real state, watched (R34).

What is held against it here: an offer waits for at most 3 s, never for a rank whose put is being digested all
that time, once for a rank that does not come; and equal chunks do not travel while this host digests its own.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.holder.puts.shared_shards import HolderSharedShards, Newest
from memstore.core.wire.rank_messages import ShardDiffers
from memstore.testing.simulator.checks.shared_shards import SharedShardCheck
from memstore.testing.simulator.world.virtual_time import Wait
from memstore.testing.simulator.world.world import AnyHolder, Violation, World
from recovery.inventory import ShardId

WAIT_S_MAX = 3.2  # R34 says 3; steps of virtual time are added
DIGESTED_S = 1.0  # a put is digested in far less


class SharedShardHolder(AnyHolder, Protocol):
    """A holder, as `SimSharedShards` sees it."""

    thawed_s: float  # when it was last thawed


class SimSharedShards(HolderSharedShards):
    """Of one simulated holder."""

    def __init__(self, holder: SharedShardHolder, world: World, shared_shards: SharedShardCheck) -> None:
        super().__init__()
        self.sim, self.world, self.shared_shards = holder, world, shared_shards
        self.began_s: dict[ShardId, float] = {}  # local puts submitted and not sealed -> since when
        self.in_vain: dict[tuple[str, int], tuple[int, float]] = {}  # (job, local rank) -> attempt and when, in vain

    # -- offers ---------------------------------------------------------------------------------

    def watched(
        self, shard: ShardId, sender: SharedShardHolder, wait: Generator[Wait, None, None]
    ) -> Generator[Wait, None, bool]:
        """Let an offer of `sender` wait; return whether time passed."""
        own, began_s = self.own_of(shard), self.world.now
        if own is not None and not self.is_over(shard, own):
            self._look_at_late(shard, own)
        yield from wait
        is_asleep = max(self.sim.thawed_s, sender.thawed_s) >= began_s or self.sim.is_frozen
        if self.world.now - began_s > WAIT_S_MAX and not is_asleep:
            raise Violation("R34", f"an offer of {shard} waited {self.world.now - began_s:.2f} s at {self.sim.host_id}")
        return self.world.now > began_s

    def gave_up(self, shard: ShardId, own: int) -> None:
        """Look at a wait in vain."""
        if self.is_over(shard, own):
            return
        self._look_at_late(shard, own)
        self._look_at_wait(shard, own)
        super().gave_up(shard, own)
        self.in_vain[shard.job, own] = (shard.attempt, self.world.now)

    def _look_at_late(self, shard: ShardId, own: int) -> None:
        """One wait in vain is enough: others for the same rank end with it, and none begins before its next seal."""
        attempt, at_s = self.in_vain.get((shard.job, own), (0, 0.0))
        if attempt == shard.attempt and self.world.now > at_s:
            raise Violation("R34", f"at {self.sim.host_id} {shard} waits for rank {own}, in vain since {at_s:.2f} s")

    def _look_at_wait(self, shard: ShardId, own: int) -> None:
        """In vain only if the put did not come: one's own digesting waits for no other rank's (R13)."""
        put = ShardId(shard.job, shard.attempt, shard.step, own)
        here_s = self.world.now - self.began_s.get(put, self.world.now)
        if here_s > DIGESTED_S and self.sim.thawed_s < self.world.now - here_s and not self.sim.is_frozen:
            raise Violation(
                "R34",
                f"{self.sim.host_id} has had rank {own}'s put of step {shard.step} for {here_s:.2f} s and has "
                f"not sealed it, and {shard} waits for it: they wait for one another",
            )

    def travels(self, shard: ShardId, index: int) -> None:
        """A chunk of a new put comes here: not one that this host is digesting for its own rank (R13)."""
        row = self._row_of(shard)
        if row is None or index >= self.shared_shards.shared_count(shard):
            return
        own = ShardId(shard.job, shard.attempt, shard.step, row)
        is_late = self.in_vain.get((shard.job, row), (0, 0.0))[0] == shard.attempt
        if own in self.began_s and not is_late:
            raise Violation("R34", f"chunk {index} of {shard} travels to {self.sim.host_id}, which is digesting {own}")

    def _row_of(self, shard: ShardId) -> int | None:
        attempt, table = self.declared.get(shard.job, (0, {}))
        found = [rank for rank, row in table.items() if attempt == shard.attempt and shard.rank in row.other_writers]
        return min(found, default=None)

    # -- seals ----------------------------------------------------------------------------------

    def began(self, shard: ShardId) -> None:
        """A local rank's put was submitted."""
        self.began_s.setdefault(shard, self.world.now)

    def ended(self, shard: ShardId) -> None:
        """It is sealed, or will never be."""
        self.began_s.pop(shard, None)

    def put_sealed(self, stored: StoredReplica, shared_count: int | None) -> int | None:
        """Look at a local rank's sealed put; the step before is returned if this one repeats its chunks: never here."""
        self.ended(stored.shard)
        if not self.world.scenario.shards:
            return None
        before = super().put_sealed(stored, shared_count)
        self.in_vain.pop((stored.shard.job, stored.shard.rank), None)
        if before is not None:
            raise Violation("R34", f"{stored.shard} is said to repeat step {before}, and does not")
        return None

    def compare(self, own: Newest, other: StoredReplica) -> ShardDiffers | None:
        """Look at a notice to a rank."""
        event = super().compare(own, other)
        if event is not None:
            self.shared_shards.reported(own.shard, event.other_rank, list(event.chunks))
        return event
