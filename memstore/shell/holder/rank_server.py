"""The holder's side of its ranks' links: leases, hand-overs, calls to the controller, levels (R4, R8, R11, R15).

One thread per link reads; another digests hand-overs in order (seal.py), so that no put waits for an answer. What is
said: core/wire/rank_messages.py.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import xxhash

from memstore.core.arena.slot_table import Owner
from memstore.core.wire.calls import AssignRanks, Join, Rewind
from memstore.core.wire.error_message import ErrorMessage
from memstore.core.wire.frame import Kind, pack_body
from memstore.core.wire.messages import shard_from_wire
from memstore.core.wire.rank_messages import (
    AdoptSlots,
    Ask,
    AskAnswered,
    AskRefused,
    Bye,
    LendSlots,
    MarksMade,
    PutReady,
    PutWaiting,
    RankHello,
    RankMessage,
    SlotsMoved,
    StepTrained,
    ToolHello,
    UnlendSlots,
    Unpin,
    Welcome,
    decode_hello,
    decode_rank_message,
)
from memstore.core.wire.reports import IntoChecked
from memstore.errors import ConfigError, IntegrityError, PeerUnreachable
from memstore.shell.arena.lock import is_alive, process_start_time
from memstore.shell.holder.context import HolderContext
from memstore.shell.holder.lease_transfer import LeaseTransfers, check_child
from memstore.shell.holder.partial_read import Excerpts
from memstore.shell.holder.pending_calls import Call, Calls
from memstore.shell.holder.rank_connections import SEND_S, RankConnection, RankConnections
from memstore.shell.holder.seal import Sealer
from memstore.shell.holder.send_gate import Traffic
from memstore.shell.holder.trained_steps import TrainedSteps
from memstore.shell.net.channel import Channel

log = logging.getLogger("memstore")


class RankServer:
    """The server of one holder's ranks: each link is read by a thread of its own."""

    def __init__(
        self, context: HolderContext, connections: RankConnections, calls: Calls, sealer: Sealer, excerpts: Excerpts,
        traffic: Traffic, trained: TrainedSteps, release_room: Callable[[], None],
    ) -> None:  # fmt: skip
        """`release_room`: gives back what no job has reserved; called when a process with leases is gone."""
        self.context, self.replicas, self.connections = context, context.replicas, connections
        self.calls, self.sealer, self.excerpts = calls, sealer, excerpts
        self.traffic, self.trained, self.release_room = traffic, trained, release_room
        self.lendings = LeaseTransfers(self.replicas)

    # -- one link -----------------------------------------------------------------------------

    def serve(self, channel: Channel, identity: dict[str, Any]) -> None:
        """Read one link until it ends. Its leases stay: a rank's life is its pid, not its socket (R8, R20)."""
        hello = decode_hello(channel.recv(timeout_s=SEND_S).data)
        try:
            link = self._hello(channel, hello, owner_of(hello, int(identity["pid"])))
        except ConfigError as exc:
            channel.send(Kind.EVENT, 0, ErrorMessage.of(exc), deadline_s=SEND_S)
            return
        self.sealer.start(link)
        try:
            while True:
                self._take(link, decode_rank_message(channel.recv(timeout_s=None).data))
        except PeerUnreachable:
            return
        finally:
            with self.connections.lock:
                link.handovers.put(None)
                if self.connections.forget(link):
                    self.traffic.forget(link.nonce, link.job, link.rank)
            for release in list(link.pins.values()):
                release()

    def _hello(self, channel: Channel, hello: RankHello | ToolHello, owner: Owner) -> RankConnection:
        """Take the link; confirm which of the rank's slots are still its own (R8)."""
        link, held, is_ours = RankConnection(channel, owner, hello.nonce), tuple[int, ...](), True
        if isinstance(hello, RankHello):
            link.job, link.rank, link.attempt, link.parent = hello.job, hello.rank, hello.attempt, hello.parent or ""
            # A rank filled the slots that it holds of another arena there, so none of them is its own here.
            held, is_ours = hello.held, hello.arena == self.replicas.arena.identity
        with self.connections.lock:
            if link.parent:
                lender = self.connections.owners.get(link.parent)
                if lender is None:
                    raise ConfigError(f"no process has joined as {link.parent!r}: connect the training process first")
                check_child(owner.pid, lender.pid, link.parent)
            # In one step: no grant may go to the old link after this, nor overtake the welcome on the new one.
            old = self.connections.links.get(link.nonce)
            if old is not None and old.owner == owner:
                self.sealer.retire(old)
                old.channel.abort()
            with self.replicas.lock:
                _, stale = self.replicas.table.confirm(owner, held if is_ours else ())
                self.replicas.flush()
            link.send(
                Welcome(
                    stale=tuple(stale) if is_ours else held, arena=self.replicas.arena.identity,
                    chunk_bytes=self.replicas.chunk_bytes, store=self.context.config.store_fields(),
                    job_defaults=self.context.config.job_defaults(),
                )
            )  # fmt: skip
            self.connections.links[link.nonce] = link
            if isinstance(hello, RankHello):
                is_new, self.connections.owners[link.nonce] = link.nonce not in self.connections.owners, owner
                if is_new:  # said after it is in the inventory: of two sessions, one has it
                    self.context.report("rank_here", {"nonce": link.nonce})
                if link.parent:
                    self.connections.parents[link.nonce] = link.parent
                self.context.idle.used()
            committed = self.connections.committed.get(link.job)
        fenced = self.context.fences.first(link.job)
        if link.attempt and link.attempt < fenced:
            self.connections.send_fenced(link)
        elif committed is not None and committed.attempt == link.attempt:
            link.send(committed)
        self.connections.grant(link)
        return link

    def _take(self, link: RankConnection, message: RankMessage) -> None:
        match message:
            case Ask(id=number, call=request):
                self.calls.ask(Call(link.owner, link.nonce, number, request))
            case LendSlots() | AdoptSlots() | UnlendSlots():
                self._transfer(link, message)
            case PutReady():
                self.sealer.add(link, message)
            case Unpin(pin=pin):
                link.pins.pop(pin, lambda: None)()
            case StepTrained(step=step):
                self.trained.hear(link.job, link.attempt, step)
            case MarksMade(file=file):
                self.traffic.watch(link.nonce, file)
            case PutWaiting(step=step):
                self.traffic.release(link.job, link.rank, (link.attempt, step))
            case IntoChecked(error=error):
                told = {"job": message.job, "round": message.round, "rank": message.rank, "ok": error is None}
                why = None if error is None else [error.error, error.message]
                self.context.report("checked", {**told, "error": why})
            case Bye():
                self._bye(link)

    def _transfer(self, link: RankConnection, question: LendSlots | AdoptSlots | UnlendSlots) -> None:
        """Lend, adopt or give back slots, and answer before any other word on the link's leases."""
        answer: SlotsMoved | AskRefused
        with link.grants:
            try:
                with self.connections.lock:
                    answer = SlotsMoved(id=question.id, slots=tuple(self._moved(link, question)))
            except (LookupError, IntegrityError) as exc:
                answer = AskRefused(id=question.id, error="CommitError", message=str(exc))
                if isinstance(question, LendSlots):  # a child that asks for it hears only that there is none
                    log.warning("job %s rank %d: %s", link.job, link.rank, exc)
            link.send(answer)

    def _moved(self, link: RankConnection, question: LendSlots | AdoptSlots | UnlendSlots) -> Sequence[int]:
        """Return the slots that are the asking process's by the answer."""
        match question:
            case LendSlots():
                self.lendings.lend(link.owner, question)
                return ()
            case UnlendSlots(step=step, slots=slots):
                return self.lendings.unlend(link.owner, step, slots)
            case AdoptSlots(step=step):
                return self.lendings.adopt(self.connections.owners.get(link.parent), link.owner, step)

    def answer(self, call_id: int, body: dict[str, Any], error: list[str] | None) -> None:
        """Pass the controller's answer to a call on to the rank, with the place of the bytes if it is a get."""
        call = self.calls.take(call_id)
        with self.connections.lock:
            link = self.connections.links.get(call.nonce) if call is not None else None
        if call is None or link is None or link.owner != call.owner:
            return
        if isinstance(call.request, Join | Rewind | AssignRanks) and error is None:
            link.attempt, link.rank = int(body["attempt"]), int(body["rank"])
        if "shard" in body and error is None:
            body, error = self._with_place(link, body)
        if error is not None:
            link.send(AskRefused(id=call.rank_id, error=error[0], message=error[1]))
        else:
            link.send(AskAnswered(id=call.rank_id, reply=pack_body(body)))

    def _with_place(self, link: RankConnection, body: dict[str, Any]) -> tuple[dict[str, Any], list[str] | None]:
        try:
            manifest, slots, release = self._part(int(body["excerpt"])) if "excerpt" in body else self._shard(body)
        except IntegrityError as exc:
            return {}, ["RecoveryError", str(exc)]
        return {**body, "manifest": manifest, "slots": list(slots), "pin": self._hold(link, release)}, None

    def _part(self, number: int) -> tuple[bytes, Sequence[int | None], Callable[[], None]]:
        """Take the chunks that were brought for a read: their manifest, slots, and what lets go of them."""
        excerpt = self.excerpts.take(number)
        return excerpt.manifest, excerpt.draft.slots, functools.partial(self.excerpts.release, number)

    def _shard(self, body: dict[str, Any]) -> tuple[bytes, Sequence[int | None], Callable[[], None]]:
        """Pin the shard that was brought for a read, and return the same of it."""
        pinned = self.replicas.pin(shard_from_wire(body["shard"]), str(body["digest"]), is_reader=True)
        if pinned is None:
            raise IntegrityError("the staged shard was dropped before it could be read: call get() again")
        release = functools.partial(self.replicas.unpin, *pinned)
        try:
            return self.replicas.manifest(pinned[0]), pinned[0].slots, release
        except BaseException:
            release()
            raise

    def _hold(self, link: RankConnection, release: Callable[[], None]) -> int:
        """Keep a pin until its reader lets go or the link ends; not one of a link that has just ended (R7)."""
        number = next(link.pin_numbers)
        with self.connections.lock:
            if self.connections.links.get(link.nonce) is link:
                link.pins[number] = release
                return number
        release()
        return number

    # -- processes that are gone ----------------------------------------------------------------

    def _bye(self, link: RankConnection) -> None:
        """Free what a rank that closed its store had leased and not handed over."""
        self.sealer.drain_owner(link.owner, SEND_S)
        self.calls.forget(link.owner)
        self.connections.left(link)
        self._reclaim(link.owner)
        if link.parent:
            self.connections.grant_job(link.job)

    def reap(self) -> None:
        """Reclaim the leases of processes that are proved dead, and report these processes (R8, R20)."""
        for nonce, owner in self.connections.take_dead(lambda owner: is_alive(owner.pid, owner.start)).items():
            self._reclaim(owner)
            self.calls.forget(owner)
            with self.connections.lock:
                link = self.connections.links.get(nonce)
            if link is not None:
                link.channel.close()
            self.context.report("rank_gone", {"nonce": nonce})
        with self.connections.lock:
            known = set(self.connections.owners.values())
            jobs = {link.job for link in self.connections.links.values() if link.job}
        with self.replicas.lock:
            leased = self.replicas.table.leases
            for owner in [o for o in leased if o not in known and not is_alive(o.pid, o.start)]:
                self.replicas.table.reclaim(owner)
            self.replicas.flush()
        for job in jobs:
            self.connections.grant_job(job)

    def _reclaim(self, owner: Owner) -> None:
        """Take back what a process leased and did not hand over."""
        with self.connections.lock, self.replicas.lock:
            self.lendings.forget(owner)
            self.replicas.table.reclaim(owner)
            self.replicas.flush()
        self.release_room()


def owner_of(hello: RankHello | ToolHello, pid: int) -> Owner:
    """Return the process that connects; `pid` is the kernel's word: a rank may name one of its own namespace (R8).

    Raises:
        ConfigError: The rank's process cannot be seen from here, so its death could not be noticed.
    """
    generation = xxhash.xxh3_64_intdigest(f"{hello.nonce}/{hello.life}".encode())
    start = process_start_time(pid) if pid > 0 else None
    if start is None and isinstance(hello, RankHello):
        raise ConfigError(
            f"the holder cannot see the process that calls itself pid {hello.pid}: it runs in another pid "
            "namespace. Run ranks in the holder's pid namespace, or with the host's (--pid=host)"
        )
    return Owner(max(pid, 0), start or 0, generation)
