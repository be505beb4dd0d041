"""Connections from the ranks' watchdogs, in the process that replaces lost ranks: ends and silence say who is lost.

The kernels probe an idle connection (SO_KEEPALIVE), and end it once the other host's has not answered for two thirds of
`hang_after_s` (TCP_USER_TIMEOUT); for half of `hang_after_s` after that the watchdog may connect again. So a rank that
is starved of CPU is not lost, nor those of a network that breaks for two thirds; a host that is frozen or cut off is.

A kernel answers for a process that is stopped, so each watchdog also says once a second that it goes on. One that has
said nothing for `hang_after_s` and two seconds is frozen with its rank, by the clock of the others' words: if this
process is paused, or no watchdog gets through, nothing comes from any, and none is lost.
"""

from __future__ import annotations

import errno
import selectors
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from memstore.core.wire.status_rows import Cause
from memstore.inplace.watchdog import ALIVE, ALIVE_S, BYE, FROZEN, GONE, MAX_LINE_BYTES, probe

UNWATCHED_S = 10.0  # a watchdog that was killed is started again by its rank, unless that has ended with it
LATE_S = 2 * ALIVE_S  # by which a watchdog's word may come late, beside `hang_after_s`
SILENT_SHARE, AGAIN_SHARE = 2 / 3, 1 / 2  # of hang_after_s: until a connection ends, until another one must be there
# A reset comes from a host that gets no answer from here, or has started again: a watchdog that ends sends an end.
SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ECONNRESET)
Process = tuple[int, int]  # a rank, and which of the processes that have been this rank


class End(Enum):
    """Why a connection of a watchdog ended; ABSENT, UNSEEN: it did not, the rank is lost by what others say."""

    GONE = "ended"
    FROZEN = "frozen"
    SILENT = "silent"
    BROKEN = "unwatched"
    ABSENT = "absent"
    UNSEEN = "ray"

    @property
    def cause(self) -> Cause:
        """Return the cause as it travels."""
        return self.value

    def silent_s(self, hang_after_s: float) -> float:
        """Return for how long nothing came from a rank before it counted as lost."""
        silent_s = {
            End.FROZEN: hang_after_s,
            End.SILENT: hang_after_s * (SILENT_SHARE + AGAIN_SHARE),
            End.BROKEN: UNWATCHED_S,
        }
        return silent_s.get(self, 0.0)


WORDS = {GONE: End.GONE, FROZEN: End.FROZEN}  # a watchdog's last


@dataclass(frozen=True, slots=True)
class LifelineHello:
    """The line that a watchdog begins with."""

    run: str
    process: Process


def parse_hello(line: bytes) -> LifelineHello | None:
    """Read a watchdog's first line; None if it is no watchdog's."""
    match line.removesuffix(b"\n").split(b" "):
        case [run, rank, life] if line.endswith(b"\n") and run.isalnum() and rank.isdigit() and life.isdigit():
            return LifelineHello(run.decode("ascii", "replace"), (int(rank), int(life)))
    return None


