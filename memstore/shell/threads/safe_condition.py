"""Waits and threads that an exception of a signal's handler cannot break, and a check for such an exception.

A handler runs between any two steps of Python in the main thread, and may raise there. threading.Condition is entered
by Python, so an exception in between leaves its lock held for ever: the threads of a link, or of a copy, would stand
still. A lock of C is acquired and released in one step each. A waiter looks again now and then, for a call to wake it
may have been interrupted.
"""

from __future__ import annotations

import _thread
import time
from collections.abc import Callable
from typing import Any

LOOK_S = 1.0  # the longest delay after an interrupted wake


def is_of_handler(exc: BaseException) -> bool:
    """Return whether a signal's handler raised it, so that the store must not swallow it.

    Of a handler the frame in which the signal came is both an argument and the caller. No other function is given its
    caller's frame.
    """
    step = exc.__traceback__
    while step is not None and step.tb_next is not None:
        frame, step = step.tb_frame, step.tb_next
        given = [item for value in step.tb_frame.f_locals.values() for item in _items(value)]
        if any(item is frame for item in given):
            return True
    return False


def _items(value: Any) -> tuple[Any, ...]:
    return value if type(value) is tuple else (value,)  # *args


class SafeCondition(_thread.RLock):  # type: ignore[misc]
    """A threading.Condition over an RLock of its own."""

    def __init__(self) -> None:
        self._waiting: list[Any] = []  # a held lock for each waiter

    def notify_all(self) -> None:
        """Wake all waiters; the caller holds the condition."""
        waiting, self._waiting = self._waiting, []
        for asleep in waiting:
            asleep.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Release it, sleep until woken, and acquire it again; False after the timeout."""
        asleep = _thread.allocate_lock()
        asleep.acquire()
        self._waiting.append(asleep)
        lock: Any = self
        held = 1, _thread.get_ident()
        try:
            held = lock._release_save()  # a handler can raise once this has released the lock, before `held` is set
            return asleep.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))
        finally:
            lock._acquire_restore(held)  # and once the lock is ours again

    def wait_for(self, is_so: Callable[[], Any], timeout_s: float | None = None) -> bool:
        """Wait until `is_so()` or the timeout; return whether it is so."""
        until_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while not is_so():
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return False
            self.wait(min(left_s, LOOK_S))
        return True


class SafeEvent:
    """A threading.Event."""

    def __init__(self) -> None:
        self._changed = SafeCondition()
        self._is_set = False

    def is_set(self) -> bool:
        """Return whether it is set; it stays so."""
        return self._is_set

    def set(self) -> None:
        """Set it, and wake all waiters."""
        self._is_set = True
        with self._changed:
            self._changed.notify_all()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is set, at most so long; return whether it is."""
        with self._changed:
            return self._changed.wait_for(self.is_set, timeout_s)


class SafeThread:
    """A daemon thread. The start of a threading.Thread waits for the new thread, and that wait can be broken."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._is_started = False
        self._one_run = _thread.allocate_lock()  # a start that broke off may be tried again: one of two threads works
        self._ended = SafeEvent()

    def start(self) -> None:
        """Start it, once. RuntimeError: no thread can be started."""
        if not self._is_started:
            _thread.start_new_thread(self._run, ())
            self._is_started = True

    def _run(self) -> None:
        if self._one_run.acquire(blocking=False):
            try:
                self._work()
            finally:
                self._ended.set()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until it has ended, at most so long; return whether it has, or never was started."""
        return not self._is_started or self._ended.wait(timeout_s)
