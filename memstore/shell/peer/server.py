"""Serves other holders: receives their shards, sends them ours. One thread per connection (R13, R14).

The requests and their replies: `core/wire/peer_messages.py`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from memstore.core.arena.replica_index import IncomingReplica, StoredReplica
from memstore.core.arena.replica_store import Store
from memstore.core.format.manifest import decode_manifest, shard_digest
from memstore.core.wire.codec import Message, tag_of
from memstore.core.wire.error_message import ErrorMessage
from memstore.core.wire.frame import Kind
from memstore.core.wire.handshake import HolderIdentity
from memstore.core.wire.peer_messages import (
    Abort,
    ChunkBatch,
    ChunksLacking,
    Done,
    FetchChunks,
    FetchManifest,
    HasCopy,
    IncomingRequest,
    ManifestFound,
    Offer,
    ParityOf,
    PeerRequest,
    Ping,
    Refused,
    Seal,
    Verify,
    WholeShard,
    decode_request,
)
from memstore.errors import (
    AuthenticationError,
    CapacityError,
    IntegrityError,
    MemstoreError,
    PeerUnreachable,
    ProtocolError,
)
from memstore.shell.net.channel import Channel
from memstore.shell.peer.chunk_frames import (
    CHUNK_TIMEOUT_S,
    REPLY_TIMEOUT_S,
    Damage,
    receive_bulk,
    receive_run,
    runs,
    send_run,
)
from memstore.shell.peer.parity import ParityServer
from memstore.shell.peer.patches import receive_patches
from memstore.shell.threads import lower_thread_priority
from recovery.inventory import Copy, ShardId

log = logging.getLogger("memstore")
INCOMING_IDLE_S = 120.0  # longer than a batch may take, and than a sender waits for its own digests


Key = tuple[str, ShardId]  # sender and shard


@dataclass(slots=True)
class Incoming:
    """An incoming replica that a peer feeds: all its connections, and when data for it last arrived."""

    replica: IncomingReplica
    channels: set[Channel]
    last_frame_s: float
    receiving: int = 0  # frames under way, each chunk of which has its deadline


class PeerServer:
    """What a holder does for its peers."""

    def __init__(
        self,
        replicas: Store,
        host_id: str,
        *,
        is_fenced: Callable[[str, int], bool],
        on_sealed: Callable[[Copy], None],
        parity: ParityServer,
        before_offer: Callable[[ShardId], None] = lambda shard: None,
        damage: Damage | None = None,
    ) -> None:
        self.replicas = replicas
        self.host_id = host_id
        self.is_fenced = is_fenced
        self.on_sealed = on_sealed
        self.before_offer = before_offer  # may wait, for much less than a sender does
        self.incoming: dict[Key, Incoming] = {}
        self.lives: dict[HolderIdentity, set[Channel]] = {}  # of a peer's life: its open connections
        self.life_of: dict[Channel, set[Channel]] = {}
        self.lock = threading.Lock()
        self.received_bytes = 0
        self.damage, self.parity = damage or Damage(), parity

    def serve(self, channel: Channel, identity: HolderIdentity) -> None:
        """Answer requests until the peer goes away; its incoming replicas go with its last connection (R13)."""
        lower_thread_priority()
        try:
            with self.lock:
                life = self.life_of[channel] = self.lives.setdefault(identity, set())
                life.add(channel)
            for request_id, request in _requests(channel):
                if isinstance(request, IncomingRequest) and request.sender != identity.host:
                    self._refuse_speaker(channel, request_id, identity.host, request.sender[:80])
                    return
                self._answer(channel, request_id, request)
        except PeerUnreachable:
            return
        except ProtocolError as exc:
            self.damage.frame(exc)
        finally:
            self._leave(channel)

    def serve_reader(self, channel: Channel) -> None:
        """Send a rank of another host the chunks that it asks for, until it goes away; it may ask nothing else (R4)."""
        lower_thread_priority()
        try:
            for request_id, request in _requests(channel):
                if not isinstance(request, FetchChunks):
                    raise ProtocolError(f"{channel.peer}: a reader asks for chunks only, not {tag_of(request)}")
                self._answer(channel, request_id, request, is_reader=True)
        except PeerUnreachable:
            return
        except ProtocolError as exc:
            self.damage.frame(exc)

    def _refuse_speaker(self, channel: Channel, request_id: int, proven: str, named: str) -> None:
        """Tell a peer that speaks for another host than it has proved to be that its connection ends."""
        error = AuthenticationError(
            f"host {self.host_id} refuses {channel.peer}: it has proved to be host {proven!r} and speaks for host "
            f"{named!r}; a holder sends only what its own host has",
            proven=proven,
            named=named,
        )
        log.warning("a connection is ended: %s", error)
        channel.send(Kind.ERROR, request_id, ErrorMessage.of(error), deadline_s=REPLY_TIMEOUT_S)

    def _answer(self, channel: Channel, request_id: int, request: PeerRequest, *, is_reader: bool = False) -> None:
        try:
            reply = self._reply(channel, request_id, request, is_reader)
            channel.send(Kind.REPLY, request_id, reply, deadline_s=REPLY_TIMEOUT_S)
        except (PeerUnreachable, ProtocolError):  # a peer that breaks the order of frames cannot be answered in it
            raise
        except MemstoreError as exc:
            channel.send(Kind.ERROR, request_id, ErrorMessage.of(exc), deadline_s=REPLY_TIMEOUT_S)

    def _reply(self, channel: Channel, request_id: int, request: PeerRequest, is_reader: bool) -> Message:
        match request:
            case ChunkBatch(parity=ParityOf() as of):
                return self.parity.chunks(channel, request_id, request, of)
            case Offer(parity=ParityOf() as of):
                return self.parity.offer(request, of)
            case Seal(parity=ParityOf() as of):
                return self.parity.seal(request, of)
            case Abort(parity=ParityOf()):
                return Done()  # what was added stays: the shard may be sent again
            case ChunkBatch():
                return self._chunks(channel, request_id, request)
            case Offer():
                return self._offer(channel, request)
            case FetchChunks():
                return self._fetch(channel, request_id, request, is_reader)
            case Seal():
                return self._seal(request)
            case WholeShard():
                return self._whole(channel, request)
            case Abort():
                return self._abort(request)
            case FetchManifest():
                return self._manifest(request)
            case Verify():
                return self._verify(request)
            case Ping():
                return Done()

    # -- receiving ----------------------------------------------------------------------------

    def _offer(self, channel: Channel, offer: Offer) -> Done | HasCopy | Refused:
        """Admit or refuse a shard before a byte of it travels (R10, R13)."""
        shard, sender, attempt = offer.shard.id, offer.sender, offer.attempt
        count, slots_count = offer.chunks_count, len(self.replicas.table.slots)
        if offer.digest is None:  # else it is no new put, and nothing here is to come
            self.before_offer(shard)
        if self.is_fenced(shard.job, attempt):
            return Refused(why=f"attempt {attempt} of job {shard.job!r} is fenced here", is_final=True)
        if count > slots_count:
            return Refused(why=f"{count} chunks offered, this host has {slots_count} slots", is_final=False)
        known = self.replicas.index.find(shard, offer.digest) if offer.digest is not None else None
        if known is not None:  # outside the lock: it reads bytes
            self.replicas.verify_old(known.digests, [known.spec.chunk_nbytes(i) for i in range(len(known.digests))])
        with self.replicas.lock:  # room that is found is taken at once, before another offer finds it too
            known = (
                self.replicas.index.find(shard, known.spec.digest) if known is not None else None
            )  # or dropped by now
            has_it = known is not None and not known.missing and not known.is_doomed
            if not has_it:
                self.replicas.index.abort_incoming(sender, shard)  # of a try that broke: its room is this one's
            why = None if has_it else self.replicas.index.peer_refusal(shard, count, known)
            if not has_it and why is None:
                replica = self.replicas.index.open_incoming(sender, shard, [b""] * count, attempt=attempt)
        if known is not None and has_it:
            # The controller may not know of this copy: its report may be lost with a controller or a session.
            self.on_sealed(Copy(shard, known.spec, self.host_id))
            return HasCopy()
        if why is not None:
            return Refused(why=why, is_final=False)
        with self.lock:
            self.incoming[sender, shard] = Incoming(replica, self._life(channel), self.replicas.clock.monotonic())
        return Done()

    def _chunks(self, channel: Channel, request_id: int, batch: ChunkBatch) -> Done | Refused:
        """Say which chunks are lacking, then receive each straight into a slot and check its digest (R14)."""
        shard, sender = batch.shard.id, batch.sender
        replica = self.replicas.index.find_incoming(sender, shard)
        offered = {chunk.index: chunk for chunk in batch.chunks}
        if replica is None:
            return Refused(why="no such incoming replica", is_final=False)
        want = self._named(batch, len(replica.slots))
        with self.lock:
            incoming = self.incoming.setdefault((sender, shard), Incoming(replica, self._life(channel), 0.0))
            incoming.last_frame_s = self.replicas.clock.monotonic()
        lack = self.replicas.expect(replica, want, [c.digest for c in batch.chunks], [c.nbytes for c in batch.chunks])
        has = self.replicas.table.lookup
        patches = [i for i in lack if (base := offered[i].base) and has(base, offered[i].nbytes) is not None]
        whole = [i for i in lack if i not in patches]
        answer = ChunksLacking(chunks=tuple(whole), patches=tuple(patches))
        channel.send(Kind.EVENT, request_id, answer, deadline_s=REPLY_TIMEOUT_S)
        while lack := whole or patches:
            receive = receive_run if whole else partial(receive_patches, offered=offered)
            with self.lock:
                incoming.receiving += 1  # it is not idle while a frame of it comes, however slowly
            try:
                run = receive(
                    channel,
                    self.replicas,
                    replica,
                    lack,
                    take=self._take,
                    damage=self.damage,
                    timeout_s=CHUNK_TIMEOUT_S,
                )
            finally:
                with self.lock:
                    incoming.receiving -= 1
            incoming.last_frame_s = self.replicas.clock.monotonic()
            self.received_bytes += run.nbytes
            del lack[: run.answered]
        return Done()

    def _named(self, batch: ChunkBatch, chunks_count: int) -> list[int]:
        """Return the indices of a batch; ProtocolError for indices that no incoming replica has."""
        indices = [chunk.index for chunk in batch.chunks]
        if any(index >= chunks_count for index in indices) or len({*indices}) != len(indices):
            raise ProtocolError(
                f"the incoming replica has chunks 0 to {chunks_count - 1}, each once; the peer names {indices[:64]}"
            )
        sizes = [chunk.nbytes for chunk in batch.chunks if chunk.nbytes > self.replicas.chunk_bytes]
        if sizes:
            raise ProtocolError(
                f"a chunk has 1 to {self.replicas.chunk_bytes} bytes; the peer names some of {sizes[:64]}"
            )
        return indices

    def _take(self, count: int) -> list[int]:
        """Lease slots for that many chunks, or as many as are free: the sender tries the others again (R13)."""
        try:
            return self.replicas.take_slots(count)
        except CapacityError:
            return []

    def _seal(self, seal: Seal) -> HasCopy | ChunksLacking | Refused:
        """Seal a complete copy with its manifest (R7, R14)."""
        shard, sender = seal.shard.id, seal.sender
        manifest = decode_manifest(seal.manifest)
        replica = self.replicas.index.find_incoming(sender, shard)
        if replica is None:
            known = self.replicas.index.find(shard, shard_digest(seal.manifest))
            if known is not None and not known.missing and not known.is_doomed:
                return HasCopy()  # the answer was lost, and the request came again
            return Refused(why="no such incoming replica: it was aborted or fenced", is_final=True)
        if manifest.shard != shard or [c.digest for c in manifest.chunks] != replica.digests:
            self._abort(seal)
            return Refused(why="the manifest names other chunks than the offer", is_final=True)
        if self.is_fenced(shard.job, replica.attempt):
            self._abort(seal)
            return Refused(why=f"attempt {replica.attempt} is fenced here", is_final=True)
        if replica.missing:
            return ChunksLacking(chunks=tuple(replica.missing))
        try:
            stored = self.replicas.finish(sender, seal.manifest, manifest)
        except IntegrityError as exc:  # aborted, or one of its slots went bad, since we looked; or it contradicts them
            if replica.missing:
                return ChunksLacking(chunks=tuple(replica.missing))
            self._abort(seal)
            return Refused(why=str(exc), is_final=True)
        with self.lock:
            self.incoming.pop((sender, shard), None)
        self.on_sealed(Copy(shard, stored.spec, self.host_id))
        return HasCopy()

    def _whole(self, channel: Channel, whole: WholeShard) -> HasCopy | ChunksLacking | Refused:
        """Admit, receive and seal a small shard whose chunks came with the request (R13)."""
        manifest = decode_manifest(whole.manifest)
        sizes = [chunk.nbytes for chunk in manifest.chunks]
        if sum(sizes) != channel.bulk_left or max(sizes, default=0) > self.replicas.chunk_bytes:
            raise ProtocolError(f"{channel.peer}: {channel.bulk_left} bytes of chunks of {sizes[:64]} bytes")
        offer = Offer(
            shard=whole.shard,
            sender=whole.sender,
            attempt=whole.attempt,
            digest=shard_digest(whole.manifest),
            chunks_count=len(sizes),
        )
        reply = self._offer(channel, offer)
        replica = self.replicas.index.find_incoming(whole.sender, whole.shard.id)
        if not isinstance(reply, Done) or replica is None:
            channel.skip_bulk(timeout_s=CHUNK_TIMEOUT_S)
            return reply if not isinstance(reply, Done) else Refused(why="it was aborted", is_final=False)
        self.replicas.expect(replica, range(len(sizes)), [chunk.digest for chunk in manifest.chunks], sizes)
        run = receive_bulk(
            channel,
            self.replicas,
            replica,
            range(len(sizes)),
            sizes,
            take=self._take,
            damage=self.damage,
            timeout_s=CHUNK_TIMEOUT_S,
        )
        self.received_bytes += run.nbytes
        if run.bad:
            return ChunksLacking(chunks=tuple(run.bad))
        return self._seal(Seal(shard=whole.shard, sender=whole.sender, manifest=whole.manifest))

    def _abort(self, request: Abort | Seal) -> Done:
        sender, shard = request.sender, request.shard.id
        with self.lock:
            self.incoming.pop((sender, shard), None)
        self.replicas.abort_incoming(sender, shard)
        return Done()

    def _life(self, channel: Channel) -> set[Channel]:
        """Return all connections of the peer's present life. Needs the lock."""
        return self.life_of.get(channel, {channel})

    def _leave(self, channel: Channel) -> None:
        """Note the end of a connection; with a peer's last one its incoming replicas free their slots.

        Not with the ones that fed an incoming replica: a peer's pushes share its connections, and it closes surplus
        ones.
        """
        with self.lock:
            self.life_of.pop(channel, set()).discard(channel)
            self.lives = {life: channels for life, channels in self.lives.items() if channels}
        self._give_up(lambda key, incoming: not incoming.channels)

    def keep_senders(self, hosts: set[str]) -> None:
        """Free the incoming replicas of hosts that left the view as dead, even if no socket has ended."""
        self._give_up(lambda key, incoming: key[0] not in hosts)

    def give_up_idle(self) -> None:
        """Free the incoming replicas of silent senders, so that they keep no room for ever (R13)."""
        self.parity.give_up_idle()
        late_s = self.replicas.clock.monotonic() - INCOMING_IDLE_S
        self._give_up(lambda key, incoming: incoming.last_frame_s < late_s and not incoming.receiving)

    def _give_up(self, is_orphan: Callable[[Key, Incoming], bool]) -> None:
        with self.lock:
            orphans = {key: incoming for key, incoming in self.incoming.items() if is_orphan(key, incoming)}
            for key in orphans:
                del self.incoming[key]
        for (sender, shard), incoming in orphans.items():  # that incoming replica, not one offered again meanwhile
            self.replicas.abort_incoming(sender, shard, only=incoming.replica)

    # -- sending ------------------------------------------------------------------------------

    def _pinned(
        self, request: FetchManifest | FetchChunks | Verify, *, is_reader: bool = False
    ) -> tuple[StoredReplica, int]:
        pinned = self.replicas.pin(request.shard.id, request.digest, is_reader=is_reader)
        if pinned is None:
            raise IntegrityError(f"{self.host_id} does not hold {request.shard.id} {request.digest}")
        return pinned

    def _has_copy(self, request: FetchManifest | FetchChunks | Verify, chunks: Sequence[int] = ()) -> bool:
        """Return whether there is a copy here, and nothing that it could have from its parity here."""
        shard, digest = request.shard.id, request.digest
        copy = self.replicas.index.find(shard, digest)
        if copy is None or copy.missing.isdisjoint(chunks):
            return copy is not None
        return not self.parity.has_parity_of(shard, digest)

    def _manifest(self, request: FetchManifest) -> ManifestFound:
        if not self._has_copy(request):
            return ManifestFound(manifest=self.replicas.manifest_in_parity(request.shard.id, request.digest))
        stored, pin = self._pinned(request)
        try:
            return ManifestFound(manifest=self.replicas.manifest(stored))
        finally:
            self.replicas.unpin(stored, pin)

    def _verify(self, request: Verify) -> ChunksLacking:
        """Check a replica after a peer got damaged bytes or none, or chunks that a rank is to fetch (R23, R25)."""
        if not self._has_copy(request) and self.parity.has_parity_of(request.shard.id, request.digest):
            return self.parity.verify(request.shard.id, request.digest)
        stored, pin = self._pinned(request)
        try:
            missing = self.replicas.verify(stored, map, request.chunks and frozenset(request.chunks))
        finally:
            self.replicas.unpin(stored, pin)
        if missing or request.chunks is None:
            self.on_sealed(Copy(stored.shard, stored.spec, self.host_id, frozenset(missing)))
        return ChunksLacking(chunks=tuple(missing))

    def _fetch(self, channel: Channel, request_id: int, request: FetchChunks, is_reader: bool) -> Done:
        """Send chunks from where they lie, or decoded; the receiver checks every digest after they left (R7)."""
        if request.others and not self._has_copy(request, request.chunks):
            for decoded in self.parity.decode(request):
                views = [memoryview(data) if data else None for data in decoded]
                send_run(channel, request_id, views, timeout_s=CHUNK_TIMEOUT_S)
            return Done()
        stored, pin = self._pinned(request, is_reader=is_reader)
        try:
            want = request.chunks
            sizes = [stored.spec.chunk_nbytes(i) if i < len(stored.slots) else 0 for i in want]
            for part in runs(sizes):
                views = [self.replicas.chunk_view(stored, i) if i < len(stored.slots) else None for i in want[part]]
                send_run(channel, request_id, views, timeout_s=CHUNK_TIMEOUT_S)
        finally:
            self.replicas.unpin(stored, pin)
        return Done()


def _requests(channel: Channel) -> Iterator[tuple[int, PeerRequest]]:
    """Yield a peer's calls, each with its number, until it says that it ends. TransportError."""
    while (frame := channel.recv(timeout_s=None)).kind is not Kind.BYE:
        if frame.kind is not Kind.CALL:
            raise ProtocolError(f"{channel.peer}: {frame.kind.name} where a CALL was expected")
        request = decode_request(frame.data)
        if frame.bulk_bytes and not isinstance(request, WholeShard):
            raise ProtocolError(
                f"{channel.peer}: {tag_of(request)} has no bulk bytes, {frame.bulk_bytes:,} came with it"
            )
        yield frame.request_id, request
