"""A holder's sessions with its controllers: the queue for the newest, and the thread that sends it (R16, R28).

The queue opens before the inventory is taken and is sent after it, so nothing that is sealed in
between is missed; what both contain is reported twice, which changes nothing. Without a session
reports are dropped: the next session begins with an inventory.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from memstore.core.journal.records import paged
from memstore.core.wire.frame import Kind
from memstore.core.wire.messages import ORDINAL_LIMIT
from memstore.errors import PeerUnreachable, ProtocolError, TransportError
from memstore.shell.arena.journal_file import Journal
from memstore.shell.holder.journal_writer import JournalWriter
from memstore.shell.net.channel import Channel

log = logging.getLogger("memstore")
SEND_S = 5.0  # a controller that does not read for this long has lost its session
FAREWELL_S = 0.2  # the new controller waits for it


class ControllerSession:
    """Outgoing half of one connection of a controller."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.outbox: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._echo: dict[str, Any] = {}  # the controller's clock, as it was sent last in this session (R17)

    def open(self, up: dict[str, Any]) -> None:
        """Send the inventory, pages of a long journal first, then what was queued since, in order."""
        *pages, last = paged(up["journal"])
        for page in pages:
            self.channel.send(Kind.EVENT, 0, {"k": "journal", "records": page}, deadline_s=SEND_S)
        self.channel.send(Kind.EVENT, 0, {**up, "journal": last}, deadline_s=SEND_S)
        threading.Thread(target=self._run, name="memstore-outbox", daemon=True).start()

    def put(self, body: dict[str, Any]) -> None:
        """Queue a message."""
        self.outbox.put(body)

    def beat(self, stats: dict[str, Any]) -> None:
        """Send a heartbeat, past the queue (R28)."""
        self.channel.send(Kind.EVENT, 0, {"k": "beat", "stats": stats, **self._echo}, deadline_s=SEND_S)

    def clock(self, body: dict[str, Any]) -> None:
        """Keep the controller's clock, which the next heartbeats carry."""
        self._echo = {"clock_s": body["clock_s"]}

    def _run(self) -> None:
        while True:
            body = self.outbox.get()
            if body is None:
                return
            try:
                self.channel.send(Kind.EVENT, 0, body, deadline_s=SEND_S)
            except TransportError as exc:
                log.warning("lost the controller: %s", exc)
                self.channel.close()
                return

    def replaced(self, term: int) -> None:
        """End the session, since another controller has begun one; send its term to the old one, if it reads (R17)."""
        try:
            self.channel.send(Kind.EVENT, 0, {"k": "stale", "term": term}, deadline_s=FAREWELL_S)
        except TransportError as exc:
            log.info("the former controller could not be sent that term %d has come: %s", term, exc)
        self.close()

    def close(self) -> None:
        """End the session and its thread."""
        self.channel.close()
        self.outbox.put(None)


class ControllerSessions:
    """The sessions of one holder: the newest of the highest term is obeyed, and its facts are journalled (R16, R17)."""

    def __init__(self, host_id: str, journal: Journal, term: int) -> None:
        self.host_id, self.journal, self.term = host_id, journal, term
        self.facts = JournalWriter(journal, lambda seq: self.report("ack", {"seq": seq}))
        self.current: ControllerSession | None = None
        self._lock = threading.Lock()

    def report(self, kind: str, body: dict[str, Any]) -> None:
        """Queue a report to the controller; without a session it is dropped: inventories replace it."""
        session = self.current
        if session is not None:
            session.put({"k": kind, **body})

    def beat(self, stats: Callable[[], dict[str, Any]]) -> None:
        """Send the controller a heartbeat, if there is a session."""
        session = self.current
        if session is not None:
            with contextlib.suppress(TransportError):
                session.beat(stats())

    def serve(
        self, channel: Channel, term: int, *, inventory: Callable[[], dict[str, Any]], on_open: Callable[[], None],
        obey: Callable[[dict[str, Any]], None],
    ) -> None:  # fmt: skip
        """Obey a controller until its session ends; refuse one of a lower term (R17).

        Args:
            channel: The connection to it.
            term: Its term, as it names it.
            inventory: Makes the first message.
            on_open: Called once that was sent.
            obey: Carries out one order; one that fails ends no session.
        """
        session = ControllerSession(channel)
        with self._lock:
            newest = self.term = max(self.term, term)
            if term == newest:
                old, self.current = self.current, session
                self.facts.forget()
        if term < newest:
            channel.send(Kind.EVENT, 0, {"k": "stale", "term": newest}, deadline_s=SEND_S)
            return
        if old is not None:
            old.replaced(term)
        try:
            session.open(inventory())
            on_open()
            while True:
                body = channel.recv(timeout_s=None).body
                with self._lock:  # an order is over before a newer session begins, or is not obeyed
                    if self.current is not session:
                        break
                    self._obey(session, body, obey)
        except PeerUnreachable:
            log.info("host %s: the controller's session ended", self.host_id)
        finally:
            with self._lock:
                self.current = None if self.current is session else self.current
            session.close()

    def _obey(self, session: ControllerSession, body: dict[str, Any], obey: Callable[[dict[str, Any]], None]) -> None:
        """Carry out one order. Facts that broke in the writing end the session: the next one sends them again."""
        if body.get("k") == "journal":
            del body["k"]
            self.facts.take(body)
            return
        try:
            session.clock(body) if body.get("k") == "clock" else obey(body)
        except Exception:
            log.exception("host %s: order %s failed", self.host_id, str(body.get("k"))[:80])

    def write_waiting(self) -> None:
        """Write the facts for which there was no room (R16)."""
        with self._lock:
            self.facts.retry()

    def journal_records(self) -> list[bytes]:
        """Return the facts that the journal has; what a session is just writing is in it whole."""
        with self._lock:  # else it would be a damaged rest, to be cut off
            return self.journal.records()

    def close(self) -> None:
        """End the session that is open."""
        session = self.current
        if session is not None:
            session.close()


def term_of(identity: dict[str, Any]) -> int:
    """Return the term a controller names; ProtocolError for what none can have."""
    term = identity.get("term")
    if type(term) is not int or not 0 < term < ORDINAL_LIMIT:
        raise ProtocolError(f"a controller of term {str(term)[:80]!r}: a term is a whole number from 1 to 2**62")
    return term
