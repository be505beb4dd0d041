"""Which pin a reader's `Unpin` ends, and what becomes of pins whose link has ended (R7)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.arena.slot_table import Owner
from memstore.core.holder import ranks, reads
from memstore.core.holder.state import HolderState, Limits
from memstore.core.wire.calls import ReadStep
from memstore.core.wire.codec import encode
from memstore.core.wire.ids import WireShard
from memstore.core.wire.messages import HostInfo
from memstore.core.wire.rank_messages import AskAnswered, AskRefused
from memstore.core.wire.replies import ShardStaged, decode_placed
from memstore.errors import IntegrityError
from recovery.inventory import ShardId, ShardSpec

SHARD = ShardId("job", 1, 2, 0)
REPLICA = StoredReplica(SHARD, ShardSpec("d", 16, 8, 2, 1), (b"0", b"1"), [4, 5])
STAGED = ShardStaged(
    step=2, attempt=1, verdict="local", why="", shard=WireShard.of(SHARD), digest="0" * 32, report=None
)  # fmt: skip
READ = ReadStep(job="job", step=2, rank=0)


@dataclass(eq=False)
class Link:
    """A connection of one rank's process."""

    nonce: str = "n"
    owner: Owner = field(default_factory=lambda: Owner(7, 1, 1))
    pins: dict[int, Callable[[], None]] = field(default_factory=dict)


class Host:
    """A holder that has one replica."""

    def __init__(self) -> None:
        self.pinned: set[int] = set()
        self.store_pins = itertools.count()
        store: Any = self
        self.state = HolderState(
            HostInfo("me", 1, "", 0), store, lambda shard, digest: None, Limits(1.0, 3.0), now=lambda: 0.0,
            report=lambda report: None, ask=lambda request: None, is_stopping=lambda: False,
            is_alive=lambda owner: True,
            pin_numbers=itertools.count(),
        )  # fmt: skip

    def pin(self, shard: ShardId, digest: str, *, is_reader: bool) -> tuple[StoredReplica, int]:
        self.pinned.add(pin := next(self.store_pins))
        return REPLICA, pin

    def unpin(self, stored: StoredReplica, pin: int) -> None:
        self.pinned.remove(pin)

    def manifest(self, stored: StoredReplica) -> bytes:
        return b"manifest"

    def connect(self) -> Link:
        """Let the rank's process connect, on a link that takes the place of an older one."""
        link: Any = Link()
        self.state.ranks.links["n"] = link
        return link  # type: ignore[no-any-return]

    def offer_slots(self, link: Any) -> int:
        """Pin the replica for a reader."""
        said = self.answer(link, encode(STAGED))
        assert isinstance(said, AskAnswered)
        return decode_placed(said.reply).pin

    def answer(self, link: Any, data: bytes | None, error: Sequence[str] | None = None) -> AskAnswered | AskRefused:
        """Pass on the controller's answer to a read."""
        steps = reads.answer(self.state, link, 3, READ, data, error)
        result: Any = None
        problem: IntegrityError | None = None
        try:
            while True:
                effect: Any = steps.send(result) if problem is None else steps.throw(problem)
                try:
                    result, problem = effect.call(), None
                except IntegrityError as exc:
                    problem = exc
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def test_what_the_controller_refuses_or_leaves_out_is_an_error_of_the_rank() -> None:
    """Each call is answered: a rank would wait for its whole limit."""
    host = Host()
    link = host.connect()
    assert host.answer(link, None, ("RecoveryError", "no step")) == AskRefused(
        id=3, error="RecoveryError", message="no step"
    )
    assert host.answer(link, None) == AskRefused(id=3, error="InternalError", message="the controller answered nothing")


def test_what_was_dropped_or_damaged_after_it_was_staged_is_refused() -> None:
    """The rank is to ask again, and nothing stays pinned."""
    host = Host()
    link = host.connect()
    host.pin = lambda shard, digest, is_reader: None  # type: ignore[method-assign, assignment]
    gone = host.answer(link, encode(STAGED))
    assert isinstance(gone, AskRefused)
    assert "dropped before it could be read" in gone.message
    host, link = Host(), host.connect()
    host.state.ranks.links["n"] = link  # type: ignore[assignment]

    def damaged(stored: StoredReplica) -> bytes:
        raise IntegrityError("the manifest is damaged")

    host.manifest = damaged  # type: ignore[method-assign]
    assert host.answer(link, encode(STAGED)) == AskRefused(
        id=3, error="RecoveryError", message="the manifest is damaged"
    )
    assert not host.pinned


def test_a_late_unpin_of_an_older_link_frees_no_other_readers_pin() -> None:
    """The process came back on another link, on which another of its readers has a pin by then."""
    host = Host()
    old: Any = host.connect()
    late = host.offer_slots(old)
    ranks.end(host.state, old)
    new: Any = host.connect()
    pin = host.offer_slots(new)
    reads.give_back(new, late)
    assert len(host.pinned) == 1
    reads.give_back(new, pin)
    assert not host.pinned


def test_a_read_whose_link_has_just_ended_leaves_no_pin() -> None:
    """It would last until its deadline, and keep the slots of its step from puts."""
    host = Host()
    old = host.connect()
    host.connect()
    host.offer_slots(old)
    assert not host.pinned
