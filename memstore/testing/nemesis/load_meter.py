"""A meter of the machine's load: a process that sleeps 20 ms again and again and records how much it overslept.

A bound on a stall grows by what was measured while it lasted, so that load alone breaks no promise.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import deque

TICK_S = 0.02
NOTED_FROM_S = 0.01
KEPT = 100_000
_PROGRAM = f"""
import sys, time
print(0, 0, flush=True)
while True:
    began = time.monotonic()
    time.sleep({TICK_S})
    ended = time.monotonic()
    if ended - began - {TICK_S} > {NOTED_FROM_S}:
        print(began, ended - began - {TICK_S}, flush=True)
    if sys.stdin in __import__("select").select([sys.stdin], [], [], 0)[0]:
        break
"""


class LoadMeter:
    """The meter, a context manager; `late_s` sums what was overslept between two moments of the monotonic clock."""

    def __enter__(self) -> LoadMeter:
        self._rows: deque[tuple[float, float]] = deque(maxlen=KEPT)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it prints a line as soon as it runs
        self._thread = threading.Thread(target=self._read, name="nemesis-load", daemon=True)
        self._thread.start()
        self._began_s = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(10)
        self._thread.join(10)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            began, late = line.split()
            self._rows.append((float(began), float(late)))

    def late_s(self, from_s: float, to_s: float) -> float:
        """Return the seconds overslept in all between two moments."""
        return sum(late for began, late in list(self._rows) if from_s - late - TICK_S <= began <= to_s)

    def share(self) -> float:
        """Return the share of the time since the start that was overslept."""
        return sum(late for _, late in list(self._rows)) / max(1e-9, time.monotonic() - self._began_s)
