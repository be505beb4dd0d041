"""Which link of a process is taken, and what becomes of its leases when two come at once (R8)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from memstore.core.arena.slot_table import Owner, SlotTable
from memstore.core.holder import effects, ranks
from memstore.core.holder.effects import Effect, Steps
from memstore.core.holder.state import HolderState, Limits
from memstore.core.wire.rank_messages import RankHello

PROCESS = Owner(7, 1, 1)
SHARE = 4


@dataclass(eq=False)
class Link:
    """A connection of one rank's process."""

    order: int
    nonce: str = "n"
    owner: Owner = PROCESS
    job: str = "job"
    rank: int = 0
    attempt: int = 1
    parent: str = ""
    pins: dict[int, Callable[[], None]] = field(default_factory=dict)
    is_retired: bool = False
    is_open: bool = True


class Host:
    """A holder with eight slots, of which a rank's share is four."""

    arena_identity = "here"

    def __init__(self) -> None:
        self.table = SlotTable(8)
        store: Any = self
        self.granted: dict[int, list[int]] = {}  # by the order of the link
        self.state = HolderState(
            "me", store, lambda shard, digest: None, Limits(1.0, 3.0), now=lambda: 0.0, report=lambda report: None,
            sealed=lambda shelved, put: None, is_stopping=lambda: False, is_alive=lambda owner: True,
            pin_numbers=itertools.count(),
        )  # fmt: skip

    def confirm(self, owner: Owner, held: Sequence[int]) -> list[int]:
        return self.table.confirm(owner, held)[1]

    def lease(self, owner: Owner, job: str, rank: int, attempt: int, stand_ins_for: Sequence[Owner]) -> list[int]:
        return self.table.lease(owner, SHARE - len(self.table.leases.get(owner, ())), attempt=attempt)

    def join(self, link: Any, held: Sequence[int] = ()) -> Steps[None]:
        """Begin to take a link, whose rank holds slots."""
        hello = RankHello(
            nonce="n", life=0, pid=7, job="job", rank=0, attempt=1, held=tuple(held), arena="here", parent=None
        )  # fmt: skip
        return ranks.join(self.state, link, hello)

    def play(self, steps: Steps[None], *, until: type[Effect] | None = None) -> None:
        """Run a procedure to its end, or until it has asked for an effect."""
        for effect in steps:
            if isinstance(effect, effects.Grant):
                self.granted[effect.link.order] = ranks.lease(self.state, effect.link)
            elif isinstance(effect, effects.CloseLink):
                effect.link.is_open = False  # type: ignore[misc]
            if until is not None and isinstance(effect, until):
                return

    @property
    def taken(self) -> Any:
        """The link on which the process is connected."""
        return self.state.ranks.links.get("n")


def test_a_link_whose_welcome_is_late_does_not_take_the_place_of_a_newer_one() -> None:
    """The process gave it up and listens on the newer one, which keeps its leases and stays open."""
    host, old, new = Host(), Link(0), Link(1)
    late = host.join(old)
    host.play(late, until=effects.TellWelcome)
    host.play(host.join(new))
    host.play(late)
    assert host.taken is new
    assert (old.is_retired, old.is_open, new.is_retired, new.is_open) == (True, False, False, True)
    assert sorted(host.table.leases[PROCESS]) == host.granted[1]


def test_two_links_that_replace_a_third_at_once_leave_the_newest_its_leases() -> None:
    """The older one does not compare the leases with what its rank held then: those of the newer one are granted."""
    host, first, old, new = Host(), Link(0), Link(1), Link(2)
    host.play(host.join(first))
    held = host.granted[0]
    late = host.join(old, held[:1])
    host.play(late, until=effects.CloseLink)
    host.play(host.join(new, held))
    host.play(late)
    assert host.taken is new
    assert sorted(host.table.leases[PROCESS]) == held
    assert not host.state.ranks.arriving


def test_a_link_that_was_accepted_before_the_one_that_is_taken_is_ended() -> None:
    """Its thread ran late: what it says of leases is of before."""
    host, old, new = Host(), Link(0), Link(1)
    host.play(host.join(new))
    host.play(host.join(old))
    assert host.taken is new
    assert (old.is_open, sorted(host.table.leases[PROCESS])) == (False, host.granted[1])


def test_another_store_of_the_process_takes_the_place_of_the_former() -> None:
    """It is another owner: the former one's link stays open, and its leases are its own."""
    host, former, other = Host(), Link(0), Link(1, owner=Owner(7, 1, 2))
    host.play(host.join(former))
    host.play(host.join(other))
    assert host.taken is other
    assert (former.is_open, sorted(host.table.leases[PROCESS])) == (True, host.granted[0])
