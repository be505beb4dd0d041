"""One loop serves the sessions of all holders: reports whole and in order, orders as sockets take them (R16, R28)."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memstore.config import Config
from memstore.core.wire.codec import encode, encode_frame
from memstore.core.wire.frame import HEADER_BYTES, Kind, pack_header
from memstore.core.wire.orders import EchoClock, WriteJournal, decode_order
from memstore.core.wire.reports import FactsWritten, Heartbeat, HolderMessage
from memstore.shell import controller as controller_module
from memstore.shell.controller import FRAMES_A_TURN, Controller, Session, SessionEnded, SessionLoop
from memstore.shell.net.channel import Channel
from memstore.testing.clusters.process_main import DirectoryMembership
from memstore.testing.clusters.processes import wait_for
from memstore.testing.controller.holder import empty_inventory, host_stats

WAIT_S = 60.0
Pair = tuple[socket.socket, socket.socket]
FACT = encode(FactsWritten(seq=0))


def report(seq: int) -> bytes:
    """Return the frame of a report that is told from others by its number."""
    return encode_frame(Kind.EVENT, FactsWritten(seq=seq))


def order(seq: int, nbytes: int = 0) -> bytes:
    """Return the frame of an order that is told from others by its number."""
    return encode_frame(Kind.EVENT, WriteJournal(keep=None, records=(os.urandom(nbytes),), seq=seq))


class Loop(SessionLoop):
    """A loop that a test turns, and what it gave."""

    def __init__(self) -> None:
        self.given: list[tuple[str, HolderMessage | SessionEnded]] = []
        super().__init__(lambda session, message: self.given.append((session.host_id, message)))

    def begin(self, host: str, near: socket.socket) -> Session:
        """Add the session of a host."""
        session = Session(host, 1, Channel(near, peer="peer"))
        self.add(session)
        return session

    def turn_until(self, condition: Callable[[], object], what: str) -> None:
        """Turn until something is true."""

        def turned() -> object:
            self.turn(0.01)
            return condition()

        wait_for(turned, what, WAIT_S, seen=lambda: self.given)


@pytest.fixture
def loop() -> Iterator[Loop]:
    """A loop, closed afterwards."""
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def far(loop: Loop, sockets: Pair) -> socket.socket:
    """The far end of the session of host a."""
    loop.begin("a", sockets[0])
    return sockets[1]


def test_a_report_that_comes_byte_by_byte_is_taken_once_it_is_whole(loop: Loop, far: socket.socket) -> None:
    """A holder's socket is never waited for: each turn takes what is there, and the last byte makes the report."""
    frame = report(1)
    for at in range(len(frame) - 1):
        far.send(frame[at : at + 1])
        loop.turn(0.0)
    assert loop.given == []
    far.sendall(frame[-1:] + report(2) + report(3)[:HEADER_BYTES])
    loop.turn_until(lambda: len(loop.given) >= 2, "the report")
    far.sendall(report(3)[HEADER_BYTES:])
    loop.turn_until(lambda: len(loop.given) >= 3, "the report behind it")
    assert loop.given == [("a", FactsWritten(seq=seq)) for seq in (1, 2, 3)]


def test_orders_arrive_in_order_through_a_socket_that_takes_little(loop: Loop, sockets: Pair) -> None:
    """What a socket does not take waits its turn, also where an order is cut, or new ones come behind it."""
    session, taken = loop.begin("a", sockets[0]), list[int]()
    sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)

    def take() -> None:
        with Channel(sockets[1]) as holder:
            while len(taken) < 60:
                found = decode_order(holder.recv(timeout_s=WAIT_S).data)
                assert isinstance(found, WriteJournal)
                taken.append(found.seq)

    holder = threading.Thread(target=take)
    for seq in range(30):
        loop.send(session, order(seq, 20_000 if seq % 3 else 10))
    loop.flush()
    assert session.outbox
    for seq in range(30, 60):
        loop.send(session, order(seq, 50))
        loop.flush()
    holder.start()
    loop.turn_until(lambda: len(taken) == 60, "all orders")
    holder.join(WAIT_S)
    assert taken == list(range(60))
    assert not session.outbox


