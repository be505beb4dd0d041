"""A rank's side of its link to the holder: the socket, and what is sent again on the next one (R4, R8, R11).

`put` only takes free slots (`leases.py`) and appends to `outbox`; one thread writes and pre-faults, one reads. If the
holder goes away the link comes back by itself: it confirms which slots are still its own, and sends unsealed puts and
unanswered calls again.
"""

from __future__ import annotations

import contextlib
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
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import msgspec

from memstore.core.wire.calls import Called, RankCall, decode_call
from memstore.core.wire.codec import Request, encode, reply_decoder, tag_of
from memstore.core.wire.error_message import ErrorMessage
from memstore.core.wire.frame import Kind
from memstore.core.wire.orders import CallAnswered, StepLevel
from memstore.core.wire.rank_messages import (
    AttemptFenced,
    Bye,
    HolderEvent,
    PutReady,
    PutTerms,
    RankHello,
    RankMessage,
    SlotsLeased,
    ToolHello,
    Unpin,
    Welcome,
    decode_greeting,
    decode_holder_event,
)
from memstore.core.wire.replies import Joined, decode_pinned
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
from memstore.shell.arena.mapping import sample
from memstore.shell.net.channel import Channel
from memstore.shell.net.listener import connect_unix
from memstore.shell.rank.arena_view import RankMapping
from memstore.shell.rank.leases import Leases, Tenant
from memstore.shell.rank.peer_chunks import Fetches
from memstore.shell.threads import Answer, SafeCondition, answer_of

# -- open links ---------------------------------------------------------------------------------------
# The open links of this process, whichever store they are of, and whether they are interrupted.


class OpenLink(Protocol):
    """A link to a holder."""

    job: str
    closed: threading.Event

    def interrupt(self, why: str) -> None:
        """End every wait on it, for good."""

    def forget(self) -> None:
        """Drop it in a forked child."""


_LINKS: weakref.WeakSet[OpenLink] = weakref.WeakSet()
_why = ""  # the links of this process are interrupted, also those to come


def note_open(link: OpenLink) -> None:
    """Take a link that was opened; it is forgotten with its last reference."""
    _LINKS.add(link)
    if _why and link.job:  # read after it was added: else interrupt_all() in another thread could miss it
        link.interrupt(_why)


def interrupt_all(why: str) -> None:
    """Interrupt every link of a rank in this process, and each that is opened from now on."""
    global _why
    _why = why
    for link in list(_LINKS):
        if link.job and not link.closed.is_set():
            link.interrupt(why)


def allow_links() -> None:
    """Let links that are opened from now on work."""
    global _why
    _why = ""


def _forget_in_child() -> None:
    for link in list(_LINKS):
        link.forget()


os.register_at_fork(after_in_child=_forget_in_child)


# -- link ---------------------------------------------------------------------------------------------
# The link of one rank to the holder of its host.


R = TypeVar("R")
log = logging.getLogger("memstore")
CONNECT_S = 5.0
SEND_S = 30.0
RECONNECT_S = 0.1
SEED_BITS = 62  # what an Unsigned has
REFUSED_S = 2.0  # after a refusal wait this long, instead of RECONNECT_S, before the next try


