"""What a holder reports of its copies: all of them as a session begins, and one as it changes (R4, R5, R16)."""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace
from typing import Any

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.holder.inventory import inventory, report_copy
from memstore.core.holder.state import HolderState, Limits
from memstore.core.wire.ids import Endpoint, WireCopy
from memstore.core.wire.messages import HostInfo, HostUp
from memstore.core.wire.reports import Report, Sealed
from recovery.inventory import Copy, ShardId, ShardSpec

INFO = HostInfo(
    "me", 3, (Endpoint("10.0.0.1", 7000),), "machine", is_explicit=True, labels={"rack": "a"}, limit_bytes=100
)
SHARD = ShardId("job", 1, 2, 0)
STORED = StoredReplica(SHARD, ShardSpec("d" * 32, 16, 8, 2, 1), (b"0", b"1"), [4, 5])
COPY = Copy(SHARD, STORED.spec, "me")


def test_the_controller_gets_of_an_inventory_what_the_holder_is_and_has() -> None:
    """Nothing is lost on the way, and what no session has used is as idle as it was found."""
    now_s, reports = 50.0, list[Report]()
    state = a_state(reports, lambda: now_s)
    now_s = 57.0
    event = HostUp.of("me", inventory(state, [b"fact"], {"old": "why"}), 9.0)
    assert event == HostUp(INFO, (COPY,), (b"fact",), (), 9.0, 7.0, 600.0, {"old": "why"})


def test_a_copy_that_is_sealed_is_a_use_of_the_arena() -> None:
    """Days of training without a connect make no arena old."""
    reports: list[Report] = []
    state = a_state(reports, lambda: 0.0)
    report_copy(state, STORED)
    assert reports == [Sealed(copy=WireCopy.of(COPY), put=None)]
    assert inventory(state, [], {}).idle_s == 0.0


def a_state(reports: list[Report], now: Any) -> HolderState:
    """Return the state of a holder with one copy, on an arena that none had used for ten minutes."""
    index = SimpleNamespace(find=lambda shard, digest: STORED, copies=lambda host, job: [COPY])
    store: Any = SimpleNamespace(lock=contextlib.nullcontext(), index=index)
    return HolderState(
        INFO, store, lambda shard, digest: None, Limits(1.0, 3.0), now=now, report=reports.append,
        ask=lambda request: None, is_stopping=lambda: False, is_alive=lambda owner: True, idle_s=600.0,
        pin_numbers=itertools.count(1),
    )  # fmt: skip
