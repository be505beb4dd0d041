"""The link of a simulated rank to its holder: what is sent on an older link of the same process is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from memstore.core.arena.slot_table import Owner
from memstore.core.wire.rank_messages import RankHello
from memstore.testing.simulator.world.processes import AnyRank


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