def test_a_holder_that_does_not_read_delays_no_other_and_is_ended_by_name(
    loop: Loop, sockets: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its orders wait for it alone (F4); after SEND_S its session ends, however much a kernel keeps for it."""
    monkeypatch.setattr(controller_module, "LATE_LOOK_S", 0.0)
    near, other = socket.socketpair()
    with Channel(other) as quick:
        sessions = [loop.begin("slow", sockets[0]), loop.begin("quick", near)]
        frame = order(0, 1 << 20)
        while not sessions[0].outbox:
            loop.send(sessions[0], frame)
            loop.flush()
        for seq in range(1, 20):
            for session in sessions:
                loop.send(session, order(seq))
            loop.flush()
            assert decode_order(quick.recv(timeout_s=WAIT_S).data) is not None
            loop.turn(0.0)
        assert loop.given == []
        sessions[0].send_by_s -= controller_module.SEND_S
        loop.turn_until(lambda: loop.given, "the end")
        [(host, over)] = loop.given
        assert (host, over) == ("slow", SessionEnded("host slow at peer did not take an order within 10 s"))
        loop.send(sessions[1], order(20))
        loop.flush()
        assert decode_order(quick.recv(timeout_s=WAIT_S).data) is not None


def test_each_order_that_leaves_gives_the_next_one_its_time(loop: Loop, sockets: Pair) -> None:
    """A holder that is slow but reads keeps its session: SEND_S is for one order."""
    session = loop.begin("a", sockets[0])
    while len(session.outbox) < 40:
        loop.send(session, order(0, 1 << 20))
        loop.flush()
    first_s = session.send_by_s
    left = len(session.outbox)
    with Channel(sockets[1]) as holder:
        loop.turn(0.0)
        assert session.send_by_s == first_s
        while len(session.outbox) == left:
            holder.recv(timeout_s=WAIT_S)
            loop.turn(0.01)
        assert first_s < session.send_by_s < float("inf")


def test_the_rest_of_a_report_that_does_not_come_ends_the_session(
    loop: Loop, far: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A holder that says nothing may do so for ever; one that begins has REST_OF_FRAME_S (slowloris, fault F33)."""
    monkeypatch.setattr(controller_module, "LATE_LOOK_S", 0.0)
    monkeypatch.setattr(controller_module, "REST_OF_FRAME_S", 0.0)
    far.sendall(report(1))
    loop.turn_until(lambda: loop.given, "a report")
    for _ in range(3):
        loop.turn(0.0)
    assert len(loop.given) == 1
    far.sendall(report(2)[: HEADER_BYTES + 1])
    loop.turn_until(lambda: len(loop.given) == 2, "the end")
    assert loop.given[1:] == [("a", SessionEnded("host a at peer did not send the rest of a report within 0 s"))]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "lost peer: it closed the connection"),
        (report(1)[:-1], "lost peer: it closed the connection in the middle of a frame"),
        (b"GET / HTTP/1.1\r\nHost: memstore\r\n\r\n", "peer: a frame starts with b'GET ' instead of b'MSTO'"),
        (report(1)[:-1] + b"\0", "peer: a frame of "),
        (encode_frame(Kind.EVENT, EchoClock(clock_s=1.0)), ""),
        (pack_header(Kind.EVENT, 0, FACT, 1 << 20) + FACT, "1,048,576 bulk bytes of the last frame were not taken"),
    ],
    ids=["closed", "closed in a report", "another protocol", "a flipped bit", "an order", "bulk bytes"],
)
def test_a_session_ends_once_with_its_reason(loop: Loop, far: socket.socket, data: bytes, why: str) -> None:
    """Closed between reports or in one, or what is no report: the others go on."""
    near, other = socket.socketpair()
    loop.begin("b", near)
    far.sendall(data)
    far.shutdown(socket.SHUT_WR)
    loop.turn_until(lambda: loop.given and isinstance(loop.given[-1][1], SessionEnded), "the end")
    other.sendall(report(5))
    loop.turn_until(lambda: loop.given[-1][0] == "b", "the other's report")
    other.close()
    [(host, over), (second, message)] = loop.given[-2:]
    assert (host, second, message) == ("a", "b", FactsWritten(seq=5))
    assert isinstance(over, SessionEnded)
    assert over.why.startswith(why)


def test_what_a_holder_said_before_it_ended_is_taken(loop: Loop, sockets: Pair) -> None:
    """An order finds the connection gone first: the reports before the end are there all the same."""
    session = loop.begin("a", sockets[0])
    sockets[1].sendall(report(1) + report(2))
    sockets[1].close()
    while not session.why:
        loop.send(session, order(1))
        loop.flush()
    loop.turn_until(lambda: len(loop.given) == 3, "the end")
    assert loop.given == [("a", FactsWritten(seq=1)), ("a", FactsWritten(seq=2)), ("a", SessionEnded(session.why))]


