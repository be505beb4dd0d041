"""R8: a rank writes only into slots that are leased to it."""

from __future__ import annotations

from memstore.core.arena.slot_table import SlotState
from memstore.testing.simulator.world.processes import AnyHolder
from memstore.testing.simulator.world.violation import Violation
from memstore.testing.simulator.world.world import World


def look_at_leases(world: World, holder: AnyHolder) -> None:
    """Raise Violation if a living rank may write into a slot that its holder leases to another process."""
    for rank in (*world.ranks, *world.former):
        if rank.holder is holder and not rank.is_dead:
            for number in (*rank.pool, *rank.in_copy):
                slot = holder.replicas.table.slots[number]
                if slot.state is not SlotState.LEASED or slot.owner != rank.owner:
                    raise Violation(
                        "R8",
                        f"rank {rank.rank} may write slot {number} of {holder.host_id}, "
                        f"which is {slot.state.name} of {slot.owner}",
                    )
