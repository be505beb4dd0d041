"""Frees a thread that waits in a gloo collective for a peer that is frozen or cut off.

gloo's own abort(), shutdown() and destroy_process_group() return at once and free no waiting thread (torch 2.13).
shutdown(2) on its connections does: each waiting collective raises RuntimeError within 0.1 s. gloo connects all pairs
when a group is made, so its connections are the sockets that appear meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from typing import Any

from torch.distributed import distributed_c10d as c10d

from memstore.inplace.watchdog import probe


class GlooSockets:
    """The connections of the process groups that are made from `record` to `end`, subgroups included."""

    def __init__(self) -> None:
        self._inodes: dict[int, str] = {}  # descriptor -> "socket:[inode]": a number is used again after a close
        self._before: dict[int, str] | None = None  # sockets as the default group's making began
        self._store: dict[int, str] = {}  # the connection over which groups learn one another's addresses
        self._make_group: Callable[..., Any] | None = None
        self._recorded: Callable[..., Any] | None = None

    def record(self) -> None:
        """Take the sockets that appear while torch makes a group for gloo's; torch has no hook for it."""
        make_group = self._make_group = c10d._new_process_group_helper
        self._before = open_sockets()

        def recorded(*args: Any, **kwargs: Any) -> Any:
            before = open_sockets()
            made = make_group(*args, **kwargs)
            self._inodes.update(_new_sockets(before))
            return made

        c10d._new_process_group_helper = self._recorded = recorded

    def take_store(self, port: int) -> None:
        """Take the connection to a port that was made since `record` for the groups' store."""
        self._store = {fd: name for fd, name in _new_sockets(self._before or {}).items() if _is_to(fd, port)}

    @property
    def is_making(self) -> bool:
        """Return whether the default group is being made."""
        return self._before is not None

    def made(self) -> None:
        """Note that the default group is there."""
        self._before = None

    def end(self) -> None:
        """Record no more, and forget what was recorded."""
        if self._make_group is not None and c10d._new_process_group_helper is self._recorded:
            c10d._new_process_group_helper = self._make_group  # else another library has put its own over ours
        self._make_group = None
        self._before = None
        self._inodes.clear()
        self._store = {}

    def shut_store(self) -> None:
        """Shut the connection to the groups' store: a thread may wait on it for the address of a rank that is lost."""
        now = open_sockets()
        for fd, name in self._store.items():
            if now.get(fd) == name:
                _shut(fd, None)

    def shut(self, *, spared_port: int) -> int:
        """Shut what is still open, but connections to `spared_port`; return how many. Any thread may call.

        While the default group is made, all that is new is shut, the connection to the meeting's store included.
        """
        before = self._before
        if before is not None:
            return sum(_shut(fd, None) for fd in _new_sockets(before))
        now = open_sockets()
        return sum(now.get(fd) == name and _shut(fd, spared_port) for fd, name in list(self._inodes.items()))


def _new_sockets(before: dict[int, str]) -> dict[int, str]:
    return {fd: name for fd, name in open_sockets().items() if before.get(fd) != name}


def open_sockets() -> dict[int, str]:
    """Return "socket:[inode]" of each descriptor of this process that is one."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # closed since the folder was read
        if name.startswith("socket:"):
            found[int(fd)] = name
    return found


def probe_new(before: dict[int, str], port: int, silent_s: float) -> None:
    """Let connections to a port that are new since `before` end once the other host has not answered for so long."""
    for fd in _new_sockets(before):
        if _is_to(fd, port):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
                probe(sock, round(silent_s * 1000))


def _is_to(fd: int, port: int) -> bool:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
        return sock.type == socket.SOCK_STREAM and bool(sock.getpeername()[1] == port)
    return False


def _shut(fd: int, spared_port: int | None) -> bool:
    try:
        with socket.socket(fileno=os.dup(fd)) as sock:
            is_tcp = sock.type == socket.SOCK_STREAM and sock.family in (socket.AF_INET, socket.AF_INET6)
            if not is_tcp or spared_port in (sock.getpeername()[1], sock.getsockname()[1]):
                return False
            sock.shutdown(socket.SHUT_RDWR)
            return True
    except OSError:
        return False  # a listener, or closed meanwhile
