"""Serves other holders: receives their shards, sends them ours. One thread per connection (R13, R14).

A connection carries one request at a time. Requests (CALL bodies, key "do"):

    offer     shard, digest, attempt, sender, count            -> {"ok", "why"}     opens a draft of count chunks;
              digest is "" while the sender itself does not know it yet
    chunks    shard, sender, want=[index...], digests, sizes   -> {"lack": [...]}   then the lacking chunks, in
              order, as CHUNK frames (chunk_frames.py), then the reply {"bad": [...]}
    seal      shard, sender, manifest                          -> {"ok", "missing"}
    abort     shard, sender                                    -> {}
    manifest  shard, digest                                    -> {"manifest"}
    fetch     shard, digest, want=[index...]                   -> CHUNK frames, then {"lacking": [...]}
    verify    shard, digest                                    -> {"missing": [...]}  after digesting it again; the
              controller hears the same
    ping                                                       -> {}
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memstore.core.arena.replica_index import Draft, Shelved
from memstore.core.format.manifest import DIGEST_BYTES, decode_manifest, shard_digest
from memstore.core.format.object_tree import checked_count, checked_list
from memstore.core.wire.frame import Kind, error_body
from memstore.core.wire.messages import copy_to_wire, shard_from_wire, shard_to_wire
from memstore.errors import CapacityError, IntegrityError, MemstoreError, PeerUnreachable, ProtocolError
from memstore.shell.arena.replica_store import Vault
from memstore.shell.net.channel import Channel, Frame
from memstore.shell.net.pacing import give_way
from memstore.shell.peer.chunk_frames import receive_run, runs, send_run
from memstore.shell.peer.corruption_counts import Damage
from recovery.inventory import Copy, ShardId

log = logging.getLogger("memstore")
CHUNK_TIMEOUT_S = 30.0  # a sender that stalls this long inside a batch loses its draft
REPLY_TIMEOUT_S = 30.0
DRAFT_IDLE_S = 120.0  # longer than a batch may take, and than a sender waits for its own digests


Key = tuple[str, ShardId]  # sender and shard


@dataclass(slots=True)
class Incoming:
    """A draft that a peer feeds: all connections of that life of it, and when the draft was last heard of."""

    draft: Draft
    channels: set[Channel]
    heard_s: float


class PeerServer:
    """What a holder does for its peers."""

    def __init__(
        self, vault: Vault, host_id: str, *, is_fenced: Callable[[str, int], bool], on_sealed: Callable[[Copy], None],
        before_offer: Callable[[ShardId], None] = lambda shard: None, damage: Damage | None = None,
    ) -> None:  # fmt: skip
        self.vault = vault
        self.host_id = host_id
        self.is_fenced = is_fenced
        self.on_sealed = on_sealed
        self.before_offer = before_offer  # may wait, for much less than a sender does
        self.incoming: dict[Key, Incoming] = {}
        self.lives: dict[tuple[str, str], set[Channel]] = {}  # (host, incarnation) -> its open connections
        self.life_of: dict[Channel, set[Channel]] = {}
        self.lock = threading.Lock()
        self.received_bytes = 0
        self.damage = damage or Damage()

    def serve(self, channel: Channel, identity: dict[str, Any]) -> None:
        """Answer requests until the peer goes away; its drafts go with its last connection (R13)."""
        give_way()
        try:
            host = identity.get("host")
            if type(host) is not str:
                raise ProtocolError(f"{channel.peer} calls itself a holder of no host")
            self._arrive(channel, (host, str(identity.get("incarnation"))))
            while True:
                frame = channel.recv(timeout_s=None)
                if frame.kind is Kind.BYE:
                    return
                if frame.kind is not Kind.CALL:
                    raise ProtocolError(f"{channel.peer}: {frame.kind.name} where a CALL was expected")
                if frame.body.get("sender", host) != host:
                    raise ProtocolError(f"{channel.peer} is {host} and speaks for {str(frame.body['sender'])[:80]!r}")
                self._answer(channel, frame)
        except PeerUnreachable:
            return
        except ProtocolError as exc:
            self.damage.frame(exc)
        finally:
            self._leave(channel)

    def _answer(self, channel: Channel, frame: Frame) -> None:
        body = frame.body
        do = str(body.get("do"))[:80]
        try:
            if do == "chunks":
                reply = self._chunks(channel, frame)
            elif do == "offer":
                reply = self._offer(channel, body)
            elif do == "fetch":
                reply = self._fetch(channel, frame)
            else:
                handler = {"seal": self._seal, "abort": self._abort, "manifest": self._manifest, "verify": self._verify}
                reply = handler[do](body) if do in handler else {}
            channel.send(Kind.REPLY, frame.request_id, reply, deadline_s=REPLY_TIMEOUT_S)
        except (PeerUnreachable, ProtocolError):  # whoever breaks the order of frames cannot be answered in it
            raise
        except MemstoreError as exc:
            channel.send(Kind.ERROR, frame.request_id, error_body(exc), deadline_s=REPLY_TIMEOUT_S)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as exc:
            raise ProtocolError(f"{channel.peer}: request {do!r} is not understood: {str(exc)[:200]}") from exc

    # -- receiving ----------------------------------------------------------------------------

    def _offer(self, channel: Channel, body: dict[str, Any]) -> dict[str, Any]:
        """Admit or refuse a shard before a byte of it travels (R10, R13)."""
        shard, sender = shard_from_wire(body["shard"]), str(body["sender"])
        attempt = checked_count(body["attempt"], "attempt")
        count, slots_count = checked_count(body["count"], "count"), len(self.vault.table.slots)
        if not body["digest"]:  # else it is no new put, and nothing here is to come
            self.before_offer(shard)
        if self.is_fenced(shard.job, attempt):
            return {"ok": False, "why": f"attempt {attempt} of job {shard.job!r} is fenced here", "is_final": True}
        if count > slots_count:
            return {"ok": False, "why": f"{count} chunks offered, this host has {slots_count} slots", "is_final": False}
        known = self.vault.shelf.find(shard, str(body["digest"])) if body["digest"] else None
        if known is not None:  # outside the lock: it reads bytes
            self.vault.verify_old(known.digests, [known.spec.chunk_nbytes(i) for i in range(len(known.digests))])
        with self.vault.lock:  # room that is found is taken at once, before another offer finds it too
            known = self.vault.shelf.find(shard, known.spec.digest) if known is not None else None  # or dropped by now
            has_it = known is not None and not known.missing and not known.is_doomed
            if not has_it:
                self.vault.shelf.abort_draft(sender, shard)  # of a try that broke: its room is this one's
            why = None if has_it else self.vault.shelf.guest_refusal(shard, count)
            if not has_it and why is None:
                draft = self.vault.shelf.open_draft(sender, shard, [b""] * count, attempt=attempt)
        if known is not None and has_it:
            # The controller may not know of it: the word of this copy died with a controller or a session.
            self.on_sealed(Copy(shard, known.spec, self.host_id))
            return {"ok": True, "have": True}
        if why is not None:
            return {"ok": False, "why": why, "is_final": False}
        with self.lock:
            self.incoming[sender, shard] = Incoming(draft, self._life(channel), self.vault.clock.monotonic())
        return {"ok": True, "have": False}

    def _chunks(self, channel: Channel, frame: Frame) -> dict[str, Any]:
        """Say which chunks are lacking, then receive each straight into a slot and check its digest (R14)."""
        body = frame.body
        shard, sender = shard_from_wire(body["shard"]), str(body["sender"])
        draft = self.vault.shelf.draft(sender, shard)
        if draft is None:
            return {"ok": False, "why": "no such draft"}
        want, digests, sizes = self._chunks_named(body, len(draft.slots))
        with self.lock:
            incoming = self.incoming.setdefault((sender, shard), Incoming(draft, self._life(channel), 0.0))
            incoming.heard_s = self.vault.clock.monotonic()
        lack = self.vault.expect(draft, want, digests, sizes)
        channel.send(Kind.EVENT, frame.request_id, {"ok": True, "lack": lack}, deadline_s=REPLY_TIMEOUT_S)
        bad: list[int] = []
        while lack:
            run = receive_run(
                channel, self.vault, draft, lack, take=self._take, damage=self.damage, timeout_s=CHUNK_TIMEOUT_S
            )
            incoming.heard_s = self.vault.clock.monotonic()
            self.received_bytes += run.nbytes
            bad += run.bad
            lack = lack[run.answered :]
        return {"ok": True, "bad": bad}

    def _chunks_named(self, body: dict[str, Any], chunks_count: int) -> tuple[list[int], list[bytes], list[int]]:
        """Return the indices, digests and sizes of a batch; ValueError for what no draft here can have."""
        want, digests, sizes = (checked_list(body[name], None, name) for name in ("want", "digests", "sizes"))
        if any(checked_count(i, "chunk index") >= chunks_count for i in want) or len({*want}) != len(want):
            raise ValueError(f"the draft has chunks 0 to {chunks_count - 1}, each once")
        if any(type(digest) is not bytes or len(digest) != DIGEST_BYTES for digest in digests):
            raise ValueError(f"a digest has {DIGEST_BYTES} bytes")
        if any(type(size) is not int or not 0 < size <= self.vault.chunk_bytes for size in sizes):
            raise ValueError(f"a chunk has 1 to {self.vault.chunk_bytes} bytes")
        if not len(want) == len(digests) == len(sizes):
            raise ValueError(f"{len(want)} indices, {len(digests)} digests, {len(sizes)} sizes")
        return want, digests, sizes

    def _take(self, count: int) -> list[int]:
        """Slots for that many chunks, or as many as there are: the sender keeps the others and tries again (R13)."""
        try:
            return self.vault.take_slots(count)
        except CapacityError:
            return []

    def _seal(self, body: dict[str, Any]) -> dict[str, Any]:
        """Every chunk is here and the manifest names them: the copy is sealed (R7, R14)."""
        shard, sender, data = shard_from_wire(body["shard"]), str(body["sender"]), body["manifest"]
        if type(data) is not bytes:  # of a number, bytes() would make that many
            raise ValueError("a manifest is bytes")
        manifest = decode_manifest(data)
        draft = self.vault.shelf.draft(sender, shard)
        if draft is None:
            return {"ok": False, "missing": [], "why": "no such draft: it was aborted or fenced"}
        if manifest.shard != shard or [c.digest for c in manifest.chunks] != draft.digests:
            self._abort(body)
            return {"ok": False, "missing": [], "why": "the manifest names other chunks than the offer"}
        if self.is_fenced(shard.job, draft.attempt):
            self._abort(body)
            return {"ok": False, "missing": [], "why": f"attempt {draft.attempt} is fenced here"}
        if draft.missing:
            return {"ok": False, "missing": draft.missing, "why": f"{len(draft.missing)} chunks are missing"}
        try:
            shelved = self.vault.finish(sender, data)
        except IntegrityError as exc:  # aborted, or one of its slots went bad, since we looked; or it contradicts them
            if not draft.missing:
                self._abort(body)
            return {"ok": False, "missing": draft.missing, "why": str(exc)}
        with self.lock:
            self.incoming.pop((sender, shard), None)
        self.on_sealed(Copy(shard, shelved.spec, self.host_id))
        return {"ok": True, "missing": [], "digest": shard_digest(data)}

    def _abort(self, body: dict[str, Any]) -> dict[str, Any]:
        sender, shard = str(body["sender"]), shard_from_wire(body["shard"])
        with self.lock:
            self.incoming.pop((sender, shard), None)
        self.vault.abort_draft(sender, shard)
        return {}

    def _arrive(self, channel: Channel, life: tuple[str, str]) -> None:
        with self.lock:
            self.life_of[channel] = self.lives.setdefault(life, set())
            self.life_of[channel].add(channel)

    def _life(self, channel: Channel) -> set[Channel]:
        """All connections of the peer at the other end, of its present life. Needs the lock."""
        return self.life_of.get(channel, {channel})

    def _leave(self, channel: Channel) -> None:
        """A connection ended; with a peer's last one its drafts give their room back.

        Not with the ones that fed a draft: a peer's pushes share its connections, and it closes surplus ones.
        """
        with self.lock:
            self.life_of.pop(channel, set()).discard(channel)
            self.lives = {life: channels for life, channels in self.lives.items() if channels}
        self._give_up(lambda key, incoming: not incoming.channels)

    def keep_senders(self, hosts: set[str]) -> None:
        """Hosts out of the view are dead: what they began here gives its room back, even if no socket has ended."""
        self._give_up(lambda key, incoming: key[0] not in hosts)

    def give_up_idle(self) -> None:
        """A sender that lost interest without a word, or whose word was lost, keeps no room here for ever (R13)."""
        late_s = self.vault.clock.monotonic() - DRAFT_IDLE_S
        self._give_up(lambda key, incoming: incoming.heard_s < late_s)

    def _give_up(self, is_orphan: Callable[[Key, Incoming], bool]) -> None:
        with self.lock:
            orphans = {key: incoming for key, incoming in self.incoming.items() if is_orphan(key, incoming)}
            for key in orphans:
                del self.incoming[key]
        for (sender, shard), incoming in orphans.items():  # that draft, not one offered anew meanwhile
            self.vault.abort_draft(sender, shard, only=incoming.draft)

    # -- sending ------------------------------------------------------------------------------

    def _pinned(self, body: dict[str, Any]) -> tuple[Shelved, int]:
        shard = shard_from_wire(body["shard"])
        pinned = self.vault.pin(shard, str(body["digest"]))
        if pinned is None:
            raise IntegrityError(f"{self.host_id} does not hold {shard_to_wire(shard)} {body['digest']}")
        return pinned

    def _manifest(self, body: dict[str, Any]) -> dict[str, Any]:
        shelved, pin = self._pinned(body)
        try:
            return {
                "manifest": self.vault.manifest(shelved),
                "copy": copy_to_wire(Copy(shelved.shard, shelved.spec, "", shelved.missing)),
            }
        finally:
            self.vault.unpin(shelved, pin)

    def _verify(self, body: dict[str, Any]) -> dict[str, Any]:
        """Somebody was sent damaged bytes or none: look at our own, and tell the controller what we lack (R25)."""
        shelved, pin = self._pinned(body)
        try:
            missing = self.vault.verify(shelved)
        finally:
            self.vault.unpin(shelved, pin)
        self.on_sealed(Copy(shelved.shard, shelved.spec, self.host_id, frozenset(missing)))
        return {"missing": missing}

    def _fetch(self, channel: Channel, frame: Frame) -> dict[str, Any]:
        """Send chunks from where they lie; the receiver checks every digest after they left (R7)."""
        shelved, pin = self._pinned(frame.body)
        lacking: list[int] = []
        try:
            want = [checked_count(i, "chunk index") for i in checked_list(frame.body["want"], None, "want")]
            sizes = [shelved.spec.chunk_nbytes(i) if i < len(shelved.slots) else 0 for i in want]
            for part in runs(sizes):
                views = [self.vault.chunk_view(shelved, i) if i < len(shelved.slots) else None for i in want[part]]
                lacking += [i for i, view in zip(want[part], views, strict=True) if view is None]
                send_run(channel, frame.request_id, views, timeout_s=CHUNK_TIMEOUT_S)
        finally:
            self.vault.unpin(shelved, pin)
        return {"lacking": lacking}
