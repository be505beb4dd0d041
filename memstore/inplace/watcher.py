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

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from memstore.errors import ConfigError
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
            "replaced. What its threads were doing follows.",
            place.rank,
            generation,
            place.leave_s,
        )
        try:
            faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)


# -- nccl ---------------------------------------------------------------------------------------------
# Frees a thread that waits for a NCCL collective: aborting the communicators ends their kernels at once.


# What torch does by itself once a peer is lost. It reads these when a group is made.
_NEEDED = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else it ends the process, or aborts while the store is still open
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # else an error during an abort ends the process
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "0",  # else the GPU may hang after an abort
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # else an abort may wait four times as long, by default 60 s
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # else a thread of the aborted group may end the process minutes later
}
_DUMP = "TORCH_NCCL_DUMP_ON_TIMEOUT"  # of the flight recorder, at every loss


def has_nccl() -> bool:
    """Return whether a process group uses NCCL."""
    return dist.is_initialized() and any("nccl" in config for config in list(c10d._world.pg_backend_config.values()))


def leave_errors_to_us() -> None:
    """Keep torch from ending this process when a peer is lost.

    Raises:
        ConfigError: The environment asks torch for something else.
    """
    os.environ.setdefault(_DUMP, "0")
    for name, value in _NEEDED.items():
        if os.environ.setdefault(name, value) != value:
            raise ConfigError(
                f"{name}={os.environ[name]} is set, and recovery in place needs {name}={value}: unset it", field=name
            )


def make_communicator(gpu: int | None) -> None:
    """Let all ranks make the communicator of the default group now, and not with their first collective.

    A rank that waits for a lost one to join cannot be freed by an abort, but by shutting the sockets that it opened.
    Which they are is known only now.

    Args:
        gpu: Index of the rank's GPU; None: the only one that the process sees, and if it sees more, nothing is made.
    """
    if gpu is not None or torch.cuda.device_count() == 1:
        dist.all_reduce(torch.zeros(1, device=f"cuda:{gpu or 0}"))


def abort() -> None:
    """Abort all communicators, if there are any; any thread may call, once the store is closed to the training thread.

    Their process groups are gone then: what the training thread calls next raises. If one cannot be aborted, torch
    waits for as long as a collective may take.
    """
    if has_nccl():
        c10d._abort_process_group()
