"""A rank's side of its link to the holder: leased slots, hand-overs, calls, levels (R4, R8, R11).

`put` only takes free slots and appends to `outbox`; one thread writes and pre-faults, one
reads. If the holder goes away the link comes back by itself: it confirms which slots are still its
own, and sends unsealed puts and unanswered calls again.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

from memstore.core.wire.error_message import ErrorMessage
from memstore.core.wire.frame import Kind, pack_body
from memstore.errors import (
    ClosedError,
    ConfigError,
    FencedError,
    MemstoreError,
    PeerTimeout,
    ProtocolError,
    TransportError,
)
from memstore.shell.arena.folder import commands_for
from memstore.shell.arena.lock import process_start_time
from memstore.shell.arena.slot_sample import sample
from memstore.shell.net.channel import Channel
from memstore.shell.net.listener import connect_unix
from memstore.shell.rank.arena_view import RankMapping
from memstore.shell.rank.lease_pool import CHILD, NOBODY, Handover, LeasedSlots, Tenant
from memstore.shell.threads.answers import Answer, answer_of

log = logging.getLogger("memstore")
CONNECT_S = 5.0
SEND_S = 30.0
RECONNECT_S = 0.1
REFUSED_S = 2.0  # a refusal is an answer: it is not asked about ten times a second


class HolderLink(LeasedSlots):
    """One link. Its owner sets `on_event`, which gets what concerns puts and gets, in the reader thread."""

    def __init__(
        self, folder: Path, *, nonce: str, job: str = "", rank: int = -1, is_tool: bool = False, parent: str = "",
        attempt: int = 0, connect_s: float = CONNECT_S,
    ) -> None:  # fmt: skip
        super().__init__(RankMapping(folder, ""))
        self._connect_s = connect_s  # for all of a connection's beginning, each time
        self.folder, self.nonce, self.job, self.rank = folder, nonce, job, rank
        self.attempt, self.parent = attempt, parent  # the nonce of the process whose child this is, or ""
        self.is_tool = is_tool
        self.on_event: Callable[[dict[str, Any]], None] = lambda body: None
        self.life = next(_LIVES)  # distinguishes the leases of one process's stores
        self._pid, self._start = (
            os.getpid(),
            process_start_time(os.getpid()) or 0,
        )  # once: later there may be no descriptor
        self.calls: dict[int, tuple[Future[dict[str, Any]], dict[str, Any]]] = {}
        self.call_ids = itertools.count(1)
        self.listeners: dict[int, queue.SimpleQueue[Any]] = {}  # by number: reads whose chunks come one by one
        self.outbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # a signal's handler may call
        self.is_removed = False  # it is fenced because its job was removed
        self.heir = Tenant()  # gets what this process adopts
        self.welcome: dict[str, Any] = {}
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
        """Connect and report our slots; drop those that the holder no longer leases to us (R8)."""
        deadline_s = time.monotonic() + self._connect_s
        channel = connect_unix(self.folder / "holder.sock", timeout_s=self._connect_s)
        try:
            channel.send(
                Kind.EVENT, 0,
                {
                    "k": "hello", "nonce": self.nonce, "life": self.life, "pid": self._pid, "start": self._start,
                    "job": self.job, "rank": self.rank, "attempt": self.attempt, "held": self.held(),
                    "arena": self.mapping.arena, "is_tool": self.is_tool, "parent": self.parent,
                },
                deadline_s=max(0.0, deadline_s - time.monotonic()),
            )  # fmt: skip
            welcome = channel.recv(timeout_s=max(0.0, deadline_s - time.monotonic())).body
            if welcome["k"] == "refused":
                message = self.commands(str(welcome["message"]))
                raise ErrorMessage(error=str(welcome["error"]), message=message, context=welcome["context"]).rebuilt()
            if self.welcome and welcome["chunk_bytes"] != self.welcome["chunk_bytes"]:
                raise ConfigError(
                    f"the holder in {self.folder} has chunk_bytes={welcome['chunk_bytes']} now, this process connected "
                    f"with {self.welcome['chunk_bytes']}: restart it, or the store with the former value",
                    field="chunk_bytes",
                )
        except BaseException:
            channel.close()
            raise
        self.welcome = welcome
        arena = str(welcome["arena"])
        if self.mapping.arena not in ("", arena):
            log.warning("memstore: the holder of this host has another arena: what was granted of the last one is void")
        self.take_arena(RankMapping(self.folder, arena), welcome["stale"])
        return channel

    def commands(self, text: str) -> str:
        """Return `text` with this store named in the `memstore` commands that it tells to run."""
        return commands_for(self.folder, text)

    def view(self, slot: int, nbytes: int | None = None) -> memoryview:
        """Return a slot's bytes."""
        return self.mapping.view(slot, nbytes)

    def _read_loop(self) -> None:
        while not self.closed.is_set():
            try:
                self.take_event(self.channel.recv(timeout_s=None).body)
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
            except MemstoreError as exc:
                log.warning("memstore: the holder of this host refuses this process: %s", exc)
                self.closed.wait(REFUSED_S)
                continue
            with self.room:
                again = [h for _, h in sorted(self.handovers.items())]
                for handover in again:
                    handover.is_sent = False
                calls = [body for _, (_, body) in sorted(self.calls.items())]
                self.room.notify_all()
                offers = [body for slots, body in self.offers.values() if self.lent.issuperset(slots)]
            for body in offers:
                self.call_soon("lend", body)
            for handover in again:
                self.outbox.put(lambda h=handover: self._send_handover(h))  # type: ignore[misc]
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

    def _send_handover(self, handover: Handover) -> None:
        if self.begin_sending(handover):
            self._send(handover.body)

    def _send(self, body: dict[str, Any]) -> None:
        self.channel.send(Kind.EVENT, 0, body, deadline_s=SEND_S)

    # -- events -------------------------------------------------------------------------------

    def take_event(self, body: dict[str, Any]) -> None:
        """Handle a message of the holder, or of this process."""
        kind = body["k"]
        if kind == "answer":
            with self.room:
                future, asked = self.calls.pop(int(body["id"]), (None, {}))
                if asked.get("verb") == "adopt" and body["error"] is None:  # ours before the link can break again
                    self.tenants.update(dict.fromkeys((int(n) for n in body["body"]["slots"]), self.heir))
            if future is None:
                if body["error"] is None and "pin" in body["body"]:
                    self.notify({"k": "unpin", "pin": body["body"]["pin"]})  # no caller waits for it any more
            elif body["error"] is None:
                future.set_result(body["body"])
            else:
                name, message = body["error"]
                error = ErrorMessage(error=name, message=self.commands(message), context={})
                future.set_exception(error.rebuilt())
            with self.room:
                self.room.notify_all()  # somebody waits for this or something else
        elif kind == "grant":
            slots = [int(n) for n in body["slots"]]
            mapping = self.grant(slots)
            self.outbox.put(lambda: self._take_grant(slots, mapping))
        elif kind == "level":
            if int(body["attempt"]) == self.attempt:
                self.on_event({**body, "reason": self.commands(str(body["reason"]))})
            if body["level"] != "pending":  # after it: a put that is ended by an exception looks for either
                self.answered(int(body["attempt"]), int(body["step"]))
        elif kind == "fenced":
            self.is_removed = bool(body["is_removed"])
            self.fenced_by = int(body["attempt"])
            self.on_event(body)
            with self.room:
                calls, self.calls = self.calls, {}
                self.room.notify_all()
            for future, _ in calls.values():
                future.set_exception(self.fenced_error())
        elif kind in ("check", "room", "twins"):
            self.on_event(body)
        elif kind == "came":
            with self.room:
                listener = self.listeners.get(int(body["read"]))
            if listener is not None:
                listener.put(body)

    def _take_grant(self, slots: list[int], mapping: RankMapping) -> None:
        """Pre-fault our mapping of new slots off the training thread and offer them to put, some at a time (R9)."""
        count = len(slots) if self.closed.is_set() else mapping.prefault(slots)
        self.granted(slots[:count], mapping)
        if slots[count:]:
            self.outbox.put(lambda: self._take_grant(slots[count:], mapping))

    def fenced_error(self) -> FencedError:
        """Return the error for a Store of an older attempt, of an older connect() or of a removed job (R21)."""
        if self.is_removed:
            why = "the job was removed; connect again to begin it from nothing"
        elif self.fenced_by == self.attempt:
            why = "this process has connected to the job again: use the Store that it was given then"
        else:
            why = f"attempt {self.fenced_by} was opened: end this process, or use the Store that it opened for that"
        return FencedError(f"job {self.job!r}: this Store belongs to attempt {self.attempt} and is fenced: {why}")

    # -- for the store ------------------------------------------------------------------------

    def call_soon(
        self, verb: str, body: dict[str, Any], then: Callable[[Future[dict[str, Any]]], None] | None = None
    ) -> Future[dict[str, Any]]:
        """Ask the controller through the holder; the future holds its answer, and is passed to `then`.

        Raises:
            ConfigError: An argument is nothing that a message can hold.
        """
        future: Future[dict[str, Any]] = Answer()
        if then is not None:
            future.add_done_callback(then)
        call_id = next(self.call_ids)
        message = {"k": "call", "id": call_id, "verb": verb, "body": body}
        try:
            pack_body(message)  # here: the link's thread could only log it, and the call would wait for its deadline
        except ProtocolError as exc:
            raise ConfigError(f"{verb} of job {self.job!r} cannot be asked for: {exc}") from exc
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
            return answer_of(future, timeout_s)
        except FutureTimeout:
            if future.done():
                raise
            self.forget_call(future)
            raise PeerTimeout(
                f"{verb} of job {self.job!r} was not answered within {timeout_s:g} s: is the controller running? "
                f"({self.commands('memstore status')})",
                operation=verb, waited_s=timeout_s, limit_s=timeout_s,
            ) from None  # fmt: skip

    def hear(self, listener: queue.SimpleQueue[Any]) -> int:
        """Have what the holder says of a read put there; return the number to ask it under."""
        number = next(self.call_ids)
        with self.room:
            self.listeners[number] = listener
        return number

    def unsubscribe(self, number: int) -> None:
        """End the read."""
        with self.room:
            self.listeners.pop(number, None)

    def forget_call(self, future: Future[dict[str, Any]]) -> None:
        """Drop the wait for this answer: the call is not sent again."""
        with self.room:
            for key in [k for k, (f, _) in self.calls.items() if f is future]:
                del self.calls[key]

    def lend(self, tenant: Tenant, step: int, slots: Sequence[int], mapping: RankMapping) -> Future[dict[str, Any]]:
        """Offer filled slots to a child, which may ask once this is answered; none is written here any more (R8)."""
        filled = mapping.open()
        seen = sample(filled, slots, len(slots) * filled.chunk_bytes, secrets.randbits(63))
        body = {"step": step, "slots": slots, "arena": mapping.arena, "sample": seen}
        with self.room:
            if mapping is self.mapping:
                self._move(slots, tenant, CHILD)
                self.offers[step] = slots, body
        return self.call_soon("lend", body)

    def take_back(self, step: int, slots: Sequence[int], mapping: RankMapping) -> None:
        """End an offer; what no child has is free to fill again, once the holder has said which that is."""
        with self.room:
            if mapping is not self.mapping:
                return  # the slots of that step may be another offer's by now
            self.offers.pop(step, None)
        body = {"step": step, "slots": slots}
        self.call_soon("unlend", body, lambda answer: self._taken_back(slots, mapping, answer))

    def _taken_back(self, slots: Sequence[int], mapping: RankMapping, answer: Future[dict[str, Any]]) -> None:
        ours = set(answer.result()["slots"]) if answer.exception() is None else set()
        with self.room:
            if mapping is self.mapping:
                self._move(list(ours.intersection(slots)), CHILD, NOBODY)
                self._drop([n for n in slots if self.tenants.get(n) is CHILD])
            self.room.notify_all()

    def hand_over(
        self, tenant: Tenant, step: int, slots: Sequence[int], mapping: RankMapping, body: dict[str, Any]
    ) -> bool:
        """Queue slots that were filled through `mapping` for the holder: no wait on anyone.

        False if some are no longer the tenant's (R8, R11).
        """
        try:
            seen = sample(mapping.open(), slots, int(body["nbytes"]), secrets.randbits(63))
        except (ClosedError, IndexError):  # the store is closed
            return False
        message = {"k": "handover", "step": step, "slots": slots, "arena": mapping.arena, "sample": seen, **body}
        handover = Handover(int(body["attempt"]), step, tuple(slots), message)
        passed_on: dict[int, Tenant] = dict.fromkeys(slots, handover)
        with self.room:
            if mapping is not self.mapping or any(self.tenants.get(n) is not tenant for n in slots):
                return False
            # First, because it sends nothing before the rest is done: a handler's exception may come between.
            self.outbox.put(lambda: self._send_handover(handover))
            self.handovers[handover.attempt, step] = handover
            self.tenants.update(passed_on)
        return True

    def notify(self, body: dict[str, Any]) -> None:
        """Queue a message that has no answer."""
        self.outbox.put(lambda: self._send(body))

    def close(self) -> None:
        """Give everything back and end both threads."""
        if self.closed.is_set():
            return
        with self.room:
            if self.parent:  # a holder on its way back must get it: a save process lives on, and so would its lease
                self.room.wait_for(lambda: not self.channel.is_closed, CONNECT_S)
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
        self.close_mappings()

    def forget(self) -> None:
        """In a forked child: drop the descriptor, leave the parent's connection alone (R8)."""
        self.closed.set()
        self.channel.forget()


_LIVES = itertools.count(1)
_LINKS: weakref.WeakSet[HolderLink] = weakref.WeakSet()


def _forget_in_child() -> None:
    for link in list(_LINKS):
        link.forget()


os.register_at_fork(after_in_child=_forget_in_child)
