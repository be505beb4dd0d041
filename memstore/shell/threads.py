"""Priority of threads, waits and answers between threads, safe against exceptions of signal handlers; slow work logged.

A handler may raise between any two steps of the main thread; such an exception cannot tear the condition and the event
here. All rooms of the shell may use it; it imports none.
"""

from __future__ import annotations

import _thread
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any, TypeVar

from memstore.core.cluster.text import size_text

log = logging.getLogger("memstore")


class ProgressLog:
    """Says in the log every PERIOD_S how far something is that several threads may do; of short work it says nothing.

    Training logs have no bars: this is for what `rich` draws on a terminal (cli/output.py).
    """

    PERIOD_S = 10.0

    def __init__(self, words: str, total_bytes: int) -> None:
        self._words, self.total_bytes, self._next_s = words, total_bytes, time.monotonic() + self.PERIOD_S
        self._done_bytes: dict[int, int] = {}  # by thread: without a lock, which a signal's handler might leave held

    def add(self, nbytes: int) -> None:
        """Count more that is done."""
        me = threading.get_ident()
        self._done_bytes[me] = self._done_bytes.get(me, 0) + nbytes
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + self.PERIOD_S
            done_bytes = sum([*self._done_bytes.values()])
            log.info("memstore %s: %s of %s", self._words, size_text(done_bytes), size_text(self.total_bytes))


# -- priority -----------------------------------------------------------------------------------------
# Nice values of this process's threads beside those of the ranks that it serves.
#
# A thread that moves or digests bulk bytes stands a little behind the others, so that training has the cores first
# where they are short, and no further: the further behind, the later a put is committed (benchmarks/notes/put.md).


BULK_NICE = 2
_AUTOGROUPS = Path("/proc/sys/kernel/sched_autogroup_enabled")
_CGROUPS = Path("/proc/self/cgroup")
_WEIGHT = Path("/sys/fs/cgroup/cpu.weight")  # the root of cgroup v2 has none


def lower_thread_priority() -> None:
    """Put the calling thread BULK_NICE behind its process: it moves or digests bulk bytes.

    Not for threads of heartbeats or of a rank's calls.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, own_nice() + BULK_NICE))


def own_nice() -> int:
    """Return the nice value of this process's first thread."""
    return os.getpriority(os.PRIO_PROCESS, os.getpid())


class RankPriority:
    """Keeps a process level with its ranks where they stand before it, or says that the system forbids it.

    A rank at less than 0 counts as one at 0.
    """

    def __init__(self) -> None:
        self.behind = ""  # how far it has to stay behind, for people
        self._before: int | None = None  # its nice value before it came forward

    def follow(self, pids: Iterable[int]) -> None:
        """Bring all threads forward to the lowest nice value of these processes, or back as soon as none is so low."""
        ranks = [(max(0, nice), pid) for pid in pids if (nice := _nice_of(pid)) is not None]
        own, self.behind = own_nice(), ""
        before = own if self._before is None else self._before
        nice, pid = min(ranks, default=(before, 0))
        wanted = min(before, nice)
        if wanted == before and self._before is None:
            return
        try:
            _move(wanted)  # at every look while it is forward: threads may have been started meanwhile
            self._before = before if wanted < before else None
        except OSError:
            if own > nice + BULK_NICE and _counts_beside(pid):
                self.behind = f"nice {own}, a rank (process {pid}) nice {nice}"


def _nice_of(pid: int) -> int | None:
    try:
        return os.getpriority(os.PRIO_PROCESS, pid)
    except OSError:  # it has ended
        return None


def _move(wanted: int) -> None:
    """Set the nice value of each thread that has another one. OSError: the system forbids lowering it."""
    own = own_nice()
    tasks = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    for task in sorted(tasks, key=lambda each: each == os.getpid()):  # the first thread last: it stands for all
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            nice = os.getpriority(os.PRIO_PROCESS, task)
            # Also one that was started by a thread which had not moved yet: it comes with the next look.
            target = min(19, wanted + (BULK_NICE if nice > own else 0))
            if nice != target:
                os.setpriority(os.PRIO_PROCESS, task, target)


def _counts_beside(pid: int) -> bool:
    """Return whether the nice values of this process and another one say which goes first.

    In the root cgroup, with autogroups, they do so only in one session. A container's cgroup has no autogroups.
    """
    try:
        if os.getsid(pid) == os.getsid(0) or _AUTOGROUPS.read_text().strip() != "1" or _WEIGHT.exists():
            return True
        groups = [line.split(":", 2) for line in _CGROUPS.read_text().splitlines()]
    except OSError:  # the process has ended, or the kernel has no autogroups
        return True
    return any(path != "/" for number, names, path in groups if number == "0" or "cpu" in names.split(","))


# -- safe condition -----------------------------------------------------------------------------------
# threading's condition and event, such that an exception of a signal's handler leaves no lock held.


LOOK_S = 1.0


class SafeCondition(_thread.RLock, threading.Condition):  # type: ignore[misc]
    """A threading.Condition that is its own RLock."""

    def __init__(self) -> None:
        self._waiters: deque[Any] = deque()

    def wait(self, timeout: float | None = None) -> bool:
        """Release it, sleep until woken, and acquire it again; False after the timeout. The caller has it once."""
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
