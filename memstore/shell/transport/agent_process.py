"""An agent process as its holder sees it: started, asked for reads, ended."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Literal

from memstore.errors import ConfigError
from memstore.shell.transport.agent_messages import (
    PACKET_BYTES_MAX,
    Ended,
    Read,
    Ready,
    decode_message,
    encode,
)
from memstore.shell.transport.transport import Piece

START_TIMEOUT_S = 20.0
PROGRAM = "memstore.shell.transport.nixl_agent"
ENVIRONMENT = {
    "UCX_DEBUG_SIGNO": "",  # else UCX takes SIGHUP
    "NIXL_LOG_LEVEL": "WARN",
}


class AgentProcess:
    """One agent process. It has the lock's file open, so that no other holder takes the arena while it may write."""

    def __init__(self, role: Literal["reads", "serves"], arena_fd: int, lock_fd: int) -> None:
        """Start it and wait until it is there. ConfigError if it does not come."""
        self._pipe, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Ended]] = {}
        self._numbers = 0
        self._is_retired = False
        started: Future[subprocess.Popen[bytes]] = Future()
        self._ready: Future[bytes] = Future()
        command = [sys.executable, "-m", PROGRAM, role, str(arena_fd), str(theirs.fileno())]
        fds = (arena_fd, lock_fd, theirs.fileno())
        threading.Thread(
            target=self._start_and_listen, args=(command, fds, started), name="memstore-nixl", daemon=True
        ).start()
        with theirs:
            self._process = started.result()
        self.metadata = self._await_ready()

    def _start_and_listen(
        self, command: list[str], fds: tuple[int, ...], started: Future[subprocess.Popen[bytes]]
    ) -> None:
        """Start the agent, then hand its answers on until it is gone.

        The kernel kills an agent when the thread that started it ends, so this thread has to stay.
        """
        try:
            process = subprocess.Popen(
                command, pass_fds=fds, stdin=subprocess.DEVNULL, env={**ENVIRONMENT, **os.environ}
            )  # fmt: skip
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(process)
        self._listen()

    def _await_ready(self) -> bytes:
        try:
            return self._ready.result(START_TIMEOUT_S)
        except FutureTimeout:  # before Python 3.11 it is no TimeoutError
            why = f"was not there within {START_TIMEOUT_S:g} s"
        except EOFError:
            why = "ended before it was there"
        self.kill()
        raise ConfigError(
            f"transport='nixl': NIXL's agent {why}: see what it said in this process's log, or set transport='tcp'",
            field="transport",
        )

    @property
    def is_usable(self) -> bool:
        """Say whether it takes more reads."""
        return not self._is_retired and self._process.poll() is None

    def read(self, metadata: bytes, pieces: Sequence[Piece], deadline_s: float) -> Ended:
        """Read pieces; return how it ended, at the latest when `deadline_s` have passed."""
        future: Future[Ended] = Future()
        with self._lock:
            self._numbers += 1
            number = self._numbers
            self._waiting[number] = future
        try:
            packet = encode(Read(number, metadata, tuple((*piece,) for piece in pieces)))
            if len(packet) > PACKET_BYTES_MAX:
                return Ended(number, f"{len(pieces)} pieces are too many for one read", has_begun=False)
            self._pipe.send(packet, socket.MSG_DONTWAIT)
            return future.result(deadline_s)
        except FutureTimeout:  # before Python 3.11 it is no TimeoutError
            return Ended(number, f"it has not come within {deadline_s:g} s")
        except BlockingIOError:
            return Ended(number, "the agent takes no more reads", has_begun=False)
        except OSError as error:
            return Ended(number, f"the agent is gone: {error}")
        finally:
            with self._lock:
                self._waiting.pop(number, None)
            self._end_if_retired()

    def retire(self) -> None:
        """Take no more reads, and end as soon as none is awaited: one that was given up cannot be ended otherwise."""
        self._is_retired = True
        self._end_if_retired()

    def _end_if_retired(self) -> None:
        with self._lock:
            is_idle = not self._waiting
        if self._is_retired and is_idle:
            self.kill()

    def kill(self) -> None:
        """End it; `has_ended` says when it is gone."""
        self._is_retired = True
        self._process.kill()
        with contextlib.suppress(OSError):
            self._pipe.shutdown(socket.SHUT_RDWR)

    def has_ended(self) -> bool:
        """Say whether the process is gone, and with it every read that it had begun."""
        return self._process.poll() is not None

    def wait_ended(self, timeout_s: float) -> None:
        """Wait until the process is gone."""
        until_s = time.monotonic() + timeout_s
        while not self.has_ended() and time.monotonic() < until_s:
            time.sleep(0.01)

    def _listen(self) -> None:
        """Hand answers to those that wait for them, until the process is gone."""
        try:
            while packet := self._pipe.recv(PACKET_BYTES_MAX):
                self._take(decode_message.decode(packet))
        except OSError:
            pass  # shut down by `kill`
        finally:
            self._end()

    def _take(self, message: Ready | Read | Ended) -> None:
        if isinstance(message, Ready):
            self._ready.set_result(message.metadata)
            return
        assert isinstance(message, Ended)
        with self._lock:
            future = self._waiting.pop(message.number, None)
        if future is not None:
            future.set_result(message)

    def _end(self) -> None:
        """Answer all that wait: nothing comes any more."""
        if not self._ready.done():
            self._ready.set_exception(EOFError())
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for number, future in waiting.items():
            future.set_result(Ended(number, "the agent's process has ended"))
        self._is_retired = True
        self._pipe.close()
