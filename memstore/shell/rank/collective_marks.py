"""A rank's mark of its collectives, 8 bytes in a file for its host's holder: no call and no wait for any (R11, D87)."""

from __future__ import annotations

import functools
import logging
import mmap
import os
import secrets
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from memstore.core.network.send_gate import MARK_BYTES, MARK_MAX_S, MARK_PREFIX
from memstore.core.wire.rank_messages import MarksMade

if TYPE_CHECKING:
    from memstore.shell.rank.holder_link import HolderLink

log = logging.getLogger("memstore")


class CollectiveMarks:
    """The rank's end. Any thread may mark; collectives may overlap."""

    def __init__(self, link: HolderLink) -> None:
        self._link = link
        self._lock = threading.RLock()  # a signal's handler may put
        self._depth = 0  # collectives under way
        self._began_ns = 0  # when the first of them began
        self._known: object = None  # the connection over which the holder was sent the file
        self._path: Path | None = None
        self._word = memoryview(bytearray(MARK_BYTES)).cast("Q")

    def begin(self) -> None:
        """Mark the begin of a collective."""
        with self._lock:
            now_ns = time.monotonic_ns()
            if now_ns - self._began_ns > MARK_MAX_S * 1e9:  # what began then will never end: its group was given up
                self._depth = 0
            self._depth += 1
            if self._depth == 1:
                self._began_ns = now_ns
                self._mark(now_ns)

    def end(self) -> None:
        """Mark the end of a collective."""
        with self._lock:
            self._depth = max(0, self._depth - 1)
            if not self._depth:
                self._mark(0)

    def _mark(self, began_ns: int) -> None:
        if self._known is not self._link.channel:
            self._publish()
        self._word[0] = began_ns

    def _publish(self) -> None:
        """Make a file for the holder that serves now; without space for one, the marks reach no holder."""
        if self._path is not None:  # still there if its connection ended before the holder opened it
            self._path.unlink(missing_ok=True)
        self._known, self._word = self._link.channel, memoryview(bytearray(MARK_BYTES)).cast("Q")
        self._path = self._link.folder / f"{MARK_PREFIX}{secrets.token_hex(8)}"
        try:
            with open(self._path, "xb+", 0, opener=functools.partial(os.open, mode=0o600)) as file:
                file.write(bytes(MARK_BYTES))
                self._word = memoryview(mmap.mmap(file.fileno(), MARK_BYTES)).cast("Q")
        except OSError as exc:
            log.warning("memstore: collectives are not marked, so copies travel beside them: %s", exc)
            self._path.unlink(missing_ok=True)
            return
        self._link.notify(MarksMade(file=self._path.name))
