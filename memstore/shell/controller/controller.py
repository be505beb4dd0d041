"""The controller's shell: sessions to all holders, a clock, and the catalog between them (R3, R16, R17).

It dials every announced holder, feeds what they send to `ControllerMachine.handle`, and sends out the actions. One
thread runs the catalog; each session has one thread that reads and one that writes, so a stuck host
blocks no other host. It never imports torch or ray.
"""

from __future__ import annotations

import gc
import logging
import math
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from memstore.config import Config
from memstore.core.cluster.state import Rules
from memstore.core.controller.machine import ControllerMachine
from memstore.core.wire.frame import Kind, pack_frame
from memstore.core.wire.messages import (
    Action,
    Answer,
    DrainsSeen,
    Event,
    FactAck,
    Heard,
    HostInfo,
    HostLost,
    HostUp,
    LeaseRenewed,
    Note,
    RankCall,
    RankGone,
    Report,
    Tell,
    Tick,
    copy_from_wire,
)
from memstore.errors import MemstoreError, ProtocolError
from memstore.shell.controller.event_log import EventLog
from memstore.shell.controller.holder_session import Session
from memstore.shell.controller.membership import Membership
from memstore.shell.net.listener import connect_tcp
from memstore.shell.net.tls import Tls

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


class Controller:
    """Runs one catalog. `start` returns at once; `on_exit` is called if a newer controller takes over."""

    def __init__(
        self,
        config: Config,
        membership: Membership,
        *,
        secret: bytes,
        on_exit: Callable[[str], None] = lambda why: None,
        settle_s: float = 10.0,
    ) -> None:
        self.config, self.membership, self.secret = config, membership, secret
        self.on_exit, self.settle_s = on_exit, settle_s
        self.tls = Tls.load(config)
        self.lease_s = config.lease_s
        self.stopping = threading.Event()
        self.events: queue.Queue[tuple[Session | None, dict[str, Any]]] = queue.Queue()
        self.sessions: dict[str, Session] = {}
        self.dialling: set[str] = set()
        self.lock = threading.Lock()
        self._stale_term = 0  # a term some holder obeys that is above ours
        self._is_stale = threading.Event()
        self._has_tick = False  # one waits among the events
        # Heartbeats wait for no event: every tick takes all that were read by then.
        self._beats: deque[tuple[Session, dict[str, Any]]] = deque()
        self.event_log = EventLog()
        self._new_catalog(membership.claim_term(0), membership.hosts())
        self._threads = [
            threading.Thread(target=self._run, name="memstore-catalog", daemon=True),
            threading.Thread(target=self._dial_loop, name="memstore-dial", daemon=True),
            threading.Thread(target=self._lease_loop, name="memstore-lease", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _new_catalog(self, term: int, expected_hosts: Iterable[str]) -> None:
        config, now = self.config, time.monotonic()
        self.term = term
        self.catalog = ControllerMachine(
            term=term,
            now=now,
            wall_offset_s=time.time() - now,
            rules=Rules(
                failure_domains=config.failure_domains, suspect_after_s=config.suspect_after_s,
                dead_after_s=config.dead_after_s, recovery_grace_s=config.recovery_grace_s,
                lease_s=self.lease_s, outlast_s=self.lease_s if term > 1 else config.heartbeat_s,
                settle_s=self.settle_s, abandoned_arena_ttl_s=config.abandoned_arena_ttl_s,
                job_defaults=config.job_defaults(),
            ),
            expected_hosts=expected_hosts,
        )  # fmt: skip

    def close(self) -> None:
        """Stop; holders keep everything."""
        self.stopping.set()
        self._is_stale.set()
        self.events.put((None, {"k": "end"}))
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
        """Return whether by now the catalog has settled."""
        return self.catalog.is_settled

    def drains_seen(self, until_s: dict[str, float]) -> None:
        """Take the cluster manager's notices: hosts that it will take away, each with its time (wall clock)."""
        self.events.put((None, {"k": "drains", "until_s": until_s}))

    def status_soon(self) -> Future[dict[str, Any]]:
        """Return what `memstore status` shows, made on the machine's thread; for metrics."""
        future: Future[dict[str, Any]] = Future()
        self.events.put((None, {"k": "status", "future": future}))
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
                str(record["address"]), int(record["port"]), secret=self.secret, store=self.config.store,
                identity={"role": "controller", "term": self.term}, timeout_s=CONNECT_S, tls=self.tls,
            )  # fmt: skip
            session = Session(host, int(record["incarnation"]), channel, self._heard, asked_s=asked_s)
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

    def _heard(self, session: Session, body: dict[str, Any]) -> None:
        if body.get("k") == "beat":
            self._beats.append((session, body))
        else:
            self.events.put((session, body))

    # -- the catalog's thread -------------------------------------------------------------------

    def _run(self) -> None:
        """Handle received messages in order, and a tick every TICK_S behind what was received before it.

        A host is not silent because this thread was busy, or the process stopped: after a long time the readers have a
        tick's time to bring what waits in the sockets.
        """
        next_tick_s, was_late = time.monotonic(), False
        while not self.stopping.is_set():
            try:
                session, body = self.events.get(timeout=max(0.0, next_tick_s - time.monotonic()))
                self._take(session, body)
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
                    self.events.put((None, {"k": "tick"}))

    def _take(self, session: Session | None, body: dict[str, Any]) -> None:
        if session is None:
            if body["k"] == "tick":
                self._has_tick = False
                self._handle(Tick(self._beats_taken()))
            elif body["k"] == "lease":
                self._handle(LeaseRenewed(body["until_s"]))
            elif body["k"] == "status":
                body["future"].set_result(self.catalog.parts.status.body())
            elif body["k"] == "drains":
                self._handle(DrainsSeen(body["until_s"]))
            elif body["k"] == "term":
                self._begin_term(int(body["term"]), body["hosts"])
            return
        host = session.host_id
        with self.lock:
            is_current = self.sessions.get(host) is session
            if body.get("k") == "ended" and is_current:
                del self.sessions[host]
        if not is_current:
            return
        try:
            if body.get("k") == "stale":
                if int(body["term"]) > self.term:
                    self._stale_term = int(body["term"])
                    self.catalog.lease.is_outranked = True
                    self._is_stale.set()  # the lease thread asks the membership: that may block
                return
            if body.get("k") == "up":
                session.is_up, session.incarnation = True, int(body["incarnation"])
            event = event_from_body(host, body, session.asked_s)
            if event is not None:
                self._handle(event)
        except (KeyError, TypeError, ValueError, AttributeError):
            log.exception("host %s sent a message that is not understood: %r", host, str(body)[:500])

    def _beats_taken(self) -> tuple[Heard, ...]:
        """Return the last heartbeat of every session that has one."""
        found: dict[str, dict[str, Any]] = {}
        with self.lock:
            for _ in range(len(self._beats)):
                session, body = self._beats.popleft()
                if self.sessions.get(session.host_id) is session:
                    found[session.host_id] = body
        return tuple(beat for host, body in found.items() if (beat := heard_from_body(host, body)) is not None)

    def _handle(self, event: Event) -> None:
        try:
            actions = self.catalog.handle(time.monotonic(), event)
        except Exception as exc:
            log.exception("catalog failed on %r", str(event)[:500])
            actions = list(self.catalog.actions)
            if isinstance(event, RankCall):  # the caller must not wait for an answer that never comes
                actions.append(Answer(event.host_id, event.call_id, {}, ("InternalError", f"{event.verb}: {exc!r}")))
        frames: dict[tuple[str, int], bytes] = {}  # by kind and body of an order
        for action in actions:
            self._execute(action, frames)
        self.event_log.take(self.catalog.parts.observer.chronicle)
        if isinstance(event, Tick | HostLost):  # nothing else ends a host, and seals come by the thousand
            self._close_dead()

    def _execute(self, action: Action, frames: dict[tuple[str, int], bytes]) -> None:
        if isinstance(action, Note):
            log.log(logging.WARNING if action.level == "warning" else logging.INFO, "%s", action.text)
            return
        with self.lock:
            session = self.sessions.get(action.host_id)
        if session is None or not session.is_up:
            return
        try:
            if isinstance(action, Tell):
                key = action.kind, id(action.body)  # the actions are there as long as the frames
                if key not in frames:
                    frames[key] = pack_frame(Kind.EVENT, {"k": action.kind, **action.body})
                session.outbox.put(frames[key])
            elif isinstance(action, Answer):
                error = list(action.error) if action.error is not None else None
                body = {"k": "answer", "id": action.call_id, "body": action.body, "error": error}
                session.outbox.put(pack_frame(Kind.EVENT, body))
        except ProtocolError as exc:  # the host would miss it for ever: it begins again with an inventory
            session.why = str(exc)
            session.channel.abort()

    def _close_dead(self) -> None:
        """End the sessions of hosts declared dead by silence: they need new ones before they count again (R28)."""
        with self.lock:
            dead = [
                s for h, s in self.sessions.items()
                if (state := self.catalog.hosts.states.get(h)) is not None and state.status == "dead"
                and state.info.incarnation == s.incarnation
            ]  # fmt: skip
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
                    self.events.put((None, {"k": "term", "term": term, "hosts": list(self.membership.hosts())}))
                    self.term = term
            except MemstoreError as exc:
                log.warning("the membership does not answer: %s", exc)
                if is_stale:
                    self._is_stale.set()
                    self.stopping.wait(self.lease_s / 3)
                continue  # hearing from every holder also keeps the lease (R17)
            self.events.put((None, {"k": "lease", "until_s": asked_s + self.lease_s}))

    def _begin_term(self, term: int, expected_hosts: list[str]) -> None:
        """Start over under a higher term: every session begins again with an inventory."""
        with self.lock:
            sessions, self.sessions = list(self.sessions.values()), {}
        for session in sessions:
            session.close()
        self._new_catalog(term, expected_hosts)

    def _exit(self, why: str) -> None:
        log.warning("controller exits: %s", why)
        self.stopping.set()
        self.on_exit(why)


def heard_from_body(host: str, body: dict[str, Any]) -> Heard | None:
    """Return the event of a heartbeat; None, and a line in the log, if it is malformed."""
    try:
        stats = dict(body["stats"])
        trained = {str(job): (int(attempt), int(step)) for job, (attempt, step) in stats.pop("trained", {}).items()}
        return Heard(host, stats, float(body.get("clock_s", -math.inf)), trained)
    except (KeyError, TypeError, ValueError, AttributeError):
        log.exception("host %s sent a heartbeat that is not understood: %r", host, str(body)[:500])
        return None


def event_from_body(host: str, body: dict[str, Any], asked_s: float) -> Event | None:
    """Return the catalog event of a holder's message; KeyError, TypeError or ValueError if it is malformed.

    Args:
        asked_s: When this controller asked for the session that it came in.
    """
    kind = body.pop("k")
    if kind == "ack":
        return FactAck(host, int(body["seq"]))
    if kind == "call":
        return RankCall(host, int(body["id"]), str(body["verb"]), dict(body["body"]))
    if kind == "rank_gone":
        return RankGone(host, str(body["nonce"]))
    if kind == "ended":
        return HostLost(host, str(body["why"]) or "connection closed")
    if kind == "up":
        info = HostInfo(
            host, int(body["incarnation"]), str(body["address"]), int(body["port"]), str(body["machine"]),
            bool(body["is_explicit"]), dict(body["labels"]), int(body["limit_bytes"]),
        )  # fmt: skip
        copies = tuple(copy_from_wire(item, host) for item in body["copies"])
        ranks, up_s = tuple(str(nonce) for nonce in body["ranks"]), float(body["up_s"])
        dropped = {str(job): str(story) for job, story in body["dropped"].items()}
        return HostUp(info, copies, tuple(body["journal"]), ranks, asked_s, up_s, float(body["idle_s"]), dropped)
    return Report(host, str(kind), body)
