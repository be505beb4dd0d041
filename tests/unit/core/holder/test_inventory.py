"""What a holder reports of its copies: all of them as a session begins, and one as it changes (R4, R5, R16)."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

from holder_io import ScriptedIo

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.holder.inventory import inventory, report_copy
from memstore.core.wire.ids import Endpoint, WireCopy
from memstore.core.wire.messages import HostInfo, HostUp
from memstore.core.wire.reports import Sealed
from recovery.inventory import Copy, ShardId, ShardSpec

INFO = HostInfo(
    "me", 3, (Endpoint("10.0.0.1", 7000),), "machine", is_explicit=True, labels={"rack": "a"}, limit_bytes=100
)
SHARD = ShardId("job", 1, 2, 0)
STORED = StoredReplica(SHARD, ShardSpec("d" * 32, 16, 8, 2, 1), (b"0", b"1"), [4, 5])
COPY = Copy(SHARD, STORED.spec, "me")


def test_the_controller_gets_of_an_inventory_what_the_holder_is_and_has() -> None:
    """Nothing is lost on the way, and what no session has used is as idle as it was found."""
    holder = a_holder()
    holder.now += 7.0
    event = HostUp.of("me", inventory(holder.state, [b"fact"]), 9.0)
    assert event == HostUp(INFO, (COPY,), (b"fact",), (), 9.0, 7.0, 600.0)


def test_a_copy_that_is_sealed_is_a_use_of_the_arena() -> None:
    """Days of training without a connect make no arena old."""
    holder = a_holder()
    report_copy(holder.state, STORED)
    assert holder.reports == [Sealed(copy=WireCopy.of(COPY), put=None)]
    assert inventory(holder.state, []).idle_s == 0.0


def a_holder() -> ScriptedIo:
    """Return a holder with one copy, on an arena that none had used for ten minutes."""
    index = SimpleNamespace(find=lambda shard, digest: STORED, copies=lambda host, job: [COPY])
    holder = ScriptedIo(store=SimpleNamespace(lock=contextlib.nullcontext(), index=index), info=INFO, now=50.0)
    holder.state.idle_s = 600.0
    return holder
