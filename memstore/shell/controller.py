"""The controller's process: sessions to all holders, a clock, and the state machine between them.

`on_ray` and test clusters start it; the cluster manager is behind the port `ClusterMembership`, so it knows no Ray.

    dialled --authenticated--> session --inventory came--> up --connection ends, or declared dead--> dialled again
"""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
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
from memstore.errors import MemstoreError, ProtocolError, TransportError
from memstore.shell.net.channel import Channel
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


# -- holder session -----------------------------------------------------------------------------------
# A controller's session with one holder: its queue, and the threads that read and write (R16, R28).


SEND_S = 10.0


@dataclass(frozen=True)
class SessionEnded:
    """The session is over."""

    why: str


class Session:
    """One holder's connection: a reader thread and a writer thread."""

    def __init__(
        self,
        host_id: str,
        incarnation: int,
        channel: Channel,
        on_message: Callable[[Session, HolderMessage | SessionEnded], None],
        *,
        asked_s: float = -math.inf,
    ) -> None:
        self.host_id, self.channel = host_id, channel
        self.announced = self.incarnation = incarnation  # replaced by the holder's own report, which is newer
        self.asked_s = asked_s  # when it was asked for, monotonic (R17)
        self.outbox: queue.Queue[bytes | None] = queue.Queue()  # packed: what goes to many is in all of them once
        self._on_message = on_message
        self.why = ""
        self.is_up = False  # its inventory was taken: earlier decisions are no orders for it

    def start(self) -> None:
        """Begin to read and write, once the controller knows the session."""
        host_id = self.host_id
        threading.Thread(target=self._read, name=f"memstore-read-{host_id}", daemon=True).start()
        threading.Thread(target=self._write, name=f"memstore-write-{host_id}", daemon=True).start()

    def _read(self) -> None:
        pages: list[bytes] = []  # of the journal
        try:
            while True:
                message = decode_holder_message(self.channel.recv(timeout_s=None).data)
                if isinstance(message, HostInventory):
                    pages += message.journal
                    if message.has_more:
                        continue
                    message = structs.replace(message, journal=tuple(pages))
                self._on_message(self, message)
        except MemstoreError as exc:
            self.why = str(exc)
            if isinstance(exc, ProtocolError):
                log.warning(
                    "the session of host %s at %s ended by a message that is none (%s): %s",
                    self.host_id,
                    self.channel.peer,
                    type(exc).__name__,
                    exc,
                )
        finally:
            self.close()
            self._on_message(self, SessionEnded(self.why))

    def _write(self) -> None:
        while True:
            frame = self.outbox.get()
            if frame is None:
                return
            try:
                self.channel.send_frame(frame, deadline_s=SEND_S)
            except TransportError as exc:
                self.why = str(exc)
                self.channel.close()
                return

    def close(self) -> None:
        """End both threads."""
        self.channel.close()
        self.outbox.put(None)


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
CONNECT_S = 3.0
TICK_S = 0.1
LATE_S = 0.5  # before a tick as late as this, no message could be received
COLLECT_EVERY = (50_000, 20, 20)
SWITCH_S = 0.05


def collect_rarely() -> None:
    """For a process that is a controller: its records make no cycles, and looking for some is a third of a large step.

    What does make cycles, an exception here and there, waits for the collector until a million objects were made.
    Threads change rarely too: every reader that has a heartbeat waits for the interpreter, and wakes this often to ask
    for it. At the usual 5 ms thousands of them do nothing else.
    """
    gc.set_threshold(*COLLECT_EVERY)
    sys.setswitchinterval(SWITCH_S)


@dataclass(frozen=True)
class NewTerm:
    """Begin again under a higher term that was claimed."""

    term: int
    hosts: list[str]


class Wake(Enum):
    """Wakes the machine's thread for work of this process itself."""

    TICK = "tick"
    END = "end"


