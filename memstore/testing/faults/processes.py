"""Signals to processes, and the checks that they took effect.

A process is named by pid and start time, so that a signal never hits a later process with the same pid. If a signal did
not take effect, the check raises a DrillError: recovery from nothing proves nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from memstore.errors import DrillError
from memstore.shell.arena.lock import is_alive, process_start_time

GONE_S = 20.0
POLL_S = 0.01

Process = tuple[int, int]  # pid and start time
Self = TypeVar("Self", bound="Started")


class Started:
    """What starts processes: a context manager that leaves nothing behind."""

    def __enter__(self: Self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start everything, and wait until it serves."""
        raise NotImplementedError

    def stop(self) -> None:
        """Kill every process and remove what it made; also after a start that failed."""
        raise NotImplementedError


def process_of(pid: int) -> Process:
    """Return a live process with its start time; raise DrillError if it is gone."""
    start = process_start_time(pid)
    if start is None:
        raise DrillError(f"pid {pid} is gone already")
    return pid, start


def with_start_times(pids: Iterable[int]) -> list[Process]:
    """Return those of the processes that live, each with its start time."""
    return [(pid, start) for pid in pids if (start := process_start_time(pid)) is not None]


def descendants(roots: Iterable[int]) -> list[int]:
    """Return the given pids and every process below them, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, IndexError, ValueError):
            children.setdefault(int(_stat(int(entry))[1]), []).append(int(entry))
    found, todo = [], list(roots)
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo.extend(children.get(pid, ()))
    return found


def raylet_of(pids: Iterable[int], host: str) -> Process:
    """Return the raylet among the processes of a host; raise DrillError if there is none."""
    for pid, start in with_start_times(pids):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == "raylet":
                return pid, start
    raise DrillError(f"no raylet runs on {host}")


def process_state(pid: int) -> str | None:
    """Return the state letter of a process in /proc, such as R, S or T; None if the process is gone."""
    try:
        return _stat(pid)[0]
    except (OSError, IndexError):
        return None


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def kill(processes: Iterable[Process]) -> int:
    """Send SIGKILL to the processes that still run; return how many did."""
    return sum(send(process, signal.SIGKILL) for process in processes)


def send(process: Process, sig: signal.Signals) -> bool:
    """Send a signal; return False if the process is gone."""
    with contextlib.suppress(ProcessLookupError):
        if is_alive(*process):
            os.kill(process[0], sig)
            return True
    return False


def wait_gone(processes: Iterable[Process], timeout_s: float = GONE_S) -> int:
    """Wait until all processes are gone; return how many. Raise DrillError if one still runs after `timeout_s`."""
    wanted, deadline_s = list(processes), time.monotonic() + timeout_s
    while left := [pid for pid, start in wanted if is_alive(pid, start)]:
        if time.monotonic() > deadline_s:
            raise DrillError(f"pids {left[:10]} still run {timeout_s:g} s after SIGKILL: the fault did not take effect")
        time.sleep(POLL_S)
    return len(wanted)


def freeze(process: Process) -> None:
    """Stop a process with SIGSTOP; raise DrillError if it is gone."""
    if not send(process, signal.SIGSTOP):
        raise DrillError(f"pid {process[0]} was gone before it was frozen")


def wait_frozen(process: Process, timeout_s: float = GONE_S) -> None:
    """Wait until a process is stopped; raise DrillError if it runs on or is gone."""
    deadline_s = time.monotonic() + timeout_s
    while (state := process_state(process[0])) != "T" or not is_alive(*process):
        if time.monotonic() > deadline_s or state is None:
            raise DrillError(f"pid {process[0]} is in state {state} after SIGSTOP: the fault did not take effect")
        time.sleep(POLL_S)


def thaw(process: Process) -> bool:
    """Let a frozen process go on (SIGCONT); return False if it is gone, because its successor has killed it (R2)."""
    return send(process, signal.SIGCONT)


def freeze_in_put(process: Process, mark: str, timeout_s: float = GONE_S) -> int:
    """Stop a rank while one of its puts is under way, as its mark file shows; return the step of that put.

    The mark is read after the process has stopped; so it cannot change before the process is killed.

    Raises:
        DrillError: the rank was between two puts each time it was stopped.
    """

    def step() -> int | None:
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int(Path(mark).read_text())
        return None

    return _freeze_when(process, step, "inside a put", timeout_s)


def freeze_in_persist(process: Process, folder: str, timeout_s: float = GONE_S) -> int:
    """Stop the controller while the newest durable step of a job has parts but no marker; return the step.

    Only the controller orders the marker; so no marker can appear between the look and the kill.

    Raises:
        DrillError: no step was half written any time the controller was stopped.
    """

    def step() -> int | None:
        found = [path for path in Path(folder).glob("*/*") if path.name.isdigit() and path.is_dir()]
        newest = max(found, key=lambda path: (int(path.parent.name), int(path.name)), default=None)
        names = {path.name for path in newest.iterdir()} if newest is not None else set()
        is_half = "marker" not in names and any(name.startswith("rank-") for name in names)
        return int(newest.name) if newest is not None and is_half else None

    return _freeze_when(process, step, "with a durable step half written", timeout_s)


def _freeze_when(process: Process, step: Callable[[], int | None], when: str, timeout_s: float) -> int:
    """Stop and continue a process until it is stopped at the right moment; leave it stopped."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        freeze(process)
        wait_frozen(process)
        if (found := step()) is not None:
            return found
        thaw(process)
        time.sleep(POLL_S / 5)
    raise DrillError(f"pid {process[0]} was never met {when} in {timeout_s:g} s: the fault did not take effect")


def remove_mark(mark: str) -> None:
    """Remove the file in which a rank marks that a put is under way."""
    Path(mark).unlink(missing_ok=True)


def memory_available() -> int:
    """Return how many bytes the processes of this machine can still take: the kernel's MemAvailable."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise DrillError("/proc/meminfo names no MemAvailable")
