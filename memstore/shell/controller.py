"""The controller's process: sessions to all holders, a clock, and the state machine between them.

`on_ray` and test clusters start it; the cluster manager is behind the port `ClusterMembership`, so it knows no Ray.

    dialled --authenticated--> session --inventory came--> up --connection ends, or declared dead--> dialled again
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import math
import os
import queue
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from typing import Any, Protocol

from msgspec import structs

from memstore.config import Config
from memstore.core.cluster.state import Rules
from memstore.core.controller.machine import ControllerMachine
from memstore.core.report.event_kinds import ROUTINE, event_fields, level_of
from memstore.core.report.recorder import RecentEvents
from memstore.core.wire.calls import Called
from memstore.core.wire.codec import encode, encode_frame, tag_of
from memstore.core.wire.frame import Kind
from memstore.core.wire.handshake import ControllerIdentity
from memstore.core.wire.messages import (
    Action,
    AnswerCall,
    DrainsSeen,
    Event,
    HostBeat,
    HostLost,
    HostUp,
    LeaseRenewed,
    LogLine,
    Received,
    SendOrder,
    Tick,
)
from memstore.core.wire.orders import CallAnswered
from memstore.core.wire.replies import Status
from memstore.core.wire.reports import Heartbeat, HolderMessage, HostInventory, Outranked, decode_holder_message
from memstore.core.wire.status_rows import EventRow
from memstore.errors import MemstoreError, ProtocolError
from memstore.shell.net.channel import REST_OF_FRAME_S, Channel, Frame
from memstore.shell.net.listener import connect_tcp
from memstore.shell.net.tls import Tls

# -- event log ----------------------------------------------------------------------------------------
# Writes events as JSON lines and passes them to the metrics, on a thread of its own.
#
# Lines go through the logger `memstore.events`: INFO, but DEBUG for the one or two that every step leaves (put, commit,
# durable), which would drown a console. MEMSTORE_EVENTS names a file that gets them all. The controller submits and
# goes on: a disk that hangs costs lines, which are counted, never a decision.


_events = logging.getLogger("memstore.events")
WAITING_MAX = 4096
CLOSE_S = 2.0


class EventLog:
    """Follows the event ring of one controller, over all its terms."""

    def __init__(self, path: str | None = None) -> None:
        self.path = os.environ.get("MEMSTORE_EVENTS", "") if path is None else path
        self.dropped_count = 0  # came too fast for the writer
        self.failed_count = 0  # could not be written
        self.counters: list[Callable[[EventRow], None]] = []  # each gets every event that was not dropped
        self._seen_seq = 0
        self._problem = ""
        self._waiting: queue.Queue[EventRow | None] = queue.Queue(WAITING_MAX)
        self._thread = threading.Thread(target=self._run, name="memstore-events", daemon=True)
        self._thread.start()

    def take(self, recent_events: RecentEvents) -> None:
        """Queue new events, dropping those beyond the writer's backlog; never waits."""
        if recent_events.last_seq <= self._seen_seq:
            return
        for event in recent_events.since(self._seen_seq):
            try:
                self._waiting.put_nowait(event)
            except queue.Full:
                self.dropped_count += 1
        self._seen_seq = recent_events.last_seq
        recent_events.unwritten_count = self.dropped_count + self.failed_count

    def close(self) -> None:
        """Write what waits, as far as it can be written soon."""
        try:
            self._waiting.put(None, timeout=CLOSE_S)
        except queue.Full:
            return  # the writer hangs; it is a daemon
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (event := self._waiting.get()) is not None:
            for work in (self._write, *self.counters):
                try:
                    work(event)
                except Exception as exc:
                    self._complain(exc)

    def _write(self, event: EventRow) -> None:
        level = logging.DEBUG if level_of(event.event) == ROUTINE else logging.INFO
        if not self.path and not _events.isEnabledFor(level):
            return
        line = json.dumps(event_fields(event), ensure_ascii=False, default=str)
        _events.log(level, "%s", line)
        if self.path:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(line + "\n")

    def _complain(self, exc: Exception) -> None:
        """Log a fault once, not for every line."""
        self.failed_count += 1
        if str(exc) != self._problem:
            self._problem = str(exc)
            logging.getLogger("memstore").warning("an event could not be written or counted: %r", exc)


