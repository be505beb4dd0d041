"""A process beside each rank: it kills the rank once that is frozen, and says so, or when the rank has ended.

A rank is frozen if its beats stop for `hang_after_s` and hardly any of its threads runs, wants a core, or waits for a
disk meanwhile. Beats also stop on a starved host, or during one long call that holds the interpreter; but then some
thread runs or wants a core, and the rank is left alone. A watchdog that is frozen with its rank, or a host that is
frozen or cut off, is seen at the other end of the watchdog's connection (`lifelines.py`).

A script that imports the standard library only: it starts at once, and needs 10 MB.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

TICK_S = 0.25
BUSY_SHARE = 0.25
GOES_ON = "RDt"  # runs or wants a core; waits for a disk; is held by a debugger
BEAT, LAST_BEAT = b".", b"q"
ALIVE, GONE, FROZEN, BYE = b".\n", b"gone\n", b"frozen\n", b"bye\n"
ALIVE_S = 1.0  # between two words that the watchdog itself goes on
MAX_LINE_BYTES = 200
CONNECT_S = 0.5  # no look is made meanwhile
CONNECT_EVERY_S = 3.0  # after QUICK_TRIES
QUICK_TRIES = 10
PROBE_S = 1  # the shortest that the kernel takes


def is_frozen(looks: Sequence[bool], limit: int) -> bool:
    """Return whether a rank is frozen.

    Args:
        looks: By tick since its last beat, whether some thread of it went on or wanted to.
        limit: Ticks without a beat that a healthy rank may have.
    """
    recent = looks[-limit:]
    return len(recent) == limit and sum(recent) <= BUSY_SHARE * limit


def goes_on(pid: int) -> bool:
    """Return whether some thread of a process goes on, or would if it had a core, its disk, or its debugger let it."""
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread has ended
            if stat.read_text("ascii", "replace").rpartition(")")[2].split()[0] in GOES_ON:
                return True
    return False


def hello_line(run: str, rank: int, life: int) -> bytes:
    """Return the first line of a connection: which process it is of."""
    return f"{run} {rank} {life}\n".encode("ascii")


def probe(line: socket.socket, timeout_ms: int) -> None:
    """Let the kernel probe an idle connection, and end it once the other kernel has not answered for so long."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_S)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)


class Watchdog:
    """Watches the process that started it, until that ends or beats for the last time."""

    def __init__(self, pid: int, address: str, port: int, run: str, rank: int, life: int, hang_after_s: float) -> None:
        self._pid = pid
        self._to, self._rank = (address, port), rank
        self._hello = hello_line(run, rank, life)
        self._limit = max(2, round(hang_after_s / TICK_S))
        self._looks: list[bool] = []
        self._line: socket.socket | None = None
        self._try_s, self._tries = 0.0, 0
        self._alive_s = 0.0  # when it is to say next that it goes on

    def run(self) -> None:
        """Watch to the end."""
        while os.getppid() == self._pid:
            line = self._connected()
            if line is not None and time.monotonic() >= self._alive_s:
                self._alive_s = time.monotonic() + ALIVE_S
                self._send(line, ALIVE)
                line = self._line
            waited_for: list[int | socket.socket] = [0] if line is None else [0, line]
            ready, _, _ = select.select(waited_for, [], [], TICK_S)
            if line in ready:
                self._line = None  # nothing is ever sent this way: it is broken
            if 0 not in ready:
                if self._is_frozen():
                    return self._end_rank()
                continue
            beats = os.read(0, 4096)
            if beats.endswith(LAST_BEAT):
                return self._say(BYE)
            if not beats:
                break  # the process has ended, or is about to
            self._looks.clear()
        return self._say(GONE)

    def _is_frozen(self) -> bool:
        self._looks.append(goes_on(self._pid))
        return is_frozen(self._looks, self._limit) and os.getppid() == self._pid

    def _end_rank(self) -> None:
        """Say that the rank is frozen before it ends: of its end others may speak first, who do not know why."""
        silent_s = len(self._looks) * TICK_S
        sys.stderr.write(f"memstore: rank {self._rank} is frozen: no beat for {silent_s:g} s. It is killed\n")
        self._say(FROZEN)
        with contextlib.suppress(ProcessLookupError):
            if os.getppid() == self._pid:
                os.kill(self._pid, signal.SIGKILL)

    def _connected(self) -> socket.socket | None:
        """Return the connection to the process that replaces lost ranks; None if there is no way to it now."""
        if self._line is None and time.monotonic() >= self._try_s:
            self._tries += 1
            self._try_s = time.monotonic() + (CONNECT_S if self._tries < QUICK_TRIES else CONNECT_EVERY_S)
            with contextlib.suppress(OSError):
                line = socket.create_connection(self._to, timeout=CONNECT_S)
                probe(line, PROBE_S * 1000)  # sooner than the other end's: another connection comes in time
                line.sendall(self._hello)
                self._line, self._tries = line, 0
        return self._line

    def _say(self, word: bytes) -> None:
        self._try_s = 0.0
        line = self._connected()
        if line is not None:
            self._send(line, word)

    def _send(self, line: socket.socket, word: bytes) -> None:
        try:
            line.sendall(word)
        except OSError:  # no way to it: the end of the connection says as much, or another one is made
            line.close()
            self._line = None


def main(pid: str, address: str, port: str, run: str, rank: str, life: str, hang_after_s: str) -> None:
    """Watch the process that started this one; what its terminal sends is for it, not for its watchdog."""
    os.setsid()
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the rank's connections, which would outlive it here
    Watchdog(int(pid), address, int(port), run, int(rank), int(life), float(hang_after_s)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
