"""A holder obeys one controller, the newest of the highest term, in any order of messages (R16, R17)."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from cli_store import host_causes
from link_site import WAIT_S, Site, state
from msgspec import structs

from memstore.config import Config
from memstore.core.journal import records as records_module
from memstore.core.journal.records import journal_after, place_of_record
from memstore.core.wire.calls import Called
from memstore.core.wire.codec import encode_frame
from memstore.core.wire.frame import Kind
from memstore.core.wire.handshake import ControllerIdentity
from memstore.core.wire.messages import Action, Event, Received, Tick
from memstore.core.wire.orders import (
    EchoClock,
    Order,
    PushTargets,
    Reserve,
    TermNumber,
    VerifyCopies,
    WriteJournal,
    decode_order,
)
from memstore.core.wire.reports import (
    CopiesVerified,
    FactsWritten,
    Heartbeat,
    HolderMessage,
    HostInventory,
    Outranked,
    RankArrived,
    Reserved,
    decode_holder_message,
)
from memstore.errors import CapacityError, DigestMismatch, PeerTimeout, PeerUnreachable, TransportError
from memstore.shell import controller as controller_module
from memstore.shell.arena import journal_file as journal_module
from memstore.shell.arena.slot_headers import SLOTS_NAME
from memstore.shell.controller import TICK_S, Controller, Session, SessionEnded, SessionLoop
from memstore.shell.holder import controller_session
from memstore.shell.holder.controller_session import ControllerSession
from memstore.shell.holder.holder import Holder
from memstore.shell.identity import HostIdentity, read_boot_id
from memstore.shell.native import extension
from memstore.shell.net.channel import Channel
from memstore.shell.net.listener import connect_tcp
from memstore.shell.rank.admin_link import store_root
from memstore.testing.clusters.process_main import DirectoryMembership
from memstore.testing.clusters.processes import wait_for
from memstore.testing.clusters.scratch import scratch_store_name
from memstore.testing.controller.holder import empty_inventory, host_stats

ORDER_WAIT_S = 60.0
SECRET = b"s" * 32
Dial = Callable[[int], Channel]


@pytest.fixture
def holder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Holder]:
    """A holder that never beats by itself, so that what it sends is what it was asked for."""
    monkeypatch.setattr(Config, "heartbeat_s", 60.0)
    config = Config(
        store=scratch_store_name(), arena_bytes=1 << 20, chunk_bytes=64 << 10, interface="127.0.0.1", detect=600.0
    )
    made = Holder(HostIdentity("a", read_boot_id(), True, {}), config, secret=SECRET, arena_limit_bytes=1 << 20)
    yield made
    made.close()
    shutil.rmtree(store_root(config), ignore_errors=True)


def test_a_holder_that_closes_does_not_miss_the_files_that_it_takes_away(
    holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would end at once, as one whose files were removed: `down --discard` would leave its arena behind."""
    ended, close = list[str](), holder.rank_listener.close
    holder.context.on_fatal = ended.append

    def look_after_it() -> None:
        close()
        holder.guard.look()

    monkeypatch.setattr(holder.rank_listener, "close", look_after_it)
    holder.stop_serving()
    assert not (holder.folder / "holder.sock").exists()
    assert ended == []


@pytest.fixture
def dial(holder: Holder) -> Iterator[Dial]:
    """Connects as the controller of a term."""
    made: list[Channel] = []

    def connect(term: int) -> Channel:
        channel = connect_tcp(
            holder.state.info.endpoints[0].address,
            holder.state.info.endpoints[0].port,
            secret=SECRET,
            store=holder.config.store,
            identity=ControllerIdentity(term=term),
            timeout_s=ORDER_WAIT_S,
        )
        made.append(channel)
        return channel

    yield connect
    for channel in made:
        channel.close()


class Pause:
    """Holds up each call that comes until `go`."""

    def __init__(self) -> None:
        self.at, self.go = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.at.set()
        assert self.go.wait(ORDER_WAIT_S)