# -- holder sessions ----------------------------------------------------------------------------------
# A controller's sessions with all holders: one thread reads what came and sends what sockets take (R16, R28).


SEND_S = 10.0  # an order that its holder does not take for this long, though it is the next, ends the session
FRAMES_A_TURN = 100  # of one session, before others are read
LATE_LOOK_S = 1.0


@dataclass(frozen=True)
class SessionEnded:
    """The session is over."""

    why: str


class Session:
    """One holder's connection; only the thread of its loop uses it."""

    def __init__(self, host_id: str, incarnation: int, channel: Channel, *, asked_s: float = -math.inf) -> None:
        self.host_id, self.channel = host_id, channel
        self.announced = self.incarnation = incarnation  # replaced by the holder's own report, which is newer
        self.asked_s = asked_s  # when it was asked for, monotonic (R17)
        self.is_up = False  # its inventory was taken: earlier decisions are no orders for it
        self.outbox: deque[memoryview] = deque()  # packed: what goes to many is in all of them once
        self.why = ""  # nothing more can be sent
        self.frames = channel.frames()
        self.pages: list[bytes] = []  # of the journal
        self.send_by_s = self.receive_by_s = math.inf  # the next order; the rest of a report that has begun


class SessionLoop:
    """Waits for all sessions at once. Other threads may only `wake` the one that uses it."""

    def __init__(self, on_message: Callable[[Session, HolderMessage | SessionEnded], None]) -> None:
        self._on_message = on_message
        self._open: set[Session] = set()
        self._unread: dict[Session, None] = {}  # there may be more, in TLS too, of which no socket tells
        self._unsent: dict[Session, None] = {}  # until the next flush
        self._look_at_s = 0.0
        self._selector = DefaultSelector()
        self._is_woken = False
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._woken, EVENT_READ)

    def wake(self) -> None:
        """End the wait of the turn that is under way, or of the next one."""
        if not self._is_woken:
            self._is_woken = True
            with contextlib.suppress(OSError):  # closed
                self._waker.send(b"w")

    def add(self, session: Session) -> None:
        """Begin to read a session."""
        self._selector.register(session.channel, EVENT_READ, session)
        self._open.add(session)
        self._unread[session] = None

    def drop(self, session: Session) -> None:
        """Close a session without a word; it may be closed already."""
        if session in self._open:
            self._open.remove(session)
            self._unread.pop(session, None)
            self._selector.unregister(session.channel)
            session.outbox.clear()
        session.channel.close()

    def end(self, session: Session, why: str) -> None:
        """Close a session and say why, once."""
        if session in self._open:
            self.drop(session)
            self._on_message(session, SessionEnded(why))

    def send(self, session: Session, frame: bytes) -> None:
        """Queue a frame for the next flush, or behind those that wait for the socket."""
        if session in self._open:
            if not session.outbox:
                self._unsent[session] = None
            session.outbox.append(memoryview(frame))

    def flush(self) -> None:
        """Send what was queued, as far as sockets take it now; turns send the rest."""
        unsent, self._unsent = self._unsent, {}
        for session in unsent:
            if session.outbox:
                self._write(session)

    def turn(self, timeout_s: float) -> None:
        """Wait at most so long until sockets are ready, then read what came and send what waits."""
        for key, ready in self._selector.select(0.0 if self._unread else timeout_s):
            if key.data is None:
                self._woken.recv(64)
                self._is_woken = False
                continue
            if ready & EVENT_WRITE:
                self._write(key.data)
            if ready & EVENT_READ:
                self._unread[key.data] = None
        unread, self._unread = self._unread, {}
        for session in unread:
            self._read(session)
        now = time.monotonic()
        if now >= self._look_at_s:
            self._look_at_s = now + LATE_LOOK_S
            for session in [s for s in self._open if now > min(s.send_by_s, s.receive_by_s)]:
                late = f"take an order within {SEND_S:g} s"
                if now <= session.send_by_s:
                    late = f"send the rest of a report within {REST_OF_FRAME_S:g} s"
                self.end(session, f"host {session.host_id} at {session.channel.peer} did not {late}")

    def close(self) -> None:
        """Close all sessions."""
        for session in list(self._open):
            self.drop(session)
        self._selector.close()
        self._woken.close()
        self._waker.close()

    def _write(self, session: Session) -> None:
        """Send as much of the outbox as the socket takes, and be told when it takes more."""
        before, waited = len(session.outbox), session.send_by_s < math.inf
        try:
            session.channel.send_ready(session.outbox, "send orders")
        except MemstoreError as exc:  # what the holder has said before it ended is still read
            session.why = session.why or str(exc)
            session.outbox.clear()
        if not session.outbox:
            session.send_by_s = math.inf
        elif len(session.outbox) < before or not waited:
            session.send_by_s = time.monotonic() + SEND_S
        if waited != bool(session.outbox):
            self._selector.modify(session.channel, EVENT_READ | (0 if waited else EVENT_WRITE), session)

    def _read(self, session: Session) -> None:
        """Take the reports that came; end the session if it is over."""
        try:
            for count, step in enumerate(session.frames, start=1):
                if not isinstance(step, Frame):
                    if not step:
                        session.receive_by_s = math.inf
                    elif session.receive_by_s == math.inf:
                        session.receive_by_s = time.monotonic() + REST_OF_FRAME_S
                    return
                session.receive_by_s = math.inf
                self._take(session, decode_holder_message(step.data))
                if count == FRAMES_A_TURN:
                    self._unread[session] = None
                    return
        except Exception as exc:
            if isinstance(exc, ProtocolError):
                log.warning(
                    "the session of host %s at %s ended by a message that is none (%s): %s",
                    session.host_id,
                    session.channel.peer,
                    type(exc).__name__,
                    exc,
                )
            elif not isinstance(exc, MemstoreError):
                log.exception("the session of host %s ends after what could not be read", session.host_id)
            self.end(session, session.why or str(exc))

    def _take(self, session: Session, message: HolderMessage) -> None:
        if isinstance(message, HostInventory):
            session.pages += message.journal
            if message.has_more:
                return
            message, session.pages = structs.replace(message, journal=tuple(session.pages)), []
        self._on_message(session, message)


