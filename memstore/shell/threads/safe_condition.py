"""threading's condition and event, such that an exception of a signal's handler leaves no lock held.

A handler runs in the main thread between two calls of Python, and may raise there. threading.Condition is entered by a
function of Python: an exception within it leaves the lock held, and the threads of a link or a copy stand still for
ever. An RLock is entered and left by C in one step each. A handler may still cut a `notify_all` of the main thread
short: `wait_for` looks again each LOOK_S.

Threads that a verb starts are started by `_thread.start_new_thread`: Thread.start() waits for an Event of the new one.
"""

from __future__ import annotations

import _thread
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

LOOK_S = 1.0


class SafeCondition(_thread.RLock, threading.Condition):  # type: ignore[misc]
    """A threading.Condition that is its own RLock."""

    def __init__(self) -> None:
        self._waiters: deque[Any] = deque()

    def wait(self, timeout: float | None = None) -> bool:
        """Release it, sleep until woken, and acquire it again; False after the timeout."""
        lock: Any = self
        try:
            return threading.Condition.wait(lock, timeout)
        finally:
            if not lock._is_owned():  # a handler raised once it was released, before that was noted
                lock._acquire_restore((1, _thread.get_ident()))

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """Wait until `predicate()` or the timeout; return whether it is so."""
        until_s = float("inf") if timeout is None else time.monotonic() + timeout
        while not (is_so := bool(predicate())) and (left_s := until_s - time.monotonic()) > 0:
            self.wait(min(left_s, LOOK_S))
        return is_so


class SafeEvent(threading.Event):
    """A threading.Event."""

    def __init__(self) -> None:
        self._cond: Any = SafeCondition()
        self._flag = False
