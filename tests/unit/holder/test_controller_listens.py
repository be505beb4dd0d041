"""A host is silent if it says nothing, not if the controller had no time to listen (R28)."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

from memstore.config import Config
from memstore.core.journal.records import journal_after
from memstore.core.wire.codec import encode_frame
from memstore.core.wire.frame import Kind
from memstore.core.wire.ids import Endpoint
from memstore.core.wire.messages import Action, Event, Received, Tick
from memstore.core.wire.orders import WriteJournal, decode_order
from memstore.core.wire.reports import Heartbeat, HostInventory, RankArrived
from memstore.shell.controller.controller import TICK_S, Controller, Session
from memstore.shell.net.channel import Channel
from memstore.testing.clusters.directory_membership import DirectoryMembership
from memstore.testing.clusters.processes import wait_for
from memstore.testing.controller.holder import host_stats

WAIT_S = 60.0


def inventory(incarnation: int) -> HostInventory:
    """Return that of a host that holds nothing."""
    return HostInventory(
        incarnation=incarnation,
        endpoints=(Endpoint("10.0.0.1", 7000),),
        machine="m",
        is_explicit=False,
        labels={},
        limit_bytes=1,
        copies=(),
        journal=(),
        ranks=(),
        up_s=0.0,
        idle_s=0.0,
    )


def test_a_beat_that_waits_behind_a_long_event_is_received_before_the_next_tick(tmp_path: Path) -> None:
    """Ticks take their turn: else one event of some seconds would make all hosts suspect, or dead."""
    config = Config(store="listens", detect=120.0)
    controller = Controller(config, DirectoryMembership(tmp_path), secret=b"s" * 32, settle_s=0.0)
    near, far = socket.socketpair()
    session = Session("a", 1, Channel(near), controller._received)
    begun, go, seen = threading.Event(), threading.Event(), list[str]()
    try:
        with controller.lock:
            controller.sessions["a"] = session
        session.start()
        controller.events.put((session, inventory(1)))
        wait_for(controller.is_serving, "the controller to serve")
        state, handle = controller.machine.hosts.states["a"], controller.machine.handle

        def watched(now: float, event: Event) -> list[Action]:
            if isinstance(event, Received):
                begun.set()
                assert go.wait(WAIT_S)
            actions = handle(now, event)
            if isinstance(event, Tick):
                seen.append(state.status)
            return actions

        controller.machine.handle = watched  # type: ignore[method-assign]
        controller.events.put((session, RankArrived(nonce="n")))
        assert begun.wait(WAIT_S)
        state.beat_at_s -= 100.0  # the last beat was long ago
        far.sendall(encode_frame(Kind.EVENT, Heartbeat(stats=host_stats(), trained={}, clock_s=None)))
        wait_for(lambda: len(controller._beats) > 0, "the beat to be read")
        due_s = time.monotonic() + 2 * TICK_S
        wait_for(lambda: time.monotonic() > due_s, "a tick to be due")
        seen.clear()
        go.set()
        wait_for(lambda: len(seen) >= 3, "ticks")
        assert set(seen) == {"live"}
    finally:
        go.set()
        controller.close()
        far.close()


def test_what_was_decided_before_an_inventory_is_no_order_for_its_session(tmp_path: Path) -> None:
    """A holder is replaced while it counts as live: a fact of that moment does not come to it twice (R16)."""
    config = Config(store="listens", detect=120.0)
    controller = Controller(config, DirectoryMembership(tmp_path), secret=b"s" * 32, settle_s=0.0)
    pairs = [socket.socketpair(), socket.socketpair()]
    sessions = [
        Session("a", n, Channel(near), controller._received, asked_s=time.monotonic())
        for n, (near, _) in enumerate(pairs, start=1)
    ]
    far = Channel(pairs[1][1])

    def begin(session: Session) -> None:
        with controller.lock:
            controller.sessions["a"] = session
        session.start()

    try:
        begin(sessions[0])
        controller.events.put((sessions[0], inventory(1)))
        wait_for(lambda: controller.is_serving() and controller.machine.parts.journal.log.entries, "the first fact")
        begin(sessions[1])
        entries = controller.machine.parts.journal.log.entries
        controller.drains_seen({"a": time.time() + 1000.0})
        wait_for(lambda: len(entries) >= 2, "a fact while the new holder has said nothing yet")
        controller.events.put((sessions[1], inventory(2)))
        journal: list[bytes] = []
        while len(journal) < len(entries):
            order = decode_order(far.recv(timeout_s=WAIT_S).data)
            journal = journal_after(journal, order) if isinstance(order, WriteJournal) else journal
        assert journal == [entry.record for entry in entries]
    finally:
        controller.close()
        for pair in pairs:
            pair[1].close()
