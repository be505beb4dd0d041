"""Results of other threads' futures; their errors are raised without the frames of those threads."""

from __future__ import annotations

import _thread
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

# -- safe condition -----------------------------------------------------------------------------------
# threading's condition and event, such that an exception of a signal's handler leaves no lock held.


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


# -- answers ------------------------------------------------------------------------------------------


T = TypeVar("T")


class Answer(Future[T]):
    """A future that stays usable for the answering thread after a signal's handler raised in a waiting one."""

    def __init__(self) -> None:
        super().__init__()
        self._condition: Any = SafeCondition()


def is_answered(future: Future[T], timeout_s: float) -> bool:
    """Wait for a future, at most so long; return whether it has an answer or an error."""
    with contextlib.suppress(FutureTimeout):
        future.exception(timeout_s)
    return future.done()


def answer_of(future: Future[T], timeout_s: float | None = None) -> T:
    """Return a future's result, or raise its error without the frames of other threads.

    Raises:
        concurrent.futures.TimeoutError: There is none within `timeout_s`.
    """
    error = future.exception(timeout_s)
    if error is not None:
        raise error.with_traceback(None)
    return future.result()


# -- pool work ----------------------------------------------------------------------------------------
# Waits for work of a thread pool that may be shut down meanwhile.


def await_ended(futures: Iterable[Future[Any]]) -> None:
    """Wait until each future has ended, or was cancelled."""
    for future in futures:
        with contextlib.suppress(CancelledError):  # it has not begun, and never will
            future.exception()


# -- own threads --------------------------------------------------------------------------------------
# Threads for each of several things that may hang, so that none waits behind another's.


class OwnThreads:
    """A pool for every key that has work; one without work has no thread."""

    def __init__(self, threads_count: int, name: str, begin: Callable[[], object] | None = None) -> None:
        """Give each key at most `threads_count` threads; each of them calls `begin` first."""
        self._threads_count, self._name, self._begin = threads_count, name, begin
        self._lock = threading.Lock()
        self._pools: dict[Hashable, tuple[ThreadPoolExecutor, int]] = {}  # with the count of unfinished work
        self._is_closed = False

    def submit(self, key: Hashable, work: Callable[..., Any], *arguments: Any) -> None:
        """Run work on a thread of this key, after the work submitted before."""
        with self._lock:
            if self._is_closed:
                return
            pool, count = self._pools.get(key) or (self._new_pool(), 0)
            self._pools[key] = pool, count + 1  # first: work is queued even if no new thread starts
            pool.submit(self._run, key, work, arguments)

    def close(self) -> None:
        """Begin nothing more; do not wait for work under way, which may hang."""
        with self._lock:
            self._is_closed = True
            for pool, _ in self._pools.values():
                pool.shutdown(wait=False, cancel_futures=True)

    def _new_pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._threads_count, self._name, self._begin)

    def _run(self, key: Hashable, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        try:
            work(*arguments)
        finally:
            with self._lock:
                pool, count = self._pools.pop(key)
                if count > 1:
                    self._pools[key] = pool, count - 1
                else:
                    pool.shutdown(wait=False)