class HolderLink:
    """One link.

    Its owner sets `on_event`, which gets what concerns puts and gets, and `on_fenced`; the link's threads call both.
    """

    def __init__(
        self, folder: Path, *, nonce: str, job: str = "", rank: int = -1, attempt: int = 0, connect_s: float = CONNECT_S
    ) -> None:
        """Without a job it is a tool's link, which only asks."""
        self.leases = Leases(RankMapping(folder, ""))
        self._connect_s = connect_s  # for all of a connection's beginning, each time
        self.folder, self.nonce, self.job, self.rank = folder, nonce, job, rank
        self.attempt = attempt
        self.on_event: Callable[[HolderEvent], None] = lambda event: None
        self.on_fenced: Callable[[FencedError], None] = lambda error: None
        self.life = next(_LIVES)  # distinguishes the leases of one process's stores
        self.answered = SafeCondition()  # some call; guards the calls, and which channel is the present one
        self.calls: dict[int, tuple[Future[Any], Called]] = {}
        self.call_ids = itertools.count(1)
        self.outbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # a signal's handler may call
        self.closed = threading.Event()
        self.fenced = ""  # why its Store may do nothing any more
        self.interrupted = ""  # the same, where this process ended its own waits
        self.fetches = Fetches()
        self.channel, self.welcome = self._connect(None)
        note_open(self)
        self._threads = [
            threading.Thread(target=self._read_loop, name="memstore-link-read", daemon=True),
            threading.Thread(target=self._write_loop, name="memstore-link-write", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # -- connection ---------------------------------------------------------------------------

    def _hello(self) -> RankHello | ToolHello:
        if not self.job:
            return ToolHello(nonce=self.nonce, life=self.life, pid=os.getpid())
        return RankHello(
            nonce=self.nonce,
            life=self.life,
            pid=os.getpid(),
            job=self.job,
            rank=self.rank,
            attempt=self.attempt,
            held=tuple(self.leases.held()),
            arena=self.leases.mapping.arena,
            ended=tuple(_ENDED.get((self.folder, self.nonce), ())),
        )

    def _connect(self, before: Welcome | None) -> tuple[Channel, Welcome]:
        """Connect and report our slots; drop those that the holder no longer leases to us (R8)."""
        deadline_s = time.monotonic() + self._connect_s
        channel = connect_unix(self.folder / "holder.sock", timeout_s=self._connect_s)
        try:
            hello = self._hello()
            channel.send(Kind.EVENT, 0, hello, deadline_s=max(0.0, deadline_s - time.monotonic()))
            welcome = decode_greeting(channel.recv(timeout_s=max(0.0, deadline_s - time.monotonic())).data)
            if isinstance(welcome, ErrorMessage):
                raise msgspec.structs.replace(welcome, message=self.commands(welcome.message)).rebuilt()
            if before is not None and welcome.chunk_bytes != before.chunk_bytes:
                raise ConfigError(
                    f"the holder in {self.folder} has chunk_bytes={welcome.chunk_bytes} now, this process connected "
                    f"with {before.chunk_bytes}: restart it, or the store with the former value",
                    field="chunk_bytes",
                )
        except BaseException:
            channel.close()
            raise
        if isinstance(hello, RankHello):
            _ENDED.get((self.folder, self.nonce), set()).difference_update(hello.ended)
        if self.leases.mapping.arena not in ("", welcome.arena):
            log.warning(
                "memstore: the holder of this host has another arena: the slots that this process had in the old arena "
                "are no longer valid"
            )
        self.leases.take_arena(RankMapping(self.folder, welcome.arena), welcome.stale)
        return channel, welcome

    def commands(self, text: str) -> str:
        """Return `text` with this store named in the `memstore` commands that it names."""
        return commands_for(self.folder, text)

    def _read_loop(self) -> None:
        while not self.closed.is_set():
            try:
                self.take_event(decode_holder_event(self.channel.recv(timeout_s=None).data))
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
                channel, welcome = self._connect(self.welcome)
            except MemstoreError as exc:
                if isinstance(exc, TransportError) and not isinstance(exc, ProtocolError):
                    continue
                log.warning("memstore: the holder of this host refuses this process: %s", exc)
                self.closed.wait(REFUSED_S)
                continue
            with self.answered:
                is_closed = self.closed.is_set()  # meanwhile: its `bye` went to the link that was lost
                self.channel, self.welcome = channel, welcome
                calls = [call for _, (_, call) in sorted(self.calls.items())]
            if is_closed:
                self._leave(channel)
                return
            for put in self.leases.to_send_again():  # what is sent from now on goes to this channel
                self.outbox.put(partial(self._send_put, put))
            for call in calls:
                self.notify(call)
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

    def _send_put(self, put: Tenant) -> None:
        if self.leases.begin_sending(put) and put.message is not None:
            self._send(put.message)

    def _send(self, message: RankMessage) -> None:
        self.channel.send(Kind.EVENT, 0, message, deadline_s=SEND_S)

    # -- events -------------------------------------------------------------------------------

    def take_event(self, event: HolderEvent) -> None:
        """Take what the holder says."""
        match event:
            case CallAnswered():
                self._take_answer(event)
            case SlotsLeased(slots=slots):
                mapping = self.leases.grant(slots)
                self.outbox.put(lambda: self._take_grant(event, slots, mapping))
            case StepLevel():
                if event.attempt == self.attempt:
                    self.on_event(msgspec.structs.replace(event, reason=self.commands(event.reason)))
                if event.level != "pending":  # after it: a put that is ended by an exception looks for either
                    self.leases.answered(event.attempt, event.step)
            case AttemptFenced():
                is_news = not (self.fenced or self.interrupted) and event.attempt != self.attempt
                if event.is_removed:
                    self.fence("the job was removed; connect again to begin it from nothing")
                else:
                    self.fence_by(event.attempt)
                if is_news:  # now, and not only in the error of the next put
                    log.warning("memstore: %s", self.fenced_error())
            case _:
                self.on_event(event)

    def _take_answer(self, event: CallAnswered) -> None:
        with self.answered:
            future, asked = self.calls.pop(event.id, (None, None))
        if event.error is not None:
            name, why = event.error
            error = ErrorMessage(error=name, message=self.commands(why), context={}).rebuilt()
            if future is not None:
                future.set_exception(error)
        elif future is not None and asked is not None:
            self._settle(future, asked, event)
        else:
            with contextlib.suppress(ProtocolError):  # the answer to another call
                self.notify(Unpin(pin=decode_pinned(event.reply).pin))  # its reader has given up
        with self.answered:
            self.answered.notify_all()  # a thread waits for this or something else

    def _settle(self, future: Future[Any], asked: Called, event: CallAnswered) -> None:
        """Give a future its answer. An attempt that it names is this link's from now on, if it breaks or not."""
        try:
            reply = reply_decoder(type(asked.call))(event.reply)
            if isinstance(reply, Joined):
                self.attempt, self.rank = reply.attempt, reply.rank
            future.set_result(reply)
        except ProtocolError as exc:
            future.set_exception(exc)

    def _fail_calls(self, error: MemstoreError) -> None:
        with self.answered:
            calls, self.calls = self.calls, {}
        for future, _ in calls.values():
            future.set_exception(error)
        with self.answered:
            self.answered.notify_all()

    def _take_grant(self, event: SlotsLeased, slots: Sequence[int], mapping: RankMapping) -> None:
        """Pre-fault our mapping of new slots off the training thread and offer them to put, some at a time (R9)."""
        count = len(slots) if self.closed.is_set() else mapping.prefault(slots)
        self.leases.granted(slots[:count], mapping)
        if slots[count:]:
            self.outbox.put(lambda: self._take_grant(event, slots[count:], mapping))
        else:
            self.on_event(event)

    def fenced_error(self) -> FencedError:
        """Return the error for a Store of an older attempt, of an older connect() or of a removed job (R21)."""
        whose = f"this Store belongs to attempt {self.attempt} and is fenced"
        why = self.fenced or self.interrupted  # a wait may end before the link is fenced
        return FencedError(f"job {self.job!r}: {whose}: {why}")

    def fence(self, why: str) -> None:
        """End every wait on this link with a FencedError that says `why`; no put that is not filled is submitted."""
        self.fenced = self.interrupted or why
        self.leases.end()
        self.on_fenced(self.fenced_error())
        self._fail_calls(self.fenced_error())

    def fence_by(self, attempt: int) -> None:
        """Fence it because an attempt was opened, by this process's next connect() if it is the same."""
        if attempt == self.attempt:
            self.fence("this process has connected to the job again: use the Store that it was given then")
        else:
            self.fence(f"attempt {attempt} was opened by a newer connect(): end this process, or use its Store")

    def interrupt(self, why: str) -> None:
        """Fence it because this process ends its own waits, to go on in another attempt; any thread, more than once."""
        self.interrupted = why
        self.fetches.close()
        self.fence(why)

    def who(self) -> dict[str, Any]:
        """Return the fields of a request that say which rank asks."""
        return {"job": self.job, "attempt": self.attempt, "rank": self.rank}

    # -- for the store ------------------------------------------------------------------------

    def call_soon(self, request: Request[R], then: Callable[[Future[R]], None] | None = None) -> Future[R]:
        """Ask the controller through the holder; the future holds its answer.

        Args:
            request: What is asked.
            then: Gets the future before it can be forgotten. If the link is closed, it holds a ClosedError at once.

        Raises:
            ConfigError: An argument is nothing that the message can hold.
        """
        try:
            decode_call(encode(request))  # the holder would end the link, and the call would wait for its deadline
        except ProtocolError as exc:
            raise ConfigError(f"{self._named(request)} cannot be asked for: {exc.__cause__ or exc}") from exc
        future: Future[Any] = Answer()
        if then is not None:
            future.add_done_callback(then)
        asked = Called(id=next(self.call_ids), call=cast(RankCall, request))
        if self._note_call(future, asked):
            self.notify(asked)
        else:
            future.set_exception(ClosedError("this store is closed: connect again"))
        return future

    def _note_call(self, future: Future[Any], asked: Called) -> bool:
        """Have a call answered, or failed by `close`; False if the link is closed."""
        if self.closed.is_set():  # looked at first: in a forked child another process's thread may have the lock
            return False
        with self.answered:
            if self.closed.is_set():  # `close` has failed the calls, or does so next
                return False
            self.calls[asked.id] = (future, asked)
        return True

    def call(self, request: Request[R], timeout_s: float) -> R:
        """Ask and wait; PeerTimeout names the question and the limit."""
        future, what = self.call_soon(request), self._named(request)
        try:
            return answer_of(future, timeout_s)
        except FutureTimeout:
            if future.done():
                raise
            self.forget_call(future)
            raise PeerTimeout(
                f"{what} was not answered within {timeout_s:g} s: is the controller running? "
                f"({self.commands('`memstore status`')})",
                operation=what.partition(" ")[0],
                waited_s=timeout_s,
                limit_s=timeout_s,
            ) from None

    def _named(self, request: Request[Any]) -> str:
        """Return what an error calls a question: a tool's link is of no job, and asks about many."""
        job = getattr(request, "job", None) or self.job
        return f"{tag_of(request)} of job {job!r}" if job else tag_of(request)

    def wait_any(self, futures: Sequence[Future[Any]], timeout_s: float | None) -> bool:
        """Wait until one of some calls is done, at most so long; return whether one is.

        concurrent.futures.wait enters locks of all of them by Python: a signal's handler would leave some held.
        """
        with self.answered:
            return bool(self.answered.wait_for(lambda: any(future.done() for future in futures), timeout_s))

    def forget_call(self, future: Future[Any]) -> None:
        """Forget a call: no thread waits for its answer, and a reconnect must not send it again."""
        with self.answered:
            for key in [k for k, (f, _) in self.calls.items() if f is future]:
                del self.calls[key]

    def submit(
        self, put: Tenant, terms: PutTerms, *, layout: bytes, nbytes: int, stall_s: float, digests: bytes | None
    ) -> bool:
        """Queue an open put, whose bytes are complete, for the holder, without a wait.

        False if some of its slots are no longer its own (R8, R11), or this link is fenced. `stall_s` is for people.
        """
        try:
            assert put.mapping is not None
            seen = sample(put.mapping.open(), put.slots, nbytes, secrets.randbits(SEED_BITS))
        except (ClosedError, IndexError):  # the store is closed
            return False
        message = PutReady(
            terms=terms,
            slots=tuple(put.slots),
            arena=put.mapping.arena,
            sample=seen,
            layout=layout,
            nbytes=nbytes,
            stall_s=stall_s,
            digests=digests,
        )
        with self.leases.changed:
            # First: if a signal's handler raises before the rest is done, it finds no filled put.
            self.outbox.put(partial(self._send_put, put))
            return self.leases.fill(put, message)

    def notify(self, message: RankMessage) -> None:
        """Queue a message."""
        self.outbox.put(lambda: self._send(message))

    def close(self) -> None:
        """Give everything back and end both threads."""
        if self.closed.is_set():
            return
        self.outbox.put(None)
        if threading.current_thread() is not self._threads[1]:
            self._threads[1].join(CONNECT_S)
        with self.answered:
            self.closed.set()
            channel = self.channel
        self.leases.end()
        self._leave(channel)
        self._fail_calls(ClosedError("the store was closed while a call was under way"))
        self._threads[0].join(CONNECT_S)
        self.leases.close_mappings()
        if self.job:
            _ENDED.setdefault((self.folder, self.nonce), set()).add(self.life)

    def _leave(self, channel: Channel) -> None:
        """Say bye on a channel, if it still works, and close it: a lease would last as long as this process."""
        with contextlib.suppress(MemstoreError):
            channel.send(Kind.EVENT, 0, Bye(has_left=bool(self.interrupted)), deadline_s=SEND_S)
        channel.close()

    def forget(self) -> None:
        """In a forked child: drop the descriptor, leave the parent's connection alone (R8)."""
        self.closed.set()
        self.channel.forget()


_LIVES = itertools.count(1)
_ENDED: dict[tuple[Path, str], set[int]] = {}  # (folder, nonce) -> lives of closed links that no hello has named
