"""Python's cyclic collector stands still while a put blocks training, or a get copies.

A plan of a thousand tensors makes ten thousand containers in a row, all of which die when put returns; a get makes as
many from a layout. To the collector they look like growth: it looks at all objects of the process every few puts,
100 ms for what torch alone imports, in the middle of the stall. By the time it may run again they are gone.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator


class _Passes(threading.local):
    """Passes of all threads for which the collector stands still; `depth` is of the thread that asks."""

    lock = threading.Lock()
    count = 0
    was_enabled = False

    def __init__(self) -> None:
        self.depth = 0

    @classmethod
    def begin(cls) -> None:
        """One pass more; the first finds out whether somebody else had switched the collector off."""
        with cls.lock:
            if not cls.count:
                cls.was_enabled = gc.isenabled()
                gc.disable()
            cls.count += 1

    @classmethod
    def end(cls) -> None:
        """The last one leaves the collector as the first found it."""
        with cls.lock:
            cls.count -= 1
            if not cls.count and cls.was_enabled:
                gc.enable()

    @classmethod
    def forget(cls) -> None:
        """In a forked child the passes of other threads will never end."""
        cls.lock = threading.Lock()
        if cls.count and cls.was_enabled:
            gc.enable()
        cls.count = 0


_passes = _Passes()
os.register_at_fork(after_in_child=_Passes.forget)


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Hold cyclic collections of the whole process, unless they are off already, which is left so."""
    _passes.begin()
    _passes.depth += 1
    try:
        yield
    finally:
        _passes.depth -= 1
        _passes.end()


@contextlib.contextmanager
def collector_running() -> Iterator[None]:
    """Within a pass of this thread: it waits for others now, perhaps for minutes, and holds nothing meanwhile."""
    depth = _passes.depth
    for _ in range(depth):
        _passes.end()
    try:
        yield
    finally:
        for _ in range(depth):
            _passes.begin()
