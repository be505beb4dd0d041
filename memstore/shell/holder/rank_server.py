"""The holder's side of its ranks' links: leases, hand-overs, calls to the controller, levels (R4, R8, R11, R15).

One thread per link reads; another digests hand-overs in order (seal.py), so that a put is
acknowledged to nobody and blocks nobody. EVENT bodies, key "k":

    rank -> holder   hello, call (id, verb, body), handover, unpin, checked, marks, waits
    holder -> rank   welcome, refused, answer, grant, room, level, resume, check, fenced, came (chunk_notifier.py)
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import xxhash

from memstore.core.arena.replica_index import Draft, Shelved
from memstore.core.arena.slot_table import Owner
from memstore.core.wire.error_message import ErrorMessage
from memstore.core.wire.frame import Kind
from memstore.core.wire.messages import shard_from_wire
from memstore.errors import ConfigError, DigestMismatch, IntegrityError, PeerUnreachable, ProtocolError
from memstore.shell.arena.lock import is_alive, process_start_time
from memstore.shell.holder.chunk_notifier import Herald
from memstore.shell.holder.lease_transfer import Lendings, check_child
from memstore.shell.holder.pending_calls import Call, Calls
from memstore.shell.holder.seal import SEND_S, RankLink, Sealer
from memstore.shell.net.channel import Channel
from recovery.inventory import ShardId

if TYPE_CHECKING:
    from memstore.shell.holder.holder import Holder

log = logging.getLogger("memstore")


class RankServer:
    """All links of one holder."""

    def __init__(self, holder: Holder) -> None:
        self.holder = holder
        self.vault = holder.vault
        self.lock = threading.RLock()
        self.links: dict[str, RankLink] = {}  # by nonce
        self.owners: dict[str, Owner] = {}  # nonce -> process, kept until it is proved dead (R8)
        self.parents: dict[str, str] = {}  # nonce of a child among `owners` -> that of the rank's process
        self.sealer = Sealer(self)
        self.lendings = Lendings(self.vault)
        self.calls = Calls(holder)
        self.committed: dict[str, dict[str, Any]] = {}  # job -> last commit told, for links that come back

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
            with self.lock:
                link.handovers.put(None)
                if self.links.get(link.nonce) is link:
                    del self.links[link.nonce]
                    self.holder.traffic.forget(link.nonce, link.job, link.rank)
            for release in list(link.pins.values()):
                release()

    def _hello(self, channel: Channel, body: dict[str, Any], owner: Owner) -> RankLink:
        """Take the link; confirm which of the rank's slots are still its own (R8)."""
        link = RankLink(channel, owner, str(body["nonce"]), str(body.get("job", "")), int(body.get("rank", -1)))
        link.attempt, link.parent = int(body.get("attempt", 0)), str(body.get("parent", ""))
        with self.lock:
            if link.parent:
                lender = self.owners.get(link.parent)
                if lender is None:
                    raise ConfigError(f"no process has joined as {link.parent!r}: connect the training process first")
                check_child(owner.pid, lender.pid, link.parent)
            # In one step: no grant may go to the old link after this, nor overtake the welcome on the new one.
            old = self.links.get(link.nonce)
            if old is not None and old.owner == owner:
                self.sealer.retire(old)
                old.channel.abort()
            with self.vault.lock:
                # What a rank holds of another arena it filled there: none of it is a slot of this one.
                held, is_ours = [int(n) for n in body.get("held", ())], body.get("arena") == self.vault.arena.identity
                _, stale = self.vault.table.confirm(owner, held if is_ours else [])
                self.vault.flush()
            link.send(
                {
                    "k": "welcome", "stale": stale if is_ours else held, "arena": self.vault.arena.identity,
                    "host": self.holder.info.host_id,
                    "folder": str(self.holder.folder), "slots": len(self.vault.table.slots),
                    "chunk_bytes": self.vault.chunk_bytes, "store": self.holder.config.store_fields(),
                    "job_defaults": self.holder.config.job_defaults(),
                }
            )  # fmt: skip
            self.links[link.nonce] = link
            if not body.get("is_tool"):
                is_new, self.owners[link.nonce] = link.nonce not in self.owners, owner
                if is_new:  # said after it is in the inventory: of two sessions, one has it
                    self.holder.report("rank_here", {"nonce": link.nonce})
                if link.parent:
                    self.parents[link.nonce] = link.parent
                self.holder.idle.used()
            committed = self.committed.get(link.job)
        fenced = self.holder.fences.get(link.job, 0)
        if link.attempt and link.attempt < fenced:
            self._send_fenced(link)
        elif committed is not None and committed["attempt"] == link.attempt:
            link.send(committed)
        self.grant(link)
        return link

    def _event(self, link: RankLink, body: dict[str, Any]) -> None:
        kind = body.get("k")
        if kind == "call":
            self._call(link, body)
        elif kind == "handover":
            self.sealer.add(link, body)
        elif kind == "unpin":
            link.pins.pop(int(body["pin"]), lambda: None)()
        elif kind == "trained":
            self.holder.trained.hear(link.job, link.attempt, int(body["step"]))
        elif kind == "marks":
            self.holder.traffic.watch(link.nonce, str(body["file"]))
        elif kind == "waits":
            self.holder.traffic.release(link.job, link.rank, (link.attempt, int(body["step"])))
        elif kind == "bye":
            self._bye(link)
        elif kind == "checked":
            self.holder.report("checked", {key: body[key] for key in ("job", "round", "rank", "ok", "error")})

    def _call(self, link: RankLink, body: dict[str, Any]) -> None:
        verb, inner = str(body["verb"]), dict(body["body"])
        if verb in ("lend", "adopt", "unlend"):
            self._lending(link, int(body["id"]), verb, inner)
            return
        if verb == "join":
            link.job, link.rank = str(inner["job"]), int(inner["rank"])
        self.calls.ask(Call(link.owner, link.nonce, int(body["id"]), verb, inner))

    def _lending(self, link: RankLink, call_id: int, verb: str, body: dict[str, Any]) -> None:
        answer: dict[str, Any] = {}
        error: list[str] | None = None
        with link.grants:
            with self.lock:
                try:
                    slots = [int(n) for n in body.get("slots", ())]
                    if verb == "lend":
                        self.lendings.lend(
                            link.owner, int(body["step"]), slots, str(body["arena"]), dict(body.get("sample") or {})
                        )
                    elif verb == "unlend":
                        answer = self.lendings.unlend(link.owner, int(body["step"]), slots)
                    else:
                        answer = self.lendings.adopt(self.owners.get(link.parent), link.owner, int(body["step"]))
                except (LookupError, IntegrityError) as exc:
                    error = ["CommitError", str(exc)]
                    if verb == "lend":  # the child asks for it, and is told no more than that there is none
                        log.warning("job %s rank %d: %s", link.job, link.rank, exc)
            link.send({"k": "answer", "id": call_id, "body": answer, "error": error})

    def skip(self, shard: ShardId, why: str, *, is_failed: bool) -> None:
        """A put failed on this host, for want of room or (`is_failed`) not: all ranks give the step up alike (R12)."""
        body = {"job": shard.job, "attempt": shard.attempt, "rank": shard.rank, "step": shard.step, "why": why}
        self.calls.ask(Call(None, "", 0, "skip", {**body, "is_failed": is_failed}))

    def answer(self, call_id: int, body: dict[str, Any], error: list[str] | None) -> None:
        """The controller answered a call: pass it on, with the bytes' place if it is a get."""
        call = self.calls.take(call_id)
        with self.lock:
            link = self.links.get(call.nonce) if call is not None else None
        if call is None or link is None or link.owner != call.owner:
            return
        if call.verb in ("join", "rewind", "mesh_order") and error is None:
            link.attempt, link.rank = int(body["attempt"]), int(body["rank"])
        if "shard" in body and error is None:
            body, error = self._with_place(link, body)
        link.send({"k": "answer", "id": call.rank_id, "body": body, "error": error})

    def _with_place(self, link: RankLink, body: dict[str, Any]) -> tuple[dict[str, Any], list[str] | None]:
        if "excerpt" in body:
            number = int(body["excerpt"])
            excerpts = self.holder.stager.excerpts
            try:
                excerpt = excerpts.take(number)
            except IntegrityError as exc:
                return {}, ["RecoveryError", str(exc)]
            self._hold(link, number, functools.partial(excerpts.release, number))
            return {**body, "manifest": excerpt.manifest, "slots": list(excerpt.draft.slots), "pin": number}, None
        pinned = self.vault.pin(shard_from_wire(body["shard"]), str(body["digest"]), is_reader=True)
        if pinned is None:
            return {}, ["RecoveryError", "the staged shard was dropped before it could be read: call get() again"]
        release = functools.partial(self.vault.unpin, *pinned)
        try:
            manifest = self.vault.manifest(pinned[0])
        except DigestMismatch as exc:
            release()
            return {}, ["RecoveryError", str(exc)]
        self._hold(link, pinned[1], release)
        return {**body, "manifest": manifest, "slots": list(pinned[0].slots), "pin": pinned[1]}, None

    def _hold(self, link: RankLink, pin: int, release: Callable[[], None]) -> None:
        """Keep a pin until its reader lets go or the link ends; not one of a link that has just ended (R7)."""
        with self.lock:
            if self.links.get(link.nonce) is link:
                link.pins[pin] = release
                return
        release()

    # -- puts ---------------------------------------------------------------------------------

    def _current(self, link: RankLink) -> RankLink:
        """Return the link on which the same store is connected now."""
        with self.lock:
            now = self.links.get(link.nonce, link)
            return now if now.owner == link.owner else link

    def tell_level(self, link: RankLink, attempt: int, step: int, level: str, reason: str) -> None:
        """Tell one store's ticket; on its newest link."""
        message = {"k": "level", "attempt": attempt, "step": step, "level": level, "reason": reason, "degraded": False}
        with self.lock:
            parent = self.links.get(link.parent)
        for each in (self._current(link), parent):
            if each is not None:
                each.send(message)

    def replicated(self, shard: ShardId) -> None:
        """Every target of a shard has sealed it (R15)."""
        for link in self.of_job(shard.job):
            if (link.rank, link.attempt) == (shard.rank, shard.attempt):
                self.tell_level(link, shard.attempt, shard.step, "replicated", "")

    def grant_current(self, link: RankLink) -> None:
        """A put of this store is over: lease it what its share allows now."""
        self.grant(self._current(link))

    def grant(self, link: RankLink) -> None:
        """Lease the rank what its share allows and tell it; never on a link that has ended, where nobody hears it."""
        with link.grants:
            with self.lock:
                if self.links.get(link.nonce) is not link or link.channel.is_closed:
                    return
                if not link.job or link.rank < 0 or link.attempt < self.holder.fences.get(link.job, 0) or link.parent:
                    return
                heirs = [self.owners[n] for n, parent in self.parents.items() if parent == link.nonce]
                slots = self.vault.lease(link.owner, link.job, link.rank, link.attempt, heirs)
            if slots:
                link.send({"k": "grant", "slots": slots})

    def _bye(self, link: RankLink) -> None:
        """The rank closed its store: what it leased and did not hand over is free again."""
        self.sealer.drain_owner(link.owner, SEND_S)
        self.calls.forget(link.owner)
        with self.lock:
            if self.links.get(link.nonce) is link:  # else the process has connected again, as another owner
                del self.links[link.nonce]
                self.owners.pop(link.nonce, None)
                self.parents.pop(link.nonce, None)
        with self.lock, self.vault.lock:
            self.lendings.forget(link.owner)
            self.vault.table.reclaim(link.owner)
            self.vault.flush()
        self.holder.orders.release()
        if link.parent:
            self.grant_job(link.job)

    # -- orders of the controller -----------------------------------------------------------------

    def of_job(self, job: str) -> list[RankLink]:
        """Links of a job's ranks on this host."""
        with self.lock:
            return [link for link in self.links.values() if link.job == job and link.rank >= 0]

    def room(self, job: str, done_bytes: int, wanted_bytes: int) -> None:
        """Tell a job's ranks how far the room that they asked for has grown."""
        for link in self.of_job(job):
            link.send({"k": "room", "done_bytes": done_bytes, "wanted_bytes": wanted_bytes})

    def grant_job(self, job: str) -> None:
        """Room may have become free for a job's ranks."""
        for link in self.of_job(job):
            self.grant(link)

    def level(self, body: dict[str, Any]) -> None:
        """Tell the tickets of a step."""
        message = {
            "k": "level", "attempt": body["attempt"], "step": body["step"], "level": body["level"],
            "reason": body.get("reason", ""), "degraded": bool(body.get("degraded")),
        }  # fmt: skip
        if body["level"] in ("committed", "durable"):
            self.committed[body["job"]] = message
        for link in self.of_job(body["job"]):
            if link.attempt == body["attempt"]:
                link.send(message)

    def resume(self, body: dict[str, Any]) -> None:
        """An abandoned step names the step from which all put again (R12)."""
        told = {key: body[key] for key in ("attempt", "step", "level", "reason", "resume")}
        for link in self.of_job(body["job"]):
            if link.attempt == body["attempt"]:
                link.send({"k": "level", "degraded": False, **told})

    def check(self, body: dict[str, Any], shelved: Shelved) -> None:
        """Let the rank compare `into=` with the manifest before anything is released (R26)."""
        for link in self.of_job(body["job"]):
            if link.rank == body["rank"]:
                link.send(
                    {"k": "check", "job": body["job"], "round": body["round"], "manifest": self.vault.manifest(shelved)}
                )

    def herald(self, stream: list[Any] | None, manifest: bytes, draft: Draft) -> Herald | None:
        """Return what tells a reader of this host of its chunks; `stream` is its nonce and its number of the read."""
        with self.lock:
            link = self.links.get(str(stream[0])) if stream else None
        return Herald(link.send, int(stream[1]), manifest, draft) if link is not None and stream else None

    def fence(self, job: str, attempt: int, timeout_s: float, members: Collection[str] = ()) -> None:
        """Refuse older processes; wait until what they handed over completely is digested (R21).

        A process of `members` goes on in the new attempt: it asked for it by a rewind (R22).
        """
        if not self.sealer.drain(job, attempt, timeout_s):
            log.warning("job %s: puts of older attempts are still digested %g s after a fence", job, timeout_s)
        for link in self.of_job(job):
            if 0 < link.attempt < attempt and link.nonce not in members:
                self._send_fenced(link)

    def removed(self, job: str, attempt: int) -> None:
        """Its processes have no job to put into any more: told so, none waits for room that never comes (R21)."""
        self.holder.removed(job, attempt)
        for link in self.of_job(job):
            if 0 < link.attempt <= attempt:
                self._send_fenced(link)

    def _send_fenced(self, link: RankLink) -> None:
        attempt = self.holder.fences[link.job]
        link.send({"k": "fenced", "attempt": attempt, "is_removed": self.holder.removals.get(link.job) == attempt})

    def reap(self) -> None:
        """Reclaim the leases of processes that are proved dead, and say so (R8, R20)."""
        with self.lock:
            gone = [nonce for nonce, owner in self.owners.items() if not is_alive(owner.pid, owner.start)]
            dead = {nonce: self.owners.pop(nonce) for nonce in gone}
            self.parents = {nonce: parent for nonce, parent in self.parents.items() if nonce in self.owners}
        for nonce, owner in dead.items():
            with self.lock, self.vault.lock:
                self.lendings.forget(owner)
                self.vault.table.reclaim(owner)
                self.vault.flush()
            self.calls.forget(owner)
            with self.lock:
                link = self.links.get(nonce)
            if link is not None:
                link.channel.close()
            self.holder.rank_gone(nonce)
            self.holder.orders.release()
        with self.lock:
            known = set(self.owners.values())
            jobs = {link.job for link in self.links.values() if link.job}
        with self.vault.lock:
            leased = self.vault.table.leases
            for owner in [o for o in leased if o not in known and not is_alive(o.pid, o.start)]:
                self.vault.table.reclaim(owner)
            self.vault.flush()
        for job in jobs:
            self.grant_job(job)


def owner_of(body: dict[str, Any], identity: dict[str, Any]) -> Owner:
    """Return who connects: the pid by the kernel's word, for a rank in another pid namespace names its own (R8).

    Raises:
        ConfigError: The rank's process cannot be seen from here, so its death could not be told.
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
