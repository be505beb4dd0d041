"""Adds other hosts' chunks into rows of parity here, and decodes chunks of a lost shard from them (R37).

Each chunk is received into a buffer and digested before it touches its row: what was added cannot be taken out again.
A lost chunk is its row with the chunks of the other shards in it added once more, each times a factor; they are
fetched from their hosts. Where another one of these is lost, too, so is the second row of the same chunks, which is on
another host. What comes out is digested against the lost shard's own manifest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from memstore.core.arena.parity_rows import IncomingParity, ParityBefore
from memstore.core.arena.replica_index import IncomingReplica, StoredReplica
from memstore.core.arena.replica_store import Store
from memstore.core.format.manifest import Chunk, chunk_digest, decode_manifest, shard_digest, summand_manifest
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
from recovery.parity import ParitySet, set_of

DECODED_BYTES = 4 << 20  # fetched, decoded and sent before the next: else the link of who asks is idle meanwhile
IDLE_S = 120.0  # without a chunk, until parity that lacks some is given up


@dataclass(frozen=True, slots=True)
class _Part:
    """What is added up in rows, or rows of the same chunks, and a host that has it; "": none has."""

    shard: ShardId
    digest: str
    host: str
    chunks: tuple[Chunk, ...] = ()


@dataclass(slots=True)
class _Sum:
    """A chunk that is added up; empty if it is lost."""

    data: bytearray
    second: int = 0  # the factor of the second row of the same chunks; 0: it is not needed
    factors: Mapping[int, int] = field(default_factory=dict)  # of others' chunks, by rank
    parts: list[tuple[_Part, int]] = field(default_factory=list)  # with which chunk, or row, of each


@dataclass(frozen=True, slots=True)
class _Parts:
    """All that a host may decode with from its parity."""

    ranks: ParitySet
    owner: int  # the rank whose parity it is
    by_rank: Mapping[int, _Part]
    second: _Part | None  # the next rank's parity, which has the second row of the same chunks; None: none is known

    def row_of(self, rank: int, chunk: int) -> int | None:
        """Return the row that a rank's chunk is in; None if it is in none here."""
        return self.ranks.row_of(self.owner, rank, chunk)

    def chunks_in(self, rank: int, rows: Collection[int]) -> dict[int, int]:
        """Return by row the chunks that a rank has in some rows."""
        count, found = len(self.by_rank[rank].chunks), {row: self.ranks.chunk_in(self.owner, rank, row) for row in rows}
        return {row: chunk for row, chunk in found.items() if chunk is not None and chunk < count}


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
                self.replicas.ensure_free(of.set.rows_count(offer.chunks_count))
        is_first = parity not in self.replicas.index.parity
        before = self.replicas.parity_before(parity, of.set) if is_first else ParityBefore()
        with self.replicas.lock:
            known = self.replicas.index.find(parity)
            if known is not None and offer.digest is None:
                return Refused(why=f"{parity} is here; which bytes the shard has must be known", is_final=False)
            if known is not None and not any(s.digest == offer.digest for s in known.spec.summands):
                return Refused(why=f"{parity} is here, with other bytes of rank {shard.rank}", is_final=True)
            if known is None or known.missing or known.is_doomed:
                return self._open(offer, parity, of.set, known, before)
        self.on_sealed(Copy(parity, known.spec, self.host_id))  # the report may be lost with a controller or a session
        return HasCopy()

    def _open(
        self, offer: Offer, parity: ShardId, ranks: ParitySet, known: StoredReplica | None, before: ParityBefore
    ) -> Done | Refused:
        """Open the parity, or let one shard more be added into the one that is open. Needs the store's lock."""
        index, count = self.replicas.index, ranks.rows_count(offer.chunks_count)
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
        if parity is None or parity.ranks != of.set:
            return Refused(why="no such parity is being added up", is_final=False)
        rows = [parity.row_of(rank, chunk.index) for chunk in batch.chunks]
        is_strange = any(row is None or row >= parity.rows_count for row in rows) or len({*rows}) != len(rows)
        if is_strange or any(chunk.nbytes > self.replicas.chunk_bytes for chunk in batch.chunks):
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
                if not nbytes:
                    continue  # the sender has lost it meanwhile
                data, digests = buffer[:nbytes], list[bytes]()
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
        if parity is None or parity.ranks != of.set:
            if self._is_stored(shard, digest):
                return HasCopy()  # the answer was lost, and the request came again
            return Refused(why="no such parity is being added up: it was given up or fenced", is_final=False)
        rows = parity.ranks.rows_count(len(manifest.chunks))
        is_strange = manifest.shard != shard or manifest.chunk_bytes > self.replicas.chunk_bytes
        if is_strange or rows > parity.rows_count:
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
        except CapacityError as exc:
            return Refused(why=str(exc), is_final=False)
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
        shard = request.shard.id
        pinned = self._pinned(shard, request.digest)
        try:
            kept = [(stored, self._parts(stored, request.others)) for stored, _ in pinned]
            chunks = kept[0][1].by_rank[shard.rank].chunks
            wanted = [i for i in request.chunks if i < len(chunks)]
            for part in runs([chunks[i].nbytes for i in wanted], DECODED_BYTES):
                found = dict.fromkeys(wanted[part], bytearray())
                for stored, parts in kept:  # each of its chunks is in the rows of one of them
                    lacking = [chunk for chunk, data in found.items() if not data]
                    found.update(zip(lacking, self._decoded(stored, parts, shard.rank, lacking), strict=True))
                yield [found[chunk] for chunk in wanted[part]]
        finally:
            for each in pinned:
                self.replicas.unpin(*each)

    def _parts(self, stored: StoredReplica, others: Sequence[ShardHost]) -> _Parts:
        """Return what a host may decode with, and where the others say that it is."""
        rows, ranks = decode_manifest(self.replicas.manifest(stored)), set_of(stored.shard, stored.spec)
        hosts = {row.rank: row.host for row in others if row.parity is None}
        by_rank: dict[int, _Part] = {}
        for each in stored.spec.summands:
            manifest = decode_manifest(summand_manifest(rows, each.rank) or b"")
            by_rank[each.rank] = _Part(manifest.shard, each.digest, hosts.get(each.rank, ""), manifest.chunks)
        number = ranks.next(stored.shard.rank)
        second = (
            _Part(stored.shard._replace(rank=number), row.parity, row.host)
            for row in others
            if row.rank == number and row.parity is not None and ranks.spare > 1
        )
        return _Parts(ranks, stored.shard.rank, by_rank, next(second, None))

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
        lacking, pinned = set[int](), self._pinned(shard, digest)
        try:
            for stored, _ in pinned:
                missing, ranks = self.replicas.verify(stored), set_of(stored.shard, stored.spec)
                self.on_sealed(Copy(stored.shard, stored.spec, self.host_id, stored.missing))
                here = ranks.rows_at(stored.shard.rank, shard.rank, len(stored.slots) * ranks.data)
                lacking.update(chunk for chunk, row in here.items() if row in missing)
        finally:
            for each in pinned:
                self.replicas.unpin(*each)
        return ChunksLacking(chunks=tuple(sorted(lacking)))

    def _decoded(self, stored: StoredReplica, parts: _Parts, rank: int, wanted: Sequence[int]) -> list[bytearray]:
        """Return chunks of a shard: what this host has of it, the others from their rows; empty ones are lost."""
        held = self._fetched(replace(parts.by_rank[rank], host=self.host_id), wanted)
        rows = [parts.row_of(rank, chunk) if not data else None for chunk, data in zip(wanted, held, strict=True)]
        asked = {row: chunk for row, chunk in zip(rows, wanted, strict=True) if row is not None}
        found = self._from_rows(stored, parts, rank, asked)
        lost = {row: chunk for row, chunk in asked.items() if not found[row]}
        if lost and parts.second is not None:  # what was found rotten is known to be lost now: the second row helps
            found.update(self._from_rows(stored, parts, rank, lost))
        return [data if row is None else found[row] for row, data in zip(rows, held, strict=True)]

    def _from_rows(
        self, stored: StoredReplica, parts: _Parts, rank: int, wanted: Mapping[int, int], lost: Collection[int] = ()
    ) -> dict[int, bytearray]:
        """Return a rank's chunks by their rows, added up; empty ones are lost.

        Args:
            stored: The parity.
            parts: What they are added up from.
            rank: Whose chunks are wanted.
            wanted: Row -> chunk.
            lost: Other ranks whose chunks in these rows no host has.
        """
        theirs = {other: parts.chunks_in(other, wanted) for other in parts.by_rank if other != rank}
        lost = {*lost, *(other for other in theirs if not parts.by_rank[other].host)}
        sums = {row: self._begun(stored, parts, rank, row, wanted[row], theirs, lost) for row in wanted}
        self._add_second_rows(parts, sums)
        again: dict[int, list[int]] = {}  # rank -> rows in which its chunk was not to be had
        for other, chunks in theirs.items():
            asked = [row for row in chunks if other in sums[row].factors and sums[row].data]
            found = self._fetched(parts.by_rank[other], [chunks[row] for row in asked])
            for row, data in zip(asked, found, strict=True):
                if not data:
                    again.setdefault(other, []).append(row)
                    sums[row].data = bytearray()
                    continue
                self._add(sums[row], data, sums[row].factors[other], parts.by_rank[other], chunks[row])
        decoded = {row: self._checked(stored, row, sums[row], parts.by_rank[rank].chunks[wanted[row]]) for row in sums}
        for other, rows in again.items() if parts.second is not None else ():
            decoded.update(self._from_rows(stored, parts, rank, {row: wanted[row] for row in rows}, {*lost, other}))
        return decoded

    def _begun(
        self,
        stored: StoredReplica,
        parts: _Parts,
        rank: int,
        row: int,
        chunk: int,
        theirs: Mapping[int, Mapping[int, int]],
        lost: Collection[int],
    ) -> _Sum:
        """Return the sum for a chunk, with this host's row in it; an empty one if the chunk is lost."""
        view, ranks = self.replicas.chunk_view(stored, row), parts.ranks
        there = [other for other, chunks in theirs.items() if row in chunks and other not in lost]
        gone = [other for other in lost if row in theirs[other]]
        has_second = parts.second is not None and row % ranks.spare == 0
        if view is None or len(gone) > has_second:
            return _Sum(bytearray())
        first, second, factors = ranks.decoding(row, rank, gone[0] if gone else None, there)
        begun = _Sum(bytearray(parts.by_rank[rank].chunks[chunk].nbytes), second, factors)
        self.replicas.add_into(memoryview(begun.data), len(begun.data), view[: len(begun.data)], first)
        return begun

    def _add_second_rows(self, parts: _Parts, sums: Mapping[int, _Sum]) -> None:
        """Add the next rank's rows to the sums that need them; those that are not to be had make an empty sum."""
        rows = [row for row, begun in sums.items() if begun.second]
        if parts.second is None or not rows:
            return
        for row, data in zip(rows, self._fetched(parts.second, [row + 1 for row in rows]), strict=True):
            if data:
                self._add(sums[row], data, sums[row].second, parts.second, row + 1)
            else:
                sums[row].data = bytearray()

    def _add(self, begun: _Sum, data: bytearray, factor: int, part: _Part, index: int) -> None:
        nbytes = min(len(data), len(begun.data))
        self.replicas.add_into(memoryview(begun.data), nbytes, memoryview(data)[:nbytes], factor)
        begun.parts.append((part, index))

    def _checked(self, stored: StoredReplica, row: int, begun: _Sum, chunk: Chunk) -> bytearray:
        """Return a chunk if it is right; else an empty one, and all that went into it is digested again."""
        if not begun.data or chunk_digest(begun.data) == chunk.digest:
            return begun.data
        self._look_for_damage(stored, row, begun.parts)
        return bytearray()

    def _fetched(self, part: _Part, chunks: Sequence[int]) -> Sequence[bytearray]:
        """Return chunks, or rows, of a part, from this host or another; empty ones are lost there."""
        if not chunks:
            return []
        if part.host != self.host_id:
            request = FetchChunks(shard=WireShard.of(part.shard), digest=part.digest, chunks=tuple(chunks))
            try:
                return self.reach(part.host).fetch_bytes(request)
            except IntegrityError:  # it was dropped there meanwhile
                return [bytearray() for _ in chunks]
            except TransportError as exc:  # not of the connection of the host that asks: that one goes on
                raise TransportError(f"{self.host_id} cannot decode with chunks of {part.shard}: {exc}") from exc
        pinned = self.replicas.pin(part.shard, part.digest)
        if pinned is None:
            return [bytearray() for _ in chunks]
        try:
            return [bytearray(self.replicas.chunk_view(pinned[0], chunk) or b"") for chunk in chunks]
        finally:
            self.replicas.unpin(*pinned)

    def _look_for_damage(self, stored: StoredReplica, row: int, parts: Sequence[tuple[_Part, int]]) -> None:
        """Have a row, and what else was added up with it, digested where it lies, and what is bad reported."""
        if self.replicas.verify(stored, chunks={row}):
            self.on_sealed(Copy(stored.shard, stored.spec, self.host_id, stored.missing))
        for part, index in parts:
            if part.host != self.host_id:  # what is here the scrub digests again
                request = Verify(shard=WireShard.of(part.shard), digest=part.digest, chunks=(index,))
                with contextlib.suppress(MemstoreError):
                    self.reach(part.host).call(request)

    def _pinned(self, shard: ShardId, digest: str) -> list[tuple[StoredReplica, int]]:
        pinned = self.replicas.pin_parities_of(shard, digest)
        if not pinned:
            raise IntegrityError(f"{self.host_id} does not hold {shard} {digest}, nor parity of it")
        return pinned


def _parity_id(shard: WireShard, of: ParityOf) -> ShardId:
    """Return the parity that a shard is added into; ProtocolError if the set has not both ranks."""
    is_set = list(of.ranks) == sorted({*of.ranks}) and len(of.ranks) >= of.spare + 2
    if not is_set or of.rank == shard.rank or not {of.rank, shard.rank} <= {*of.ranks}:
        raise ProtocolError(f"rank {shard.rank} is not added into the parity of rank {of.rank} in the set {of.ranks}")
    return ShardId(shard.job, shard.attempt, shard.step, of.rank, is_parity=True)
