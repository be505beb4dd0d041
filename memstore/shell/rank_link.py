"""A rank's side of its link to the holder: leased slots, hand-overs, calls, levels (R4, R8, R11).

`put` only takes slots from `pool` and appends to `outbox`; one thread writes and pre-faults, one
reads. If the holder goes away the link comes back by itself: it confirms which slots are still its
own, sends again what was not sealed, and asks again what was not answered.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memstore.core.wire import Kind, error_from_body
from memstore.errors import ClosedError, FencedError, MemstoreError, PeerTimeout, PeerUnreachable, TransportError
from memstore.shell.arena_lock import process_start_time
from memstore.shell.arena_mapping import ArenaMapping
from memstore.shell.channel import Channel
from memstore.shell.listener import connect_unix

log = logging.getLogger("memstore")
CONNECT_S = 5.0
SEND_S = 30.0
RECONNECT_S = 0.1


@dataclass(frozen=True)
class Handover:
    """Slots on their way to the holder; kept until sealed, to be sent again if the holder dies."""

    step: int
    slots: tuple[int, ...]
    body: dict[str, Any]


class RankLink:
    """One link. Its owner sets `on_event`, which gets level, check and fenced events in the reader thread."""

    def __init__(
        self, folder: Path, *, nonce: str, job: str = "", rank: int = -1, is_tool: bool = False,
    ) -> None:  # fmt: skip
        self.folder, self.nonce, self.job, self.rank = folder, nonce, job, rank
        self.attempt = 0
        self.is_tool = is_tool
        self.on_event: Callable[[dict[str, Any]], None] = lambda body: None
        self.room = threading.Condition()
        self.pool: list[int] = []  # leased and free to fill
        self.in_copy: set[int] = set()  # taken by a put that has not handed over yet
        self.handovers: dict[int, Handover] = {}  # step -> not yet sealed
        self.calls: dict[int, tuple[Future[dict[str, Any]], dict[str, Any]]] = {}
        self.call_ids = itertools.count(1)
        self.outbox: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self.closed = threading.Event()
        self.fenced_by = 0
        self.welcome: dict[str, Any] = {}
        self.mapping: ArenaMapping | None = None
        self.channel = self._connect()
        _LINKS.add(self)
        self._threads = [
            threading.Thread(target=self._read_loop, name="memstore-link-read", daemon=True),
            threading.Thread(target=self._write_loop, name="memstore-link-write", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # -- connection ---------------------------------------------------------------------------

    def _connect(self) -> Channel:
        """Connect and say what we hold; drop what the holder says is no longer ours (R8)."""
        channel = connect_unix(self.folder / "holder.sock", timeout_s=CONNECT_S)
        try:
            with self.room:
                waiting = [n for h in self.handovers.values() for n in h.slots]
                held = [*self.pool, *self.in_copy, *waiting]
            channel.send(
                Kind.EVENT, 0,
                {
                    "k": "hello", "nonce": self.nonce, "pid": os.getpid(),
                    "start": process_start_time(os.getpid()) or 0,
                    "job": self.job, "rank": self.rank, "attempt": self.attempt, "held": held, "is_tool": self.is_tool,
                },
                deadline_s=CONNECT_S,
            )  # fmt: skip
            self.welcome = channel.recv(timeout_s=CONNECT_S).body
        except MemstoreError:
            channel.close()
            raise
        stale = set(self.welcome["stale"])
        with self.room:
            self.pool = [n for n in self.pool if n not in stale]
            self.in_copy -= stale
        return channel

    def map_arena(self) -> ArenaMapping:
        """Map the arena on first use; tools that only ask never do."""
        if self.mapping is None:
            self.mapping = ArenaMapping.open(self.folder)
        return self.mapping

    def _read_loop(self) -> None:
        while not self.closed.is_set():
            try:
                self._event(self.channel.recv(timeout_s=None).body)
            except TransportError as exc:
                if self.closed.is_set():
                    return
                log.warning("memstore: lost the holder of this host (%s); reconnecting", exc)
                self._reconnect()
            except Exception:
                log.exception("memstore: an event of the holder could not be handled")

    def _reconnect(self) -> None:
        self.channel.close()
        while not self.closed.wait(RECONNECT_S):
            try:
                self.channel = self._connect()
            except TransportError:
                continue
            with self.room:
                again = [h for _, h in sorted(self.handovers.items())]
                calls = [body for _, (_, body) in sorted(self.calls.items())]
            for handover in again:
                self.outbox.put(lambda h=handover: self._send(h.body))  # type: ignore[misc]
            for body in calls:
                self.outbox.put(lambda b=body: self._send(b))  # type: ignore[misc]
            return

    def _write_loop(self) -> None:
        while True:
            work = self.outbox.get()
            if work is None:
                return
            try:
                work()
            except TransportError:
                continue  # the reader notices, reconnects and sends again
            except Exception:
                log.exception("memstore: the link thread could not do its work")

    def _send(self, body: dict[str, Any]) -> None:
        self.channel.send(Kind.EVENT, 0, body, deadline_s=SEND_S)

    # -- events -------------------------------------------------------------------------------

    def _event(self, body: dict[str, Any]) -> None:
        kind = body["k"]
        if kind == "answer":
            with self.room:
                future, _ = self.calls.pop(int(body["id"]), (None, None))
            if future is not None and body["error"] is None:
                future.set_result(body["body"])
            elif future is not None:
                name, message = body["error"]
                future.set_exception(error_from_body({"error": name, "message": message}))
        elif kind == "grant":
            slots = [int(n) for n in body["slots"]]
            self.outbox.put(lambda: self._take_grant(slots))
        elif kind == "level":
            if body["level"] != "pending":
                with self.room:
                    self.handovers.pop(int(body["step"]), None)
            self.on_event(body)
        elif kind == "fenced":
            self.fenced_by = int(body["attempt"])
            self.on_event(body)
            with self.room:
                calls, self.calls = self.calls, {}
                self.room.notify_all()
            for future, _ in calls.values():
                future.set_exception(
                    FencedError(
                        f"job {self.job!r}: attempt {self.fenced_by} was opened; this process belongs to attempt "
                        f"{self.attempt}"
                    )
                )
        elif kind == "check":
            self.on_event(body)

    def _take_grant(self, slots: list[int]) -> None:
        """Pre-fault our mapping of new slots off the training thread, then offer them to put (R9)."""
        mapping = self.map_arena()
        with contextlib.suppress(ClosedError):
            mapping.prefault(slots, self.closed.is_set)
        with self.room:
            self.pool.extend(slots)
            self.room.notify_all()

    # -- for the store ------------------------------------------------------------------------

    def call_soon(self, verb: str, body: dict[str, Any]) -> Future[dict[str, Any]]:
        """Ask the controller through the holder; the future holds its answer."""
        future: Future[dict[str, Any]] = Future()
        call_id = next(self.call_ids)
        message = {"k": "call", "id": call_id, "verb": verb, "body": body}
        with self.room:
            self.calls[call_id] = (future, message)
        self.outbox.put(lambda: self._send(message))
        return future

    def call(self, verb: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Ask and wait; PeerTimeout names the question and the limit."""
        if self.closed.is_set():
            raise ClosedError("this store is closed: connect again")
        future = self.call_soon(verb, body)
        try:
            return future.result(timeout_s)
        except FutureTimeout:
            if future.done():
                raise
            with self.room:
                for key in [k for k, (f, _) in self.calls.items() if f is future]:
                    del self.calls[key]
            raise PeerTimeout(
                f"{verb} of job {self.job!r} was not answered within {timeout_s:g} s: is the controller running? "
                "(memstore status)",
                operation=verb, waited_s=timeout_s, limit_s=timeout_s,
            ) from None  # fmt: skip

    def acquire(self, count: int, budget_s: float) -> list[int] | None:
        """Take `count` leased slots, waiting at most `budget_s`; None if there are not enough (R11, R12)."""
        deadline_s = time.monotonic() + budget_s
        with self.room:
            while len(self.pool) < count:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or self.fenced_by or self.closed.is_set():
                    return None
                self.room.wait(left_s)
            slots, self.pool = self.pool[:count], self.pool[count:]
            self.in_copy.update(slots)
            return slots

    def put_back(self, slots: list[int]) -> None:
        """A put failed before its hand-over: the slots are free to fill again."""
        with self.room:
            self.pool.extend(n for n in slots if n in self.in_copy)
            self.in_copy.difference_update(slots)
            self.room.notify_all()

    def hand_over(self, step: int, slots: list[int], body: dict[str, Any]) -> bool:
        """Queue filled slots for the holder: no wait on anyone. False if some are no longer ours (R8, R11)."""
        handover = Handover(step, tuple(slots), {"k": "handover", "step": step, "slots": slots, **body})
        with self.room:
            if not self.in_copy.issuperset(slots):
                self.in_copy.difference_update(slots)
                return False
            self.in_copy.difference_update(slots)
            self.handovers[step] = handover
        self.outbox.put(lambda: self._send(handover.body))
        return True

    def notify(self, body: dict[str, Any]) -> None:
        """Queue a message that nobody answers."""
        self.outbox.put(lambda: self._send(body))

    def close(self) -> None:
        """Give everything back and end both threads."""
        if self.closed.is_set():
            return
        self.notify({"k": "bye"})
        self.outbox.put(None)
        if threading.current_thread() is not self._threads[1]:
            self._threads[1].join(CONNECT_S)
        self.closed.set()
        self.channel.close()
        with self.room:
            calls, self.calls = self.calls, {}
            self.room.notify_all()
        for future, _ in calls.values():
            future.set_exception(ClosedError("the store was closed while a call was under way"))
        self._threads[0].join(CONNECT_S)
        if self.mapping is not None:
            self.mapping.close()

    def forget(self) -> None:
        """In a forked child: drop the descriptor, leave the parent's connection alone (R8)."""
        self.closed.set()
        self.channel.forget()


_LINKS: weakref.WeakSet[RankLink] = weakref.WeakSet()


def _forget_in_child() -> None:
    for link in list(_LINKS):
        link.forget()


os.register_at_fork(after_in_child=_forget_in_child)


def unreachable(folder: Path) -> PeerUnreachable:
    """Return the error for a host whose holder does not answer."""
    return PeerUnreachable(f"no holder answers at {folder}/holder.sock: run `memstore up`, or see `memstore status`")
