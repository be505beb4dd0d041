"""I13, I16 and I18: at the end the controller knows every copy, and nothing is kept for dead processes."""

from __future__ import annotations

from memstore.testing.simulator.checks.redundancy import Redundancy
from memstore.testing.simulator.world.violation import Violation
from memstore.testing.simulator.world.world import World


def look_at_the_end(world: World, redundancy: Redundancy) -> None:
    """Look at a store whose ranks have ended and in which nothing happens any more."""
    controller = world.served()
    if controller is None:
        raise Violation("I16", "no controller serves at the end")
    known = {
        (copy.shard, host, copy.missing)
        for job in controller.machine.jobs.values()
        for ranks in job.copies.values()
        for hosts in ranks.values()
        for host, copy in hosts.items()
    }
    held = {(c.shard, h, c.missing) for h, holder in world.holders.items() for c in holder.copies()}
    if known != held:
        only_held, only_known = sorted(map(str, held - known))[:3], sorted(map(str, known - held))[:3]
        raise Violation("I18", f"held but unknown: {only_held}; known but not held: {only_known}")
    for host, holder in world.holders.items():
        leased = {o: n for o, n in holder.replicas.table.leases.items() if n}
        if leased:
            raise Violation("I13", f"{host} still leases slots to dead processes: {leased}")
        # A sender that was cut off could not say that it gave up, so its incoming replica stays until it has been idle
        # for long. Chunks that no reader took, because their reader died or the controller did, go by their deadline.
        incoming = {k for k, replica in holder.replicas.index.incoming.items() if replica.part is None}
        kept = [k for k in incoming if (k[1], k[0]) not in holder.peer_server.incoming]
        if kept:
            raise Violation("I13", f"{host} still has incoming replicas {sorted(map(str, kept))[:3]}")
    why = redundancy.why_not_live()
    if why:
        raise Violation("I16", f"at the end {why}")
