"""Python threads take turns every 20 microseconds, not every 5 ms, while a copy blocks training.

A copy asks for the interpreter's lock after every move. Beside one thread that runs Python alone (a tokenizer, a
logger) it waits a switch interval each time: a put of 1 GiB took 800 ms where it takes 55 alone. With short turns the
other thread gives way at once, and loses no more than what the copy's own few instructions take.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

TURN_S = 20e-6


class _Turns:
    """The interval of before, for as long as somebody holds the short one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders_count = 0
        self._before_s = 0.0

    def hold(self) -> None:
        with self._lock:
            if self._holders_count == 0:
                self._before_s = sys.getswitchinterval()
                sys.setswitchinterval(min(TURN_S, self._before_s))
            self._holders_count += 1

    def let_go(self) -> None:
        with self._lock:
            self._holders_count -= 1
            if self._holders_count == 0 and sys.getswitchinterval() < TURN_S * 1.01:  # else somebody set it meanwhile
                sys.setswitchinterval(self._before_s)

    def forget(self) -> None:
        """A forked child has none of the threads that held it, nor whoever held the lock."""
        self._lock = threading.Lock()
        if self._holders_count:
            self._holders_count = 0
            sys.setswitchinterval(self._before_s)


_turns = _Turns()
_here = threading.local()  # depth: holds of this thread
os.register_at_fork(after_in_child=_turns.forget)


@contextlib.contextmanager
def quick_turns() -> Iterator[None]:
    """Hold short turns for the whole process; any number of threads may. What the interval was is set again."""
    _turns.hold()
    _here.depth = getattr(_here, "depth", 0) + 1
    try:
        yield
    finally:
        _here.depth -= 1
        _turns.let_go()


@contextlib.contextmanager
def usual_turns() -> Iterator[None]:
    """Within a hold of this thread: it copies nothing now and waits, perhaps for minutes."""
    depth = getattr(_here, "depth", 0)
    for _ in range(depth):
        _turns.let_go()
    try:
        yield
    finally:
        for _ in range(depth):
            _turns.hold()
