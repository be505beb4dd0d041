"""For how long no holder has run on an arena, by a clock that only counts up: it shows an orphan (R5).

The file says at which moment of which boot a holder was there last. Nothing that is done to the wall clock makes an
arena old; time before this boot, and time in which the machine slept, does not count.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from memstore.shell.arena.folder import open_file
from memstore.shell.host.identity import read_boot_id

SEEN_NAME = "seen"
EVERY_S = 10.0
_WIDTH = 80


class IdleTime:
    """Read once at a holder's start, then kept up while it runs. The caller holds the arena's lock."""

    def __init__(self, folder: Path) -> None:
        self._fd = open_file(folder, SEEN_NAME, os.O_RDWR | os.O_CREAT)
        self._boot, self._written_s = read_boot_id(), 0.0
        self.idle_s = self._age_s(os.pread(self._fd, _WIDTH, 0).decode(errors="replace").split())
        self.mark()

    def _age_s(self, words: list[str]) -> float:
        """Return the time since a holder was there; the time since the boot if it was before that, 0 if unknown."""
        if len(words) != 2:
            return 0.0
        try:
            seen_s = float(words[1]) if words[0] == self._boot else 0.0
        except ValueError:
            return 0.0
        return max(0.0, time.monotonic() - seen_s)

    def keep(self) -> None:
        """Write again that a holder is here, now and then."""
        if time.monotonic() - self._written_s >= EVERY_S:
            self.mark()

    def mark(self) -> None:
        """Write that a holder is here now; in place, which needs no room."""
        self._written_s = time.monotonic()
        os.pwrite(self._fd, f"{self._boot} {self._written_s:.1f}".ljust(_WIDTH).encode(), 0)

    def close(self) -> None:
        """Write it for the last time."""
        self.mark()
        fd, self._fd = self._fd, -1  # a late caller must not write into another file of that number
        os.close(fd)
