"""A rank's marks for its host's holder, in a small file that both have open: no call and no wait for any of them (R11).

The rank maps the file and writes; the holder reads it with pread, so that a rank that cuts the file short harms nobody.

    u64 marks ever made | ring of RING u64: nanoseconds of the host's monotonic clock << 2 | kind

Two stores may become visible in the other order (not on x86): the holder waits for a mark that is older than the one
before it. The file has no name any more once the holder has opened it; for a holder that comes back there is a new one.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
import stat
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from memstore.core.network.idle_profile import BUSY_MAX_S, IdleSpans, Kind
from memstore.errors import ProtocolError

if TYPE_CHECKING:
    from memstore.shell.rank.holder_link import RankLink

log = logging.getLogger("memstore")
RING = 8191  # marks: some iterations of a model with a thousand collectives
FILE_BYTES = 8 * (RING + 1)
PREFIX = "marks-"


class Marks:
    """The rank's end. Any thread may mark; collectives may overlap."""

    def __init__(self, link: RankLink) -> None:
        self._link = link
        self._lock = threading.RLock()  # a signal's handler may put
        self.has_iterations = False  # somebody marks them; else every put does
        self._depth = 0  # collectives under way
        self._count = 0
        self._busy_s = 0.0  # when the first of them began
        self._known: object = None  # the connection over which the holder heard of the file
        self._words = memoryview(bytearray(FILE_BYTES)).cast("Q")

    def begin(self) -> None:
        """A collective begins."""
        with self._lock:
            now = time.monotonic()
            if now - self._busy_s > BUSY_MAX_S:  # what began then will never end: its group was given up
                self._depth = 0
            self._depth += 1
            if self._depth == 1:
                self._busy_s = now
                self._mark(Kind.BUSY)

    def end(self) -> None:
        """A collective has ended."""
        with self._lock:
            self._depth = max(0, self._depth - 1)
            if not self._depth:
                self._mark(Kind.IDLE)

    def iteration(self) -> None:
        """The next iteration begins."""
        with self._lock:
            self._mark(Kind.ITERATION)

    def put(self) -> None:
        """A put has ended, and an iteration, if collectives are marked and iterations are not."""
        if self._known is not None and not self.has_iterations:
            self.iteration()

    def _mark(self, kind: Kind) -> None:
        if self._known is not self._link.channel:
            self._publish()
        self._words[1 + self._count % RING] = time.monotonic_ns() << 2 | kind
        self._count += 1
        self._words[0] = self._count

    def _publish(self) -> None:
        """Make a file for the holder that serves now; without room for one, nobody hears the marks."""
        self._known, self._count = self._link.channel, 0
        self._words = memoryview(bytearray(FILE_BYTES)).cast("Q")
        path = self._link.folder / f"{PREFIX}{secrets.token_hex(8)}"
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
        self._link.notify({"k": "marks", "file": path.name})


class MarkReader:
    """The holder's end of one rank's file."""

    def __init__(self, folder: Path, name: str) -> None:
        if not name.startswith(PREFIX) or "/" in name:
            raise ProtocolError(f"{name[:80]!r} is no file of marks")
        self.spans = IdleSpans()
        self._seen, self._last_ns = 0, 0
        try:
            self._file = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as exc:
            raise ProtocolError(f"the marks {name!r} cannot be opened: {exc}") from exc
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            self.close()
            raise ProtocolError(f"{name!r} is no file of marks")
        os.unlink(folder / name)

    def close(self) -> None:
        """Let the file go."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def read(self) -> None:
        """Take the marks made since the last read."""
        count = self._words(0, 1)[0]
        if count - self._seen >= RING:  # overwritten before they were read, or while
            self._seen = count - RING // 2
            self.spans.lose()
        while self._seen < count:
            place = self._seen % RING
            for word in self._words(1 + place, min(count - self._seen, RING - place)):
                at_ns, kind = word >> 2, word & 3
                if at_ns < self._last_ns or not kind:
                    return
                self._seen, self._last_ns = self._seen + 1, at_ns
                self.spans.mark(Kind(kind), at_ns / 1e9)

    def _words(self, first: int, count: int) -> memoryview:
        data = os.pread(self._file, 8 * count, 8 * first)
        if len(data) != 8 * count:
            raise ProtocolError(f"a file of marks ends after {8 * first + len(data)} bytes")
        return memoryview(data).cast("Q")


def remove_marks(folder: Path) -> None:
    """Remove files that ranks made for a holder that never opened them."""
    for path in folder.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            path.unlink()
