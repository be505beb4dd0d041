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

from msgspec import structs

from memstore.core.holder.sessions import Sessions
from memstore.core.journal.records import paged
from memstore.core.wire.frame import Kind
from memstore.core.wire.orders import EchoClock, Order, WriteJournal, decode_order
from memstore.core.wire.reports import FactsWritten, Heartbeat, HolderMessage, HostInventory, Outranked
from memstore.errors import PeerUnreachable, TransportError
from memstore.shell.arena.journal_file import JournalFile
from memstore.shell.net.channel import Channel

log = logging.getLogger("memstore")
SEND_S = 5.0  # a controller that does not read for this long has lost its session
OUTRANKED_SEND_S = 0.2  # the new controller waits for it


class ControllerSession:
    """Outgoing half of one connection of a controller."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.outbox: queue.Queue[HolderMessage | None] = queue.Queue()
        self.clock_s: float | None = None  # the controller's, as it was sent last in this session (R17)
        self._is_open = False

    def open(self, inventory: HostInventory, beat: Heartbeat) -> None:
        """Send the inventory, pages of a long journal first, and a heartbeat; then what was queued since, in order.

        What the heartbeat counts was found before: the controller reports what is found from now on.
        """
        *pages, last = paged(inventory.journal)
        for page in pages:
            first = structs.replace(inventory, copies=(), journal=page, has_more=True)
            self.channel.send(Kind.EVENT, 0, first, deadline_s=SEND_S)
        self.channel.send(Kind.EVENT, 0, structs.replace(inventory, journal=last), deadline_s=SEND_S)
        self._is_open = True
        self.beat(beat)
        threading.Thread(target=self._run, name="memstore-outbox", daemon=True).start()

    def beat(self, beat: Heartbeat) -> None:
        """Send a heartbeat, past the queue (R28); none before the inventory."""
        if not self._is_open:
            return
        self.channel.send(Kind.EVENT, 0, structs.replace(beat, clock_s=self.clock_s), deadline_s=SEND_S)

    def _run(self) -> None:
        while True:
            message = self.outbox.get()
            if message is None:
                return
            try:
                self.channel.send(Kind.EVENT, 0, message, deadline_s=SEND_S)
            except TransportError as exc:
                log.warning("lost the controller: %s", exc)
                self.channel.close()
                return

    def replaced(self, term: int) -> None:
        """End the session, since another controller has begun one; send its term to the old one, if it reads (R17)."""
        try:
            self.channel.send(Kind.EVENT, 0, Outranked(term=term), deadline_s=OUTRANKED_SEND_S)
        except TransportError as exc:
            log.info("the former controller could not be sent that term %d has come: %s", term, exc)
        self.close()

    def close(self) -> None:
        """End the session and its thread."""
        self.channel.close()
        self.outbox.put(None)


class ControllerSessions(Sessions[ControllerSession]):
    """The sessions of one holder on threads: which of them is obeyed is in core/holder/sessions.py."""

    def __init__(self, host_id: str, journal: JournalFile, term: int) -> None:
        super().__init__(term, journal, lambda seq: self.report(FactsWritten(seq=seq)))
        self.host_id, self.journal = host_id, journal
        self._lock = threading.Lock()

    def report(self, message: HolderMessage) -> None:
        """Queue a report to the controller; without a session it is dropped: inventories replace it."""
        session = self.current
        if session is not None:
            session.outbox.put(message)

    def beat(self, heartbeat: Callable[[], Heartbeat]) -> None:
        """Send the controller a heartbeat, if there is a session."""
        session = self.current
        if session is not None:
            with contextlib.suppress(TransportError):
                session.beat(heartbeat())

    def serve(
        self,
        channel: Channel,
        term: int,
        *,
        inventory: Callable[[], HostInventory],
        heartbeat: Callable[[], Heartbeat],
        on_open: Callable[[], None],
        obey: Callable[[Order], None],
    ) -> None:
        """Obey a controller until its session ends; refuse one of a lower term (R17).

        Args:
            channel: The connection to it.
            term: Its term, as it names it.
            inventory: Makes the first message.
            heartbeat: Makes the second.
            on_open: Called once that was sent.
            obey: Carries out one order; one that fails ends no session.
        """
        session = ControllerSession(channel)
        with self._lock:
            is_obeyed, old = self.begin(session, term)
        if not is_obeyed:
            channel.send(Kind.EVENT, 0, Outranked(term=self.term), deadline_s=SEND_S)
            return
        if old is not None:
            old.replaced(term)
        try:
            session.open(inventory(), heartbeat())
            on_open()
            while True:
                order = decode_order(channel.recv(timeout_s=None).data)
                with self._lock:  # an order is over before a newer session begins, or is not obeyed
                    if self.current is not session:
                        break
                    self._obey(session, order, obey)
        except PeerUnreachable:
            log.info("host %s: the controller's session ended", self.host_id)
        finally:
            with self._lock:
                self.end(session)
            session.close()

    def _obey(self, session: ControllerSession, order: Order, obey: Callable[[Order], None]) -> None:
        """Carry out one order. Facts that broke in the writing end the session: the next one sends them again."""
        if isinstance(order, WriteJournal):
            self.facts.take(order)
        elif isinstance(order, EchoClock):
            session.clock_s = order.clock_s
        else:
            try:
                obey(order)
            except Exception:
                log.exception("host %s: order %s failed", self.host_id, type(order).__name__)

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