# -- membership ---------------------------------------------------------------------------------------
# Where holders announce themselves and controllers claim their term (R3, R17).


class ClusterMembership(Protocol):
    """Small records that outlive any one process. Calls may block and may raise TransportError."""

    def announce(self, host_id: str, record: dict[str, Any]) -> None:
        """Register a holder: address, port, incarnation."""

    def hosts(self) -> dict[str, dict[str, Any]]:
        """Return every announced holder by host id."""

    def withdraw(self, host_id: str) -> None:
        """Remove a host that left for good."""

    def claim_term(self, above: int) -> int:
        """Take a term above every one claimed so far and above `above`."""

    def newest_term(self) -> int:
        """Return the highest term claimed so far."""


# -- controller ---------------------------------------------------------------------------------------


log = logging.getLogger("memstore")
DIAL_S = 0.2  # how often announced holders without a session are dialled
QUIET_S, QUIET_DIAL_S = 30.0, 1.0  # how often after so long without news: looking was half of what idle costs
CONNECT_S = 3.0
TICK_S = 0.1
IDLE_TICK_S = 0.5  # while there is no job: nobody waits for what a tick decides, and it is most of what is done
READ_S = 0.05  # after so long the sockets are read again, however many events wait
COLLECT_EVERY = (50_000, 20, 20)
SWITCH_S = 0.05


def collect_rarely() -> None:
    """For a process that is a controller: its records make no cycles, and looking for some is a third of a large step.

    What does make cycles, an exception here and there, waits for the collector until a million objects were made.
    Threads change rarely too: those that dial thousands of holders at a start wait for the interpreter, and each wakes
    this often to ask for it. At the usual 5 ms they would do nothing else.
    """
    gc.set_threshold(*COLLECT_EVERY)
    sys.setswitchinterval(SWITCH_S)


@dataclass(frozen=True)
class NewTerm:
    """Begin again under a higher term that was claimed."""

    term: int
    hosts: list[str]


FromSession = HolderMessage | SessionEnded
FromInside = Tick | NewTerm | Session | LeaseRenewed | DrainsSeen | Future[Status]


