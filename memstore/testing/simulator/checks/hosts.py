"""What several checks ask of hosts: their racks, and which of them die often."""

from __future__ import annotations

from collections.abc import Iterable

from memstore.testing.simulator.world.world import World


def racks_of(world: World, hosts: Iterable[str]) -> set[str]:
    """Return the racks of hosts; "" for those without a label."""
    return {world.holders[host].info.labels.get("rack", "") for host in hosts}


def trusted_hosts(world: World) -> list[str]:
    """Return the hosts that get a second copy first: those that do not die often (R29)."""
    controller = world.served()
    hosts = controller.machine.hosts if controller is not None else None
    return [h for h in world.holders if hosts and not hosts.is_on_probation(world.now, h)]


def are_well(world: World) -> bool:
    """Say whether every holder runs, has a session and has room."""
    return all(h.is_serving and h.session is not None and not h.memory.is_full for h in world.holders.values())
