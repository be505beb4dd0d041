"""Files of a host that go while its processes live: the arena's, or all names of its folder (R8, R35).

A memory's list of slots stands for the arena's file. A process that has mapped it keeps that list, and a new file is
another list.
"""

from __future__ import annotations

from memstore.testing.simulator.run.cluster import Cluster
from memstore.testing.simulator.world.scenario import Fault

LOOK_S = 0.3


def take(cluster: Cluster, fault: Fault, names: list[str]) -> None:
    """Take the files of hosts away, in a strict scenario of no more hosts than the promise allows."""
    for name in names[: cluster.scenario.replicas - 1] if cluster.scenario.is_strict else names:
        if fault.kind == "replace-arena":
            cluster.kill_holder(name)
            cluster.memories[name].lose_folder()
        else:
            cluster.memories[name].is_removed = True
            cluster.at(LOOK_S, lambda name=name: look(cluster, name))  # type: ignore[misc]


def look(cluster: Cluster, name: str) -> None:
    """Let a holder notice that its files were removed: it writes again what it has open, and ends (R35).

    It mirrors shell/holder/folder_guard.py.
    """
    holder, memory = cluster.holders[name], cluster.memories[name]
    if memory.is_removed and holder.is_serving:
        memory.write_again()
        cluster.kill_holder(name)
    elif memory.is_removed:
        cluster.at(LOOK_S, lambda: look(cluster, name))