def first_message(channel: Channel) -> HolderMessage | SessionEnded:
    """Return what a controller's session gives first."""
    given: list[HolderMessage | SessionEnded] = []
    loop = SessionLoop(lambda _, message: given.append(message))
    loop.add(Session("a", 1, channel))
    try:
        wait_for(lambda: loop.turn(0.01) or given, "a message of the holder", ORDER_WAIT_S)
    finally:
        loop.close()
    return given[0]


def send(channel: Channel, order: Order) -> None:
    channel.send(Kind.EVENT, 0, order, deadline_s=ORDER_WAIT_S)


def received(channel: Channel, timeout_s: float = ORDER_WAIT_S) -> HolderMessage:
    """The next message but heartbeats and calls: a tool of another test asks every store of this user here."""
    while isinstance(message := decode_holder_message(channel.recv(timeout_s=timeout_s).data), Called | Heartbeat):
        pass
    return message


def greeted(channel: Channel) -> HostInventory:
    """Return the inventory with which a session begins."""
    inventory = received(channel)
    assert isinstance(inventory, HostInventory)
    return inventory


def push_to(target: str) -> PushTargets:
    return PushTargets(job="job", attempt=1, targets=(target,), ranks=())


def obeys(holder: Holder, channel: Channel) -> None:
    """Raise unless an order on this session is carried out."""
    target = secrets.token_hex(4)
    send(channel, push_to(target))
    wait_for(lambda: holder.state.shared_shards.ordinary.get("job") == [target], "the order")


def test_a_lower_term_is_ordered_to_go(holder: Holder, dial: Dial) -> None:
    """A controller of an older term learns of the newer one, is not obeyed, and does not displace it (R17)."""
    newer = dial(6)
    greeted(newer)
    older = dial(5)
    with contextlib.suppress(Exception):  # the holder may have hung up already
        send(older, push_to("old"))
    assert received(older) == Outranked(term=6)
    obeys(holder, newer)
    assert holder.sessions.term == 6


