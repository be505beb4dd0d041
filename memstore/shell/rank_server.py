"""The holder's side of its ranks' links: leases, hand-overs, calls to the controller, levels (R4, R8, R11, R15).

One thread per link reads; a second one digests hand-overs in order, so that a put is acknowledged to
nobody and blocks nobody. EVENT bodies, key "k":

    rank -> holder   hello, call (id, verb, body), handover, unpin, checked
    holder -> rank   welcome, answer (id, body, error), grant, level, resume, check, fenced
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import xxhash

from memstore.core.events import shard_from_wire
from memstore.core.shelf import Shelved
from memstore.core.slots import Owner
from memstore.core.wire import Kind
from memstore.errors import MemstoreError, PeerUnreachable, TransportError
from memstore.shell.arena_lock import is_alive
from memstore.shell.channel import Channel
from recovery.inventory import ShardId

if TYPE_CHECKING:
    from memstore.shell.holder import Holder

log = logging.getLogger("memstore")
SEND_S = 10.0  # a rank that does not read for this long (frozen) loses its link, never its leases
RANK_LINKS_MAX = 1024


@dataclass
class RankLink:
    """One process of a rank (or a tool) on this host."""

    channel: Channel
    owner: Owner
    nonce: str = ""
    job: str = ""
    rank: int = -1
    attempt: int = 0
    pins: dict[int, Shelved] = field(default_factory=dict)
    handovers: queue.Queue[dict[str, Any] | None] = field(default_factory=queue.Queue)
    is_idle: threading.Event = field(default_factory=threading.Event)

    def send(self, body: dict[str, Any]) -> None:
        """Send one event; a link that cannot take it is closed and will come back."""
        try:
            self.channel.send(Kind.EVENT, 0, body, deadline_s=SEND_S)
        except TransportError:
            self.channel.close()


class RankServer:
    """All links of one holder."""

    def __init__(self, holder: Holder) -> None:
        self.holder = holder
        self.vault = holder.vault
        self.lock = threading.RLock()
        self.links: dict[str, RankLink] = {}  # by nonce
        self.owners: dict[str, Owner] = {}  # nonce -> process, kept until it is proved dead (R8)
        self.calls: dict[int, tuple[str, int, str, dict[str, Any]]] = {}  # call id -> (nonce, rank's id, verb, body)
        self.calls_count = 0
        self.committed: dict[str, dict[str, Any]] = {}  # job -> last commit told, for links that come back

    # -- one link -----------------------------------------------------------------------------

    def serve(self, channel: Channel, identity: dict[str, Any]) -> None:
        """Read one link until it ends. Its leases stay: a rank's life is its pid, not its socket (R8, R20)."""
        frame = channel.recv(timeout_s=SEND_S)
        link = self._hello(channel, frame.body, identity)
        worker = threading.Thread(target=self._seal_loop, args=(link,), name=f"memstore-seal-{link.nonce}", daemon=True)
        worker.start()
        try:
            while True:
                body = channel.recv(timeout_s=None).body
                self._event(link, body)
        except PeerUnreachable:
            return
        finally:
            link.handovers.put(None)
            with self.lock:
                if self.links.get(link.nonce) is link:
                    del self.links[link.nonce]
            for pin, shelved in list(link.pins.items()):
                self.vault.unpin(shelved, pin)

    def _hello(self, channel: Channel, body: dict[str, Any], identity: dict[str, Any]) -> RankLink:
        """Take the link; confirm which of the rank's slots are still its own (R8)."""
        owner = Owner(int(body["pid"]), int(body["start"]), xxhash.xxh3_64_intdigest(str(body["nonce"]).encode()))
        link = RankLink(channel, owner, str(body["nonce"]), str(body.get("job", "")), int(body.get("rank", -1)))
        link.attempt = int(body.get("attempt", 0))
        link.is_idle.set()
        with self.vault.lock:
            kept, stale = self.vault.table.confirm(owner, [int(n) for n in body.get("held", ())])
            self.vault.flush()
        with self.lock:
            self.links[link.nonce] = link
            if not body.get("is_tool"):
                self.owners[link.nonce] = owner
                self.holder.used()
        fenced = self.holder.fences.get(link.job, 0)
        link.send(
            {
                "k": "welcome", "kept": kept, "stale": stale, "host": self.holder.info.host_id,
                "folder": str(self.holder.folder), "slots": len(self.vault.table.slots),
                "chunk_bytes": self.vault.chunk_bytes, "store": self.holder.config.store_fields(),
            }
        )  # fmt: skip
        if link.attempt and link.attempt < fenced:
            link.send({"k": "fenced", "attempt": fenced})
        elif link.job in self.committed and link.attempt:
            link.send(self.committed[link.job])
        self.grant(link)
        return link

    def _event(self, link: RankLink, body: dict[str, Any]) -> None:
        kind = body.get("k")
        if kind == "call":
            self._call(link, body)
        elif kind == "handover":
            link.is_idle.clear()
            link.handovers.put(body)
        elif kind == "unpin":
            shelved = link.pins.pop(int(body["pin"]), None)
            if shelved is not None:
                self.vault.unpin(shelved, int(body["pin"]))
        elif kind == "bye":
            self._bye(link)
        elif kind == "checked":
            self.holder.report("checked", {key: body[key] for key in ("job", "round", "rank", "ok", "error")})

    def _call(self, link: RankLink, body: dict[str, Any]) -> None:
        verb, inner = str(body["verb"]), dict(body["body"])
        if verb == "join":
            link.job, link.rank = str(inner["job"]), int(inner["rank"])
        with self.lock:
            self.calls_count += 1
            call_id = self.calls_count
            self.calls[call_id] = (link.nonce, int(body["id"]), verb, inner)
        self.holder.relay(call_id, verb, inner)

    def resend_calls(self) -> None:
        """A new controller session: whoever still waits for an answer asks again."""
        with self.lock:
            waiting = sorted(self.calls.items())
        for call_id, (_, _, verb, body) in waiting:
            self.holder.relay(call_id, verb, body)

    def answer(self, call_id: int, body: dict[str, Any], error: list[str] | None) -> None:
        """The controller answered a call: pass it on, with the bytes' place if it is a get."""
        with self.lock:
            nonce, rank_id, verb, _ = self.calls.pop(call_id, ("", 0, "", {}))
            link = self.links.get(nonce)
        if link is None:
            return
        if verb in ("join", "rewind") and error is None:
            link.attempt = int(body["attempt"])
        if "shard" in body and error is None:
            body, error = self._with_place(link, body)
        link.send({"k": "answer", "id": rank_id, "body": body, "error": error})

    def _with_place(self, link: RankLink, body: dict[str, Any]) -> tuple[dict[str, Any], list[str] | None]:
        pinned = self.vault.pin(shard_from_wire(body["shard"]), str(body["digest"]))
        if pinned is None:
            return {}, ["RecoveryError", "the staged shard was dropped before it could be read: call get() again"]
        shelved, pin = pinned
        link.pins[pin] = shelved
        return {**body, "manifest": self.vault.manifest(shelved), "slots": list(shelved.slots), "pin": pin}, None

    # -- puts ---------------------------------------------------------------------------------

    def _seal_loop(self, link: RankLink) -> None:
        while True:
            body = link.handovers.get()
            if body is None:
                link.is_idle.set()
                return
            try:
                self._seal(link, body)
            except MemstoreError as exc:
                log.warning("put of %s rank %d failed: %s", link.job, link.rank, exc)
                self._level(link, int(body["step"]), "failed", str(exc))
            if link.handovers.empty():
                link.is_idle.set()

    def _seal(self, link: RankLink, body: dict[str, Any]) -> None:
        """Digest what was handed over, store it, report it, push it to the targets (R7, R13, R14)."""
        shard = ShardId(link.job, int(body["attempt"]), int(body["step"]), link.rank)
        slots = [int(n) for n in body["slots"]]
        fence = self.holder.fences.get(link.job, 0)
        with self.vault.lock:
            known = self.vault.shelf.find(shard)
            is_mine = self.vault.table.hand_over(link.owner, slots)
        if known is None and (shard.attempt < fence or not is_mine):
            if is_mine:
                self.vault.give_back(slots)
            why = f"attempt {fence} was opened" if shard.attempt < fence else "its slots were no longer leased to it"
            self._level(link, shard.step, "failed", why)
            return
        if known is not None:
            if is_mine:
                self.vault.give_back(slots)
        else:
            known = self.vault.seal_local(
                shard, world_size=int(body["world_size"]), layout=bytes(body["layout"]), nbytes=int(body["nbytes"]),
                slots=slots, attempt=shard.attempt,
            )  # fmt: skip
        self._level(link, shard.step, "sealed", "")
        self.holder.sealed(known)
        self.holder.pusher.replicate(known, link)
        self.grant(link)

    def _level(self, link: RankLink, step: int, level: str, reason: str) -> None:
        with self.lock:
            current = self.links.get(link.nonce, link)
        current.send({"k": "level", "step": step, "level": level, "reason": reason, "degraded": False})

    def replicated(self, job: str, rank: int, step: int) -> None:
        """Every target of a shard has sealed it (R15)."""
        for link in self.of_job(job):
            if link.rank == rank:
                self._level(link, step, "replicated", "")

    def grant(self, link: RankLink) -> None:
        """Lease the rank what its share allows and tell it."""
        if not link.job or link.rank < 0 or link.attempt < self.holder.fences.get(link.job, 0):
            return
        slots = self.vault.lease(link.owner, link.job, link.rank, link.attempt)
        if slots:
            link.send({"k": "grant", "slots": slots})

    def _bye(self, link: RankLink) -> None:
        """The rank closed its store: what it leased and did not hand over is free again."""
        link.is_idle.wait(SEND_S)
        with self.lock:
            self.owners.pop(link.nonce, None)
            link.rank = -1
        with self.vault.lock:
            self.vault.table.reclaim(link.owner)
            self.vault.flush()

    # -- orders of the controller -----------------------------------------------------------------

    def of_job(self, job: str) -> list[RankLink]:
        """Links of a job's ranks on this host."""
        with self.lock:
            return [link for link in self.links.values() if link.job == job and link.rank >= 0]

    def grant_job(self, job: str) -> None:
        """Room may have become free for a job's ranks."""
        for link in self.of_job(job):
            self.grant(link)

    def level(self, body: dict[str, Any]) -> None:
        """Tell the tickets of a step."""
        message = {
            "k": "level",
            "step": body["step"],
            "level": body["level"],
            "reason": body.get("reason", ""),
            "degraded": bool(body.get("degraded")),
        }
        if body["level"] in ("committed", "durable"):
            self.committed[body["job"]] = message
        for link in self.of_job(body["job"]):
            if link.attempt == body["attempt"]:
                link.send(message)

    def resume(self, body: dict[str, Any]) -> None:
        """An abandoned step names the step from which all put again (R12)."""
        for link in self.of_job(body["job"]):
            if link.attempt == body["attempt"]:
                link.send(
                    {
                        "k": "level",
                        "step": body["step"],
                        "level": body["level"],
                        "reason": body["reason"],
                        "degraded": False,
                        "resume": body["resume"],
                    }
                )

    def check(self, body: dict[str, Any], shelved: Shelved) -> None:
        """Let the rank compare `into=` with the manifest before anything is released (R26)."""
        for link in self.of_job(body["job"]):
            if link.rank == body["rank"]:
                link.send(
                    {"k": "check", "job": body["job"], "round": body["round"], "manifest": self.vault.manifest(shelved)}
                )

    def fence(self, job: str, attempt: int, timeout_s: float, members: Collection[str] = ()) -> None:
        """Refuse older processes; wait until what they handed over completely is digested (R21).

        A process of `members` goes on in the new attempt: it asked for it by a rewind (R22).
        """
        for link in self.of_job(job):
            if link.attempt and link.attempt < attempt:
                link.is_idle.wait(timeout_s)
                if link.nonce not in members:
                    link.send({"k": "fenced", "attempt": attempt})

    def reap(self) -> None:
        """Reclaim the leases of processes that are proved dead, and say so (R8, R20)."""
        with self.lock:
            gone = [nonce for nonce, owner in self.owners.items() if not is_alive(owner.pid, owner.start)]
            dead = {nonce: self.owners.pop(nonce) for nonce in gone}
        for nonce, owner in dead.items():
            with self.vault.lock:
                self.vault.table.reclaim(owner)
                self.vault.flush()
            with self.lock:
                link = self.links.get(nonce)
            if link is not None:
                link.channel.close()
            self.holder.rank_gone(nonce)
        with self.vault.lock:
            strangers = [
                o for o in self.vault.table.leases if o not in self.owners.values() and not is_alive(o.pid, o.start)
            ]
            for owner in strangers:
                self.vault.table.reclaim(owner)
            self.vault.flush()
        with contextlib.suppress(KeyError):
            for job in {link.job for link in self.links.values() if link.job}:
                self.grant_job(job)
