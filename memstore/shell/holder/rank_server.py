"""The holder's side of its ranks' links: leases, submissions, calls to the controller, levels (R4, R8, R11, R15).

One thread per link reads; another digests submissions in order (seal.py), so that no put waits for an answer. What is
said: core/wire/rank_messages.py.
"""

from __future__ import annotations

import logging
import threading

import xxhash

from memstore.core.arena.slot_table import Owner
from memstore.core.holder import ranks
from memstore.core.holder.puts import seal
from memstore.core.holder.reads import bring, ready
from memstore.core.wire.calls import Called
from memstore.core.wire.error_message import ErrorMessage
from memstore.core.wire.frame import Kind
from memstore.core.wire.rank_messages import (
    ArrivedDamaged,
    Bye,
    IntoChecked,
    MarksMade,
    PutReady,
    PutWaiting,
    RankHello,
    RankMessage,
    StepTrained,
    ToolHello,
    Unpin,
    decode_hello,
    decode_rank_message,
)
from memstore.errors import ConfigError, PeerUnreachable
from memstore.shell.arena.lock import process_start_time
from memstore.shell.holder.blocking_io import BlockingIo
from memstore.shell.holder.context import SEND_S, HolderContext, RankConnection
from memstore.shell.holder.pending_calls import Calls, TrainedSteps
from memstore.shell.holder.send_gate import SendGate
from memstore.shell.net.channel import Channel
from memstore.shell.net.listener import Process
from memstore.shell.peer.chunk_frames import Damage
from memstore.shell.threads import lower_thread_priority

log = logging.getLogger("memstore")


class RankServer:
    """The server of one holder's ranks: each link is read by a thread of its own."""

    def __init__(
        self,
        context: HolderContext,
        io: BlockingIo,
        calls: Calls,
        send_gate: SendGate,
        trained: TrainedSteps,
        damage: Damage,
    ) -> None:
        self.context, self.state, self.io = context, context.state, io
        self.calls, self.send_gate, self.trained, self.damage = calls, send_gate, trained, damage

    # -- one link -----------------------------------------------------------------------------

    def serve(self, channel: Channel, process: Process) -> None:
        """Read one link until it ends. Its leases stay: a rank's life is its pid, not its socket (R8, R20)."""
        hello = decode_hello(channel.recv(timeout_s=SEND_S).data)
        try:
            link = self._hello(channel, hello, owner_of(hello, process.pid))
        except ConfigError as exc:
            channel.send(Kind.EVENT, 0, ErrorMessage.of(exc), deadline_s=SEND_S)
            return
        threading.Thread(target=self._seal, args=(link,), name=f"memstore-seal-{link.nonce}", daemon=True).start()
        try:
            while True:
                self._take(link, decode_rank_message(channel.recv(timeout_s=None).data))
        except PeerUnreachable:
            return
        finally:
            with self.io.state():
                link.submitted_puts.put(None)
                ranks.end(self.state, link)
                if link.nonce not in self.state.ranks.links:  # under the lock: a new link's marks are not forgotten
                    self.send_gate.forget(link.nonce)

    def _hello(self, channel: Channel, hello: RankHello | ToolHello, owner: Owner) -> RankConnection:
        """Take the link."""
        link = RankConnection(channel, owner, hello.nonce)
        if isinstance(hello, RankHello):
            link.job, link.rank, link.attempt = hello.job, hello.rank, hello.attempt
        lives = hello.ended if isinstance(hello, RankHello) else ()
        ended = [Owner(owner.pid, owner.start, store_number(hello.nonce, life)) for life in lives]
        self.io.run(ranks.join, self.state, link, hello, ended)
        return link

    def _take(self, link: RankConnection, message: RankMessage) -> None:
        match message:
            case Called(id=number, call=request):
                self.calls.ask(ranks.ForwardedCall(link.owner, link.nonce, number, request))
            case PutReady():
                with self.io.state():  # a fence that comes now waits for it (R21)
                    if (put := seal.add(self.state, link, message)) is not None:
                        link.submitted_puts.put(put)
            case Unpin(pin=pin):
                with self.io.state():
                    ready.give_back(link, pin)
            case ArrivedDamaged(chunks=chunks, frames=frames):
                self.damage.add(chunks=chunks, frames=frames)
            case StepTrained(step=step):
                self.trained.report(link.job, link.attempt, step)
            case MarksMade(file=file):
                with self.io.state():
                    if self.state.ranks.is_current(link):  # else the rank removes it when it makes the newer link's
                        self.send_gate.watch(link.nonce, file)
            case PutWaiting(step=step):
                self.send_gate.release(link.job, link.rank, (link.attempt, step))
            case IntoChecked():
                with self.io.state():
                    bring.checked(self.state, link, message)
            case Bye(has_left=has_left):
                self.io.run(ranks.leave, self.state, link, has_left=has_left)

    def _seal(self, link: RankConnection) -> None:
        """Turn a link's submissions into sealed shards, one after another, until None is queued."""
        lower_thread_priority()
        while (put := link.submitted_puts.get()) is not None:
            self.io.run(seal.run, self.state, put)

    def answer(self, call_id: int, data: bytes, error: tuple[str, str] | None) -> None:
        """Pass the controller's answer to a call on to the rank."""
        call = self.calls.take(call_id)
        if call is not None:
            self.io.run(ranks.pass_on, self.state, call, data, error)

    # -- processes that are gone ----------------------------------------------------------------

    def reap(self) -> None:
        """Reclaim what processes leased that are proved dead."""
        self.io.run(ranks.reap, self.state)

    def expire_reads(self) -> None:
        """Let go of what readers kept for too long."""
        self.io.run(ready.expire, self.state)


def owner_of(hello: RankHello | ToolHello, pid: int) -> Owner:
    """Return the process that connects; `pid` is the kernel's word: a rank may name one of its own namespace (R8).

    Raises:
        ConfigError: The rank's process cannot be seen from here, so its death could not be noticed.
    """
    start = process_start_time(pid) if pid > 0 else None
    if start is None and isinstance(hello, RankHello):
        raise ConfigError(
            f"the holder cannot see the process that calls itself pid {hello.pid}: it runs in another pid "
            "namespace. Run ranks in the holder's container; or give both containers one namespace: in a pod "
            "`shareProcessNamespace: true`, with docker --pid=host"
        )
    return Owner(max(pid, 0), start or 0, store_number(hello.nonce, hello.life))


def store_number(nonce: str, life: int) -> int:
    """Return the number that tells the leases of one store of a process from those of its others."""
    return xxhash.xxh3_64_intdigest(f"{nonce}/{life}".encode())
