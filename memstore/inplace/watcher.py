"""A rank's second thread: it beats, and frees the training thread once its generation is over."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch.distributed as dist

from memstore.inplace.meeting import Meeting
from memstore.inplace.watchdog_process import WatchdogProcess

log = logging.getLogger("memstore")
LOOK_S = 0.05  # shorter than a tick of the watchdog, which expects a beat at each


class Watcher:
    """Watches one generation at a time, from `guard` to `unguard`."""

    def __init__(self, meeting: Meeting, free: Callable[[], None]) -> None:
        self._meeting, self._free = meeting.again(), free
        self._lock = threading.Lock()  # a generation that was left is not freed afterwards: the next may have begun
        self._generation: int | None = None
        self._watchdog = WatchdogProcess(meeting.place)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memstore-generation", daemon=True)
        self._thread.start()

    def guard(self, generation: int) -> None:
        """Free the training thread when this generation is over."""
        with self._lock:
            self._generation = generation

    def unguard(self) -> None:
        """Leave the training thread alone."""
        with self._lock:
            self._generation = None

    def close(self) -> None:
        """End the thread, and the watchdog."""
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._end.wait(LOOK_S):
                self._watchdog.beat()
                self._look()
        except dist.DistError as exc:
            log.warning("memstore: the meeting of the ranks is gone, no loss will be seen any more: %s", exc)
        finally:
            self._watchdog.close()

    def _look(self) -> None:
        with self._lock:
            generation = self._generation
            if generation is None or not self._meeting.is_over(generation):
                return
            try:
                self._free()  # again and again until it has left: it may wait for something new meanwhile
            except Exception:  # what ends the waits met something of the training thread: it is tried again
                log.exception("memstore: the waits of a generation that is over could not all be ended")
