"""A rank's second thread: it frees the training thread once its generation is over.

                       the generation is over              it has left        all of it is torn down
unguarded --guard--> guarded -----> its waits are ended, again and again --leaving--> leaving --left--> unguarded
                                     | leave_s                                          | leave_s
                                     v                                                  v
                                   the process is killed, and replaced like the lost one
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from memstore.inplace.meeting import Meeting
from memstore.inplace.watchdog_process import WatchdogProcess

log = logging.getLogger("memstore")
LOOK_S = 0.05
ASK_EVERY_S = 1.0
CLOSE_S = 5.0


class Watcher:
    """Watches one generation at a time, from `guard` to `left`."""

    def __init__(self, meeting: Meeting, free: Callable[[], None]) -> None:
        self._meeting, self._free = meeting.again(), free
        self._lock = threading.Lock()  # a generation that was left is not freed afterwards: the next may have begun
        self._generation: int | None = None
        self._has_left = False  # the training thread has left the function: it is freed no more
        self.over_s: float | None = None  # since when the generation is seen to be over
        self._training = threading.get_ident()  # the thread that is in the function
        self._in_torch_since_s: float | None = None
        self.waited_s = 0.0  # for how long the training thread was in torch the last time, such as in a collective
        self._ask_s = math.inf  # when to ask next whether a collective of another rank timed out; inf: it is answered
        self._watchdog = WatchdogProcess(meeting.place)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memstore-generation", daemon=True)
        self._thread.start()

    def guard(self, generation: int) -> None:
        """Free the training thread when this generation is over."""
        with self._lock:
            self._generation, self._has_left, self.over_s = generation, False, None
            self._training, self._in_torch_since_s, self.waited_s = threading.get_ident(), None, 0.0
            self._ask_s = time.monotonic() + ASK_EVERY_S

    def leaving(self) -> None:
        """Leave the training thread alone: it has left the function, and tears the generation down."""
        with self._lock:
            self._has_left = True

    def left(self) -> None:
        """Note that all of the generation is torn down."""
        with self._lock:
            self._generation = None

    def close(self) -> None:
        """End the thread, unless it waits for a server that does not answer, and the watchdog."""
        self._end.set()
        self._thread.join(CLOSE_S)
        self._watchdog.close()

    def _run(self) -> None:
        while not self._end.wait(LOOK_S):
            try:
                self._look()
            except dist.DistError as exc:
                log.warning("memstore: the meeting of the ranks is gone, no loss will be seen any more: %s", exc)
                return

    def _look(self) -> None:
        with self._lock:
            generation = self._generation
        if generation is None:
            return
        if not self._meeting.is_over(generation):
            return self._look_at_training(generation, time.monotonic())
        with self._lock:
            if generation != self._generation:
                return
            self.over_s = self.over_s or time.monotonic()
            if time.monotonic() - self.over_s > self._meeting.place.leave_s:
                self._kill(generation)
            if self._has_left:
                return
            try:
                self._free()  # again and again until it has left: it may wait for something new meanwhile
            except Exception:  # what ends the waits met something of the training thread: it is tried again
                log.exception("memstore: the waits of a generation that is over could not all be ended")

    def _look_at_training(self, generation: int, now: float) -> None:
        """Note how long the training thread has been in torch, and say so if another rank's collective timed out."""
        with self._lock:
            if generation != self._generation:
                return
            has_left = self._has_left
        if not has_left:
            frame = sys._current_frames().get(self._training)
            is_in_torch = frame is not None and str(frame.f_globals.get("__name__")).split(".")[0] == "torch"
            self._in_torch_since_s = (self._in_torch_since_s or now) if is_in_torch else None
            if self._in_torch_since_s is not None:
                self.waited_s = now - self._in_torch_since_s
        if now >= self._ask_s and (has_left or self._in_torch_since_s is not None):
            self._ask_s = now + ASK_EVERY_S
            if self._meeting.is_asked(generation):
                self._meeting.note_waiting(generation)
                self._ask_s = math.inf

    def _kill(self, generation: int) -> None:
        """End this process, which cannot be freed: other ranks wait for it, and what replaces ranks sees its end."""
        place = self._meeting.place
        log.critical(
            "memstore: rank %d has not left generation %d, which is over, for %g s: its process is killed and "
            "replaced. What its threads were doing follows.", place.rank, generation, place.leave_s,
        )  # fmt: skip
        try:
            faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
