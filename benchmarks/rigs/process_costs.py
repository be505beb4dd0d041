"""Processor seconds and memory of processes, from /proc."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the processor seconds, user and system, that these processes have used so far; 10 ms steps."""
    total = 0.0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) * TICK_S
    return total


def thread_seconds(pids: Iterable[int]) -> float:
    """Return the processor seconds of the threads that these processes have now, by the scheduler's nanoseconds.

    For what takes few ticks. A thread that has ended counts no more.
    """
    total = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                total += int((task / "schedstat").read_text(encoding="ascii").split()[0])
    return total / 1e9


def anonymous_bytes(pid: int) -> int:
    """Return the resident memory of a process that is its own: neither files nor the shared arena."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{pid}/status has no RssAnon: Linux 4.5 or later is needed")