TICK, WAKE = Wake.TICK, Wake.END
FromSession = HolderMessage | SessionEnded
FromInside = Wake | NewTerm | LeaseRenewed | DrainsSeen | Future[Status]


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
        self.events: queue.Queue[tuple[Session, FromSession] | FromInside] = queue.Queue()
        self.sessions: dict[str, Session] = {}
        self.dialling: set[str] = set()
        self.lock = threading.Lock()
        self._stale_term = 0  # a term some holder obeys that is above ours
        self._is_stale = threading.Event()
        self._has_tick = False  # one waits among the events
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
        self.events.put(WAKE)
        with self.lock:
            sessions = list(self.sessions.values())
        for session in sessions:
            session.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5.0)
        self.event_log.close()

    def connected(self) -> list[str]:
        """Return the hosts with a session now."""
        with self.lock:
            return sorted(self.sessions)

    def is_serving(self) -> bool:
        """Return whether by now the machine has settled."""
        return self.machine.is_settled

    def drains_seen(self, until_s: dict[str, float]) -> None:
        """Take the cluster manager's notices: hosts that it will take away, each with its time (wall clock)."""
        self.events.put(DrainsSeen(until_s))

    def status_soon(self) -> Future[Status]:
        """Return what `memstore status` shows, made on the machine's thread; for metrics."""
        future: Future[Status] = Future()
        self.events.put(future)
        return future

    # -- sessions -----------------------------------------------------------------------------

    def _dial_loop(self) -> None:
        """Dial every announced holder that has no session."""
        while not self.stopping.wait(DIAL_S):
            try:
                announced = self.membership.hosts()
            except MemstoreError as exc:
                log.warning("cannot read the membership: %s", exc)
                continue
            for host, record in announced.items():
                with self.lock:
                    session = self.sessions.get(host)
                    if host in self.dialling or (session is not None and session.announced == record["incarnation"]):
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
            session = Session(host, int(record["incarnation"]), channel, self._received, asked_s=asked_s)
            with self.lock:
                old = self.sessions.get(host)
                self.sessions[host] = session
            if old is not None:
                old.close()
            session.start()
        except MemstoreError as exc:
            log.debug("dial %s: %s", host, exc)
        finally:
            with self.lock:
                self.dialling.discard(host)

    def _received(self, session: Session, message: FromSession) -> None:
        if isinstance(message, Heartbeat):
            self._beats.append((session, message))
        else:
            self.events.put((session, message))

    # -- the machine's thread -------------------------------------------------------------------

    def _run(self) -> None:
        """Handle received messages in order, and a tick every TICK_S behind what was received before it.

        A host is not silent because this thread was busy, or the process stopped: after a long time the readers have a
        tick's time to bring what waits in the sockets.
        """
        next_tick_s, was_late = time.monotonic(), False
        while not self.stopping.is_set():
            try:
                taken = self.events.get(timeout=max(0.0, next_tick_s - time.monotonic()))
                self._take(*taken) if isinstance(taken, tuple) else self._take_inside(taken)
            except queue.Empty:
                pass  # only the tick is due
            except Exception:
                log.exception("the controller goes on after an event it could not take")
            late_s = time.monotonic() - next_tick_s
            if late_s >= 0:
                next_tick_s += late_s + TICK_S
                was_late = late_s > LATE_S and not was_late
                if not was_late and not self._has_tick:
                    self._has_tick = True
                    self.events.put(TICK)

    def _take_inside(self, taken: FromInside) -> None:
        """Take what this process tells itself."""
        if isinstance(taken, Future):
            taken.set_result(self.machine.parts.status.answer())
        elif isinstance(taken, NewTerm):
            self._begin_term(taken.term, taken.hosts)
        elif isinstance(taken, LeaseRenewed | DrainsSeen):
            self._handle(taken)
        elif taken is TICK:
            self._has_tick = False
            self._handle(Tick(self._beats_taken()))

    def _take(self, session: Session, message: FromSession) -> None:
        """Take what a holder sent, unless its session was replaced."""
        host = session.host_id
        with self.lock:
            is_current = self.sessions.get(host) is session
            if isinstance(message, SessionEnded) and is_current:
                del self.sessions[host]
        if not is_current:
            return
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
        with self.lock:
            for _ in range(len(self._beats)):
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
        self.event_log.take(self.machine.parts.recorder.recent_events)
        if isinstance(event, Tick | HostLost):  # nothing else ends a host, and seals come by the thousand
            self._close_dead()

    def _execute(self, action: Action, frames: dict[int, bytes]) -> None:
        if isinstance(action, LogLine):
            log.log(logging.WARNING if action.level == "warning" else logging.INFO, "%s", action.text)
            return
        with self.lock:
            session = self.sessions.get(action.host_id)
        if session is None or not session.is_up:
            return
        try:
            if isinstance(action, SendOrder):
                key = id(action.order)  # the actions are there as long as the frames
                if key not in frames:
                    frames[key] = encode_frame(Kind.EVENT, action.order)
                session.outbox.put(frames[key])
            else:
                reply = encode(action.reply) if action.reply is not None else b""
                answered = CallAnswered(id=action.call_id, reply=reply, error=action.error)
                session.outbox.put(encode_frame(Kind.EVENT, answered))
        except ProtocolError as exc:  # the host would miss it for ever: it begins again with an inventory
            session.why = str(exc)
            session.channel.abort()

    def _close_dead(self) -> None:
        """End the sessions of hosts declared dead by silence: they need new ones before they count again (R28)."""
        with self.lock:
            dead = [
                s
                for h, s in self.sessions.items()
                if (state := self.machine.hosts.states.get(h)) is not None
                and state.status == "dead"
                and state.info.incarnation == s.incarnation
            ]
            for session in dead:
                del self.sessions[session.host_id]
        for session in dead:
            session.close()

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
                    self.events.put(NewTerm(term, list(self.membership.hosts())))
                    self.term = term
            except MemstoreError as exc:
                log.warning("the membership does not answer: %s", exc)
                if is_stale:
                    self._is_stale.set()
                    self.stopping.wait(self.lease_s / 3)
                continue  # hearing from every holder also keeps the lease (R17)
            self.events.put(LeaseRenewed(asked_s + self.lease_s))

    def _begin_term(self, term: int, expected_hosts: list[str]) -> None:
        """Start over under a higher term: every session begins again with an inventory."""
        with self.lock:
            sessions, self.sessions = list(self.sessions.values()), {}
        for session in sessions:
            session.close()
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
