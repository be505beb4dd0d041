"""Files of a host that go while its processes live: the arena's, or all names of its folder (R8, R35).

A memory's list of slots stands for the arena's file. A process that has mapped it keeps that list, and a new file is
another list.
"""

from __future__ import annotations

from memstore.core.holder import lost_files
from memstore.core.holder.lost_files import FileLoss
from memstore.errors import CapacityError
from memstore.testing.faults.catalogue import Fault
from memstore.testing.simulator.run.cluster import SimCluster

LOOK_S = 0.3


def take(cluster: SimCluster, fault: Fault, names: list[str]) -> None:
    """Take the files of hosts away, in a strict scenario of no more hosts than the promise allows."""
    for name in names[: cluster.scenario.replicas - 1] if cluster.scenario.is_strict else names:
        if fault.kind == "replace-arena":
            cluster.kill_holder(name)
            cluster.memories[name].lose_folder()
        else:
            cluster.memories[name].is_removed = True
            cluster.at(LOOK_S, lambda name=name: _look(cluster, name, FileLoss()))  # type: ignore[misc]


def _look(cluster: SimCluster, name: str, loss: FileLoss) -> None:
    """Let a holder look at its files, until it has ended."""
    holder = cluster.holders[name]
    if cluster.memories[name].is_removed:
        if holder.is_serving:
            lost_files.look(SimFiles(cluster, name), loss)
        cluster.at(LOOK_S, lambda: _look(cluster, name, loss))


class SimFiles:
    """The files of a simulated holder's folder."""

    def __init__(self, cluster: SimCluster, name: str) -> None:
        self.cluster, self.name, self.memory = cluster, name, cluster.memories[name]

    def missing(self) -> list[str]:
        """Return what is gone."""
        return ["the folder"] if self.memory.is_removed else []

    def prepare(self) -> None:
        """Have room for all of it, unless a fault has filled the file system."""
        if self.memory.is_full:
            raise CapacityError("no room to write the folder again")

    def other_holder(self, error: Exception) -> bool:
        """Return False: a host has one folder here, and one holder."""
        return False

    def say_loss(self, names: str) -> None:
        """Note what is gone."""
        self.cluster.note(f"{self.name}: {names} removed")

    def last_word(self) -> None:
        """Do nothing: connections end with the holder."""

    def write_again(self) -> None:
        """Write again what the holder has open."""
        self.memory.write_again()

    def end(self, why: str) -> None:
        """End the holder; another one begins. What is not written again goes with it, and no fault is to blame."""
        if self.memory.is_removed:
            self.memory.wipe()
        self.cluster.note(f"{self.name}: {why}")
        self.cluster.kill_holder(self.name)
