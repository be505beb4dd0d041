"""Nice values of this process's threads beside those of the ranks that it serves.

A thread that moves or digests bulk bytes stands a little behind the others, so that training has the cores first where
they are short, and no further: the further behind, the later a put is committed (benchmarks/notes/put.md).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
from pathlib import Path

BULK_NICE = 2
_AUTOGROUPS = Path("/proc/sys/kernel/sched_autogroup_enabled")
_CGROUPS = Path("/proc/self/cgroup")
_WEIGHT = Path("/sys/fs/cgroup/cpu.weight")  # the root of cgroup v2 has none


def lower_thread_priority() -> None:
    """Put the calling thread BULK_NICE behind its process: it moves or digests bulk bytes.

    Not for threads of heartbeats or of a rank's calls.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, own_nice() + BULK_NICE))


def own_nice() -> int:
    """Return the nice value of this process's first thread."""
    return os.getpriority(os.PRIO_PROCESS, os.getpid())


class RankPriority:
    """Keeps a process level with its ranks where they stand before it, or says that the system forbids it.

    A rank at less than 0 counts as one at 0.
    """

    def __init__(self) -> None:
        self.behind = ""  # how far it has to stay behind, for people
        self._before: int | None = None  # its nice value before it came forward

    def follow(self, pids: Iterable[int]) -> None:
        """Bring all threads forward to the lowest nice value of these processes, or back as soon as none is so low."""
        ranks = [(max(0, nice), pid) for pid in pids if (nice := _nice_of(pid)) is not None]
        own, self.behind = own_nice(), ""
        before = own if self._before is None else self._before
        nice, pid = min(ranks, default=(before, 0))
        wanted = min(before, nice)
        if wanted == before and self._before is None:
            return
        try:
            _move(wanted)  # at every look while it is forward: threads may have been started meanwhile
            self._before = before if wanted < before else None
        except OSError:
            if own > nice + BULK_NICE and _counts_beside(pid):
                self.behind = f"nice {own}, a rank (process {pid}) nice {nice}"


def _nice_of(pid: int) -> int | None:
    try:
        return os.getpriority(os.PRIO_PROCESS, pid)
    except OSError:  # it has ended
        return None


def _move(wanted: int) -> None:
    """Set the nice value of each thread that has another one. OSError: the system forbids lowering it."""
    own = own_nice()
    tasks = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    for task in sorted(tasks, key=lambda each: each == os.getpid()):  # the first thread last: it stands for all
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            nice = os.getpriority(os.PRIO_PROCESS, task)
            # Also one that was started by a thread which had not moved yet: it comes with the next look.
            target = min(19, wanted + (BULK_NICE if nice > own else 0))
            if nice != target:
                os.setpriority(os.PRIO_PROCESS, task, target)


def _counts_beside(pid: int) -> bool:
    """Return whether the nice values of this process and another one say which goes first.

    In the root cgroup, with autogroups, they do so only in one session. A container's cgroup has no autogroups.
    """
    try:
        if os.getsid(pid) == os.getsid(0) or _AUTOGROUPS.read_text().strip() != "1" or _WEIGHT.exists():
            return True
        groups = [line.split(":", 2) for line in _CGROUPS.read_text().splitlines()]
    except OSError:  # the process has ended, or the kernel has no autogroups
        return True
    return any(path != "/" for number, names, path in groups if number == "0" or "cpu" in names.split(","))
