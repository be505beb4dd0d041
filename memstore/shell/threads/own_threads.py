"""Threads for each of several things that may hang, so that none waits behind another's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


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