def test_of_two_controllers_at_once_the_higher_term_stays(
    holder: Holder, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older controller that is slow to be taken does not displace the newer one that came meanwhile (R17)."""
    pause, firsts = Pause(), [True]

    class Slow(ControllerSession):
        def __init__(self, channel: Channel) -> None:
            super().__init__(channel)
            if firsts and firsts.pop():
                pause()

    monkeypatch.setattr(controller_session, "ControllerSession", Slow)
    older = dial(5)
    assert pause.at.wait(ORDER_WAIT_S)
    newer = dial(6)
    greeted(newer)
    pause.go.set()
    assert received(older) == Outranked(term=6)
    obeys(holder, newer)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError(), CapacityError("too much")])
def test_an_order_that_fails_is_answered(
    holder: Holder, dial: Dial, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Ranks wait for the room and a person for the answer, also after a failure; the next order is carried out (R9)."""

    def fail(*_: Any, **__: Any) -> None:
        raise error

    channel = dial(5)
    greeted(channel)
    share = Reserve(job="job", attempt=1, ranks={0: 2}, peer_slots=0, world_size=1, versions=1, number=TermNumber(5, 7))
    with monkeypatch.context() as patch:
        patch.setattr(holder.replicas.arena, "grow", fail)
        patch.setattr(holder.scrubber, "verify_all", fail)
        send(channel, share)
        send(channel, VerifyCopies(call=8, job=None))
        answers = {type(answer): answer for answer in (received(channel), received(channel))}
    reserved, verified = answers[Reserved], answers[CopiesVerified]
    assert isinstance(reserved, Reserved)
    assert isinstance(verified, CopiesVerified)
    assert (reserved.number, verified.call, verified.found) == (TermNumber(5, 7), 8, None)
    said = str(error.args[-1]) if error.args else repr(error)
    assert said in str(reserved.problem)
    assert said in verified.problem
    send(channel, structs.replace(share, number=TermNumber(5, 9)))
    again = received(channel)
    assert isinstance(again, Reserved)
    assert (again.number, again.problem) == (TermNumber(5, 9), None)


@pytest.mark.parametrize("term", [5, 6])
def test_an_order_that_arrived_before_a_newer_session_is_not_obeyed_after_it(
    holder: Holder, dial: Dial, monkeypatch: pytest.MonkeyPatch, term: int
) -> None:
    """What was read from an older session, of this term or one before, never overrides the newer session (R17)."""
    pause, closed = Pause(), threading.Semaphore(0)

    class Slow(ControllerSession):
        """Its orders are read and then wait."""

        def __init__(self, channel: Channel) -> None:
            super().__init__(channel)
            real = channel.recv

            def recv(**limits: Any) -> Any:
                frame = real(**limits)
                pause()
                return frame

            monkeypatch.setattr(channel, "recv", recv)

        def close(self) -> None:
            super().close()
            closed.release()

    monkeypatch.setattr(controller_session, "ControllerSession", Slow)
    older = dial(5)
    greeted(older)
    send(older, push_to("old"))
    assert pause.at.wait(ORDER_WAIT_S)
    monkeypatch.setattr(controller_session, "ControllerSession", ControllerSession)
    newer = dial(term)
    greeted(newer)
    obeys(holder, newer)
    pause.go.set()
    assert closed.acquire(timeout=ORDER_WAIT_S)  # by the newer session
    assert closed.acquire(timeout=ORDER_WAIT_S)  # by its own thread, which is done
    assert holder.state.shared_shards.ordinary["job"] != ["old"]
    obeys(holder, newer)


def test_a_fact_of_an_older_controller_is_not_acknowledged_to_the_newer(
    holder: Holder, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of facts come again in the next term.

    A write under way at the takeover counts for no other process (R16).
    """
    pause, real = Pause(), holder.journal.append
    monkeypatch.setattr(holder.journal, "append", lambda records: (pause(), real(records)))
    older = dial(5)
    greeted(older)
    send(older, WriteJournal(keep=None, records=(b"old",), seq=7))
    assert pause.at.wait(ORDER_WAIT_S)
    newer, first = dial(6), cast("HolderMessage | None", None)
    with contextlib.suppress(PeerTimeout):
        first = received(newer, 0.3)  # not before the write is over, else it may be missing in what it says
    pause.go.set()
    first = first or received(newer)
    assert isinstance(first, HostInventory)
    assert first.journal == (b"old",)
    send(newer, WriteJournal(keep=None, records=(b"new",), seq=1))
    assert received(newer) == FactsWritten(seq=1)


def test_a_long_journal_comes_in_pages_before_the_inventory(
    holder: Holder, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No message is longer than the wire allows, however many facts a journal has.

    The controller is given all at once.
    """
    records = tuple(bytes([number]) * 30 for number in range(5))
    first = dial(5)
    greeted(first)
    send(first, WriteJournal(keep=None, records=records, seq=5))
    assert received(first) == FactsWritten(seq=5)
    monkeypatch.setattr(records_module, "PAGE_BYTES", 70)
    pages = dial(6)
    sent = [greeted(pages) for _ in range(3)]
    assert [page.journal for page in sent] == [records[:2], records[2:4], records[4:]]
    assert [page.has_more for page in sent] == [True, True, False]
    up = first_message(dial(7))
    assert isinstance(up, HostInventory)
    assert up.journal == records


def test_a_journal_that_is_being_written_is_not_taken_for_a_damaged_one(
    holder: Holder, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older session still reads the journal for its inventory when the newer one's facts come: all stay (R16)."""
    pause, real = Pause(), journal_module._scan

    def slow(path: Path) -> Iterator[bytes]:
        found = list(real(path))
        monkeypatch.setattr(journal_module, "_scan", real)
        pause()
        return iter(found)

    monkeypatch.setattr(journal_module, "_scan", slow)
    dial(5)
    assert pause.at.wait(ORDER_WAIT_S)
    newer, first = dial(6), cast("HolderMessage | None", None)
    with contextlib.suppress(PeerTimeout):
        first = received(newer, 0.3)  # not before the older one has read it
    send(newer, WriteJournal(keep=None, records=(b"new",), seq=1))
    if first is not None:
        assert received(newer) == FactsWritten(seq=1)
    pause.go.set()
    if first is None:
        greeted(newer)
        assert received(newer) == FactsWritten(seq=1)
    obeys(holder, newer)
    wait_for(lambda: not holder.sessions._lock.locked(), "the older session to be done")
    assert holder.journal.records() == [b"new"]


def test_a_journal_that_lost_what_it_is_to_keep_is_not_said_to_have_it(holder: Holder, dial: Dial) -> None:
    """A record was damaged, and with it what lies behind: the session ends, the next one shows what is left (R16)."""
    records = tuple(bytes(14) + bytes([1, number]) + b"fact" for number in range(3))
    first = dial(5)
    greeted(first)
    send(first, WriteJournal(keep=None, records=records, seq=3))
    assert received(first) == FactsWritten(seq=3)
    with holder.journal.path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"?")
    places = tuple(TermNumber(*place_of_record(record)) for record in records)
    send(first, WriteJournal(keep=places, records=(), seq=4))
    with pytest.raises(PeerUnreachable):
        received(first)
    newer = dial(5)
    assert greeted(newer).journal == records[:2]


def test_a_controller_that_comes_before_the_port_is_known_gets_no_inventory(holder: Holder, dial: Dial) -> None:
    """It would record a host that is nowhere; it comes again, and is greeted (R16)."""
    here = holder.state.info
    holder.state.info = replace(here, endpoints=())
    with (
        connect_tcp(
            here.endpoints[0].address,
            here.endpoints[0].port,
            secret=SECRET,
            store=holder.config.store,
            identity=ControllerIdentity(term=2),
            timeout_s=ORDER_WAIT_S,
        ) as early,
        pytest.raises(PeerUnreachable),
    ):
        received(early)
    holder.state.info = here
    greeting = received(dial(3))
    assert isinstance(greeting, HostInventory)
    assert greeting.endpoints == here.endpoints


# -- session protocol ---------------------------------------------------------------------------------
# A message that is none ends a holder's session with a warning of its controller (R16).


PROTOCOL_WAIT_S = 60.0


def test_a_controller_warns_of_what_is_no_report(caplog: pytest.LogCaptureFixture) -> None:
    """The holder connects again: the log is all that says why."""
    near, far = socket.socketpair()
    with Channel(far) as holder:
        holder.send(Kind.EVENT, 0, EchoClock(clock_s=1.0), deadline_s=PROTOCOL_WAIT_S)
        over = first_message(Channel(near))
    assert isinstance(over, SessionEnded)
    [warning] = [record.getMessage() for record in caplog.records]
    assert "the session of host a at" in warning
    assert over.why in warning


# -- lease --------------------------------------------------------------------------------------------
# How long a controller may record facts that no other process may be recording too (R17).


LEASE_WAIT_S = 60.0


class SlowMembership(DirectoryMembership):
    """A membership that names the newest controller once, when ordered to, and is out of reach after that."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.asked_s: list[float] = []
        self.go = threading.Event()

    def claim_term(self, above: int) -> int:
        return above + 1

    def newest_term(self) -> int:
        self.asked_s.append(time.monotonic())
        if len(self.asked_s) > 1:
            raise TransportError("the membership is out of reach")
        assert self.go.wait(LEASE_WAIT_S)
        return 1


def test_beats_keep_a_controller_in_charge_while_the_membership_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hosts are asked before the membership's word runs out, and echo what they were sent (D130)."""
    site = Site(tmp_path, ["a", "b"], monkeypatch)

    def away() -> int:
        raise TransportError("the membership is out of reach")

    try:
        machine = site.controller.machine
        monkeypatch.setattr(site.controller.membership, "newest_term", away)
        wait_for(
            lambda: machine.state.now > machine.lease.until_s + site.config.lease_s, "the lease to be the hosts' alone"
        )
        wait_for(machine.lease.may_record, "an echo")
        first_s = min(state.was_with_us_s for state in machine.hosts.states.values())
        wait_for(lambda: min(s.was_with_us_s for s in machine.hosts.states.values()) > first_s, "newer echoes")
        assert first_s > machine.lease.until_s - site.config.lease_s
    finally:
        site.close()


def test_a_lease_counts_from_the_question_not_from_the_answer(tmp_path: Path) -> None:
    """While the answer was under way another controller may have been elected, and have waited out this lease."""
    membership = SlowMembership(tmp_path)
    config = Config(store="lease", detect=0.3)
    controller = Controller(config, membership, secret=b"s" * 32)
    began_s = controller.machine.lease.until_s
    try:
        wait_for(lambda: membership.asked_s and time.monotonic() > membership.asked_s[0] + config.lease_s, "the lease")
        membership.go.set()
        wait_for(lambda: controller.machine.lease.until_s > began_s, "the renewal")
        assert controller.machine.lease.until_s <= membership.asked_s[0] + config.lease_s
    finally:
        membership.go.set()
        controller.close()


# -- holder warnings ----------------------------------------------------------------------------------
# What a holder says of its host for as long as it lives: in its log, and in each heartbeat, which status shows.


def started(folder: Path) -> Holder:
    """A holder of host h1, whose limit has a warning of its own."""
    config = Config(store="t-warnings", arena_dir=str(folder), chunk_bytes=64 << 10, interface="127.0.0.1")
    return Holder(
        HostIdentity("h1", read_boot_id(), True, {}),
        config,
        secret=b"s" * 32,
        arena_limit_bytes=1 << 20,
        limit_words=("arena_bytes", "it is small"),
    )


def test_a_helper_that_was_not_built_and_a_damaged_table_are_said_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """pip hides what setup.py prints, so the holder says it; what was chosen by MEMSTORE_NATIVE=0 needs no word."""
    monkeypatch.setattr(extension, "built", None)
    monkeypatch.setenv("MEMSTORE_NATIVE", "0")
    holder = started(tmp_path)
    holder.close()
    assert holder.heartbeat().stats.limit_warning == "it is small"
    monkeypatch.delenv("MEMSTORE_NATIVE")
    (holder.folder / SLOTS_NAME).write_bytes(b"")
    holder = started(tmp_path)
    [words] = host_causes("host_warning", holder.heartbeat().stats)
    holder.close()
    assert words.startswith("it is small; ")
    for part in ("put aside as slots.damaged", "without its native helper", "libxxhash-dev"):
        assert part in words
        assert part in caplog.text
    monkeypatch.setattr(extension, "built", object())  # the remedy: it was installed again
    holder = started(tmp_path)
    holder.close()
    assert host_causes("host_warning", holder.heartbeat().stats) == ["it is small"]


# -- holder skips -------------------------------------------------------------------------------------
# A put that fails in the holder is given up on all ranks, and the pause after it follows from its cause (R12).


@pytest.mark.parametrize(("error", "gap"), [(DigestMismatch("a bit flipped"), 1), (CapacityError("full"), 2)])
def test_only_a_lack_of_room_lengthens_the_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, gap: int
) -> None:
    """A failure of one put says nothing of the next."""
    site = Site(tmp_path, ["a"], monkeypatch)
    try:
        (store,) = site.connect()
        store.put(1, state(1)).wait("committed", WAIT_S)

        def fails(*_: Any, **__: Any) -> None:
            raise error

        monkeypatch.setattr(site.replicas, "seal_local", fails)
        ticket = store.put(2, state(2))
        wait_for(lambda: ticket.is_over, "the end of the put")
        attempt = site.controller.machine.jobs["job"].attempts[1]
        wait_for(lambda: attempt.resume_step > 2, "the word of it")
        assert (ticket.level, attempt.resume_gap) == ("failed", gap)
    finally:
        site.close()


# -- the controller listens ---------------------------------------------------------------------------
# A host is silent if it says nothing, not if the controller had no time to listen (R28).


def test_a_beat_that_waits_behind_a_long_event_is_received_before_the_next_tick(tmp_path: Path) -> None:
    """Ticks take their turn: else one event of some seconds would make all hosts suspect, or dead."""
    config = Config(store="listens", detect=120.0)
    controller = Controller(config, DirectoryMembership(tmp_path), secret=b"s" * 32, settle_s=0.0)
    near, far = socket.socketpair()
    session = Session("a", 1, Channel(near))

    def pass_time(what: str) -> None:
        until_s = time.monotonic() + 2 * TICK_S
        wait_for(lambda: time.monotonic() > until_s, what)

    pauses, seen = {"first": Pause(), "second": Pause()}, list[str]()
    try:
        controller.tell(session)
        controller.tell((session, empty_inventory(1)))
        wait_for(controller.is_serving, "the controller to serve")
        state, handle = controller.machine.hosts.states["a"], controller.machine.handle

        def watched(now: float, event: Event) -> list[Action]:
            if isinstance(event, Received) and isinstance(event.message, RankArrived):
                pauses[event.message.nonce]()
            actions = handle(now, event)
            if isinstance(event, Tick):
                seen.append(state.status)
            return actions

        controller.machine.handle = watched  # type: ignore[method-assign]
        controller.tell((session, RankArrived(nonce="first")))
        assert pauses["first"].at.wait(WAIT_S)
        far.sendall(encode_frame(Kind.EVENT, RankArrived(nonce="second")))
        pass_time("a tick to be due, behind the second event")
        pauses["first"].go.set()
        assert pauses["second"].at.wait(WAIT_S)
        state.beat_at_s -= 100.0  # the last beat was long ago
        far.sendall(encode_frame(Kind.EVENT, Heartbeat(stats=host_stats(), trained={}, clock_s=None)))
        pass_time("the second event to have taken long")
        seen.clear()
        pauses["second"].go.set()
        wait_for(lambda: len(seen) >= 3, "ticks")
        assert set(seen) == {"live"}
    finally:
        for pause in pauses.values():
            pause.go.set()
        controller.close()
        far.close()


def test_a_controller_without_news_for_long_still_finds_a_new_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks more rarely then, not never."""
    monkeypatch.setattr(controller_module, "QUIET_S", 0.0)
    monkeypatch.setattr(controller_module, "QUIET_DIAL_S", 0.01)
    monkeypatch.setattr(controller_module, "DIAL_S", 100 * WAIT_S)
    membership = DirectoryMembership(tmp_path)
    controller = Controller(Config(store="quiet"), membership, secret=b"s" * 32, settle_s=0.0)
    try:
        with socket.create_server(("127.0.0.1", 0)) as late:
            late.settimeout(WAIT_S)
            address, port = late.getsockname()
            membership.announce("late", {"address": address, "port": port, "incarnation": 1})
            late.accept()[0].close()
    finally:
        controller.close()


def test_what_was_decided_before_an_inventory_is_no_order_for_its_session(tmp_path: Path) -> None:
    """A holder is replaced while it counts as live: a fact of that moment does not come to it twice (R16)."""
    config = Config(store="listens", detect=120.0)
    controller = Controller(config, DirectoryMembership(tmp_path), secret=b"s" * 32, settle_s=0.0)
    pairs = [socket.socketpair(), socket.socketpair()]
    sessions = [Session("a", n, Channel(near), asked_s=time.monotonic()) for n, (near, _) in enumerate(pairs, start=1)]
    far = Channel(pairs[1][1])
    try:
        controller.tell(sessions[0])
        controller.tell((sessions[0], empty_inventory(1)))
        wait_for(lambda: controller.is_serving() and controller.machine.parts.journal.log.entries, "the first fact")
        controller.tell(sessions[1])
        entries = controller.machine.parts.journal.log.entries
        controller.drains_seen({"a": time.time() + 1000.0})
        wait_for(lambda: len(entries) >= 2, "a fact while the new holder has said nothing yet")
        controller.tell((sessions[1], empty_inventory(2)))
        journal: list[bytes] = []
        while len(journal) < len(entries):
            order = decode_order(far.recv(timeout_s=WAIT_S).data)
            journal = journal_after(journal, order) if isinstance(order, WriteJournal) else journal
        assert journal == [entry.record for entry in entries]
    finally:
        controller.close()
        for pair in pairs:
            pair[1].close()
