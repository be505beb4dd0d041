"""The holder's side of its ranks' links: leases, hand-overs, calls to the controller, levels (R4, R8, R11, R15).

One thread per link reads; another digests hand-overs in order (seal.py), so that no put waits for an answer.
EVENT bodies, key "k":

    rank -> holder   hello, call (id, verb, body), handover, unpin, checked, marks, waits
    holder -> rank   welcome, refused, answer, grant, room, level, resume, check, fenced, came (chunk_notifier.py)
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import xxhash

from memstore.core.arena.slot_table import Owner
from memstore.core.wire.error_message import ErrorMessage
from memstore.core.wire.frame import Kind
from memstore.core.wire.messages import shard_from_wire
from memstore.errors import ConfigError, DigestMismatch, IntegrityError, PeerUnreachable, ProtocolError
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
        body = channel.recv(timeout_s=SEND_S).body
        try:
            owner = owner_of(body, identity)
            link = self._hello(channel, body, owner)
        except ConfigError as exc:
            error = ErrorMessage.of(exc)
            body = {"k": "refused", "error": error.error, "message": error.message, "context": error.context}
            channel.send(Kind.EVENT, 0, body, deadline_s=SEND_S)
            return
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as exc:
            raise ProtocolError(f"{channel.peer}: a rank's first message is not understood: {str(exc)[:200]}") from exc
        self.sealer.start(link)
        try:
            while True:
                self._event(link, channel.recv(timeout_s=None).body)
        except PeerUnreachable:
            return
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as exc:
            raise ProtocolError(f"{channel.peer}: a rank's message is not understood: {str(exc)[:200]}") from exc
        finally:
            with self.connections.lock:
                link.handovers.put(None)
                if self.connections.forget(link):
                    self.traffic.forget(link.nonce, link.job, link.rank)
            for release in list(link.pins.values()):
                release()

    def _hello(self, channel: Channel, body: dict[str, Any], owner: Owner) -> RankConnection:
        """Take the link; confirm which of the rank's slots are still its own (R8)."""
        link = RankConnection(channel, owner, str(body["nonce"]), str(body.get("job", "")), int(body.get("rank", -1)))
        link.attempt, link.parent = int(body.get("attempt", 0)), str(body.get("parent", ""))
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
                # A rank filled the slots that it holds of another arena there, so none of them is its own here.
                held, is_ours = (
                    [int(n) for n in body.get("held", ())],
                    body.get("arena") == self.replicas.arena.identity,
                )
                _, stale = self.replicas.table.confirm(owner, held if is_ours else [])
                self.replicas.flush()
            link.send(
                {
                    "k": "welcome", "stale": stale if is_ours else held, "arena": self.replicas.arena.identity,
                    "host": self.context.host_id,
                    "folder": str(self.context.folder), "slots": len(self.replicas.table.slots),
                    "chunk_bytes": self.replicas.chunk_bytes, "store": self.context.config.store_fields(),
                    "job_defaults": self.context.config.job_defaults(),
                }
            )  # fmt: skip
            self.connections.links[link.nonce] = link
            if not body.get("is_tool"):
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
        elif committed is not None and committed["attempt"] == link.attempt:
            link.send(committed)
        self.connections.grant(link)
        return link

    def _event(self, link: RankConnection, body: dict[str, Any]) -> None:
        kind = body.get("k")
        if kind == "call":
            self._call(link, body)
        elif kind == "handover":
            self.sealer.add(link, body)
        elif kind == "unpin":
            link.pins.pop(int(body["pin"]), lambda: None)()
        elif kind == "trained":
            self.trained.hear(link.job, link.attempt, int(body["step"]))
        elif kind == "marks":
            self.traffic.watch(link.nonce, str(body["file"]))
        elif kind == "waits":
            self.traffic.release(link.job, link.rank, (link.attempt, int(body["step"])))
        elif kind == "bye":
            self._bye(link)
        elif kind == "checked":
            self.context.report("checked", {key: body[key] for key in ("job", "round", "rank", "ok", "error")})

    def _call(self, link: RankConnection, body: dict[str, Any]) -> None:
        verb, inner = str(body["verb"]), dict(body["body"])
        if verb in ("lend", "adopt", "unlend"):
            self._lending(link, int(body["id"]), verb, inner)
            return
        if verb == "join":
            link.job, link.rank = str(inner["job"]), int(inner["rank"])
        self.calls.ask(Call(link.owner, link.nonce, int(body["id"]), verb, inner))

    def _lending(self, link: RankConnection, call_id: int, verb: str, body: dict[str, Any]) -> None:
        answer: dict[str, Any] = {}
        error: list[str] | None = None
        with link.grants:
            with self.connections.lock:
                try:
                    slots = [int(n) for n in body.get("slots", ())]
                    if verb == "lend":
                        self.lendings.lend(
                            link.owner, int(body["step"]), slots, str(body["arena"]), dict(body.get("sample") or {})
                        )
                    elif verb == "unlend":
                        answer = self.lendings.unlend(link.owner, int(body["step"]), slots)
                    else:
                        answer = self.lendings.adopt(
                            self.connections.owners.get(link.parent), link.owner, int(body["step"])
                        )
                except (LookupError, IntegrityError) as exc:
                    error = ["CommitError", str(exc)]
                    if verb == "lend":  # the child asks for it, and learns only that there is none
                        log.warning("job %s rank %d: %s", link.job, link.rank, exc)
            link.send({"k": "answer", "id": call_id, "body": answer, "error": error})

    def answer(self, call_id: int, body: dict[str, Any], error: list[str] | None) -> None:
        """Pass the controller's answer to a call on to the rank, with the place of the bytes if it is a get."""
        call = self.calls.take(call_id)
        with self.connections.lock:
            link = self.connections.links.get(call.nonce) if call is not None else None
        if call is None or link is None or link.owner != call.owner:
            return
        if call.verb in ("join", "rewind", "mesh_order") and error is None:
            link.attempt, link.rank = int(body["attempt"]), int(body["rank"])
        if "shard" in body and error is None:
            body, error = self._with_place(link, body)
        link.send({"k": "answer", "id": call.rank_id, "body": body, "error": error})

    def _with_place(self, link: RankConnection, body: dict[str, Any]) -> tuple[dict[str, Any], list[str] | None]:
        if "excerpt" in body:
            number = int(body["excerpt"])
            try:
                excerpt = self.excerpts.take(number)
            except IntegrityError as exc:
                return {}, ["RecoveryError", str(exc)]
            self._hold(link, number, functools.partial(self.excerpts.release, number))
            return {**body, "manifest": excerpt.manifest, "slots": list(excerpt.draft.slots), "pin": number}, None
        pinned = self.replicas.pin(shard_from_wire(body["shard"]), str(body["digest"]), is_reader=True)
        if pinned is None:
            return {}, ["RecoveryError", "the staged shard was dropped before it could be read: call get() again"]
        release = functools.partial(self.replicas.unpin, *pinned)
        try:
            manifest = self.replicas.manifest(pinned[0])
        except DigestMismatch as exc:
            release()
            return {}, ["RecoveryError", str(exc)]
        self._hold(link, pinned[1], release)
        return {**body, "manifest": manifest, "slots": list(pinned[0].slots), "pin": pinned[1]}, None

    def _hold(self, link: RankConnection, pin: int, release: Callable[[], None]) -> None:
        """Keep a pin until its reader lets go or the link ends; not one of a link that has just ended (R7)."""
        with self.connections.lock:
            if self.connections.links.get(link.nonce) is link:
                link.pins[pin] = release
                return
        release()

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


def owner_of(body: dict[str, Any], identity: dict[str, Any]) -> Owner:
    """Return the process that connects, with the pid that the kernel gives: a rank may name one of its namespace (R8).

    Raises:
        ConfigError: The rank's process cannot be seen from here, so its death could not be noticed.
    """
    generation = xxhash.xxh3_64_intdigest(f"{body['nonce']}/{body.get('life', 0)}".encode())
    pid = int(identity["pid"])
    start = process_start_time(pid) if pid > 0 else None
    if start is None and not body.get("is_tool"):
        raise ConfigError(
            f"the holder cannot see the process that calls itself pid {body.get('pid')}: it runs in another pid "
            "namespace. Run ranks in the holder's pid namespace, or with the host's (--pid=host)"
        )
    return Owner(max(pid, 0), start or 0, generation)
