"""Adds other hosts' chunks into rows of parity here, and decodes chunks of a lost shard from them (R37).

Each chunk is received into a buffer and digested before it touches its row: what was added cannot be taken out again.
A lost chunk is its row with the chunks of the other shards in it added once more; they are fetched from their hosts,
and what comes out is digested against the lost shard's own manifest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from memstore.core.arena.parity_rows import IncomingParity, ParityBefore, add_into
from memstore.core.arena.replica_index import IncomingReplica, StoredReplica
from memstore.core.arena.replica_store import Store
from memstore.core.format.manifest import Manifest, chunk_digest, decode_manifest, shard_digest, summand_manifest
from memstore.core.wire.frame import Kind
from memstore.core.wire.ids import WireShard
from memstore.core.wire.peer_messages import (
    ChunkBatch,
    ChunksLacking,
    Done,
    FetchChunks,
    HasCopy,
    Offer,
    ParityOf,
    Refused,
    Seal,
    ShardHost,
    Verify,
)
from memstore.errors import CapacityError, IntegrityError, MemstoreError, ProtocolError, TransportError
from memstore.shell.net.channel import Channel
from memstore.shell.peer.chunk_frames import (
    CHUNK_TIMEOUT_S,
    REPLY_TIMEOUT_S,
    SLOW_RUN_BYTES,
    Damage,
    receive_head,
    runs,
)
from recovery.inventory import Copy, ShardId
from recovery.parity import chunks_at, row_of, rows_count, set_of

DECODED_BYTES = 4 << 20  # fetched, decoded and sent before the next: else the link of who asks is idle meanwhile
IDLE_S = 120.0  # without a chunk, until parity that lacks some is given up


@dataclass(frozen=True, slots=True)
class _Added:
    """A shard that is in a host's parity, and a host that has it."""

    manifest: Manifest
    digest: str
    host: str


class OtherHolder(Protocol):
    """The connections to another holder."""

    def fetch_bytes(self, request: FetchChunks) -> list[bytearray]:
        """Return chunks, empty for one that the holder lacks. IntegrityError, TransportError."""

    def call(self, request: Verify) -> ChunksLacking:
        """Have the holder digest chunks again."""


