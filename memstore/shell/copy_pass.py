"""How the interpreter is set while a put blocks training or a get copies; whoever waits in between lifts all of it.

The cyclic collector stands still: a plan of a thousand tensors makes ten thousand containers in a row, all of which die
when put returns; a get makes as many from a layout. To the collector they look like growth: it looks at all objects of
the process every few puts, 100 ms for what torch alone imports. By the time it may run again they are gone.

Threads take turns every 20 microseconds, not every 5 ms: a copy asks for the interpreter's lock after every move, and
beside one thread that runs Python alone (a tokenizer, a logger) it waits a switch interval each time: a put of 1 GiB
took 800 ms where it takes 55 alone. With short turns the other thread gives way at once, and loses no more than what
the copy's own few instructions take.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Iterator

TURN_S = 20e-6


class _Passes:
    """The copies under way in this process, of any thread: the first one sets, the last one leaves all as it was."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a signal's handler may copy
        self._count = 0
        self._before = True, 0.0
        self.here = threading.local()  # depth: passes of the thread that asks

    def begin(self) -> None:
        with self.lock:
            self._count += 1  # first, so that a signal's handler in between finds nothing to set
            if self._count == 1:
                self._before = gc.isenabled(), sys.getswitchinterval()
                gc.disable()
                sys.setswitchinterval(min(TURN_S, self._before[1]))

    def end(self) -> None:
        with self.lock:
            if self._count == 1:
                self.restore()
            self._count -= 1

    def restore(self) -> None:
        """Set again what was; what somebody else has set meanwhile stays."""
        was_enabled, interval_s = self._before
        if self._count and was_enabled:
            gc.enable()
        if self._count and sys.getswitchinterval() < TURN_S * 1.01:
            sys.setswitchinterval(interval_s)


_passes = _Passes()


def _begin_anew() -> None:
    """A forked child has none of the other threads, nor whoever held the lock; its own pass ends with the old ones."""
    global _passes
    _passes.restore()
    _passes.lock = threading.RLock()
    _passes = _Passes()


os.register_at_fork(after_in_child=_begin_anew)


@contextlib.contextmanager
def copying() -> Iterator[None]:
    """Set the interpreter for a copy; any number of threads may, to any depth."""
    passes = _passes
    passes.begin()
    passes.here.depth = getattr(passes.here, "depth", 0) + 1
    try:
        yield
    finally:
        passes.here.depth -= 1
        passes.end()


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Within a pass of this thread: it copies nothing now and waits, perhaps for minutes, with all as it was before."""
    passes = _passes
    depth = getattr(passes.here, "depth", 0)
    for _ in range(depth):
        passes.end()
    try:
        yield
    finally:
        for _ in range(depth):
            passes.begin()
