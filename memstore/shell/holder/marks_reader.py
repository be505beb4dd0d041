"""Reads the files in which this host's ranks mark their collectives (core/network/marks_layout.py)."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from memstore.core.network.idle_profile import IdleSpans, Kind
from memstore.core.network.marks_layout import PREFIX, RING
from memstore.errors import ProtocolError


class CollectiveMarksReader:
    """Reads one rank's file of marks."""

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