class ParityServer:
    """The parity of one host: what other holders may ask of it."""

    def __init__(
        self,
        replicas: Store,
        host_id: str,
        *,
        is_fenced: Callable[[str, int], bool],
        on_sealed: Callable[[Copy], None],
        damage: Damage,
        reach: Callable[[str], OtherHolder],
    ) -> None:
        self.replicas, self.host_id = replicas, host_id
        self.is_fenced, self.on_sealed, self.damage, self.reach = is_fenced, on_sealed, damage, reach
        self.received_bytes = 0

    # -- adding ---------------------------------------------------------------------------------

    def offer(self, offer: Offer, of: ParityOf) -> Done | HasCopy | Refused:
        """Admit or refuse a shard that is to be added into parity, before a byte of it travels."""
        shard, parity = offer.shard.id, _parity_id(offer.shard, of)
        if self.is_fenced(shard.job, offer.attempt):
            return Refused(why=f"attempt {offer.attempt} of job {shard.job!r} is fenced here", is_final=True)
        if shard.job not in self.replicas.index.shares:  # a host that stands in for a lost one has reserved nothing
            with contextlib.suppress(CapacityError):
                self.replicas.ensure_free(rows_count(of.ranks, offer.chunks_count))
        is_first = parity not in self.replicas.index.parity
        before = self.replicas.parity_before(parity, of.ranks) if is_first else ParityBefore()
        with self.replicas.lock:
            known = self.replicas.index.find(parity)
            if known is not None and offer.digest is None:
                return Refused(why=f"{parity} is here; which bytes the shard has must be known", is_final=False)
            if known is not None and not any(s.digest == offer.digest for s in known.spec.summands):
                return Refused(why=f"{parity} is here, with other bytes of rank {shard.rank}", is_final=True)
            if known is None or known.missing or known.is_doomed:
                return self._open(offer, parity, of.ranks, known, before)
        self.on_sealed(Copy(parity, known.spec, self.host_id))  # the report may be lost with a controller or a session
        return HasCopy()

    def _open(
        self, offer: Offer, parity: ShardId, ranks: tuple[int, ...], known: StoredReplica | None, before: ParityBefore
    ) -> Done | Refused:
        """Open the parity, or let one shard more be added into the one that is open. Needs the store's lock."""
        index, count = self.replicas.index, rows_count(ranks, offer.chunks_count)
        begun = index.parity.get(parity)
        if begun is not None and begun.ranks != ranks:
            return Refused(why=f"{parity} is of the set {begun.ranks} here, not {ranks}", is_final=True)
        why = index.parity_refusal(parity, count)
        if why is not None:
            # No order names what is unfinished here of an older step: it gives way.
            step = (parity.attempt, parity.step)
            self.replicas.abort_parity(lambda p: p.shard.job == parity.job and (p.shard.attempt, p.shard.step) < step)
            why = index.parity_refusal(parity, count)
        if why is not None:
            return Refused(why=why, is_final=False)
        if begun is None:
            begun = IncomingParity(parity, ranks, offer.attempt, 0.0, before=before)
            if known is not None:
                begun.stored_rows = {n: known.digests[n] for n, slot in enumerate(known.slots) if slot is not None}
            index.parity[parity] = begun
        begun.touched_s, begun.attempt = self.replicas.clock.monotonic(), max(begun.attempt, offer.attempt)
        begun.rows_count = max(begun.rows_count, count)
        return Done()

    def chunks(self, channel: Channel, request_id: int, batch: ChunkBatch, of: ParityOf) -> Done | Refused:
        """Say which chunks are not added yet, then receive each, check its digest, and add it."""
        parity, rank = self.replicas.index.parity.get(_parity_id(batch.shard, of)), batch.shard.rank
        if parity is None or parity.ranks != of.ranks:
            return Refused(why="no such parity is being added up", is_final=False)
        last = max((chunk.index for chunk in batch.chunks), default=0)
        allowed = chunks_at(parity.ranks, parity.shard.rank, rank, last + 1)
        strange = [c for c in batch.chunks if c.index not in allowed or c.nbytes > self.replicas.chunk_bytes]
        if (
            strange
            or row_of(parity.ranks, last) >= parity.rows_count
            or len({c.index for c in batch.chunks}) != len(batch.chunks)
        ):
            raise ProtocolError(
                f"{channel.peer}: chunks {[c.index for c in batch.chunks][:64]} do not belong into {parity.shard}, "
                f"which was offered {parity.rows_count} rows"
            )
        try:
            lack = [c for c in batch.chunks if not parity.is_here(rank, c.index, c.digest)]
        except IntegrityError as exc:
            return Refused(why=str(exc), is_final=True)
        indices = tuple(chunk.index for chunk in lack)
        channel.send(Kind.EVENT, request_id, ChunksLacking(chunks=indices), deadline_s=REPLY_TIMEOUT_S)
        buffer = memoryview(bytearray(self.replicas.chunk_bytes if lack else 0))  # a new one for each costs its pages
        while lack:
            head = receive_head(channel, len(lack), self.replicas.chunk_bytes, timeout_s=CHUNK_TIMEOUT_S)
            sizes = head.sizes
            for chunk, nbytes in zip(lack, sizes, strict=False):
                data, digests = buffer[:nbytes], list[bytes]()
                if nbytes:
                    channel.recv_bulk_digests([(data,)], digests, timeout_s=CHUNK_TIMEOUT_S)
                if digests != [chunk.digest]:
                    self.damage.add(chunks=1)
                    continue
                self.received_bytes += nbytes
                self.replicas.add_to_parity(parity, rank, chunk.index, chunk.digest, data)
            lack = lack[len(sizes) :]
        return Done()

    def seal(self, seal: Seal, of: ParityOf) -> HasCopy | ChunksLacking | Done | Refused:
        """Note that a shard is in the parity whole; store the parity with the last one."""
        shard, parity_id = seal.shard.id, _parity_id(seal.shard, of)
        manifest, digest = decode_manifest(seal.manifest), shard_digest(seal.manifest)
        parity = self.replicas.index.parity.get(parity_id)
        if parity is None or parity.ranks != of.ranks:
            if self._is_stored(shard, digest):
                return HasCopy()  # the answer was lost, and the request came again
            return Refused(why="no such parity is being added up: it was given up or fenced", is_final=False)
        rows = rows_count(parity.ranks, len(manifest.chunks))
        if manifest.shard != shard or rows > parity.rows_count:
            return Refused(why="the manifest names other chunks than the offer", is_final=True)
        if self.is_fenced(shard.job, parity.attempt):
            self.replicas.abort_parity(lambda each: each is parity)
            return Refused(why=f"attempt {parity.attempt} is fenced here", is_final=True)
        try:
            with self.replicas.lock:
                lacking = parity.lacking(shard.rank, manifest)
                known = parity.named.get(shard.rank)
                if not lacking and known is not None and known[1] != seal.manifest:
                    raise IntegrityError(f"{shard} was added to {parity_id} with other bytes before")
                if not lacking:
                    parity.named[shard.rank], parity.senders[shard.rank] = (manifest, seal.manifest), seal.sender
                parity.touched_s = self.replicas.clock.monotonic()
        except IntegrityError as exc:
            self.replicas.abort_parity(lambda each: each is parity)
            return Refused(why=str(exc), is_final=True)
        if lacking:
            return ChunksLacking(chunks=tuple(lacking))
        return self._finish(parity, shard, digest) if parity.is_named else Done()

    def _finish(self, parity: IncomingParity, shard: ShardId, digest: str) -> HasCopy | Refused:
        """Store parity in which every shard is."""
        try:
            self._fetch_owed(parity)
            stored = self.replicas.finish_parity(parity)
        except TransportError as exc:
            return Refused(why=f"unchanged chunks of a changed row cannot be fetched: {exc}", is_final=False)
        except IntegrityError as exc:  # a row or a chunk that was to be used again is gone: all is sent again
            self.replicas.abort_parity(lambda each: each is parity)
            return Refused(why=str(exc), is_final=False)
        if stored is None:  # given up, or another shard's seal has stored it
            return HasCopy() if self._is_stored(shard, digest) else Refused(why="it was given up", is_final=False)
        self.on_sealed(Copy(parity.shard, stored.spec, self.host_id))
        return HasCopy()

    def _fetch_owed(self, parity: IncomingParity) -> None:
        """Fetch the unchanged chunks of rows in which others have changed, and add them.

        Raises:
            IntegrityError: A host lacks one.
            TransportError: A host cannot be reached.
        """
        for rank, chunks in parity.owed().items():
            (manifest, data), host = parity.named[rank], parity.senders[rank]
            for part in runs([manifest.chunks[chunk].nbytes for chunk in chunks], SLOW_RUN_BYTES):
                wanted = tuple(chunks[part])
                request = FetchChunks(shard=WireShard.of(manifest.shard), digest=shard_digest(data), chunks=wanted)
                for chunk, found in zip(wanted, self.reach(host).fetch_bytes(request), strict=True):
                    digest = manifest.chunks[chunk].digest
                    if chunk_digest(found) != digest:
                        raise IntegrityError(f"chunk {chunk} of {manifest.shard} came damaged from {host}, or not")
                    self.received_bytes += len(found)
                    self.replicas.add_to_parity(parity, rank, chunk, digest, memoryview(found))

    def has_parity_of(self, shard: ShardId, digest: str) -> bool:
        """Return whether this host keeps parity of a shard, perhaps not all rows."""
        pinned = self.replicas.pin_parity_of(shard, digest)
        if pinned is not None:
            self.replicas.unpin(*pinned)
        return pinned is not None

    def _is_stored(self, shard: ShardId, digest: str) -> bool:
        pinned = self.replicas.pin_parity_of(shard, digest)
        if pinned is None:
            return False
        self.replicas.unpin(*pinned)
        return not pinned[0].missing

    def give_up_idle(self) -> None:
        """Give up parity for which nothing has come for long, so that it keeps no room for ever."""
        late_s = self.replicas.clock.monotonic() - IDLE_S
        self.replicas.abort_parity(lambda parity: parity.touched_s < late_s)

    # -- decoding -------------------------------------------------------------------------------

    def decode(self, request: FetchChunks) -> Iterator[list[bytearray]]:
        """Yield chunks of a shard of which this host has parity, some at a time; empty ones are lost.

        What does not match its digest makes this host, and those of the other shards, digest again what they have.

        Raises:
            IntegrityError: There is no parity of it here.
            TransportError: The host of another shard in it cannot be reached.
        """
        shard, hosts = request.shard.id, {row.rank: row.host for row in request.others}
        stored, pin = self._pinned(shard, request.digest)
        try:
            rows = decode_manifest(self.replicas.manifest(stored))
            added = {
                each.rank: _Added(
                    decode_manifest(summand_manifest(rows, each.rank) or b""), each.digest, hosts.get(each.rank, "")
                )
                for each in stored.spec.summands
            }
            chunks = added[shard.rank].manifest.chunks
            wanted = [i for i in request.chunks if i < len(chunks)]
            for part in runs([chunks[i].nbytes for i in wanted], DECODED_BYTES):
                yield self._decoded(stored, added, shard.rank, wanted[part])
        finally:
            self.replicas.unpin(stored, pin)

    def decode_into(
        self, replica: IncomingReplica, digest: str, chunks: Sequence[int], others: tuple[ShardHost, ...]
    ) -> list[int]:
        """Decode chunks into an incoming replica of this host; return those that are lost. Errors as `decode`'s."""
        request = FetchChunks(shard=WireShard.of(replica.shard), digest=digest, chunks=tuple(chunks), others=others)
        decoded = (data for part in self.decode(request) for data in part)
        for chunk, data in zip(chunks, decoded, strict=False):
            if data:
                number = self.replicas.take_slots_growing(1)[0]
                self.replicas.arena.view(number, len(data))[:] = data
                self.replicas.keep_chunks(replica, [(chunk, number, len(data), chunk_digest(data))])
        return [chunk for chunk in chunks if replica.slots[chunk] is None]

    def verify(self, shard: ShardId, digest: str) -> ChunksLacking:
        """Digest the rows again and report them; return the chunks of a shard whose rows are lacking. IntegrityError.

        A chunk that came damaged, or not, may have been spoilt on the way, or by another host's.
        """
        stored, pin = self._pinned(shard, digest)
        try:
            missing = self.replicas.verify(stored)
            self.on_sealed(Copy(stored.shard, stored.spec, self.host_id, stored.missing))
        finally:
            self.replicas.unpin(stored, pin)
        ranks = set_of(stored.shard, stored.spec)
        here = chunks_at(ranks, stored.shard.rank, shard.rank, len(stored.slots) * (len(ranks) - 1))
        return ChunksLacking(chunks=tuple(here[row] for row in missing))

    def _decoded(
        self, stored: StoredReplica, added: Mapping[int, _Added], rank: int, wanted: Sequence[int]
    ) -> list[bytearray]:
        """Return chunks of a shard: what this host has of it, the others from their rows; empty ones are lost."""
        ranks, chunks = set_of(stored.shard, stored.spec), added[rank].manifest.chunks
        held = self._fetched(replace(added[rank], host=self.host_id), wanted)
        here = chunks_at(ranks, stored.shard.rank, rank, len(chunks))
        left = [at for at, data in enumerate(held) if not data and wanted[at] in here]
        found = dict(zip(left, self._from_rows(stored, added, rank, [wanted[at] for at in left]), strict=True))
        return [found.get(at, data) for at, data in enumerate(held)]

    def _from_rows(
        self, stored: StoredReplica, added: Mapping[int, _Added], rank: int, wanted: Sequence[int]
    ) -> list[bytearray]:
        ranks, chunks = set_of(stored.shard, stored.spec), added[rank].manifest.chunks
        rows = [row_of(ranks, chunk) for chunk in wanted]
        sums = [bytearray(self.replicas.chunk_view(stored, row) or b"") for row in rows]
        asked: dict[int, dict[int, int]] = {}  # other rank -> place in `wanted` -> its chunk in the same row
        for other in added.keys() - {rank}:
            theirs = chunks_at(ranks, stored.shard.rank, other, len(added[other].manifest.chunks))
            asked[other] = {at: theirs[row] for at, row in enumerate(rows) if row < len(theirs) and sums[at]}
            found = self._fetched(added[other], list(asked[other].values()))
            for at, data in zip(asked[other], found, strict=True):
                if data:
                    add_into(memoryview(sums[at]), len(sums[at]), memoryview(data))
                else:
                    sums[at] = bytearray()
        for at, chunk in enumerate(wanted):
            sums[at] = sums[at][: chunks[chunk].nbytes]
            if sums[at] and chunk_digest(sums[at]) != chunks[chunk].digest:
                sums[at] = bytearray()
                self._look_for_damage(stored, rows[at], [(added[r], a[at]) for r, a in asked.items() if at in a])
        return sums

    def _fetched(self, added: _Added, chunks: Sequence[int]) -> Sequence[bytearray]:
        """Return chunks of another shard in the parity, from this host or another; empty ones are lost there."""
        if not chunks:
            return []
        shard = added.manifest.shard
        if added.host != self.host_id:
            request = FetchChunks(shard=WireShard.of(shard), digest=added.digest, chunks=tuple(chunks))
            try:
                return self.reach(added.host).fetch_bytes(request)
            except IntegrityError:  # it was dropped there meanwhile
                return [bytearray() for _ in chunks]
            except TransportError as exc:  # not of the connection of the host that asks: that one goes on
                raise TransportError(f"{self.host_id} cannot decode with chunks of {shard}: {exc}") from exc
        pinned = self.replicas.pin(shard, added.digest)
        if pinned is None:
            return [bytearray() for _ in chunks]
        try:
            return [bytearray(self.replicas.chunk_view(pinned[0], chunk) or b"") for chunk in chunks]
        finally:
            self.replicas.unpin(*pinned)

    def _look_for_damage(self, stored: StoredReplica, row: int, chunks: Sequence[tuple[_Added, int]]) -> None:
        """Have a row, and the chunks that were added into it, digested where they lie, and what is bad reported."""
        if self.replicas.verify(stored, chunks={row}):
            self.on_sealed(Copy(stored.shard, stored.spec, self.host_id, stored.missing))
        for added, chunk in chunks:
            if added.host != self.host_id:  # what is here the scrub digests again
                request = Verify(shard=WireShard.of(added.manifest.shard), digest=added.digest, chunks=(chunk,))
                with contextlib.suppress(MemstoreError):
                    self.reach(added.host).call(request)

    def _pinned(self, shard: ShardId, digest: str) -> tuple[StoredReplica, int]:
        pinned = self.replicas.pin_parity_of(shard, digest)
        if pinned is None:
            raise IntegrityError(f"{self.host_id} does not hold {shard} {digest}, nor parity of it")
        return pinned


def _parity_id(shard: WireShard, of: ParityOf) -> ShardId:
    """Return the parity that a shard is added into; ProtocolError if the set has not both ranks."""
    if list(of.ranks) != sorted({*of.ranks}) or of.rank == shard.rank or not {of.rank, shard.rank} <= {*of.ranks}:
        raise ProtocolError(f"rank {shard.rank} is not added into the parity of rank {of.rank} in the set {of.ranks}")
    return ShardId(shard.job, shard.attempt, shard.step, of.rank, is_parity=True)
