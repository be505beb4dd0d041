"""Interpreter settings while a put blocks training or a get copies; they are lifted while the copy waits.

The cyclic collector is off: a plan of a thousand tensors makes ten thousand containers in a row, all of which die
when put returns; a get makes as many from a layout. The collector takes them for growth and looks at all objects of
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
from types import FrameType

TURN_S = 20e-6


class _Passes:
    """The copies under way in this process, of any thread: the first one sets, the last one leaves all as it was.

    A signal's handler may raise while one begins or ends. So each belongs to a call, and is over at the latest when its
    thread begins another and is not in the middle of that call any more.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a signal's handler may copy
        self.copying: dict[object, FrameType] = {}  # by pass, the call that it belongs to
        self._before: tuple[bool, float] | None = None  # None: nothing is set
        self.here = threading.local()  # of the calling thread

    @property
    def own(self) -> dict[object, FrameType]:
        """The passes of this thread, also while it waits."""
        known: dict[object, FrameType] = self.here.__dict__.setdefault("own", {})
        return known

    def begin(self, one: object, call: FrameType) -> None:
        """Begin a copy of this thread."""
        for over in [over for over, its_call in self.own.items() if not is_running(its_call)]:
            self.end(over)
        self.own[one] = self.copying[one] = call
        self.settle()

    def end(self, one: object) -> None:
        """End a copy."""
        self.copying.pop(one, None)
        self.own.pop(one, None)
        self.settle()

    def settle(self) -> None:
        """Apply the settings if copies are under way, else restore them."""
        with self.lock:
            if self.copying and self._before is None:
                self._before = gc.isenabled(), sys.getswitchinterval()
                gc.disable()
                sys.setswitchinterval(min(TURN_S, self._before[1]))
            elif not self.copying:
                self.restore()

    def restore(self) -> None:
        """Restore the earlier settings, except those that other code has changed meanwhile."""
        if self._before is None:
            return
        was_enabled, interval_s = self._before
        if was_enabled:
            gc.enable()
        if sys.getswitchinterval() < TURN_S * 1.01:
            sys.setswitchinterval(interval_s)
        self._before = None


def is_running(call: FrameType) -> bool:
    """Return whether this thread is in the middle of a call."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is not None


_passes = _Passes()


def _reset() -> None:
    """Reset the passes in a forked child, which has neither the other threads nor the lock's owner."""
    global _passes
    _passes.restore()
    _passes.lock = threading.RLock()
    _passes.copying.clear()
    _passes.own.clear()
    _passes = _Passes()


os.register_at_fork(after_in_child=_reset)


@contextlib.contextmanager
def copying() -> Iterator[None]:
    """Set the interpreter for a copy; any number of threads may, to any depth."""
    passes, one = _passes, object()
    try:
        passes.begin(one, sys._getframe(2))  # the frame of the caller
        yield
    finally:
        passes.end(one)


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Restore the settings while a copying thread waits, perhaps for minutes."""
    passes = _passes
    try:
        for one in passes.own:
            passes.copying.pop(one, None)
        passes.settle()
        yield
    finally:
        passes.copying.update(passes.own)
        passes.settle()
