"""What the kernel counts of this host: errors of its memory and of its links, where they can be read (R41).

On a thread of its own: a driver that hangs holds up no heartbeat.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

EVERY_S = 10.0
SYSTEM = Path("/sys")
FILES: Mapping[str, tuple[str, ...]] = {
    "corrected_errors": ("devices/system/edac/mc/mc*/ce_count",),
    "uncorrected_errors": ("devices/system/edac/mc/mc*/ue_count",),
    "link_errors": (
        "class/net/*/statistics/rx_errors",
        "class/net/*/statistics/tx_errors",
        "class/infiniband/*/ports/*/counters/port_rcv_errors",
        "class/infiniband/*/ports/*/counters/symbol_error",
        "class/infiniband/*/ports/*/counters/link_downed",
    ),
}


class HardwareErrors:
    """The counts as they were read last; what cannot be read counts nothing."""

    def __init__(self, stopping: threading.Event, system: Path = SYSTEM) -> None:
        self._stopping, self._system = stopping, system
        self.counts: dict[str, int] = dict.fromkeys(FILES, 0)

    def run(self) -> None:
        """Read them again and again."""
        self.look()
        while not self._stopping.wait(EVERY_S):
            self.look()

    def look(self) -> None:
        """Read them now; they stay as they are while no file can be opened: counts that fell and rose would be news."""
        with contextlib.suppress(OSError):
            self.counts = {name: sum(map(_number, self._files(patterns))) for name, patterns in FILES.items()}

    def _files(self, patterns: Iterable[str]) -> list[Path]:
        return [path for pattern in patterns for path in self._system.glob(pattern)]


def _number(path: Path) -> int:
    try:
        return max(0, int(path.read_text(encoding="ascii")))
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return 0
