"""A holder's session with one controller: what is queued for it and the thread that sends it (R16, R28).

The queue opens before the inventory is taken and is sent after it, so nothing that is sealed in
between is missed; what both contain is reported twice, which changes nothing. Without a session
reports are dropped: the next session begins with an inventory.
"""

from __future__ import annotations

import logging
import queue
import threading
from typing import Any

from memstore.core.journal.records import paged
from memstore.core.wire.frame import Kind
from memstore.core.wire.messages import ORDINAL_LIMIT
from memstore.errors import ProtocolError, TransportError
from memstore.shell.net.channel import Channel

log = logging.getLogger("memstore")
SEND_S = 5.0  # a controller that does not read for this long has lost its session
FAREWELL_S = 0.2  # the new controller waits for it


class ControllerSession:
    """Outgoing half of one connection of a controller."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.outbox: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._echo: dict[str, Any] = {}  # the controller's clock, as it told it last in this session (R17)

    def open(self, up: dict[str, Any]) -> None:
        """Send the inventory, pages of a long journal first, then whatever was queued since, in order."""
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
        """The controller told its clock."""
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
        """End it for the session of another controller; this one hears of its term, if it listens (R17)."""
        try:
            self.channel.send(Kind.EVENT, 0, {"k": "stale", "term": term}, deadline_s=FAREWELL_S)
        except TransportError as exc:
            log.info("the former controller does not hear that term %d has come: %s", term, exc)
        self.close()

    def close(self) -> None:
        """End the session and its thread."""
        self.channel.close()
        self.outbox.put(None)


def term_of(identity: dict[str, Any]) -> int:
    """Return the term a controller names; ProtocolError for what none can have."""
    term = identity.get("term")
    if type(term) is not int or not 0 < term < ORDINAL_LIMIT:
        raise ProtocolError(f"a controller of term {str(term)[:80]!r}: a term is a whole number from 1 to 2**62")
    return term