def test_a_session_that_is_dropped_leaves_its_orders_and_says_nothing(loop: Loop, sockets: Pair) -> None:
    """It was replaced, or its host declared dead: nothing of it comes later (R28)."""
    session = loop.begin("a", sockets[0])
    while not session.outbox:
        loop.send(session, order(0, 1 << 20))
        loop.flush()
    loop.send(session, order(1))
    sockets[1].sendall(report(1))
    loop.drop(session)
    loop.drop(session)
    loop.send(session, order(2))
    loop.end(session, "again")
    loop.flush()
    loop.turn(0.0)
    assert (loop.given, list(session.outbox)) == ([], [])
    sockets[1].settimeout(WAIT_S)
    with contextlib.suppress(ConnectionResetError):  # what the holder had said was not taken
        while sockets[1].recv(1 << 20):
            pass


def test_a_flood_of_one_holder_leaves_every_turn_to_the_others(loop: Loop, far: socket.socket) -> None:
    """A turn takes a bounded number of reports of each session."""
    near, other = socket.socketpair()
    loop.begin("b", near)
    loop.turn(0.0)
    far.sendall(b"".join(report(seq) for seq in range(3 * FRAMES_A_TURN)))
    other.sendall(report(7))
    loop.turn_until(lambda: ("b", FactsWritten(seq=7)) in loop.given, "the other's report")
    assert len(loop.given) <= FRAMES_A_TURN + 1
    loop.turn_until(lambda: len(loop.given) == 3 * FRAMES_A_TURN + 1, "the flood")
    other.close()
    numbers = [message.seq for host, message in loop.given if host == "a" and isinstance(message, FactsWritten)]
    assert numbers == list(range(3 * FRAMES_A_TURN))


def test_another_thread_wakes_a_turn(loop: Loop) -> None:
    """Whoever has work for the loop's thread need not wait for a socket; words that nobody waits for cost nothing."""
    for _ in range(3):
        waiting = threading.Thread(target=loop.turn, args=(WAIT_S * 10,))
        waiting.start()
        for _ in range(100_000):
            loop.wake()
        waiting.join(WAIT_S)
        assert not waiting.is_alive()


def test_a_session_of_a_dead_host_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    """It may lead nowhere, and while it is there its host is not dialled again (R28)."""
    controller = Controller(
        Config(store="silent", detect=120.0), DirectoryMembership(tmp_path), secret=b"s" * 32, settle_s=0.0
    )
    pairs = [socket.socketpair() for _ in range(2)]
    try:
        (near, far), (again, silent) = pairs
        controller.tell(Session("h0", 1, Channel(near)))
        far.sendall(encode_frame(Kind.EVENT, empty_inventory(machine="m0")))
        states = controller.machine.hosts.states
        wait_for(lambda: "h0" in states, "the host", WAIT_S)
        far.close()
        wait_for(lambda: states["h0"].status == "dead" and not controller.connected(), "its end", WAIT_S)
        controller.tell(Session("h0", states["h0"].info.incarnation, Channel(again)))
        silent.settimeout(WAIT_S)
        assert silent.recv(1) == b""
        wait_for(lambda: not controller.connected(), "the session to go", WAIT_S)
    finally:
        controller.close()
        for pair in pairs:
            pair[1].close()


def test_two_hundred_sessions_cost_no_thread(tmp_path: Path) -> None:
    """All join, all beat, all get their orders, and a controller has the threads that it has for none."""
    controller = Controller(
        Config(store="many", detect=120.0), DirectoryMembership(tmp_path), secret=b"s" * 32, settle_s=0.0
    )
    pairs = [socket.socketpair() for _ in range(200)]
    try:
        threads = threading.active_count()
        for number, (near, far) in enumerate(pairs):
            controller.tell(Session(f"h{number}", 1, Channel(near)))
            far.sendall(encode_frame(Kind.EVENT, empty_inventory(machine=f"m{number}")))
        states = controller.machine.hosts.states
        wait_for(lambda: len(states) == 200, "all hosts", WAIT_S)
        for _, far in pairs:
            far.sendall(encode_frame(Kind.EVENT, Heartbeat(stats=host_stats(), trained={}, clock_s=None)))
        wait_for(lambda: all(state.stats is not None for state in states.values()), "all beats", WAIT_S)
        assert controller.connected() == sorted(f"h{number}" for number in range(200))
        for _, far in pairs:
            holder = Channel(far)
            orders = (decode_order(holder.recv(timeout_s=WAIT_S).data) for _ in itertools.count())
            assert any(isinstance(found, WriteJournal) for found in orders)
        assert threading.active_count() == threads
    finally:
        controller.close()
        for _, far in pairs:
            far.close()
    assert controller.loop._open == set()
