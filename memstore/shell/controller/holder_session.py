"""A controller's session with one holder: its queue, and the threads that read and write (R16, R28).

A stuck host blocks no other: its thread waits, at most SEND_S, and its session ends. Other end: controller_session.py.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from msgspec import structs

from memstore.core.wire.reports import HolderMessage, HostInventory, decode_holder_message
from memstore.errors import MemstoreError, ProtocolError, TransportError
from memstore.shell.net.channel import Channel

log = logging.getLogger("memstore")
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
