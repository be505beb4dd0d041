"""Which pin a reader's `Unpin` ends, and what becomes of pins whose link has ended (R7)."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from holder_io import ScriptedIo

from memstore.core.arena.replica_index import IncomingReplica
from memstore.core.arena.slot_table import Owner
from memstore.core.holder import ranks
from memstore.core.holder.reads import ready
from memstore.core.holder.state import Ready
from memstore.core.wire.ids import WireShard, WireSpec
from memstore.core.wire.orders import Bring
from memstore.core.wire.replies import ShardReady
from recovery.inventory import ShardId, ShardSpec

SHARD = ShardId("job", 1, 2, 0)
REPLICA = IncomingReplica(SHARD, [b"0", b"1"], [4, 5], 1)


@dataclass(eq=False)
class Link:
    """A connection of one rank's process."""

    nonce: str = "n"
    job: str = "job"
    owner: Owner = field(default_factory=lambda: Owner(7, 1, 1))
    pins: dict[int, Callable[[], None]] = field(default_factory=dict)


@dataclass(eq=False)
class Host(ScriptedIo):
    """A holder that has brought one shard for several readers."""

    held: set[str] = field(default_factory=set)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def abort_incoming(self, name: str, shard: ShardId, *, only: IncomingReplica) -> None:
        self.held.remove(name)

    index = property(lambda self: self)
    lock = contextlib.nullcontext()

    def find_incoming(self, name: str, shard: ShardId) -> IncomingReplica | None:
        return REPLICA if name in self.held else None

    def connect(self) -> Link:
        """Let the rank's process connect, on a link that takes the place of an older one."""
        link: Any = Link()
        self.state.ranks.links["n"] = link
        return link  # type: ignore[no-any-return]

    def offer_slots(self, link: Any) -> int:
        """Bring the shard for a reader, and pin it."""
        read = next(self.numbers)
        order = Bring(
            read=read,
            job="job",
            shard=WireShard.of(SHARD),
            spec=WireSpec.of(ShardSpec("d" * 32, 16, 8, 2, 1)),
            chunks=None,
            attempt=1,
            holders=(),
            runs=(),
            durable=None,
            reader="n",
            use="read",
        )
        self.held.add(ready.name_of(read))
        ready.keep(self.state, Ready(order, REPLICA, b"manifest", {}))
        reply = ShardReady(step=2, attempt=1, verdict="local", why="", report=None, read=read)
        placed = self.play(ready.place(self, self.state, link, reply))
        assert placed.slots == (4, 5)
        return placed.pin


def test_a_late_unpin_of_an_older_link_frees_no_other_readers_pin() -> None:
    """The process came back on another link, on which another of its readers has a pin by then."""
    host = Host()
    old: Any = host.connect()
    late = host.offer_slots(old)
    ranks.end(host.state, old)
    new: Any = host.connect()
    pin = host.offer_slots(new)
    ready.give_back(new, late)
    assert len(host.held) == 1
    ready.give_back(new, pin)
    assert not host.held


def test_a_read_whose_link_has_just_ended_leaves_no_pin() -> None:
    """It would last until its deadline, and keep the slots of its step from puts."""
    host = Host()
    old = host.connect()
    host.connect()
    host.offer_slots(old)
    assert not host.held
