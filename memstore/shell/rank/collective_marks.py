"""A rank's marks of its collectives, in a small file for its host's holder: no call and no wait for any of them (R11).

The layout is in core/network/marks_layout.py; the holder reads it with `CollectiveMarksReader`
(holder/marks_reader.py).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from memstore.core.network.idle_profile import BUSY_MAX_S, Kind
from memstore.core.network.marks_layout import FILE_BYTES, PREFIX, RING
from memstore.core.wire.rank_messages import MarksMade

if TYPE_CHECKING:
    from memstore.shell.rank.holder_link import HolderLink

log = logging.getLogger("memstore")


class CollectiveMarks:
    """The rank's end. Any thread may mark; collectives may overlap."""

    def __init__(self, link: HolderLink) -> None:
        self._link = link
        self._lock = threading.RLock()  # a signal's handler may put
        self.has_iterations = False  # the loop marks them; else every put does
        self._depth = 0  # collectives under way
        self._count = 0
        self._busy_s = 0.0  # when the first of them began
        self._known: object = None  # the connection over which the holder was sent the file
        self._path: Path | None = None
        self._words = memoryview(bytearray(FILE_BYTES)).cast("Q")

    def begin(self) -> None:
        """Mark the begin of a collective."""
        with self._lock:
            now = time.monotonic()
            if now - self._busy_s > BUSY_MAX_S:  # what began then will never end: its group was given up
                self._depth = 0
            self._depth += 1
            if self._depth == 1:
                self._busy_s = now
                self._mark(Kind.BUSY)

    def end(self) -> None:
        """Mark the end of a collective."""
        with self._lock:
            self._depth = max(0, self._depth - 1)
            if not self._depth:
                self._mark(Kind.IDLE)

    def iteration(self) -> None:
        """Mark the begin of an iteration."""
        with self._lock:
            self._mark(Kind.ITERATION)

    def put(self) -> None:
        """Mark the end of a put, and of an iteration if collectives are marked and iterations are not."""
        if self._known is not None and not self.has_iterations:
            self.iteration()

    def _mark(self, kind: Kind) -> None:
        if self._known is not self._link.channel:
            self._publish()
        self._words[1 + self._count % RING] = time.monotonic_ns() << 2 | kind
        self._count += 1
        self._words[0] = self._count

    def _publish(self) -> None:
        """Make a file for the holder that serves now; without room for one, the marks reach no holder."""
        if self._path is not None:  # still there if its connection ended before the holder opened it
            with contextlib.suppress(OSError):
                self._path.unlink()
        self._known, self._count = self._link.channel, 0
        self._words = memoryview(bytearray(FILE_BYTES)).cast("Q")
        self._path = path = self._link.folder / f"{PREFIX}{secrets.token_hex(8)}"
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(file, 0, FILE_BYTES)
                self._words = memoryview(mmap.mmap(file, FILE_BYTES)).cast("Q")
            finally:
                os.close(file)
        except OSError as exc:
            log.warning("memstore: collectives are not marked, so copies travel beside them: %s", exc)
            with contextlib.suppress(OSError):
                path.unlink()
            return
        self._link.notify(MarksMade(file=path.name))
