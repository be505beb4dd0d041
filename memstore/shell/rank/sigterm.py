"""SIGTERM of a rank's process: the newest committed step is made durable before the signal takes its course (R31).

(off) --a store is watched--> waiting --SIGTERM--> persisting --answered, or its time over--> passed on --> waiting
                                ^--the last store is closed--> (off)

Python runs a signal's handler in the main thread, once that is back from the C code it is in, and a rank whose
peers are gone may hang in a collective for ever. So a thread waits for the signal: the interpreter's C handler writes
the signal's number to a pipe at once (`signal.set_wakeup_fd`). Our Python handler writes there only where other code
has put another descriptor in the place of ours. What was there before is passed on to afterwards: a handler of Python's
in the main thread, by sending it the signal once more; the default action by restoring it first.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from types import FrameType
from typing import Any

from memstore.core.wire.calls import PersistStep
from memstore.core.wire.replies import Persisted
from memstore.errors import ConfigError, MemstoreError
from memstore.shell.rank.holder_link import HolderLink
from memstore.shell.threads import answer_of

log = logging.getLogger("memstore")
ANSWER_PART = 0.9  # of the time, for the controller: its error for a late write must come before the end
ASKED, CATCH_UP, END = 0, 254, 255  # bytes of the pipe that are no signal's number
END_S = 5.0  # beyond its time, for the thread to end what it does
Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


def check_sigterm(limit_s: float, durable: str | None) -> None:
    """Raise ConfigError if SIGTERM of this process cannot be watched from this thread."""
    what = f"persist_on_sigterm_s={limit_s:g}"
    if not limit_s:
        return
    if not durable:
        raise ConfigError(
            f"{what} without durable storage to write to: give durable= as well", field="persist_on_sigterm_s"
        )
    thread = threading.current_thread()
    if thread is not threading.main_thread():
        raise ConfigError(
            f"{what}: connect() runs in thread {thread.name!r}, and Python lets only the main thread set a signal's "
            "handler: connect there, or leave it out and call store.persist() when the notice comes",
            field="persist_on_sigterm_s",
        )
    if signal.getsignal(signal.SIGTERM) is None:
        raise ConfigError(
            f"{what}: SIGTERM has a handler that was not set by Python and could not be called afterwards: leave it "
            "out and call store.persist() from that handler's code",
            field="persist_on_sigterm_s",
        )


class SigtermWatch:
    """The SIGTERM handling of one process, for all its stores; installed while one is watched."""

    def __init__(self) -> None:
        self._limits_s: dict[HolderLink, float] = {}
        self._is_on = False
        self._former: Handler = signal.SIG_DFL
        self._former_fd = -1
        self._read_fd = self._write_fd = -1
        self._has_caught_up = threading.Event()
        self._is_passed_on = False  # the next run of our handler is to call the former one
        self._own = 0  # signals sent by this thread whose byte is still to come
        self._masks: dict[int, set[int]] = {}  # of threads that fork, by id

    def watch(self, link: HolderLink, limit_s: float) -> None:
        """Have SIGTERM make the newest committed step of a store's job durable, within `limit_s`; 0: not.

        In the main thread only.
        """
        if not limit_s:
            return
        self._limits_s[link] = limit_s
        if self._is_on and self._is_ours():
            return
        if self._is_on:  # another handler replaced ours: ours goes in front of it
            self._put_back()
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        threading.Thread(target=self._run, args=(self._read_fd,), name="memstore-sigterm", daemon=True).start()
        self._former = signal.getsignal(signal.SIGTERM)
        self._former_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._is_on = True
        signal.signal(signal.SIGTERM, self._on_signal)

    def unwatch(self, link: HolderLink) -> None:
        """Forget a store, after what a signal began has ended; with the last one what was there before is there again.

        Outside the main thread nothing can be put back: then a signal is passed on at once.
        """
        if link not in self._limits_s:
            return
        try:
            self._has_caught_up.clear()
            os.write(self._write_fd, bytes([CATCH_UP]))
            self._has_caught_up.wait(max(self._limits_s.values()) + END_S)
        finally:
            del self._limits_s[link]
            if not self._limits_s and threading.current_thread() is threading.main_thread():
                self._put_back()

    def _is_ours(self) -> bool:
        return signal.getsignal(signal.SIGTERM) == self._on_signal

    def _put_back(self) -> None:
        """End the thread. A signal that it has not read is sent again, to the former handler."""
        self._restore()
        os.write(self._write_fd, bytes([END]))
        os.close(self._write_fd)

    def _restore(self) -> None:
        """Set the former handler and descriptor, unless another one has replaced ours."""
        if self._is_ours():
            signal.signal(signal.SIGTERM, self._former)
        self._is_on = False
        found = signal.set_wakeup_fd(self._former_fd, warn_on_full_buffer=False)
        if found != self._write_fd:
            signal.set_wakeup_fd(found, warn_on_full_buffer=False)

    # -- in the main thread -----------------------------------------------------------------------

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_passed_on:
            self._is_passed_on = False
            if callable(self._former):
                self._former(number, frame)
            return
        found = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        if found != self._write_fd:
            signal.set_wakeup_fd(found, warn_on_full_buffer=False)
        if found != self._write_fd or not self._is_ours():
            os.write(self._write_fd, bytes([ASKED]))

    # -- in the thread ----------------------------------------------------------------------------

    def _run(self, read_fd: int) -> None:
        is_over = False
        while not is_over:
            numbers = os.read(read_fd, 4096)
            is_over = END in numbers
            if self._is_asked(numbers):
                if is_over:
                    os.kill(os.getpid(), signal.SIGTERM)
                else:
                    self._take_course()
            if CATCH_UP in numbers:
                self._has_caught_up.set()
        os.close(read_fd)

    def _take_course(self) -> None:
        try:
            self._persist()
        except Exception:
            log.exception("memstore: SIGTERM: the newest committed step may not be durable")
        self._pass_on()

    def _is_asked(self, numbers: bytes) -> bool:
        """Return whether a byte stands for a SIGTERM that another process sent; other signals are passed on."""
        is_asked = False
        for number in numbers:
            if number == signal.SIGTERM and self._own:
                self._own -= 1
                self._write_on(number)
            elif number == ASKED or (number == signal.SIGTERM and (self._is_ours() or not self._is_on)):
                is_asked = True
            elif number not in (CATCH_UP, END):
                self._write_on(number)
        return is_asked

    def _write_on(self, number: int) -> None:
        """Pass the signal on to the earlier wakeup fd, such as an event loop's."""
        if self._former_fd >= 0:
            try:
                os.write(self._former_fd, bytes([number]))
            except OSError:
                log.warning("memstore: signal %d could not be written to descriptor %d", number, self._former_fd)

    def _persist(self) -> None:
        """Ask for all stores at once; return when all are answered, or their time is over."""
        began_s = time.monotonic()
        asked: list[tuple[HolderLink, float, Future[Persisted]]] = []
        for link, limit_s in list(self._limits_s.items()):
            if not link.fenced and not link.closed.is_set():
                request = PersistStep(job=link.job, step=None, within_s=limit_s * ANSWER_PART)
                asked.append((link, limit_s, link.call_soon(request)))
        for link, limit_s, answer in asked:
            what = f"memstore {link.job} rank {link.rank}: SIGTERM:"
            try:
                written = answer_of(answer, max(0.0, began_s + limit_s - time.monotonic()))
                problem = "" if written.is_durable else f"step {written.step}: {written.problem}"
            except FutureTimeout:
                link.forget_call(answer)
                problem = f"no answer: is the controller running? ({link.commands('`memstore status`')})"
            except MemstoreError as exc:
                problem = str(exc)
            took_s = time.monotonic() - began_s
            if problem:
                log.warning("%s the newest committed step is not durable after %.1f s: %s", what, took_s, problem)
            else:
                log.info("%s step %d is durable, after %.1f s", what, written.step, took_s)

    def _pass_on(self) -> None:
        if self._former == signal.SIG_DFL:
            # The default action does not wait for a main thread that hangs in C code.
            ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
            os.kill(os.getpid(), signal.SIGTERM)
        elif callable(self._former):
            self._is_passed_on = True
            self._own += 1
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    # -- forks ------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """A signal to a child that has still our pipe would be taken for one to this process."""
        if self._is_on:
            self._masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def after_in_parent(self) -> None:
        """Let the thread receive SIGTERM again."""
        mask = self._masks.pop(threading.get_ident(), None)
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def after_in_child(self) -> None:
        """Restore SIGTERM in a child, which has no store of its own."""
        mask = self._masks.pop(threading.get_ident(), None)
        if self._is_on:
            self._restore()
            os.close(self._read_fd)
            os.close(self._write_fd)
            self._limits_s, self._own, self._is_passed_on = {}, 0, False
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


WATCH = SigtermWatch()
os.register_at_fork(
    before=WATCH.before_fork, after_in_parent=WATCH.after_in_parent, after_in_child=WATCH.after_in_child
)
