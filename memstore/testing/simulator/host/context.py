"""What the parts of a simulated holder use of it, and of its peers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from memstore.core.arena.slot_table import Owner
from memstore.core.holder.sessions import JobFences
from memstore.core.holder.state import HolderState
from memstore.core.wire.rank_messages import RankHello
from memstore.core.wire.reports import Report
from memstore.testing.simulator.checks.checker import Checker
from memstore.testing.simulator.host.shared_shards import SharedShardHolder, SimSharedShards
from memstore.testing.simulator.world.virtual_time import Thread, Wait
from memstore.testing.simulator.world.world import AnyRank, World
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


# -- rank link ----------------------------------------------------------------------------------------
# The link of a simulated rank to its holder: what is sent on an older link of the same process is lost.


@dataclass(eq=False)
class RankLink:
    """One connection of a rank."""

    process: AnyRank
    owner: Owner
    nonce: str
    job: str
    rank: int
    attempt: int
    order: int
    pins: dict[int, Callable[[], None]] = field(default_factory=dict)
    is_retired: bool = False

    @property
    def is_open(self) -> bool:
        """Say whether its process lives and listens to it."""
        return not self.process.is_dead and self.process.link is self


def open_link(rank: AnyRank, order: int) -> RankLink:
    """Return a new link of a process, to which it listens from now on."""
    rank.link = link = RankLink(rank, rank.owner, rank.nonce, rank.job, *rank.place, order)
    return link


def hello_of(rank: AnyRank, arena: str) -> RankHello:
    """Return what a process says first; `arena`: the one that it has mapped."""
    number, attempt = rank.place
    return RankHello(
        nonce=rank.nonce,
        life=rank.owner.link,
        pid=rank.owner.pid,
        job=rank.job,
        rank=number,
        attempt=attempt,
        held=tuple(rank.held()),
        arena=arena,
    )
