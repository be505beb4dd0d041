"""Which pin a reader's `Unpin` ends, and what becomes of pins whose link has ended (R7)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from holder_io import ScriptedIo

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.arena.slot_table import Owner
from memstore.core.holder import ranks
from memstore.core.holder.reads import reader_pins
from memstore.core.wire.ids import WireShard
from memstore.core.wire.replies import ShardStaged
from recovery.inventory import ShardId, ShardSpec

SHARD = ShardId("job", 1, 2, 0)
REPLICA = StoredReplica(SHARD, ShardSpec("d", 16, 8, 2, 1), (b"0", b"1"), [4, 5])
STAGED = ShardStaged(
    step=2, attempt=1, verdict="local", why="", shard=WireShard.of(SHARD), digest="d", report=None
)  # fmt: skip


@dataclass(eq=False)
class Link:
    """A connection of one rank's process."""

    nonce: str = "n"
    job: str = "job"
    owner: Owner = field(default_factory=lambda: Owner(7, 1, 1))
    pins: dict[int, Callable[[], None]] = field(default_factory=dict)


@dataclass(eq=False)
class Host(ScriptedIo):
    """A holder that has one replica."""

    pinned: set[int] = field(default_factory=set)
    store_pins: Iterator[int] = field(default_factory=itertools.count)

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
        return self.play(reader_pins.place(self, self.state, link, STAGED)).pin


def test_a_late_unpin_of_an_older_link_frees_no_other_readers_pin() -> None:
    """The process came back on another link, on which another of its readers has a pin by then."""
    host = Host()
    old: Any = host.connect()
    late = host.offer_slots(old)
    ranks.end(host.state, old)
    new: Any = host.connect()
    pin = host.offer_slots(new)
    reader_pins.give_back(new, late)
    assert len(host.pinned) == 1
    reader_pins.give_back(new, pin)
    assert not host.pinned


def test_a_read_whose_link_has_just_ended_leaves_no_pin() -> None:
    """It would last until its deadline, and keep the slots of its step from puts."""
    host = Host()
    old = host.connect()
    host.connect()
    host.offer_slots(old)
    assert not host.pinned
