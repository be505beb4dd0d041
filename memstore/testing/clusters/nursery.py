"""Processes that are forked from one that has imported everything: each costs milliseconds instead of half a second.

A `Nursery` is the test's end. The process at its other end runs `fork_children`, which forks a child for every request;
test and child are connected by a socket pair.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from memstore.testing.clusters.namespaces import enter

PR_SET_PDEATHSIG = 1
REPLY_S = 120.0  # a guard against hangs


class Nursery:
    """A process that forks children; a context manager whose children end with it."""

    def __init__(self, module: str) -> None:
        """Start the process, which runs `module` with a descriptor as its argument; that must call `fork_children`."""
        mine, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._lock = threading.Lock()
        self._channel = mine
        self._channel.settimeout(REPLY_S)
        self._channel.recv(1)  # everything is imported

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, and with it its children."""
        self._channel.close()
        self._process.kill()
        self._process.wait(timeout=REPLY_S)

    def fork(self, env: Mapping[str, str], *, namespace: str = "") -> tuple[int, socket.socket]:
        """Fork a child with these additions to its environment, in a network namespace (its path; "" for ours).

        Return its pid, and a connection to it.
        """
        mine, theirs = socket.socketpair()
        with theirs:
            return self._ask({"env": dict(env), "namespace": namespace}, theirs.fileno()), mine

    def reap(self, pid: int) -> int:
        """Return the exit code of a child, as `subprocess.Popen` has it, once it has ended."""
        return self._ask({"reap": pid})

    def _ask(self, request: dict[str, Any], *fds: int) -> int:
        with self._lock:
            socket.send_fds(self._channel, [json.dumps(request).encode()], fds)
            return int(self._channel.recv(32))


class ForkedProcess:
    """A child of a nursery that keeps exit codes, with what a cluster uses of `subprocess.Popen`."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.nursery, self.pid = nursery, pid
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return the exit code, None while the process lives."""
        return self._look(0.0)

    def wait(self, timeout: float) -> int:
        """Return once the process has ended; subprocess.TimeoutExpired after the limit."""
        found = self._look(timeout)
        if found is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return found

    def send_signal(self, sig: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self.returncode is None:
                signal.pidfd_send_signal(self._pidfd, sig)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout_s: float) -> int | None:
        with self._lock:
            if self.returncode is None:
                look = select.poll()
                look.register(self._pidfd, select.POLLIN)
                if look.poll(timeout_s * 1000):
                    self.returncode = self.nursery.reap(self.pid)
                    os.close(self._pidfd)
            return self.returncode


def fork_children(fd: int, serve: Callable[[socket.socket], None], *, keeps_codes: bool = False) -> None:
    """Fork a child for every request, which calls `serve`, until the test that started this ends.

    Without `keeps_codes` no child can be reaped: the kernel does it, so a killed one is gone at once. That the test has
    ended is seen at the channel: PR_SET_PDEATHSIG would kill this process once the *thread* that started it ends.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL if keeps_codes else signal.SIG_IGN)
    channel = socket.socket(fileno=fd)
    channel.sendall(b"r")
    while True:
        message, fds, _, _ = socket.recv_fds(channel, 1 << 20, 1)
        if not message:
            return
        request = json.loads(message)
        if "reap" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["reap"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                channel.close()
                _be_child(socket.socket(fileno=fds[0]), request, serve)
            os.close(fds[0])
        channel.sendall(str(answer).encode())


def _be_child(channel: socket.socket, birth: dict[str, Any], serve: Callable[[socket.socket], None]) -> None:
    """Run the forked child; never return."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.update(birth["env"])
        if birth["namespace"]:
            enter(birth["namespace"])
        serve(channel)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    finally:
        os._exit(0)
