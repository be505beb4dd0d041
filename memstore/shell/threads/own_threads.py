"""Threads for each of several things that may hang, so that none waits behind another's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class OwnThreads:
    """A pool for every key that has work; one without work has no thread."""

    def __init__(self, threads_count: int, name: str, begin: Callable[[], object] | None = None) -> None:
        """Each key gets at most so many threads; `begin` is what each of them does first."""
        self._threads_count, self._name, self._begin = threads_count, name, begin
        self._lock = threading.Lock()
        self._pools: dict[Hashable, tuple[ThreadPoolExecutor, int]] = {}  # and how much of its work is not done
        self._is_closed = False

    def submit(self, key: Hashable, work: Callable[..., Any], *arguments: Any) -> None:
        """Do some work on a thread of this key, after what was asked for before."""
        with self._lock:
            if self._is_closed:
                return
            pool, count = self._pools.get(key) or (self._new_pool(), 0)
            self._pools[key] = pool, count + 1  # first: work that finds no new thread is queued all the same
            pool.submit(self._run, key, work, arguments)

    def close(self) -> None:
        """Begin nothing more; what is under way may hang, and is not waited for."""
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
