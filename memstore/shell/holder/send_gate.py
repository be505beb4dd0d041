"""Holds copies of puts back while collectives of this host's ranks are under way (core/network/send_gate.py, D87)."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from memstore.core.network.send_gate import Order, Sending, SendSchedule
from memstore.errors import ProtocolError
from memstore.shell.holder.marks_reader import CollectiveMarksReader, remove_marks
from memstore.shell.net.socket_options import Flight
from memstore.shell.peer.outgoing_shard import OutgoingReplica

log = logging.getLogger("memstore")
Pace = Callable[[], contextlib.AbstractContextManager[None]]


class SendGate:
    """The marks of this host's ranks and the pushes of their puts; any thread may use it."""

    def __init__(self, folder: Path, hold_s: float) -> None:
        """`hold_s`: the longest that one put is held back; 0: marks are ignored."""
        self._folder, self._hold_s = folder, hold_s
        self._gate = SendSchedule(hold_s)
        self._readers: dict[str, CollectiveMarksReader] = {}  # by the rank's nonce
        self._lock = threading.Lock()
        remove_marks(folder)

    def watch(self, nonce: str, file: str) -> None:
        """Read a rank's file of marks from now on; one that cannot be read is ignored, with a warning."""
        try:
            reader = CollectiveMarksReader(self._folder, file)
        except ProtocolError as exc:
            log.warning("memstore: marks of rank process %s are ignored: %s", nonce, exc)
            return
        with self._lock:
            self._drop(nonce)
            self._readers[nonce] = reader
            self._gate.ranks[nonce] = reader.spans

    def forget(self, nonce: str, job: str, rank: int) -> None:
        """Forget the marks of a rank whose link has ended."""
        with self._lock:
            self._drop(nonce)
            self._gate.forget(job, rank)

    def release(self, job: str, rank: int, order: Order) -> None:
        """Stop holding back copies of a rank's older puts: a newer put begins or waits for room (R13)."""
        with self._lock:
            self._gate.release(job, rank, order)

    def stats(self) -> dict[str, Any]:
        """Return the heartbeat's fields."""
        return {"spilled_bytes": self._gate.spilled_bytes, "short_of_idle": self._gate.short}

    @contextlib.contextmanager
    def sending(self, shipment: OutgoingReplica) -> Iterator[PushGate | None]:
        """Give the gate for one push of a put; None if nothing holds it back."""
        if not self._hold_s or not self._readers:
            yield None
            return
        shard = shipment.shard
        with self._lock:
            self._read()
            order = (shard.attempt, shard.step)
            sending = self._gate.begin(time.monotonic(), shard.job, shard.rank, order)
        try:
            yield PushGate(self, sending)
        finally:
            with self._lock:
                self._gate.end(sending)

    def allow(
        self, sending: Sending, asked: int, stream: int, flight: Callable[[], Flight], held_s: float
    ) -> tuple[int, float]:
        """Return how many bytes may go now, and if none, when to ask again."""
        with self._lock:
            self._read()
            unacked_bytes, rtt_s = flight()  # as of now, not of before the wait for the lock: rates follow from it
            return self._gate.allow(time.monotonic(), sending, asked, stream, unacked_bytes, held_s, rtt_s)

    def leave(self, stream: int) -> None:
        """Note that a stream has nothing to send now."""
        with self._lock:
            self._gate.leave(stream)

    def _read(self) -> None:
        for nonce, reader in list(self._readers.items()):
            try:
                reader.read()
            except (OSError, ProtocolError) as exc:
                log.warning("memstore: marks of rank process %s are ignored from now on: %s", nonce, exc)
                self._drop(nonce)

    def _drop(self, nonce: str) -> None:
        reader = self._readers.pop(nonce, None)
        self._gate.ranks.pop(nonce, None)
        if reader is not None:
            reader.close()


class PushGate:
    """The gate of one push: its bytes leave when no collective is under way."""

    def __init__(self, send_gate: SendGate, sending: Sending, pace: Pace = contextlib.nullcontext) -> None:
        self._gate, self._sending, self._pace = send_gate, sending, pace

    def paced(self, pace: Pace) -> PushGate:
        """Return a gate that is inside `pace` while its bytes are sent."""
        return PushGate(self._gate, self._sending, pace)

    def parts(
        self, views: Sequence[memoryview], flight: Callable[[], Flight], closed: threading.Event
    ) -> Iterator[list[memoryview]]:
        """Cut a frame into parts, each given when it may go; ends early if the channel is closed.

        Args:
            views: Everything that is to be sent, of bytes.
            flight: Returns what the kernel holds of this channel's bytes.
            closed: The channel's end.
        """
        stream, began_s = threading.get_ident(), time.monotonic()
        left = list(views)
        asked = sum(view.nbytes for view in left)
        try:
            while asked and not closed.is_set():
                held_s = time.monotonic() - began_s
                nbytes, wait_s = self._gate.allow(self._sending, asked, stream, flight, held_s)
                if nbytes:
                    part, left = _cut(left, nbytes)
                    asked -= nbytes
                    with self._pace():
                        yield part
                else:
                    closed.wait(wait_s)
        finally:
            self._gate.leave(stream)


def _cut(views: list[memoryview], nbytes: int) -> tuple[list[memoryview], list[memoryview]]:
    """Return the first `nbytes` and the rest."""
    first: list[memoryview] = []
    for place, view in enumerate(views):
        if view.nbytes >= nbytes:
            return [*first, view[:nbytes]], [view[nbytes:], *views[place + 1 :]]
        first.append(view)
        nbytes -= view.nbytes
    return first, []
