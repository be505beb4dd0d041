"""Files of a simulated host that go while its processes live: the arena's, or all names of its folder (R8, R35).

A memory's list of slots stands for the arena's file: who has mapped it keeps that list, and a new file is another list.
What shell/holder/rank_server.py, seal.py and folder_guard.py do about it is mirrored here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memstore.testing.simulator.checks.scenario import Fault

if TYPE_CHECKING:
    from memstore.testing.simulator.host.holder import SimHolder
    from memstore.testing.simulator.rank.rank import SimRank
    from memstore.testing.simulator.world.memory import Memory
    from memstore.testing.simulator.world.world import Simulation

LOOK_S = 0.3


def confirm(holder: SimHolder, rank: SimRank) -> list[int]:
    """Return the slots that a rank holds and that are not its own: all of them if it mapped another arena (R8)."""
    held, is_ours = rank.held(), rank.mapping is holder.memory.slots
    _, stale = holder.vault.table.confirm(rank.owner, held if is_ours else [])
    return stale if is_ours else held


def are_seen(holder: SimHolder, slots: list[int], body: dict[str, Any]) -> bool:
    """Say whether the holder sees in the slots what the rank that hands them over sees there (R8)."""
    return bool([bytes(holder.vault.arena.view(number)) for number in slots] == body["seen"])


def take(world: Simulation, each: Fault, names: list[str]) -> None:
    """Take the files of hosts away, of no more than the promise allows in a strict scenario."""
    for name in names[: world.scenario.replicas - 1] if world.scenario.is_strict else names:
        if each.kind == "replace-arena":
            world.kill_holder(name)
            _lose(world.memories[name])
        else:
            world.memories[name].is_removed = True
            world.at(LOOK_S, lambda name=name: look(world, name))  # type: ignore[misc]


def look(world: Simulation, name: str) -> None:
    """A holder notices that its files were removed, writes again what it has open, and ends (R35)."""
    holder, memory = world.holders[name], world.memories[name]
    if memory.is_removed and holder.is_serving:
        memory.write_again()
        world.kill_holder(name)
    elif memory.is_removed:
        world.at(LOOK_S, lambda: look(world, name))


def died(world: Simulation, memory: Memory) -> None:
    """A holder dies before it has written removed files again: what it had open goes with it."""
    if memory.is_removed:
        world.checker.after_event()  # what was dropped before was no fault's doing
        before, world.checker.cause = world.checker.cause, "remove-files"
        _lose(memory)
        world.checker.after_event()
        world.checker.cause = before


def _lose(memory: Memory) -> None:
    memory.wipe()
    memory.incarnation = 0  # its folder had it