class Roll:
    """Which processes of ranks are lost. Pure: what happened is reported to it, with its time.

    unknown --hello--> watched --`bye`--> unknown
                        |   ^
           BROKEN or    |   | hello
             SILENT     v   |
                     unwatched --UNWATCHED_S or AGAIN_SHARE--> lost
    watched --GONE or FROZEN, or silent while others speak--> lost
    unknown --it was expected until now--> lost
    """

    def __init__(self, hang_after_s: float) -> None:
        self._again_s, self._silent_s = hang_after_s * AGAIN_SHARE, hang_after_s + LATE_S
        self._spoke_s: dict[Process, float] = {}  # when each watchdog spoke last
        self._known: set[Process] = set()  # those that have spoken, if only to say `bye`
        self._lines: Counter[Process] = Counter()  # open connections: a new one may come before the old one's end
        self._due: dict[Process, tuple[float, End]] = {}  # when a process is lost unless it has a watchdog again

    def expect(self, process: Process, until: float) -> None:
        """Note that a process has begun: frozen if it has no watchdog by then."""
        if process not in self._known:
            self._due[process] = until, End.FROZEN

    def hello(self, process: Process, now: float) -> None:
        """Note that a process has a watchdog, or another one."""
        self._known.add(process)
        self._lines[process] += 1
        self._due.pop(process, None)
        self._spoke_s[process] = now

    def spoke(self, process: Process, now: float) -> None:
        """Note that a process's watchdog goes on."""
        self._spoke_s[process] = now

    def left(self, process: Process) -> None:
        """Note that a watchdog said `bye`: the process may end."""
        self._lines[process] -= 1
        self._due.pop(process, None)
        self._spoke_s.pop(process, None)

    def ended(self, process: Process, end: End, now: float) -> None:
        """Note that a connection ended without `bye`, at a moment in seconds on a monotonic clock."""
        self._lines[process] -= 1
        if end in WORDS.values():
            self._due[process] = now, end
        elif self._lines[process] <= 0:
            self._due[process] = now + (self._again_s if end is End.SILENT else UNWATCHED_S), end

    def take_lost(self, lives: Mapping[int, int], now: float) -> dict[int, End]:
        """Return the ranks that are lost and were not returned before.

        Args:
            lives: By rank, the number of the process that is this rank now; former ones do not count.
            now: Seconds on a monotonic clock.
        """
        newest_s = max(self._spoke_s.values(), default=now)
        for process in [each for each, last_s in self._spoke_s.items() if newest_s - last_s >= self._silent_s]:
            del self._spoke_s[process]
            if self._lines[process] > 0:
                self._due[process] = now, End.FROZEN
        lost = {process: end for process, (due_s, end) in self._due.items() if now >= due_s}
        for process in lost:
            del self._due[process]
        return {rank: end for (rank, life), end in lost.items() if lives.get(rank) == life}


@dataclass(slots=True)
class _Line:
    """What came over a connection and was not read as a line yet, and whose connection it is."""

    process: Process | None = None
    received: bytes = b""

    def take_lines(self) -> list[bytes]:
        """Return the whole lines."""
        *lines, self.received = self.received.split(b"\n")
        return [line + b"\n" for line in lines]


class Lifelines:
    """The connections; one thread looks."""

    def __init__(self, run: str, hang_after_s: float) -> None:
        self._run, self._timeout_ms = run, max(1, round(hang_after_s * SILENT_SHARE * 1000))
        self._roll = Roll(hang_after_s)
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server(("0.0.0.0", 0), backlog=4096)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)

    @property
    def port(self) -> int:
        """Return the port that watchdogs connect to."""
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """End all connections."""
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            self._end(key.fileobj)
        self._selector.close()

    def take_lost(self, lives: Mapping[int, int], now: float) -> dict[int, End]:
        """Look at all connections, and return the ranks that were lost since the last look."""
        for key, _ in self._selector.select(0):
            if key.fileobj is self._listener:
                self._accept()
            else:
                self._read(key, now)
        return self._roll.take_lost(lives, now)

    def expect(self, process: Process, until: float) -> None:
        """Take a process for frozen if no watchdog of it has connected by then."""
        self._roll.expect(process, until)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # no connection waits any more
                return
            sock.setblocking(False)
            probe(sock, self._timeout_ms)
            self._selector.register(sock, selectors.EVENT_READ, _Line())

    def _read(self, key: selectors.SelectorKey, now: float) -> None:
        sock, line = key.fileobj, key.data
        assert isinstance(sock, socket.socket)
        end: End | None
        try:
            received = sock.recv(MAX_LINE_BYTES)
            line.received += received
            end = None if received else End.BROKEN
        except BlockingIOError:
            return
        except OSError as exc:
            end = End.SILENT if exc.errno in SILENT else End.BROKEN
        said = line.take_lines()
        if line.process is None and said:
            hello = parse_hello(said.pop(0))
            if hello is None or hello.run != self._run:
                return self._end(sock)
            line.process = hello.process
            self._roll.hello(hello.process, now)
        if line.process is not None and ALIVE in said:
            self._roll.spoke(line.process, now)
        said = [word for word in said if word != ALIVE]
        if said or end is not None or len(line.received) > MAX_LINE_BYTES:
            self._end(sock)
            if line.process is not None and said[:1] == [BYE]:
                self._roll.left(line.process)
            elif line.process is not None:
                self._roll.ended(line.process, WORDS.get(b"".join(said[:1]), end or End.BROKEN), now)
        return None

    def _end(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        sock.close()
