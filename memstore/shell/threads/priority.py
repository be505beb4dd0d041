"""Nice values of this process's threads beside those of the ranks that it serves.

A thread that moves or digests bulk bytes stands a little behind the others, so that training has the cores first where
they are short, and no further: at 10 behind, a put beside busy cores took 11 times as long. Ray starts holders at 15;
beside a rank at 0 that is 15 behind.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
from pathlib import Path

BULK_NICE = 2
_AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")


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
    """Keeps a process's threads from standing far behind the ranks, or says why it cannot."""

    def __init__(self) -> None:
        self.behind = ""  # what forbids it, for people

    def follow(self, pids: Iterable[int]) -> None:
        """Raise the priority of all threads to that of the first of these processes; which only a few systems allow."""
        own, behind = own_nice(), ""
        ahead = [(nice, pid) for pid in pids if (nice := _nice_beside(pid)) is not None and nice < own]
        if ahead:
            nice, pid = min(ahead)
            if not _raise_all(own - nice):
                behind = f"nice {own}, a rank (process {pid}) nice {nice}"
        self.behind = behind


def _nice_beside(pid: int) -> int | None:
    """Return a process's nice value; None if it has ended, or if it does not count beside this process's."""
    try:
        # With autogroups nice values count only among the processes of one session.
        if os.getsid(pid) != os.getsid(0) and _AUTOGROUP.exists() and _AUTOGROUP.read_text().strip() == "1":
            return None
        return os.getpriority(os.PRIO_PROCESS, pid)
    except OSError:
        return None


def _raise_all(steps: int) -> bool:
    """Lower the nice values of all threads; False if the system forbids it."""
    tasks = sorted((int(task.name) for task in Path("/proc/self/task").iterdir()), key=lambda task: task == os.getpid())
    for task in tasks:  # the first thread last: it says how far the process is behind
        try:
            os.setpriority(os.PRIO_PROCESS, task, os.getpriority(os.PRIO_PROCESS, task) - steps)
        except ProcessLookupError:
            continue  # it has ended
        except OSError:
            return False
    return True
