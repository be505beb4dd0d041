"""Reads the marks of this host's ranks and lets bytes of copies out between them (core/send_gate.py, D87)."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from memstore.core.send_gate import LOOK_S, MARK_BYTES, MARK_PREFIX, PIECE_S, Order, Sending, is_held
from memstore.errors import ProtocolError
from memstore.shell.net.channel import Flight
from memstore.shell.peer.outgoing_shard import OutgoingReplica

log = logging.getLogger("memstore")
Pace = Callable[[], contextlib.AbstractContextManager[None]]


class SendGate:
    """The marks of this host's ranks and the newest puts of each; any thread may use it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, int] = {}  # of marks, by the rank's nonce
        self._newest: dict[tuple[str, int], Order] = {}  # by job and rank
        self._lock = threading.Lock()
        self.spilled_bytes = 0  # sent beside collectives, or regardless of them
        for path in folder.glob(f"{MARK_PREFIX}*"):  # of ranks whose holder never opened them
            path.unlink(missing_ok=True)

    def watch(self, nonce: str, name: str) -> None:
        """Look at a rank's mark from now on; one that cannot be opened is ignored, with a warning."""
        try:
            file = _opened(self._folder, name)
        except (OSError, ProtocolError) as exc:
            log.warning("memstore: marks of rank process %s are ignored: %s", nonce, exc)
            return
        with self._lock:
            self._drop(nonce)
            self._files[nonce] = file

    def forget(self, nonce: str) -> None:
        """Forget the mark of a rank whose link has ended."""
        with self._lock:
            self._drop(nonce)

    def release(self, job: str, rank: int, order: Order) -> None:
        """Stop holding back copies of a rank's older puts: a newer put begins or waits for room (R13)."""
        with self._lock:
            self._newest[job, rank] = max(self._newest.get((job, rank), order), order)

    def sending(self, shipment: OutgoingReplica) -> PushGate | None:
        """Return the gate for one push of a put; None if no rank of this host has a mark."""
        if not self._files:
            return None
        shard = shipment.shard
        return PushGate(self, Sending((shard.job, shard.rank), (shard.attempt, shard.step), time.monotonic()))

    def allow(self, sending: Sending, asked: int, flight: Callable[[], Flight], frame_s: float) -> tuple[int, float]:
        """Return how many bytes may go now, and if none, when to ask again."""
        with self._lock:
            now, newest = time.monotonic(), self._newest.get(sending.owner, sending.order)
            held = is_held(now, sending, newest, self._marks_s(), frame_s)
            if held is None and self._files:
                self.spilled_bytes += asked
            if held is None or not self._files:
                return asked, 0.0
        return (0, PIECE_S) if held else (sending.piece(time.monotonic(), asked, *flight()), LOOK_S)

    def _marks_s(self) -> list[float]:
        began_s = []
        for nonce, file in list(self._files.items()):
            data = os.pread(file, MARK_BYTES, 0)
            if len(data) != MARK_BYTES:
                log.warning("memstore: marks of rank process %s are ignored: its file was cut short", nonce)
                self._drop(nonce)
            elif any(data):
                began_s.append(int.from_bytes(data, "little") / 1e9)
        return began_s

    def _drop(self, nonce: str) -> None:
        if nonce in self._files:
            os.close(self._files.pop(nonce))


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
        """Cut a frame into parts, each given when it may go; ends early if `closed` is set."""
        began_s = time.monotonic()
        for view in views:
            sent = 0
            while sent < view.nbytes and not closed.is_set():
                asked = view.nbytes - sent
                nbytes, wait_s = self._gate.allow(self._sending, asked, flight, time.monotonic() - began_s)
                if nbytes:
                    with self._pace():
                        yield [view[sent : sent + nbytes]]
                    sent += nbytes
                else:
                    closed.wait(wait_s)


def _opened(folder: Path, name: str) -> int:
    """Open a mark, which no process finds by its name any more; a rank may cut it short, so it is not mapped."""
    if not name.startswith(MARK_PREFIX) or "/" in name:
        raise ProtocolError(f"{name[:80]!r} is no file of marks")
    file = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise ProtocolError(f"{name!r} is no file of marks")
    os.unlink(folder / name)
    return file
