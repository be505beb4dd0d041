"""Ranks that are real processes, so that a test can kill or freeze one at an exact point.

A `RankNursery` is one process that has imported torch; it forks a rank in milliseconds. Test and rank talk in JSON
lines over a socket pair: one command of `rank.py`, one reply. A put with `hold=True` stops after half of its bytes,
reports that, and goes on when asked, so that a test can find a rank in mid-copy without a clock.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from memstore.testing.clusters.nursery import REPLY_S, Nursery, fork_children
from memstore.testing.clusters.stepped_clock import CLOCK_VARIABLE, shift_clock

LOG_VARIABLE = "MEMSTORE_RANK_LOG"  # the file into which a rank prints and logs


class RankFailed(AssertionError):
    """The error of a command that raised in the rank: `error` is the class name, `message` the text."""

    def __init__(self, error: str, message: str) -> None:
        super().__init__(f"{error}: {message}")
        self.error, self.message = error, message


class RankProcess:
    """The test's end of one rank."""

    def __init__(self, pid: int, channel: socket.socket, rank: int) -> None:
        self.pid, self.rank = pid, rank
        self.channel = channel  # readable once a reply is there, or the rank is dead
        self._lines = channel.makefile("rb")

    def begin(self, do: str, **command: Any) -> None:
        """Send a command."""
        self.channel.sendall(json.dumps({"do": do, **command}).encode() + b"\n")

    def finish(self, timeout_s: float = REPLY_S) -> dict[str, Any]:
        """Return the reply to the last command; RankFailed if it raised in the rank, EOFError if the rank is dead."""
        self.channel.settimeout(timeout_s)
        line = self._lines.readline()
        if not line:
            raise EOFError(f"rank {self.rank} (pid {self.pid}) is gone")
        reply: dict[str, Any] = json.loads(line)
        if not reply.pop("ok"):
            raise RankFailed(reply["error"], reply["message"])
        return reply

    def call(self, do: str, **command: Any) -> dict[str, Any]:
        """Send a command and return its reply."""
        self.begin(do, **command)
        return self.finish()

    def fails(self, do: str, **command: Any) -> RankFailed:
        """Send a command that must raise in the rank; return the error."""
        try:
            reply = self.call(do, **command)
        except RankFailed as failed:
            return failed
        raise AssertionError(f"{do} {command} did not raise but returned {reply}")

    def send_signal(self, sig: signal.Signals) -> None:
        """Send a signal to the rank."""
        os.kill(self.pid, sig)

    def kill(self) -> None:
        """Send SIGKILL; return when the process is gone."""
        if self._lines.closed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.channel.settimeout(REPLY_S)
        with contextlib.suppress(ConnectionError):
            while self.channel.recv(65536):
                pass
        self.close()

    def close(self) -> None:
        """Hang up; a rank that runs ends by itself."""
        self._lines.close()
        self.channel.close()


def together(ranks: Sequence[RankProcess], do: str, **command: Any) -> list[dict[str, Any]]:
    """Run one collective command on all ranks."""
    for rank in ranks:
        rank.begin(do, **command)
    return [rank.finish() for rank in ranks]


def fail_together(ranks: Sequence[RankProcess], do: str, **command: Any) -> list[RankFailed]:
    """Run one collective command that must raise on all ranks; return the errors."""
    for rank in ranks:
        rank.begin(do, **command)
    found = []
    for rank in ranks:
        try:
            reply = rank.finish()
        except RankFailed as failed:
            found.append(failed)
        else:
            raise AssertionError(f"{do} {command} did not raise on rank {rank.rank} but returned {reply}")
    return found


class RankNursery(Nursery):
    """A process that has imported everything and forks ranks; a context manager whose ranks end with it."""

    def __init__(self, module: str = "memstore.testing.ranks.rank_process") -> None:
        """Start the process, which runs `module`; that must call `nursery_main`."""
        super().__init__(module)
        self._ranks: list[RankProcess] = []
        self.env: dict[str, str] = {}  # of every rank, beside what `start` gets

    def __enter__(self) -> RankNursery:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_all()
        super().__exit__()

    def start(self, rank: int, env: Mapping[str, str], *, namespace: str = "") -> RankProcess:
        """Fork a rank with these additions to its environment, in a network namespace (its path; "" for ours)."""
        pid, channel = self.fork({**self.env, **env}, namespace=namespace)
        process = RankProcess(pid, channel, rank)
        self._ranks.append(process)
        return process

    def kill_all(self) -> None:
        """Kill every rank that still lives."""
        for rank in self._ranks:
            with contextlib.suppress(OSError, ValueError):
                rank.kill()
        self._ranks.clear()


# -- the rank's side ------------------------------------------------------------------------------


def serve(channel: socket.socket, make: Callable[[], Any]) -> None:
    """Make a rank, and carry out commands until the other end hangs up."""
    if log := os.environ.get(LOG_VARIABLE):
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(message)s", stream=sys.stderr)
    shift_clock(float(os.environ.get(CLOCK_VARIABLE, "0")))
    program, lines = make(), channel.makefile("rb")

    def say(reply: dict[str, Any]) -> None:
        channel.sendall(json.dumps(reply).encode() + b"\n")

    def stop(reply: dict[str, Any]) -> None:
        say({"ok": True, **reply})
        if not lines.readline():
            os._exit(1)

    program.stop = stop
    for line in lines:
        command = json.loads(line)
        try:
            say({"ok": True, **program.answer(command.pop("do"), command)})
        except Exception as exc:
            say({"ok": False, "error": type(exc).__name__, "message": str(exc)})


def nursery_main(make: Callable[[], Any]) -> None:
    """Fork a rank for every request; what it needs is imported by now."""
    fork_children(int(sys.argv[1]), lambda channel: serve(channel, make))


if __name__ == "__main__":
    from memstore.testing.ranks.rank import RankProgram

    nursery_main(RankProgram)
