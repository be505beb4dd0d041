"""The file that says when a holder was last here; what it says is decided in `core/holder/idle_time.py`."""

from __future__ import annotations

import os
import time
from pathlib import Path

from memstore.core.holder import idle_time
from memstore.shell.arena.folder import open_file
from memstore.shell.host.identity import read_boot_id

SEEN_NAME = "seen"
_WIDTH = 80


class IdleTime:
    """Read once at a holder's start, then kept up while it runs. The caller holds the arena's lock."""

    def __init__(self, folder: Path) -> None:
        self._fd = open_file(folder, SEEN_NAME, os.O_RDWR | os.O_CREAT)
        self._boot, self._written_s = read_boot_id(), 0.0
        record = os.pread(self._fd, _WIDTH, 0).decode(errors="replace")
        self.idle_s = idle_time.idle_s(record, self._boot, time.monotonic())
        self.mark()

    def keep(self) -> None:
        """Write again that a holder is here, now and then."""
        if idle_time.is_due(self._written_s, time.monotonic()):
            self.mark()

    def mark(self) -> None:
        """Write that a holder is here now; in place, which needs no room."""
        self._written_s = time.monotonic()
        os.pwrite(self._fd, idle_time.record_of(self._boot, self._written_s).ljust(_WIDTH).encode(), 0)

    def close(self) -> None:
        """Write it for the last time."""
        self.mark()
        fd, self._fd = self._fd, -1  # a late caller must not write into another file of that number
        os.close(fd)