class Controller:
    """Runs one controller machine. `start` returns at once; `on_exit` is called if a newer controller takes over."""

    def __init__(
        self,
        config: Config,
        membership: ClusterMembership,
        *,
        secret: bytes,
        on_exit: Callable[[str], None] = lambda why: None,
        settle_s: float = 10.0,
        gcs_storage: str = "",
    ) -> None:
        self.config, self.membership, self.secret, self.gcs_storage = config, membership, secret, gcs_storage
        self.on_exit, self.settle_s = on_exit, settle_s
        self.tls = Tls.load(config)
        self.lease_s = config.lease_s
        self.stopping = threading.Event()
        self.events: deque[tuple[Session, FromSession] | FromInside] = deque()
        self.loop = SessionLoop(self._received)
        self.sessions: dict[str, Session] = {}  # changed by the machine's thread only
        self.dialling: set[str] = set()
        self._stale_term = 0  # a term some holder obeys that is above ours
        self._is_stale = threading.Event()
        self._tick_at_s = time.monotonic()  # infinite while a tick waits among the events
        # Heartbeats wait for no event: every tick takes all that were read by then.
        self._beats: deque[tuple[Session, Heartbeat]] = deque()
        self.event_log = EventLog()
        self._new_machine(membership.claim_term(0), membership.hosts())
        self._threads = [
            threading.Thread(target=self._run, name="memstore-controller", daemon=True),
            threading.Thread(target=self._dial_loop, name="memstore-dial", daemon=True),
            threading.Thread(target=self._lease_loop, name="memstore-lease", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _new_machine(self, term: int, expected_hosts: Iterable[str]) -> None:
        config, now = self.config, time.monotonic()
        self.term = term
        self.machine = ControllerMachine(
            term=term,
            now=now,
            wall_offset_s=time.time() - now,
            rules=Rules(
                failure_domains=config.failure_domains,
                chunk_bytes=config.chunk_bytes,
                suspect_after_s=config.suspect_after_s,
                dead_after_s=config.dead_after_s,
                recovery_grace_s=config.recovery_grace_s,
                lease_s=self.lease_s,
                outlast_s=self.lease_s if term > 1 else config.heartbeat_s,
                settle_s=self.settle_s,
                job_defaults=config.job_defaults(),
                gcs_storage=self.gcs_storage,
            ),
            expected_hosts=expected_hosts,
        )

    def close(self) -> None:
        """Stop; holders keep everything."""
        self.stopping.set()
        self._is_stale.set()
        self.loop.wake()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5.0)
        self.event_log.close()

    def connected(self) -> list[str]:
        """Return the hosts with a session now."""
        return sorted(self.sessions)

    def is_serving(self) -> bool:
        """Return whether by now the machine has settled."""
        return self.machine.is_settled

    def drains_seen(self, until_s: dict[str, float]) -> None:
        """Take the cluster manager's notices: hosts that it will take away, each with its time (wall clock)."""
        self.tell(DrainsSeen(until_s))

    def status_soon(self) -> Future[Status]:
        """Return what `memstore status` shows, made on the machine's thread; for metrics."""
        future: Future[Status] = Future()
        self.tell(future)
        return future

    def tell(self, event: tuple[Session, FromSession] | FromInside) -> None:
        """Let the machine's thread take something; any thread may call it."""
        self.events.append(event)
        self.loop.wake()

    # -- sessions -----------------------------------------------------------------------------

    def _dial_loop(self) -> None:
        """Dial every announced holder that has no session; look more rarely once nothing was new for long."""
        before, news_s = dict[str, dict[str, Any]](), time.monotonic()
        while not self.stopping.wait(DIAL_S if time.monotonic() - news_s < QUIET_S else QUIET_DIAL_S):
            try:
                announced = self.membership.hosts()
            except MemstoreError as exc:
                log.warning("cannot read the membership: %s", exc)
                continue
            if announced != before or not announced.keys() <= self.sessions.keys():
                before, news_s = announced, time.monotonic()
            for host, record in announced.items():
                # In this order: a session is entered before its dial is over.
                is_dialling, session = host in self.dialling, self.sessions.get(host)
                if is_dialling or (session is not None and session.announced == record["incarnation"]):
                    continue
                self.dialling.add(host)
                threading.Thread(target=self._dial, args=(host, record), daemon=True).start()

    def _dial(self, host: str, record: dict[str, Any]) -> None:
        asked_s = time.monotonic()
        try:
            channel = connect_tcp(
                str(record["address"]),
                int(record["port"]),
                secret=self.secret,
                store=self.config.store,
                identity=ControllerIdentity(term=self.term),
                timeout_s=CONNECT_S,
                host=host,
                tls=self.tls,
            )
            self.tell(Session(host, int(record["incarnation"]), channel, asked_s=asked_s))
            if self.stopping.is_set():
                channel.close()  # it may be too late for it to be taken
        except BaseException as exc:
            self.dialling.discard(host)
            if not isinstance(exc, MemstoreError):
                raise
            log.debug("dial %s: %s", host, exc)

    def _received(self, session: Session, message: FromSession) -> None:
        if isinstance(message, Heartbeat):
            self._beats.append((session, message))
        else:
            self.events.append((session, message))

    # -- the machine's thread -------------------------------------------------------------------

    def _run(self) -> None:
        """Read what came and handle it in order, and a tick each TICK_S (rarer without a job), after what came before.

        No host is silent because this thread was busy, or the process stopped: after an event that took long all
        sockets are read before the next one, which may be a tick.
        """
        while not self.stopping.is_set():
            self.loop.turn(0.0 if self.events else max(0.0, self._tick_at_s - time.monotonic()))
            read_s = time.monotonic()
            if read_s >= self._tick_at_s:
                self._tick_at_s = math.inf
                self.events.append(Tick())
            while self.events and not self.stopping.is_set() and time.monotonic() - read_s < READ_S:
                taken = self.events.popleft()
                try:
                    self._take(*taken) if isinstance(taken, tuple) else self._take_inside(taken)
                except Exception:
                    log.exception("the controller goes on after an event it could not take")
        self.loop.close()
        while self.events:
            if isinstance(left := self.events.popleft(), Session):
                left.channel.close()

    def _take_inside(self, taken: FromInside) -> None:
        """Take what this process tells itself."""
        if isinstance(taken, Future):
            taken.set_result(self.machine.parts.status.answer())
        elif isinstance(taken, NewTerm):
            self._begin_term(taken.term, taken.hosts)
        elif isinstance(taken, LeaseRenewed | DrainsSeen):
            self._handle(taken)
        elif isinstance(taken, Session):
            self._begin(taken)
        elif isinstance(taken, Tick):
            self._tick_at_s = time.monotonic() + (TICK_S if self.machine.jobs else IDLE_TICK_S)
            self._handle(Tick(self._beats_taken()))

    def _begin(self, session: Session) -> None:
        """Replace a host's session by a new one."""
        if (old := self.sessions.get(session.host_id)) is not None:
            self.loop.drop(old)
        self.sessions[session.host_id] = session
        self.dialling.discard(session.host_id)
        self.loop.add(session)

    def _take(self, session: Session, message: FromSession) -> None:
        """Take what a holder sent, unless its session was replaced."""
        host = session.host_id
        if self.sessions.get(host) is not session:
            return
        if isinstance(message, SessionEnded):
            del self.sessions[host]
        if isinstance(message, Outranked):
            if message.term > self.term:
                self._stale_term = message.term
                self.machine.lease.is_outranked = True
                self._is_stale.set()  # the lease thread asks the membership: that may block
            return
        if isinstance(message, HostInventory):
            session.is_up, session.incarnation = True, message.incarnation
        self._handle(event_from(host, message, session.asked_s))

    def _beats_taken(self) -> tuple[HostBeat, ...]:
        """Return the last heartbeat of every session that has one."""
        found: dict[str, Heartbeat] = {}
        while self._beats:
            session, beat = self._beats.popleft()
            if self.sessions.get(session.host_id) is session:
                found[session.host_id] = beat
        return tuple(heartbeat_of(host, beat) for host, beat in found.items())

    def _handle(self, event: Event) -> None:
        try:
            actions = self.machine.handle(time.monotonic(), event)
        except Exception as exc:
            log.exception("the controller failed on %r", str(event)[:500])
            actions = list(self.machine.actions)
            if isinstance(event, Received) and isinstance(called := event.message, Called):
                # The caller must not wait for an answer that never comes.
                error = ("InternalError", f"{tag_of(called.call)}: {exc!r}")
                actions.append(AnswerCall(event.host_id, called.id, None, error))
        frames: dict[int, bytes] = {}  # by identity of an order
        for action in actions:
            self._execute(action, frames)
        self.loop.flush()
        self.event_log.take(self.machine.parts.recorder.recent_events)
        if isinstance(event, Tick | HostLost):  # nothing else ends a host, and seals come by the thousand
            self._close_dead()

    def _execute(self, action: Action, frames: dict[int, bytes]) -> None:
        if isinstance(action, LogLine):
            log.log(logging.WARNING if action.level == "warning" else logging.INFO, "%s", action.text)
            return
        session = self.sessions.get(action.host_id)
        if session is None or not session.is_up:
            return
        try:
            if isinstance(action, SendOrder):
                key = id(action.order)  # the actions are there as long as the frames
                if key not in frames:
                    frames[key] = encode_frame(Kind.EVENT, action.order)
                self.loop.send(session, frames[key])
            else:
                reply = encode(action.reply) if action.reply is not None else b""
                answered = CallAnswered(id=action.call_id, reply=reply, error=action.error)
                self.loop.send(session, encode_frame(Kind.EVENT, answered))
        except ProtocolError as exc:  # the host would miss it for ever: it begins again with an inventory
            self.loop.end(session, str(exc))

    def _close_dead(self) -> None:
        """End the sessions of hosts declared dead by silence: they need new ones before they count again (R28)."""
        for host, session in list(self.sessions.items()):
            state = self.machine.hosts.states.get(host)
            if state is not None and state.status == "dead" and state.info.incarnation == session.incarnation:
                del self.sessions[host]
                self.loop.drop(session)

    # -- terms (R17) --------------------------------------------------------------------------

    def _lease_loop(self) -> None:
        """Renew the lease while no newer controller has claimed a term; the only thread that asks the membership."""
        while not self.stopping.is_set():
            is_stale = self._is_stale.wait(self.lease_s / 3)
            if self.stopping.is_set():
                return
            asked_s = time.monotonic()  # an answer is true of then, however late it comes
            try:
                newest = self.membership.newest_term()
                if newest > self.term:
                    self._exit(f"a controller of term {newest} has taken over from term {self.term}")
                    return
                if is_stale:
                    self._is_stale.clear()
                    # Holders remember a term that the membership does not know: it is an earlier cluster's.
                    log.info("holders remember term %d: taking a higher one", self._stale_term)
                    term = self.membership.claim_term(self._stale_term)
                    self.tell(NewTerm(term, list(self.membership.hosts())))
                    self.term = term
            except MemstoreError as exc:
                log.warning("the membership does not answer: %s", exc)
                if is_stale:
                    self._is_stale.set()
                    self.stopping.wait(self.lease_s / 3)
                continue  # hearing from every holder also keeps the lease (R17)
            self.tell(LeaseRenewed(asked_s + self.lease_s))

    def _begin_term(self, term: int, expected_hosts: list[str]) -> None:
        """Start over under a higher term: every session begins again with an inventory."""
        sessions, self.sessions = self.sessions, {}
        for session in sessions.values():
            self.loop.drop(session)
        self._new_machine(term, expected_hosts)

    def _exit(self, why: str) -> None:
        log.warning("controller exits: %s", why)
        self.stopping.set()
        self.on_exit(why)


def heartbeat_of(host: str, beat: Heartbeat) -> HostBeat:
    """Return the event of a heartbeat."""
    clock_s = beat.clock_s if beat.clock_s is not None else -math.inf
    trained = {job: (newest.attempt, newest.step) for job, newest in beat.trained.items()}
    return HostBeat(host, beat.stats, clock_s, trained)


def event_from(host: str, message: FromSession, asked_s: float) -> Event:
    """Return the machine's event of a holder's message.

    Args:
        host: The holder's.
        message: The holder's message, or the end of its session.
        asked_s: When this controller asked for the session that it came in.
    """
    match message:
        case SessionEnded():
            return HostLost(host, message.why or "connection closed")
        case HostInventory():
            return HostUp.of(host, message, asked_s)
        case Heartbeat():
            return heartbeat_of(host, message)
        case Outranked():
            raise ProtocolError(f"{type(message).__name__} of host {host} is no event")
    return Received(host, message)
