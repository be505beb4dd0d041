"""What a piece of work takes: seconds, and processor seconds of all processes that take part in it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from benchmarks.report.harness import Took

# -- process costs ------------------------------------------------------------------------------------
# Processor seconds and memory of processes.


LOOK_S, IDLE_SHARE = 0.03, 0.1  # heartbeats use less of it
SCHEDULED = 2  # the kernel's CPUCLOCK_SCHED: what the scheduler counted, of all threads of a process


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the processor seconds, user and system, of these processes so far, threads that have ended included."""
    return sum(time.clock_gettime(~pid << 3 | SCHEDULED) for pid in pids)


def until_idle(pids: Iterable[int], within_s: float = 5.0) -> None:
    """Wait until these processes have used next to no processor time for a while; RuntimeError if they go on and on."""
    watched, deadline_s = list(pids), time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        before_s = cpu_seconds(watched)
        time.sleep(LOOK_S)
        if cpu_seconds(watched) - before_s < IDLE_SHARE * LOOK_S:
            return
    raise RuntimeError(f"processes {watched} were not idle within {within_s:g} s")


def descendants(pid: int) -> list[int]:
    """Return the processes that a process started, and those that these started, as far as they run."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        parents.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, left = [], [pid]
    while left:
        children = parents.get(left.pop(), [])
        found += children
        left += children
    return found


def anonymous_bytes(pid: int) -> int:
    """Return the resident memory of a process that is its own: neither files nor the shared arena."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{pid}/status has no RssAnon: Linux 4.5 or later is needed")


def private_bytes(pid: int) -> int:
    """Return the memory that a process shares with no other (its USS), without files in /dev/shm such as its arena."""
    found, is_arena = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="ascii", errors="replace").splitlines():
        key, *values = line.split()
        if key in ("Private_Clean:", "Private_Dirty:"):
            found += 0 if is_arena else int(values[0]) * 1024
        elif not key.endswith(":"):  # the next mapping
            is_arena = "/dev/shm/" in line
    return found


# -- stopwatch ----------------------------------------------------------------------------------------


Done = TypeVar("Done")


def timed(work: Callable[[], Done], pids: Iterable[int] = ()) -> tuple[Took, Done]:
    """Do some work; return what it took, of this process and of the other ones named, and what it returned."""
    counted = (os.getpid(), *pids)
    used_s, started_s = cpu_seconds(counted), time.perf_counter()
    done = work()
    took_s = time.perf_counter() - started_s
    return Took(took_s, cpu_seconds(counted) - used_s), done
