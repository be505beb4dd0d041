"""What the checks have seen themselves: the truth that the store is held against."""

from __future__ import annotations

from collections.abc import Iterable

from memstore.core.cluster.facts import StepCommitted
from memstore.testing.simulator.world.world import World
from recovery.inventory import ShardId, StepId

Replica = tuple[ShardId, str]  # a shard and the digest of its manifest


class Observed:
    """Everything that happened in one simulation so far, as far as some check needs it."""

    def __init__(self) -> None:
        self.contents: dict[ShardId, list[list[bytes]]] = {}  # what ranks put under a name, chunk by chunk
        self.facts: dict[StepId, StepCommitted] = {}
        self.acked: set[StepId] = set()  # commits that some ticket was sent
        self.decided: dict[tuple[int, str], StepId | None] = {}  # (attempt, key of the launch) -> step of its get
        self.ever: dict[Replica, set[str]] = {}  # -> hosts that ever had all of it, spoilt or not
        self.ever_added: dict[Replica, set[str]] = {}  # -> hosts that ever had parity in which it is
        self.whole: dict[str, set[Replica]] = {}  # host -> replicas whose every byte is right
        self.believed: dict[str, set[Replica]] = {}  # host -> the same and those that rot: that is noticed later
        self.injected: dict[str, int] = {}  # kind of fault -> how many
        self.cause = ""  # the fault that is being done at this moment
        self.is_healed = False  # all faults are over
        self.starts_over = False  # everything was lost, beyond the promise: the user says connect(fresh=True)
        self.steps_put = self.restores = self.acked_after_heal = 0
        self.degraded = ""  # why the newest commit has too few copies


# -- hosts --------------------------------------------------------------------------------------------
# What several checks ask of hosts: their racks, and which of them die often.


def racks_of(world: World, hosts: Iterable[str]) -> set[str]:
    """Return the racks of hosts; "" for those without a label."""
    return {world.racks[host] for host in hosts}


def trusted_hosts(world: World) -> list[str]:
    """Return the hosts that get a second copy first: those that do not die often (R29)."""
    controller = world.served()
    hosts = controller.machine.hosts if controller is not None else None
    return [h for h in world.holders if hosts and not hosts.is_on_probation(world.now, h)]


def are_well(world: World) -> bool:
    """Say whether every holder runs, has a session and has room."""
    return all(h.is_serving and h.session is not None and not h.memory.is_full for h in world.holders.values())
