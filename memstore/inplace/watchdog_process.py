"""The rank's side of its watchdog: a thread that starts it, beats, and starts another if it has ended."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading

from memstore.inplace import watchdog
from memstore.inplace.meeting import MeetingPlace

log = logging.getLogger("memstore")
MAX_STARTS = 5
BEAT_S = 0.05  # shorter than a tick of the watchdog, which expects a beat at each
CLOSE_S = 5.0  # longest wait for a watchdog to end


class WatchdogProcess:
    """The watchdog of this process, and the thread that beats: it waits for nothing and no other process."""

    def __init__(self, place: MeetingPlace) -> None:
        self._place = place
        self._starts_left = MAX_STARTS
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memstore-beat", daemon=True)
        if place.hang_after_s is not None:
            self._thread.start()

    def close(self) -> None:
        """Beat for the last time: this process may be silent from now on."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(2 * CLOSE_S)

    def _run(self) -> None:
        while not self._end.wait(BEAT_S):
            try:
                self._beat()
            except Exception:  # such as of a pipe that other code has closed: no beat would be a freeze
                log.exception("memstore: rank %d could not beat: another watchdog is started", self._place.rank)
                self._forget()
        self._leave()

    def _beat(self) -> None:
        """Say that this process goes on; start a watchdog if there is none."""
        if self._process is not None and self._process.poll() is not None:
            log.warning("memstore: the watchdog of rank %d ended: %d", self._place.rank, self._process.returncode)
            self._forget()
            if not self._starts_left:
                self._stay_unwatched()
        if self._process is None and self._starts_left:
            self._starts_left -= 1
            self._start()
        self._write(watchdog.BEAT)

    def _leave(self) -> None:
        if self._process is None:
            return
        try:
            self._write(watchdog.LAST_BEAT)
            self._process.wait(CLOSE_S)
        except (OSError, subprocess.TimeoutExpired):  # it is stopped, or its pipe was closed by other code
            self._process.kill()
            self._process.wait()
        self._forget()

    def _start(self) -> None:
        place = self._place
        arguments = (place.address, place.lifeline_port, place.run, place.rank, place.life, place.hang_after_s)
        try:
            # By posix_spawn(), as Popen does without close_fds and a new session: else it waits until a pipe of its own
            # is closed, and a process that another thread forks meanwhile, such as a data loader's, keeps that open.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", watchdog.__file__, str(os.getpid()), *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                close_fds=False,
            )
        except OSError as exc:
            log.warning("memstore: no watchdog for rank %d can be started: %s", place.rank, exc)
            self._starts_left = 0
            self._stay_unwatched()
            return
        assert self._process.stdin is not None
        self._pipe = self._process.stdin.fileno()
        os.set_blocking(self._pipe, False)  # a stopped watchdog must not stop the rank

    def _stay_unwatched(self) -> None:
        """Say `bye` in place of the watchdog: else the rank would be taken for one that has ended with it."""
        place = self._place
        log.warning("memstore: rank %d has no watchdog from now on: a freeze of it is not seen", place.rank)
        with (
            contextlib.suppress(OSError),
            socket.create_connection((place.address, place.lifeline_port), timeout=watchdog.CONNECT_S) as line,
        ):
            line.sendall(watchdog.hello_line(place.run, place.rank, place.life) + watchdog.BYE)

    def _write(self, beat: bytes) -> None:
        if self._process is not None:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):  # it has beats enough; it has ended
                os.write(self._pipe, beat)

    def _forget(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._process = None
