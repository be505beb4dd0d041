"""What the parts of a simulated holder use of it, and of its peers."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Protocol

from memstore.core.holder.sessions import JobFences
from memstore.core.holder.state import HolderState
from memstore.core.wire.reports import Report
from memstore.testing.simulator.checks.checker import Checker
from memstore.testing.simulator.host.shared_shards import SharedShardHolder, SimSharedShards
from memstore.testing.simulator.world.virtual_time import Thread, Wait
from memstore.testing.simulator.world.world import World
from recovery.inventory import ShardId


class HostWorld(World, Protocol):
    """The world, with all of its holders that a peer uses."""

    @property
    def holders(self) -> Mapping[str, HostContext]:
        """The newest holder of each host."""


class HostContext(SharedShardHolder, Protocol):
    """A holder, as its own parts and its peers see it."""

    checker: Checker
    fences: JobFences
    view: set[str]  # hosts that the controller has named
    shared_shards: SimSharedShards
    state: HolderState

    @property
    def world(self) -> HostWorld:
        """The world that it lives in."""

    def spawn(self, work: Thread) -> None:
        """Run one of its threads."""

    def before_offer(self, shard: ShardId, sender: HostContext) -> Generator[Wait, None, bool]:
        """Wait until an offer of a new put may be answered; return whether time passed."""

    def report(self, report: Report) -> None:
        """Send a report to the controller."""
